"""``elephant attach``: what it shows of a fit that is told line by line, how it ends, and its exit codes."""

import contextlib
import io
import json
import os
import re
import sys
import time
from types import SimpleNamespace

import pytest

from elephant.cli import attach
from elephant.cli.event_file import find_events
from elephant.cli.main import main
from elephant.monitor import listeners
from elephant.monitor.events import Awaited, EpochEnded, RankEpoch, RunNote, Started, StateSaved, StepEnded
from elephant.monitor.listeners import EventFile, Listeners, saving_model_at

PARAMS = {"epochs": 3, "mode": "synchronous", "checkpointPath": "s3://bucket/kept"}
FACTS = {"model": "Sequential 'digits'", "ranks": 2, "waits_for_all": True}
NOTE = "epoch 2: others wait 40% of their time for rank 1 (h): 1.8 times the time per row, 1,000 rows"

SUMMARY = SimpleNamespace(seconds=61.5, history={"loss": [1.0, 0.5, 0.25]}, statistics={}, before={})
FITTED = SimpleNamespace(summary=SUMMARY)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def started(rank):
    return Started(
        rank=rank, host="h", device="CPU", threads=2, training_rows=1000, validation_rows=10, executor="1", first_step=1
    )


def step(rank, number, epoch=0):
    logs = {"accuracy": 0.5, "loss": 1.0 + rank}
    return StepEnded(
        rank=rank, epoch=epoch, step=number, steps=40, logs=logs, rows=80, rows_per_s=16.0, step_s=0.5, wait_s=0.1
    )


def rank_epoch(rank, epoch, wait_s):
    return RankEpoch(
        rank=rank, epoch=epoch, rows=1000, seconds=20.0, training_s=20.0, wait_s=wait_s, input_s=0.0, bytes_sent=7,
        training_wait_s=wait_s,
    )  # fmt: skip


def ended(epoch):
    return EpochEnded(rank=0, epoch=epoch, logs={"loss": 1.0 / (epoch + 1)}, seconds=20.0)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """A fit whose events go to a file at once."""
    monkeypatch.setattr(listeners, "_MOMENT_S", 0.0)
    path = tmp_path / "20261129T101530-1a2b3c4d.jsonl"
    with Listeners([EventFile(path.write_bytes, FACTS)], PARAMS) as told:
        told.path = path
        yield told


def end(told, error=None):
    """Ends the fit, which ends once more after the test."""
    told.fitted = None if error else FITTED
    told.__exit__(None, error, None)


