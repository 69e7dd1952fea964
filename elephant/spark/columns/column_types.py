"""Types of columns of a frame or of files, and what they become: for a model, and for a preprocessing function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyspark.ml.functions import vector_to_array
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
    DoubleType,
    FloatType,
    IntegralType,
    LongType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

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
    num_leaves,
    pack,
    role_of,
)
from elephant.errors import SchemaError, did_you_mean
from elephant.modeling.model_info import InputInfo, ModelInfo, OutputInfo
from elephant.spark.columns.column_selection import (
    ColumnSelection,
    are_sequences,
    by_name,
    chosen_inputs,
    chosen_labels,
    common_loss_shape,
    element_type,
    input_columns,
    target_inputs,
    target_labels,
    with_classes,
)

_MOST_NAMED = 20


def find_column(columns: StructType, name: str, param: str) -> StructField:
    """Returns a column by its name, as Spark finds it; raises SchemaError when there is none."""
    for field in columns.fields:
        if field.name == name:
            return field
    for field in columns.fields:
        if field.name.lower() == name.lower():
            return field
    names = columns.fieldNames()
    known = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    remedy = did_you_mean(name, names) or f" Set {param} to one of them."
    remedy += " Set labelCol=None to train without labels." if param == "labelCol" else ""
    raise SchemaError(
        f"{param}: expected one of the columns {known}. Received: {name!r}.{remedy}",
        topic="a-column-that-is-not-there",
    )


def selected_columns(columns: StructType, schema: DataSchema) -> list[Column]:
    """Returns the columns to select from a DataFrame, in the order of ``schema.columns``, whose casts the tasks make.

    Its names are such that Spark finds them, whatever the user's are.
    """
    return [
        _as_it_travels(columns, name, [field for field in schema if name in field.columns]).alias(f"c{place}")
        for place, name in enumerate(schema.columns)
    ]


def _as_it_travels(columns: StructType, name: str, fields: Sequence[Field]) -> Column:
    """Returns a column, or for ``column.part`` the part of a struct, of which the fields are made."""
    known = {field.name.lower() for field in columns.fields}
    column, value = None, None
    for field in [] if name.lower() in known else columns.fields:
        if isinstance(field.dataType, StructType) and name.lower().startswith(f"{field.name.lower()}."):
            part = name[len(field.name) + 1 :]
            if part.lower() in (each.name.lower() for each in field.dataType.fields):
                column = find_column(field.dataType, part, "columns")
                value = quoted(field).getField(column.name)
    if column is None or value is None:
        column = find_column(columns, name, "columns")
        value = quoted(column)
    if not is_vector(column.dataType):
        return value
    if all(field.kind == DENSE and field.dtype == "float32" for field in fields):
        # Half the bytes, and one array in place of three.
        return F.when(value.isNotNull(), vector_to_array(value, "float32"))
    return F.unwrap_udt(value)


def quoted(field: StructField) -> Column:
    """Returns a column by its name, whatever characters it has."""
    return F.col("`" + field.name.replace("`", "``") + "`")


def is_scalar(kind: DataType) -> bool:
    """Returns whether a row of the type is one number."""
    return isinstance(kind, (NumericType, DecimalType, BooleanType, DateType, TimestampType, TimestampNTZType))


def is_vector(kind: DataType) -> bool:
    """Returns whether it is an ml or an mllib vector."""
    return isinstance(kind, (VectorUDT, OldVectorUDT))


def integer_type(kind: DataType) -> str | None:
    """Returns the numpy type that holds integers of a type, None for what is no integer."""
    if isinstance(kind, (IntegralType, BooleanType)):
        return "int64" if isinstance(kind, LongType) else "int32"
    return None


def depth_of(kind: DataType) -> tuple[int, DataType]:
    """Returns the depth of nested arrays, and the type of the innermost elements.

    >>> depth_of(ArrayType(ArrayType(LongType())))
    (2, LongType())
    """
    depth = 0
    while isinstance(kind, ArrayType):
        depth, kind = depth + 1, kind.elementType
    return depth, kind


def wrong_type(column: StructField, param: str, expected: str) -> SchemaError:
    """Returns the error for a column of a type that cannot be used."""
    remedy = "Convert it first, such as with cast."
    if isinstance(depth_of(column.dataType)[1], StringType):
        remedy = "Number its strings first, as pyspark.ml.feature.StringIndexer does, or cast them."
    received = f"column {column.name!r} of type {column.dataType.simpleString()}"
    return SchemaError(
        f"{param}: expected {expected}. Received: {received}. {remedy}",
        topic="a-column-of-the-wrong-type",
    )


def training_schema(columns: StructType, info: ModelInfo, selection: ColumnSelection) -> DataSchema:
    """Returns the schema that the chosen columns become for training.

    Raises:
        SchemaError: A column is missing or of a type that cannot be trained on.
    """
    schema_of_inputs = input_schema(columns, info, selection)
    param = "labelCol"
    chosen, y = chosen_labels(info, selection)
    labels = []
    for place, (output, names) in enumerate(chosen):
        found = [find_column(columns, name, param) for name in names]
        label = _label(found, output, info.dtype, role_of(LABEL, place), param)
        labels.append(with_classes(label, output, param, weighted=selection.weight is not None))
    return schema_with_targets(columns, info, selection, schema_of_inputs, labels, y)


def schema_with_targets(
    columns: StructType,
    info: ModelInfo,
    selection: ColumnSelection,
    schema_of_inputs: DataSchema,
    labels: Sequence[Field],
    y: Nest,
) -> DataSchema:
    """Returns the inputs with what they are compared with, weights and the indicator.

    Args:
        labels: One for each output that is compared with a column.
        y: How they are nested.
    """
    weights, w = weight_fields(columns, info, selection, y)
    as_labels = not labels and not info.own_step and any(output.needs_label for output in info.outputs)
    return replace(
        schema_of_inputs,
        labels=tuple(labels),
        weights=tuple(weights),
        validation=None if selection.validation is None else _indicator(columns, selection.validation),
        y=nest_of_targets(schema_of_inputs.inputs, schema_of_inputs.x, info) if as_labels else y,
        w=w,
        inputs_as_labels=as_labels,
    )


def input_schema(columns: StructType, info: ModelInfo, selection: ColumnSelection) -> DataSchema:
    """Returns one column for each input of the model, and how they are nested for Keras."""
    param = "featuresCol"
    chosen, nest = chosen_inputs(info, selection)
    fields = [
        _input(
            [find_column(columns, name, param) for name in names],
            input_info,
            info.dtype,
            role_of(FEATURES, place),
            param,
        )
        for place, (input_info, names) in enumerate(chosen)
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


def _input(columns: list[StructField], input_info: InputInfo | None, floatx: str, role: str, param: str) -> Field:
    dtype = element_type(input_info.dtype if input_info is not None else _own_type(columns, floatx))
    shape = input_info.shape if input_info is not None else None
    names, column = tuple(column.name for column in columns), columns[0]
    if len(columns) > 1 or is_scalar(column.dataType):
        field = Field(role, names, dtype, vector_kind(columns, dtype, param), shape)
        return _of_several(field, param, f"the model's input shape {shape}")
    takes_sparse = input_info is not None and input_info.sparse
    if takes_sparse:
        if not is_vector(column.dataType):
            raise wrong_type(column, param, "an ml or mllib vector, for a sparse input")
        return Field(role, names, dtype, SPARSE, shape, sparse_tensor=True)
    return Field(role, names, dtype, _array_kind(column, dtype, param, shape), shape)


def vector_kind(columns: Sequence[StructField], dtype: str, param: str) -> str:
    """Returns the kind of rows of several columns that make one vector; raises SchemaError where they cannot."""
    for column in columns:
        if dtype == "string" and not isinstance(column.dataType, StringType):
            raise wrong_type(column, param, "a column of strings")
        if dtype != "string" and not is_scalar(column.dataType):
            raise wrong_type(column, param, "a numeric column, because several columns make one vector")
    return TEXT if dtype == "string" else DENSE


def _array_kind(column: StructField, dtype: str, param: str, shape: tuple[int | None, ...] | None) -> str:
    """Returns the kind of rows of one column that are more than a number; raises SchemaError where they are not."""
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


def _of_several(field: Field, param: str, use: str) -> Field:
    """Returns a field whose columns, all of numbers, make one vector; raises SchemaError for too many or too few."""
    names = field.columns
    if not field.accepts(len(names)):
        raise SchemaError(
            f"{param}: expected {field.width} value{'' if field.width == 1 else 's'} for {use}. "
            f"Received: {len(names)} column{'' if len(names) == 1 else 's'} "
            f"({', '.join(names[:6])}{', ...' if len(names) > 6 else ''}). Name as many "
            "as there are values.",
            topic="rows-of-another-width",
        )
    return field


def _label(columns: list[StructField], output: OutputInfo, floatx: str, role: str, param: str) -> Field:
    floatx, names, column = element_type(floatx), tuple(column.name for column in columns), columns[0]
    if len(columns) > 1:
        classes = output.label_shape is None and all(integer_type(each.dataType) for each in columns)
        # A class number takes the place of the scores of all classes.
        shape = output.shape[:-1] if output.label_shape is None and output.shape else output.label_shape
        if output.takes_sequences:
            shape = None
        field = Field(role, names, "int32" if classes else floatx, vector_kind(columns, floatx, param), shape)
        return _of_several(field, param, f"a label of the model's output, whose shape is {output.shape}")
    if is_scalar(column.dataType):
        return Field(role, names, integer_type(column.dataType) or floatx, SCALAR)
    depth, element = depth_of(column.dataType)
    if isinstance(element, StringType):
        raise wrong_type(column, param, "a label of numbers")
    is_classes = output.label_shape is None and integer_type(element) is not None and depth > 0
    dtype = "int32" if is_classes else floatx
    kind = _array_kind(column, dtype, param, None)
    if output.takes_sequences and depth == 1:
        return Field(role, names, dtype, RAGGED, (None,))
    # A label for every element of a sequence of any length.
    if depth > 0 and output.shape is not None and len(output.shape) > 1 and output.shape[0] is None:
        return Field(role, names, dtype, RAGGED, (None,) * depth if output.label_shape is None else output.label_shape)
    return Field(role, names, dtype, kind, _class_shape(output, depth) or output.label_shape)


def _class_shape(output: OutputInfo, depth: int) -> tuple[int | None, ...] | None:
    """Returns the shape of class numbers in arrays, nested so deep; None where anything may be in them."""
    sizes = output.shape[:-1] if output.shape else ()
    if output.num_classes is None or output.label_shape is not None or None in sizes:
        return None
    return (*sizes, 1) if depth > len(sizes) or not sizes else sizes


def nest_of_targets(inputs: Sequence[Field], x: Nest, info: ModelInfo) -> Nest:
    """Returns the input that each output of an autoencoder is compared with: of the same name, or of the same place.

    Raises:
        SchemaError: They cannot be told apart, or an input is none that a loss takes.
    """
    for field in inputs:
        if field.kind == TEXT or field.kind == SPARSE and field.sparse_tensor:
            raise SchemaError(
                f"labelCol: expected a column to compare the model's output with, because its input ({field.title}) "
                f"is {'text' if field.kind == TEXT else 'a sparse tensor'}. Received: none. Set labelCol."
            )
    if not info.knows_outputs:
        return x
    names, sources = [output.name for output in info.outputs], [input_info.name for input_info in info.inputs]
    needed = [output.name for output in info.outputs if output.needs_label]
    if len(inputs) == 1:
        places = [0] * len(names)
    elif set(needed) <= set(sources):
        places = [sources.index(name) if name in sources else 0 for name in names]
    elif len(names) == num_leaves(x):
        places = list(range(len(names)))
    else:
        raise SchemaError(
            f"labelCol: expected a column for each of the outputs {', '.join(needed)}, because they are neither named "
            f"nor as many as the inputs {', '.join(sources)}. Received: none. Set "
            f"labelCol={{{needed[0]!r}: 'column', ...}}."
        )
    for output, place in zip(info.outputs, places, strict=True):
        _require_comparable(output, inputs[place])
    return pack(info.y, places)


def _require_comparable(output: OutputInfo, field: Field) -> None:
    """Raises SchemaError where one of Keras' losses would compare an output with an input of another shape."""
    wanted = output.loss_shape if output.label_shape is None else output.label_shape
    if output.loss_shape is None or wanted is None or field.shape is None:
        return
    shapes = [[size for size in shape if size != 1] for shape in (wanted, field.shape)]
    if len(shapes[0]) != len(shapes[1]) or any(
        None not in pair and pair[0] != pair[1] for pair in zip(*shapes, strict=True)
    ):
        raise SchemaError(
            f"labelCol: expected a column to compare the model's output {output.name!r} with, whose labels have shape "
            f"{wanted}, because its own input ({field.title}) has shape {field.shape}. Received: none. Set "
            "labelCol."
        )


