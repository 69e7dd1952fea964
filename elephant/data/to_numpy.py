"""Arrow columns as arrays, without a copy where Arrow allows it, and with every row checked.

A list column becomes a matrix by taking its values buffer as it is: 300 to
3,000 times faster than going row by row, but right only when no row is null and
all rows are equally long. Both are checked here, before any row is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from elephant.data.ragged import RaggedArray, Values
from elephant.data.schema import DENSE, LABEL, RAGGED, SCALAR, SPARSE, TEXT, VALIDATION, WEIGHT, Field
from elephant.data.to_arrow import from_arrow, zero_for_null
from elephant.errors import DataError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Rows:
    """Row of the partition that an item of a batch belongs to, for messages.

    Args:
        first: The batch's first row.
        each: Items of a row.
        owners: The row of each sequence's element, counted from ``first``; None where items are rows, or parts of them.
    """

    first: int
    each: int = 1
    owners: np.ndarray | None = None

    def of(self, item: int) -> int:
        place = int(item) // max(self.each, 1)
        return self.first + (place if self.owners is None else int(self.owners[place]))


def to_values(
    column: pa.Array, field: Field, *, first_row: int = 0, row_shape: Sequence[int] | None = None
) -> tuple[Values, Shape | None]:
    """Returns a prepared Arrow column as an array, or as buffers with offsets.

    Args:
        column: ``num_rows`` values of one record batch.
        row_shape: Natural shape of a row in earlier batches; None before the first one.

    Returns:
        The values, and the natural shape of a row: () of scalars; of a ragged column that of one element
        of the sequence, and None where no sequence has an element to tell it; of a sparse one its size.

    Raises:
        DataError: A null, rows of different lengths, or a shape that the model does not take.
    """
    rows = _Rows(first_row)
    _refuse_nulls(column, field, rows)
    known = None if row_shape is None else tuple(row_shape)
    if field.kind == SCALAR:
        values = from_arrow(column)
        if field.role == VALIDATION:
            _refuse_other_marks(values, field, rows)
        return _cast(values, field, rows), ()
    if field.kind == SPARSE:
        return _sparse(column, field, rows, known)
    if field.kind == TEXT:
        return _text(column, field, rows, known)
    if field.kind == RAGGED:
        return _ragged(column, field, rows, known)
    return _dense(column, field, rows, known)


def to_numpy(column: pa.Array, field: Field, *, first_row: int = 0) -> np.ndarray:
    """Returns a prepared column of scalars or of equally long arrays as an array (rows, elements), or (rows,).

    Raises:
        DataError: As `to_values`.
    """
    values, _ = to_values(column, field, first_row=first_row)
    if isinstance(values, RaggedArray):
        raise TypeError(f"{field.title}: expected rows of one length. Received: {field.kind} ones.")
    return values if field.kind == SCALAR else values.reshape(len(values), -1)


def _dense(column: pa.Array, field: Field, rows: _Rows, known: Shape | None) -> tuple[np.ndarray, Shape]:
    if is_binary(column.type):
        return _raw(column, field, rows, known)
    num_rows = len(column)
    column, sizes = _flattened(column, field, rows, known)
    flat = _cast(from_arrow(column), field, replace(rows, each=math.prod(sizes)))
    return flat.reshape(num_rows, *sizes), sizes


def _flattened(column: pa.Array, field: Field, rows: _Rows, known: Shape | None) -> tuple[pa.Array, Shape]:
    """Returns the innermost elements of nested lists, one after the other, and the lists' lengths from outside in."""
    sizes: list[int] = []
    num_rows, depth = len(column), _depth(column.type)
    while is_list(column.type):
        lengths = _lengths(column)
        expected = _expected(field, known, len(sizes), depth, lengths)
        _refuse_other_lengths(lengths, expected, field, replace(rows, each=math.prod(sizes)))
        sizes.append(expected)
        column = column.flatten()
        _refuse_null_elements(column, math.prod(sizes), field, rows)
    width: int = math.prod(sizes)
    if num_rows and not (field.fits(sizes) and width):
        raise _wrong_width(field, tuple(sizes))
    return column, tuple(sizes)


