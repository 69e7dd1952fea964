"""From the user's columns to the prepared ones: which column is what for the model, and what is refused at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql.types import BooleanType, StructField, StructType

from elephant.data.nest import Nest
from elephant.data.schema import (
    FEATURES,
    LABEL,
    RAGGED,
    SCALAR,
    VALIDATION,
    WEIGHT,
    DataSchema,
    Field,
    role_of,
)
from elephant.errors import SchemaError
from elephant.modeling.facts import InputFacts, ModelFacts, OutputFacts
from elephant.spark.expressions import (
    array,
    check_element,
    depth_of,
    find_column,
    integer_type,
    is_scalar,
    is_vector,
    quoted,
    row_of,
    scalar,
    wrong_type,
)

# One column; several that make one vector; or by the name of the input or output.
Columns = str | Sequence[str]
ByName = Mapping[str, Columns]


@dataclass(frozen=True, kw_only=True)
class ColumnChoice:
    """The columns of a DataFrame that a fit is to use.

    Args:
        features: For a model with one input: one column, or several numeric ones that make one vector.
        inputs: Columns by the name of the model's input, instead of features; or a list in the order of the inputs.
        label: For a model with one output; None for one that trains without.
        labels: Columns by the name of the model's output, instead of label; or a list.
        weight: A numeric column, or one by the name of each output, or None.
        validation: A boolean column, or None.
    """

    features: Columns = "features"
    inputs: ByName | Sequence[str] | None = None
    label: str | None = "label"
    labels: ByName | Sequence[str] | None = None
    weight: str | Mapping[str, str] | None = None
    validation: str | None = None


@dataclass(frozen=True)
class Prepared:
    """One prepared column: what it holds, and the Spark expression that makes it."""

    field: Field
    expression: Column


def prepare_training(
    schema: StructType, facts: ModelFacts, choice: ColumnChoice, *, sparse: Collection[str] = ()
) -> tuple[DataSchema, list[Column]]:
    """Returns what to select from a DataFrame for training, and what the selection holds.

    Args:
        schema: The DataFrame's schema.
        facts: What the model takes.
        choice: Which columns to use.
        sparse: Those columns of vectors that are kept sparse.

    Raises:
        SchemaError: A column is missing or of a type that cannot be trained on.
    """
    inputs, x = prepare_inputs(schema, facts, choice, sparse=sparse)
    labels, y = _prepare_labels(schema, facts, choice)
    weights, w = prepare_weights(schema, facts, choice)
    validation = [] if choice.validation is None else [prepare_indicator(schema, choice.validation)]
    data_schema = DataSchema(
        inputs=tuple(column.field for column in inputs),
        labels=tuple(column.field for column in labels),
        weights=tuple(column.field for column in weights),
        validation=validation[0].field if validation else None,
        x=x,
        y=y,
        w=w,
        inputs_as_labels=not labels and not facts.own_step,
    )
    prepared = [*inputs, *labels, *weights, *validation]
    return data_schema, [column.expression.alias(column.field.role) for column in prepared]


def prepare_inputs(
    schema: StructType, facts: ModelFacts, choice: ColumnChoice, *, sparse: Collection[str] = ()
) -> tuple[list[Prepared], Nest]:
    """Returns one column for each input of the model, and how they are nested for Keras."""
    param = "featuresCol" if choice.inputs is None else "inputCols"
    chosen, nest = _chosen_inputs(facts, choice, param)
    prepared = []
    for position, (known, columns) in enumerate(chosen):
        fields = [find_column(schema, name, param) for name in columns]
        prepared.append(_prepare_input(fields, known, facts.dtype, role_of(FEATURES, position), param, sparse))
    return prepared, nest


def _chosen_inputs(
    facts: ModelFacts, choice: ColumnChoice, param: str
) -> tuple[list[tuple[InputFacts | None, list[str]]], Nest]:
    names = [known.name for known in facts.inputs]
    if choice.inputs is None:
        if len(names) > 1:
            raise SchemaError(
                f"inputCols: expected a column for each of the model's inputs {', '.join(names)}. Received: none. "
                f"Set inputCols={{{names[0]!r}: 'column', ...}}."
            )
        return [(facts.inputs[0] if facts.inputs else None, _listed(choice.features))], facts.x if facts.inputs else 0
    given = _by_name(choice.inputs, names, param)
    if facts.inputs:
        return [(known, given[known.name]) for known in facts.inputs], facts.x
    nest: Nest = tuple(range(len(given)))
    if isinstance(choice.inputs, Mapping):
        nest = {name: position for position, name in enumerate(given)}
    return [(None, columns) for columns in given.values()], nest


def _by_name(given: ByName | Sequence[str], names: Sequence[str], param: str) -> dict[str, list[str]]:
    """Returns the columns of each input or output; raises SchemaError unless all have some, and there are no others."""
    if not isinstance(given, Mapping):
        named = list(names) or [str(position) for position in range(len(given))]
        if len(given) != len(named):
            raise SchemaError(
                f"{param}: expected {len(named)} columns, for {', '.join(named)}. Received: {list(given)}."
            )
        return {name: _listed(column) for name, column in zip(named, given, strict=True)}
    if names and set(given) != set(names):
        raise SchemaError(
            f"{param}: expected a column for each of {', '.join(names)}. Received: columns for {', '.join(given)}."
        )
    return {name: _listed(columns) for name, columns in given.items()}


def _prepare_input(
    columns: list[StructField],
    known: InputFacts | None,
    floatx: str,
    role: str,
    param: str,
    sparse: Collection[str],
) -> Prepared:
    dtype = known.dtype if known is not None else floatx
    shape = known.shape if known is not None else None
    check_element(dtype, "inputs")
    names = tuple(column.name for column in columns)
    if len(columns) > 1 or is_scalar(columns[0].dataType):
        cast = row_of(columns, dtype, param)
        field = Field(role, names, cast.dtype, cast.kind, shape)
        if not field.accepts(len(columns)):
            raise SchemaError(
                f"{param}: expected {field.width} values for the model's input shape {shape}. "
                f"Received: {len(columns)} columns ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})."
            )
        return Prepared(field, cast.expression)
    column = columns[0]
    takes_sparse = known is not None and known.sparse
    if takes_sparse and not is_vector(column.dataType):
        raise wrong_type(column, param, "an ml or mllib vector, for a sparse input")
    cast = array(
        column,
        dtype,
        param,
        ragged=_differs(shape, depth_of(column.dataType)[0]),
        sparse=takes_sparse or column.name in sparse,
    )
    return Prepared(Field(role, names, cast.dtype, cast.kind, shape, sparse_tensor=takes_sparse), cast.expression)


def _differs(shape: tuple[int | None, ...] | None, depth: int) -> bool:
    """Whether a model takes sequences of any length, and rows are nested as deep as it takes them."""
    return shape is not None and len(shape) == depth and shape[0] is None and None not in shape[1:]


def _prepare_labels(schema: StructType, facts: ModelFacts, choice: ColumnChoice) -> tuple[list[Prepared], Nest]:
    names = [known.name for known in facts.outputs]
    if choice.labels is None:
        if choice.label is None:
            return [], 0
        if len(names) > 1 and not facts.own_step:
            raise SchemaError(
                f"labelCols: expected a column for each of the model's outputs {', '.join(names)}. Received: "
                f"labelCol={choice.label!r}. Set labelCols={{{names[0]!r}: 'column', ...}}."
            )
        nest = facts.y if len(names) == 1 else 0
        return [_prepare_label(schema, facts.outputs[0], facts.dtype, choice.label, LABEL, "labelCol")], nest
    compared = [known for known in facts.outputs if known.has_loss or facts.own_step]
    given = _by_name(choice.labels, [known.name for known in compared], "labelCols")
    prepared = [
        _prepare_label(schema, known, facts.dtype, given[known.name][0], role_of(LABEL, position), "labelCols")
        for position, known in enumerate(compared)
    ]
    if len(compared) == len(facts.outputs):
        return prepared, facts.y
    return prepared, {known.name: position for position, known in enumerate(compared)}


def labels_by_output(given: ByName | Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the label columns of each output; raises SchemaError unless all have some, and there are no others."""
    return _by_name(given, names, "labelCols")


