"""Row sources: DataFrames, RDDs, and files that executors read themselves."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
from packaging.version import Version

from elephant.backends.process_environment import process_environment
from elephant.cluster.compiled_files import compiled_files
from elephant.cluster.session import jvm_context, release
from elephant.cluster.spark_job import RESULT_SCHEMA, InputStreamError, ResultRow, described, result_row
from elephant.cluster.spark_private import arrow_batches, query_execution
from elephant.data.casting import prepared_batch, prepared_batches
from elephant.data.file_sources import Part, PlannedFiles, deal_files, files_in_order, read_ahead
from elephant.data.records import RecordPlan
from elephant.data.schema import DataSchema
from elephant.errors import TrainingError, user_error
from elephant.storage.filesystem import Found, local_folder

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# One row in, at most one row out, partition by partition.
_NARROW = frozenset(
    {"Project", "Filter", "SubqueryAlias", "SerializeFromObject", "MapElements", "MapInArrow", "MapInPandas"}
)
# Spark's estimate of what it knows nothing of is the largest number there is; of a join with such, a larger one.
_NO_ESTIMATE = 1 << 50
_SHUFFLES = frozenset({"Repartition", "RepartitionByExpression"})

# PySpark 4.0 has a profile for mapInArrow, and toArrow.
SINCE_4 = release(pyspark.__version__) >= Version("4")
# What each task runs: record batches of prepared columns come in, ranks and results go out.
TaskFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[ResultRow]]
# The same, as Spark is given it.
ArrowFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def num_partitions(frame: DataFrame) -> int | None:
    """Returns the number of partitions that the frame's tasks will have, or None when only running it would tell.

    A frame that has the right number keeps its partitions as they are; any other is
    repartitioned. To ask a frame behind a shuffle for its RDD would run the shuffle.
    """
    if jvm_context(frame.sparkSession) is None:
        return None
    node = query_execution(frame).optimizedPlan()
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
        estimate = int(str(query_execution(frame).optimizedPlan().stats().sizeInBytes()))
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

    def in_partitions(self, number: int) -> RowSource:
        """Returns these rows where they have so many partitions, and the same rows dealt out anew where not."""
        return self if self.has_partitions(number) else self.repartitioned(number)

    @abstractmethod
    def first_row(self) -> pa.RecordBatch | None:
        """Returns the prepared columns of one row; None when there is no row."""

    def estimated_bytes(self) -> int | None:
        """Returns the rows' bytes, by an estimate that costs nothing; None without one."""
        return None

    @abstractmethod
    def run(self, task: TaskFunction, *, barrier: bool, profile: ResourceProfile | None = None) -> list[Any]:
        """Runs one task per partition, and returns what they yield: items with the keys ``rank`` and ``result``.

        Args:
            barrier: Whether all run at the same time, and can speak to each other.
            profile: What each task takes; None leaves it what the application's tasks take.
        """


class ArrowRows(RowSource):
    """Rows that are tasks of a DataFrame's ``mapInArrow``."""

    @abstractmethod
    def mapped(self, task: TaskFunction) -> tuple[DataFrame, ArrowFunction]:
        """Returns a frame, of which each task has a partition, and the function on what Spark sends of it."""

    def run(self, task: TaskFunction, *, barrier: bool, profile: ResourceProfile | None = None) -> list[Any]:
        """Runs the task on every partition."""
        frame, function = self.mapped(task)
        options: dict[str, Any] = {"barrier": True} if barrier else {}
        if profile is None:
            return frame.mapInArrow(function, RESULT_SCHEMA, **options).collect()
        if SINCE_4:
            return frame.mapInArrow(function, RESULT_SCHEMA, profile=profile, **options).collect()
        # What any RDD of a stage asks for, all of the stage gets.
        results: RDD[Any] = frame.mapInArrow(function, RESULT_SCHEMA, **options).rdd
        return list(results.withResources(profile).collect())


