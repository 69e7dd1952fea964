"""Columns of a frame that a model takes: choice, roles, and targets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import Column
from pyspark.sql.types import BooleanType, StringType, StructField, StructType

from elephant.data.nested import Nest, num_leaves, pack
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
    role_of,
)
from elephant.errors import SchemaError
from elephant.modeling.model_info import InputInfo, ModelInfo, OutputInfo
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
class ColumnSelection:
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
class PreparedColumn:
    """One prepared column: what it holds, and the Spark expression that makes it."""

    field: Field
    expression: Column


def by_name(
    given: ByName | Sequence[str], names: Sequence[str], param: str, *, required: Sequence[str] | None = None
) -> dict[str, list[str]]:
    """Returns the columns of each input or output, in the order of these.

    Args:
        given: What the param says: a dictionary, or a list in the order of the inputs or outputs.
        required: Of those that must have some; None requires all.

    Raises:
        SchemaError: One has no column that must have one, or a column is for none of them.

    >>> by_name(["a", "b"], ["image", "words"], "inputCols")
    {'image': ['a'], 'words': ['b']}
    """
    kind = "input" if param == "inputCols" else "output"
    required = names if required is None else required
    if not isinstance(given, Mapping):
        # A list names those that must be there, or all.
        named = next((known for known in (required, names) if len(known) == len(given)), None)
        if not names:
            named = [str(position) for position in range(len(given))]
        if named is None:
            hint = " Several columns that make one vector are featuresCol's." if kind == "input" else ""
            raise SchemaError(
                f"{param}: expected a column for each of the model's {kind}s {', '.join(required)}. "
                f"Received: {len(given)} columns: {', '.join(given)}.{hint}"
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


def listed(columns: Columns) -> list[str]:
    """Returns column names as a list."""
    return [columns] if isinstance(columns, str) else list(columns)


def prepare_labels(schema: StructType, facts: ModelInfo, choice: ColumnSelection) -> tuple[list[PreparedColumn], Nest]:
    """Returns a column for each output that is compared with one, and how these are nested for Keras.

    An output that is compared with nothing gets the first label in the nest: Keras wants the structure whole.

    Raises:
        SchemaError: A column is missing or unusable, or the params do not fit the model's outputs.
    """
    param = "labelCol" if choice.labels is None else "labelCols"
    chosen, nest = chosen_labels(facts, choice)
    prepared = [
        _prepare_label(schema, output, facts.dtype, name, role_of(LABEL, position), param)
        for position, (output, name) in enumerate(chosen)
    ]
    return prepared, nest


def chosen_labels(facts: ModelInfo, choice: ColumnSelection) -> tuple[list[tuple[OutputInfo, str]], Nest]:
    """Returns the outputs that are compared with a column and its name, and how the labels are nested for Keras."""
    compared = [output for output in facts.outputs if output.needs_label]
    if choice.labels is not None:
        return _chosen_by_name(facts, choice.labels, [output.name for output in compared])
    if choice.label is None:
        return [], 0
    if facts.own_step and len(facts.outputs) > 1:
        return [(_unknown(facts), choice.label)], 0
    if len(compared) > 1:
        names = ", ".join(output.name for output in compared)
        raise SchemaError(
            f"labelCols: expected a column for each of the model's outputs {names}. Received: "
            f"labelCol={choice.label!r}. Set labelCols={{{compared[0].name!r}: 'column', ...}}."
        )
    if not compared and not facts.own_step:
        raise SchemaError(
            f"labelCol: expected None, because none of the model's outputs has a loss. Received: {choice.label!r}."
        )
    output = compared[0] if compared else facts.outputs[0]
    return [(output, choice.label)], pack(facts.y, [0] * len(facts.outputs))


def _chosen_by_name(
    facts: ModelInfo, labels: Mapping[str, str | Sequence[str]] | Sequence[str], required: Sequence[str]
) -> tuple[list[tuple[OutputInfo, str]], Nest]:
    names = [output.name for output in facts.outputs]
    if facts.own_step or not facts.knows_outputs:
        given = by_name(labels, [], "labelCols")
        if not set(given) <= set(names):
            # Keras, or the model's own step, knows what it compares them with.
            nest: Nest = tuple(range(len(given)))
            if isinstance(labels, Mapping):
                nest = {name: position for position, name in enumerate(given)}
            return [(_unknown(facts), columns[0]) for columns in given.values()], nest
        required = [] if facts.own_step else required
    given = by_name(labels, names, "labelCols", required=required)
    places = {name: position for position, name in enumerate(given)}
    chosen = [(facts.outputs[names.index(name)], columns[0]) for name, columns in given.items()]
    return chosen, pack(facts.y, [places.get(name, 0) for name in names])


def _unknown(facts: ModelInfo) -> OutputInfo:
    """Returns an output of which nothing is known."""
    return replace(facts.outputs[0], shape=None, label_shape=None)


def _prepare_label(
    schema: StructType, output: OutputInfo, floatx: str, name: str, role: str, param: str
) -> PreparedColumn:
    column = find_column(schema, name, param)
    if is_scalar(column.dataType):
        cast = scalar(column, integer_type(column.dataType) or floatx, param)
        return PreparedColumn(Field(role, (name,), cast.dtype, SCALAR), cast.expression)
    depth, element = depth_of(column.dataType)
    if isinstance(element, StringType):
        raise wrong_type(column, param, "numbers, such as pyspark.ml.feature.StringIndexer makes of strings")
    sparse_classes = output.label_shape is None and integer_type(element) is not None
    cast = array(column, "int32" if sparse_classes and depth else floatx, param, ragged=_labels_differ(output, depth))
    shape = (None,) * depth if cast.kind == RAGGED and output.label_shape is None else output.label_shape
    return PreparedColumn(Field(role, (name,), cast.dtype, cast.kind, shape), cast.expression)


def _labels_differ(output: OutputInfo, depth: int) -> bool:
    """Whether a label belongs to every element of a sequence of any length."""
    return depth > 0 and output.shape is not None and len(output.shape) > 1 and output.shape[0] is None


def nest_of_targets(inputs: Sequence[Field], x: Nest, facts: ModelInfo) -> Nest:
    """Returns which input every output of an autoencoder is compared with: of the same name, or of the same place.

    Raises:
        SchemaError: They cannot be told apart, or an input is none that a loss takes.
    """
    for field in inputs:
        if field.kind == TEXT or field.kind == SPARSE and field.sparse_tensor:
            raise SchemaError(
                f"labelCol: expected a column to compare the model's output with, because its input ({field.title}) "
                f"is {'text' if field.kind == TEXT else 'a sparse tensor'}. Received: none. Set labelCol or labelCols."
            )
    if not facts.knows_outputs:
        return x
    names, sources = [output.name for output in facts.outputs], [known.name for known in facts.inputs]
    needed = [output.name for output in facts.outputs if output.needs_label]
    if len(inputs) == 1:
        places = [0] * len(names)
    elif set(needed) <= set(sources):
        places = [sources.index(name) if name in sources else 0 for name in names]
    elif len(names) == num_leaves(x):
        places = list(range(len(names)))
    else:
        raise SchemaError(
            f"labelCols: expected a column for each of the outputs {', '.join(needed)}, because they are neither named "
            f"nor as many as the inputs {', '.join(sources)}. Received: none. Set labelCols."
        )
    return pack(facts.y, places)


def prepare_weights(
    schema: StructType, facts: ModelInfo, choice: ColumnSelection, y: Nest
) -> tuple[list[PreparedColumn], Nest]:
    """Returns the columns of sample weights: none, one for all outputs, or one for each, nested as the labels are.

    Raises:
        SchemaError: A column is missing or not numeric, or an output has none.
    """
    if choice.weight is None:
        return [], 0
    if isinstance(choice.weight, str):
        return [_prepare_weight(schema, facts, choice.weight, WEIGHT)], 0
    names = [output.name for output in facts.outputs] if facts.knows_outputs else []
    required = [output.name for output in facts.outputs if output.needs_label] if names else []
    given = by_name(choice.weight, names, "weightCol", required=required)
    prepared = [
        _prepare_weight(schema, facts, columns[0], role_of(WEIGHT, position))
        for position, columns in enumerate(given.values())
    ]
    places = {name: position for position, name in enumerate(given)}
    if not names:
        return prepared, places if isinstance(y, dict) else pack(y, range(len(given)))
    return prepared, pack(facts.y, [places.get(name, 0) for name in names])


def _prepare_weight(schema: StructType, facts: ModelInfo, name: str, role: str) -> PreparedColumn:
    cast = scalar(find_column(schema, name, "weightCol"), facts.dtype, "weightCol")
    return PreparedColumn(Field(role, (name,), cast.dtype, SCALAR), cast.expression)


def prepare_training(
    schema: StructType, facts: ModelInfo, choice: ColumnSelection, *, sparse: Collection[str] = ()
) -> tuple[DataSchema, list[Column]]:
    """Returns what to select from a DataFrame for training, and what the selection holds.

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
    schema: StructType, facts: ModelInfo, choice: ColumnSelection, *, sparse: Collection[str] = ()
) -> tuple[list[PreparedColumn], Nest]:
    """Returns one column for each input of the model, and how they are nested for Keras."""
    param = "featuresCol" if choice.inputs is None else "inputCols"
    chosen, nest = _chosen_inputs(facts, choice, param)
    prepared = []
    for position, (known, columns) in enumerate(chosen):
        fields = [find_column(schema, name, param) for name in columns]
        prepared.append(_prepare_input(fields, known, facts.dtype, role_of(FEATURES, position), param, sparse))
    return prepared, nest


