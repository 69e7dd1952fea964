"""One rank's rows on its host's local disk: an Arrow IPC file, written once and memory-mapped.

`ShardWriter` appends the record batches that arrive from Spark as they are.
`Shard` reads rows of the finished file in any order: an epoch costs Spark
nothing, and memory stays bounded by the page cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from elephant.data.columns import refuse_bad_weights, to_numpy
from elephant.data.schema import DataSchema, Field


@dataclass(frozen=True)
class ShardSummary:
    """What a finished shard holds.

    Args:
        num_rows: Rows in all.
        num_validation: Rows that the validation indicator column marks.
        widths: Elements per row of each list column, by role; absent where there was no row.
    """

    num_rows: int
    num_validation: int
    widths: dict[str, int]


class ShardWriter:
    """Writes record batches to one file, and refuses rows that cannot be trained on.

    Args:
        path: The file to create.
        schema: What the batches' columns must hold.
    """

    def __init__(self, path: Path, schema: DataSchema) -> None:
        self._path = path
        self._schema = schema
        self._writer: pa.RecordBatchFileWriter | None = None
        self._num_rows = 0
        self._num_validation = 0
        self._widths: dict[str, int] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends one batch; raises DataError when one of its rows is unusable, OSError when the disk is full."""
        if batch.num_rows == 0:
            return
        for field in self._schema:
            self._check(batch.column(field.role), field)
        if self._writer is None:
            self._writer = pa.ipc.new_file(str(self._path), batch.schema)
        self._writer.write_batch(batch)
        self._num_rows += batch.num_rows

    def _check(self, column: pa.Array, field: Field) -> None:
        values = to_numpy(column, field, first_row=self._num_rows, width=self._widths.get(field.role))
        if field.is_array:
            self._widths[field.role] = values.shape[1]
        if field is self._schema.weight:
            refuse_bad_weights(values, field, self._num_rows)
        if field is self._schema.validation:
            self._num_validation += int(np.count_nonzero(values))

    def finish(self) -> ShardSummary:
        """Completes the file (none is made for no rows) and tells what it holds."""
        self._close()
        return ShardSummary(self._num_rows, self._num_validation, dict(self._widths))

    def _close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


@dataclass(frozen=True)
class Batch:
    """Rows for one step: ``features`` (rows, ...), ``label`` (rows, ...) or None, ``weight`` (rows,) or None."""

    features: np.ndarray
    label: np.ndarray | None
    weight: np.ndarray | None

    def as_tuple(self) -> tuple[np.ndarray, ...]:
        """Returns ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, as Keras takes them."""
        if self.label is None:
            return (self.features,)
        if self.weight is None:
            return (self.features, self.label)
        return (self.features, self.label, self.weight)


class Shard:
    """Random access to the rows of one file, without reading it into memory.

    Args:
        path: A file that `ShardWriter` finished, or None for a rank without rows.
        schema: What its columns hold.
        widths: Elements per row of each list column, by role, as all ranks agreed on them.
    """

    def __init__(self, path: Path | None, schema: DataSchema, widths: dict[str, int]) -> None:
        self._schema = schema
        self._source = None if path is None else pa.memory_map(str(path))
        batches = [] if self._source is None else _read_batches(self._source)
        self._starts = np.cumsum([0] + [batch.num_rows for batch in batches])
        self._chunks = {field.role: _shaped_chunks(batches, field, widths) for field in schema}

    @property
    def num_rows(self) -> int:
        """Rows in the shard."""
        return int(self._starts[-1])

    def validation_rows(self) -> np.ndarray:
        """Returns the positions of the rows that the validation indicator column marks."""
        if self._schema.validation is None or self.num_rows == 0:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(np.concatenate(self._chunks[self._schema.validation.role]))

    def take(self, rows: np.ndarray) -> Batch:
        """Returns copies of the rows at the given positions, in that order."""
        schema = self._schema
        return Batch(
            features=self._gather(schema.features, rows),
            label=None if schema.label is None else self._gather(schema.label, rows),
            weight=None if schema.weight is None else self._gather(schema.weight, rows),
        )

    def zeros(self, num_rows: int) -> Batch:
        """Returns rows of zeros in the shard's shapes: what a rank without rows puts through its model."""
        empty = self.take(np.empty(0, dtype=np.int64))

        def fill(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else np.zeros((num_rows, *array.shape[1:]), array.dtype)

        features = np.zeros((num_rows, *empty.features.shape[1:]), empty.features.dtype)
        return Batch(features=features, label=fill(empty.label), weight=fill(empty.weight))

    def _gather(self, field: Field, rows: np.ndarray) -> np.ndarray:
        chunks = self._chunks[field.role]
        which = np.searchsorted(self._starts, rows, side="right") - 1
        touched = np.unique(which)
        if len(touched) == 1:
            chunk = int(touched[0])
            return chunks[chunk][rows - self._starts[chunk]]
        gathered = np.empty((len(rows), *chunks[0].shape[1:]), chunks[0].dtype)
        for chunk in touched:
            here = which == chunk
            gathered[here] = chunks[chunk][rows[here] - self._starts[chunk]]
        return gathered

    def close(self) -> None:
        """Gives the mapping back."""
        self._chunks = {}
        if self._source is not None:
            self._source.close()
            self._source = None


def _read_batches(source: pa.MemoryMappedFile) -> list[pa.RecordBatch]:
    reader = pa.ipc.open_file(source)
    return [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _shaped_chunks(batches: list[pa.RecordBatch], field: Field, widths: dict[str, int]) -> list[np.ndarray]:
    width = widths.get(field.role, field.width or 0)
    shape = field.row_shape(width)
    if not batches:
        return [np.empty((0, *shape), field.dtype)]
    matrices = (to_numpy(batch.column(field.role), field, width=width) for batch in batches)
    return [matrix.reshape(len(matrix), *shape) for matrix in matrices]
