"""Statistics of columns that preprocessing layers adapt to, from those of the partitions."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pyspark import cloudpickle
from pyspark.errors import PythonException
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)

from elephant.data.schema import DataSchema, Field
from elephant.errors import DataError
from elephant.spark.columns.column_types import selected_columns
from elephant.task.partition_statistics import (
    VALUE,
    Moments,
    elements_of_partition,
    merged,
    moments_of_partition,
    picked,
    tokens_of_partition,
)


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
    part = functools.partial(moments_of_partition, field, tuple(axis))
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


def sorted_sample(frame: DataFrame, field: Field, epsilon: float) -> np.ndarray:
    """Returns values of a column at equal distances in their order: about ``1 / epsilon`` of them.

    They are those that Keras' Discretization keeps of an array of all values.

    Returns:
        float32, sorted.

    Raises:
        DataError: A null, or no rows.
    """
    elements = functools.partial(elements_of_partition, replace(field, dtype="float32"))
    ordered = _columns_of(frame, field).mapInArrow(elements, f"{VALUE} float").sort(VALUE).persist()
    try:
        part, missing = F.spark_partition_id().alias("part"), F.col(VALUE).isNull()
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
        pick = functools.partial(picked, offsets, first, int(step))
        return np.sort(np.array([row[0] for row in ordered.mapInArrow(pick, f"{VALUE} float").collect()], np.float32))
    finally:
        ordered.unpersist()


def _columns_of(frame: DataFrame, field: Field) -> DataFrame:
    return frame.select(*selected_columns(frame.schema, DataSchema(inputs=(field,))))


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
    count = functools.partial(tokens_of_partition, field, cloudpickle.dumps(layer))
    rows = _columns_of(frame, field)
    counts = _collected(rows.mapInArrow(count, "token binary, count bigint, documents bigint"), limit, 0)
    if not counts.tokens or counts.tokens[0] is not None:
        raise no_rows(field.title)
    return TokenCounts(counts.tokens[1:], counts.counts[1:], counts.documents[1:], counts.counts[0])


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
    return DataError(
        f"{title}: expected a value in every row. Received: a null. Drop such rows, or fill them.", topic="nulls"
    )
