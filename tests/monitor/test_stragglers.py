"""Ranks that others wait for: when one is named, for which reason, and in how many epochs."""

import json
import random

import pytest

from elephant.monitor.events import EpochEnded, RankEpoch, Started
from elephant.monitor.rank_times import rank_times
from elephant.monitor.stragglers import Straggler, StragglerWatch, stragglers

EPOCH_S = 20.0


def told(rank, epoch=0, *, rows=1000, steps_s=10.0, input_s=0.5, end_s=1.0, epoch_s=EPOCH_S, **more):
    """Returns what a rank tells of an epoch; in the seconds that are left it waits for others, within its steps."""
    wait_s = epoch_s - steps_s - input_s - end_s
    values = {"rows": rows, "seconds": epoch_s, "training_s": epoch_s - end_s, "wait_s": wait_s, "input_s": input_s}
    return RankEpoch(rank=rank, epoch=epoch, bytes_sent=7, **{**values, "training_wait_s": wait_s, **more})


def found(*ranks):
    """Returns the stragglers of an epoch: rank, reason and text of each."""
    times = rank_times([told(rank, **values) for rank, values in enumerate(ranks)], together=True)
    return [(slow.rank, slow.reason.value, slow.text) for slow in stragglers(times)]


USUAL = {}
SLOW = {"steps_s": 18.0}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], []),
        ([SLOW], []),
        ([USUAL] * 4, []),
        ([USUAL, {"steps_s": 12.9}], []),
        ([USUAL, SLOW], [(1, "steps", "1.8 times the time per row, 1,000 rows")]),
        ([USUAL, {"steps_s": 18.0, "rows": 500}], [(1, "steps", "3.6 times the time per row, 500 rows")]),
        ([USUAL, {"steps_s": 18.0, "rows": 1800}], [(1, "rows", "1,800 rows, where others have 1,000")]),
        # Those without rows take steps too.
        ([{"rows": 0}, {"rows": 0}, SLOW], [(2, "rows", "1,000 rows, where others have 0")]),
        ([{"rows": 0}, {"rows": 0}, {"rows": 0, **SLOW}], [(2, "steps", "1.8 times the time of a step, 0 rows")]),
        ([USUAL, {"input_s": 7.0}], [(1, "input", "7.0 s of waiting for its 1,000 rows, others 0.5 s")]),
        ([USUAL, {"end_s": 8.0}], [(1, "epoch_end", "8.0 s of validation and callbacks, others 1.0 s, 1,000 rows")]),
        # More rows that take no longer are no reason.
        (
            [USUAL, {"rows": 3000, "end_s": 8.0}],
            [(1, "epoch_end", "8.0 s of validation and callbacks, others 1.0 s, 3,000 rows")],
        ),
        ([{"steps_s": 15.0}, USUAL, SLOW, USUAL], [(2, "steps", "1.8 times the time per row, 1,000 rows"),
                                                 (0, "steps", "1.5 times the time per row, 1,000 rows")]),
        # One that is faster than all others makes none of them slow; one of three does.
        ([USUAL, SLOW, SLOW, SLOW], []),
        ([USUAL, SLOW, SLOW], [(2, "steps", "1.8 times the time per row, 1,000 rows"),
                              (1, "steps", "1.8 times the time per row, 1,000 rows")]),
        # Where exchanging takes the time, computing three times as long keeps nobody waiting.
        ([{"steps_s": 1.0}, {"steps_s": 3.0}], []),
    ],
)  # fmt: skip
def test_stragglers_when_times_are_compared_then_are_those_that_others_wait_for_with_the_largest_reason(
    ranks, expected
):
    assert found(*ranks) == expected


@pytest.mark.parametrize("seed", range(20))
def test_stragglers_when_ranks_differ_by_a_few_percent_then_are_none_but_the_one_that_is_slow(seed):
    chance = random.Random(seed)
    count = chance.randint(2, 64)
    ranks = [{"steps_s": 10.0 * chance.uniform(0.93, 1.07), "rows": chance.randint(950, 1050)} for _ in range(count)]
    assert found(*ranks) == []
    slow = chance.randrange(count)
    ranks[slow]["steps_s"] = 16.0
    assert [(rank, reason) for rank, reason, _ in found(*ranks)] == [(slow, "steps")]