def arrow_schema(columns: StructType) -> pa.Schema:
    """Returns the types in which Spark hands columns on, timestamps with a zone in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    # Later versions ask for the zone.
    has_zone = "timezone" in inspect.signature(to_arrow_schema).parameters
    zone: dict[str, Any] = {"timezone": "UTC"} if has_zone else {}
    return to_arrow_schema(columns, **zone)


@dataclass(eq=False)
class FrameRows(ArrowRows):
    """The rows of a DataFrame, which are cast in the tasks.

    Args:
        frame: The columns of the schema, in its order.
        schema: What they become; None hands them on as they are.
        first: Its first row, where that is known already.
    """

    frame: DataFrame
    schema: DataSchema | None = None
    first: pa.RecordBatch | None = None

    @property
    def session(self) -> SparkSession:
        """The DataFrame's session."""
        return self.frame.sparkSession

    def has_partitions(self, number: int) -> bool:
        """Returns whether the frame has so many partitions."""
        return num_partitions(self.frame) == number

    def repartitioned(self, number: int) -> FrameRows:
        """Returns the frame's rows, dealt out anew."""
        return replace(self, frame=self.frame.repartition(number))

    def first_row(self) -> pa.RecordBatch | None:
        """Returns one row of the frame, which Spark is asked for once."""
        if self.first is None:
            with described(self.session, "first row"):
                try:
                    self.first = self._first()
                except (ValueError, OverflowError):
                    # A date that Python does not have. For Arrow, Spark runs a task on every partition.
                    row: Any = self.frame.limit(1)
                    table = row.toArrow() if SINCE_4 else pa.Table.from_batches(arrow_batches(row))
                    [self.first] = table.combine_chunks().to_batches()
        return None if self.first is None or self.schema is None else prepared_batch(self.first, self.schema)

    def _first(self) -> pa.RecordBatch | None:
        row = self.frame.first()
        if row is None:
            return None
        return pa.RecordBatch.from_pylist([row.asDict(recursive=True)], arrow_schema(self.frame.schema))

    def estimated_bytes(self) -> int | None:
        """Returns Spark's own estimate."""
        return estimated_bytes(self.frame)

    def mapped(self, task: TaskFunction) -> tuple[DataFrame, ArrowFunction]:
        """Returns the frame itself."""
        return self.frame, functools.partial(run_on_stream, task, self.schema)


