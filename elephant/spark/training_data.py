"""Training data: the rows of a frame or of files, as the model takes them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
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
    IntegralType,
    LongType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    _parse_datatype_string,
)

from elephant.cluster.row_source import SINCE_4, FileRows, FrameRows, RecordFiles, RowSource
from elephant.cluster.session import require_running
from elephant.config import FitConfig
from elephant.data.file_sources import PlannedFiles
from elephant.data.parquet import (
    ParquetFile,
    ParquetFiles,
    delta_files,
    partition_texts,
    read_footers,
    typed_partitions,
)
from elephant.data.schema import DataSchema
from elephant.errors import ClusterError, ConfigurationError, DataError, SchemaError
from elephant.modeling.model_info import ModelInfo
from elephant.spark.columns.column_selection import ColumnSelection
from elephant.spark.columns.column_types import (
    raw_training_schema,
    selected_columns,
    training_schema,
    undecided_vectors,
)
from elephant.spark.hadoop_files import running_session
from elephant.storage.filesystem import Found, absolute, has_folder, list_files, open_file_system

if TYPE_CHECKING:
    import pandas as pd

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

PARQUET, DELTA, TFRECORD = "parquet", "delta", "tfrecord"
FORMATS = (PARQUET, DELTA, TFRECORD)
_PARQUET_NAME = re.compile(r"\.(parquet|parq|pq)$", re.IGNORECASE)
_RECORDS_NAME = re.compile(r"\.tfr(ecords?)?(-\d+-of-\d+)?(\.gz)?$", re.IGNORECASE)


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
    return NullType()


@dataclass(frozen=True)
class Files:
    """Files to train on, where a path alone does not say enough.

    Args:
        path: A file or a folder, as a path that all executors have, or a URL.
        format: ``"parquet"``, ``"delta"`` or ``"tfrecord"``; None tells by the names in the folder.
        schema: Of TFRecord files, the columns and their types as Spark writes them, such as
            ``"image binary, words array<bigint>, label bigint"``; None tells by the first records.

    Examples:
        >>> estimator.fit(Files("/data/train", format="tfrecord", schema="x array<float>, y float"))  # doctest: +SKIP
    """

    path: str | os.PathLike[str]
    format: str | None = None
    schema: str | StructType | None = None

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise ConfigurationError(f"format: expected one of {', '.join(FORMATS)}. Received: {self.format!r}.")
        if self.schema is not None and self.format not in (None, TFRECORD):
            raise ConfigurationError(
                f"schema: expected format='tfrecord': other files say what they hold. Received: {self.format!r}."
            )


@dataclass(frozen=True)
class Opened:
    """Files that were listed, and their columns."""

    schema: StructType
    files: PlannedFiles


def dataset_of(given: Any) -> DataFrame | Files:
    """Returns the dataset that an estimator trains on.

    Args:
        given: A DataFrame of Spark or pandas, the path of files, or `Files`.

    Raises:
        TypeError: It is none of these.
        ClusterError: There is no Spark session, whose executors a DataFrame of pandas goes to.
    """
    if isinstance(given, (str, os.PathLike)):
        return Files(os.fspath(given))
    if isinstance(given, Files) or is_frame(given):
        return cast("DataFrame | Files", given)
    if _is_of_pandas(given):
        return _frame_of_pandas(active_session("take the rows"), given)
    raise TypeError(
        "fit: expected a DataFrame of Spark or pandas, the path of files, or elephant.Files. Received: "
        f"{_described(given)}"
    )


def is_frame(given: Any) -> bool:
    """Returns whether it is a DataFrame of Spark, classic or of Spark Connect."""
    return hasattr(given, "sparkSession")


def require_frame(given: Any, caller: str) -> None:
    """Raises TypeError for what is no DataFrame of Spark."""
    if not is_frame(given):
        raise TypeError(f"{caller}: expected a DataFrame of Spark. Received: {_described(given)}")


def _is_of_pandas(given: Any) -> bool:
    names = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(given).__mro__)
    return ("pandas", "DataFrame") in names


def frame_of(given: Any, caller: str) -> DataFrame:
    """Returns a DataFrame of Spark: the one given, or one of the rows of pandas'; raises TypeError for all else."""
    if _is_of_pandas(given):
        return _frame_of_pandas(active_session("take the rows", caller), given, caller)
    require_frame(given, caller)
    return cast("DataFrame", given)


def _frame_of_pandas(session: SparkSession, given: pd.DataFrame, caller: str = "fit") -> DataFrame:
    try:
        table = pa.Table.from_pandas(given, preserve_index=False)
    except pa.ArrowException as error:
        raise DataError(
            f"{caller}: expected columns whose values are of one type each. Received: {error}. "
            "Convert the column, or drop it."
        ) from error
    # Spark takes no categories.
    plain = [part.cast(part.type.value_type) if pa.types.is_dictionary(part.type) else part for part in table.columns]
    table = pa.table(plain, names=table.column_names)
    if SINCE_4:
        return session.createDataFrame(table)
    return session.createDataFrame([tuple(row.values()) for row in table.to_pylist()], spark_schema(table.schema))


