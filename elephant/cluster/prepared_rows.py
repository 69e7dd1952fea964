"""Rows of a DataFrame that are read once and stay on the executors' disks, for the fits that follow.

They lie in Spark's own cache, as they were read, and beside that as a preprocessing function has made them: Spark sends
a task to where its rows are, has those of an executor that is lost read and made again, and lets go of all with the
session.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import StorageLevel

from elephant.cluster.row_source import ArrowFunction, FrameRows, TaskFunction
from elephant.cluster.spark_job import SparkJob, cancellation, cause_of, described
from elephant.data.schema import SCALAR, VALIDATION, DataSchema, Field
from elephant.errors import JobCancelledError, warn_user

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Column of preprocessed rows that tells, in the first row of each partition, what the others hold.
ROW_SCHEMA = "schema"
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Form:
    """The columns and partitions that rows are asked for in.

    Args:
        schema: What the columns become.
        number: Of partitions that the rows are dealt out anew in; None where they are as the user's frame has them.
        preprocessing: Tells the function that has made other rows of them; None of rows as they were read.
    """

    schema: DataSchema | None
    number: int | None = None
    preprocessing: bytes | None = None


@dataclass(frozen=True)
class Fold:
    """One of the parts of a data set that take turns at being for validation.

    Args:
        column: Of the user's frame: each row's fold, as a number from zero.
        number: Of the fold that is for validation; None trains on all rows.
    """

    column: str
    number: int | None = None

    def stored_schema(self, schema: DataSchema) -> DataSchema:
        """Returns the schema of what executors keep for all folds, whose last column is each row's fold."""
        return replace(schema, validation=Field(VALIDATION, (self.column,), "bool", SCALAR))

    def marked(self, frame: DataFrame) -> DataFrame:
        """Returns a frame that executors keep with the indicator of this fold as its last column, or without that."""
        *others, last = frame.columns
        if self.number is None:
            return frame.select(*others)
        return frame.select(*others, (frame[last] == self.number).alias(last))


@dataclass(frozen=True, kw_only=True, eq=False)
class RowFunction:
    """A preprocessing function of the user's, of which executors keep what it has made.

    Args:
        key: Tells what it makes from what others make.
        applied: Returns a frame of what it makes of another one's rows; its last column is `ROW_SCHEMA`, behind the
            column that marks rows where there is one.
    """

    key: bytes
    applied: Callable[[DataFrame], DataFrame]


class RowsOnDisk:
    """Frames of one data set whose rows executors have on their disks, by form; several fits may ask at once.

    Attributes:
        is_released: Whether executors keep nothing any more: each fit reads the rows again then.
    """

    def __init__(self) -> None:
        self.is_released = False
        self._lock = threading.Lock()
        # Not by hash: what nests the columns of a schema may be a dictionary.
        self._frames: list[tuple[Form, DataFrame]] = []
        self._row_schemas: dict[bytes, set[str]] = {}
        self._first_rows: list[tuple[DataSchema | None, pa.RecordBatch | None]] = []

    def of(self, form: Form, frame: DataFrame) -> DataFrame:
        """Returns a frame with the rows of the given one, which are read now where no one has asked for them before.

        Where they cannot be kept, the user is warned, and the frame comes back as it is. All that was kept is released
        then; where a function has failed, or there is no room for what it makes, that alone is not kept.

        Raises:
            JobCancelledError: Somebody cancelled the job that reads them.
        """
        with self._lock:
            on_disk = self._known(form)
            if on_disk is not None:
                return on_disk
            if self.is_released:
                return frame
            try:
                # Whatever ends the job, an interrupt too, leaves nothing behind.
                with contextlib.ExitStack() as undoing:
                    undoing.callback(_let_go, frame)
                    frame.persist(StorageLevel.DISK_ONLY)
                    told = _read(frame, form)
                    undoing.pop_all()
            except JobCancelledError:
                raise
            except Exception as error:
                # What is wrong with the rows, or with the function, a fit says better, which reads them then.
                reason = cause_of(error)
                if form.preprocessing is None:
                    self._let_all_go()
                else:
                    # No other fit tries it.
                    self._frames.append((form, frame))
            else:
                self._frames.append((form, frame))
                if form.preprocessing is not None:
                    self._row_schemas.setdefault(form.preprocessing, set()).update(told)
                return frame
        rows, does = ("rows", "reads") if form.preprocessing is None else ("preprocessed rows", "preprocesses")
        warn_user(f"The {rows} could not be kept on the executors, and each fit {does} them again: {reason}")
        return frame

    def known(self, form: Form) -> DataFrame | None:
        """Returns a frame whose rows were asked for before; None where no one has."""
        with self._lock:
            return self._known(form)

    def _known(self, form: Form) -> DataFrame | None:
        return next((on_disk for known, on_disk in self._frames if known == form), None)

    def row_schemas(self, preprocessing: bytes) -> set[str]:
        """Returns the schemas that partitions have told of what a function has made of their rows: one where all agree.

        Args:
            preprocessing: The function's key.
        """
        with self._lock:
            return set(self._row_schemas.get(preprocessing, ()))

    def first_row(self, rows: FrameRows) -> pa.RecordBatch | None:
        """Returns the first row of some rows, for which Spark is asked once."""
        with self._lock:
            for known, first in self._first_rows:
                if known == rows.schema:
                    return first
            self._first_rows.append((rows.schema, rows.first_row()))
            return self._first_rows[-1][1]

    def release(self) -> bool:
        """Has the executors remove what they keep, and keep no more; returns whether they have kept something."""
        with self._lock:
            return self._let_all_go()

    def _let_all_go(self) -> bool:
        frames, self._frames, self.is_released = self._frames, [], True
        # Spark plans what was made of others anew, where those go first.
        for _, frame in reversed(frames):
            _let_go(frame)
        return bool(frames)


