"""A training process ends with its Spark task, however it comes to hear of the end of that."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from elephant.rank.executor import TASK_VARIABLE
from elephant.rank.process_pipe import ABANDONED_EXIT_CODE, framed

WAIT_S = 60
WAITING = """
    import io, os, sys
    from pathlib import Path
    from elephant.rank.__main__ import Parent

    class Reset(io.RawIOBase):
        def read(self, size=-1):
            raise ConnectionResetError("reset by peer")

    class Generated:
        __file__ = "/"

    pipe = os.fdopen(0, "rb")
    {more}
    Parent([Path(sys.argv[1])], pipe).rank_info.result()
"""


def waiting_process(folder, more="", task=None):
    """Starts a process that waits for its place in the run, and stands in for a training process."""
    code = textwrap.dedent(WAITING).format(more=more)
    environment = {**os.environ, TASK_VARIABLE: f"{task or os.getpid()} 60"}
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, env=environment)


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(WAIT_S)
    return process.pid


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ("", b""),
        ("", framed(b"job") + framed(b"{}")[:-1]),
        ("", b"\xff" * 8),
        ("pipe = Reset()", b""),
        ("sys.modules['__autograph_generated_file1'] = Generated", b""),
    ],
    ids=["clean end", "end in a block", "impossible length", "reset", "what cannot be removed"],
)
def test_process_when_reading_from_its_task_ends_in_any_way_then_it_ends_and_leaves_no_file(tmp_path, more, sent):
    folder = tmp_path / "work"
    (folder / "shard").mkdir(parents=True)
    process = waiting_process(folder, more)
    try:
        process.stdin.write(sent)
        process.stdin.close()
        assert process.wait(WAIT_S) == ABANDONED_EXIT_CODE
    finally:
        process.kill()
    assert not Path(folder).exists()


def test_process_when_its_task_is_gone_and_something_else_holds_the_pipe_then_ends(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    process = waiting_process(folder, task=ended_process())
    try:
        assert process.wait(WAIT_S) == ABANDONED_EXIT_CODE
    finally:
        process.kill()
    assert not folder.exists()