def test_straggler_when_compared_with_another_rank_then_tells_how_much_of_the_time_and_how_much_slower():
    (slow,) = stragglers(rank_times([told(0), told(1, **SLOW)], together=True))
    assert slow.waiting == pytest.approx(8.0 / EPOCH_S) and slow.factor == pytest.approx(19.5 / 11.5)
    # Files of events may be older than what is told of waiting until the last step.
    old = [told(rank, training_wait_s=None, steps_s=steps_s) for rank, steps_s in enumerate((10.0, 18.0))]
    (slow,) = stragglers(rank_times(old, together=True))
    assert slow.reason.value == "steps"
    # A rank may do nothing at all.
    nothing = {"rank": 0, "rows": 0, "compute_s": 0.0, "input_s": 0.0, "end_s": 0.0}
    json.dumps(Straggler({**nothing, "compute_s": 4.0}, nothing, 5.0).factor, allow_nan=False)


def started(rank, *, host="", executor="e"):
    return Started(
        rank=rank, host=host or f"h{rank}", executor=f"{executor}{rank}", device="CPU", threads=1, training_rows=1000,
        validation_rows=0, first_step=1,
    )  # fmt: skip


def epoch_of(epoch, *ranks):
    """Returns the events of an epoch of ranks with these values."""
    return [
        *(told(rank, epoch, **values) for rank, values in enumerate(ranks)),
        EpochEnded(rank=0, epoch=epoch, logs={}),
    ]


def watch_of(*events, waits_for_all=True):
    """Returns a watch that has heard of events after the start of two ranks, and what it has said of each."""
    watch = StragglerWatch(waits_for_all=waits_for_all)
    return watch, [line for event in (started(0), started(1), *events) for line in watch.add(event)]


STEPS_LINE = "others wait 40% of their time for rank 1 (h1, executor e1): 1.8 times the time per row, 1,000 rows"


def test_watch_when_a_rank_holds_up_others_then_names_it_once_for_a_reason_and_again_when_it_is_much_slower():
    slower, input_s = {"steps_s": 170.0, "epoch_s": 200.0}, {"input_s": 7.0}
    epochs = [[USUAL, USUAL], [USUAL, SLOW], [USUAL, SLOW], [USUAL, USUAL], [USUAL, SLOW], [USUAL, input_s]]
    epochs.append([{"epoch_s": 200.0}, slower])
    watch, lines = watch_of(*(event for epoch, ranks in enumerate(epochs) for event in epoch_of(epoch, *ranks)))
    assert lines == [
        f"epoch 2: {STEPS_LINE}",
        "epoch 6: others wait 32% of their time for rank 1 (h1, executor e1): 7.0 s of waiting for its 1,000 rows, "
        "others 0.5 s",
        "epoch 7: others wait 80% of their time for rank 1 (h1, executor e1): 17.0 times the time per row, 1,000 rows",
    ]
    assert [slow.rank for slow in watch.latest_stragglers] == [1]


def short(factor, *values):
    return [
        {name: factor * value for name, value in {"steps_s": 10.0, "epoch_s": 20.0, **one}.items()} for one in values
    ]


@pytest.mark.parametrize(("factor", "epochs"), [(0.24, []), (0.26, [2, 3]), (2.9, [2, 3]), (3.1, [1, 2, 3])])
def test_watch_when_epochs_are_short_then_says_nothing_and_of_the_first_one_unless_it_is_long(factor, epochs):
    watch, said = StragglerWatch(waits_for_all=True), []
    for event in (started(0), started(1)):
        watch.add(event)
    for epoch in range(3):
        for event in epoch_of(epoch, *[{"input_s": 0.0, "end_s": 0.0, **one} for one in short(factor, USUAL, SLOW)]):
            watch.add(event)
        if watch.latest_stragglers:
            said.append(epoch + 1)
    assert said == epochs


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)])
def test_watch_when_ranks_tell_before_or_after_the_end_of_the_epoch_then_speaks_when_all_is_known(order):
    events = epoch_of(1, USUAL, SLOW)
    watch, said = watch_of(*epoch_of(0, USUAL, USUAL))
    assert said == []
    lines = [watch.add(events[number]) for number in order]
    assert lines == [[], [], [f"epoch 2: {STEPS_LINE}"]]


