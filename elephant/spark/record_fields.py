"""Which prepared column one part of a record becomes: a number, an array, a sequence, a sparse vector or strings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from elephant.data.records import Shape, as_array, sparse_parts
from elephant.data.schema import DENSE, RAGGED, SCALAR, SPARSE, TEXT, Field
from elephant.errors import SchemaError
from elephant.modeling.model_info import InputFacts, OutputFacts
from elephant.spark.expressions import check_element

_FED_AS = {"float16": "float32", "bfloat16": "float32"}


@dataclass(frozen=True)
class RecordColumn:
    """A prepared column.

    Args:
        field: What it holds.
        natural: Shape of its part in the first record; of a ragged one that of an element of the sequence.
    """

    field: Field
    natural: Shape


def input_column(leaf: Any, known: InputFacts | None, floatx: str, role: str, title: str) -> RecordColumn:
    """Returns the column of one input of the model.

    Args:
        leaf: Its part in the first record.
        known: What the model says of the input; None when it says nothing.
        floatx: The type of inputs that the model says nothing of.
        role: The column's role.
        title: How messages call it.
    """
    shape = None if known is None else known.shape
    dtype = floatx if known is None else known.dtype
    check_element(dtype, "inputs")
    if dtype == "string" or (known is None and _is_text(leaf)):
        natural = _text_shape(leaf, title)
        return RecordColumn(Field(role, (title,), "string", TEXT, _fitting(shape, natural, title)), natural)
    dtype = _FED_AS.get(dtype, dtype)
    sparse = sparse_parts(leaf)
    takes_sparse = known is not None and known.sparse
    if takes_sparse or (sparse is not None and (shape is None or len(shape) == 1)):
        natural = (sparse[0],) if sparse is not None else _numbers(leaf, title).shape
        field = Field(role, (title,), dtype, SPARSE, _fitting(shape, natural, title), sparse_tensor=takes_sparse)
        return RecordColumn(field, natural)
    array = _numbers(leaf, title)
    if shape is not None and len(shape) == array.ndim and shape[:1] == (None,) and None not in shape[1:]:
        return _ragged(array, role, title, dtype, shape)
    return RecordColumn(Field(role, (title,), dtype, DENSE, _fitting(shape, array.shape, title)), array.shape)


def label_column(leaf: Any, output: OutputFacts, floatx: str, role: str, title: str) -> RecordColumn:
    """Returns the column of the labels of one output: integers stay integers, unless the model's output says more."""
    array = _numbers(leaf, title)
    integer = None if array.dtype.kind == "f" else "int64" if array.dtype.itemsize == 8 else "int32"
    if array.ndim == 0:
        return RecordColumn(Field(role, (title,), integer or floatx, SCALAR), ())
    dtype = integer if integer is not None and output.label_shape is None else floatx
    if output.shape is not None and len(output.shape) > 1 and output.shape[0] is None:
        inner = output.label_shape[1:] if output.label_shape is not None else array.shape[1:]
        return _ragged(array, role, title, dtype, (None, *inner))
    return RecordColumn(
        Field(role, (title,), dtype, DENSE, _fitting(output.label_shape, array.shape, title)), array.shape
    )


def weight_column(leaf: Any, floatx: str, role: str, title: str) -> RecordColumn:
    """Returns the column of the sample weights of one output, or of all."""
    if _numbers(leaf, title).ndim:
        raise SchemaError(f"{title}: expected one number per record. Received: {leaf!r}.")
    return RecordColumn(Field(role, (title,), floatx, SCALAR), ())


def _ragged(array: np.ndarray, role: str, title: str, dtype: str, shape: tuple[int | None, ...]) -> RecordColumn:
    inner = tuple(int(size or 0) for size in shape[1:])
    if math.prod(array.shape[1:]) != math.prod(inner):
        raise _wrong_shape(title, shape, array.shape)
    return RecordColumn(Field(role, (title,), dtype, RAGGED, shape), array.shape[1:])


def _numbers(leaf: Any, title: str) -> np.ndarray:
    array = as_array(leaf)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and array.size == 0 and array.ndim == 0):
        raise SchemaError(
            f"{title}: expected numbers, arrays of them or Spark vectors in the first record. "
            f"Received: {_described(leaf)}."
        )
    return array


def _described(leaf: Any) -> str:
    text = repr(leaf)
    return f"{type(leaf).__name__} {text if len(text) < 60 else text[:60] + '...'}"


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, (str, bytes)) or (not hasattr(leaf, "indices") and as_array(leaf).dtype.kind in "US")


def _text_shape(leaf: Any, title: str) -> Shape:
    shape = () if isinstance(leaf, (str, bytes)) else np.asarray(leaf, dtype=object).shape
    items = [leaf] if shape == () else np.asarray(leaf, dtype=object).ravel().tolist()
    if not all(isinstance(item, (str, bytes)) for item in items):
        raise SchemaError(f"{title}: expected strings in the first record. Received: {_described(leaf)}.")
    return shape


def _fitting(shape: tuple[int | None, ...] | None, natural: Shape, title: str) -> Shape:
    """Returns the shape that every row is to have for the model, of the one in the first record.

    Flat records take the model's shape, and dimensions of size one may be left out or added: any other
    shape that holds as many values is more likely a mistake, such as channels first.
    """
    if shape is None:
        return natural or (1,)
    if len(shape) == len(natural):
        if all(size in (None, given) for size, given in zip(shape, natural, strict=True)):
            return natural
    width = math.prod(natural)
    known = math.prod(size for size in shape if size is not None)
    if len(natural) <= 1 and shape.count(None) <= 1 and width % max(known, 1) == 0:
        fitted = tuple(width // max(known, 1) if size is None else size for size in shape)
        if math.prod(fitted) == width:
            return fitted
    if None not in shape and [size for size in shape if size != 1] == [size for size in natural if size != 1]:
        return tuple(int(size or 0) for size in shape)
    raise _wrong_shape(title, shape, natural)


def _wrong_shape(title: str, shape: tuple[int | None, ...], natural: Shape) -> SchemaError:
    return SchemaError(
        f"{title}: expected the model's shape {shape}, or as many values in a flat array. "
        f"Received: shape {natural} in the first record."
    )
