"""Schema of the records of an RDD: fields, shapes and types."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from elephant.data.records import RecordPlan, Shape, as_array, cut_vector, sparse_parts
from elephant.data.schema import (
    DENSE,
    FEATURES,
    LABEL,
    RAGGED,
    SCALAR,
    SPARSE,
    TEXT,
    VALIDATION,
    WEIGHT,
    DataSchema,
    Field,
    Nest,
    nest_of,
    pack,
    role_of,
    unpack,
)
from elephant.errors import SchemaError
from elephant.modeling.model_info import InputInfo, ModelInfo, OutputInfo
from elephant.spark.columns.column_selection import are_sequences, common_loss_shape, element_type, with_classes
from elephant.spark.columns.column_types import nest_of_targets

_LEFT_OUT = -1


@dataclass(frozen=True)
class RecordColumn:
    """A prepared column.

    Args:
        field: What it holds.
        natural: Shape of its part in the first record; of a ragged one that of an element of the sequence.
    """

    field: Field
    natural: Shape


def input_column(leaf: Any, input_info: InputInfo | None, floatx: str, role: str, title: str) -> RecordColumn:
    """Returns the column of one input of the model.

    Args:
        input_info: What the model says of the input; None when it says nothing.
    """
    shape = None if input_info is None else input_info.shape
    dtype = element_type(floatx if input_info is None else input_info.dtype)
    if dtype == "string" or (input_info is None and _is_text(leaf)):
        natural = _text_shape(leaf, title)
        return RecordColumn(Field(role, (title,), "string", TEXT, _fitting(shape, natural, title)), natural)
    sparse = sparse_parts(leaf)
    takes_sparse = input_info is not None and input_info.sparse
    if takes_sparse or (sparse is not None and (shape is None or len(shape) == 1)):
        natural = (sparse[0],) if sparse is not None else _numbers(leaf, title).shape
        field = Field(role, (title,), dtype, SPARSE, _fitting(shape, natural, title), sparse_tensor=takes_sparse)
        return RecordColumn(field, natural)
    array = _numbers(leaf, title)
    if shape is not None and len(shape) == array.ndim and shape[:1] == (None,) and None not in shape[1:]:
        return _ragged(array, role, title, dtype, shape)
    return RecordColumn(Field(role, (title,), dtype, DENSE, _fitting(shape, array.shape, title)), array.shape)


def label_column(leaf: Any, output: OutputInfo, floatx: str, role: str, title: str) -> RecordColumn:
    """Returns the column of the labels of one output: integers stay integers, unless the model's output says more."""
    array = _numbers(leaf, title)
    integer = None if array.dtype.kind == "f" else "int64" if array.dtype.itemsize == 8 else "int32"
    if array.ndim == 0:
        return RecordColumn(Field(role, (title,), integer or floatx, SCALAR), ())
    dtype = integer if integer is not None and output.label_shape is None else floatx
    if output.takes_sequences and array.ndim == 1:
        return _ragged(array, role, title, dtype, (None,))
    if output.shape is not None and len(output.shape) > 1 and output.shape[0] is None:
        inner = output.label_shape[1:] if output.label_shape is not None else array.shape[1:]
        return _ragged(array, role, title, dtype, (None, *inner))
    return RecordColumn(
        Field(role, (title,), dtype, DENSE, _fitting(output.label_shape, array.shape, title)), array.shape
    )


def weight_column(leaf: Any, outputs: Sequence[OutputInfo], floatx: str, role: str, title: str) -> RecordColumn:
    """Returns the column of the sample weights of some outputs: one number for a record, or one for each of its losses.

    Args:
        outputs: The one that is weighted, or all.
    """
    array = _numbers(leaf, title)
    if array.ndim == 0:
        return RecordColumn(Field(role, (title,), floatx, SCALAR), ())
    shape = common_loss_shape(outputs, title)
    if shape == ():
        raise SchemaError(
            f"{title}: expected one number per record, because the loss has one value of each. Received: {leaf!r}."
        )
    if shape is None and are_sequences(outputs):
        shape = (None, *array.shape[1:])
    if shape is not None and shape[0] is None and None not in shape[1:]:
        return _ragged(array, role, title, floatx, shape)
    return RecordColumn(Field(role, (title,), floatx, DENSE, _fitting(shape, array.shape, title)), array.shape)


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
            f"Received: {_described_leaf(leaf)}."
        )
    return array


