"""From the user's columns to the prepared ones: which column is what for the model, and what is refused at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pyspark.sql import Column
from pyspark.sql.types import BooleanType, StringType, StructField, StructType

from elephant.data.nested import Nest
from elephant.data.schema import DENSE, FEATURES, SCALAR, VALIDATION, DataSchema, Field, role_of
from elephant.errors import SchemaError
from elephant.modeling.model_info import InputFacts, ModelFacts
from elephant.spark.choice import ColumnChoice as ColumnChoice
from elephant.spark.choice import Prepared, by_name, listed
from elephant.spark.expressions import (
    array,
    check_element,
    depth_of,
    find_column,
    is_scalar,
    is_vector,
    quoted,
    row_of,
    wrong_type,
)
from elephant.spark.targets import nest_of_targets, prepare_labels, prepare_weights


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
    labels, y = prepare_labels(schema, facts, choice)
    weights, w = prepare_weights(schema, facts, choice, y)
    as_labels = not labels and not facts.own_step and any(output.needs_label for output in facts.outputs)
    if as_labels:
        y = nest_of_targets([column.field for column in inputs], x, facts)
    validation = [] if choice.validation is None else [prepare_indicator(schema, choice.validation)]
    data_schema = DataSchema(
        inputs=tuple(column.field for column in inputs),
        labels=tuple(column.field for column in labels),
        weights=tuple(column.field for column in weights),
        validation=validation[0].field if validation else None,
        x=x,
        y=y,
        w=w,
        inputs_as_labels=as_labels,
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


def undecided_vectors(schema: StructType, data_schema: DataSchema) -> list[str]:
    """Returns the columns of vectors for dense inputs: they are kept sparse if their first row is.

    Args:
        schema: The DataFrame's schema.
        data_schema: What was prepared of it.
    """
    return [
        field.columns[0]
        for field in data_schema.inputs
        if field.kind == DENSE
        and len(field.columns) == 1
        and is_vector(find_column(schema, field.columns[0], "featuresCol").dataType)
    ]


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
        return [(facts.inputs[0] if facts.inputs else None, listed(choice.features))], facts.x if facts.inputs else 0
    given = by_name(choice.inputs, names, param)
    if facts.inputs:
        return [(known, given[known.name]) for known in facts.inputs], facts.x
    nest: Nest = tuple(range(len(given)))
    if isinstance(choice.inputs, Mapping):
        nest = {name: position for position, name in enumerate(given)}
    return [(None, columns) for columns in given.values()], nest


def _prepare_input(
    columns: list[StructField],
    known: InputFacts | None,
    floatx: str,
    role: str,
    param: str,
    sparse: Collection[str],
) -> Prepared:
    dtype = known.dtype if known is not None else _own_type(columns, floatx)
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


def _own_type(columns: Sequence[StructField], floatx: str) -> str:
    """Returns the type of elements for an input that nothing is known of: numbers are floats."""
    texts = [isinstance(depth_of(column.dataType)[1], StringType) for column in columns]
    return "string" if all(texts) else floatx


def _differs(shape: tuple[int | None, ...] | None, depth: int) -> bool:
    """Whether a model takes sequences of any length, and rows are nested as deep as it takes them.

    Plain numbers are a sequence of vectors of one.
    """
    if not shape or shape[0] is not None or None in shape[1:]:
        return False
    return len(shape) == depth or (depth == 1 and set(shape[1:]) == {1})


def prepare_indicator(schema: StructType, name: str) -> Prepared:
    """Returns the column that tells which rows are for validation."""
    column = find_column(schema, name, "validationIndicatorCol")
    if not isinstance(column.dataType, BooleanType):
        raise wrong_type(column, "validationIndicatorCol", "a boolean column")
    return Prepared(Field(VALIDATION, (name,), "bool", SCALAR), quoted(column))
