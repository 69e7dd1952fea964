"""The cast of columns to what a model takes: those of DataFrames, of files, and the arguments of UDFs.

A column that has its elements' type already, or raw bytes, passes through without a copy. Numbers for an input of
integers keep their type here: `elephant.data.to_numpy` makes integers of them, or names the row that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elephant.data.schema import SCALAR, SPARSE, TEXT, DataSchema, Field
from elephant.data.to_arrow import from_arrow, to_arrow, zero_for_null
from elephant.data.to_numpy import is_binary, is_list
from elephant.errors import DataError, SchemaError

_MICROSECONDS = 1e6


def prepared_batches(batches: Iterable[pa.RecordBatch], schema: DataSchema) -> Iterator[pa.RecordBatch]:
    """Yields the prepared columns of one partition's rows.

    Args:
        batches: The columns ``schema.columns``, in that order, under any names.

    Raises:
        DataError: A number that the wanted type cannot hold.
        SchemaError: A column is of a type that cannot become what is wanted.
    """
    first_row = 0
    for batch in batches:
        yield prepared_batch(batch, schema, first_row=first_row)
        first_row += batch.num_rows


def prepared_batch(batch: pa.RecordBatch, schema: DataSchema, *, first_row: int = 0) -> pa.RecordBatch:
    """Returns the prepared columns of some rows, named by their roles."""
    given = dict(zip(schema.columns, batch.columns, strict=True))
    columns = [prepared_column([given[name] for name in field.columns], field, first_row=first_row) for field in schema]
    return pa.RecordBatch.from_arrays(columns, [field.role for field in schema])


def prepared_column(columns: Sequence[pa.Array], field: Field, *, first_row: int = 0) -> pa.Array:
    """Returns one prepared column; several columns with one element each make one vector."""
    columns = [_plain(column) for column in columns]
    kind = columns[0].type
    if field.kind == TEXT:
        return columns[0] if len(columns) == 1 else _rows_of(columns)
    if len(columns) > 1 or not (is_list(kind) or is_binary(kind) or pa.types.is_struct(kind)):
        if pa.types.is_boolean(kind) and field.dtype == "bool" and field.kind == SCALAR:
            return columns[0]
        numbers = [_numbers(column, field, first_row) for column in columns]
        return numbers[0] if field.kind == SCALAR else _rows_of(_of_one_type(numbers, field, first_row))
    if is_binary(kind) or field.kind == SPARSE:
        return columns[0]
    lists = _dense_vectors(columns[0], field, first_row) if pa.types.is_struct(kind) else columns[0]
    return _in_lists(lists, lambda values: _numbers(values, field, None))


def cast_to(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns a column in the type that Spark has for it; nanoseconds are cut off.

    Raises:
        pyarrow.ArrowInvalid: The type does not hold a value.
    """
    column = _plain(column)
    return column if column.type == kind else column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))


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
    values = together if count == 1 else together.take(to_arrow(places))
    return pa.ListArray.from_arrays(to_arrow(np.arange(rows + 1) * count, dtype="int32"), values)


def _of_one_type(columns: list[pa.Array], field: Field, first_row: int) -> list[pa.Array]:
    # No double holds all integers: fractions beside integers become integers right here.
    if all(column.type == columns[0].type for column in columns):
        return columns
    return [_whole(column, field, first_row) for column in columns]