def _raw(column: pa.Array, field: Field, rows: _Rows, known: Shape | None) -> tuple[np.ndarray, Shape]:
    """Returns rows of raw bytes: little-endian elements of the field's type, in the model's shape."""
    itemsize = np.dtype(field.dtype).itemsize
    offsets, data = _bytes_of(column)
    lengths = np.diff(offsets)
    width = math.prod(known) if known is not None else field.width
    if width is None:
        width = int(lengths[0]) // itemsize if len(lengths) else 0
    wrong = np.flatnonzero(lengths != width * itemsize)
    if len(lengths) and not width:
        raise DataError(
            f"{field.title}: expected {field.dtype} values of {itemsize} bytes each in every row, as numpy's tobytes "
            f"writes them. Received: {int(lengths[0])} bytes in row {rows.of(0)} of the partition, which hold none."
        )
    if len(wrong):
        shape = "" if field.width is None else f" of the model's shape {field.shape}"
        raise DataError(
            f"{field.title}: expected {width} {field.dtype} values{shape} in {width * itemsize} bytes, as "
            f"numpy's tobytes writes them. Received: {int(lengths[wrong[0]])} bytes in row "
            f"{rows.of(wrong[0])} of the partition. For encoded images give preprocessing=, which decodes them."
        )
    if len(lengths) and not (field.accepts(width) and width):
        raise _wrong_width(field, (width,))
    values = np.frombuffer(data, dtype=np.dtype(field.dtype).newbyteorder("<")).reshape(len(column), width)
    return values.astype(field.dtype, copy=False), (width,)


def _ragged(column: pa.Array, field: Field, rows: _Rows, known: Shape | None) -> tuple[RaggedArray, Shape | None]:
    if is_binary(column.type):
        inner = field.row_shape(())
        offsets, values = _raw_elements(column, field.dtype, inner)
        return RaggedArray(offsets, (values,)), inner
    lengths = _lengths(column)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    elements = column.flatten()
    owners = np.repeat(np.arange(len(column)), lengths)
    rows = replace(rows, owners=owners)
    if elements.null_count:
        place = int(np.argmax(from_arrow(elements.is_null())))
        title = f"{field.title}, element {place - int(offsets[owners[place]])}"
        raise _null(title, "a number", rows.of(place))
    if not is_list(elements.type):
        return RaggedArray(offsets, (_cast(from_arrow(elements), field, rows),)), ()
    shape = None if field.shape is None or None in field.shape[1:] else field.shape[1:]
    values, natural = _dense(elements, replace(field, kind=DENSE, shape=shape), rows, known)
    inner = field.row_shape(natural)
    told = natural if len(elements) or known is not None else None
    return RaggedArray(offsets, (values.reshape(len(values), *inner),)), told