def _described_leaf(leaf: Any) -> str:
    text = repr(leaf)
    return f"{type(leaf).__name__} {text if len(text) < 60 else text[:60] + '...'}"


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, (str, bytes)) or (not hasattr(leaf, "indices") and as_array(leaf).dtype.kind in "US")


def _text_shape(leaf: Any, title: str) -> Shape:
    shape = () if isinstance(leaf, (str, bytes)) else np.asarray(leaf, dtype=object).shape
    items = [leaf] if shape == () else np.asarray(leaf, dtype=object).ravel().tolist()
    if not all(isinstance(item, (str, bytes)) for item in items):
        raise SchemaError(f"{title}: expected strings in the first record. Received: {_described_leaf(leaf)}.")
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


@dataclass(frozen=True)
class _Part:
    """x, y or the weights of a record: its columns, how they are nested in it, and how for the model."""

    columns: Sequence[RecordColumn] = ()
    found: Nest = _LEFT_OUT
    fed: Nest = 0
    cut: tuple[int, ...] | None = None


def plan_training(first: Any, info: ModelInfo, *, marked: bool = False) -> RecordPlan:
    """Finds the columns for training in records like the first one.

    Raises:
        SchemaError: The record is not what the model can be trained on.
    """
    pieces = list(first) if isinstance(first, tuple) and len(first) in (1, 2, 3) else [first]
    given = [*pieces, None, None]
    x, y, w = _inputs(given[0], info), _labels(given[1], info, given[2]), _weights(given[2], info)
    if not y.columns:
        _refuse_missing_labels(first, info)
    as_labels = not y.columns and not info.own_step and any(output.needs_label for output in info.outputs)
    schema = DataSchema(
        inputs=_fields(x),
        labels=_fields(y),
        weights=_fields(w),
        validation=Field(VALIDATION, ("validation",), "bool", SCALAR) if marked else None,
        x=x.fed,
        y=nest_of_targets(_fields(x), x.fed, info) if as_labels else y.fed,
        w=w.fed,
        inputs_as_labels=as_labels,
    )
    parts = [x, y, w][: len(pieces)]
    found: Nest = x.found if pieces[0] is first else tuple(_placed(parts))
    shapes = [column.natural for part in parts for column in part.columns]
    if marked:
        found, shapes = (found, _num_selected(found)), [*shapes, ()]
    return RecordPlan(schema=schema, nest=_numbered(found), shapes=tuple(shapes), cut=x.cut)


def plan_inputs(first: Any, info: ModelInfo) -> RecordPlan:
    """Finds the model's inputs in records like the first one, each of which is x alone."""
    x = _inputs(first, info)
    shapes = tuple(column.natural for column in x.columns)
    return RecordPlan(schema=DataSchema(inputs=_fields(x), x=x.fed), nest=x.found, shapes=shapes, cut=x.cut)


def _fields(part: _Part) -> tuple[Field, ...]:
    return tuple(column.field for column in part.columns)


def _inputs(value: Any, info: ModelInfo) -> _Part:
    names = [input_info.name for input_info in info.inputs]
    if not names:
        found, leaves = (0, [value]) if _is_list_of_numbers(value) else nest_of(value)
        columns = [
            input_column(leaf, None, info.dtype, role_of(FEATURES, place), _title("x", place, len(leaves)))
            for place, leaf in enumerate(leaves)
        ]
        return _Part(columns, found, found)
    found, leaves, cut = _matched_inputs(value, info, names)
    columns = [
        input_column(leaf, input_info, info.dtype, role_of(FEATURES, place), _title("x", input_info.name, len(names)))
        for place, (input_info, leaf) in enumerate(zip(info.inputs, leaves, strict=True))
    ]
    return _Part(columns, found, info.x, cut)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(as_array(part).ndim == 0 for part in value)


