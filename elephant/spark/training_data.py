"""Training data: the rows of a frame or of files, as the model takes them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    StructType,
)

from elephant.cluster.executors import parts_of_files
from elephant.cluster.prepared_rows import Fold, PreparedRows, RowsOnDisk
from elephant.cluster.row_source import SINCE_4, FileRows, FrameRows, RowSource
from elephant.cluster.session import require_running
from elephant.config import FitConfig
from elephant.data.schema import DataSchema
from elephant.errors import ClusterError, ConfigurationError, DataError
from elephant.modeling.model_info import ModelInfo
from elephant.spark.columns.column_selection import ColumnSelection
from elephant.spark.columns.column_types import (
    raw_training_schema,
    selected_columns,
    training_schema,
    undecided_vectors,
)
from elephant.spark.columns.spark_types import spark_schema
from elephant.spark.file_formats import Files, open_files
from elephant.spark.hadoop_files import running_session
from elephant.task.partition_statistics import first_rows

if TYPE_CHECKING:
    import pandas as pd


def dataset_of(given: Any) -> DataFrame | Files:
    """Returns the dataset that an estimator trains on.

    Args:
        given: A DataFrame of Spark or pandas, the path of files, or `Files`.

    Raises:
        TypeError: It is none of these.
        ConfigurationError: It is a stream.
        ClusterError: There is no Spark session, whose executors a DataFrame of pandas goes to.
    """
    files = files_of(given)
    if files is not None or is_frame(given):
        refuse_stream(given, "fit", "fit_stream trains on its micro-batches")
        return cast("DataFrame", given) if files is None else files
    if _is_of_pandas(given):
        return _frame_of_pandas(active_session("take the rows"), given)
    raise TypeError(
        "fit: expected a DataFrame of Spark or pandas, the path of files, or elephant.Files. Received: "
        f"{_described(given)}"
    )


def files_of(given: Any) -> Files | None:
    """Returns the files that a dataset is, by their path or as they are; None for all else."""
    if isinstance(given, (str, os.PathLike)):
        return Files(os.fspath(given))
    return given if isinstance(given, Files) else None


def is_frame(given: Any) -> bool:
    """Returns whether it is a DataFrame of Spark, classic or of Spark Connect."""
    return hasattr(given, "sparkSession")


def require_frame(given: Any, caller: str, others: str = "") -> None:
    """Raises TypeError for what is no DataFrame of Spark; others are what the caller takes beside, for the message."""
    if not is_frame(given):
        raise TypeError(f"{caller}: expected a DataFrame of Spark{others}. Received: {_described(given, caller)}")


def refuse_stream(given: Any, caller: str, remedy: str) -> None:
    """Raises ConfigurationError for a streaming DataFrame, before Spark does."""
    if getattr(given, "isStreaming", False):
        raise ConfigurationError(
            f"{caller}: expected a DataFrame whose rows are all there. Received: a streaming one. {remedy}."
        )


def _is_of_pandas(given: Any) -> bool:
    names = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(given).__mro__)
    return ("pandas", "DataFrame") in names


def frame_of(given: Any, caller: str, others: str = "") -> DataFrame:
    """Returns a DataFrame of Spark: the one given, or one of the rows of pandas'; raises TypeError for all else."""
    if _is_of_pandas(given):
        return _frame_of_pandas(active_session("take the rows", caller), given, caller)
    require_frame(given, caller, others)
    refuse_stream(given, caller, "transform takes it, and foreachBatch of its writeStream hands its micro-batches on")
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
    return frame_of_arrow(session, pa.table(plain, names=table.column_names))


def frame_of_arrow(session: SparkSession, table: pa.Table) -> DataFrame:
    """Returns a DataFrame of the rows of an Arrow table."""
    if SINCE_4:
        return session.createDataFrame(table)
    return session.createDataFrame([tuple(row.values()) for row in table.to_pylist()], spark_schema(table.schema))


