"""Rows of Arrow columns as batches for a model, through the preprocessing function that it was trained with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import cloudpickle

from elephant.data.schema import DataSchema
from elephant.data.shard import Shard
from elephant.data.values import Values
from elephant.spark.loaded_models import PackedModel
from elephant.spark.model_rows import ModelRows

if TYPE_CHECKING:
    from elephant.training.tensors import Tensors


@dataclass(frozen=True, repr=False)
class PackedPreprocessing:
    """A preprocessing function as it travels in the closure of a task.

    Args:
        target: What it makes of rows, as far as that is known.
        names: The model's names of its inputs; none when they are unknown.
        content: The pickled function. It is opened when the model is loaded: it may import what that imports.
        model: The model.
    """

    target: DataSchema
    names: tuple[str, ...]
    content: bytes
    model: PackedModel

    @classmethod
    def of(
        cls, function: Callable[..., Any], target: DataSchema, names: Sequence[str], model: PackedModel
    ) -> PackedPreprocessing:
        """Packs a function."""
        return cls(target, tuple(names), cloudpickle.dumps(function), model)


class PreprocessedRows:
    """Cuts the columns of one partition into batches, as `ModelRows` does, and makes of them what the model takes.

    Args:
        raw: What the columns hold, in the order of its ``batch_fields``.
        batch_size: Rows of a batch, at most.
        packed: The function.
    """

    def __init__(self, raw: DataSchema, batch_size: int, packed: PackedPreprocessing) -> None:
        self._rows = ModelRows(raw, batch_size)
        self._raw = raw
        self._packed = packed
        self._function: Callable[..., Any] | None = None
        self.schema = packed.target
        self.row_shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: tuple[DataSchema, Tensors] | None = None

    def batches(self, columns: Sequence[pa.Array]) -> Iterator[tuple[int, tuple[Values, ...]]]:
        """Yields the next rows: how many, and one value per column of the schema's ``batch_fields``.

        Raises:
            DataError: A null, or what the function returned does not fit the model.
            Exception: What the function raises.
        """
        for num_rows, values in self._rows.batches(columns):
            yield num_rows, self._made(values)

    def _made(self, values: Sequence[Values]) -> tuple[Values, ...]:
        if self._function is None:
            self._packed.model.loaded()
            self._function = cloudpickle.loads(self._packed.content)
        from elephant.training.preprocessing import PREPARE, Preprocessing, generator

        packed = self._packed
        # Anew for every batch: of models that take images of any size, those of a batch have one.
        make = Preprocessing(self._function, self._raw, packed.target, packed.names, self._rows.row_shapes)
        made = make(values, generator(PREPARE))
        self.schema, self.row_shapes = make.schema, make.row_shapes
        return made

    def tensors(self) -> Tensors:
        """Returns what makes of the last batch what the model takes."""
        if self._tensors is None or self._tensors[0] != self.schema:
            from elephant.training.tensors import Tensors

            self._tensors = (self.schema, Tensors(Shard(None, self.schema, self.row_shapes)))
        return self._tensors[1]


def rows_for(schema: DataSchema, batch_size: int, packed: PackedPreprocessing | None) -> ModelRows | PreprocessedRows:
    """Returns what cuts a partition's columns into batches for a model.

    Args:
        schema: What the columns hold.
        batch_size: Rows of a batch, at most.
        packed: The model's preprocessing function, or None.
    """
    return ModelRows(schema, batch_size) if packed is None else PreprocessedRows(schema, batch_size, packed)
