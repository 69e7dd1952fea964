"""Which executor of Spark's a process is on."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

_FLAG = "--executor-id"
# The main class of a driver's own Java process, whose threads are the executor where the master is local.
_DRIVER = "org.apache.spark.deploy.SparkSubmit"
DRIVER = "driver"
_MOST_PARENTS = 20


@functools.cache
def executor_id() -> str:
    """Returns Spark's id of the executor above this process: its number, or ``driver`` where the master is local.

    Spark tells its Python workers nothing of it, but says it on the command line of the executor's
    Java process. Empty where that cannot be read, as on systems without ``/proc``.
    """
    process = os.getppid()
    for _ in range(_MOST_PARENTS):
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            status = Path(f"/proc/{process}/stat").read_text(errors="replace")
        except OSError:
            return ""
        known = executor_in([part.decode(errors="replace") for part in command])
        if known:
            return known
        # The name of the program comes before, in brackets, and may hold anything.
        process = int(status.rpartition(")")[2].split()[1])
        if process <= 1:
            return ""
    return ""


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
