"""What a fit prints, for a terminal and for a file."""

import io
import math

import pytest

from elephant.monitor.events import EpochEnded, Printed, Started, StepEnded
from elephant.monitor.log_stream import TokenBucket
from elephant.monitor.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def events():
    for rank in (1, 0):
        yield Started(rank=rank, host=f"h{rank}", device="CPU", threads=2, training_rows=1000, validation_rows=10)
    yield StepEnded(rank=0, epoch=0, step=1, steps=4, logs={"loss": 2.0})
    yield StepEnded(rank=0, epoch=0, step=2, steps=4, logs={"loss": 1.5})
    yield EpochEnded(rank=0, epoch=0, logs={"loss": 1.25, "accuracy": 0.5})


def shown(stream, verbose):
    progress = Progress(num_workers=2, epochs=3, verbose=verbose, stream=stream)
    for event in events():
        progress.show(event)
    return stream.getvalue()


def test_progress_when_written_to_a_file_then_has_plan_and_table_and_few_steps():
    lines = shown(io.StringIO(), 1).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["0", "h0", "CPU", "2", "1,000", "10"],
        ["1", "h1", "CPU", "2", "1,000", "10"],
    ]
    assert lines[3] == "epoch 1/3  step 1/4  loss 2.0000 (rank 0)"
    assert lines[4].split() == ["epoch", "seconds", "loss", "accuracy"]
    assert lines[5].split()[0] == "1/3" and lines[5].split()[2:] == ["1.25", "0.5"]
    assert len(lines) == 6


def test_progress_when_a_worker_is_replaced_then_the_plan_is_not_shown_again():
    stream = io.StringIO()
    progress = Progress(num_workers=2, epochs=3, verbose=1, stream=stream)
    for event in (*events(), next(events())):
        progress.show(event)
    assert stream.getvalue() == shown(io.StringIO(), 1)


def test_progress_when_on_a_terminal_then_steps_overwrite_one_line():
    text = shown(Terminal(), 1)
    assert "\repoch 1/3  step 1/4" in text and "\repoch 1/3  step 2/4" in text


def test_progress_when_steps_are_not_wanted_then_leaves_them_out():
    assert "step" not in shown(io.StringIO(), 2)


def test_progress_when_the_loss_is_not_finite_then_warns_of_the_first_such_epoch_also_when_silent():
    progress = Progress(num_workers=1, epochs=4, verbose=0)
    with pytest.warns(UserWarning, match="The loss is nan since epoch 2") as warned:
        for epoch, loss in enumerate([1.0, math.nan, math.nan, math.inf]):
            progress.show(EpochEnded(rank=0, epoch=epoch, logs={"loss": loss}))
    assert len(warned) == 1


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
