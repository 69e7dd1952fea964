"""Where the rows of a fit come from when they are the records of an RDD."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from elephant.cluster.sources import RowSource, TaskFunction
from elephant.data.records import RecordPlan

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


class RddRows(RowSource):
    """The records of an RDD.

    Args:
        rdd: The RDD.
        plan: Where in a record the prepared columns are found.
        first: Its first record, or None when it has none.
    """

    def __init__(self, rdd: RDD[Any], plan: RecordPlan, first: Any) -> None:
        self._rdd = rdd
        self._plan = plan
        self._first = first

    @property
    def session(self) -> SparkSession:
        """The session of the RDD's context; made when there is none yet, as an RDD needs only the context."""
        return session_of(self._rdd)

    def has_partitions(self, number: int) -> bool:
        """Returns whether the RDD has so many partitions."""
        return bool(self._rdd.getNumPartitions() == number)

    def repartitioned(self, number: int) -> RddRows:
        """Returns the RDD's records, dealt out in turn."""
        return RddRows(dealt(self._rdd, number), self._plan, self._first)

    def first_row(self) -> dict[str, Any] | None:
        """Returns the columns of the first record."""
        for batch in self._plan.batches([] if self._first is None else [self._first]):
            row: dict[str, Any] = batch.to_pylist()[0]
            return row
        return None

    def run(self, task: TaskFunction, *, barrier: bool, profile: ResourceProfile | None = None) -> list[Any]:
        """Runs the task on every partition of the RDD."""
        tasks, rdd = functools.partial(run_on_records, task, self._plan), self._rdd
        if profile is not None:
            # A copy, or the user's own RDD would have the profile from now on.
            rdd = rdd.mapPartitions(_as_they_are, preservesPartitioning=True).withResources(profile)
        mapped = rdd.barrier().mapPartitions(tasks) if barrier else rdd.mapPartitions(tasks)
        return list(mapped.collect())


def _as_they_are(records: Iterable[Any]) -> Iterable[Any]:
    return records


def run_on_records(task: TaskFunction, plan: RecordPlan, records: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Runs a task on one partition's records; the function that ``mapPartitions`` runs."""
    for batch in task(plan.batches(records)):
        yield from batch.to_pylist()


def session_of(rdd: RDD[Any]) -> SparkSession:
    """Returns the Spark session of an RDD's context."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    return active if active is not None and active.sparkContext is rdd.context else SparkSession(rdd.context)


def dealt(rdd: RDD[Any], number: int) -> RDD[Any]:
    """Returns an RDD's records in so many partitions, which are as large as each other within a few records.

    ``RDD.repartition`` deals out pickled groups of ten records, which leaves partitions of small RDDs empty.
    """
    numbered = rdd.mapPartitionsWithIndex(functools.partial(_numbered, number))
    return numbered.partitionBy(number, _itself).values()


def _numbered(number: int, index: int, records: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    for place, record in enumerate(records):
        yield (index + place) % number, record


def _itself(key: int) -> int:
    return key