def _raw_elements(column: pa.Array, dtype: str, inner: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Returns the offsets of rows of `elephant.data.to_arrow.raw_column`, of any length each, and their elements."""
    offsets, data = _bytes_of(column)
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(-1, *inner).astype(dtype, copy=False)
    return offsets // (values.dtype.itemsize * math.prod(inner)), values


def _sparse(column: pa.Array, field: Field, rows: _Rows, known: Shape | None) -> tuple[RaggedArray, Shape]:
    """Returns vectors: Spark's, which are structs of type (1 is dense), size, indices and values, or raw bytes."""
    if column.type.num_fields == 2:
        offsets, indices = _raw_elements(column.field("indices"), "int32", ())
        _, values = _raw_elements(column.field("values"), field.dtype, ())
        return RaggedArray(offsets, (indices, values)), (field.width or 0,)
    kinds, sizes, indices, values = (column.field(name) for name in ("type", "size", "indices", "values"))
    is_dense = from_arrow(kinds) == 1
    lengths = _lengths(values)
    numbers = zero_for_null(sizes)
    row_sizes = np.where(is_dense, lengths, numbers)
    size = known[0] if known else field.width
    if size is None:
        size = int(row_sizes[0]) if len(row_sizes) else 0
    _refuse_other_lengths(row_sizes, size, field, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    elements = values.flatten()
    owners = np.repeat(np.arange(len(column)), lengths)
    if elements.null_count:
        place = int(np.argmax(from_arrow(elements.is_null())))
        raise _null(f"{field.title}, value {place - int(offsets[owners[place]])}", "a number", rows.of(owners[place]))
    places = _places(indices, is_dense, offsets, owners)
    wrong = np.flatnonzero((places < 0) | (places >= size))
    if len(wrong):
        raise DataError(
            f"{field.title}: expected indices from 0 to {size - 1}, of vectors of size {size}. "
            f"Received: {places[wrong[0]]} in row {rows.of(owners[wrong[0]])} of the partition."
        )
    kept = _cast(from_arrow(elements), field, replace(rows, owners=owners))
    return RaggedArray(offsets, (places, kept)), (size,)


def _places(indices: pa.Array, is_dense: np.ndarray, offsets: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Returns the index of every value, int32; values of dense rows have none in the data."""
    places = np.empty(len(owners), np.int32)
    of_dense = is_dense[owners]
    places[~of_dense] = from_arrow(indices.flatten())
    places[of_dense] = (np.arange(len(places)) - offsets[owners])[of_dense]
    return places


def _text(column: pa.Array, field: Field, rows: _Rows, known: Shape | None) -> tuple[RaggedArray, Shape]:
    column, sizes = _flattened(column, field, rows, known)
    offsets, data = _bytes_of(column)
    return RaggedArray(offsets, (np.frombuffer(data, np.uint8),)), sizes


def _bytes_of(column: pa.Array) -> tuple[np.ndarray, memoryview]:
    """Returns offsets from zero, and the bytes of all rows."""
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    wide = column.cast(pa.large_binary())
    if len(wide) == 0:
        return np.zeros(1, np.int64), memoryview(b"")
    _, places, data = wide.buffers()
    offsets = np.frombuffer(places, np.int64)[wide.offset : wide.offset + len(wide) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    content = memoryview(b"") if data is None else memoryview(data)[first:last]
    return offsets - first, content


def _expected(field: Field, known: Shape | None, level: int, depth: int, lengths: np.ndarray) -> int:
    """Returns how many elements every list of a level has to have."""
    if known is not None and level < len(known):
        return int(known[level])
    if field.shape is not None and len(field.shape) == depth > 1:
        size = field.shape[level]
        if size is not None:
            return size
    if depth == 1 and field.width is not None:
        return field.width
    return int(lengths[0]) if len(lengths) else 0


def _cast(values: np.ndarray, field: Field, rows: _Rows) -> np.ndarray:
    dtype = np.dtype(field.dtype)
    if dtype.kind in "iu" and values.dtype.kind in "iu" and not np.can_cast(values.dtype, dtype) and len(values):
        limits = np.iinfo(dtype)
        wrong = np.flatnonzero((values < limits.min) | (values > limits.max))
        if len(wrong):
            raise DataError(
                f"{field.title}: expected integers from {limits.min} to {limits.max}, which the model takes. "
                f"Received: {values[wrong[0]]} in row {rows.of(wrong[0])} of the partition."
            )
    if dtype.kind in "iub" and values.dtype.kind == "f":
        limits = np.iinfo(np.int64 if dtype.kind == "b" else dtype)
        whole = np.trunc(values.astype(np.float64, copy=False))
        # The largest integer plus one, because a double does not hold the largest itself.
        wrong = np.flatnonzero(~((whole >= limits.min) & (whole < float(limits.max + 1))))
        if len(wrong):
            raise DataError(
                f"{field.title}: expected numbers from {limits.min} to {limits.max}, because the model takes "
                f"{field.dtype}. Received: {values[wrong[0]]} in row {rows.of(wrong[0])} of the partition."
            )
        return whole.astype(dtype)
    return values.astype(dtype, copy=False)


def is_list(kind: pa.DataType) -> bool:
    """Returns whether rows of the type are lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _depth(kind: pa.DataType) -> int:
    return 1 + _depth(kind.value_type) if is_list(kind) else 0


def is_binary(kind: pa.DataType) -> bool:
    """Returns whether rows of the type are raw bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _lengths(column: pa.Array) -> np.ndarray:
    if pa.types.is_fixed_size_list(column.type):
        return np.full(len(column), column.type.list_size, dtype=np.int64)
    if len(column) == 0:
        return np.empty(0, np.int64)
    return np.diff(from_arrow(column.offsets)).astype(np.int64)


def _refuse_nulls(column: pa.Array, field: Field, rows: _Rows) -> None:
    if column.null_count:
        raise _null(
            field.title,
            "a value in every row",
            rows.of(int(np.argmax(from_arrow(column.is_null())))),
        )


def _refuse_null_elements(values: pa.Array, width: int, field: Field, rows: _Rows) -> None:
    if values.null_count:
        position = int(np.argmax(from_arrow(values.is_null())))
        element = position % width
        single = len(field.columns) == width
        title = f"column {field.columns[element]!r}" if single else f"{field.title}, element {element}"
        expected = "a string" if field.kind == TEXT else "a number"
        raise _null(title, expected, replace(rows, each=width).of(position))


def _null(title: str, expected: str, row: int) -> DataError:
    return DataError(
        f"{title}: expected {expected}. Received: null in row {row} of the partition. "
        f"Drop such rows (df.dropna) or fill them (df.fillna) before fit.",
        topic="nulls",
    )


def _refuse_other_lengths(lengths: np.ndarray, expected: int, field: Field, rows: _Rows) -> None:
    wrong = np.flatnonzero(lengths != expected)
    if len(wrong):
        shape = "" if field.width is None else f" (the model's shape {field.shape})"
        is_row = rows.each == 1 and rows.owners is None
        hint = " Filter or pad the other rows; for sequences of any length give the model an Input((None,))."
        if len(wrong) == len(lengths) > 1 and np.all(lengths == lengths[0]):
            # It is not the rows.
            hint = f" So have the others: make the model's Input(({lengths[0]},)), or take other columns."
        hint = hint if is_row else ""
        if field.role.startswith(LABEL):
            hint = " The loss takes class numbers: one-hot labels are for categorical_crossentropy."
            hint = hint if field.num_classes else " A label has the shape of the model's output."
        if field.role.startswith(WEIGHT):
            hint = " Weights are one number for a row, or one for each loss that it has."
        raise DataError(
            f"{field.title}: expected {_counted(expected)} in every {'row' if is_row else 'inner array'}{shape}. "
            f"Received: {_counted(int(lengths[wrong[0]]))} in row {rows.of(wrong[0])} of the partition.{hint}",
            topic="rows-of-another-width",
        )


def _counted(number: int) -> str:
    return f"{number} value{'' if number == 1 else 's'}"


def _wrong_width(field: Field, sizes: Shape) -> DataError:
    received = _counted(sizes[0]) if len(sizes) == 1 else f"shape {sizes}"
    if not math.prod(sizes):
        return DataError(f"{field.title}: expected at least one value in every row. Received: rows of {received}.")
    hint = ""
    if len(sizes) == 1 and field.shape is not None and field.shape.count(None) > 1:
        hint = " Nested arrays tell the sizes that are free; or give a preprocessing function that reshapes the rows."
    return DataError(
        f"{field.title}: expected rows that fit the model's shape {field.shape}. Received: rows of {received}.{hint}",
        topic="rows-of-another-width",
    )


def _refuse_other_marks(marks: np.ndarray, field: Field, rows: _Rows) -> None:
    wrong = np.flatnonzero((marks != 0) & (marks != 1))
    if len(wrong):
        raise DataError(
            f"{field.title}: expected true and false, or 1 for a row of validation and 0 for all others. "
            f"Received: {marks[wrong[0]]} in row {rows.of(wrong[0])} of the partition."
        )


def refuse_bad_weights(weights: Values, title: str, first_row: int, *, whole: str = "partition") -> None:
    """Raises DataError unless all sample weights are finite and not negative, one of a row or several.

    Args:
        title: The column, in the error's words.
        whole: What rows are counted in, beginning with ``first_row``.
    """
    flat = weights.buffers[0] if isinstance(weights, RaggedArray) else weights.reshape(-1)
    wrong = np.flatnonzero(~(np.isfinite(flat) & (flat >= 0)))
    if not len(wrong):
        return
    item = int(wrong[0])
    if isinstance(weights, RaggedArray):
        row = int(np.searchsorted(weights.offsets, item, "right")) - 1
    else:
        row = item // math.prod(weights.shape[1:])
    raise DataError(
        f"{title}: expected weights that are finite and at least 0. "
        f"Received: {flat[item]} in row {first_row + row} of the {whole}."
    )


def refuse_unknown_classes(labels: Values, field: Field, first_row: int) -> None:
    """Raises DataError for a label that is none of the classes which the loss tells apart, nor the one it ignores.

    Fractions are cut off, as Keras does, but for probabilities. Labels of other losses may be anything.
    """
    count = field.num_classes
    flat = labels.buffers[0] if isinstance(labels, RaggedArray) else labels
    if count is None or not flat.size or (flat.min() >= 0 and flat.max() <= count - 1):
        return
    known = (flat >= 0) & (flat <= count - 1) if field.is_probability else (flat > -1) & (flat < count)
    if field.ignored_class is not None:
        known |= flat == field.ignored_class
    items = np.flatnonzero(~known.reshape(len(flat), -1).all(axis=1))
    if not len(items):
        return
    item = int(items[0])
    row = int(np.searchsorted(labels.offsets, item, "right")) - 1 if isinstance(labels, RaggedArray) else item
    raise DataError(
        f"{field.title}: expected class numbers from 0 to {count - 1}, "
        f"{'or probabilities between them, ' * field.is_probability}because the loss tells {count} "
        f"class{'es' if count > 1 else ''} apart. Received: {np.extract(~known[item], flat[item])[0]} in row "
        f"{first_row + row} of the partition. Number the classes from 0, or give the model's output a unit for each.",
        topic="labels-that-the-loss-cannot-compare",
    )