def _matched_inputs(value: Any, info: ModelInfo, names: list[str]) -> tuple[Nest, list[Any], tuple[int, ...] | None]:
    matched = _matched(value, info.x, names)
    if matched is not None:
        return *matched, None
    # Zero where the model takes any.
    widths = [math.prod(size or 0 for size in input_info.shape) for input_info in info.inputs]
    flat = None if isinstance(value, (dict, str)) else as_array(value)
    if flat is None or not all(widths) or flat.size != sum(widths) or flat.dtype.kind not in "biuf":
        raise SchemaError(
            f"x: expected a part for each of the model's inputs {', '.join(names)}: a dictionary by their names, or a "
            f"tuple in their order. Received: {_described(value)} in the first record."
        )
    # One vector that holds the inputs' values one after the other, as Elephas has them.
    return 0, cut_vector(value, widths), tuple(widths)


def _matched(value: Any, fed: Nest, names: Sequence[str]) -> tuple[Nest, list[Any]] | None:
    """Returns the nest of a value, with positions in the order of the names, and its leaves; None for another nest."""
    by_name = {name: place for place, name in enumerate(names)}
    if len(names) == 1 and not isinstance(value, dict):
        wrapped = isinstance(value, (tuple, list)) and len(value) == 1 and getattr(value[0], "ndim", 0) > 0
        return ((0,), [value[0]]) if wrapped else (0, [value])
    nests: list[Nest] = [fed, by_name, tuple(range(len(names)))]
    for nest in nests:
        try:
            if nest != 0:
                return nest, unpack(nest, value)
        except ValueError:
            continue
    return None


def _labels(value: Any, info: ModelInfo, weight: Any) -> _Part:
    if value is None:
        return _Part()
    if info.own_step or not info.knows_outputs:
        return _labels_as_they_are(value, info)
    compared = [output for output in info.outputs if output.needs_label]
    names = [output.name for output in compared]
    if not compared:
        raise SchemaError("y: expected None, because none of the model's outputs has a loss. Received: labels.")
    matched = _matched(_without_uncompared(value, info), info.y if compared == list(info.outputs) else 0, names)
    if matched is None:
        raise SchemaError(
            f"y: expected a label for each of the model's outputs {', '.join(names)}: a dictionary by their names, "
            f"or a tuple in their order. Received: {_described(value)} in the first record."
        )
    found, leaves = matched
    if len(compared) < len(info.outputs) and isinstance(value, (tuple, list)) and len(value) == len(info.outputs):
        found = tuple(names.index(known.name) if known.name in names else _LEFT_OUT for known in info.outputs)
    columns = [
        replace(column, field=with_classes(column.field, output, "y", weighted=weight is not None))
        for column, output in zip(_label_columns(leaves, compared, names, info.dtype), compared, strict=True)
    ]
    return _Part(columns, found, _like_outputs(names, info))


def _labels_as_they_are(value: Any, info: ModelInfo) -> _Part:
    """Returns labels nested as the records have them: what they are compared with, only the model's own step knows."""
    found, leaves = nest_of(value) if isinstance(value, (dict, tuple)) else (0, [value])
    output = info.outputs[0] if len(leaves) == len(info.outputs) == 1 else replace(info.outputs[0], label_shape=None)
    names = [str(place) for place in range(len(leaves))]
    return _Part(_label_columns(leaves, [output] * len(leaves), names, info.dtype), found, found)


def _label_columns(
    leaves: Sequence[Any], outputs: Sequence[OutputInfo], names: Sequence[str], floatx: str
) -> list[RecordColumn]:
    return [
        label_column(leaf, output, floatx, role_of(LABEL, place), _title("y", name, len(leaves)))
        for place, (leaf, output, name) in enumerate(zip(leaves, outputs, names, strict=True))
    ]


