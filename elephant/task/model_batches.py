"""Rows of Arrow columns as batches for a model: the same checks, functions and shapes as in training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import cloudpickle

from elephant.cluster.script_modules import sent_by_value
from elephant.data.ragged import RaggedArray, Values
from elephant.data.schema import DataSchema
from elephant.data.shard import Shard
from elephant.data.to_numpy import refuse_bad_weights, refuse_unknown_classes, to_values
from elephant.errors import ConfigurationError

if TYPE_CHECKING:
    from elephant.rank.input.preprocessing import Preprocessing
    from elephant.rank.input.tensors import Tensors
    from elephant.rank.predictor import Predictor

# Looked at before the model is there.
_FIRST_ROWS = 32
# Rows of a batch for a user's function, whose rows may be larger than what it makes of them.
ROWS_OF_FUNCTION = 1024

RowShapes = dict[str, tuple[int, ...]]


def pickled(
    value: Any, title: str, advice: str = "Do not keep a SparkSession, a lock, a file or a socket in it."
) -> bytes:
    """Returns a value of the user's in the form that travels to executors, with the code that lies beside the script.

    Args:
        value: The value.
        title: The beginning of an error text.
        advice: The end of an error text.

    Raises:
        ConfigurationError: It cannot be pickled.
    """
    with sent_by_value() as has_modules:
        if has_modules:
            # A module that holds what cannot travel, such as a session, may be on the executors all the same.
            with contextlib.suppress(Exception):
                return bytes(cloudpickle.dumps(value))
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ConfigurationError(
            f"{title} cannot be sent to the executors: {type(error).__name__}: {error}. {advice}"
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
        self._schema = schema
        self._batch_size = batch_size
        self._size: int | None = None
        self._function = function
        self._start = start
        self._first_row = 0
        self._row_shapes: RowShapes = {}
        self._preprocessing: Preprocessing | None = None
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
            values = tuple(self._checked(place, column) for place, column in enumerate(part))
            self._first_row += len(part[0])
            self._start()
            yield self._prepared(values, len(part[0]))

    @property
    def model_row_shapes(self) -> RowShapes:
        """Natural shape of a row of each array column that the model gets, by role, as far as rows have told it."""
        return dict(self._row_shapes if self._preprocessing is None else self._preprocessing.row_shapes)

    def _size_for_model(self, columns: Sequence[pa.Array]) -> int:
        for place, column in enumerate(columns):
            self._checked(place, column.slice(0, _FIRST_ROWS))
        predictor = self._start()
        size = self._batch_size or predictor.rows_of_batch
        if self._function is not None and self._batch_size is None:
            size = min(size, ROWS_OF_FUNCTION)
        self._size = min(size, predictor.most_rows or size)
        return self._size

    def _prepared(self, values: tuple[Values, ...], num_rows: int) -> ModelBatch:
        schema = self._schema
        if self._function is not None:
            from elephant.rank.input.preprocessing import PREPARE, generator

            self._preprocessing = self._preprocessing or self._loaded(self._function)
            # The same random numbers for every batch: a row's prediction does not depend on where it lies.
            values = self._preprocessing(values, generator(PREPARE))
            schema = self._preprocessing.schema
        return ModelBatch(schema, values, self._tensors_of(schema), num_rows)

    def _loaded(self, function: PackedFunction) -> Preprocessing:
        from elephant.rank.input.preprocessing import Preprocessing

        made = cloudpickle.loads(function.content)
        return Preprocessing(made, self._schema, function.target_schema, function.names, self._row_shapes)

    def _tensors_of(self, schema: DataSchema) -> Tensors:
        shapes = self.model_row_shapes
        if self._tensors is None or self._tensors[0] != shapes:
            from elephant.rank.input.tensors import Tensors

            self._tensors = (shapes, Tensors(Shard(None, schema, shapes)))
        return self._tensors[1]

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
