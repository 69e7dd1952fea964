"""Failures that the same work may not meet again: lost processes, lost connections; and those that it would."""

from __future__ import annotations

from elephant.cluster.exits import EXITED
from elephant.cluster.process import ENDED, FROZEN
from elephant.cluster.task import SUPERSEDED
from elephant.errors import NetworkError
from elephant.monitor.events import Failed

# Spark's words for an executor, or a Python worker of it, that was lost.
LOST = ("ExecutorLostFailure", "java.net.SocketException", "ExecutorDeadException")


def is_passing(kind: str) -> bool:
    """Returns whether an error is of a kind that another attempt of the same task may not meet.

    Args:
        kind: What `elephant.errors.kind_of` says of it.

    >>> is_passing("elephant.PeerLostError"), is_passing("elephant.DataError"), is_passing("ConnectionResetError")
    (True, False, False)
    """
    return kind in _PASSING


def may_pass(failed: Failed) -> bool:
    """Returns whether the whole fit may not meet a rank's failure again: all that passes, but for exits of its own.

    >>> killed = Failed(rank=0, host="a", kind=ENDED, message="its process was killed (signal 9)")
    >>> left = Failed(rank=0, host="a", kind=ENDED, message="its process exited with 3: something called os._exit")
    >>> may_pass(killed), may_pass(left)
    (True, False)
    """
    return is_passing(failed.kind) and not failed.message.startswith(EXITED)


def is_lost(job_error: BaseException | None) -> bool:
    """Returns whether Spark says of a job that it failed with an executor."""
    return job_error is not None and any(word in str(job_error) for word in LOST)


def _kinds(error: type[NetworkError]) -> set[str]:
    return {f"elephant.{error.__name__}"}.union(*(_kinds(child) for child in error.__subclasses__()))


_PASSING = frozenset({ENDED, FROZEN, *_kinds(NetworkError)} - {SUPERSEDED})