def _like_outputs(names: Sequence[str], info: ModelInfo) -> Nest:
    """Returns the nest of the model's outputs; one that has no part gets the first, as Keras wants it whole."""
    places = {name: place for place, name in enumerate(names)}
    return pack(info.y, [places.get(output.name, 0) for output in info.outputs])


def _without_uncompared(value: Any, info: ModelInfo) -> Any:
    """Returns a list of labels without those of outputs that nothing compares, which are given as None."""
    if isinstance(value, (tuple, list)) and len(value) == len(info.outputs) > 1:
        pairs = zip(value, info.outputs, strict=True)
        kept = tuple(part for part, output in pairs if output.needs_label)
        return kept[0] if len(kept) == 1 else kept
    return value


def _weights(value: Any, info: ModelInfo) -> _Part:
    if value is None:
        return _Part()
    compared = [output for output in info.outputs if output.has_loss]
    names = [output.name for output in compared]
    is_of_all = not isinstance(value, (dict, tuple, list)) or (_is_list_of_numbers(value) and len(names) <= 1)
    if is_of_all:
        return _Part([weight_column(value, compared or info.outputs, info.dtype, WEIGHT, "weight")], 0, 0)
    matched = _matched(value, 0, names)
    if matched is None:
        raise SchemaError(
            f"weight: expected a number, or one for each of the outputs {', '.join(names)}. "
            f"Received: {_described(value)} in the first record."
        )
    found, leaves = matched
    columns = [
        weight_column(leaf, [output], info.dtype, role_of(WEIGHT, place), _title("weight", output.name, len(names)))
        for place, (leaf, output) in enumerate(zip(leaves, compared, strict=True))
    ]
    return _Part(columns, found, _like_outputs(names, info))


def _refuse_missing_labels(first: Any, info: ModelInfo) -> None:
    """Raises unless the model may be trained without labels: by a train_step of its own, or on its own input."""
    if info.own_step or not any(output.needs_label for output in info.outputs):
        return
    inputs, outputs = [input_info.shape for input_info in info.inputs], [known.shape for known in info.outputs]
    if inputs and None not in outputs and inputs != outputs:
        raise SchemaError(
            "fit: expected an RDD of tuples (x, y) or (x, y, weight); x alone only for a model that gives its input "
            f"back. Received: {_described(first)} as the first record. Map the RDD: rdd.map(lambda r: (r.x, r.y))."
        )


def _placed(parts: Sequence[_Part]) -> Iterator[Nest]:
    """Yields the parts' nests with positions that follow one another."""
    start = 0
    for part in parts:
        yield _moved(part.found, start)
        start += _num_selected(part.found)


def _moved(nest: Nest, by: int) -> Nest:
    if isinstance(nest, dict):
        return {name: _moved(inner, by) for name, inner in nest.items()}
    if isinstance(nest, tuple):
        return tuple(_moved(inner, by) for inner in nest)
    return nest if nest == _LEFT_OUT else nest + by


def _leaves_of(nest: Nest) -> list[int]:
    if isinstance(nest, (dict, tuple)):
        inner = nest.values() if isinstance(nest, dict) else nest
        return [leaf for part in inner for leaf in _leaves_of(part)]
    return [nest]


def _num_selected(nest: Nest) -> int:
    return sum(leaf != _LEFT_OUT for leaf in _leaves_of(nest))


def _numbered(nest: Nest) -> Nest:
    """Returns the nest with positions behind all others for the parts that are left out."""
    behind = itertools.count(_num_selected(nest))

    def place(inner: Nest) -> Nest:
        if isinstance(inner, dict):
            return {name: place(part) for name, part in inner.items()}
        if isinstance(inner, tuple):
            return tuple(place(part) for part in inner)
        return next(behind) if inner == _LEFT_OUT else inner

    return place(nest)


def _title(what: str, name: object, count: int) -> str:
    return what if count == 1 else f"{what} {name}"


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dictionary with the keys {sorted(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {shape}"
