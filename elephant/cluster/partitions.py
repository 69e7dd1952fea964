"""How many partitions a DataFrame has and how large it is, where that can be told without running anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elephant.cluster.sessions import jvm_context

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# One row in, at most one row out, partition by partition.
_NARROW = frozenset(
    {"Project", "Filter", "SubqueryAlias", "SerializeFromObject", "MapElements", "MapInArrow", "MapInPandas"}
)
# Spark's estimate of what it knows nothing of is the largest number there is; of a join with such, a larger one.
_NO_ESTIMATE = 1 << 50
_SHUFFLES = frozenset({"Repartition", "RepartitionByExpression"})


def num_partitions(frame: DataFrame) -> int | None:
    """Returns the number of partitions that the frame's tasks will have, or None when only running it would tell.

    A frame that has the right number keeps its partitions as they are; any other is
    repartitioned. To ask a frame behind a shuffle for its RDD would run the shuffle.
    """
    if jvm_context(frame.sparkSession) is None:
        return None
    node = frame._jdf.queryExecution().optimizedPlan()
    while True:
        name = node.nodeName()
        if name in _SHUFFLES:
            return _explicit_number(node)
        if node.children().isEmpty():
            return int(frame.rdd.getNumPartitions())
        if name not in _NARROW:
            return None
        node = node.children().apply(0)


def estimated_bytes(frame: DataFrame) -> int | None:
    """Returns Spark's estimate of a frame's rows in bytes; None where it has none.

    A join's is the product of both sides, often far too much: it is good for a warning alone.
    """
    if jvm_context(frame.sparkSession) is None:
        return None
    try:
        # A Scala number without a limit, which arrives as text or as an integer.
        estimate = int(str(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))
    except Exception:
        # A source that cannot tell is read all the same; what is wrong with a plan, Spark says of the fit itself.
        return None
    return estimate if estimate < _NO_ESTIMATE else None


def _explicit_number(shuffle: Any) -> int | None:
    """Returns the number the user gave to ``repartition``; None when Spark may choose another."""
    if shuffle.nodeName() == "Repartition":
        return int(shuffle.numPartitions()) if shuffle.shuffle() else None
    number = shuffle.optNumPartitions()
    return int(number.get()) if number.isDefined() else None