def _in_lists(lists: pa.Array, cast: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Returns lists of any depth with their innermost elements cast."""
    if not is_list(lists.type):
        return cast(lists)
    elements = lists.flatten()
    wanted = _in_lists(elements, cast)
    if wanted is elements:
        return lists
    offsets = np.concatenate([[0], np.cumsum(zero_for_null(pc.list_value_length(lists)))])
    # A null offset makes the list that begins there a null.
    nulls = np.append(from_arrow(lists.is_null()), False) if lists.null_count else None
    return pa.LargeListArray.from_arrays(to_arrow(offsets, nulls, dtype="int64"), wanted)


def _numbers(values: pa.Array, field: Field, first_row: int | None) -> pa.Array:
    """Returns numbers of the field's type where that is a float, else of a type that integers are made of."""
    kind = values.type
    if np.dtype(field.dtype).kind == "f":
        wanted = pa.float64() if field.dtype == "float64" else pa.float32()
        if kind == wanted:
            return values
        if pa.types.is_decimal(kind):
            # Through their digits, which are rounded once; Arrow's own cast multiplies by a rounded power of ten.
            return values.cast(pa.string()).cast(wanted)
        return _as_number(values, field).cast(wanted, safe=False)
    if pa.types.is_decimal(kind) or pa.types.is_uint64(kind):
        return _whole(values, field, first_row)
    return _as_number(values, field)


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
    raise SchemaError(f"{field.title}: expected numbers, booleans, dates or timestamps. Received: {kind}.")


def _seconds(micros: pa.Array) -> pa.Array:
    return pc.divide(micros.cast(pa.float64(), safe=False), _MICROSECONDS)


def _wall_clock_seconds(micros: pa.Array) -> pa.Array:
    """Returns the seconds of timestamps without a time zone: whole minutes and the rest, rounded apart."""
    minutes = pc.floor(pc.divide(micros.cast(pa.float64(), safe=False), 60 * _MICROSECONDS)).cast(pa.int64())
    rest = pc.subtract(micros, pc.multiply(minutes, 60_000_000))
    return pc.add(pc.multiply(minutes.cast(pa.float64()), 60.0), _seconds(rest))


def _whole(values: pa.Array, field: Field, first_row: int | None) -> pa.Array:
    """Returns numbers without their fractions, as 64-bit integers.

    Args:
        first_row: The row of the first one; None where they are not one of each row.
    """
    if pa.types.is_floating(values.type):
        held = pc.and_(pc.greater_equal(values, -(2.0**63)), pc.less(values, 2.0**63))
        wrong = pc.indices_nonzero(pc.invert(held))
        if len(wrong):
            raise _no_integer(values, wrong[0].as_py(), field, first_row)
    kind = values.type
    if pa.types.is_decimal(kind) and kind.precision == kind.scale:
        # Arrow needs a digit before the point to round to.
        values = values.cast(pa.decimal256(kind.precision + 1, kind.scale))
    whole = values if pa.types.is_integer(kind) else pc.trunc(values)
    try:
        return whole.cast(pa.int64())
    except pa.ArrowInvalid:
        wrong = (place for place, one in enumerate(whole.to_pylist()) if one and not -(2**63) <= one < 2**63)
        raise _no_integer(values, next(wrong), field, first_row) from None


def _no_integer(values: pa.Array, place: int, field: Field, first_row: int | None) -> DataError:
    where = "" if first_row is None else f" in row {first_row + place} of the partition"
    return DataError(
        f"{field.title}: expected numbers that an integer holds, because the model takes {field.dtype}. "
        f"Received: {values[place].as_py()}{where}."
    )


def _dense_vectors(vectors: pa.Array, field: Field, first_row: int) -> pa.Array:
    """Returns Spark's vectors, structs of type (1 is dense), size, indices and values, as lists of all their values."""
    if any(vectors.type.get_field_index(name) < 0 for name in ("type", "size", "indices", "values")):
        raise SchemaError(
            f"expected Spark's vectors, which are structs of type, size, indices and values. Received: {vectors.type}."
        )
    # With the nulls of the structs themselves.
    parts = dict(zip((part.name for part in vectors.type), vectors.flatten(), strict=True))
    kinds, sizes, indices, values = (parts[name] for name in ("type", "size", "indices", "values"))
    nulls = from_arrow(vectors.is_null())
    is_dense = nulls | (zero_for_null(kinds) == 1)
    if is_dense.all() and not nulls.any():
        return values
    kept = zero_for_null(pc.list_value_length(values))
    lengths = np.where(is_dense, kept, zero_for_null(sizes))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flat = np.zeros(int(offsets[-1]))
    firsts = np.concatenate([[0], np.cumsum(kept)])
    of_dense = np.repeat(is_dense, kept)
    places = np.arange(int(firsts[-1])) - np.repeat(firsts[:-1], kept)
    places[~of_dense] = from_arrow(indices.flatten())
    wrong = np.flatnonzero((places < 0) | (places >= np.repeat(lengths, kept)))
    if len(wrong):
        row = int(np.searchsorted(firsts, wrong[0], side="right")) - 1
        raise DataError(
            f"{field.title}: expected indices from 0 to {lengths[row] - 1}, of vectors of size {lengths[row]}. "
            f"Received: {places[wrong[0]]} in row {first_row + row} of the partition."
        )
    flat[places + np.repeat(offsets[:-1], kept)] = from_arrow(values.flatten())
    return pa.LargeListArray.from_arrays(to_arrow(offsets, np.append(nulls, False)), to_arrow(flat))


def lists_of(elements: pa.Array, num_rows: int) -> pa.ListArray:
    """Returns elements as a column of lists of equal length.

    >>> lists_of(pa.array([1, 2, 3, 4]), 2).to_pylist()
    [[1, 2], [3, 4]]
    """
    width = len(elements) // max(num_rows, 1)
    return pa.ListArray.from_arrays(to_arrow(np.arange(num_rows + 1) * width, dtype="int32"), elements)