def run_on_stream(
    task: TaskFunction, schema: DataSchema | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs a task on the rows that Spark sends; the function that ``mapInArrow`` runs."""
    received = _received(batches)
    return itertools.starmap(result_row, task(received if schema is None else prepared_batches(received, schema)))


def _received(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        # Errors of who uses the rows do not come here.
        yield from batches
    except Exception as error:
        raise InputStreamError(f"Spark handed on no more rows ({type(error).__name__}: {error})") from error


class RddRows(RowSource):
    """The records of an RDD.

    Args:
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

    def first_row(self) -> pa.RecordBatch | None:
        """Returns the columns of the first record."""
        return next(self._plan.batches([] if self._first is None else [self._first]), None)

    def run(self, task: TaskFunction, *, barrier: bool, profile: ResourceProfile | None = None) -> list[Any]:
        """Runs the task on every partition of the RDD."""
        tasks, rdd = functools.partial(run_on_records, task, self._plan), self._rdd
        if profile is not None:
            # A copy, or the user's own RDD would have the profile from now on.
            rdd = rdd.mapPartitions(_as_they_are, preservesPartitioning=True).withResources(profile)
        return _results(rdd, tasks, barrier)


class NoRows(RowSource):
    """Partitions without rows, for ranks that are given none.

    They are an RDD's where there can be one: a Python worker that has to import Arrow for it, and a plan of Spark
    SQL, take longer to begin than what runs there.

    Args:
        session: The Spark session.
        number: Of partitions.
    """

    def __init__(self, session: SparkSession, number: int) -> None:
        self._session = session
        self._number = number

    @property
    def session(self) -> SparkSession:
        """The Spark session."""
        return self._session

    def has_partitions(self, number: int) -> bool:
        """Returns whether there are so many."""
        return self._number == number

    def repartitioned(self, number: int) -> NoRows:
        """Returns so many."""
        return NoRows(self._session, number)

    def first_row(self) -> None:
        """Returns None."""

    def run(self, task: TaskFunction, *, barrier: bool, profile: ResourceProfile | None = None) -> list[Any]:
        """Runs the task on every partition."""
        context = jvm_context(self._session)
        if context is None:
            frame = self._session.range(0, self._number, 1, self._number)
            return FrameRows(frame).run(task, barrier=barrier, profile=profile)

        # Inside of this function, because Spark then sends its code along, and this module is not imported there.
        def run_on_nothing(records: Iterable[Any]) -> Iterator[dict[str, Any]]:
            for _ in records:
                """There are none."""
            for rank, result in task(()):
                yield {"rank": rank, "result": result}

        rdd = context.parallelize((), self._number)
        return _results(rdd if profile is None else rdd.withResources(profile), run_on_nothing, barrier)


def _results(rdd: RDD[Any], function: Callable[[Iterable[Any]], Iterator[Any]], barrier: bool) -> list[Any]:
    mapped = rdd.barrier().mapPartitions(function) if barrier else rdd.mapPartitions(function)
    return list(mapped.collect())


def _as_they_are(records: Iterable[Any]) -> Iterable[Any]:
    return records


def run_on_records(task: TaskFunction, plan: RecordPlan, records: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Runs a task on one partition's records; the function that ``mapPartitions`` runs."""
    for rank, result in task(plan.batches(records)):
        yield {"rank": rank, "result": result}


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


def with_marks(training: RDD[Any], validation: RDD[Any]) -> RDD[tuple[Any, bool]]:
    """Returns the records of two RDDs, each with whether it is for validation."""
    parts = (training, False), (validation, True)
    marked, more = (rdd.map(functools.partial(_with_mark, mark)) for rdd, mark in parts)
    return marked.union(more)


def _with_mark(mark: bool, record: Any) -> tuple[Any, bool]:
    return record, mark


def _numbered(number: int, index: int, records: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    for place, record in enumerate(records):
        yield (index + place) % number, record


def _itself(key: int) -> int:
    return key


@dataclass(frozen=True)
class RecordFiles(PlannedFiles):
    """TFRecord files of one data set.

    Args:
        url: Where they are; tells their file system.
        files: The files.
        features: What records hold, by name: the kind of feature, and whether each record has one value of it.
    """

    url: str
    files: tuple[Found, ...]
    features: Mapping[str, tuple[str, bool]]

    def deal(self, num_workers: int, *, seed: int | None) -> list[Part]:
        """Returns the files, or every n-th record of them, of each worker; the seed has no part in it."""
        return list(deal_files([file.size for file in self.files], num_workers))

    def in_order(self, number: int) -> list[Part]:
        """Returns neighboring whole files: a record is found by those before it alone."""
        return list(files_in_order([file.size for file in self.files], number))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def first(self, columns: list[str]) -> pa.RecordBatch | None:
        """Returns some rows, which this very process reads: the driver, which has TensorFlow already."""
        from elephant.rank.input.tfrecord_reader import read_shares

        features = {name: self.features[name] for name in columns}
        batches = read_shares(self.url, [(file, 0, 1) for file in self.files], features)
        return next((batch for batch in batches if batch.num_rows), None)

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yields the records of a part in the order of the files."""
        if not part:
            return
        asked = {
            "url": self.url,
            "shares": [(astuple(self.files[share.file]), share.index, share.count) for share in part],
            "features": {name: self.features[name] for name in columns},
        }
        with tempfile.TemporaryDirectory(prefix="elephant-", dir=local_folder()) as folder:
            yield from _read_in_process(json.dumps(asked).encode(), Path(folder) / "failure")


def _read_in_process(asked: bytes, failure_file: Path) -> Iterator[pa.RecordBatch]:
    # Copies of remote files go where this task's other files are, and with them.
    environment = process_environment(threads=1, devices=[], backend=None, more={"TMPDIR": str(failure_file.parent)})
    environment |= compiled_files(environment)
    command = [sys.executable, "-m", "elephant.rank.input.tfrecord_reader", str(failure_file)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        _send(process.stdin, asked)
        # A stream that is cut short: why, the process has written down.
        with contextlib.suppress(pa.ArrowInvalid, OSError):
            yield from pa.ipc.open_stream(pa.PythonFile(process.stdout, mode="r"))
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if code:
        raise _failure(failure_file, code)


def _send(pipe: Any, asked: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(asked)


def _failure(failure_file: Path, code: int) -> Exception:
    if not failure_file.exists():
        return TrainingError(f"expected the process that reads TFRecord files to end well. Received: exit code {code}.")
    said = json.loads(failure_file.read_text())
    error = user_error(said["kind"], said["message"], said["topic"])
    return error or TrainingError(f"TFRecord files: {said['kind']}: {said['message']}\n{said['traceback']}")


@dataclass(eq=False)
class FileRows(ArrowRows):
    """The rows of files, which the tasks read and cast.

    Args:
        spark: The Spark session.
        files: Where they are.
        schema: What their columns become.
        number: Parts that they are dealt out in.
        seed: What row groups are mixed by; None keeps neighbors together.
        in_order: Whether the parts follow each other as the rows do in the files, and may be fewer for that.
        first: The first row, where that is known already.
    """

    spark: SparkSession
    files: PlannedFiles
    schema: DataSchema
    number: int
    seed: int | None
    in_order: bool = False
    first: pa.RecordBatch | None = None

    @property
    def session(self) -> SparkSession:
        """The Spark session."""
        return self.spark

    def has_partitions(self, number: int) -> bool:
        """Returns whether the files are dealt out in so many parts."""
        return self.number == number

    def repartitioned(self, number: int) -> FileRows:
        """Returns the same files, dealt out in another number of parts."""
        return replace(self, number=number)

    def first_row(self) -> pa.RecordBatch | None:
        """Returns a row that the driver reads itself."""
        if self.first is None:
            batch = self.files.first(self.schema.columns)
            self.first = None if batch is None else batch.slice(0, 1)
        return None if self.first is None else prepared_batch(self.first, self.schema)

    def mapped(self, task: TaskFunction) -> tuple[DataFrame, ArrowFunction]:
        """Returns a frame of numbers: each task reads its part of the files itself."""
        files, number = self.files, self.number
        parts = files.in_order(number) if self.in_order else files.deal(number, seed=self.seed)
        return numbered_parts(self.spark, parts), functools.partial(run_on_part, task, files, self.schema, parts)


def numbered_parts(session: SparkSession, parts: list[Part]) -> DataFrame:
    """Returns a frame of the numbers of parts, a partition each, which tell its tasks what to read."""
    return session.range(0, len(parts), 1, max(len(parts), 1))


def rows_of_parts(
    files: PlannedFiles, parts: list[Part], columns: list[str], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of the parts whose numbers Spark sends.

    The numbers count, and not the task's own: in a union with others it has another one.
    """
    numbers = [number for batch in _received(batches) for number in batch.column(0).to_pylist()]
    yield from read_ahead(batch for number in numbers for batch in files.read(parts[number], columns))


def run_on_part(
    task: TaskFunction, files: PlannedFiles, schema: DataSchema, parts: list[Part], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs a task on the rows that it is to read itself; the function that ``mapInArrow`` runs."""
    rows = prepared_batches(rows_of_parts(files, parts, schema.columns, batches), schema)
    return itertools.starmap(result_row, task(rows))