def _prepare_label(schema: StructType, output: OutputFacts, floatx: str, name: str, role: str, param: str) -> Prepared:
    column = find_column(schema, name, param)
    if is_scalar(column.dataType):
        cast = scalar(column, integer_type(column.dataType) or floatx, param)
        return Prepared(Field(role, (name,), cast.dtype, SCALAR), cast.expression)
    depth, element = depth_of(column.dataType)
    sparse_classes = output.label_shape is None and integer_type(element) is not None
    cast = array(column, "int32" if sparse_classes and depth else floatx, param, ragged=_labels_differ(output, depth))
    shape = (None,) * depth if cast.kind == RAGGED and output.label_shape is None else output.label_shape
    return Prepared(Field(role, (name,), cast.dtype, cast.kind, shape), cast.expression)


def _labels_differ(output: OutputFacts, depth: int) -> bool:
    """Whether a label belongs to every element of a sequence of any length."""
    return depth > 0 and output.shape is not None and len(output.shape) > 1 and output.shape[0] is None


def prepare_weights(schema: StructType, facts: ModelFacts, choice: ColumnChoice) -> tuple[list[Prepared], Nest]:
    """Returns the columns of sample weights, none or one or one per output, and how they are nested for Keras."""
    if choice.weight is None:
        return [], 0
    if isinstance(choice.weight, str):
        return [_prepare_weight(schema, facts, choice.weight, WEIGHT)], 0
    names = [known.name for known in facts.outputs if known.has_loss]
    given = _by_name(choice.weight, names, "weightCol")
    prepared = [
        _prepare_weight(schema, facts, columns[0], role_of(WEIGHT, position))
        for position, columns in enumerate(given.values())
    ]
    return prepared, {name: position for position, name in enumerate(given)}


def _prepare_weight(schema: StructType, facts: ModelFacts, name: str, role: str) -> Prepared:
    cast = scalar(find_column(schema, name, "weightCol"), facts.dtype, "weightCol")
    return Prepared(Field(role, (name,), cast.dtype, SCALAR), cast.expression)


def prepare_indicator(schema: StructType, name: str) -> Prepared:
    """Returns the column that tells which rows are for validation."""
    column = find_column(schema, name, "validationIndicatorCol")
    if not isinstance(column.dataType, BooleanType):
        raise wrong_type(column, "validationIndicatorCol", "a boolean column")
    return Prepared(Field(VALIDATION, (name,), "bool", SCALAR), quoted(column))


def _listed(columns: Columns) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)