def _described(given: Any, caller: str = "fit") -> str:
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
    is_compared = caller in ("fit", "evaluate")
    arrays, columns = ("Arrays x and y make", ", 'label': y") if is_compared else ("An array x makes", "")
    return (
        f"{name}{shape}. {arrays} one: pandas.DataFrame({{'features': list(x){columns}}}); an image of "
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


@dataclass(frozen=True)
class TrainingData:
    """The rows of a fit.

    Args:
        rows_of: Returns them with what some schema says of their columns.
        schema: What they hold.
        target_schema: What a preprocessing function is to make of them; None where there is no such function.
        is_preprocessed: Whether it has made them, and is not called any more.
    """

    rows_of: Callable[[DataSchema], RowSource]
    schema: DataSchema
    target_schema: DataSchema | None = None
    is_preprocessed: bool = False

    @property
    def source(self) -> RowSource:
        """Source of the rows."""
        return self.rows_of(self.schema)

    @property
    def trained_schema(self) -> DataSchema:
        """Schema of the model's input."""
        return self.schema if self.target_schema is None else self.target_schema

    def take(self, count: int) -> pa.RecordBatch | None:
        """Returns the prepared columns of the first rows; None when there are none.

        Args:
            count: How many, at most. Each partition sends no more than so many.
        """
        results = self.source.run(functools.partial(first_rows, count), barrier=False)
        batches = [batch for result in results for batch in pa.ipc.open_stream(bytes(result["result"]))]
        if not batches:
            return None
        # One batch, whatever the number of chunks.
        places = range(batches[0].num_columns)
        columns = [pa.concat_arrays([batch.column(place) for batch in batches]) for place in places]
        return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema).slice(0, count)


def rows_of_frame(
    frame: DataFrame,
    info: ModelInfo,
    selection: ColumnSelection,
    *,
    preprocessed: bool,
    on_disk: RowsOnDisk | None = None,
    fold: Fold | None = None,
) -> TrainingData:
    """Returns the rows of a DataFrame, which are cast where they are used.

    Vectors stay sparse where the first row of their column is, and become arrays else: that
    row is asked for here where there are vectors, and where the fit begins elsewhere.

    Args:
        frame: The user's DataFrame.
        info: What the model takes.
        selection: Which columns to use.
        preprocessed: Whether a function of the user's gets the columns as they are.
        on_disk: What executors keep of the frame's rows; None has them read for this fit alone.
        fold: Of what they keep, the rows for validation; None leaves these to the selection.
    """
    require_running(frame.sparkSession)

    def rows_of(schema: DataSchema) -> FrameRows | FileRows:
        stored_schema = schema if fold is None else fold.stored_schema(schema)
        selected = frame.select(*selected_columns(frame.schema, stored_schema))
        if on_disk is None:
            return FrameRows(selected, schema)
        if fold is None:
            return PreparedRows(selected, schema, on_disk=on_disk)
        stored_rows = FrameRows(selected, stored_schema)
        return PreparedRows(fold.marked(selected), schema, on_disk=on_disk, stored_rows=stored_rows, fold=fold)

    return _training_data(frame.schema, info, selection, rows_of, preprocessed)


def rows_of_files(
    files: Files, info: ModelInfo, selection: ColumnSelection, config: FitConfig | None, *, preprocessed: bool
) -> TrainingData:
    """Returns the rows of files, which the executors of the active session read.

    Args:
        config: Tells workers, seed and whether rows are shuffled; None has every task slot read a part of them.
    """
    session = active_session(caller="evaluate" if config is None else "fit")
    opened = open_files(files, info, selection)
    if config is None:
        number, seed = parts_of_files(session, opened.files.num_bytes), None
    else:
        number, seed = config.num_workers, config.seed if config.shuffle else None

    def rows_of(schema: DataSchema) -> FrameRows | FileRows:
        return FileRows(session, opened.files, schema, number, seed)

    return _training_data(opened.schema, info, selection, rows_of, preprocessed)


def _training_data(
    columns: StructType,
    info: ModelInfo,
    selection: ColumnSelection,
    rows_of: Callable[[DataSchema], FrameRows | FileRows],
    preprocessed: bool,
) -> TrainingData:
    if preprocessed:
        raw_schema, target_schema = raw_training_schema(columns, info, selection)
        return TrainingData(rows_of, raw_schema, target_schema)
    schema = training_schema(columns, info, selection)
    vectors = undecided_vectors(columns, schema)
    if vectors:
        first = rows_of(schema.with_sparse(vectors)).first_row()
        if first is not None:
            roles = {field.columns[0]: field.role for field in schema.inputs}
            schema = schema.with_sparse([name for name in vectors if _is_sparse(first.column(roles[name])[0].as_py())])
    return TrainingData(rows_of, schema)


def _is_sparse(vector: Any) -> bool:
    return vector is not None and vector["type"] == 0
