"""Statistics of columns that preprocessing layers adapt to.

What runs on executors imports no Keras, but for `token_counts_of_layer`, which runs the layer itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.errors import PythonException
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)

from elephant.backends.keras_private import lookup_of
from elephant.data.casting import prepared_batches
from elephant.data.ragged import RaggedArray, Values, strings
from elephant.data.schema import TEXT, DataSchema, Field
from elephant.data.to_numpy import is_list, to_values
from elephant.errors import DataError
from elephant.spark.columns.column_types import selected_columns

_VALUE = "value"


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


@dataclass(frozen=True)
class TokenCounts:
    """Counts of tokens.

    Args:
        tokens: bytes, or integers.
        counts: Of each token, how often it occurs.
        documents: Of each token, in how many rows it occurs.
        num_rows: All rows.
    """

    tokens: list[Any]
    counts: list[int]
    documents: list[int]
    num_rows: int


def moments(frame: DataFrame, field: Field, axis: Sequence[int]) -> tuple[Moments, int]:
    """Returns count, mean and variance of a column, over all axes of the stacked rows but those given.

    Args:
        field: What the column is to hold. Rows may differ in length where the axis of the lengths is not kept.
        axis: The axes to keep, as Keras counts them: 0 are the rows, and -1 is the last one.

    Returns:
        The moments, and the number of axes.

    Raises:
        DataError: There is no row, or rows differ in an axis that is kept.
    """
    part = functools.partial(_moments_of_partition, field, tuple(axis))
    schema = "axes int, count bigint, shape array<int>, mean array<double>, squares array<double>"
    rows = _collect(_columns_of(frame, field).mapInArrow(part, schema))
    if len({(row["axes"], tuple(row["shape"])) for row in rows}) > 1:
        raise DataError(f"{field.title}: expected rows of one shape. Received: rows of several.")
    total_moments = merged(_moments_of_row(row) for row in rows)
    if total_moments is None:
        raise no_rows(field.title)
    return total_moments, int(rows[0]["axes"])


def _moments_of_row(row: Row) -> Moments:
    shape = tuple(row["shape"])
    return Moments(row["count"], np.reshape(row["mean"], shape), np.reshape(row["squares"], shape))


def _moments_of_partition(
    field: Field, axis: tuple[int, ...], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
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


def sorted_sample(frame: DataFrame, field: Field, epsilon: float) -> np.ndarray:
    """Returns values of a column at equal distances in their order: about ``1 / epsilon`` of them.

    They are those that Keras' Discretization keeps of an array of all values.

    Returns:
        float32, sorted.

    Raises:
        DataError: A null, or no rows.
    """
    elements = functools.partial(_elements_of_partition, replace(field, dtype="float32"))
    ordered = _columns_of(frame, field).mapInArrow(elements, f"{_VALUE} float").sort(_VALUE).persist()
    try:
        part, missing = F.spark_partition_id().alias("part"), F.col(_VALUE).isNull()
        counted = ordered.groupBy(part).agg(F.count(F.lit(1)).alias("rows"), F.count(F.when(missing, 1)).alias("nulls"))
        counts = {row["part"]: row for row in counted.collect()}
        if any(row["nulls"] for row in counts.values()):
            raise nulls(field.title)
        total = sum(row["rows"] for row in counts.values())
        if total == 0:
            raise no_rows(field.title)
        step = max(total * epsilon, 1.0)
        first, offsets = int(step - 1), {}
        for number in sorted(counts):
            offsets[number] = sum(counts[before]["rows"] for before in counts if before < number)
        pick = functools.partial(_picked, offsets, first, int(step))
        return np.sort(np.array([row[0] for row in ordered.mapInArrow(pick, f"{_VALUE} float").collect()], np.float32))
    finally:
        ordered.unpersist()


def _elements_of_partition(field: Field, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in prepared_batches(batches, DataSchema(inputs=(field,))):
        column = batch.column(0)
        while is_list(column.type):
            column = column.flatten()
        yield pa.RecordBatch.from_arrays([column], [_VALUE])


def _columns_of(frame: DataFrame, field: Field) -> DataFrame:
    return frame.select(*selected_columns(frame.schema, DataSchema(inputs=(field,))))


def _picked(
    offsets: dict[int, int], first: int, step: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    place = offsets.get(0 if context is None else context.partitionId(), 0)
    for batch in batches:
        places = np.arange(place, place + batch.num_rows)
        chosen = (places >= first) & ((places - first) % step == 0)
        place += batch.num_rows
        yield batch.filter(pa.array(chosen))


def token_counts(frame: DataFrame, tokens: Column, limit: int | None, title: str) -> TokenCounts:
    """Returns how often the elements of a column of arrays occur: the most frequent ones, the greatest first of equals.

    Args:
        limit: Tokens at most; None returns all.

    Raises:
        DataError: A null.
    """
    rows = frame.select(tokens.alias("tokens"))
    each = rows.select(F.explode_outer("tokens").alias("token"), F.lit(1).alias("count"), F.lit(0).alias("documents"))
    distinct = F.explode_outer(F.array_distinct("tokens"))
    once = rows.select(distinct.alias("token"), F.lit(0).alias("count"), F.lit(1).alias("documents"))
    empty = F.count(F.when(F.size("tokens") == 0, 1))
    num_rows, num_empty = rows.agg(F.count(F.lit(1)), empty).collect()[0]
    counts = _collected(each.unionAll(once), limit, num_rows)
    # A row without tokens gives one null too.
    if counts.tokens and counts.tokens[0] is None and counts.counts[0] > num_empty:
        raise nulls(title)
    start = 1 if counts.tokens and counts.tokens[0] is None else 0
    return TokenCounts(counts.tokens[start:], counts.counts[start:], counts.documents[start:], counts.num_rows)


def _collected(counted: DataFrame, limit: int | None, num_rows: int) -> TokenCounts:
    summed = counted.groupBy("token").agg(F.sum("count").alias("count"), F.sum("documents").alias("documents"))
    # Nulls first, then what a vocabulary takes.
    ordered = summed.orderBy(F.col("token").isNull().desc(), F.col("count").desc(), F.col("token").desc())
    found = _collect(ordered if limit is None else ordered.limit(limit + 1))
    tokens = [bytes(row["token"]) if isinstance(row["token"], bytearray) else row["token"] for row in found]
    return TokenCounts(tokens, [row["count"] for row in found], [row["documents"] for row in found], num_rows)


def token_counts_of_layer(
    frame: DataFrame, field: Field, layer: tuple[type, dict[str, Any]], limit: int | None
) -> TokenCounts:
    """Returns how often the tokens occur that a TextVectorization makes of a column of strings.

    Args:
        limit: Tokens at most; None returns all.
    """
    count = functools.partial(_tokens_of_partition, field, cloudpickle.dumps(layer))
    rows = _columns_of(frame, field)
    counts = _collected(rows.mapInArrow(count, "token binary, count bigint, documents bigint"), limit, 0)
    if not counts.tokens or counts.tokens[0] is not None:
        raise no_rows(field.title)
    return TokenCounts(counts.tokens[1:], counts.counts[1:], counts.documents[1:], counts.counts[0])


def _tokens_of_partition(field: Field, pickled: bytes, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the tokens of a partition's rows, and first a null whose count is the number of rows."""
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


def _collect(frame: DataFrame) -> list[Row]:
    """Collects a frame; what executors say of its rows is raised as it is, and not as Spark's report of it."""
    try:
        return frame.collect()
    except PythonException as error:
        said = re.search(r"elephant\.errors\.DataError: (.*)", str(error))
        if said is None:
            raise
        raise DataError(said[1]) from None


def no_rows(title: str) -> DataError:
    """Returns the error for a column without any value."""
    return DataError(f"adapt: expected rows in {title}. Received: none.")


def nulls(title: str) -> DataError:
    """Returns the error for nulls in a column."""
    return DataError(f"{title}: expected a value in every row. Received: a null. Drop such rows, or fill them.")
