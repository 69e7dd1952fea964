"""A training process' output is read to its end, whatever it is and wherever it cannot go."""

import os
import subprocess
import sys

import pytest

from elephant.task.process import TAIL_LINES, ProcessOutput


class Kept:
    """Keeps lines."""

    def __init__(self):
        self.lines, self.closed = [], False

    def add(self, line):
        self.lines.append(line)

    def close(self):
        self.closed = True


def output_of(script, lines=None):
    output = ProcessOutput(lines)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=output.descriptor, stderr=subprocess.STDOUT)
    output.begin()
    process.wait(60)
    output.end()
    return output


def test_output_when_a_process_has_ended_then_has_its_last_lines_and_passes_all_on(capfd):
    lines = Kept()
    output = output_of("for i in range(100): print('line', i)\nraise SystemExit('the end')", lines)
    output.close()
    wanted = [*(f"line {number}" for number in range(100)), "the end"]
    assert lines.lines == wanted and lines.closed
    assert output.tail.splitlines() == wanted[-TAIL_LINES:]
    assert capfd.readouterr().err.splitlines() == wanted


def test_output_when_it_is_binary_without_an_end_then_the_process_does_not_wait():
    lines = Kept()
    output = output_of(
        "import os; [os.write(1, os.urandom(1 << 16)) for _ in range(100)]; os.write(1, b'\\nlast')", lines
    )
    output.close()
    assert lines.lines[-1] == "last"


class Closed:
    def write(self, text):
        raise ValueError("I/O operation on closed file.")


@pytest.mark.parametrize("log", [Closed(), None], ids=["closed", "none"])
def test_output_when_the_log_is_closed_then_is_read_all_the_same(monkeypatch, log):
    monkeypatch.setattr(sys, "stderr", log)
    output = output_of("print('x' * 1_000_000); print('end')")
    output.close()
    assert output.tail.splitlines()[-1] == "end"


def test_output_when_a_child_of_the_process_holds_the_pipe_then_does_not_wait_for_it():
    holder = (
        "import subprocess, sys; print('began', flush=True); "
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    )
    output = output_of(holder)
    output.close()
    began, child = output.tail.split()
    os.kill(int(child), 9)
    assert began == "began"


def test_output_when_no_process_was_started_then_closes_its_pipe():
    before = len(os.listdir("/proc/self/fd"))
    output = ProcessOutput(None)
    output.close()
    assert len(os.listdir("/proc/self/fd")) == before
