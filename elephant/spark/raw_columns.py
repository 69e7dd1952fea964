"""Columns as a preprocessing function gets them: as they are in the DataFrame, whatever the model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    FloatType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from elephant.data.nested import Nest
from elephant.data.schema import DENSE, FEATURES, LABEL, RAGGED, SCALAR, SPARSE, TEXT, DataSchema, Field, role_of
from elephant.modeling.model_info import InputInfo, ModelInfo
from elephant.spark.column_selection import (
    ColumnSelection,
    chosen_labels,
    depth_of,
    element_type,
    find_column,
    integer_type,
    is_scalar,
    is_vector,
    listed,
    schema_with_targets,
    wrong_type,
)


def raw_training_schema(
    columns: StructType, facts: ModelInfo, choice: ColumnSelection
) -> tuple[DataSchema, DataSchema]:
    """Returns what a preprocessing function gets for training, and what it is to make of that.

    Raises:
        SchemaError: A column is missing, or of a type that no function gets.
    """
    inputs = raw_input_schema(columns, choice)
    made, y = _labels(facts, choice)
    labels: list[Field] = []
    for field in made:
        name = field.columns[0]
        if name.lower() in (column.name.lower() for column in columns.fields):
            label = raw_field(find_column(columns, name, "labelCol"), role_of(LABEL, len(labels)), "labelCol")
            labels.append(replace(label, columns=(name,)))
    target = schema_with_targets(columns, facts, choice, target_inputs(facts, choice), made, y)
    raw = replace(inputs, labels=tuple(labels), weights=target.weights, validation=target.validation)
    return raw, target


def raw_input_schema(columns: StructType, choice: ColumnSelection) -> DataSchema:
    """Returns the columns that a preprocessing function gets, and how its batch nests them, by their names."""
    param = "featuresCol" if choice.inputs is None else "inputCols"
    fields: list[Field] = []
    nest: dict[str, Nest] = {}
    for name in dict.fromkeys(name for names in _given(choice).values() for name in names):
        column, first = find_column(columns, name, param), len(fields)
        if not isinstance(column.dataType, StructType):
            nest[name] = first
            fields.append(raw_field(column, role_of(FEATURES, first), param))
            continue
        nest[name] = {part.name: first + place for place, part in enumerate(column.dataType.fields)}
        parts = (StructField(f"{name}.{part.name}", part.dataType) for part in column.dataType.fields)
        fields += [raw_field(part, role_of(FEATURES, first + place), param) for place, part in enumerate(parts)]
    return DataSchema(inputs=tuple(fields), x=nest)


def target_inputs(facts: ModelInfo, choice: ColumnSelection) -> DataSchema:
    """Returns what a preprocessing function is to make of the columns, without labels.

    Every input has the columns that it is taken from when the function does not return it by its own name.
    """
    given = _given(choice)
    if not facts.inputs:
        fields = [
            Field(role_of(FEATURES, place), tuple(names), facts.dtype) for place, names in enumerate(given.values())
        ]
        nest: Nest = 0 if choice.inputs is None else tuple(range(len(given)))
        if isinstance(choice.inputs, Mapping):
            nest = {name: place for place, name in enumerate(given)}
        return DataSchema(inputs=tuple(fields), x=nest)
    names = [known.name for known in facts.inputs]
    taken: Mapping[str, Sequence[str]] = given
    if len(names) == 1 and not (isinstance(choice.inputs, Mapping) and names[0] in given):
        taken = {names[0]: [name for columns in given.values() for name in columns]}
    elif isinstance(choice.inputs, Sequence) and len(choice.inputs) == len(names):
        taken = {name: [column] for name, column in zip(names, choice.inputs, strict=True)}
    fields = [
        _target(known, role_of(FEATURES, place), tuple(taken.get(known.name, (known.name,))))
        for place, known in enumerate(facts.inputs)
    ]
    return DataSchema(inputs=tuple(fields), x=facts.x)


def _given(choice: ColumnSelection) -> dict[str, list[str]]:
    """Returns the chosen columns, by the names that they have in ``inputCols``, or by their own."""
    if choice.inputs is None:
        return {"": listed(choice.features)}
    if isinstance(choice.inputs, Mapping):
        return {name: listed(columns) for name, columns in choice.inputs.items()}
    return {name: [name] for name in choice.inputs}


def _target(known: InputInfo, role: str, columns: tuple[str, ...]) -> Field:
    dtype, shape = element_type(known.dtype), known.shape
    kind = DENSE
    if dtype == "string":
        kind = TEXT
    elif known.sparse:
        kind = SPARSE
    elif shape and shape[0] is None and None not in shape[1:]:
        kind = RAGGED
    return Field(role, columns, dtype, kind, shape, sparse_tensor=known.sparse)


def _labels(facts: ModelInfo, choice: ColumnSelection) -> tuple[list[Field], Nest]:
    """Returns the labels that the model is compared with, whose types are open, and how they are nested for Keras."""
    chosen, nest = chosen_labels(facts, choice)
    fields = []
    for place, (known, column) in enumerate(chosen):
        of_each = known.shape is not None and len(known.shape) > 1 and known.shape[0] is None
        shape = (known.label_shape or (None,)) if of_each else known.label_shape
        dtype = "int32" if known.label_shape is None else facts.dtype
        is_class = known.label_shape is None and len(known.shape or ()) == 1
        kind = RAGGED if of_each else SCALAR if is_class else DENSE
        fields.append(Field(role_of(LABEL, place), (column,), dtype, kind, shape))
    return fields, nest


def raw_field(column: StructField, role: str, param: str) -> Field:
    """Returns a column in its own type."""
    names, (depth, element) = (column.name,), depth_of(column.dataType)
    if is_vector(column.dataType):
        return Field(role, names, "float64", DENSE)
    if isinstance(element, (StringType, BinaryType)):
        return Field(role, names, "string" if isinstance(element, StringType) else "bytes", TEXT)
    if not is_scalar(element) or (depth and isinstance(element, (DateType, TimestampType, TimestampNTZType))):
        expected = "numbers, strings, binary, dates, timestamps, vectors, arrays or a struct of them"
        raise wrong_type(column, param, expected)
    known: dict[type[DataType], str] = {BooleanType: "bool", FloatType: "float32", DateType: "int32"}
    dtype = known.get(type(element)) or integer_type(element) or "float64"
    return Field(role, names, dtype, RAGGED if depth else SCALAR)
