"""Columns as a preprocessing function gets them: as they are in the DataFrame, whatever the model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyspark.ml.functions import vector_to_array
from pyspark.sql import Column
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    FloatType,
    NumericType,
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
    PreparedColumn,
    chosen_labels,
    nest_of_targets,
    prepare_indicator,
    prepare_weights,
)
from elephant.spark.expressions import (
    depth_of,
    element_type,
    find_column,
    integer_type,
    is_vector,
    number_of,
    quoted,
    wrong_type,
)


def prepare_raw_training(
    schema: StructType, facts: ModelInfo, choice: ColumnSelection
) -> tuple[DataSchema, DataSchema, list[Column]]:
    """Returns what to select from a DataFrame for training with a preprocessing function.

    Returns:
        What the selection holds, what the function is to make of it, and the selection.

    Raises:
        SchemaError: A column is missing, or of a type that no function gets.
    """
    inputs, x = prepare_raw_inputs(schema, choice)
    made, y = _labels(facts, choice)
    present = [field for field in made if _has(schema, field.columns[0])]
    labels = [_raw_label(schema, field.columns[0], role_of(LABEL, place)) for place, field in enumerate(present)]
    weights, w = prepare_weights(schema, facts, choice, y)
    validation = [] if choice.validation is None else [prepare_indicator(schema, choice.validation)]
    raw = DataSchema(
        inputs=tuple(column.field for column in inputs),
        labels=tuple(column.field for column in labels),
        weights=tuple(column.field for column in weights),
        validation=validation[0].field if validation else None,
        x=x,
    )
    inputs_only = target_inputs(facts, choice)
    as_labels = not made and not facts.own_step and any(output.needs_label for output in facts.outputs)
    if as_labels:
        y = nest_of_targets(inputs_only.inputs, inputs_only.x, facts)
    target = replace(
        inputs_only,
        labels=tuple(made),
        weights=raw.weights,
        validation=raw.validation,
        y=y,
        w=w,
        inputs_as_labels=as_labels,
    )
    prepared = [*inputs, *labels, *weights, *validation]
    return raw, target, [column.expression.alias(column.field.role) for column in prepared]


def prepare_raw_inputs(schema: StructType, choice: ColumnSelection) -> tuple[list[PreparedColumn], Nest]:
    """Returns the columns that a preprocessing function gets, and how its batch nests them, by their names."""
    param = "featuresCol" if choice.inputs is None else "inputCols"
    prepared: list[PreparedColumn] = []
    nest: dict[str, Nest] = {}
    for name in dict.fromkeys(name for names in _given(choice).values() for name in names):
        column, first = find_column(schema, name, param), len(prepared)
        if not isinstance(column.dataType, StructType):
            nest[name] = first
            prepared.append(raw_column(column, role_of(FEATURES, first), param))
            continue
        nest[name] = {part.name: first + place for place, part in enumerate(column.dataType.fields)}
        for place, part in enumerate(column.dataType.fields):
            title = StructField(f"{name}.{part.name}", part.dataType)
            prepared.append(
                raw_column(title, role_of(FEATURES, first + place), param, quoted(column).getField(part.name))
            )
    return prepared, nest


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
        return {"": _listed(choice.features)}
    if isinstance(choice.inputs, Mapping):
        return {name: _listed(columns) for name, columns in choice.inputs.items()}
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


def _raw_label(schema: StructType, name: str, role: str) -> PreparedColumn:
    prepared = raw_column(find_column(schema, name, "labelCol"), role, "labelCol")
    return replace(prepared, field=replace(prepared.field, columns=(name,)))


def raw_column(column: StructField, role: str, param: str, expression: Column | None = None) -> PreparedColumn:
    """Returns a column in its own type.

    Args:
        expression: The column, where its name alone does not find it.
    """
    kind, value = column.dataType, quoted(column) if expression is None else expression
    if is_vector(kind):
        return PreparedColumn(Field(role, (column.name,), "float64", DENSE), vector_to_array(value, "float64"))
    depth, element = depth_of(kind)
    if isinstance(element, (StringType, BinaryType)):
        dtype = "string" if isinstance(element, StringType) else "bytes"
        return PreparedColumn(Field(role, (column.name,), dtype, TEXT), value)
    if isinstance(element, (NumericType, BooleanType)) or (not depth and isinstance(element, _TIMES)):
        if isinstance(element, DecimalType):
            value = value.cast("array<" * depth + "double" + ">" * depth)
        field = Field(role, (column.name,), _numpy_type(element), RAGGED if depth else SCALAR)
        return PreparedColumn(field, number_of(value, element))
    raise wrong_type(column, param, "numbers, strings, binary, dates, timestamps, vectors, arrays or a struct of them")


_TIMES = (DateType, TimestampType, TimestampNTZType)


def _numpy_type(kind: DataType) -> str:
    if isinstance(kind, BooleanType):
        return "bool"
    if isinstance(kind, FloatType):
        return "float32"
    return "int32" if isinstance(kind, DateType) else integer_type(kind) or "float64"


def _has(schema: StructType, name: str) -> bool:
    return name.lower() in (field.name.lower() for field in schema.fields)


def _listed(columns: str | Sequence[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)
