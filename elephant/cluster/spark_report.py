"""What Spark's report on a failed job says, without all that is said around it."""

from __future__ import annotations

import itertools
import re

_CAUSE_LINES = 12
# What comes after it over Spark Connect is for those who work on Spark.
_JVM_STACK = "JVM stacktrace:"
_LOST_EXECUTOR = re.compile(r"ExecutorLostFailure \(executor (\S+)")
_FAILED_TASK = re.compile(r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully")


def lost_with(report: str) -> tuple[str, int | None]:
    """Returns the executor and the partition that Spark's report on a failed barrier job says were lost.

    >>> lost_with("barrier task ResultTask(8, 1) finished unsuccessfully.\\nExecutorLostFailure (executor 2 exited")
    ('2', 1)
    >>> lost_with("Job 3 cancelled")
    ('', None)
    """
    executor, task = _LOST_EXECUTOR.search(report), _FAILED_TASK.search(report)
    return ("" if executor is None else executor[1], None if task is None else int(task[1]))


def cause_of(error: Exception | None) -> str:
    """Returns the telling lines of Spark's report: what comes after its preamble and before the JVM's stack."""
    text = str(error).split("finished unsuccessfully.")[-1].split(_JVM_STACK)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = list(itertools.takewhile(lambda line: not line.startswith("at "), lines))
    if len(told) > _CAUSE_LINES:
        # Of a traceback the last line says what it is about.
        told = [told[0], "...", *told[2 - _CAUSE_LINES :]]
    return "\n".join(told)
