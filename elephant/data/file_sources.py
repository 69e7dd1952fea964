"""Files that executors read themselves: the plan of who reads what, and the cast to what the model takes.

A column that has its elements' type already, or raw bytes, passes through
without a copy. `elephant.spark.expressions` is the same for DataFrames, and says
which types there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elephant.data.schema import SCALAR, SPARSE, TEXT, DataSchema, Field
from elephant.errors import DataError, SchemaError

_MICROSECONDS = 1e6
Elements = Callable[[pa.Array], pa.Array]

# What one worker reads: pieces of row groups, or shares of files.
Part = tuple[Any, ...]
# Whole files are dealt out while the fullest worker has at most this much more than an equal part.
_BEARABLE = 1.25
_DEAL = 7


def prepared_batch(batch: pa.RecordBatch, schema: DataSchema, *, first_row: int = 0) -> pa.RecordBatch:
    """Returns the prepared columns of some rows of a file.

    Raises:
        DataError: A number that the wanted type cannot hold.
        SchemaError: A column is of a type that cannot become what is wanted.
    """
    columns = [_prepared_column([batch.column(name) for name in field.columns], field, first_row) for field in schema]
    return pa.RecordBatch.from_arrays(columns, [field.role for field in schema])


def _prepared_column(columns: list[pa.Array], field: Field, first_row: int) -> pa.Array:
    columns = [_plain(column) for column in columns]
    kind = columns[0].type
    if field.kind == TEXT:
        return columns[0] if len(columns) == 1 else _rows_of(columns)
    if pa.types.is_boolean(kind) and field.dtype == "bool" and field.kind == SCALAR:
        return columns[0]
    if len(columns) > 1 or not (_is_list(kind) or _is_bytes(kind) or pa.types.is_struct(kind)):
        numbers = [_numbers(column, field, first_row, per_row=1) for column in columns]
        return numbers[0] if field.kind == SCALAR else _rows_of(numbers)
    if _is_bytes(kind) or field.kind == SPARSE:
        return columns[0]
    if pa.types.is_struct(kind):
        dense = _dense_vectors(columns[0])
        return _in_lists(dense, lambda values: _vector_numbers(values, field, first_row))
    return _in_lists(columns[0], lambda values: _numbers(values, field, first_row, per_row=None))


def _plain(column: pa.Array) -> pa.Array:
    """Returns a column without what is about its encoding alone."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _rows_of(columns: list[pa.Array]) -> pa.Array:
    """Returns lists of one element of each column; nulls become elements, which are refused by the column's name."""
    count, rows = len(columns), len(columns[0])
    together = pa.concat_arrays(columns)
    places = np.arange(count * rows).reshape(count, rows).T.ravel()
    values = together if count == 1 else together.take(pa.array(places))
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * count), values)


def _in_lists(lists: pa.Array, cast: Elements) -> pa.Array:
    """Returns lists of any depth with their innermost elements cast."""
    if not _is_list(lists.type):
        return cast(lists)
    elements = lists.flatten()
    wanted = _in_lists(elements, cast)
    if wanted is elements:
        return lists
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if not lists.null_count:
        return pa.ListArray.from_arrays(pa.array(offsets), wanted)
    # A null offset makes the list that begins there a null.
    nulls = np.append(lists.is_null().to_numpy(zero_copy_only=False), False)
    return pa.ListArray.from_arrays(pa.array(offsets, mask=nulls), wanted)


def _numbers(values: pa.Array, field: Field, first_row: int, *, per_row: int | None) -> pa.Array:
    """Returns elements of a type that `elephant.data.to_numpy` makes the field's of, which checks integers' range."""
    kind = values.type
    if np.dtype(field.dtype).kind == "f":
        wanted = pa.float64() if field.dtype == "float64" else pa.float32()
        return values if kind == wanted else _as_floats(values, wanted, field)
    if pa.types.is_integer(kind) and kind != pa.uint64():
        return values
    if pa.types.is_decimal(kind):
        return _checked(pc.trunc(values), field, first_row, per_row)
    number = _as_number(values, field)
    if pa.types.is_floating(number.type):
        _refuse_what_no_integer_holds(number, field, first_row, per_row)
        number = pc.trunc(number)
    return _checked(number, field, first_row, per_row)


def _as_floats(values: pa.Array, wanted: pa.DataType, field: Field) -> pa.Array:
    if pa.types.is_decimal(values.type):
        # Through their digits, which are rounded once; Arrow's own cast multiplies by a rounded power of ten.
        return values.cast(pa.string()).cast(wanted)
    return _as_number(values, field).cast(wanted, safe=False)