def weight_fields(
    columns: StructType, info: ModelInfo, selection: ColumnSelection, y: Nest
) -> tuple[list[Field], Nest]:
    """Returns the columns of sample weights: none, one for all outputs, or one for each, nested as the labels are.

    Raises:
        SchemaError: A column is missing, or not of numbers in the shape of the loss, or an output has none.
    """
    if selection.weight is None:
        return [], 0
    if isinstance(selection.weight, str):
        return [_weight(columns, info, info.outputs, selection.weight, WEIGHT)], 0
    names = [output.name for output in info.outputs] if info.knows_outputs else []
    required = [output.name for output in info.outputs if output.needs_label] if names else []
    given = by_name(selection.weight, names, "weightCol", required=required)
    places = {name: position for position, name in enumerate(given)}
    by_output = {output.name: [output] for output in info.outputs}
    fields = [
        _weight(columns, info, by_output.get(name, info.outputs), given[name][0], role_of(WEIGHT, position))
        for name, position in places.items()
    ]
    if not names:
        return fields, places if isinstance(y, dict) else pack(y, range(len(given)))
    return fields, pack(info.y, [places.get(name, 0) for name in names])


def _weight(columns: StructType, info: ModelInfo, outputs: Sequence[OutputInfo], name: str, role: str) -> Field:
    """Returns the column of the sample weights of some outputs: one number for a row, or one for each of its losses."""
    column, dtype = find_column(columns, name, "weightCol"), element_type(info.dtype)
    if is_scalar(column.dataType):
        return Field(role, (name,), dtype, SCALAR)
    depth, shape = depth_of(column.dataType)[0], common_loss_shape(outputs, "weightCol")
    if shape == ():
        expected = "a column of numbers, booleans, dates or timestamps, because the loss has one value of each row"
        raise wrong_type(column, "weightCol", expected)
    if shape is None and are_sequences(outputs):
        shape = (None,) * depth
    kind = _array_kind(column, dtype, "weightCol", shape)
    # Rows of pictures of any size tell it themselves.
    return Field(role, (name,), dtype, kind, None if shape and kind == DENSE and shape.count(None) > 1 else shape)


