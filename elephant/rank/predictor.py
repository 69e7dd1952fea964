"""A model that predicts: one compiled function for batches of any number of rows."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.data.ragged import RaggedArray, Values
from elephant.data.schema import RAGGED, Field, Nest, num_leaves, unpack
from elephant.errors import ConfigurationError
from elephant.modeling.fixed_batch import most_rows
from elephant.rank.input.tensors import Tensors

# Rows of a batch: as a rule; and at least, and at most, by the bytes of what the widest layer gives for them. Rows of a
# few bytes are computed in a fraction of what a call takes.
_ROWS = 1024
_LEAST_ROWS, _MOST_BYTES = 32, 256 << 20
_MOST_ROWS, _USUAL_BYTES = 8192, 16 << 20
_ELEMENT_BYTES = 4


class Predictor:
    """Puts batches through a model."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self._functions: dict[Any, Callable[..., Any]] = {}

    @functools.cached_property
    def most_rows(self) -> int | None:
        """Rows that the model takes at a time, where it says how many; None where it takes any."""
        return most_rows(self.model)

    @functools.cached_property
    def rows_of_batch(self) -> int:
        """Rows that the model computes quickly at a time, and in bounded memory, as far as its layers tell."""
        row_bytes = _most_bytes(self.model)
        if row_bytes is None:
            return _ROWS
        return max(min(_USUAL_BYTES // row_bytes, _MOST_ROWS), min(_MOST_BYTES // row_bytes, _ROWS), _LEAST_ROWS)

    @functools.cached_property
    def test_function(self) -> Callable[[Any], Any] | None:
        """Adds a batch to what the model's metrics hold; None where ``test_on_batch`` is all that there is."""
        return current().test_function(self.model)

    def outputs(self, tensors: Tensors, fields: Sequence[Field], values: Sequence[Values], nest: Nest) -> list[Values]:
        """Returns the model's outputs for a batch: one array (rows, ...) per output.

        Sequences come back in the length that they have in their row, not in that of the batch's longest.

        Raises:
            ConfigurationError: The model gives outputs that are nested in another way.
        """
        arrays = tensors.arrays(values)
        result = self._function(tensors)(*arrays)
        lengths = _sequence_lengths(fields, values)
        outputs = _unpacked(result, nest)
        fixed = self._fixed_lengths(result, nest)
        return [
            output if is_fixed else _of_own_length(output, lengths)
            for output, is_fixed in zip(outputs, fixed, strict=True)
        ]

    def _fixed_lengths(self, result: Any, nest: Nest) -> list[bool]:
        """Returns of each output whether the model gives it one length for all rows, whatever its sequences have."""
        known = getattr(self.model, "outputs", None) or []
        if len(known) != len(keras.tree.flatten(result)):
            return [False] * num_leaves(nest)
        outputs = unpack(nest, keras.tree.pack_sequence_as(result, known))
        return [len(output.shape) > 1 and output.shape[1] is not None for output in outputs]

    def _function(self, tensors: Tensors) -> Callable[..., Any]:
        signature = tensors.signature()
        key = tuple((dtype, tuple(shape)) for dtype, shape in signature)
        if key not in self._functions:
            self._functions[key] = current().predict_function(self.model, tensors)
        return self._functions[key]


def _most_bytes(model: keras.Model) -> int | None:
    """Returns the bytes of the longest row that goes into the model or out of a layer; None where one is unknown."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    # Most elements of sparse tensors take no memory.
    shapes = [tensor.shape[1:] for tensor in (*inputs, *_outputs_of(model)) if not tensor.sparse]
    if any(None in shape for shape in shapes):
        return None
    return _ELEMENT_BYTES * max(1, *map(math.prod, shapes))


def _outputs_of(layer: keras.Layer) -> Iterator[keras.KerasTensor]:
    for inner in getattr(layer, "layers", ()):
        yield from _outputs_of(inner)
    # Layers know them that are part of a functional model, once.
    with contextlib.suppress(AttributeError, ValueError):
        yield from (part for part in keras.tree.flatten(layer.output) if isinstance(part, keras.KerasTensor))


def _unpacked(result: Any, nest: Nest) -> list[np.ndarray]:
    try:
        outputs = unpack(nest, result)
    except ValueError as error:
        raise ConfigurationError(f"model: its outputs are not nested as it said: {error}") from error
    if num_leaves(nest) == 1 and isinstance(outputs[0], (dict, list, tuple)):
        raise ConfigurationError(
            f"model: expected one output. Received: {len(outputs[0])}. Build it with keras.Input, so that its outputs "
            "are known before it runs."
        )
    return [np.asarray(keras.ops.convert_to_numpy(output)) for output in outputs]


def _sequence_lengths(fields: Sequence[Field], values: Sequence[Values]) -> np.ndarray | None:
    """Returns the length of each row's sequences, when all inputs that are sequences are as long as each other."""
    found = [
        np.diff(value.offsets)
        for field, value in zip(fields, values, strict=True)
        if field.kind == RAGGED and isinstance(value, RaggedArray)
    ]
    if not found or any(not np.array_equal(found[0], other) for other in found[1:]):
        return None
    return found[0]


def _of_own_length(output: np.ndarray, lengths: np.ndarray | None) -> Values:
    # Batches of empty sequences alone have one element of padding.
    if lengths is None or output.ndim < 3 or output.shape[1] != max(lengths.max(initial=0), 1):
        return output
    kept = np.arange(output.shape[1]) < lengths[:, np.newaxis]
    return RaggedArray(np.concatenate([[0], np.cumsum(lengths)]), (output[kept],))
