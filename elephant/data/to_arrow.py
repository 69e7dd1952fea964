"""Arrow arrays of numpy arrays and the other way round, without pandas.

``pa.array``, ``pa.scalar`` and ``Array.to_numpy`` import pandas to see whether they were given, or are to make, some of
it. In each new Python worker of Spark that is half a second before the first row, and 60 MB.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from elephant.data.ragged import RaggedArray, Values
from elephant.data.schema import SPARSE, TEXT, Field

_MOST_BYTES = 2**31 - 1


def to_arrow(values: np.ndarray, nulls: np.ndarray | None = None, *, dtype: str | None = None) -> pa.Array:
    """Returns numbers as an Arrow array, over the same memory where that is contiguous and of their type.

    Args:
        values: Numbers of any type and byte order but bool, of shape (rows,).
        nulls: bool of shape (rows,), true where a row is a null; None of none.
        dtype: The type that integers become; None keeps theirs.

    Raises:
        OverflowError: An integer is none of ``dtype``.
        TypeError: They are booleans, which Arrow keeps in bits.

    >>> to_arrow(np.array([1.5, 2.5, 3.5]), np.array([False, True, False])).to_pylist()
    [1.5, None, 3.5]
    """
    if values.dtype.kind == "b":
        raise TypeError("to_arrow: expected numbers. Received: booleans.")
    wanted = values.dtype.newbyteorder("=") if dtype is None else np.dtype(dtype)
    if dtype is not None and values.size:
        bounds = np.iinfo(wanted)
        if values.min() < bounds.min or values.max() > bounds.max:
            raise OverflowError(f"to_arrow: expected {dtype}. Received: {values.min()} to {values.max()}.")
    whole = np.ascontiguousarray(values, wanted)
    valid = None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(whole.dtype), len(whole), [valid, pa.py_buffer(whole)])


def from_arrow(array: pa.Array) -> np.ndarray:
    """Returns the values of an Arrow array, over the same memory where they are numbers without nulls.

    Args:
        array: Of any type. Nulls among numbers become NaN, as in ``Array.to_numpy``, which all but numbers and
            booleans go through.

    >>> from_arrow(pa.array([1, 2, 3], pa.int16())[1:]).tolist(), from_arrow(pa.array([True, False])).tolist()
    ([2, 3], [True, False])
    """
    kind = array.type
    is_bool = pa.types.is_boolean(kind)
    if array.null_count or not (is_bool or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return array.to_numpy(zero_copy_only=False)
    dtype = np.dtype(np.uint8 if is_bool else kind.to_pandas_dtype())
    memory = array.buffers()[1]
    if not len(array) or memory is None:
        return np.empty(0, np.bool_ if is_bool else dtype)
    if not is_bool:
        return np.frombuffer(memory, dtype, len(array), array.offset * dtype.itemsize)
    start, skipped = divmod(array.offset, 8)
    bits = np.unpackbits(np.frombuffer(memory, np.uint8, offset=start), count=skipped + len(array), bitorder="little")
    return bits[skipped:].view(np.bool_)


def zero_for_null(numbers: pa.Array) -> np.ndarray:
    """Returns an Arrow array's numbers, of the same type, and zeros for nulls.

    >>> zero_for_null(pa.array([7, None], pa.int32())).tolist()
    [7, 0]
    """
    if not numbers.null_count:
        return from_arrow(numbers)
    kept = np.zeros(len(numbers), numbers.type.to_pandas_dtype())
    kept[from_arrow(numbers.is_valid())] = from_arrow(numbers.drop_null())
    return kept


def raw_bytes(elements: np.ndarray, offsets: np.ndarray | None = None) -> pa.Array:
    """Returns rows as raw bytes, as ``tobytes`` writes them on most machines, little-endian.

    Args:
        elements: Of any type, of shape (rows, ...), or with offsets (elements, ...).
        offsets: int64 from zero, one more than there are rows: row i has the elements from ``offsets[i]`` up to, but
            without, ``offsets[i + 1]``; None makes a row of each element.

    Raises:
        OverflowError: They are 2 GiB or more.

    >>> raw_bytes(np.array([[97, 98], [99, 100]], np.uint8)).to_pylist()
    [b'ab', b'cd']
    """
    whole = np.ascontiguousarray(elements, elements.dtype.newbyteorder("<"))
    places = np.arange(len(whole) + 1) if offsets is None else offsets
    ends = places * (whole.dtype.itemsize * math.prod(whole.shape[1:]))
    if ends[-1] > _MOST_BYTES:
        raise OverflowError(
            f"raw_bytes: expected less than 2 GiB. Received: {ends[-1]:,} bytes in {len(ends) - 1} rows."
        )
    content = pa.py_buffer(whole.reshape(-1).view(np.uint8))
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, [None, pa.py_buffer(ends.astype(np.int32)), content])


def raw_type(field: Field) -> pa.DataType:
    """Returns the type of `raw_column`."""
    if field.kind == SPARSE:
        return pa.struct([("indices", pa.binary()), ("values", pa.binary())])
    return pa.list_(pa.binary()) if field.kind == TEXT else pa.binary()


def raw_column(field: Field, values: Values) -> pa.Array:
    """Returns rows that fit a model as a column that holds any type exactly, which `to_values` reads.

    Args:
        field: What they hold, with nothing open.

    Raises:
        OverflowError: They are 2 GiB or more.

    >>> raw_column(Field("label", ("y",), "int8", shape=()), np.array([97, 98], "int8")).to_pylist()
    [b'a', b'b']
    """
    if not isinstance(values, RaggedArray):
        return raw_bytes(values)
    parts = [raw_bytes(buffer, values.offsets) for buffer in values.buffers]
    if field.kind == SPARSE:
        return pa.StructArray.from_arrays(parts, ["indices", "values"])
    if field.kind == TEXT:
        each = math.prod(field.row_shape(()))
        return pa.ListArray.from_arrays(to_arrow(np.arange(0, len(values) + 1, each), dtype="int32"), parts[0])
    return parts[0]
