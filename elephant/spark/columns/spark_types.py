"""Arrow's types as Spark's."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_TYPES: dict[pa.DataType, DataType] = {
    pa.bool_(): BooleanType(),
    pa.int8(): ByteType(),
    pa.int16(): ShortType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.uint8(): ShortType(),
    pa.uint16(): IntegerType(),
    pa.uint32(): LongType(),
    pa.uint64(): DecimalType(20, 0),
    pa.float16(): FloatType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.date32(): DateType(),
    pa.date64(): DateType(),
    pa.string(): StringType(),
    pa.large_string(): StringType(),
    pa.binary(): BinaryType(),
    pa.large_binary(): BinaryType(),
}


def spark_schema(columns: pa.Schema, written_by_spark: dict[str, Any] | None = None) -> StructType:
    """Returns a file's columns as Spark sees them.

    Args:
        columns: As Arrow sees them.
        written_by_spark: Spark's own description in the file, which alone tells vectors from other structs.
    """
    known = {} if written_by_spark is None else {field["name"]: field for field in written_by_spark["fields"]}
    return StructType([_field(column, known.get(column.name)) for column in columns])


def _field(column: pa.Field, described: dict[str, Any] | None) -> StructField:
    if described is not None:
        try:
            return StructField.fromJson(described)
        except (ImportError, AttributeError, KeyError, ValueError):
            # A type of the user's whose code is not here: what it is stored as remains.
            pass
    return StructField(column.name, spark_type(column.type))


def spark_type(kind: pa.DataType) -> DataType:
    """Returns the Spark type that holds an Arrow type's values; ``void`` where there is none.

    Examples:
        >>> spark_type(pa.list_(pa.uint8()))
        ArrayType(ShortType(), True)
    """
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind in _TYPES:
        return _TYPES[kind]
    if pa.types.is_fixed_size_binary(kind):
        return BinaryType()
    if pa.types.is_decimal(kind):
        return DecimalType(min(kind.precision, 38), kind.scale)
    if pa.types.is_timestamp(kind):
        return TimestampNTZType() if kind.tz is None else TimestampType()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return ArrayType(spark_type(kind.value_type))
    if pa.types.is_struct(kind):
        return StructType([StructField(part.name, spark_type(part.type)) for part in kind])
    if pa.types.is_map(kind):
        return MapType(spark_type(kind.key_type), spark_type(kind.item_type))
    return NullType()


def with_nulls(kind: Any) -> Any:
    """Returns a type, or a schema, whose parts may all be null, as those of files are to Spark, whatever they say."""
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, with_nulls(f.dataType), True, f.metadata) for f in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(with_nulls(kind.elementType))
    return MapType(with_nulls(kind.keyType), with_nulls(kind.valueType)) if isinstance(kind, MapType) else kind