def _as_number(values: pa.Array, field: Field) -> pa.Array:
    """Returns booleans as 0 and 1, dates as days and timestamps as seconds since 1970 in UTC."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return values.cast(pa.int8())
    if pa.types.is_date(kind):
        return values.cast(pa.date32()).cast(pa.int32())
    if pa.types.is_timestamp(kind):
        micros = values.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64())
        return _wall_clock_seconds(micros) if kind.tz is None else _seconds(micros)
    if pa.types.is_float16(kind):
        return values.cast(pa.float32())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return values
    raise SchemaError(f"{field.title}: expected numbers, booleans, dates or timestamps. Received: {kind} in a file.")


def _seconds(micros: pa.Array) -> pa.Array:
    return pc.divide(micros.cast(pa.float64(), safe=False), _MICROSECONDS)


def _wall_clock_seconds(micros: pa.Array) -> pa.Array:
    """Returns the seconds of timestamps without a time zone: whole minutes and the rest, rounded apart as for Spark."""
    minutes = pc.floor(pc.divide(micros.cast(pa.float64(), safe=False), 60 * _MICROSECONDS)).cast(pa.int64())
    rest = pc.subtract(micros, pc.multiply(minutes, 60_000_000))
    return pc.add(pc.multiply(minutes.cast(pa.float64()), 60.0), _seconds(rest))


def _refuse_what_no_integer_holds(values: pa.Array, field: Field, first_row: int, per_row: int | None) -> None:
    array = values.to_numpy(zero_copy_only=False)
    wrong = ~((array >= -(2.0**63)) & (array < 2.0**63)) & ~values.is_null().to_numpy(zero_copy_only=False)
    places = np.flatnonzero(wrong)
    if len(places):
        where = f"row {first_row + int(places[0]) // per_row} of the worker's" if per_row else "a list"
        raise DataError(
            f"{field.title}: expected numbers that an integer holds, because the model takes {field.dtype}. "
            f"Received: {array[places[0]]} in {where}."
        )


def _checked(values: pa.Array, field: Field, first_row: int, per_row: int | None) -> pa.Array:
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise DataError(f"{field.title}: expected numbers that an integer holds. Received: {error}.") from error


def _dense_vectors(vectors: pa.Array) -> pa.Array:
    """Returns Spark's vectors, structs of type (1 is dense), size, indices and values, as lists of all their values."""
    kinds, sizes, indices, values = (_part(vectors, name) for name in ("type", "size", "indices", "values"))
    nulls = vectors.is_null().to_numpy(zero_copy_only=False)
    is_dense = pc.fill_null(kinds, 1).to_numpy(zero_copy_only=False) == 1
    if is_dense.all() and not nulls.any():
        return values
    kept = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    lengths = np.where(is_dense, kept, pc.fill_null(sizes, 0).to_numpy(zero_copy_only=False))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flat = np.zeros(int(offsets[-1]))
    firsts = np.concatenate([[0], np.cumsum(kept)])
    of_dense = np.repeat(is_dense, kept)
    places = np.arange(int(firsts[-1])) - np.repeat(firsts[:-1], kept)
    places[~of_dense] = indices.flatten().to_numpy(zero_copy_only=False)
    flat[places + np.repeat(offsets[:-1], kept)] = values.flatten().to_numpy(zero_copy_only=False)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32), mask=np.append(nulls, False)), pa.array(flat))


def _part(vectors: pa.Array, name: str) -> pa.Array:
    if vectors.type.get_field_index(name) < 0:
        raise SchemaError(
            f"expected Spark's vectors, which are structs of type, size, indices and values. Received: {vectors.type}."
        )
    # With the nulls of the structs themselves.
    return vectors.flatten()[vectors.type.get_field_index(name)]


def _vector_numbers(values: pa.Array, field: Field, first_row: int) -> pa.Array:
    """Returns a vector's elements, which are doubles; floats are rounded once."""
    if np.dtype(field.dtype).kind == "f" and field.dtype != "float64":
        values = values.cast(pa.float32(), safe=False)
    return _numbers(values, field, first_row, per_row=None)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


