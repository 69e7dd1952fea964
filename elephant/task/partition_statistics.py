"""Questions of the driver to a partition: its first rows, and statistics of its columns for preprocessing layers, which
`elephant.spark.columns.column_statistics` joins.

No Keras is imported, but by `tokens_of_partition`, which runs the layer itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext, cloudpickle

from elephant.cluster.spark_job import ResultRow
from elephant.data.casting import prepared_batches
from elephant.data.ragged import RaggedArray, Values, strings
from elephant.data.schema import TEXT, DataSchema, Field
from elephant.data.to_numpy import is_list, to_values
from elephant.errors import DataError

VALUE = "value"


def first_rows(count: int, batches: Iterable[pa.RecordBatch]) -> Iterator[ResultRow]:
    """Yields the first rows of a partition as one result, an Arrow stream; nothing where there are none.

    Args:
        count: How many, at most.
    """
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch.slice(0, count - sum(part.num_rows for part in kept)))
        if sum(part.num_rows for part in kept) >= count:
            break
    if kept:
        output = pa.BufferOutputStream()
        with pa.ipc.new_stream(output, kept[0].schema) as writer:
            for batch in kept:
                writer.write_batch(batch)
        yield 0, output.getvalue().to_pybytes()


@dataclass(frozen=True)
class Moments:
    """Count of values, their mean, and the sum of their squared distances from it.

    Args:
        count: Values behind each element of the mean.
        mean: float64.
        squares: float64, of the mean's shape.
    """

    count: int
    mean: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, kept: Sequence[int]) -> Moments:
        """Returns the moments of an array over all axes but some.

        Args:
            values: Numbers, at least one.
            kept: The axes that are not reduced, from zero.

        >>> Moments.of(np.array([[1.0, 2.0], [3.0, 6.0]]), kept=(1,)).variance.tolist()
        [1.0, 4.0]
        """
        reduced = tuple(axis for axis in range(values.ndim) if axis not in kept)
        wide = values.astype(np.float64)
        mean = wide.mean(axis=reduced, keepdims=True)
        squares = ((wide - mean) ** 2).sum(axis=reduced)
        count = int(np.prod([values.shape[axis] for axis in reduced], dtype=np.int64))
        return cls(count, mean.reshape(squares.shape), squares)

    @property
    def variance(self) -> np.ndarray:
        """The mean squared distance from the mean."""
        return self.squares / self.count

    def merged(self, other: Moments) -> Moments:
        """Returns the moments of both sets of values together (Chan, Golub & LeVeque 1979, formula 2.1)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        squares = self.squares + other.squares + apart**2 * (self.count * other.count / count)
        return Moments(count, mean, squares)


def merged(moments: Iterable[Moments]) -> Moments | None:
    """Returns the moments of all parts together; None of no part.

    >>> parts = [Moments.of(np.arange(start, 10.0), kept=()) for start in (0, 4)]
    >>> both = merged(parts)
    >>> both.count, float(both.mean)
    (16, 5.25)
    """
    total_moments: Moments | None = None
    for part in moments:
        total_moments = part if total_moments is None else total_moments.merged(part)
    return total_moments


def moments_of_partition(
    field: Field, axis: tuple[int, ...], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yields one batch with the moments of a partition's rows, or none where it has no values."""
    total_moments: Moments | None = None
    known: tuple[int, ...] | None = None
    axes = first_row = 0
    for batch in prepared_batches(batches, DataSchema(inputs=(field,))):
        if batch.num_rows == 0:
            continue
        values, known = to_values(batch.column(0), field, first_row=first_row, row_shape=known)
        first_row += batch.num_rows
        array, kept, axes = _stacked(values, field, known or (), axis)
        if array.size:
            part = Moments.of(array, kept)
            total_moments = part if total_moments is None else total_moments.merged(part)
    if total_moments is not None:
        lists = [np.asarray(total_moments.mean).ravel().tolist(), np.asarray(total_moments.squares).ravel().tolist()]
        columns = [[axes], [total_moments.count], [list(total_moments.mean.shape)], [lists[0]], [lists[1]]]
        types = [pa.int32(), pa.int64(), pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.float64())]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, ["axes", "count", "shape", "mean", "squares"])


