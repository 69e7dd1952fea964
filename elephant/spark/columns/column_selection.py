"""Selection of columns: those of the user's choice, by the names of the model's inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from elephant.data.schema import (
    DENSE,
    FEATURES,
    LABEL,
    RAGGED,
    SCALAR,
    SPARSE,
    TEXT,
    DataSchema,
    Field,
    Nest,
    pack,
    role_of,
)
from elephant.errors import SchemaError, UnsupportedError
from elephant.modeling.model_info import BINARY, CLASSES, InputInfo, ModelInfo, OutputInfo

# One column, or several that make one vector.
Columns = str | Sequence[str]
# Of several inputs or outputs: by name, or in their order.
OfEach = Mapping[str, Columns] | Sequence[Columns]

# What elements are kept as, by the type that a model takes.
_ELEMENTS = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float32",
    "bfloat16": "float32",
    **{name: name for name in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool", "string")},
}


@dataclass(frozen=True, kw_only=True)
class ColumnSelection:
    """The columns of a DataFrame that a fit is to use.

    Args:
        features: One column, or several numeric ones that make one vector; for a model with several inputs, columns by
            the name of the input, or a list in the order of the inputs.
        label: The same for its outputs; None for a model that trains without.
        weight: A column of numbers or arrays, or one by the name of each output, or None.
        validation: A column of booleans or of 0 and 1, or None.
    """

    features: Columns | OfEach = "features"
    label: Columns | OfEach | None = "label"
    weight: str | Mapping[str, str] | None = None
    validation: str | None = None

    def of_inputs(self, info: ModelInfo) -> OfEach | None:
        """Returns the columns of each input; None where they are those of one."""
        return _of_each(self.features, len(info.inputs))

    def of_outputs(self, info: ModelInfo) -> OfEach | None:
        """Returns the columns of each output; None where they are those of one, or the model trains without."""
        compared = 0 if info.own_step else sum(output.needs_label for output in info.outputs)
        return _of_each(self.label, compared)


def _of_each(columns: Columns | OfEach | None, count: int) -> OfEach | None:
    """Returns columns that are for each of several inputs or outputs; None for those of one.

    A list of names is for each where there are several, and makes one vector where there are not. One that holds
    lists is for each in any case.

    >>> _of_each(["a", "b"], 1), _of_each(["a", "b"], 2), _of_each([["a"], ["b"]], 0), _of_each("a", 2)
    (None, ['a', 'b'], [['a'], ['b']], None)
    """
    if isinstance(columns, Mapping):
        return columns
    if columns is None or isinstance(columns, str):
        return None
    return columns if count > 1 or not all(isinstance(part, str) for part in columns) else None


def element_type(dtype: str) -> str:
    """Returns the type, as numpy calls it, in which elements for a model's input of some type are kept.

    Raises:
        UnsupportedError: No column can be cast to it.
    """
    if dtype not in _ELEMENTS:
        raise UnsupportedError(
            f"model: expected inputs of one of the types {', '.join(_ELEMENTS)}. Received: {dtype!r}."
        )
    return _ELEMENTS[dtype]


def by_name(
    given: OfEach, names: Sequence[str], param: str, *, required: Sequence[str] | None = None
) -> dict[str, list[str]]:
    """Returns the columns of each input or output, in the order of these.

    Args:
        given: What the param says: a dictionary, or a list in the order of the inputs or outputs.
        required: Of those that must have some; None requires all.

    Raises:
        SchemaError: One has no column that must have one, or a column is for none of them.

    >>> by_name(["a", "b"], ["image", "words"], "featuresCol")
    {'image': ['a'], 'words': ['b']}
    """
    kind = "input" if param == "featuresCol" else "output"
    required = names if required is None else required
    if not isinstance(given, Mapping):
        # A list names those that must be there, or all.
        named = next((known for known in (required, names) if len(known) == len(given)), None)
        if not names:
            named = [str(position) for position in range(len(given))]
        if named is None:
            shown = ", ".join(column if isinstance(column, str) else str(list(column)) for column in given)
            raise SchemaError(
                f"{param}: expected a column for each of the model's {kind}s {', '.join(required)}. "
                f"Received: {len(given)} columns: {shown}."
            )
        return {name: listed(column) for name, column in zip(named, given, strict=True)}
    missing = [name for name in required if name not in given]
    unknown = [name for name in given if names and name not in names]
    if missing or unknown:
        raise SchemaError(
            f"{param}: expected a column for each of the model's {kind}s {', '.join(required or names)}. "
            f"Received: columns for {', '.join(given)}. "
            + (f"Add one for {missing[0]!r}." if missing else f"The model has no {kind} {unknown[0]!r}.")
        )
    return {name: listed(given[name]) for name in (names or given) if name in given}


def listed(columns: str | Sequence[Any]) -> list[Any]:
    """Returns column names as a list."""
    return [columns] if isinstance(columns, str) else list(columns)


def chosen_inputs(info: ModelInfo, selection: ColumnSelection) -> tuple[list[tuple[InputInfo | None, list[str]]], Nest]:
    """Returns the model's inputs, None for an unknown one, with their columns, and how these are nested for Keras."""
    names = [input_info.name for input_info in info.inputs]
    of_each = selection.of_inputs(info)
    if of_each is None:
        if len(names) > 1:
            raise SchemaError(
                f"featuresCol: expected a column for each of the model's inputs {', '.join(names)}. Received: "
                f"{selection.features!r}. Set featuresCol={{{names[0]!r}: 'column', ...}}."
            )
        columns = listed(cast("Columns", selection.features))
        return [(info.inputs[0] if info.inputs else None, columns)], info.x if info.inputs else 0
    given = by_name(of_each, names, "featuresCol")
    if info.inputs:
        return [(input_info, given[input_info.name]) for input_info in info.inputs], info.x
    nest: Nest = tuple(range(len(given)))
    if isinstance(of_each, Mapping):
        nest = {name: position for position, name in enumerate(given)}
    return [(None, columns) for columns in given.values()], nest


