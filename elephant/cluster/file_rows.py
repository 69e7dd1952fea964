"""Rows that the workers read from files by themselves: no row goes through Spark's JVM."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from elephant.cluster.sources import RowSource, TaskFunction, run_on_frame
from elephant.data.file_sources import Part, PlannedFiles
from elephant.data.schema import DataSchema

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


class FileRows(RowSource):
    """The rows of files, as prepared columns.

    Args:
        session: The Spark session.
        files: The files, as they were listed.
        schema: What their columns become.
        number: Parts that they are dealt out in.
        seed: What row groups are mixed by; None keeps neighbours together.
        first: The first row, where that is known already.
    """

    def __init__(
        self,
        session: SparkSession,
        files: PlannedFiles,
        schema: DataSchema,
        *,
        number: int,
        seed: int | None,
        first: dict[str, Any] | None = None,
    ) -> None:
        self._session = session
        self._files = files
        self._schema = schema
        self._number = number
        self._seed = seed
        self._first = first

    @property
    def session(self) -> SparkSession:
        """The Spark session."""
        return self._session

    def has_partitions(self, number: int) -> bool:
        """Returns whether the files are dealt out in so many parts."""
        return self._number == number

    def repartitioned(self, number: int) -> FileRows:
        """Returns the same files, dealt out in another number of parts."""
        return FileRows(self._session, self._files, self._schema, number=number, seed=self._seed, first=self._first)

    def first_row(self) -> dict[str, Any] | None:
        """Returns a row that the driver reads itself."""
        if self._first is None:
            batch = self._files.first_prepared(self._schema)
            self._first = None if batch is None else batch.to_pylist()[0]
        return self._first

    def run(self, task: TaskFunction, *, barrier: bool, profile: ResourceProfile | None = None) -> list[Any]:
        """Runs the task on every part."""
        parts = self._files.deal(self._number, seed=self._seed)
        function = functools.partial(run_on_part, task, self._files, self._schema, parts)
        frame = self._session.range(0, self._number, 1, self._number)
        return run_on_frame(frame, function, barrier=barrier, profile=profile)


def run_on_part(
    task: TaskFunction, files: PlannedFiles, schema: DataSchema, parts: list[Part], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs a task on the rows that it is to read itself; the function that ``mapInArrow`` runs.

    Args:
        task: What to run.
        files: The files.
        schema: What their columns become.
        parts: Each partition's part of them.
        batches: What Spark has put into the partition, which only makes it one.
    """
    from pyspark import TaskContext

    for _ in batches:
        pass
    context = TaskContext.get()
    partition = 0 if context is None else int(context.partitionId())
    return task(files.prepared(parts[partition], schema))