def _stacked(
    values: Values, field: Field, natural: tuple[int, ...], axis: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...], int]:
    """Returns the values as one array, the axes of it that are kept, and how many axes stacked rows have."""
    if not isinstance(values, RaggedArray):
        # A row of one number is a row of one element, as models have it.
        shape = field.row_shape(natural) or (1,)
        return values.reshape(len(values), *shape), _positive_axes(axis, 1 + len(shape), field), 1 + len(shape)
    elements, lengths = values.buffers[0], np.diff(values.offsets)
    axes = 1 + elements.ndim
    kept = _positive_axes(axis, axes, field)
    if 1 not in kept:
        return elements, tuple(place - 1 for place in kept), axes
    if (lengths != lengths[0]).any():
        raise DataError(
            f"{field.title}: expected rows of one length, because the layer keeps axis 1. Received: rows of "
            f"{lengths.min()} to {lengths.max()} elements."
        )
    return elements.reshape(len(values), int(lengths[0]), *elements.shape[1:]), kept, axes


def _positive_axes(axis: Sequence[int], axes: int, field: Field) -> tuple[int, ...]:
    kept = tuple(sorted(place + axes if place < 0 else place for place in axis))
    if any(not 0 < place < axes for place in kept):
        raise DataError(
            f"{field.title}: expected the layer's axis to be one of 1 to {axes - 1}, or negative, for rows that stack "
            f"to {axes} axes. Received: axis={tuple(axis)}."
        )
    return kept


def elements_of_partition(field: Field, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the elements of a partition's rows, one by one."""
    for batch in prepared_batches(batches, DataSchema(inputs=(field,))):
        column = batch.column(0)
        while is_list(column.type):
            column = column.flatten()
        yield pa.RecordBatch.from_arrays([column], [VALUE])


def picked(
    offsets: dict[int, int], first: int, step: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yields the elements at every step-th place from the first, as all partitions in their order count them."""
    context = TaskContext.get()
    place = offsets.get(0 if context is None else context.partitionId(), 0)
    for batch in batches:
        places = np.arange(place, place + batch.num_rows)
        chosen = (places >= first) & ((places - first) % step == 0)
        place += batch.num_rows
        yield batch.filter(pa.array(chosen))


def tokens_of_partition(field: Field, pickled: bytes, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the tokens of a partition's rows, and first a null whose count is the number of rows."""
    from elephant.backends.keras_private import lookup_of

    layer = None
    num_rows = 0
    for batch in prepared_batches(batches, DataSchema(inputs=(field,))):
        if batch.num_rows == 0:
            continue
        if layer is None:
            kind, config = cloudpickle.loads(pickled)
            layer = kind(**config)
        values, shape = to_values(batch.column(0), field, first_row=num_rows)
        if not isinstance(values, RaggedArray) or field.kind != TEXT:
            raise TypeError(f"{field.title}: expected strings.")
        texts = strings(values, shape or ()).reshape(len(values), -1)
        layer.update_state(texts.tolist())
        num_rows += batch.num_rows
    if layer is not None:
        yield _token_batch([None], [num_rows], [0])
        yield _token_batch(*exported_counts(lookup_of(layer)))


def exported_counts(lookup: Any) -> tuple[list[Any], list[int], list[int]]:
    """Returns tokens, their counts, and in how many rows they were, as a lookup layer has counted them so far."""
    tokens, counts = lookup.token_counts.export()
    documents = lookup.token_document_counts.lookup(tokens) if lookup.output_mode == "tf_idf" else counts
    return tokens.numpy().tolist(), counts.numpy().tolist(), documents.numpy().tolist()


def _token_batch(tokens: list[Any], counts: list[int], documents: list[int]) -> pa.RecordBatch:
    arrays = [pa.array(tokens, pa.binary()), pa.array(counts, pa.int64()), pa.array(documents, pa.int64())]
    return pa.RecordBatch.from_arrays(arrays, ["token", "count", "documents"])