def chosen_labels(info: ModelInfo, selection: ColumnSelection) -> tuple[list[tuple[OutputInfo, list[str]]], Nest]:
    """Returns the outputs that are compared with columns, and these, and how the labels are nested for Keras."""
    compared = [output for output in info.outputs if output.needs_label]
    of_each = selection.of_outputs(info)
    if of_each is not None:
        return _chosen_by_name(info, of_each, [output.name for output in compared])
    if selection.label is None:
        return [], 0
    columns = listed(cast("Columns", selection.label))
    if info.own_step and len(info.outputs) > 1:
        return [(_unknown(info), columns)], 0
    if len(compared) > 1:
        names = ", ".join(output.name for output in compared)
        raise SchemaError(
            f"labelCol: expected a column for each of the model's outputs {names}. Received: {selection.label!r}. "
            f"Set labelCol={{{compared[0].name!r}: 'column', ...}}."
        )
    if not compared and not info.own_step:
        raise SchemaError(
            f"labelCol: expected None, because none of the model's outputs has a loss. Received: {selection.label!r}."
        )
    output = compared[0] if compared else info.outputs[0]
    return [(output, columns)], pack(info.y, [0] * len(info.outputs))


def _chosen_by_name(
    info: ModelInfo, labels: OfEach, required: Sequence[str]
) -> tuple[list[tuple[OutputInfo, list[str]]], Nest]:
    names = [output.name for output in info.outputs]
    if info.own_step or not info.knows_outputs:
        given = by_name(labels, [], "labelCol")
        if not set(given) <= set(names):
            # Keras, or the model's own step, knows what it compares them with.
            nest: Nest = tuple(range(len(given)))
            if isinstance(labels, Mapping):
                nest = {name: position for position, name in enumerate(given)}
            return [(_unknown(info), columns) for columns in given.values()], nest
        required = [] if info.own_step else required
    given = by_name(labels, names, "labelCol", required=required)
    places = {name: position for position, name in enumerate(given)}
    chosen = [(info.outputs[names.index(name)], columns) for name, columns in given.items()]
    return chosen, pack(info.y, [places.get(name, 0) for name in names])


def _unknown(info: ModelInfo) -> OutputInfo:
    """Returns an output of which nothing is known."""
    return replace(info.outputs[0], shape=None, label_shape=None, num_classes=None)


def with_classes(field: Field, output: OutputInfo, param: str, *, weighted: bool) -> Field:
    """Returns a label with the class numbers that its loss takes, which every row is compared with.

    Args:
        weighted: Whether rows have weights: with a weight of zero a binary label may be anything.

    Raises:
        SchemaError: It is one number, where Keras' loss compares the output with something of another shape.
    """
    if output.shape is None or not (output.num_classes or output.is_elementwise):
        return field
    is_sparse = output.label_shape is None
    if field.kind == SCALAR and is_sparse and len(output.shape) > 1:
        raise SchemaError(
            f"{param}: expected class numbers of shape {output.shape[:-1]} in every row, for an output of shape "
            f"{output.shape}. Received: {field.title} with one number. Give an array, or a model with one output "
            "vector for each row.",
            topic="labels-that-the-loss-cannot-compare",
        )
    if field.kind == SCALAR and any(size not in (1, None) for size in output.label_shape or ()):
        remedy = "Give an array, or a list of columns."
        if output.is_elementwise and len(output.shape) == 1:
            remedy = (
                "Give an array, a list of columns, or the output one unit; for class numbers, compile the model with "
                "sparse_categorical_crossentropy."
            )
        if output.kind == CLASSES:
            remedy = "Compile the model with sparse_categorical_crossentropy for class numbers, or give one-hot labels."
        raise SchemaError(
            f"{param}: expected labels of the output's shape {output.shape}, which the loss compares them with. "
            f"Received: {field.title} with one number. {remedy}",
            topic="labels-that-the-loss-cannot-compare",
        )
    if output.num_classes == 1 and not is_sparse:
        raise SchemaError(
            f"{param}: expected an output with a unit for each class. Received: one unit, for which "
            "categorical_crossentropy is 0 whatever it says. Compile the model with binary_crossentropy, or give it "
            "more units.",
            topic="labels-that-the-loss-cannot-compare",
        )
    if output.num_classes and (is_sparse or (output.kind == BINARY and not weighted)):
        return replace(
            field,
            num_classes=output.num_classes,
            ignored_class=output.ignored_class,
            is_probability=not is_sparse,
        )
    return field