def undecided_vectors(schema: StructType, data_schema: DataSchema) -> list[str]:
    """Returns the columns of vectors for dense inputs: they are kept sparse if their first row is."""
    return [
        field.columns[0]
        for field in data_schema.inputs
        if field.kind == DENSE
        and len(field.columns) == 1
        and is_vector(find_column(schema, field.columns[0], "featuresCol").dataType)
    ]


def _chosen_inputs(
    facts: ModelInfo, choice: ColumnSelection, param: str
) -> tuple[list[tuple[InputInfo | None, list[str]]], Nest]:
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
    known: InputInfo | None,
    floatx: str,
    role: str,
    param: str,
    sparse: Collection[str],
) -> PreparedColumn:
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
        return PreparedColumn(field, cast.expression)
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
    return PreparedColumn(Field(role, names, cast.dtype, cast.kind, shape, sparse_tensor=takes_sparse), cast.expression)


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


def prepare_indicator(schema: StructType, name: str) -> PreparedColumn:
    """Returns the column that tells which rows are for validation."""
    column = find_column(schema, name, "validationIndicatorCol")
    if not isinstance(column.dataType, BooleanType):
        raise wrong_type(column, "validationIndicatorCol", "a boolean column")
    return PreparedColumn(Field(VALIDATION, (name,), "bool", SCALAR), quoted(column))
