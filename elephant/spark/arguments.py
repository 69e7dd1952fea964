"""The arguments of a prediction UDF as prepared columns: their types are known only when the first rows come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from elephant.data.nested import Nest
from elephant.data.schema import DENSE, FEATURES, RAGGED, SPARSE, TEXT, DataSchema, Field, role_of
from elephant.errors import SchemaError

# How Spark hands ml vectors on; type 1 is dense, with values alone.
VECTOR_TYPE = pa.schema(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


@dataclass(frozen=True)
class Argument:
    """What one input of a model takes.

    Args:
        name: The input's name, for messages.
        dtype: Type of its elements; ``"string"`` for strings.
        shape: Of one row; None when it is unknown.
        sparse: Whether it takes sparse tensors.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None = None
    sparse: bool = False


@dataclass(frozen=True)
class Arguments:
    """What the arguments of a UDF are for a model.

    Args:
        inputs: One per input, in the order of the arguments.
        nest: How the inputs are nested for Keras.
    """

    inputs: tuple[Argument, ...]
    nest: Nest

    def columns(self, given: Sequence[pa.Array]) -> list[pa.Array]:
        """Returns one column per input: of one input, several arguments make one vector.

        Raises:
            SchemaError: There are more or fewer arguments than inputs.
        """
        if len(self.inputs) == 1 and (len(given) > 1 or _is_scalar(given[0].type)):
            return [_row_of(given, self.inputs[0])]
        if len(given) != len(self.inputs):
            raise SchemaError(
                f"predict_udf: expected an argument for each of the model's inputs "
                f"{', '.join(known.name for known in self.inputs)}. Received: {len(given)} arguments."
            )
        return [
            _row_of([column], known) if _is_scalar(column.type) else _without_decimals(column)
            for column, known in zip(given, self.inputs, strict=True)
        ]

    def schema(self, columns: Sequence[pa.Array]) -> DataSchema:
        """Returns what columns, which `columns` has returned, hold."""
        fields = (
            Field(role_of(FEATURES, place), (known.name,), known.dtype, _kind(column.type, known), known.shape)
            if not known.sparse
            else Field(role_of(FEATURES, place), (known.name,), known.dtype, SPARSE, known.shape, sparse_tensor=True)
            for place, (column, known) in enumerate(zip(columns, self.inputs, strict=True))
        )
        return DataSchema(inputs=tuple(fields), x=self.nest)


def _kind(kind: pa.DataType, known: Argument) -> str:
    """Returns the kind of a field, of the type of its column."""
    if pa.types.is_struct(kind) and all(kind.get_field_index(name) >= 0 for name in VECTOR_TYPE.names):
        return SPARSE
    if known.dtype == "string":
        return TEXT
    depth, element = 0, kind
    while pa.types.is_list(element) or pa.types.is_large_list(element):
        depth, element = depth + 1, element.value_type
    if not (depth and _is_number(element)) and not pa.types.is_binary(kind):
        raise SchemaError(
            f"predict_udf: expected an array of numbers, numbers, an ml vector or a binary tensor for the input "
            f"{known.name!r}. Received: a column of type {kind}."
        )
    shape = known.shape
    differs = shape is not None and len(shape) == depth and shape[0] is None and None not in shape[1:]
    return RAGGED if differs else DENSE


def _row_of(columns: Sequence[pa.Array], known: Argument) -> pa.Array:
    """Returns one list per row, of several columns with one element each."""
    numbers = [column if known.dtype == "string" else _as_number(column, known) for column in columns]
    if any(column.type != numbers[0].type for column in numbers):
        # Integers beyond 2**53 are rounded, as Spark's own cast does it.
        numbers = [column.cast(pa.float64(), safe=False) for column in numbers]
    count, rows = len(numbers), len(numbers[0])
    # Column after column becomes row after row.
    order = np.arange(count * rows).reshape(count, rows).T.ravel()
    elements = pa.concat_arrays(numbers).take(pa.array(order))
    offsets = np.arange(rows + 1, dtype=np.int32) * count
    return pa.ListArray.from_arrays(pa.array(offsets), elements)


def _without_decimals(column: pa.Array) -> pa.Array:
    """Returns lists of decimals as lists of floats."""
    kind = _with_floats(column.type)
    return column if kind == column.type else column.cast(kind)


def _with_floats(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = _with_floats(kind.value_type)
        return kind if element == kind.value_type else pa.list_(element)
    return pa.float64() if pa.types.is_decimal(kind) else kind


def _as_number(column: pa.Array, known: Argument) -> pa.Array:
    """Returns a column as numbers: dates as days since 1970-01-01, timestamps as seconds since then in UTC."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        seconds = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).to_numpy(zero_copy_only=False) / 1e6
        return pa.array(seconds, pa.float64(), mask=column.is_null().to_numpy(zero_copy_only=False))
    if pa.types.is_date(kind):
        return column.cast(pa.date32()).cast(pa.int32())
    if pa.types.is_decimal(kind):
        return column.cast(pa.float64())
    if pa.types.is_boolean(kind):
        return column.cast(pa.int8())
    if not _is_number(kind):
        raise SchemaError(f"predict_udf: expected numbers for the input {known.name!r}. Received: type {kind}.")
    return column


def _is_scalar(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