def _indicator(columns: StructType, name: str) -> Field:
    column = find_column(columns, name, "validationIndicatorCol")
    if not isinstance(column.dataType, (BooleanType, IntegralType, FloatType, DoubleType)):
        raise wrong_type(column, "validationIndicatorCol", "a column of booleans, or of the numbers 0 and 1")
    return Field(VALIDATION, (name,), "bool", SCALAR)


def raw_training_schema(
    columns: StructType, info: ModelInfo, selection: ColumnSelection
) -> tuple[DataSchema, DataSchema]:
    """Returns the schema of what a preprocessing function gets for training, and of what it is to make of that.

    Raises:
        SchemaError: A column is missing, or of a type that no function gets.
    """
    schema_of_inputs, param = raw_input_schema(columns, selection), "labelCol"
    made, y = target_labels(info, selection)
    labels: list[Field] = []
    for field in made:
        if len(field.columns) > 1:
            raise SchemaError(
                f"{param}: expected one column for a label, because preprocessing makes of columns what the model is "
                f"compared with. Received: {', '.join(field.columns)}. Give the function one of them, or an array."
            )
        name = field.columns[0]
        if name.lower() in (column.name.lower() for column in columns.fields):
            label = raw_field(find_column(columns, name, param), role_of(LABEL, len(labels)), param)
            labels.append(replace(label, columns=(name,)))
    target_schema = schema_with_targets(columns, info, selection, target_inputs(info, selection), made, y)
    raw_schema = replace(
        schema_of_inputs, labels=tuple(labels), weights=target_schema.weights, validation=target_schema.validation
    )
    return raw_schema, target_schema