def test_watch_when_workers_go_at_their_own_pace_then_says_nothing():
    events = [event for epoch in range(4) for event in epoch_of(epoch, USUAL, SLOW)]
    watch, lines = watch_of(*events, waits_for_all=False)
    assert lines == [] and watch.latest_stragglers == [] and watch.statistics == {}


def test_watch_when_ranks_start_again_then_judges_epochs_by_the_last_attempt_and_not_the_one_that_traces():
    before = [*epoch_of(0, USUAL, USUAL), *epoch_of(1, USUAL, SLOW), told(0, 2)]
    again = [started(0), started(1, host="other"), *epoch_of(1, USUAL, SLOW), *epoch_of(2, USUAL, SLOW)]
    watch, lines = watch_of(*before, *again)
    assert lines == [f"epoch 2: {STEPS_LINE}", f"epoch 3: {STEPS_LINE.replace('h1', 'other')}"]
    assert watch.statistics == {}
    for event in epoch_of(3, USUAL, SLOW):
        watch.add(event)
    assert [(slow["host"], slow["epochs"]) for slow in watch.statistics["slow_ranks"]] == [("other", [2, 3])]


def test_watch_when_many_ranks_are_slow_then_names_the_slowest_and_counts_the_others():
    watch = StragglerWatch(waits_for_all=True)
    ranks = [*[USUAL] * 5, *({"steps_s": 15.0 + number / 4} for number in range(5))]
    events = [*map(started, range(10)), *epoch_of(0, *[USUAL] * 10), *epoch_of(1, *ranks)]
    lines = [line for event in events for line in watch.add(event)]
    assert [line.partition(" (")[0].rpartition(" ")[2] for line in lines[:3]] == ["9", "8", "7"]
    assert lines[3:] == ["epoch 2: others wait for 2 more ranks"]


@pytest.mark.parametrize(
    ("slow_epochs", "epochs", "expected"),
    [
        ((1, 2), 3, [1, 2]),
        ((1, 2), 4, [1, 2]),
        ((1, 2), 5, None),
        ((1,), 2, None),
        # The first one is not looked at.
        ((0, 1), 2, None),
        ((0, 1, 2), 3, [1, 2]),
        ((), 5, None),
    ],
)
def test_statistics_when_a_rank_is_slow_in_half_of_the_epochs_and_in_two_then_name_it(slow_epochs, epochs, expected):
    events = [event for e in range(epochs) for event in epoch_of(e, USUAL, SLOW if e in slow_epochs else USUAL)]
    watch, _ = watch_of(*events)
    if expected is None:
        assert watch.statistics == {}
        return
    entry = {"rank": 1, "host": "h1", "executor": "e1", "rows": 1000, "epochs": expected, "factor": 1.7}
    assert watch.statistics == {"slow_ranks": [{**entry, "reason": "steps"}]}
    assert json.loads(json.dumps(watch.statistics)) == watch.statistics


def test_statistics_when_reasons_differ_by_epoch_then_have_that_of_all_together_and_the_last_rows():
    ranks = [USUAL, {"input_s": 5.0}, {"steps_s": 18.0, "rows": 1800}, {"input_s": 5.0, "rows": 1700}]
    watch, _ = watch_of(*(event for epoch, slow in enumerate(ranks) for event in epoch_of(epoch, USUAL, slow)))
    (slow,) = watch.statistics["slow_ranks"]
    assert (slow["epochs"], slow["reason"], slow["rows"]) == ([1, 2, 3], "input", 1700)
