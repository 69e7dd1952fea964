"""Where the rows of a run come from: a DataFrame here, and whatever else can hand each task record batches."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark

from elephant.cluster.partitions import estimated_bytes, num_partitions
from elephant.cluster.task import RESULT_SCHEMA, RowsLostError

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

# An argument of mapInArrow since PySpark 4.0.
_HAS_PROFILES = int(pyspark.__version__.split(".")[0]) >= 4
# What each task runs: record batches of prepared columns come in, one row of rank and result goes out.
TaskFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class RowSource(ABC):
    """Rows in partitions, each of which becomes the record batches of one task.

    The batches hold the prepared columns, named by their roles (`elephant.data.schema`).
    """

    @property
    @abstractmethod
    def session(self) -> SparkSession:
        """The Spark session."""

    @abstractmethod
    def has_partitions(self, number: int) -> bool:
        """Returns whether there are so many partitions already, as far as that can be told without running anything."""

    @abstractmethod
    def repartitioned(self, number: int) -> RowSource:
        """Returns the same rows in so many partitions."""

    @abstractmethod
    def first_row(self) -> dict[str, Any] | None:
        """Returns the prepared columns of one row, by role, as Python values; None when there is no row."""

    def estimated_bytes(self) -> int | None:
        """Returns what the rows take, by an estimate that costs nothing; None without one."""
        return None

    @abstractmethod
    def run(self, task: TaskFunction, *, barrier: bool, profile: ResourceProfile | None = None) -> list[Any]:
        """Runs one task per partition, and returns what they yield: items with the keys ``rank`` and ``result``.

        Args:
            task: What each runs.
            barrier: Whether all run at the same time, and can speak to each other.
            profile: What each task takes; None leaves it what the application's tasks take.
        """


class FrameRows(RowSource):
    """The rows of a DataFrame of prepared columns.

    Args:
        frame: The DataFrame.
        first: Its first row, where that is known already.
    """

    def __init__(self, frame: DataFrame, *, first: dict[str, Any] | None = None) -> None:
        self._frame = frame
        self._first = first

    @property
    def session(self) -> SparkSession:
        """The DataFrame's session."""
        return self._frame.sparkSession

    def has_partitions(self, number: int) -> bool:
        """Returns whether the frame has so many partitions."""
        return num_partitions(self._frame) == number

    def repartitioned(self, number: int) -> FrameRows:
        """Returns the frame's rows, dealt out anew."""
        return FrameRows(self._frame.repartition(number), first=self._first)

    def first_row(self) -> dict[str, Any] | None:
        """Returns one row of the frame, which Spark is asked for once."""
        if self._first is None:
            row = self._frame.first()
            self._first = None if row is None else row.asDict()
        return self._first

    def estimated_bytes(self) -> int | None:
        """Returns Spark's own estimate."""
        return estimated_bytes(self._frame)

    def run(self, task: TaskFunction, *, barrier: bool, profile: ResourceProfile | None = None) -> list[Any]:
        """Runs the task on every partition of the frame."""
        return run_on_frame(self._frame, task, barrier=barrier, profile=profile)


def run_on_frame(frame: DataFrame, task: TaskFunction, *, barrier: bool, profile: ResourceProfile | None) -> list[Any]:
    """Runs a task on every partition of a DataFrame; the arguments are those of `RowSource.run`."""
    options: dict[str, Any] = {"barrier": True} if barrier else {}
    on_rows = functools.partial(run_on_stream, task)
    if profile is None:
        return frame.mapInArrow(on_rows, RESULT_SCHEMA, **options).collect()
    if _HAS_PROFILES:
        return frame.mapInArrow(on_rows, RESULT_SCHEMA, profile=profile, **options).collect()
    # What any RDD of a stage asks for, all of the stage gets.
    results: RDD[Any] = frame.mapInArrow(on_rows, RESULT_SCHEMA, **options).rdd
    return list(results.withResources(profile).collect())


def run_on_stream(task: TaskFunction, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs a task on the rows that Spark sends; the function that ``mapInArrow`` runs."""
    return task(_received(batches))


def _received(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        # Errors of who uses the rows do not come here.
        yield from batches
    except Exception as error:
        raise RowsLostError(f"Spark handed on no more rows ({type(error).__name__}: {error})") from error
