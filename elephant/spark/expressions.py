"""Which Spark expression makes a column what the model takes: every type that rows may have, cast by the JVM."""

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

from elephant.data.schema import DENSE, RAGGED, SCALAR, SPARSE, TEXT
from elephant.errors import SchemaError, UnsupportedError

# Spark type and numpy type for each type of element that a model takes.
_ELEMENTS = {
    "float64": ("double", "float64"),
    "float32": ("float", "float32"),
    "float16": ("float", "float32"),
    "bfloat16": ("float", "float32"),
    # Wide in Spark, whose casts to a narrower integer may wrap; checked where the shard is written.
    "int64": ("bigint", "int64"),
    "int32": ("bigint", "int32"),
    "int16": ("bigint", "int16"),
    "int8": ("bigint", "int8"),
    "uint8": ("bigint", "uint8"),
    "uint16": ("bigint", "uint16"),
    "uint32": ("bigint", "uint32"),
    "bool": ("bigint", "bool"),
    "string": ("string", "string"),
}


@dataclass(frozen=True)
class Cast:
    """How a column becomes elements of a type.

    Args:
        expression: What Spark computes.
        kind: What a row then holds: one of `elephant.data.schema`'s kinds.
        dtype: Type of its elements, as numpy calls it, or ``"string"``.
    """

    expression: Column
    kind: str
    dtype: str


def find_column(schema: StructType, name: str, param: str) -> StructField:
    """Returns a column of a DataFrame by its name, as Spark finds it; raises SchemaError when there is none."""
    for field in schema.fields:
        if field.name == name:
            return field
    for field in schema.fields:
        if field.name.lower() == name.lower():
            return field
    hint = " Set labelCol=None to train without labels." if param == "labelCol" else ""
    raise SchemaError(
        f"{param}: expected one of the columns {', '.join(schema.fieldNames())}. Received: {name!r}.{hint}"
    )


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


def check_element(dtype: str, what: str) -> None:
    """Raises UnsupportedError for an element type that no column can be cast to."""
    if dtype not in _ELEMENTS:
        raise UnsupportedError(
            f"model: expected {what} of one of the types {', '.join(_ELEMENTS)}. Received: {dtype!r}."
        )


def element_type(dtype: str) -> str:
    """Returns the type, as numpy calls it, in which elements for a model's input of some type are kept."""
    check_element(dtype, "inputs")
    return _ELEMENTS[dtype][1]


def scalar(column: StructField, dtype: str, param: str) -> Cast:
    """Returns one element per row.

    Dates are days since 1970-01-01, timestamps are seconds since then in UTC.

    Raises:
        SchemaError: The column's type is not one of numbers, booleans, dates and timestamps.
    """
    if not is_scalar(column.dataType):
        raise wrong_type(column, param, "a column of numbers, booleans, dates or timestamps")
    spark_type, numpy_type = _ELEMENTS[dtype]
    return Cast(_number(column).cast(spark_type), SCALAR, numpy_type)


def row_of(columns: Sequence[StructField], dtype: str, param: str) -> Cast:
    """Returns one array per row, of several columns with one element each."""
    spark_type, numpy_type = _ELEMENTS[dtype]
    if numpy_type == "string":
        for column in columns:
            if not isinstance(column.dataType, StringType):
                raise wrong_type(column, param, "a column of strings")
        return Cast(F.array(*[quoted(column) for column in columns]), TEXT, numpy_type)
    for column in columns:
        if not is_scalar(column.dataType):
            raise wrong_type(column, param, "a numeric column, because several columns make one vector")
    return Cast(F.array(*[_number(column).cast(spark_type) for column in columns]), DENSE, numpy_type)


def array(column: StructField, dtype: str, param: str, *, ragged: bool = False, sparse: bool = False) -> Cast:
    """Returns one array per row, of one column that has them.

    Args:
        column: Arrays, nested to any depth; ml or mllib vectors; binary tensors; strings where dtype is ``"string"``.
        dtype: Type of the elements that the model takes.
        param: The estimator's param that named it.
        ragged: Whether rows may differ in length.
        sparse: Whether a column of vectors is kept as indices and values.

    Raises:
        SchemaError: The column's type is none of these.
    """
    spark_type, numpy_type = _ELEMENTS[dtype]
    kind = column.dataType
    if numpy_type == "string":
        return _strings(column, param)
    if is_vector(kind):
        if sparse:
            return Cast(F.unwrap_udt(quoted(column)), SPARSE, numpy_type)
        wide = vector_to_array(quoted(column), "float64" if spark_type == "double" else "float32")
        return Cast(wide if spark_type in ("float", "double") else wide.cast(f"array<{spark_type}>"), DENSE, numpy_type)
    if isinstance(kind, BinaryType):
        return Cast(quoted(column), DENSE, numpy_type)
    depth, element = depth_of(kind)
    if depth and is_scalar(element):
        wanted = "array<" * depth + spark_type + ">" * depth
        cast = quoted(column) if element.simpleString() == spark_type else quoted(column).cast(wanted)
        return Cast(cast, RAGGED if ragged else DENSE, numpy_type)
    raise wrong_type(column, param, "an array of numbers, an ml vector, binary tensors, or a numeric column")


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


def quoted(field: StructField) -> Column:
    """Returns a column by its name, whatever characters it has."""
    return F.col("`" + field.name.replace("`", "``") + "`")


def _number(column: StructField) -> Column:
    return number_of(quoted(column), column.dataType)


def number_of(value: Column, kind: DataType) -> Column:
    """Returns a date as days since 1970-01-01 and a timestamp as seconds since then; all else as it is."""
    if isinstance(kind, DateType):
        return F.unix_date(value)
    if isinstance(kind, TimestampNTZType):
        return _seconds(value)
    return value.cast("double") if isinstance(kind, TimestampType) else value


def _seconds(wall_clock: Column) -> Column:
    """Returns the seconds since 1970-01-01 of a timestamp without a time zone, as if its clock showed UTC.

    By its parts: a cast to a timestamp would take it to be in the session's time zone, where some hours do not exist.
    """
    days = F.unix_date(wall_clock.cast("date")).cast("double")
    seconds = F.date_part(F.lit("SECOND"), wall_clock).cast("double")
    return days * 86400.0 + F.hour(wall_clock) * 3600.0 + F.minute(wall_clock) * 60.0 + seconds


def _strings(column: StructField, param: str) -> Cast:
    _, element = depth_of(column.dataType)
    if not isinstance(element, StringType):
        raise wrong_type(column, param, "a column of strings, or of arrays of them")
    return Cast(quoted(column), TEXT, "string")
