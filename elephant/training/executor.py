"""Which executor of Spark's a process is on."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_FLAG = "--executor-id"
# The main class of a driver's own Java process, whose threads are the executor where the master is local.
_DRIVER = "org.apache.spark.deploy.SparkSubmit"
DRIVER = "driver"
# For processes that are no descendants of the executor, because a fork server of it has made them.
EXECUTOR_VARIABLE = "ELEPHANT_EXECUTOR_ID"
# The process of the Spark task that a process works for, and for how many seconds one that is stopped is waited for.
TASK_VARIABLE = "ELEPHANT_TASK_PROCESS"
_MOST_PARENTS = 20


@functools.cache
def executor_id() -> str:
    """Returns Spark's id of the executor that this process works for: its number, or ``driver`` in a local master.

    Spark tells its Python workers nothing of it, but says it on the command line of the executor's
    Java process. Empty where that cannot be read, as on systems without ``/proc``.
    """
    if EXECUTOR_VARIABLE in os.environ:
        return os.environ[EXECUTOR_VARIABLE]
    found = executor_above(os.getpid())
    return "" if found is None else found[1]


def executor_above(process: int) -> tuple[int, str] | None:
    """Returns the process id of the executor's Java process above a process, and Spark's id of that executor.

    Args:
        process: Id of a process of this machine.
    """
    for parent in parents_of(process):
        try:
            command = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        known = executor_in([part.decode(errors="replace") for part in command])
        if known:
            return parent, known
    return None


def parents_of(process: int) -> Iterator[int]:
    """Yields the ids of a process' parent, of that one's parent, and so on, as far as they can be read."""
    for _ in range(_MOST_PARENTS):
        try:
            process = int(_status(process)[1])
        except (OSError, ValueError):
            return
        if process <= 1:
            return
        yield process


def process_start(process: int) -> int:
    """Returns when a process has started, in ticks since the system has: with its id, it names a process for good.

    Raises:
        OSError: There is no such process.
    """
    return int(_status(process)[19])


def is_stopped(process: int) -> bool:
    """Returns whether a process is stopped, as by SIGSTOP; no where that cannot be read."""
    try:
        return _status(process)[0] == "T"
    except OSError:
        return False


def _status(process: int) -> list[str]:
    # The name of the program comes before, in brackets, and may hold anything.
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()


def executor_in(command: Sequence[str]) -> str:
    """Returns the executor's id that a command line says, or nothing.

    >>> executor_in(["java", "-cp", "x", "org.apache.spark.executor.Backend", "--executor-id", "7", "--cores", "1"])
    '7'
    >>> executor_in(["java", "org.apache.spark.deploy.SparkSubmit", "pyspark-shell"]), executor_in(["bash"])
    ('driver', '')
    """
    for flag, value in zip(command, command[1:], strict=False):
        if flag == _FLAG:
            return value
    return DRIVER if _DRIVER in command else ""
