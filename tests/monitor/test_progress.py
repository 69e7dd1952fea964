"""What a fit prints, for a terminal and for a file."""

import io

from elephant.monitor.events import EpochEnded, Started, StepEnded
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


def test_progress_when_silent_then_writes_nothing():
    assert shown(io.StringIO(), 0) == ""


def test_progress_when_a_function_runs_then_shows_no_rows():
    stream = io.StringIO()
    progress = Progress(num_workers=1, epochs=0, verbose=1, stream=stream)
    progress.show(Started(rank=0, host="h0", device="CPU", threads=2, training_rows=0, validation_rows=0))
    assert [line.split() for line in stream.getvalue().splitlines()] == [
        ["rank", "host", "device", "threads"],
        ["0", "h0", "CPU", "2"],
    ]