def raw_input_schema(columns: StructType, selection: ColumnSelection) -> DataSchema:
    """Returns the columns that a preprocessing function gets, and how its batch nests them, by their names."""
    param = "featuresCol"
    fields: list[Field] = []
    nest: dict[str, Nest] = {}
    for name in input_columns(selection):
        column, first = find_column(columns, name, param), len(fields)
        if not isinstance(column.dataType, StructType):
            nest[name] = first
            fields.append(raw_field(column, role_of(FEATURES, first), param))
            continue
        nest[name] = {part.name: first + place for place, part in enumerate(column.dataType.fields)}
        parts = [StructField(f"{name}.{part.name}", part.dataType) for part in column.dataType.fields]
        _refuse_two_readings(columns, parts, param)
        fields += [raw_field(part, role_of(FEATURES, first + place), param) for place, part in enumerate(parts)]
    return DataSchema(inputs=tuple(fields), x=nest)


def _refuse_two_readings(columns: StructType, parts: Sequence[StructField], param: str) -> None:
    """Raises SchemaError for a part of a struct whose name with its struct's is that of something else, too."""
    paths = [field.name.lower() for field in columns.fields]
    for field in columns.fields:
        if isinstance(field.dataType, StructType):
            paths += [f"{field.name}.{part.name}".lower() for part in field.dataType.fields]
    for part in parts:
        meanings = paths.count(part.name.lower())
        if meanings > 1:
            raise SchemaError(
                f"{param}: expected one thing that {part.name!r} may mean, a part of a struct or a column of that "
                f"name. Received: {meanings}. Rename one of them."
            )


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
