"""What a fit prints, for a terminal and for a file."""

import io
import math
import sys
import time

import numpy as np
import pytest

from elephant.data.virtual_shards import ElasticPlan
from elephant.errors import help_url
from elephant.monitor.events import (
    EpochEnded,
    Printed,
    RankEpoch,
    ShardsMoved,
    Started,
    StateSaved,
    StepEnded,
    from_message,
    to_message,
)
from elephant.monitor.listeners import Listeners
from elephant.monitor.log_stream import TokenBucket
from elephant.monitor.progress import Progress, live_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Notebook(io.TextIOBase):
    """A stream that is neither a terminal nor a file."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)


def step(rank, number, *, epoch=0, rows=8, waits=0.0, **logs):
    """Returns the report of a rank that takes steps of half a second, of 16 rows a second."""
    return StepEnded(
        rank=rank, epoch=epoch, step=number, steps=4, logs=logs, rows=rows, rows_per_s=16.0, step_s=0.5, wait_s=waits
    )


def starts(*, together=True):
    for rank in (0, 1):
        yield Started(
            rank=rank, host="h", device="CPU", threads=1, training_rows=9, validation_rows=0,
            first_step=1 if together else None,
        )  # fmt: skip


def events():
    for rank in (1, 0):
        yield Started(rank=rank, host=f"h{rank}", device="CPU", threads=2, training_rows=1000, validation_rows=10)
    yield step(0, 1, loss=2.0)
    yield step(0, 2, loss=1.5)
    yield EpochEnded(rank=0, epoch=0, logs={"loss": 1.25, "accuracy": 0.5})


def shown(stream, verbose):
    progress = Progress(num_workers=2, epochs=3, verbose=verbose, stream=stream)
    for event in events():
        progress.show(event)
    return (stream or sys.stdout).getvalue()


def test_progress_when_written_to_a_file_then_has_plan_and_table_and_no_steps():
    lines = shown(io.StringIO(), 1).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["0", "h0", "CPU", "2", "1,000", "10"],
        ["1", "h1", "CPU", "2", "1,000", "10"],
    ]
    assert lines[3].split() == ["epoch", "seconds", "loss", "accuracy"]
    assert lines[4].split()[0] == "1/3" and lines[4].split()[2:] == ["1.25", "0.5"]
    assert len(lines) == 5


def test_progress_when_a_worker_is_replaced_then_the_plan_is_not_shown_again():
    stream = io.StringIO()
    progress = Progress(num_workers=2, epochs=3, verbose=1, stream=stream)
    for event in (*events(), next(events())):
        progress.show(event)
    assert stream.getvalue() == shown(io.StringIO(), 1)


def test_progress_when_on_a_terminal_then_steps_overwrite_one_line():
    text = shown(Terminal(), "auto")
    assert "\repoch 1/3  step 1/4" in text and "\repoch 1/3  step 2/4" in text


def test_progress_when_in_a_notebook_then_steps_overwrite_one_line_but_not_what_goes_to_a_file(monkeypatch):
    notebook = Notebook()
    monkeypatch.setattr("sys.stdout", notebook)
    monkeypatch.setattr("builtins.get_ipython", lambda: type("Shell", (), {"kernel": object()})(), raising=False)
    shown_here = Progress(num_workers=2, epochs=3, verbose=1)
    for event in events():
        shown_here.show(event)
    assert "\repoch 1/3  step 2/4" in notebook.text
    assert "step" not in shown(io.StringIO(), 1)


def test_progress_when_in_the_console_of_pycharm_then_steps_overwrite_one_line_but_not_in_its_files(monkeypatch):
    console = io.StringIO()
    monkeypatch.setenv("PYCHARM_HOSTED", "1")
    monkeypatch.setattr(sys, "stdout", console)
    assert "step" not in shown(None, 1)
    monkeypatch.setattr(sys, "__stdout__", console)
    assert "\repoch 1/3  step 2/4" in shown(None, 1)


def test_live_line_when_ranks_report_then_metrics_are_their_mean_by_rows_in_the_order_they_have():
    line = live_line([step(0, 2, auc=0.5, loss=2.0, rows=6), step(1, 2, auc=1.0, loss=1.0, rows=2)], [*starts()], 3)
    assert line == "epoch 1/3  step 2/4  32 rows/s  0:05 left  auc ~0.6250  loss ~1.7500"
    # Of one rank it is exact, and what one of two ranks brings in a second says little.
    assert (
        live_line([step(0, 1, loss=2.0)], [*starts()][:1], 2)
        == "epoch 1/2  step 1/4  16 rows/s  0:03 left  loss 2.0000"
    )
    assert live_line([step(0, 1, loss=2.0)], [*starts()], 2) == "epoch 1/2  step 1/4  loss ~2.0000"


def test_live_line_when_a_rank_is_slower_then_names_it():
    # In steps that all take together the others wait for it; at their own pace, it falls behind.
    assert live_line([step(0, 2, waits=0.3), step(1, 2)], [*starts()], 1).endswith("(rank 1 is the slowest)")
    assert "slowest" not in live_line([step(0, 2, waits=0.04), step(1, 2)], [*starts()], 1)
    apart = live_line([step(0, 3, epoch=1, loss=1.0), step(1, 2, loss=3.0)], [*starts(together=False)], 2)
    assert apart == "epoch 1/2  step 2/4  32 rows/s  0:03 left  loss ~3.0000  (rank 1 is the slowest)"


def rank_epoch(rank, epoch, *, wait_s):
    return RankEpoch(
        rank=rank, epoch=epoch, rows=1000, seconds=20.0, training_s=20.0, wait_s=wait_s, input_s=0.0, bytes_sent=7,
        training_wait_s=wait_s,
    )  # fmt: skip


def slow_fit():
    for epoch in (0, 1):
        yield EpochEnded(rank=0, epoch=epoch, logs={"loss": 1.0})
        yield rank_epoch(0, epoch, wait_s=10.0)
        yield rank_epoch(1, epoch, wait_s=2.0)
    yield step(0, 3, epoch=2, loss=1.0)


SLOW = "1.8 times the time per row, 1,000 rows"


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_progress_when_others_wait_for_a_rank_then_says_so_after_the_epoch_and_while_the_next_one_runs(
    monkeypatch, verbose
):
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    progress = Progress(num_workers=2, epochs=3, verbose=verbose, stream=stream, waits_for_all=True)
    for event in (*starts(), *slow_fit()):
        progress.show(event)
    note = f"epoch 2: others wait 40% of their time for rank 1 (h): {SLOW}"
    assert progress.record.notes == [note]
    shown = stream.getvalue()
    assert shown.count(f"    1\n{note}\n") == (verbose > 0)
    assert shown.endswith(f"  loss ~1.0000  (rank 1 on h is the slowest: {SLOW})") == (verbose == 1)


def test_progress_when_virtual_shards_move_then_says_from_where_to_where_and_why():
    stream = io.StringIO()
    progress = Progress(num_workers=3, epochs=3, verbose=1, stream=stream)
    pieces = {"piece_rows": (10, 5, 5, 0, 20, 0), "piece_validation": (0, 0, 0, 1, 0, 0)}
    plan = ElasticPlan((10, 25, 5), (1, 0, 0), 4, **pieces, owners=(0, 1, 2, 0, 1, 0))
    moved = plan.with_owners((0, 2, 2, 1, 0, 2))
    seconds = np.array([1.0, 10.0, 1.0])
    progress.show(ShardsMoved.between(plan, moved, epoch=1, busy_s=seconds, took_s=0.25))
    notes = [
        "epoch 2: 1 of 6 virtual shards move from rank 0 to rank 1: a row takes rank 0 0.2 times as long",
        "epoch 2: 1 of 6 virtual shards move from rank 1 to rank 0: a row takes rank 1 4.0 times as long",
        "epoch 2: 1 of 6 virtual shards move from rank 1 to rank 2: a row takes rank 1 2.0 times as long",
    ]
    assert stream.getvalue() == "\n".join(notes) + "\n" and progress.record.notes == notes
    (told,) = progress.record.moves
    assert told.rows == [30, 0, 10] and told.seconds == 0.25
    assert from_message(to_message(told)) == told


def test_progress_when_nobody_waits_for_others_then_names_no_rank():
    stream = Terminal()
    progress = Progress(num_workers=2, epochs=3, verbose=1, stream=stream)
    for event in (*starts(together=False), *slow_fit()):
        progress.show(event)
    assert progress.record.notes == [] and "slowest" not in stream.getvalue()


def test_progress_when_a_rank_reports_after_the_end_of_the_epoch_then_the_line_stays_away():
    stream = Terminal()
    progress = Progress(num_workers=2, epochs=2, verbose=1, stream=stream)
    for event in (step(0, 4), EpochEnded(rank=0, epoch=0, logs={"loss": 1.0}), step(1, 4)):
        progress.show(event)
    assert stream.getvalue().endswith("1\n")
    # A fit that is started again begins before.
    for event in (next(starts()), step(1, 4)):
        progress.show(event)
    assert not stream.getvalue().endswith("1\n")


def test_progress_when_the_line_is_longer_than_the_terminal_then_is_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    progress = Progress(num_workers=1, epochs=2, verbose=1, stream=stream)
    progress.show(step(0, 1, accuracy=0.5, loss=1.0))
    assert len(stream.getvalue().removeprefix("\r")) == 29
    # One that has become narrower is not written beyond its edge either, not even with spaces.
    monkeypatch.setenv("COLUMNS", "20")
    progress.show(step(0, 2, accuracy=0.5, loss=1.0))
    assert [len(line) for line in stream.getvalue().split("\r")] == [0, 29, 19]


def test_progress_when_steps_are_not_wanted_then_leaves_them_out():
    assert "step" not in shown(io.StringIO(), 2)


def test_progress_when_the_loss_is_not_finite_then_warns_of_the_first_such_epoch_also_when_silent():
    progress = Progress(num_workers=1, epochs=4, verbose=0)
    with pytest.warns(UserWarning, match="The loss is nan since epoch 2") as warned:
        for epoch, loss in enumerate([1.0, math.nan, math.nan, math.inf]):
            progress.show(EpochEnded(rank=0, epoch=epoch, logs={"loss": loss}))
    assert len(warned) == 1
    remedy, _, section = str(warned[0].message).partition(". Lower ")[2].partition(" See ")
    assert remedy.startswith("the learning rate, clip gradients") and remedy.endswith("look for rows with NaN.")
    assert section == help_url("nan")


def test_progress_when_silent_then_writes_nothing():
    assert shown(io.StringIO(), 0) == ""


def test_progress_when_a_function_runs_then_shows_no_rows():
    stream = io.StringIO()
    progress = Progress(num_workers=1, epochs=0, verbose=1, stream=stream)
    progress.show(Started(rank=0, host="h0", device="CPU", threads=2, training_rows=0, validation_rows=0))
    assert [line.split() for line in stream.getvalue().splitlines()] == [
        ["rank", "host", "executor", "device", "threads"],
        ["0", "h0", "CPU", "2"],
    ]


def printed(*lines, left_out=0):
    return Printed(rank=1, host="h1", lines=list(lines), left_out=left_out)


def test_output_when_a_worker_prints_then_comes_with_rank_and_host_and_leaves_the_progress_whole():
    stream = Terminal()
    progress = Progress(num_workers=2, epochs=3, verbose=1, stream=stream)
    progress.show(StepEnded(rank=0, epoch=0, step=1, steps=4, logs={}))
    progress.show(printed("one", "two", left_out=7))
    moving = "epoch 1/3  step 1/4"
    assert stream.getvalue() == (
        f"\r{moving}\r{' ' * len(moving)}\r[rank 1, h1] one\n[rank 1, h1] two\n"
        f"[rank 1, h1] (7 lines are left out: it prints more than can be shown)\n{moving}"
    )


def test_output_when_workers_print_more_than_can_be_shown_then_says_how_much_is_left_out():
    stream, clock = io.StringIO(), [0.0]
    bucket = TokenBucket(per_second=50, burst=3, clock=lambda: clock[0])
    progress = Progress(num_workers=2, epochs=3, verbose=2, stream=stream, bucket=bucket)
    progress.show(printed(*"abcdefgh"))
    clock[0] = 0.02
    progress.show(printed("i"))
    assert stream.getvalue().splitlines() == [
        "[rank 1, h1] a",
        "[rank 1, h1] b",
        "[rank 1, h1] c",
        "(5 lines of workers are left out: they print more than can be shown)",
        "[rank 1, h1] i",
    ]


def test_output_when_ranks_print_the_same_then_it_is_shown_once(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    progress = Progress(num_workers=3, epochs=3, verbose=2, stream=stream)
    for rank in (0, 1, 0, 2, 1):
        progress.show(Printed(rank=rank, host="h", lines=["saved", f"rows of {rank}"], left_out=0))
    clock[0] = 3.0
    progress.show(Printed(rank=2, host="h", lines=["saved"], left_out=0))
    shown = [(0, "saved"), (0, "rows of 0"), (1, "rows of 1"), (0, "saved"), (0, "rows of 0"), (2, "rows of 2")]
    shown += [(1, "rows of 1"), (2, "saved")]
    assert stream.getvalue().splitlines() == [f"[rank {rank}, h] {line}" for rank, line in shown]


def test_output_when_silent_then_is_not_shown_nor_asked_for():
    stream = io.StringIO()
    progress = Progress(num_workers=2, epochs=3, verbose=0, stream=stream)
    progress.show(printed("one"))
    assert stream.getvalue() == "" and not progress.shows_output


def test_progress_when_it_cannot_be_shown_then_the_fit_goes_on():
    class Narrow(io.TextIOWrapper):
        pass

    raw = io.BytesIO()
    narrow = Narrow(raw, encoding="ascii")
    progress = Progress(num_workers=2, epochs=3, verbose=1, stream=narrow)
    progress.show(printed("zwölf"))
    assert raw.getvalue() == b"[rank 1, h1] zw?lf\n"
    narrow.close()
    for event in (*events(), printed("one")):
        progress.show(event)
    progress.note("closed")


def test_progress_when_there_is_nothing_to_show_it_on_then_the_fit_goes_on(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    progress = Progress(num_workers=2, epochs=3, verbose=1)
    for event in (*events(), printed("one")):
        progress.show(event)


def test_progress_when_a_fit_has_not_begun_then_says_what_it_waits_for(monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    shown = [Progress(num_workers=2, epochs=2, verbose=1, stream=stream) for stream in (terminal, file)]
    silent = Progress(num_workers=2, epochs=2, verbose=0, stream=(nothing := io.StringIO()))
    now = time.monotonic()
    for seconds, text in ((0, "tasks"), (1, "tasks"), (11, "1 tasks"), (12, "2 tasks"), (13, "imports")):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
        for progress in (*shown, silent):
            progress.awaits(text)
    # Then nothing is waited for, and training begins.
    for progress in (*shown, silent):
        progress.awaits("")
        progress.note("begins")
    # One line that is written over, and in a file one for each thing that takes long.
    lines = [line.rstrip() for line in terminal.getvalue().split("\r") if line.strip()]
    assert lines == [
        "starting, 0 s: tasks", "starting, 1 s: tasks", "starting, 11 s: 1 tasks", "starting, 12 s: 2 tasks",
        "starting, 13 s: imports", "begins",
    ]  # fmt: skip
    assert file.getvalue() == "starting, 11 s: 1 tasks\nstarting, 13 s: imports\nbegins\n"
    assert nothing.getvalue() == ""


LOST = "; nothing of it is kept, because it makes no checkpoints"
SAVED = StateSaved(rank=0, epochs=1, step=2, history={}, facts={}, names=[])


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([], f"stopped{LOST}"),
        ([*starts(), step(0, 3, epoch=1), step(1, 2, epoch=1)], f"stopped in epoch 2 of 3, step 2 of 4{LOST}"),
        ([*starts(), EpochEnded(rank=0, epoch=0, logs={"loss": 1.0})], f"stopped after epoch 1 of 3{LOST}"),
        (
            [*starts(), step(0, 3, epoch=1), SAVED],
            "stopped in epoch 2 of 3, step 3 of 4; its last checkpoint is of epoch 1 and 2 steps: resume=True goes on "
            "from there",
        ),
    ],
)
def test_progress_when_a_fit_is_interrupted_then_says_how_far_it_came_in_a_line_of_its_own(told, words):
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), Progress(num_workers=2, epochs=3, verbose=1, stream=stream) as progress:
        for event in told:
            progress.show(event)
        raise KeyboardInterrupt
    # Nothing is left of the live line.
    assert stream.getvalue().endswith(f"{words}\n")
    assert stream.getvalue().splitlines(keepends=False)[-1].rpartition("\r")[2] == words


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"checkpointPath": None, "resume": False}, LOST),
        (
            {"checkpointPath": "kept", "resume": False},
            LOST.replace("it makes no checkpoints", "its first checkpoint was still to come"),
        ),
        (
            {"checkpointPath": "kept", "resume": True},
            "; it has made no new checkpoint: resume=True goes on from the last one of before, if any",
        ),
    ],
)
def test_progress_when_a_fit_is_interrupted_before_a_checkpoint_then_says_what_there_is_of_it(params, words):
    stream, told = io.StringIO(), Listeners(params=params)
    with pytest.raises(KeyboardInterrupt), Progress(num_workers=2, epochs=3, verbose=1, stream=stream, listeners=told):
        raise KeyboardInterrupt
    assert stream.getvalue() == f"stopped{words}\n"


def test_progress_when_a_fit_is_interrupted_or_fails_then_leaves_no_half_line():
    waiting, failed = Terminal(), Terminal()
    with pytest.raises(KeyboardInterrupt), Progress(num_workers=2, epochs=3, verbose=1, stream=waiting) as progress:
        progress.awaits("tasks start")
        raise KeyboardInterrupt
    assert waiting.getvalue().endswith(f"\rstopped before the first step, after 0 s: tasks start{LOST}\n")
    with pytest.raises(ValueError), Progress(num_workers=2, epochs=3, verbose=1, stream=failed) as progress:
        progress.show(step(0, 1, loss=2.0))
        raise ValueError
    assert failed.getvalue() == "\repoch 1/3  step 1/4  16 rows/s  0:05 left  loss 2.0000\n"