@dataclass(eq=False)
class PreparedRows(FrameRows):
    """The rows of a DataFrame, of which executors keep what was asked for once.

    Args:
        on_disk: What they keep of the data set.
        stored_rows: What they keep, where that is for all folds of the data set; None where it is these rows.
        fold: Makes these rows of those; None without folds.
        function: Makes other rows of these, which are handed on as it has made them; None hands on these.
    """

    on_disk: RowsOnDisk = field(default_factory=RowsOnDisk)
    stored_rows: FrameRows | None = None
    fold: Fold | None = None
    function: RowFunction | None = None

    def in_partitions(self, number: int) -> FrameRows:
        """Returns the rows in so many partitions, as executors keep them."""
        return self._on_disk_in() if self.has_partitions(number) else self.repartitioned(number)

    def repartitioned(self, number: int) -> FrameRows:
        """Returns the rows dealt out anew in so many partitions, as executors keep them."""
        return self._on_disk_in(number)

    def _on_disk_in(self, number: int | None = None) -> FrameRows:
        plain = self.stored_rows or FrameRows(self.frame, self.schema, self.first)
        asked = plain if number is None else plain.repartitioned(number)
        form, schema = Form(schema=plain.schema, number=number), self.schema
        frame = self.on_disk.of(form, asked.frame)
        if self.function is not None:
            form, schema = replace(form, preprocessing=self.function.key), None
            made = self.on_disk.known(form)
            frame = self.on_disk.of(form, self.function.applied(frame)) if made is None else made
            frame = frame.drop(ROW_SCHEMA)
        return FrameRows(frame if self.fold is None else self.fold.marked(frame), schema, self.first)

    def first_row(self) -> pa.RecordBatch | None:
        """Returns one row of the frame, with more columns where executors keep more."""
        rows = FrameRows(self.frame, self.schema, self.first)
        if self.stored_rows is not None and self.fold is not None:
            # One for all folds.
            rows = FrameRows(replace(self.fold, number=0).marked(self.stored_rows.frame), self.stored_rows.schema)
        return self.on_disk.first_row(rows)

    def mapped(self, task: TaskFunction) -> tuple[DataFrame, ArrowFunction]:
        """Returns the frame that executors keep."""
        return self._on_disk_in().mapped(task)


def _read(frame: DataFrame, form: Form) -> set[str]:
    """Has Spark read all rows of a frame that it is to keep; raises what Spark does, or JobCancelledError.

    Returns:
        What the executors say of preprocessed rows.
    """
    session, is_preprocessed = frame.sparkSession, form.preprocessing is not None

    def action() -> list[Any]:
        if not is_preprocessed:
            return [frame.count()]
        told = frame.select(ROW_SCHEMA).where(frame[ROW_SCHEMA].isNotNull())
        return [bytes(row[ROW_SCHEMA]).decode() for row in told.collect()]

    with described(session, f"{'preprocessed ' * is_preprocessed}rows for several fits"):
        job = SparkJob(session, f"elephant-rows-{secrets.token_hex(8)}", action)
        try:
            while job.running:
                job.wait(_LOOK_S)
        except BaseException:
            job.cancel()
            raise
    if job.error is not None:
        raise cancellation(job.error) or job.error
    return set(job.rows) if is_preprocessed else set()


def _let_go(frame: DataFrame) -> None:
    # A session that has ended keeps nothing.
    with contextlib.suppress(Exception):
        frame.unpersist()
