"""Which columns a model's outputs become, and how arrays of outputs become Arrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType

from elephant.data.ragged import Values, Variable

if TYPE_CHECKING:
    from elephant.modeling.model_info import OutputFacts

# What a column holds of its output.
CLASS = "class"  # the most probable class, or whether the probability is above one half
PROBABILITY = "probability"  # one probability per class
NUMBER = "number"  # the output's one value
VALUES = "values"  # all of the output's values, laid flat


@dataclass(frozen=True)
class OutputColumn:
    """One column made of an output.

    Args:
        name: The column's name.
        output: Position of the model's output.
        holds: What the column holds of it: one of the constants above.
        binary: Whether the output is one number, the probability of class 1.
        from_logits: Whether it still needs its softmax or sigmoid.
    """

    name: str
    output: int
    holds: str
    binary: bool = False
    from_logits: bool = False

    @property
    def spark_type(self) -> DataType:
        """The column's type in Spark."""
        if self.holds in (CLASS, NUMBER):
            return DoubleType()
        return ArrayType(DoubleType() if self.holds == PROBABILITY else FloatType())

    @property
    def arrow_type(self) -> pa.DataType:
        """The column's type in Arrow."""
        if self.holds in (CLASS, NUMBER):
            return pa.float64()
        return pa.list_(pa.float64() if self.holds == PROBABILITY else pa.float32())

    def array(self, values: Values) -> pa.Array:
        """Returns the column for a batch's output, float (rows, ...)."""
        if isinstance(values, Variable):
            return _sequences(values, self.arrow_type)
        flat = values.reshape(len(values), -1)
        if self.holds == NUMBER:
            return pa.array(flat[:, 0].astype(np.float64))
        if self.holds == VALUES:
            return _lists(flat, self.arrow_type)
        if self.holds == CLASS:
            chosen = self._is_positive(flat) if self.binary else flat.argmax(axis=1)
            return pa.array(chosen.astype(np.float64))
        return _lists(self._probabilities(flat), self.arrow_type)

    def _is_positive(self, flat: np.ndarray) -> np.ndarray:
        return np.asarray(self._positive(flat)[:, 0] > 0.5)

    def _positive(self, flat: np.ndarray) -> np.ndarray:
        return (_sigmoid(flat) if self.from_logits else flat).astype(np.float64)

    def _probabilities(self, flat: np.ndarray) -> np.ndarray:
        if self.binary:
            positive = self._positive(flat)
            return np.hstack([1.0 - positive, positive])
        return _softmax(flat) if self.from_logits else flat


def transformed_columns(outputs: Sequence[OutputFacts], *, prediction: str, probability: str) -> list[OutputColumn]:
    """Returns the columns that ``transform`` adds: probabilities before predictions, output by output.

    Args:
        outputs: The model's outputs.
        prediction: Name of the column of predictions; with several outputs each has its own, of this name, an
            underscore and its own name.
        probability: The same for the probabilities of classifiers.
    """
    columns = []
    for place, facts in enumerate(outputs):
        suffix = f"_{facts.name}" if len(outputs) > 1 else ""
        binary = facts.kind == "binary"
        if binary or facts.kind == "classes":
            columns.append(OutputColumn(probability + suffix, place, PROBABILITY, binary, facts.from_logits))
            columns.append(OutputColumn(prediction + suffix, place, CLASS, binary, facts.from_logits))
        else:
            columns.append(OutputColumn(prediction + suffix, place, NUMBER if facts.kind == "value" else VALUES))
    return columns


def raw_columns(outputs: Sequence[OutputFacts]) -> list[OutputColumn]:
    """Returns one column per output, which holds it as it is."""
    return [
        OutputColumn(facts.name, place, NUMBER if facts.shape is not None and facts.shape in ((), (1,)) else VALUES)
        for place, facts in enumerate(outputs)
    ]


def _lists(matrix: np.ndarray, kind: pa.DataType) -> pa.Array:
    offsets = np.arange(len(matrix) + 1, dtype=np.int32) * matrix.shape[1]
    return _list_array(offsets, matrix, kind)


def _sequences(values: Variable, kind: pa.DataType) -> pa.Array:
    elements = values.buffers[0].reshape(len(values.buffers[0]), -1)
    return _list_array((values.offsets * elements.shape[1]).astype(np.int32), elements, kind)


def _list_array(offsets: np.ndarray, elements: np.ndarray, kind: pa.DataType) -> pa.Array:
    numbers = np.ascontiguousarray(elements).reshape(-1).astype(kind.value_type.to_pandas_dtype(), copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(numbers))


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))