def test_attach_when_a_fit_goes_on_then_shows_line_by_line_what_its_driver_shows(fit, monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stdout", terminal)

    def tell(*events):
        for event in events:
            fit.show(event)
        before = len(terminal.getvalue())
        assert not watched.take(file.read(watched.offset))
        return terminal.getvalue()[before:]

    file = find_events(str(fit.path))
    with attach.Watched("fits/a") as watched:
        assert tell().startswith("fits/a: Sequential 'digits', begun at ")
        waits = "starting, 7 s: 1 running task starts its worker and reads its rows"
        assert tell(Awaited(text=waits.partition(": ")[2], seconds=7)) == f"\r{waits}"
        shown = tell(Awaited(text="", seconds=0), started(0), started(1))
        assert "training rows" in shown and shown.count("1,000") == 2
        line = "epoch 1/3  step 10/40  32 rows/s  0:55 left  accuracy ~0.5000  loss ~1.5000"
        assert tell(step(0, 11), step(1, 10)) == f"\r{line}"
        # The moment of before has gone from the file, and a moment that is the same is not shown again.
        assert tell() == "" and fit.path.read_text().count("worker_step") == 2
        assert "step 12/40" in tell(step(0, 12), step(1, 12))
        # What the driver has noted of the ranks' seconds comes once.
        for epoch in (0, 1):
            events = [ended(epoch), rank_epoch(0, epoch, 10.0), rank_epoch(1, epoch, 2.0)]
            shown = tell(*events, *([RunNote(text=NOTE)] if epoch else []))
            assert f"{epoch + 1}/3     20.0    {1.0 / (epoch + 1):.4g}".replace(" ", "") in shown.replace(" ", "")
        assert shown.count(NOTE) == 1
        assert tell(RunNote(text=NOTE)).count(NOTE) == 1
        # One line of several words of a sentence: who is waited for, and why.
        assert tell(step(0, 3, epoch=2), step(1, 3, epoch=2)).endswith(
            "(rank 1 on h is the slowest: 1.8 times the time per row, 1,000 rows)"
        )
        # What has been shown is not read again, and a line that is not whole yet not at all.
        with open(fit.path, "ab") as half:
            half.write(b'{"event": "fit_e')
        assert [json.loads(line)["event"] for line in file.read(watched.offset).splitlines()] == ["worker_step"] * 2
        assert not watched.take(file.read(watched.offset))
    assert terminal.getvalue().endswith("\n")


def test_attach_when_a_fit_has_ended_then_says_how_and_where_its_model_is_and_ends_with_its_code(fit, capsys):
    for event in (started(0), started(1), rank_epoch(0, 0, 1.0), rank_epoch(1, 0, 1.0), ended(0)):
        fit.show(event)
    fit.show(StateSaved(rank=0, epochs=1, history={}, facts={}, names=[]))
    end(fit)
    assert main(["attach", str(fit.path.parent)]) == 0
    said = capsys.readouterr().out
    assert "1/3     20.0         1\n" in said
    # In a folder it may be yesterday's.
    assert re.search(
        r"the fit that began at \d{4}-\d\d-\d\d .* UTC has ended well after 61.5 s: 3 epochs, 2 ranks, ", said
    )
    kept = "its checkpoints are in s3://bucket/kept: elephant checkpoints s3://bucket/kept lists them"
    assert said.endswith(f"its model is with the program that has called fit; {kept}\n")
    # As that of an MLflow run.
    with attach.Watched("a", run_id="0a1b") as watched:
        assert watched.take(fit.path.read_bytes()) and watched.end() == 0
    assert (
        f"has called fit; MLflow, where it logs models, has it as runs:/0a1b/model; {kept}\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize("error", [None, OSError("No space left on device")])
def test_attach_when_a_job_saves_the_model_then_waits_for_it_and_says_where_it_is_or_why_not(tmp_path, capsys, error):
    path = tmp_path / "fit.jsonl"
    with contextlib.suppress(OSError), saving_model_at("s3://bucket/model"):
        with Listeners([EventFile(path.write_bytes, FACTS)], PARAMS) as fit:
            for event in (started(0), started(1), ended(0)):
                fit.show(event)
            fit.fitted = FITTED
        with attach.Watched("a") as watched:
            # Trained is not saved.
            assert not watched.take(path.read_bytes())
            assert "ended well, and its job saves the model at s3://bucket/model\n" in capsys.readouterr().out
        if error is not None:
            raise error
    code = main(["attach", str(path)])
    said = capsys.readouterr()
    assert "saves the model" not in said.out
    if error is None:
        assert code == 0 and "\nits model is at s3://bucket/model; " in said.out
    else:
        reason = "This fit has ended well, and its model is not at s3://bucket/model: OSError: No space left on device"
        assert code == 1 and said.err == f"elephant attach: {reason}\n"
    # Fits that follow are of another program.
    with Listeners([EventFile(path.write_bytes, FACTS)], PARAMS):
        pass
    assert "output" not in json.loads(path.read_text().splitlines()[0])


def test_attach_when_a_fit_has_failed_then_ends_with_1_and_its_error(fit, capsys):
    end(fit, RuntimeError("rank 1 was lost"))
    assert main(["attach", str(fit.path).removesuffix(".jsonl")]) == 1
    said = capsys.readouterr().err
    assert said == "elephant attach: This fit has failed: RuntimeError: rank 1 was lost\n"


def test_attach_when_a_fit_tells_no_more_then_says_so_and_ends_at_its_timeout_or_with_ctrl_c(fit, capsys, monkeypatch):
    monkeypatch.setattr(attach, "_POLL_S", 0.01)
    monkeypatch.setattr(attach, "_SILENCE_S", 0.05)
    lines = [{**json.loads(line), "time": 1_790_000_000.0} for line in fit.path.read_text().splitlines()]
    fit.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    began = time.monotonic()
    # However old the last event is by the clock of another host.
    assert main(["attach", str(fit.path), "--timeout", "0.3"]) == 1 and time.monotonic() - began >= 0.3
    shown = capsys.readouterr()
    assert (
        "the last one at 14:13:20 UTC: the fit's driver is gone or busy, or takes long to write. Waiting" in shown.out
    )
    assert "expected the fit to tell more, or its end. Received: nothing for 0 s" in shown.err

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(attach.time, "sleep", interrupt)
    assert main(["attach", str(fit.path)]) == 130
    assert capsys.readouterr().out.endswith(f"left: the fit goes on. elephant attach {fit.path} comes back to it\n")


def test_attach_when_there_are_no_events_then_says_what_was_expected(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("notes\n")
    for run, text in (
        (tmp_path / "none", f"elephant attach: {tmp_path}/none: path: expected a file or a folder. Received: "),
        (
            tmp_path / "notes.txt",
            "expected events of a fit, as eventsPath has them written. Received: b'notes\\n' (JSONDecodeError: ",
        ),
    ):
        assert main(["attach", str(run)]) == 2
        assert text in capsys.readouterr().err


def test_attach_when_nobody_reads_what_it_shows_then_ends_without_a_word(fit, capsys, monkeypatch):
    monkeypatch.setattr(attach, "_POLL_S", 0.01)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["attach", str(fit.path), "--timeout", "5"]) == 1
    assert capsys.readouterr().err == ""


def test_report_when_a_line_is_being_written_then_shows_what_has_come_so_far(fit, capsys):
    fit.show(ended(0))
    with open(fit.path, "ab") as file:
        file.write(b'{"event": "epoch_e')
    assert main(["report", str(fit.path), "--output", str(fit.path.parent)]) == 0
    assert "This fit had not ended at " in fit.path.with_suffix(".html").read_text()
