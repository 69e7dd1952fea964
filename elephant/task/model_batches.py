"""Rows of Arrow columns as batches for a model: the same checks, functions and shapes as in training.

They are predicted on, or kept as a preprocessing function has made them, for several fits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark import cloudpickle

from elephant.cluster.script_modules import sent_by_value
from elephant.cluster.warm_workers import COLD, WarmWorkers
from elephant.data.casting import prepared_batches
from elephant.data.ragged import RaggedArray, Values, take_rows
from elephant.data.schema import DataSchema
from elephant.data.shard import Shard, bytes_of
from elephant.data.to_arrow import raw_bytes, raw_column
from elephant.data.to_numpy import refuse_bad_weights, refuse_unknown_classes, to_values
from elephant.errors import ConfigurationError
from elephant.task.model_cache import compute, environment_of_task, require_backend, task_environment

if TYPE_CHECKING:
    from elephant.rank.input.preprocessing import Preprocessing
    from elephant.rank.input.tensors import Tensors
    from elephant.rank.predictor import Predictor

# Looked at before the model is there.
_FIRST_ROWS = 32
# Rows of a batch for a user's function, whose rows may be larger than what it makes of them.
ROWS_OF_FUNCTION = 1024
# Bytes of the rows that it is given at once, and of those that it has made which are sent on at once.
_CHUNK_BYTES, _SENT_BYTES = 1 << 20, 64 << 20

RowShapes = dict[str, tuple[int, ...]]


def pickled(
    value: Any,
    title: str,
    advice: str = "Keep no SparkSession, lock, file or socket in it: make one where it is used.",
    dumps: Callable[[Any], bytes] = cloudpickle.dumps,
) -> bytes:
    """Returns a value of the user's in the form that travels to executors, with the code that lies beside the script.

    Args:
        value: The value.
        title: The beginning of an error text.
        advice: The end of an error text.
        dumps: Makes bytes of it.

    Raises:
        ConfigurationError: It cannot be pickled.
    """
    with sent_by_value() as has_modules:
        if has_modules:
            # A module that holds what cannot travel, such as a session, may be on the executors all the same.
            with contextlib.suppress(Exception):
                return bytes(dumps(value))
    try:
        return bytes(dumps(value))
    except Exception as error:
        raise ConfigurationError(
            f"{title} cannot be sent to the executors: {type(error).__name__}: {error}. {advice}",
            topic="code-that-cannot-be-sent",
        ) from error


@dataclass(frozen=True, repr=False)
class PackedFunction:
    """A preprocessing function of the user's, as it travels in the closure of a task.

    Args:
        content: The pickled function.
        target_schema: What it is to make of the columns.
        names: The model's names of its inputs; none when they are unknown.
    """

    content: bytes
    target_schema: DataSchema
    names: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], target_schema: DataSchema, names: Sequence[str]) -> PackedFunction:
        """Returns a function in the form that travels; raises ConfigurationError where it cannot."""
        return cls(pickled(function, "preprocessing: the function"), target_schema, tuple(names))


@dataclass(frozen=True)
class ModelBatch:
    """Rows that are ready for a model.

    Args:
        schema: What they hold.
        values: One per column of the schema's ``batch_fields``.
        tensors: Makes of the values what the model takes.
        num_rows: How many rows there are.
    """

    schema: DataSchema
    values: tuple[Values, ...]
    tensors: Tensors
    num_rows: int


class CheckedRows:
    """Values of one partition's columns, checked, and what a function makes of them.

    Args:
        schema: What the columns hold, in the order of its ``batch_fields``.
        function: Makes of the columns what the model takes; None where they are that.
    """

    def __init__(self, schema: DataSchema, function: PackedFunction | None) -> None:
        self._schema = schema
        self._function = function
        self._first_row = 0
        self._row_shapes: RowShapes = {}
        self._preprocessing: Preprocessing | None = None

    @property
    def model_row_shapes(self) -> RowShapes:
        """Natural shape of a row of each array column that the model gets, by role, as far as rows have told it."""
        return dict(self._row_shapes if self._preprocessing is None else self._preprocessing.row_shapes)

    def look_at(self, columns: Sequence[pa.Array]) -> None:
        """Raises DataError where one of the next rows does not fit."""
        for place, column in enumerate(columns):
            self._checked(place, column)

    def values(self, columns: Sequence[pa.Array]) -> tuple[Values, ...]:
        """Returns the values of the next rows, one per column.

        Raises:
            DataError: A null, or a row that does not fit the model. The message names the column and the row.
        """
        values = tuple(self._checked(place, column) for place, column in enumerate(columns))
        self._first_row += len(columns[0])
        return values

    def for_model(self, values: tuple[Values, ...]) -> tuple[DataSchema, tuple[Values, ...]]:
        """Returns the model's input made of some values, and its schema before it."""
        if self._function is None:
            return self._schema, values
        from elephant.rank.input.preprocessing import PREPARE, generator

        self._preprocessing = self._preprocessing or self._loaded(self._function)
        # The same random numbers for every batch: a row's prediction does not depend on where it lies.
        values = self._preprocessing(values, generator(PREPARE))
        return self._preprocessing.schema, values

    def _loaded(self, function: PackedFunction) -> Preprocessing:
        from elephant.rank.input.preprocessing import Preprocessing

        made = cloudpickle.loads(function.content)
        return Preprocessing(made, self._schema, function.target_schema, function.names, self._row_shapes)

    def _checked(self, place: int, column: pa.Array) -> Values:
        field = self._schema.batch_fields[place]
        known = self._row_shapes.get(field.role)
        values, shape = to_values(column, field, first_row=self._first_row, row_shape=known)
        if field.is_array and shape is not None:
            self._row_shapes[field.role] = shape
        refuse_unknown_classes(values, field, self._first_row)
        if field in self._schema.weights:
            refuse_bad_weights(values, field.title, self._first_row)
        if isinstance(values, RaggedArray):
            return values
        return values.reshape(len(values), *field.row_shape(shape or ()))


