"""From the user's columns to the prepared ones: which casts Spark makes, and what is refused before any job starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.mllib.linalg import VectorUDT as OldVectorUDT
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    IntegralType,
    LongType,
    NumericType,
    StructField,
    StructType,
)

from elephant.data.schema import FEATURES, LABEL, VALIDATION, WEIGHT, DataSchema, Field
from elephant.errors import SchemaError, UnsupportedError
from elephant.modeling.facts import ModelFacts

# Spark type and numpy type for each type of model input.
_ELEMENTS = {
    "float64": ("double", "float64"),
    "float32": ("float", "float32"),
    "float16": ("float", "float32"),
    "bfloat16": ("float", "float32"),
    # Wide in Spark, whose casts to a narrower integer may wrap; checked where the shard is read.
    "int64": ("bigint", "int64"),
    "int32": ("bigint", "int32"),
    "int16": ("bigint", "int16"),
    "int8": ("bigint", "int8"),
    "uint8": ("bigint", "uint8"),
    "bool": ("bigint", "bool"),
}


@dataclass(frozen=True)
class Prepared:
    """One prepared column: what it holds, and the Spark expression that makes it."""

    field: Field
    expression: Column


def prepare_training(
    schema: StructType,
    facts: ModelFacts,
    *,
    features: Sequence[str],
    label: str,
    weight: str | None,
    validation: str | None,
) -> tuple[DataSchema, list[Column]]:
    """Returns what to select from a DataFrame for training, and what the selection holds.

    Args:
        schema: The DataFrame's schema.
        facts: What the model takes.
        features: One array, vector or numeric column, or several numeric ones that make one vector.
        label: A numeric, boolean, array or vector column.
        weight: A numeric column, or None.
        validation: A boolean column, or None.

    Raises:
        SchemaError: A column is missing or of a type that cannot be trained on.
    """
    prepared = [prepare_features(schema, facts, features), _prepare_label(schema, facts, label)]
    if weight is not None:
        prepared.append(_prepare_scalar(schema, weight, WEIGHT, facts.dtype))
    if validation is not None:
        prepared.append(_prepare_indicator(schema, validation))
    by_role = {column.field.role: column.field for column in prepared}
    data_schema = DataSchema(
        features=by_role[FEATURES],
        label=by_role[LABEL],
        weight=by_role.get(WEIGHT),
        validation=by_role.get(VALIDATION),
    )
    return data_schema, [column.expression.alias(column.field.role) for column in prepared]


def prepare_features(schema: StructType, facts: ModelFacts, features: Sequence[str]) -> Prepared:
    """Returns the features as one array column of the model's input type."""
    if facts.input_dtype not in _ELEMENTS:
        raise UnsupportedError(
            f"model: expected an input of a numeric type. Received: {facts.input_dtype!r}, "
            "which this version of elephant does not feed."
        )
    spark_type, dtype = _ELEMENTS[facts.input_dtype]
    field = Field(FEATURES, tuple(features), dtype, is_array=True, shape=facts.input_shape)
    columns = [_find(schema, name, "featuresCol") for name in features]
    if len(columns) == 1 and not _is_number(columns[0].dataType):
        return Prepared(field, _as_array(columns[0], spark_type, "featuresCol"))
    for column in columns:
        if not _is_number(column.dataType):
            raise _wrong_type(column, "featuresCol", "a numeric column, because several columns make one vector")
    if not field.accepts(len(columns)):
        raise SchemaError(
            f"featuresCol: expected {field.width} values for the model's input shape {facts.input_shape}. "
            f"Received: {len(columns)} columns ({', '.join(features[:6])}{', ...' if len(features) > 6 else ''})."
        )
    return Prepared(field, F.array(*[_col(column).cast(spark_type) for column in columns]))


def _prepare_label(schema: StructType, facts: ModelFacts, name: str) -> Prepared:
    column = _find(schema, name, "labelCol")
    if _is_number(column.dataType):
        return _prepare_scalar(schema, name, LABEL, facts.dtype, keep_integers=True)
    spark_type, dtype = _ELEMENTS[facts.dtype]
    field = Field(LABEL, (name,), dtype, is_array=True, shape=facts.label_shape)
    return Prepared(field, _as_array(column, spark_type, "labelCol"))


def _prepare_scalar(schema: StructType, name: str, role: str, dtype: str, *, keep_integers: bool = False) -> Prepared:
    column = _find(schema, name, f"{role}Col")
    if not _is_number(column.dataType):
        raise _wrong_type(column, f"{role}Col", "a numeric column")
    if keep_integers and isinstance(column.dataType, (IntegralType, BooleanType)):
        dtype = "int64" if isinstance(column.dataType, LongType) else "int32"
    spark_type, numpy_type = _ELEMENTS[dtype]
    return Prepared(Field(role, (name,), numpy_type, is_array=False), _col(column).cast(spark_type))


def _prepare_indicator(schema: StructType, name: str) -> Prepared:
    column = _find(schema, name, "validationIndicatorCol")
    if not isinstance(column.dataType, BooleanType):
        raise _wrong_type(column, "validationIndicatorCol", "a boolean column")
    return Prepared(Field(VALIDATION, (name,), "bool", is_array=False), _col(column))


def _as_array(column: StructField, spark_type: str, param: str) -> Column:
    kind = column.dataType
    if isinstance(kind, (VectorUDT, OldVectorUDT)):
        wide = vector_to_array(_col(column), "float64" if spark_type == "double" else "float32")
        return wide if spark_type in ("float", "double") else wide.cast(f"array<{spark_type}>")
    if isinstance(kind, ArrayType) and _is_number(kind.elementType):
        if kind.elementType.simpleString() == spark_type:
            return _col(column)
        return _col(column).cast(f"array<{spark_type}>")
    raise _wrong_type(column, param, "an array of numbers, an ml vector, or a numeric column")


def _find(schema: StructType, name: str, param: str) -> StructField:
    for field in schema.fields:
        if field.name == name:
            return field
    for field in schema.fields:
        if field.name.lower() == name.lower():
            return field
    raise SchemaError(f"{param}: expected one of the columns {', '.join(schema.fieldNames())}. Received: {name!r}.")


def _is_number(kind: DataType) -> bool:
    return isinstance(kind, (NumericType, DecimalType, BooleanType))


def _wrong_type(column: StructField, param: str, expected: str) -> SchemaError:
    return SchemaError(
        f"{param}: expected {expected}. Received: column {column.name!r} of type {column.dataType.simpleString()}."
    )


def _col(field: StructField) -> Column:
    return F.col("`" + field.name.replace("`", "``") + "`")
