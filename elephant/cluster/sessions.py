"""What kind of Spark session there is: one with a JVM of its own in this process, or one without.

A session of Spark Connect has none, and on some shared clusters the JVM is there and
refuses what is asked of it. Whatever needs the JVM asks `jvm_context` for it, and has
another way for None.
"""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

from elephant.errors import ClusterError, UnsupportedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONNECT = "pyspark.sql.connect."
_locked: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def is_remote(session: SparkSession) -> bool:
    """Returns whether a session is one of Spark Connect."""
    return any(kind.__module__.startswith(_CONNECT) for kind in type(session).__mro__)


def require_connect(session: SparkSession) -> None:
    """Raises UnsupportedError where a session is one of Spark Connect, and PySpark is too old to run jobs beside it.

    Args:
        session: The Spark session.
    """
    import pyspark

    # Of threads rather than of numbers: platforms count the versions of their clients otherwise.
    if is_remote(session) and "session" not in inspect.signature(pyspark.InheritableThread.__init__).parameters:
        raise UnsupportedError(
            f"Spark Connect: expected PySpark 4.0 or newer. Received: {pyspark.__version__}, which runs no job beside "
            "the thread that follows it. Use a classic session, or install a newer PySpark on client and server."
        )


def require_running(session: SparkSession) -> None:
    """Raises ClusterError where a classic session was stopped: Spark itself fails a bare assertion then.

    Args:
        session: The Spark session.
    """
    if not is_remote(session) and _is_stopped(session):
        raise ClusterError(
            "expected a running Spark session. Received: one that was stopped. Start another, and read the rows there."
        )


def jvm_context(session: SparkSession) -> Any | None:
    """Returns the session's `pyspark.SparkContext`, or None where its JVM is not to be had."""
    if is_remote(session):
        return None
    if session not in _locked:
        _locked[session] = _is_locked(session)
    return None if _locked[session] else session._sc


def _is_stopped(session: Any) -> bool:
    try:
        return session._sc._jsc is None
    except Exception:
        # Not to be seen where the context is kept from Python.
        return False


def _is_locked(session: Any) -> bool:
    """Returns whether the JVM is kept from Python, as on shared clusters of some platforms."""
    try:
        session._sc._jsc.sc().applicationId()
        session._sc._jvm.org.apache.hadoop.fs.Path("/")
    except Exception:
        # Py4JSecurityException, or an error of the platform's own: none of them is of a kind known here.
        return True
    return False
