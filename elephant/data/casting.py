"""The columns of a file as the prepared ones: what Spark's casts make of a DataFrame's columns, done by Arrow.

A column that has its elements' type already, or raw bytes, passes through
without a copy. `elephant.spark.expressions` is the same for DataFrames, and says
which types there are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elephant.data.schema import SCALAR, SPARSE, TEXT, DataSchema, Field
from elephant.errors import DataError, SchemaError

_MICROSECONDS = 1e6
Elements = Callable[[pa.Array], pa.Array]


def prepared_batch(batch: pa.RecordBatch, schema: DataSchema, *, first_row: int = 0) -> pa.RecordBatch:
    """Returns the prepared columns of some rows of a file.

    Raises:
        DataError: A number that the wanted type cannot hold.
        SchemaError: A column is of a type that cannot become what is wanted.
    """
    columns = [_prepared([batch.column(name) for name in field.columns], field, first_row) for field in schema]
    return pa.RecordBatch.from_arrays(columns, [field.role for field in schema])


def _prepared(columns: list[pa.Array], field: Field, first_row: int) -> pa.Array:
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