def _described(given: Any) -> str:
    """Returns a description of something that is no DataFrame, and how it becomes one."""
    name = type(given).__name__
    if _is_of_pandas(given):
        return f"a {name} of pandas. spark.createDataFrame(df) makes one of Spark."
    if hasattr(given, "to_spark"):
        return f"a {name} of pandas on Spark. Its to_spark() is one."
    if hasattr(given, "mapPartitions"):
        return f"{name}. RDDs are elephant.SparkModel's."
    if not (isinstance(given, (tuple, list, dict)) or hasattr(given, "__array__")):
        return f"{name}."
    shape = f" of shape {given.shape}" if isinstance(given, np.ndarray) else ""
    return (
        f"{name}{shape}. Arrays x and y make one: pandas.DataFrame({{'features': list(x), 'label': y}}); an image of "
        "several dimensions is a flat row of it, which takes the shape of the model's input."
    )


def active_session(whose_executors: str = "read the files", caller: str = "fit") -> SparkSession:
    """Returns the session whose executors have something to do; raises ClusterError when there is none."""
    session = running_session()
    if session is None:
        raise ClusterError(
            f"{caller}: expected a Spark session, whose executors {whose_executors}. Received: none. Start one with "
            "SparkSession.builder.getOrCreate() or elephant.cluster.local.local_session()."
        )
    return session


def open_files(files: Files, facts: ModelInfo, choice: ColumnSelection) -> Opened:
    """Lists files, and finds out what columns they have.

    Args:
        files: Where they are.
        facts: What the model takes.
        choice: The columns that it is to be given.

    Raises:
        ConfigurationError: There are no files, or of no known format.
        DataError: A file cannot be read.
    """
    url = absolute(os.fspath(files.path))
    # Asked first: the folder of a Delta table has Parquet files which are not all part of it.
    if files.format == DELTA or (files.format is None and has_folder(url, "_delta_log")):
        return _open_delta(url)
    root, found = list_files(url)
    if not found:
        raise ConfigurationError(f"path: expected files with rows. Received: {url!r}, a folder without any.")
    kind = files.format or _format_of(url, found)
    if files.schema is not None and kind != TFRECORD:
        raise ConfigurationError(f"schema: expected TFRecord files. Received: {kind} files, which say what they hold.")
    return (
        _open_records(url, found, files.schema, facts, choice) if kind == TFRECORD else _open_parquet(url, root, found)
    )


def _format_of(url: str, found: Sequence[Found]) -> str:
    kinds = {_format_by_name(url, file) for file in found}
    kind = kinds.pop()
    if kinds or kind is None:
        raise ConfigurationError(
            f"path: expected Parquet or TFRecord files, by their names. Received: {url!r} with {found[0].path!r}"
            f"{' and others' if len(found) > 1 else ''}. Say what they are: elephant.Files(path, format='parquet')."
        )
    return kind


def _format_by_name(url: str, file: Found) -> str | None:
    if _PARQUET_NAME.search(file.path):
        return PARQUET
    if _RECORDS_NAME.search(file.path):
        return TFRECORD
    system, _ = open_file_system(url)
    with system.open_input_stream(file.path) as stream:
        return PARQUET if stream.read(4) == b"PAR1" else None


def _open_parquet(url: str, root: str, found: Sequence[Found]) -> Opened:
    types, constants = typed_partitions([partition_texts(file.path[len(root) :]) for file in found])
    return _with_footers(url, found, types, constants)


def _open_delta(url: str) -> Opened:
    table = delta_files(url)
    if not table.found:
        raise DataError(f"path: expected a Delta table with rows. Received: {url!r}, which has no file.")
    return _with_footers(url, table.found, table.constant_types, table.constants)


def _with_footers(
    url: str, found: Sequence[Found], types: dict[str, Any], constants: Sequence[dict[str, Any]]
) -> Opened:
    first, groups = read_footers(url, found)
    own = pa.schema([column for column in first.columns if column.name not in types])
    columns = StructType([*spark_schema(own, first.spark).fields, *spark_schema(pa.schema(list(types.items()))).fields])
    files = tuple(ParquetFile(file, rows, values) for file, rows, values in zip(found, groups, constants, strict=True))
    return Opened(columns, ParquetFiles(url, files, types))


def _open_records(
    url: str, found: Sequence[Found], schema: str | StructType | None, facts: ModelInfo, choice: ColumnSelection
) -> Opened:
    if schema is not None:
        columns = schema if isinstance(schema, StructType) else cast(StructType, _parse_datatype_string(schema))
        features = {column.name: _feature_of(column) for column in columns.fields}
    else:
        # Here, because it needs TensorFlow, which other formats do not.
        from elephant.rank.input.tfrecord_reader import describe

        features = describe(url, found)
        strings = _string_columns(facts, choice)
        columns = StructType([_column_of(name, *features[name], name in strings) for name in sorted(features)])
    return Opened(columns, RecordFiles(url, tuple(found), features))


