"""Columns of a frame or of files that a model takes: choice, roles, targets, and the types that they may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.ml.linalg import VectorUDT
from pyspark.mllib.linalg import VectorUDT as OldVectorUDT
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    IntegralType,
    LongType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

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
from elephant.errors import SchemaError, UnsupportedError
from elephant.modeling.model_info import InputInfo, ModelInfo, OutputInfo

# One column; several that make one vector; or by the name of the input or output.
Columns = str | Sequence[str]
ByName = Mapping[str, Columns]

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


def find_column(columns: StructType, name: str, param: str) -> StructField:
    """Returns a column by its name, as Spark finds it; raises SchemaError when there is none."""
    for field in columns.fields:
        if field.name == name:
            return field
    for field in columns.fields:
        if field.name.lower() == name.lower():
            return field
    hint = " Set labelCol=None to train without labels." if param == "labelCol" else ""
    raise SchemaError(
        f"{param}: expected one of the columns {', '.join(columns.fieldNames())}. Received: {name!r}.{hint}"
    )


def columns_as_they_are(columns: StructType, names: Sequence[str]) -> list[Column]:
    """Returns what to select from a DataFrame, under the names that it is asked for by.

    Args:
        names: Columns, and ``column.part`` for the parts of structs.
    """
    return [_as_it_is(columns, name).alias(name) for name in names]


def _as_it_is(columns: StructType, name: str) -> Column:
    known = {field.name.lower() for field in columns.fields}
    column, value = None, None
    for field in [] if name.lower() in known else columns.fields:
        if isinstance(field.dataType, StructType) and name.lower().startswith(f"{field.name.lower()}."):
            column = find_column(field.dataType, name[len(field.name) + 1 :], "columns")
            value = quoted(field).getField(column.name)
    if column is None or value is None:
        column = find_column(columns, name, "columns")
        value = quoted(column)
    return F.unwrap_udt(value) if is_vector(column.dataType) else value


def quoted(field: StructField) -> Column:
    """Returns a column by its name, whatever characters it has."""
    return F.col("`" + field.name.replace("`", "``") + "`")


def is_scalar(kind: DataType) -> bool:
    """Whether a row of the type is one number."""
    return isinstance(kind, (NumericType, DecimalType, BooleanType, DateType, TimestampType, TimestampNTZType))


def is_vector(kind: DataType) -> bool:
    """Whether it is an ml or an mllib vector."""
    return isinstance(kind, (VectorUDT, OldVectorUDT))


def integer_type(kind: DataType) -> str | None:
    """Returns the numpy type that holds integers of a type, None for what is no integer."""
    if isinstance(kind, (IntegralType, BooleanType)):
        return "int64" if isinstance(kind, LongType) else "int32"
    return None


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


def depth_of(kind: DataType) -> tuple[int, DataType]:
    """Returns how deep arrays are nested, and what the innermost hold.

    >>> depth_of(ArrayType(ArrayType(LongType())))
    (2, LongType())
    """
    depth = 0
    while isinstance(kind, ArrayType):
        depth, kind = depth + 1, kind.elementType
    return depth, kind


def wrong_type(column: StructField, param: str, expected: str) -> SchemaError:
    """Returns the error for a column of a type that cannot be used."""
    return SchemaError(
        f"{param}: expected {expected}. Received: column {column.name!r} of type {column.dataType.simpleString()}."
    )


def training_schema(columns: StructType, facts: ModelInfo, choice: ColumnSelection) -> DataSchema:
    """Returns what the chosen columns become for training.

    Raises:
        SchemaError: A column is missing or of a type that cannot be trained on.
    """
    inputs = input_schema(columns, facts, choice)
    param = "labelCol" if choice.labels is None else "labelCols"
    chosen, y = chosen_labels(facts, choice)
    labels = [
        _label(find_column(columns, name, param), output, facts.dtype, role_of(LABEL, position), param)
        for position, (output, name) in enumerate(chosen)
    ]
    return schema_with_targets(columns, facts, choice, inputs, labels, y)


def schema_with_targets(
    columns: StructType, facts: ModelInfo, choice: ColumnSelection, inputs: DataSchema, labels: Sequence[Field], y: Nest
) -> DataSchema:
    """Returns the inputs with what they are compared with, weights and the indicator.

    Args:
        labels: One for each output that is compared with a column.
        y: How they are nested.
    """
    weights, w = weight_fields(columns, facts, choice, y)
    as_labels = not labels and not facts.own_step and any(output.needs_label for output in facts.outputs)
    return replace(
        inputs,
        labels=tuple(labels),
        weights=tuple(weights),
        validation=None if choice.validation is None else _indicator(columns, choice.validation),
        y=nest_of_targets(inputs.inputs, inputs.x, facts) if as_labels else y,
        w=w,
        inputs_as_labels=as_labels,
    )


def input_schema(columns: StructType, facts: ModelInfo, choice: ColumnSelection) -> DataSchema:
    """Returns one column for each input of the model, and how they are nested for Keras."""
    param = "featuresCol" if choice.inputs is None else "inputCols"
    chosen, nest = _chosen_inputs(facts, choice, param)
    fields = [
        _input(
            [find_column(columns, name, param) for name in names], known, facts.dtype, role_of(FEATURES, place), param
        )
        for place, (known, names) in enumerate(chosen)
    ]
    return DataSchema(inputs=tuple(fields), x=nest)


def undecided_vectors(columns: StructType, schema: DataSchema) -> list[str]:
    """Returns the columns of vectors for dense inputs: they are kept sparse if their first row is."""
    return [
        field.columns[0]
        for field in schema.inputs
        if field.kind == DENSE
        and len(field.columns) == 1
        and is_vector(find_column(columns, field.columns[0], "featuresCol").dataType)
    ]


def _input(columns: list[StructField], known: InputInfo | None, floatx: str, role: str, param: str) -> Field:
    dtype = element_type(known.dtype if known is not None else _own_type(columns, floatx))
    shape = known.shape if known is not None else None
    names, column = tuple(column.name for column in columns), columns[0]
    if len(columns) > 1 or is_scalar(column.dataType):
        field = Field(role, names, dtype, vector_kind(columns, dtype, param), shape)
        if not field.accepts(len(columns)):
            raise SchemaError(
                f"{param}: expected {field.width} values for the model's input shape {shape}. "
                f"Received: {len(columns)} columns ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})."
            )
        return field
    takes_sparse = known is not None and known.sparse
    if takes_sparse:
        if not is_vector(column.dataType):
            raise wrong_type(column, param, "an ml or mllib vector, for a sparse input")
        return Field(role, names, dtype, SPARSE, shape, sparse_tensor=True)
    return Field(role, names, dtype, _array_kind(column, dtype, param, shape), shape)


def vector_kind(columns: Sequence[StructField], dtype: str, param: str) -> str:
    """Returns what rows of several columns hold that make one vector; raises SchemaError where they cannot."""
    for column in columns:
        if dtype == "string" and not isinstance(column.dataType, StringType):
            raise wrong_type(column, param, "a column of strings")
        if dtype != "string" and not is_scalar(column.dataType):
            raise wrong_type(column, param, "a numeric column, because several columns make one vector")
    return TEXT if dtype == "string" else DENSE


def _array_kind(column: StructField, dtype: str, param: str, shape: tuple[int | None, ...] | None) -> str:
    """Returns what rows of one column hold that are more than a number; raises SchemaError where they are not."""
    depth, element = depth_of(column.dataType)
    if dtype == "string":
        if not isinstance(element, StringType):
            raise wrong_type(column, param, "a column of strings, or of arrays of them")
        return TEXT
    if not depth and (is_vector(element) or isinstance(element, BinaryType)):
        return DENSE
    if not (depth and is_scalar(element)):
        raise wrong_type(column, param, "an array of numbers, an ml vector, binary tensors, or a numeric column")
    # A model takes sequences of any length, nested as deep as rows are; plain numbers are a sequence of vectors of one.
    if not shape or shape[0] is not None or None in shape[1:]:
        return DENSE
    return RAGGED if len(shape) == depth or (depth == 1 and set(shape[1:]) == {1}) else DENSE


def _own_type(columns: Sequence[StructField], floatx: str) -> str:
    """Returns the type of elements for an input that nothing is known of: numbers are floats."""
    texts = [isinstance(depth_of(column.dataType)[1], StringType) for column in columns]
    return "string" if all(texts) else floatx


def _label(column: StructField, output: OutputInfo, floatx: str, role: str, param: str) -> Field:
    floatx, names = element_type(floatx), (column.name,)
    if is_scalar(column.dataType):
        return Field(role, names, integer_type(column.dataType) or floatx, SCALAR)
    depth, element = depth_of(column.dataType)
    if isinstance(element, StringType):
        raise wrong_type(column, param, "numbers, such as pyspark.ml.feature.StringIndexer makes of strings")
    is_classes = output.label_shape is None and integer_type(element) is not None and depth > 0
    dtype = "int32" if is_classes else floatx
    kind = _array_kind(column, dtype, param, None)
    # A label for every element of a sequence of any length.
    if depth > 0 and output.shape is not None and len(output.shape) > 1 and output.shape[0] is None:
        return Field(role, names, dtype, RAGGED, (None,) * depth if output.label_shape is None else output.label_shape)
    return Field(role, names, dtype, kind, output.label_shape)


def weight_fields(columns: StructType, facts: ModelInfo, choice: ColumnSelection, y: Nest) -> tuple[list[Field], Nest]:
    """Returns the columns of sample weights: none, one for all outputs, or one for each, nested as the labels are.

    Raises:
        SchemaError: A column is missing or not numeric, or an output has none.
    """
    if choice.weight is None:
        return [], 0
    if isinstance(choice.weight, str):
        return [_weight(columns, facts, choice.weight, WEIGHT)], 0
    names = [output.name for output in facts.outputs] if facts.knows_outputs else []
    required = [output.name for output in facts.outputs if output.needs_label] if names else []
    given = by_name(choice.weight, names, "weightCol", required=required)
    fields = [
        _weight(columns, facts, columns_of[0], role_of(WEIGHT, position))
        for position, columns_of in enumerate(given.values())
    ]
    places = {name: position for position, name in enumerate(given)}
    if not names:
        return fields, places if isinstance(y, dict) else pack(y, range(len(given)))
    return fields, pack(facts.y, [places.get(name, 0) for name in names])


def _weight(columns: StructType, facts: ModelInfo, name: str, role: str) -> Field:
    column = find_column(columns, name, "weightCol")
    if not is_scalar(column.dataType):
        raise wrong_type(column, "weightCol", "a column of numbers, booleans, dates or timestamps")
    return Field(role, (name,), element_type(facts.dtype), SCALAR)


def _indicator(columns: StructType, name: str) -> Field:
    column = find_column(columns, name, "validationIndicatorCol")
    if not isinstance(column.dataType, BooleanType):
        raise wrong_type(column, "validationIndicatorCol", "a boolean column")
    return Field(VALIDATION, (name,), "bool", SCALAR)


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