class PlannedFiles(ABC):
    """The files of one data set as they were when they were listed. The value travels to the workers."""

    @abstractmethod
    def deal(self, num_workers: int, *, seed: int | None) -> list[Part]:
        """Returns the part of each worker; every row is in one of them.

        Args:
            seed: Where parts can be mixed, they are, by it; None keeps neighbors together.
        """

    @abstractmethod
    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a part, some megabytes at a time, with the columns by the user's names.

        Raises:
            DataError: A file is not there, has changed since it was listed, or cannot be read.
        """

    def first(self, columns: list[str]) -> pa.RecordBatch | None:
        """Returns some rows, for a look at the first one; None when there is none."""
        for part in self.deal(1, seed=None):
            for batch in self.read(part, columns):
                if batch.num_rows:
                    return batch
        return None

    def first_prepared(self, schema: DataSchema) -> pa.RecordBatch | None:
        """Returns the prepared columns of the first row; None when there is none."""
        batch = self.first(_columns_of(schema))
        return None if batch is None else prepared_batch(batch.slice(0, 1), schema)

    def prepared(self, part: Part, schema: DataSchema) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a part with the prepared columns."""
        return _prepared(self.read(part, _columns_of(schema)), schema)


def _columns_of(schema: DataSchema) -> list[str]:
    return list(dict.fromkeys(name for field in schema for name in field.columns))


def _prepared(batches: Iterable[pa.RecordBatch], schema: DataSchema) -> Iterator[pa.RecordBatch]:
    first_row = 0
    for batch in batches:
        yield prepared_batch(batch, schema, first_row=first_row)
        first_row += batch.num_rows


@dataclass(frozen=True, order=True)
class Piece:
    """Neighboring rows of one row group.

    Args:
        file: Position of the file in its list.
        group: Number of the row group in the file.
        start: First row, counted in the group.
        stop: The row after the last one.
    """

    file: int
    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Share:
    """Every ``count``-th record of a file, from the one at ``index`` on.

    Args:
        file: Position of the file in its list.
        index: From zero.
        count: 1 takes all records.
    """

    file: int
    index: int
    count: int


def deal_rows(
    group_rows: Sequence[Sequence[int]], num_workers: int, *, seed: int | None = None
) -> list[tuple[Piece, ...]]:
    """Deals the row groups of files out to workers, so that their numbers of rows differ by one at most.

    The groups are laid out in a row, which is cut into equal parts: a group is divided where a cut
    falls into it, at most one per worker.

    Args:
        seed: The order in which groups are laid out is drawn from it; None keeps that of the files.

    Returns:
        What each worker reads, in the order of files and groups.

    >>> deal_rows([[4], [2]], 2)
    [(Piece(file=0, group=0, start=0, stop=3),), (Piece(file=0, group=0, start=3, stop=4), Piece(file=1, group=0, \
start=0, stop=2))]
    """
    groups = [
        (file, group, rows) for file, counts in enumerate(group_rows) for group, rows in enumerate(counts) if rows
    ]
    if seed is not None:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((_DEAL, seed))))
        groups = [groups[place] for place in generator.permutation(len(groups))]
    total = sum(rows for _, _, rows in groups)
    bounds = [worker * total // num_workers for worker in range(num_workers + 1)]
    dealt: list[list[Piece]] = [[] for _ in range(num_workers)]
    worker, place = 0, 0
    for file, group, rows in groups:
        end = place + rows
        while place < end:
            while bounds[worker + 1] <= place:
                worker += 1
            stop = min(end, bounds[worker + 1])
            dealt[worker].append(Piece(file, group, place - (end - rows), stop - (end - rows)))
            place = stop
    return [tuple(sorted(pieces)) for pieces in dealt]


def deal_files(file_bytes: Sequence[int], num_workers: int) -> list[tuple[Share, ...]]:
    """Deals files out to workers whose records cannot be counted, or found, without reading them.

    The largest file goes first, each to the worker that has the fewest bytes (longest processing
    time first; Graham 1969). Where that leaves a worker with over 1.25 times an equal part, as it must when
    files are fewer than workers, every worker takes every n-th record of each file instead: their
    numbers of records then differ by one per file at most, and each reads all files.

    >>> deal_files([10, 10], 2)
    [(Share(file=0, index=0, count=1),), (Share(file=1, index=0, count=1),)]
    >>> deal_files([10], 2)
    [(Share(file=0, index=0, count=2),), (Share(file=0, index=1, count=2),)]
    """
    whole: list[list[Share]] = [[] for _ in range(num_workers)]
    loads = [0] * num_workers
    for file in sorted(range(len(file_bytes)), key=lambda file: (-file_bytes[file], file)):
        worker = loads.index(min(loads))
        whole[worker].append(Share(file, 0, 1))
        loads[worker] += file_bytes[file]
    if max(loads) * num_workers <= _BEARABLE * sum(loads):
        return [tuple(sorted(shares, key=lambda share: share.file)) for shares in whole]
    return [
        # The first record of each file goes to another worker, and so do the few that are left over.
        tuple(Share(file, (worker + file) % num_workers, num_workers) for file in range(len(file_bytes)))
        for worker in range(num_workers)
    ]
