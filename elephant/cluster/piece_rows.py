"""Rows of a DataFrame in virtual shards, each of which Spark deals to the partition of its worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elephant.cluster.row_source import FrameRows, RowSource
from elephant.data.virtual_shards import owner_of
from elephant.errors import UnsupportedError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

# Of Spark's own hash partitioning.
_SEED = 42
_WORD = 0xFFFFFFFF
# Spark has no hash of these.
_WITHOUT_HASH = ("map", "variant")


def in_virtual_shards(rows: RowSource, number: int) -> PieceRows:
    """Returns rows with one more column: the virtual shard of each, of so many, which follows from its values.

    Raises:
        UnsupportedError: They are not those of a DataFrame, or of columns that Spark computes no hash of.
    """
    if not isinstance(rows, FrameRows) or rows.schema is None:
        kind = "files that the workers read themselves" if hasattr(rows, "files") else "an RDD"
        raise UnsupportedError(
            "numWorkers: expected a DataFrame with a pair of numbers, whose rows Spark deals anew to other workers. "
            f"Received: {kind}. Pass spark.read.parquet(path), or one number of workers."
        )
    from pyspark.sql.functions import col, lit, pmod, xxhash64

    hashed = [col(field.name) for field in rows.frame.schema.fields if _has_hash(field.dataType)]
    if not hashed:
        raise UnsupportedError(
            "numWorkers: expected a column besides maps with a pair of numbers, whose values tell the virtual shard of "
            f"a row. Received: {rows.frame.schema.simpleString()}. Select the entries that the model takes."
        )
    piece = pmod(xxhash64(*hashed), lit(number)).cast("int")
    schema = rows.schema.in_pieces()
    return PieceRows(rows.frame.withColumn(f"c{len(schema.columns) - 1}", piece), schema)


def _has_hash(kind: DataType) -> bool:
    return not any(f"{name}<" in f"{kind.simpleString()}<" for name in _WITHOUT_HASH)


@dataclass(eq=False)
class PieceRows(FrameRows):
    """The rows of a DataFrame whose last column is their virtual shard.

    Args:
        dealt: Partitions that they are in by it; zero where they are as the user's frame has them.
    """

    dealt: int = 0

    def has_partitions(self, number: int) -> bool:
        """Returns whether the rows were dealt to so many workers."""
        return self.dealt == number

    def repartitioned(self, number: int) -> PieceRows:
        """Returns the rows with those of each virtual shard in the partition of its owner, of so many."""
        from pyspark.sql.functions import array, col, element_at, lit, pmod

        keys = partition_keys(number)
        # What `owner_of` says of a piece.
        owner = pmod(col(self.frame.columns[-1]), lit(number))
        key = element_at(array(*(lit(keys[owner_of(place, number)]) for place in range(number))), owner + 1)
        return replace(self, frame=self.frame.repartition(number, key), dealt=number)


def partition_keys(number: int) -> list[int]:
    """Returns for each of so many partitions an integer that Spark's hash partitioning puts there.

    >>> [spark_hash(key) % 3 for key in partition_keys(3)]
    [0, 1, 2]
    """
    keys: dict[int, int] = {}
    for key in _integers():
        keys.setdefault(spark_hash(key) % number, key)
        if len(keys) == number:
            break
    return [keys[partition] for partition in range(number)]


def _integers() -> Iterator[int]:
    yield from range(2**31)


def spark_hash(value: int) -> int:
    """Returns Spark's hash of an integer: MurmurHash3 for 32 bits (Appleby) of its four bytes.

    >>> spark_hash(0), spark_hash(1)
    (933211791, -559580957)
    """
    mixed = value * 0xCC9E2D51 & _WORD
    mixed = _rotated(mixed, 15) * 0x1B873593 & _WORD
    total = (_rotated(_SEED ^ mixed, 13) * 5 + 0xE6546B64) & _WORD
    total ^= 4
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        total = (total ^ (total >> shift)) * factor & _WORD
    total ^= total >> 16
    return total - (1 << 32) if total >> 31 else total


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & _WORD
