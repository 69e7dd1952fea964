"""Record of a fit: what its events say together, also when ranks start again."""

import math

import pytest

from elephant.errors import ProtocolError
from elephant.monitor import events, record
from elephant.monitor.events import (
    EpochEnded,
    Event,
    Finished,
    RankEpoch,
    RankFailure,
    RankGone,
    RankSilent,
    RunNote,
    Started,
    StepEnded,
    WorkersChanged,
    from_message,
    to_message,
)
from elephant.monitor.record import FitRecord, Loss


def started(rank, **more):
    place = {"host": f"h{rank}", "executor": f"e{rank}", "device": "CPU", "threads": 2}
    return Started(rank=rank, **place, training_rows=9, validation_rows=0, **more)


def rank_epoch(rank, epoch, rows=9):
    return RankEpoch(
        rank=rank, epoch=epoch, rows=rows, seconds=2.0, training_s=1.5, wait_s=0.5, input_s=0.0, bytes_sent=7
    )


def step(rank, epoch, number):
    return StepEnded(rank=rank, epoch=epoch, step=number, steps=10, logs={})


def ended(epoch, **logs):
    return EpochEnded(rank=0, epoch=epoch, logs=logs)


def record_of(*told, together=True):
    made = FitRecord(together=together)
    for event in told:
        made.add(event)
    return made


def test_record_when_ranks_that_step_together_start_again_then_what_they_told_before_counts_no_more():
    first = [started(0), started(1), step(0, 1, 4), rank_epoch(0, 0), rank_epoch(1, 0), ended(0, loss=3.0)]
    first += [ended(1, loss=2.0)]
    again = [started(1), started(0), rank_epoch(0, 1, 7), ended(1, loss=1.0), ended(2, loss=0.5)]
    made = record_of(*first, *again)
    assert made.rank_epochs == [rank_epoch(0, 1, 7)] and made.next_steps == {}
    assert made.history == {"loss": [3.0, 1.0, 0.5]} and [epoch.epoch for epoch in made.epochs] == [0, 1, 2]
    # A worker that nobody waits for goes on in the place of one that was lost.
    made = record_of(*first, *again, together=False)
    assert made.rank_epochs == [rank_epoch(0, 0), rank_epoch(1, 0), rank_epoch(0, 1, 7)]
    assert [len(made.attempts[rank]) for rank in (0, 1)] == [2, 2] and made.next_steps == {0: 15}


def test_history_when_workers_tell_of_epochs_in_any_order_then_has_each_once_in_theirs():
    made = record_of(ended(0, loss=3.0), ended(2, loss=1.0), ended(1, loss=9.0), ended(1, loss=2.0), together=False)
    assert made.history == {"loss": [3.0, 2.0, 1.0]}


def test_record_when_an_attempt_had_begun_on_some_ranks_alone_then_has_the_places_of_all():
    made = record_of(started(0), RankGone(rank=1), started(1), started(0))
    assert [place["host"] for place in made.plan] == ["h0", "h1"]
    assert made.plan[1] == {"rank": 1, "host": "h1", "executor": "e1", "device": "CPU", "devices": [], "threads": 2}


def test_history_when_a_fit_was_resumed_or_metrics_are_missing_then_has_holes_where_epochs_are_counted():
    made = record_of(ended(1, loss=2.0), ended(2, loss=math.inf, val_loss=1.0))
    assert made.history == {"loss": [2.0, math.inf], "val_loss": [1.0]}
    assert made.history_by_epoch == {"loss": [None, 2.0, math.inf], "val_loss": [None, None, 1.0]}


@pytest.mark.parametrize(("together", "seconds"), [(True, [2.0, 1.0, 3.0]), (False, [2.0, 9.0, 3.0])])
def test_seconds_when_a_rank_comes_again_then_begin_anew_only_where_the_others_do(together, seconds, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: clock[0])
    made = FitRecord(together=together)
    told = [
        (1.0, started(0)),
        (2.0, started(1)),
        (4.0, ended(0)),
        (12.0, started(1)),
        (13.0, ended(1)),
        (16.0, ended(2)),
    ]
    known = []
    for clock[0], event in told:
        known.append(made.add(event))
    assert [epoch.seconds for epoch in known if isinstance(epoch, EpochEnded)] == seconds
    # Of a log, what was measured where it was written.
    clock[0] = 99.0
    assert made.add(EpochEnded(rank=0, epoch=3, logs={}, seconds=1.5)).seconds == 1.5


def test_steps_when_epochs_end_then_those_that_run_are_known_and_the_step_of_every_rank():
    made = record_of(started(0, first_step=11), started(1, first_step=11), started(2, first_step=11))
    assert made.next_steps == {0: 11, 1: 11, 2: 11}
    for event in (step(0, 1, 10), step(1, 1, 9), ended(1), step(0, 2, 1), step(1, 1, 10)):
        made.add(event)
    assert made.steps == {0: step(0, 2, 1)} and made.next_steps == {0: 22, 1: 21, 2: 11}
    # A log has its steps before all else.
    assert record_of(step(0, 1, 4), started(0, first_step=1)).next_steps == {0: 15}


def test_losses_when_several_say_so_then_each_is_one_until_the_rank_starts_again():
    made = record_of(
        started(1), RankGone(rank=1), RankFailure(rank=1, kind="ValueError", message="later"),
        RankFailure(rank=0, kind="elephant.PeerLostError", message="the other one"), started(1),
        RankFailure(rank=1, kind="MemoryError", message="no room\nat all", host="h7"),
        RankSilent(rank=0, silent_s=60.0),
    )  # fmt: skip
    assert made.losses == [
        Loss(1, "h1", "its connection has ended without a word"),
        Loss(1, "h7", "MemoryError: no room"),
        Loss(0, "", "nothing was heard from it for 60 s"),
    ]
    assert len(made.failures) == 3 and made.silent == RankSilent(rank=0, silent_s=60.0) and made.ended == {0, 1}


def test_ranks_when_a_fit_goes_on_with_fewer_or_more_then_are_those_of_now():
    made = record_of(started(0), started(1), started(2), WorkersChanged(workers=2), started(1))
    assert sorted(made.started) == [1]
    made.add(started(0))
    assert [place["rank"] for place in made.plan] == [0, 1]
    made.add(WorkersChanged(workers=3))
    assert made.plan == [] and made.next_steps == {}


def test_notes_when_ranks_warn_of_the_same_then_are_said_once_and_those_of_the_fit_always():
    note = RunNote(text="said")
    assert record_of(started(0, note="no GPU"), started(1, note="no GPU"), note, note).notes == [
        "no GPU",
        "said",
        "said",
    ]


def test_events_when_a_class_is_declared_then_it_travels_and_a_rank_sends_only_what_ranks_may_send():
    kinds = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)} - {Event}
    refused = []
    for kind in kinds:
        message = to_message(Finished(rank=1))
        message = type(message)(kind=kind.__name__, fields=message.fields, arrays=())
        for recorded in (True, False):
            try:
                from_message(message, recorded=recorded)
            except ProtocolError as error:
                if "expected one of the events" in str(error):
                    refused.append((kind.__name__, recorded))
    made_here = ["Awaited", "CallbacksDone", "Peers", "RankGone", "RankSilent", "RunNote", "ServerCounts", "TaskSilent"]
    made_here += ["WorkersChanged"]
    assert sorted(refused) == [(name, False) for name in made_here]