def _feature_of(column: StructField) -> tuple[str, bool]:
    kind: DataType = column.dataType
    single = not isinstance(kind, ArrayType)
    element = kind.elementType if isinstance(kind, ArrayType) else kind
    if isinstance(element, (FloatType, DoubleType)):
        return "float_list", single
    if isinstance(element, IntegralType):
        return "int64_list", single
    if isinstance(element, (StringType, BinaryType)):
        return "bytes_list", single
    raise SchemaError(
        "schema: expected float, bigint, string, binary and arrays of them, as TFRecords hold. "
        f"Received: column {column.name!r} of type {kind.simpleString()}."
    )


def _column_of(name: str, kind: str, single: bool, is_string: bool) -> StructField:
    elements: dict[str, DataType] = {
        "float_list": FloatType(),
        "int64_list": LongType(),
        "bytes_list": StringType() if is_string else BinaryType(),
    }
    return StructField(name, elements[kind] if single else ArrayType(elements[kind]))


def _string_columns(facts: ModelInfo, choice: ColumnSelection) -> Collection[str]:
    """Returns the columns that are given to inputs of strings; TFRecords know bytes alone."""
    taken = [known.dtype == "string" for known in facts.inputs]
    if isinstance(choice.inputs, dict):
        by_name = {known.name: known.dtype == "string" for known in facts.inputs}
        given = [(columns, by_name.get(name, False)) for name, columns in choice.inputs.items()]
    else:
        columns_in_order = [choice.features] if choice.inputs is None else list(choice.inputs)
        given = list(zip(columns_in_order, taken, strict=False))
    names: set[str] = set()
    for columns, is_string in given:
        if is_string:
            names.update([columns] if isinstance(columns, str) else columns)
    return names


@dataclass(frozen=True)
class TrainingData:
    """The rows of a fit.

    Args:
        rows_of: Returns them with what some schema says of their columns.
        schema: What they hold.
        target: What a preprocessing function is to make of them; None where there is no such function.
    """

    rows_of: Callable[[DataSchema], RowSource]
    schema: DataSchema
    target: DataSchema | None = None

    @property
    def source(self) -> RowSource:
        """Source of the rows."""
        return self.rows_of(self.schema)

    @property
    def trained_schema(self) -> DataSchema:
        """Schema of the model's input."""
        return self.schema if self.target is None else self.target


def rows_of_frame(frame: DataFrame, facts: ModelInfo, choice: ColumnSelection, *, preprocessed: bool) -> TrainingData:
    """Returns the rows of a DataFrame, which are cast where they are used.

    Vectors stay sparse where the first row of their column is, and become arrays else: that
    row is asked for here where there are vectors, and where the fit begins elsewhere.

    Args:
        frame: The user's DataFrame.
        facts: What the model takes.
        choice: Which columns to use.
        preprocessed: Whether a function of the user's gets the columns as they are.
    """
    require_running(frame.sparkSession)

    def rows_of(schema: DataSchema) -> FrameRows | FileRows:
        return FrameRows(frame.select(*selected_columns(frame.schema, schema)), schema)

    return _training_data(frame.schema, facts, choice, rows_of, preprocessed)


def rows_of_files(
    files: Files, facts: ModelInfo, choice: ColumnSelection, config: FitConfig, *, preprocessed: bool
) -> TrainingData:
    """Returns the rows of files, which the executors of the active session read.

    Args:
        config: Tells workers, seed and whether rows are shuffled.
    """
    session = active_session()
    opened = open_files(files, facts, choice)
    seed = config.seed if config.shuffle else None

    def rows_of(schema: DataSchema) -> FrameRows | FileRows:
        return FileRows(session, opened.files, schema, config.num_workers, seed)

    return _training_data(opened.schema, facts, choice, rows_of, preprocessed)


def _training_data(
    columns: StructType,
    facts: ModelInfo,
    choice: ColumnSelection,
    rows_of: Callable[[DataSchema], FrameRows | FileRows],
    preprocessed: bool,
) -> TrainingData:
    if preprocessed:
        raw, target = raw_training_schema(columns, facts, choice)
        return TrainingData(rows_of, raw, target)
    schema = training_schema(columns, facts, choice)
    vectors = undecided_vectors(columns, schema)
    if vectors:
        first = rows_of(schema.with_sparse(vectors)).first_row()
        if first is not None:
            roles = {field.columns[0]: field.role for field in schema.inputs}
            schema = schema.with_sparse([name for name in vectors if _is_sparse(first.column(roles[name])[0].as_py())])
    return TrainingData(rows_of, schema)


def _is_sparse(vector: Any) -> bool:
    return vector is not None and vector["type"] == 0
