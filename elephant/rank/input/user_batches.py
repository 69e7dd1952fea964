"""A batch as the user's functions see it, a dictionary of arrays by name; and what they return as values of columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from elephant.data.ragged import RaggedArray, Values, dense, strings
from elephant.data.schema import DENSE, RAGGED, SPARSE, TEXT, WEIGHT, Field
from elephant.data.to_numpy import refuse_bad_weights
from elephant.errors import DataError

Shape = tuple[int, ...]


def user_array(field: Field, shape: Sequence[int], values: Values) -> np.ndarray:
    """Returns a column of a batch as the user's functions see it.

    Returns:
        An array (rows, ...). Strings and bytes are in arrays of objects. Sequences are one array where those of
        the batch are equally long, and an array of objects (rows,), an array each, where they are not.
    """
    if not isinstance(values, RaggedArray):
        return values
    if field.kind == SPARSE:
        return dense(values, math.prod(shape)).reshape(len(values), *shape)
    if field.kind == RAGGED:
        return _sequences(values)
    items = strings(values, shape)
    if field.dtype == "string":
        flat = np.empty(items.size, object)
        flat[:] = [item.decode() for item in items.ravel()]
        items = flat.reshape(items.shape)
    return items


def _sequences(values: RaggedArray) -> np.ndarray:
    elements, offsets = values.buffers[0], values.offsets
    lengths = np.diff(offsets)
    if len(lengths) and (lengths == lengths[0]).all():
        return elements.reshape(len(lengths), int(lengths[0]), *elements.shape[1:])
    return _objects([elements[start:stop] for start, stop in zip(offsets[:-1], offsets[1:], strict=True)])


def _objects(items: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(items), object)
    for place, item in enumerate(items):
        array[place] = item
    return array


def as_array(value: Any) -> np.ndarray:
    """Returns the result of a user's function as an array: of objects where rows differ in shape."""
    if isinstance(value, (list, tuple)):
        rows = [as_array(row) if hasattr(row, "__array__") else row for row in value]
        if any(isinstance(row, (str, bytes)) for row in rows):
            # numpy's own strings lose zeros at their ends.
            return _objects(rows)
        try:
            return np.asarray(rows)
        except ValueError:
            return _objects(rows)
    if callable(getattr(value, "detach", None)):
        value = value.detach().cpu()
    if callable(getattr(value, "numpy", None)):
        value = value.numpy()
    return np.asarray(value)


def fitted(field: Field, value: Any, num_rows: int, name: str) -> tuple[Field, Values]:
    """Returns rows that a user's function has made as the values of a column that the model takes.

    Args:
        field: What the model takes; a shape of None, or with None in it, takes what comes.

    Returns:
        What the column holds, in which nothing is open any more, and its values.

    Raises:
        DataError: Other rows, another shape, or another type of elements than the model takes.
    """
    array = as_array(value)
    if array.ndim == 0 or len(array) != num_rows:
        received = "one value" if array.ndim == 0 else f"{len(array)} rows"
        raise DataError(
            f"{name}: expected {num_rows} rows, as many as the batch has. Received: {received}. "
            "preprocessing and augmentation change rows; filter them before fit."
        )
    if field.kind == TEXT:
        return _fitted_text(field, array, name)
    if field.kind == RAGGED:
        made, sequences = _fitted_sequences(field, array, name)
        if field.role.startswith(WEIGHT):
            refuse_bad_weights(sequences, name, 0, whole="batch")
        return made, sequences
    if array.dtype == object:
        array = _stacked(array, field, name)
    shape = _fitting_shape(field, array.shape[1:], array, name)
    array = _cast(field, array.reshape(num_rows, *shape), name)
    if field.role.startswith(WEIGHT):
        refuse_bad_weights(array, name, 0, whole="batch")
    if field.kind == SPARSE:
        return replace(field, shape=shape), _selected_elements(array)
    return replace(field, kind=DENSE, shape=shape), array


def label_type(array: np.ndarray, floatx: str) -> str:
    """Returns the type in which labels are kept: integers stay such, all else becomes the model's type.

    Sequences of different lengths tell it by their elements, as those of equal lengths do.

    >>> label_type(np.array([True]), "float32"), label_type(np.array([2**40]), "float32")
    ('int32', 'int64')
    """
    dtype = array.dtype
    if dtype.kind == "O":
        types = {row.dtype for row in map(np.asarray, array) if row.ndim and row.size}
        if types and all(kind.kind in "iub" for kind in types):
            dtype = np.result_type(*types)
    if dtype.kind not in "iub":
        return floatx
    return "int64" if dtype.itemsize == 8 else "int32"


