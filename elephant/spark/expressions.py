"""Which Spark expression makes a column what the model takes: every type that rows may have, cast by the JVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    FractionalType,
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
    # Wide in Spark, whose casts to a narrower integer may wrap; checked where the shard is written. So are fractions,
    # see `_of_type`: of NaN Spark's cast makes zero, unless `spark.sql.ansi.enabled`.
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
# Of an integer that a double holds, whatever its digits are.
_DIGITS_OF_DOUBLE = 15


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
    return Cast(_of_type(column, dtype), SCALAR, _ELEMENTS[dtype][1])


def row_of(columns: Sequence[StructField], dtype: str, param: str) -> Cast:
    """Returns one array per row, of several columns with one element each."""
    numpy_type = _ELEMENTS[dtype][1]
    if numpy_type == "string":
        for column in columns:
            if not isinstance(column.dataType, StringType):
                raise wrong_type(column, param, "a column of strings")
        return Cast(F.array(*[quoted(column) for column in columns]), TEXT, numpy_type)
    for column in columns:
        if not is_scalar(column.dataType):
            raise wrong_type(column, param, "a numeric column, because several columns make one vector")
    # A double holds all integers but the longest: where there are some, fractions become integers right here.
    in_spark = any(isinstance(column.dataType, LongType) or _is_wide(column.dataType) for column in columns)
    return Cast(F.array(*[_of_type(column, dtype, in_spark=in_spark) for column in columns]), DENSE, numpy_type)


def array(column: StructField, dtype: str, param: str, *, ragged: bool = False, sparse: bool = False) -> Cast:
    """Returns one array per row, of one column that has them.

    Args:
        column: Arrays, nested to any depth; ml or mllib vectors; binary tensors; strings where dtype is ``"string"``.

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
        return Cast(
            vector_to_array(quoted(column), "float32" if spark_type == "float" else "float64"), DENSE, numpy_type
        )
    if isinstance(kind, BinaryType):
        return Cast(quoted(column), DENSE, numpy_type)
    depth, element = depth_of(kind)
    if depth and is_scalar(element):
        return Cast(_array_of_type(column, depth, element, spark_type), RAGGED if ragged else DENSE, numpy_type)
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


def _of_type(column: StructField, dtype: str, *, in_spark: bool = False) -> Column:
    """Returns a column's numbers in the type for a model's input.

    Fractions for an integer input stay doubles, of which the writer of the shard makes integers, or says which row
    has none, whatever Spark's settings are.

    Args:
        in_spark: Whether Spark makes the integers all the same.
    """
    kind, value, spark_type = column.dataType, number_of(quoted(column), column.dataType), _ELEMENTS[dtype][0]
    if spark_type != "bigint" or isinstance(kind, (IntegralType, BooleanType, DateType)):
        return value.cast(spark_type)
    if in_spark or _is_wide(kind):
        return _integer(value, column.name)
    return value.cast("double")


def _array_of_type(column: StructField, depth: int, element: DataType, spark_type: str) -> Column:
    value = quoted(column)
    if spark_type == "bigint" and isinstance(element, FractionalType):
        if _is_wide(element):
            return _in_arrays(value, depth, lambda one: _integer(one, column.name))
        spark_type = "double"
    return value if element.simpleString() == spark_type else value.cast("array<" * depth + spark_type + ">" * depth)


def _is_wide(kind: DataType) -> bool:
    """Whether a double does not hold all values of a type that an integer holds."""
    return isinstance(kind, DecimalType) and kind.precision - kind.scale > _DIGITS_OF_DOUBLE


def _in_arrays(value: Column, depth: int, make: Callable[[Column], Column]) -> Column:
    if depth == 0:
        return make(value)
    return F.transform(value, lambda one: _in_arrays(one, depth - 1, make))


def _integer(value: Column, name: str) -> Column:
    """Returns numbers without their fractions; of one that no integer holds, and of NaN, the query fails."""
    # Of Spark's numbers NaN is the largest.
    first, beyond = (F.lit(str(limit)).cast("decimal(20,0)") for limit in (-(2**63), 2**63))
    text = f"column {name!r}: expected numbers that an integer holds, because the model takes integers. Received: "
    refused = F.raise_error(F.concat(F.lit(text), value.cast("string"), F.lit(".")))
    return F.when(value.isNull() | ((value >= first) & (value < beyond)), value.cast("bigint")).otherwise(refused)


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