def common_loss_shape(outputs: Sequence[OutputInfo], param: str) -> tuple[int | None, ...] | None:
    """Returns the shape of one row's losses, which weights of several numbers a row are to have; None if not known.

    Raises:
        SchemaError: Weights for several outputs, whose losses are of several shapes.
    """
    compared = [output for output in outputs if output.has_loss]
    shapes = {output.loss_shape for output in compared}
    if len(shapes) > 1:
        raise SchemaError(
            f"{param}: expected weights for each of the outputs {', '.join(output.name for output in compared)}, whose "
            "losses are of several shapes. Received: an array for all of them. Give a dictionary by output, or one "
            "number per row."
        )
    return shapes.pop() if shapes else None


def are_sequences(outputs: Sequence[OutputInfo]) -> bool:
    """Returns whether a row of some output is a sequence of any length."""
    shapes = (output.shape for output in outputs)
    return any(shape is not None and len(shape) > 1 and shape[0] is None for shape in shapes)


def target_inputs(info: ModelInfo, selection: ColumnSelection) -> DataSchema:
    """Returns the inputs that a preprocessing function is to make, without labels.

    Every input has the columns that it is taken from when the function does not return it by its own name.
    """
    of_each = selection.of_inputs(info)
    given = {"": listed(cast("Columns", selection.features))} if of_each is None else _columns_of_each(of_each)
    if not info.inputs:
        fields = [
            Field(role_of(FEATURES, place), tuple(names), info.dtype) for place, names in enumerate(given.values())
        ]
        nest: Nest = 0 if of_each is None else tuple(range(len(given)))
        if isinstance(of_each, Mapping):
            nest = {name: place for place, name in enumerate(given)}
        return DataSchema(inputs=tuple(fields), x=nest)
    names = [input_info.name for input_info in info.inputs]
    taken: Mapping[str, Sequence[str]] = given
    if len(names) == 1 and not (isinstance(of_each, Mapping) and names[0] in given):
        taken = {names[0]: [name for columns in given.values() for name in columns]}
    elif of_each is not None and not isinstance(of_each, Mapping) and len(of_each) == len(names):
        taken = {name: listed(columns) for name, columns in zip(names, of_each, strict=True)}
    fields = [
        _target(input_info, role_of(FEATURES, place), tuple(taken.get(input_info.name, (input_info.name,))))
        for place, input_info in enumerate(info.inputs)
    ]
    return DataSchema(inputs=tuple(fields), x=info.x)


def input_columns(selection: ColumnSelection) -> list[str]:
    """Returns the columns of all inputs, each once.

    >>> input_columns(ColumnSelection(features={"image": "pixels", "place": ["x", "y", "x"]}))
    ['pixels', 'x', 'y']
    """
    parts = selection.features.values() if isinstance(selection.features, Mapping) else listed(selection.features)
    return list(dict.fromkeys(name for part in parts for name in listed(part)))


def _columns_of_each(of_each: OfEach) -> dict[str, list[str]]:
    """Returns the columns of each input, by its name or else by their own."""
    if isinstance(of_each, Mapping):
        return {name: listed(columns) for name, columns in of_each.items()}
    return {", ".join(listed(columns)): listed(columns) for columns in of_each}


def _target(input_info: InputInfo, role: str, columns: tuple[str, ...]) -> Field:
    dtype, shape = element_type(input_info.dtype), input_info.shape
    kind = DENSE
    if dtype == "string":
        kind = TEXT
    elif input_info.sparse:
        kind = SPARSE
    elif shape and shape[0] is None and None not in shape[1:]:
        kind = RAGGED
    return Field(role, columns, dtype, kind, shape, sparse_tensor=input_info.sparse)


def target_labels(info: ModelInfo, selection: ColumnSelection) -> tuple[list[Field], Nest]:
    """Returns the labels that the model is compared with, whose types are open, and how they are nested for Keras."""
    chosen, nest = chosen_labels(info, selection)
    fields = []
    for place, (known, columns) in enumerate(chosen):
        of_each = known.shape is not None and len(known.shape) > 1 and known.shape[0] is None
        of_each = of_each or known.takes_sequences
        shape = (known.label_shape or (None,)) if of_each else known.label_shape
        dtype = "int32" if known.label_shape is None else info.dtype
        is_class = known.label_shape is None and len(known.shape or ()) == 1
        kind = RAGGED if of_each else SCALAR if is_class else DENSE
        fields.append(Field(role_of(LABEL, place), tuple(columns), dtype, kind, shape))
    return fields, nest
