"""Users' records, such as (x, y) pairs of arrays, as record batches of prepared columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from elephant.data.leaves import as_array, column_of, size_of
from elephant.data.nest import Nest, unpack
from elephant.data.schema import RAGGED, TEXT, DataSchema, Field
from elephant.errors import DataError

# Of the records that become one batch: memory is bounded however large a record is.
_BATCH_BYTES = 8 << 20
_BATCH_RECORDS = 8192


@dataclass(frozen=True, kw_only=True)
class RecordPlan:
    """Where in a record each prepared column is found. Pickles, and so travels to the workers.

    Args:
        schema: What the columns hold.
        nest: The structure of a record, with the position of a column in place of each part;
            parts at positions beyond the last column are left out.
        shapes: Shape of each column's part in a record; of a ragged one that of an element of the sequence.
        cut: Where the part at position 0 is one vector that holds those of several inputs one after the
            other, the widths of these; else None.

    >>> from elephant.data.schema import FEATURES, LABEL, SCALAR, Field
    >>> schema = DataSchema((Field(FEATURES, ("x",), "float32", shape=(2,)),), (Field(LABEL, ("y",), "int64", SCALAR),))
    >>> plan = RecordPlan(schema=schema, nest=(0, 1), shapes=((2,), ()))
    >>> [batch.to_pydict() for batch in plan.batches([([1.0, 2.0], 0), ([3.0, 4.0], 1)])]
    [{'features': [[1.0, 2.0], [3.0, 4.0]], 'label': [0, 1]}]
    """

    schema: DataSchema
    nest: Nest
    shapes: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...] | None = None

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Natural shape of a row of each array column in the batches, by role, as `elephant.data.columns` gives it."""
        fields = zip(self.schema, self.shapes, strict=False)
        return {field.role: _flat(shape, field) for field, shape in fields if field.is_array}

    def batches(self, records: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Yields the records' columns, some megabytes at a time.

        Raises:
            DataError: A record is not like the first one; it is named by its position.
        """
        first = 0
        for rows in self._chunks(records):
            yield self._batch(rows, first)
            first += len(rows)

    def _chunks(self, records: Iterable[Any]) -> Iterator[list[list[Any]]]:
        rows: list[list[Any]] = []
        size = 0
        for number, record in enumerate(records):
            leaves = self._leaves(record, number)
            rows.append(leaves)
            size += sum(map(size_of, leaves))
            if size >= _BATCH_BYTES or len(rows) >= _BATCH_RECORDS:
                yield rows
                rows, size = [], 0
        if rows:
            yield rows

    def _leaves(self, record: Any, number: int) -> list[Any]:
        try:
            leaves = unpack(self.nest, record)
            if self.cut is not None:
                leaves[:1] = cut_vector(leaves[0], self.cut)
        except ValueError as error:
            raise DataError(
                f"record {number} of the partition: {error} All records must have the structure of the first one."
            ) from None
        return leaves

    def _batch(self, rows: list[list[Any]], first: int) -> pa.RecordBatch:
        fields = list(self.schema)
        columns = [
            column_of([row[place] for row in rows], field, self.shapes[place], first)
            for place, field in enumerate(fields)
        ]
        return pa.RecordBatch.from_arrays(columns, [field.role for field in fields])


def _flat(shape: tuple[int, ...], field: Field) -> tuple[int, ...]:
    if not shape and field.kind in (RAGGED, TEXT):
        return ()
    return (math.prod(shape),)


def cut_vector(vector: Any, widths: Sequence[int]) -> list[np.ndarray]:
    """Returns the parts of a vector that holds one after the other; raises ValueError when it is of another length.

    >>> cut_vector([1, 2, 3], (1, 2))
    [array([1]), array([2, 3])]
    """
    flat = as_array(vector).reshape(-1)
    if len(flat) != sum(widths):
        raise ValueError(f"expected {sum(widths)} values, which are those of all inputs. Received: {len(flat)}.")
    return np.split(flat, np.cumsum(widths)[:-1])