class ModelRows:
    """Cuts the columns of one partition into batches.

    Args:
        schema: What the columns hold, in the order of its ``batch_fields``.
        batch_size: Rows of a batch, at most; None asks the model.
        function: Makes of the columns what the model takes; None where they are that.
        start: Returns the model, which imports Keras the first time: rows that do not fit are told of before.
    """

    def __init__(
        self,
        schema: DataSchema,
        batch_size: int | None,
        function: PackedFunction | None,
        start: Callable[[], Predictor],
    ) -> None:
        self._batch_size = batch_size
        self._size: int | None = None
        self._has_function = function is not None
        self._start = start
        self._rows = CheckedRows(schema, function)
        self._tensors: tuple[RowShapes, Tensors] | None = None

    def batches(self, columns: Sequence[pa.Array]) -> Iterator[ModelBatch]:
        """Yields the next rows of the partition.

        Raises:
            DataError: A null, or a row that does not fit the model. The message names the column and the row.
        """
        if not len(columns[0]):
            return
        size = self._size or self._size_for_model(columns)
        for start in range(0, len(columns[0]), size):
            part = [column.slice(start, size) for column in columns]
            values = self._rows.values(part)
            self._start()
            schema, values = self._rows.for_model(values)
            yield ModelBatch(schema, values, self._tensors_of(schema), len(part[0]))

    @property
    def model_row_shapes(self) -> RowShapes:
        """Natural shape of a row of each array column that the model gets, by role, as far as rows have told it."""
        return self._rows.model_row_shapes

    def _size_for_model(self, columns: Sequence[pa.Array]) -> int:
        self._rows.look_at([column.slice(0, _FIRST_ROWS) for column in columns])
        predictor = self._start()
        size = self._batch_size or predictor.rows_of_batch
        if self._has_function and self._batch_size is None:
            size = min(size, ROWS_OF_FUNCTION)
        self._size = min(size, predictor.most_rows or size)
        return self._size

    def _tensors_of(self, schema: DataSchema) -> Tensors:
        shapes = self.model_row_shapes
        if self._tensors is None or self._tensors[0] != shapes:
            from elephant.rank.input.tensors import Tensors

            self._tensors = (shapes, Tensors(Shard(None, schema, shapes)))
        return self._tensors[1]


