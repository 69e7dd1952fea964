"""Rows of Arrow columns as batches for a model: the same checks and the same shapes as in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from elephant.data.columns import refuse_bad_weights, to_values
from elephant.data.schema import DataSchema
from elephant.data.shard import Shard
from elephant.data.values import Values, Variable

if TYPE_CHECKING:
    from elephant.training.tensors import Tensors


class ModelRows:
    """Cuts the columns of one partition into batches.

    Args:
        schema: What the columns hold, in the order of its ``batch_fields``.
        batch_size: Rows of a batch, at most.
    """

    def __init__(self, schema: DataSchema, batch_size: int) -> None:
        self.schema = schema
        self._batch_size = batch_size
        self._first_row = 0
        self._row_shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: tuple[dict[str, tuple[int, ...]], Tensors] | None = None

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Natural shape of a row of each array column, by role, as far as rows have told it."""
        return dict(self._row_shapes)

    def batches(self, columns: Sequence[pa.Array]) -> Iterator[tuple[int, tuple[Values, ...]]]:
        """Yields the next rows of the partition: how many, and one value per column of the schema's ``batch_fields``.

        Raises:
            DataError: A null, or a row that does not fit the model. The message names the column and the row.
        """
        for start in range(0, len(columns[0]), self._batch_size):
            part = [column.slice(start, self._batch_size) for column in columns]
            values = tuple(self._checked(place, column) for place, column in enumerate(part))
            self._first_row += len(part[0])
            yield len(part[0]), values

    def tensors(self) -> Tensors:
        """Returns what makes of batches what the model takes; imports Keras, so load the model before."""
        if self._tensors is None or self._tensors[0] != self._row_shapes:
            from elephant.training.tensors import Tensors

            self._tensors = (self.row_shapes, Tensors(Shard(None, self.schema, self._row_shapes)))
        return self._tensors[1]

    def _checked(self, place: int, column: pa.Array) -> Values:
        field = self.schema.batch_fields[place]
        known = self._row_shapes.get(field.role)
        values, shape = to_values(column, field, first_row=self._first_row, row_shape=known)
        if field.is_array and shape is not None:
            self._row_shapes[field.role] = shape
        if isinstance(values, Variable):
            return values
        if field in self.schema.weights:
            refuse_bad_weights(values, field, self._first_row)
        return values.reshape(len(values), *field.row_shape(shape or ()))
