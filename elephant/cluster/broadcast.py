"""Large values for tasks, apart from the function that has a run's token.

PySpark writes a function of more than a MiB (``spark.broadcast.UDFCompressionThreshold``) to files of the driver and of
every executor. What makes it so large, such as a model, goes by a broadcast of its own: the token is in no file.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar, cast

from elephant.cluster.session import jvm_context

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession

T = TypeVar("T")
# Several may be in one function, with what else it has.
_LARGE_BYTES = 1 << 17


def for_tasks(session: SparkSession, value: T, num_bytes: int) -> T | Broadcast[T]:
    """Returns a value for a task's function: a broadcast of it where it is large, or else the value itself.

    Over Spark Connect, and where the JVM is kept from Python, functions go to no file of PySpark's: it is the value.

    Args:
        value: Anything that can be pickled.
        num_bytes: Its size.
    """
    context = jvm_context(session) if num_bytes > _LARGE_BYTES else None
    return value if context is None else context.broadcast(value)


def in_task(value: T | Broadcast[T]) -> T:
    """Returns the value of `for_tasks`.

    >>> in_task(b"small")
    b'small'
    """
    # Where PySpark was not imported, as on one machine without Spark, there is no broadcast.
    kind = getattr(sys.modules.get("pyspark"), "Broadcast", None)
    if kind is None or not isinstance(value, kind):
        return cast(T, value)
    return cast("Broadcast[T]", value).value
