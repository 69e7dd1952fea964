"""A batch's columns as what a model takes: arrays, strings, padded sequences, or the parts of sparse tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.data.ragged import RaggedArray, Values, coordinates, dense, padded, strings
from elephant.data.schema import RAGGED, SPARSE, TEXT, DataSchema, Field
from elephant.data.shard import Shard


class Tensors:
    """Turns rows of a shard into what the model is fed.

    Args:
        shard: Tells the shapes of rows.
        class_weight: Weights by class number, from zero on, of which each row gets that of its label, a class number
            or one-hot; None gives it none. What Keras makes of its ``class_weight`` where rows come in arrays.
    """

    def __init__(self, shard: Shard, class_weight: Mapping[int, float] | None = None) -> None:
        self._schema: DataSchema = shard.schema
        self._fields = shard.schema.batch_fields
        self._shapes = [shard.row_shape(field) for field in self._fields]
        self._class_weights: np.ndarray | None = None
        if class_weight is not None:
            self._class_weights = np.array([class_weight[number] for number in range(len(class_weight))], np.float32)

    @property
    def are_fixed(self) -> bool:
        """True if every row takes the same space, so that many batches can be read as one array."""
        return all(field.is_fixed for field in self._fields)

    def arrays(self, values: Sequence[Values]) -> list[np.ndarray]:
        """Returns the arrays from which `assembled` makes the model's input: one per column, three per sparse tensor.

        Args:
            values: One per column of a batch, as `Shard.take` gives them.
        """
        columns = zip(self._fields, self._shapes, values, strict=True)
        arrays = [array for field, shape, value in columns for array in _arrays_of(field, shape, value)]
        if self._class_weights is not None:
            arrays.append(self._class_weights[_classes(np.asarray(values[len(self._schema.inputs)]))])
        return arrays

    def signature(self) -> list[tuple[Any, tuple[int | None, ...]]]:
        """Returns TensorFlow's type, and the shape, of each of the `arrays`; the first dimension are the rows."""
        columns = zip(self._fields, self._shapes, strict=True)
        parts = [part for field, shape in columns for part in _signature(field, shape)]
        return parts if self._class_weights is None else [*parts, ("float32", (None,))]

    def assembled(self, arrays: Sequence[Any]) -> Any:
        """Returns a batch as Keras gives it to a ``train_step``, see `elephant.data.schema.DataSchema.packed`.

        Args:
            arrays: As `arrays` gives them, as numpy arrays or as tensors of TensorFlow.
        """
        remaining = list(arrays)
        batch = self._schema.packed([_assembled(field, remaining) for field in self._fields])
        return batch if self._class_weights is None else (*batch, remaining.pop())

    def of(self, values: Sequence[Values]) -> tuple[Any, Any, Any]:
        """Returns a batch as ``test_on_batch`` takes it: ``x``, ``y`` and ``sample_weight``, None for what is not."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(self.assembled(self.arrays(values)))
        return x, y, weights


def blank_batch(schema: DataSchema, row_shapes: Mapping[str, Sequence[int]]) -> tuple[Any, Any, Any]:
    """Returns a batch of one row of zeros, with the weight one, as ``test_on_batch`` takes it.

    Args:
        row_shapes: Natural shape of a row of each array column, by role.
    """
    shard = Shard(None, schema, row_shapes)
    values = list(shard.zeros(1))
    # A weight of zero would leave some metrics without a result.
    for place in range(len(values) - len(schema.weights), len(values)):
        values[place] = _ones_like(values[place])
    return Tensors(shard).of(values)


def _ones_like(values: Values) -> Values:
    if isinstance(values, RaggedArray):
        return RaggedArray(values.offsets, tuple(np.ones_like(buffer) for buffer in values.buffers))
    return np.ones_like(values)


def _classes(labels: np.ndarray) -> np.ndarray:
    """Returns the class number of each row."""
    if labels.ndim > 1 and labels.shape[-1] > 1:
        return np.argmax(labels, axis=-1)
    return labels.reshape(len(labels)).astype(np.int64)


def _arrays_of(field: Field, shape: tuple[int, ...], value: Values) -> list[np.ndarray]:
    if not isinstance(value, RaggedArray):
        return [value]
    if field.kind == TEXT:
        return [strings(value, shape)]
    if field.kind == RAGGED:
        # A sequence without elements is more than some layers bear.
        return [padded(value, max(int(np.diff(value.offsets).max(initial=0)), 1))]
    if field.sparse_tensor:
        return [coordinates(value), value.buffers[1], np.array([len(value), shape[0]], np.int64)]
    return [dense(value, math.prod(shape)).reshape(len(value), *shape)]


def _signature(field: Field, shape: tuple[int, ...]) -> list[tuple[Any, tuple[int | None, ...]]]:
    if field.kind == TEXT:
        return [("string", (None, *shape))]
    if field.kind == RAGGED:
        return [(field.dtype, (None, None, *shape))]
    if field.kind == SPARSE and field.sparse_tensor:
        return [("int64", (None, 2)), (field.dtype, (None,)), ("int64", (2,))]
    return [(field.dtype, (None, *shape))]


def _assembled(field: Field, remaining: list[Any]) -> Any:
    if not (field.kind == SPARSE and field.sparse_tensor):
        array = remaining.pop(0)
        if field.kind == TEXT and isinstance(array, np.ndarray):
            return keras.ops.convert_to_tensor(array.tolist(), dtype="string")
        return array
    indices, values, shape = remaining.pop(0), remaining.pop(0), remaining.pop(0)
    return current().sparse_tensor(indices, values, shape)