def _stacked(array: np.ndarray, field: Field, name: str) -> np.ndarray:
    try:
        return np.stack([np.asarray(row) for row in array])
    except ValueError:
        shapes = sorted({np.shape(row) for row in array})
        raise DataError(
            f"{name}: expected rows of one shape, for {_described(field)}. Received: rows of the shapes "
            f"{', '.join(map(str, shapes[:3]))}{', ...' if len(shapes) > 3 else ''}. "
            "Have preprocessing bring them to one, as images are resized and sequences padded."
        ) from None


def _fitting_shape(field: Field, received: Shape, array: np.ndarray, name: str) -> Shape:
    """Returns the shape of a row for the model: the one that came, or one that differs in ones or is flat in it."""
    wanted = field.shape
    if wanted is None or _fits(wanted, received):
        return received
    known = tuple(size for size in wanted if size is not None)
    if len(known) == len(wanted) and math.prod(known) == math.prod(received):
        if len(received) <= 1 or _without_ones(received) == _without_ones(known):
            return known
    raise DataError(
        f"{name}: expected {_described(field)}. Received: an array of shape {tuple(array.shape)}, "
        f"so rows of shape {received}. Have preprocessing return rows of the shape that the model takes."
    )


def _fits(wanted: Sequence[int | None], received: Shape) -> bool:
    return len(wanted) == len(received) and all(
        size is None or size == came for size, came in zip(wanted, received, strict=True)
    )


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _described(field: Field) -> str:
    what = "the model's input" if field.role.startswith("features") else "the label"
    return f"{what} {'' if field.shape is None else f'of shape {field.shape} '}and type {field.dtype}"


def _cast(field: Field, array: np.ndarray, name: str) -> np.ndarray:
    dtype = np.dtype(field.dtype)
    if array.dtype == dtype:
        return array
    # As numpy, but for booleans of integers, which Spark's own columns allow too.
    allowed = np.can_cast(array.dtype, dtype, "same_kind") or (dtype.kind in "iub" and array.dtype.kind in "iub")
    if not allowed:
        raise DataError(
            f"{name}: expected {_described(field)}. Received: elements of type {array.dtype}. "
            f"Have preprocessing return them with .astype({field.dtype!r})."
        )
    if dtype.kind in "iu" and array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise DataError(
                f"{name}: expected integers from {limits.min} to {limits.max}, which the model takes. "
                f"Received: {array.min()} to {array.max()}."
            )
    return array.astype(dtype)


def _fitted_text(field: Field, array: np.ndarray, name: str) -> tuple[Field, RaggedArray]:
    shape = _fitting_shape(field, array.shape[1:], array, name)
    items = array.ravel().tolist()
    for item in items:
        if not isinstance(item, (str, bytes)):
            raise DataError(f"{name}: expected strings, which the model takes. Received: {item!r}.")
    encoded = [item.encode() if isinstance(item, str) else item for item in items]
    offsets = np.concatenate([[0], np.cumsum([len(item) for item in encoded], dtype=np.int64)]).astype(np.int64)
    return replace(field, shape=shape), RaggedArray(offsets, (np.frombuffer(b"".join(encoded), np.uint8),))


def _fitted_sequences(field: Field, array: np.ndarray, name: str) -> tuple[Field, RaggedArray]:
    rows = [np.asarray(row) for row in array]
    wanted = None if field.shape is None else field.shape[1:]
    # Sequences without elements do not tell what theirs are like.
    empty = () if wanted is None else tuple(size or 0 for size in wanted)
    inner = next((row.shape[1:] for row in rows if row.ndim and len(row)), empty)
    rows = [row if row.ndim == 0 or len(row) else np.empty((0, *inner), field.dtype) for row in rows]
    for row in rows:
        if row.ndim == 0 or row.shape[1:] != inner or (wanted is not None and not _fits(wanted, inner)):
            raise DataError(
                f"{name}: expected a sequence in every row, for {_described(field)}. "
                f"Received: a row of shape {row.shape}."
            )
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)
    # Empty lists have numpy's default type, which says nothing.
    filled = [row for row in rows if len(row)] or rows
    elements = _cast(field, np.concatenate(filled), name) if filled else np.empty((0, *inner), field.dtype)
    return replace(field, shape=(None, *inner)), RaggedArray(offsets, (elements,))


def _selected_elements(array: np.ndarray) -> RaggedArray:
    """Returns the elements of a matrix that are not zero, as a sparse column keeps them."""
    rows, places = np.nonzero(array)
    offsets = np.searchsorted(rows, np.arange(len(array) + 1))
    return RaggedArray(offsets.astype(np.int64), (places.astype(np.int32), array[rows, places]))


def natural_shapes(fields: Sequence[Field]) -> dict[str, Shape]:
    """Returns the natural shape of a row of columns in which nothing is open, as `fitted` returns them, by role."""
    return {field.role: tuple(size for size in field.shape or () if size is not None) for field in fields}