@dataclass(frozen=True, kw_only=True, repr=False)
class PreprocessingTask:
    """Work of a Spark task that preprocesses rows once, for several fits.

    Args:
        function: Makes of the columns what the model takes.
        schema: What the columns hold before.
        settings: The pickled settings of Keras that it runs under.
        backend: The Keras backend that it may make use of.
        batch_size: Rows that it is given at once; more of small ones.
        warm: How many processes with Keras may wait on an executor, in one of which it runs.
    """

    function: PackedFunction
    schema: DataSchema
    settings: bytes
    backend: str
    batch_size: int
    warm: WarmWorkers = COLD

    @property
    def names(self) -> list[str]:
        """Names of the columns of what is made, by their roles; one that marks rows stays as it is, behind them."""
        marks = [] if self.schema.validation is None else [self.schema.validation]
        return [field.role for field in (*self.function.target_schema.batch_fields, *marks)]


def preprocessed_batches(
    task: PreprocessingTask, column: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yields the rows that a function makes of one partition's, as raw bytes; ``mapInArrow`` runs it.

    Args:
        column: Name of one more column, which has the schema of what was made in the first row of all.
    """
    chunks = (batch.columns for batch in prepared_batches(batches, task.schema))
    environment = functools.partial(environment_of_task, task.backend)
    function = functools.partial(preprocessed_columns, task)
    # A fit comes next, which needs the memory.
    for columns in compute(function, chunks, environment=environment, warm=task.warm, keeps=False):
        yield pa.RecordBatch.from_arrays(columns, [*task.names, column])


def preprocessed_columns(task: PreprocessingTask, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[list[pa.Array]]:
    """Yields the columns that a function makes of each chunk, as raw bytes; the process that has Keras runs it."""
    from elephant.rank.input.preprocessing import schema_text

    with task_environment(task.backend):
        require_backend(task.backend)
        settings = cloudpickle.loads(task.settings)
    count, told = len(task.schema.batch_fields), b""
    rows = CheckedRows(task.schema, task.function)
    with settings.applied():
        for part in _parts(task, chunks):
            schema, values = rows.for_model(rows.values(part[:count]))
            for columns in _raw_columns(schema, values, part[count:]):
                others = pa.nulls(len(columns[0]), pa.binary())
                if not told:
                    told = schema_text(schema).encode()
                    ends = np.array([0, len(told)])
                    others = pa.concat_arrays([raw_bytes(np.frombuffer(told, np.uint8), ends), others[1:]])
                yield [*columns, others]


def _parts(task: PreprocessingTask, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[list[pa.Array]]:
    """Yields the rows that the function is given at once."""
    for columns in chunks:
        num_rows = len(columns[0])
        small = _CHUNK_BYTES * num_rows // max(sum(column.nbytes for column in columns), 1)
        length = max(min(small, ROWS_OF_FUNCTION), task.batch_size)
        for start in range(0, num_rows, length):
            yield [column.slice(start, length) for column in columns]


def _raw_columns(schema: DataSchema, values: Sequence[Values], beside: Sequence[pa.Array]) -> Iterator[list[pa.Array]]:
    """Yields rows as raw bytes, in pieces that a message holds."""
    made = Shard(None, schema, {})
    num_rows = len(values[0]) // made.items_per_row(schema.batch_fields[0])
    num_bytes = sum(map(bytes_of, values))
    length = -(-num_rows // (num_bytes // _SENT_BYTES + 1))
    for start in range(0, num_rows, max(length, 1)):
        places = np.arange(start, min(start + length, num_rows))
        pieces = (
            values_of if length == num_rows else take_rows(values_of, places, made.items_per_row(field))
            for field, values_of in zip(schema.batch_fields, values, strict=True)
        )
        columns = [raw_column(field, piece) for field, piece in zip(schema.batch_fields, pieces, strict=True)]
        yield [*columns, *(column.slice(start, length) for column in beside)]
