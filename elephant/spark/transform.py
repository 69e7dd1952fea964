"""``transform``: the model's outputs as columns beside the rows that they belong to.

Only the prepared inputs travel to Python where Spark has Arrow UDFs (PySpark 4.1 and
later): Spark keeps every row beside its own result, and leaves out columns that nobody
asks for. On earlier versions all columns pass through one Arrow map. Rows are never
zipped or joined with predictions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from packaging.version import Version
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)
from pyspark.sql.types import DataType, NullType, StructField, StructType

from elephant.cluster.executors import TaskProfile, parts_of_files, profile_of
from elephant.cluster.gpu_plan import RESOURCE_SETTING, prediction_profile
from elephant.cluster.row_source import SINCE_4, FileRows, FrameRows, arrow_schema, numbered_parts
from elephant.cluster.session import release, require_running, setting
from elephant.cluster.warm_workers import warm_workers
from elephant.data.ragged import Values
from elephant.data.schema import DataSchema, pack
from elephant.errors import ConfigurationError, DataError, SchemaError, warn_user
from elephant.modeling.model_info import ModelInfo
from elephant.modeling.model_spec import ModelSpec, Servable
from elephant.spark.columns.column_selection import ColumnSelection, target_inputs
from elephant.spark.columns.column_types import (
    find_column,
    input_schema,
    raw_input_schema,
    selected_columns,
    undecided_vectors,
)
from elephant.spark.columns.spark_types import spark_type, with_nulls
from elephant.spark.file_formats import Files, open_files
from elephant.spark.hadoop_files import running_session
from elephant.spark.training_data import active_session
from elephant.task.model_batches import PackedFunction, pickled
from elephant.task.model_cache import PackedModel
from elephant.task.predict_task import (
    OutputColumn,
    Prediction,
    joined,
    predict_arrays,
    predict_batches,
    predict_files,
    predict_structs,
    transformed_columns,
    unpacked_outputs,
)

# Elements of a vector from which on it travels as the elements that it keeps.
_WIDE = 10_000
_RESULT = "__elephant_result"
# SQL_SCALAR_ARROW_ITER_UDF needs both sides to know it.
_ARROW_UDF_SINCE = Version("4.1")


def packed_model(spec: ModelSpec) -> PackedModel:
    """Returns a trained model as it travels to the tasks that predict: without its optimizer's state."""
    return packed(Servable.of(spec), model_id=spec.source_id)


def packed(servable: Servable, *, model_id: str) -> PackedModel:
    """Returns a model as it travels to the tasks that predict.

    Raises:
        ConfigurationError: Its code cannot be pickled.
    """
    content = pickled(servable, "The model's code")
    return packed_content(model_id, servable.settings.backend, content)


def packed_content(model_id: str, backend: str, content: bytes) -> PackedModel:
    """Returns the content that makes a model in the tasks, with the settings of the session."""
    session = running_session()
    named = None if session is None else setting(session, RESOURCE_SETTING)
    return PackedModel(model_id, backend, content, warm_workers(session), named or "gpu")


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """A model, the columns that it takes, and the names of those that it adds.

    Args:
        info: What the model takes and gives.
        model: The model.
        selection: The columns that it is given.
        prediction: See `elephant.task.predict_task.transformed_columns`, as the next two.
        batch_size: Rows that go through the model at a time; None leaves that to the model.
        preprocessing: The user's function that makes of the columns what the model takes, or None.
        use_gpu: Whether each task asks Spark for a GPU by itself.

    Raises:
        ConfigurationError: Rows go through at a time that are none.
    """

    info: ModelInfo
    model: PackedModel
    selection: ColumnSelection
    prediction: str
    probability: str
    raw_prediction: str
    batch_size: int | None
    preprocessing: Callable[..., Any] | None = None
    use_gpu: bool = False

    def __post_init__(self) -> None:
        checked_batch_size(self.batch_size)

    def task(self, columns: StructType) -> Prediction:
        """Returns the order to the tasks; raises SchemaError where a features column is missing or unusable."""
        schema, function = _prepared(columns, self.info, self.selection, self.preprocessing)
        return Prediction(
            model=self.model, schema=schema, outputs=self.info.y, batch_size=self.batch_size, function=function
        )

    def profile(self, session: SparkSession) -> TaskProfile | None:
        """Returns the profile of the tasks, or None; raises ClusterError where Spark cannot give them GPUs."""
        return prediction_profile(session) if self.use_gpu else None

    def added(self, beside: Sequence[str]) -> list[OutputColumn]:
        """Returns the columns to add; raises SchemaError where one is among those beside them already."""
        columns = transformed_columns(
            self.info.outputs,
            prediction=self.prediction,
            probability=self.probability,
            raw_prediction=self.raw_prediction,
        )
        _refuse_taken_names(beside, [column.name for column in columns])
        if not columns:
            warn_user("transform: expected the name of a column to add. Received: none. Set predictionCol.")
        return columns


def add_predictions(frame: DataFrame, scoring: Scoring) -> DataFrame:
    """Returns the frame with the model's predictions beside its columns. Lazy, as all of Spark.

    Raises:
        ClusterError: The frame's session was stopped.
        SchemaError: A features column is missing or unusable, or an output column is there already.
    """
    require_running(frame.sparkSession)
    output_columns, task = scoring.added(frame.columns), scoring.task(frame.schema)
    if not output_columns:
        return frame
    inputs, profile = selected_columns(frame.schema, task.schema), scoring.profile(frame.sparkSession)
    if profile is None and has_arrow_udfs(frame):
        return _with_udf(frame, inputs, task, output_columns)
    return _with_map(frame, inputs, task, output_columns, profile)


def predictions_of_files(files: Files, scoring: Scoring, columns: Sequence[str] | None) -> DataFrame:
    """Returns the rows of files with the model's predictions beside their columns. They are listed now, and read later.

    Args:
        columns: Those to keep; None keeps all.

    Raises:
        ClusterError: There is no Spark session.
        ConfigurationError: There are no files, or of no known format.
        SchemaError: A column is missing or unusable, or an output column is there already.
    """
    session = active_session(caller="transform")
    opened = open_files(files, scoring.info, scoring.selection)
    kept = with_nulls(opened.schema)
    if isinstance(columns, str):
        raise ConfigurationError(f"columns: expected a list of names. Received: {columns!r}. Pass [{columns!r}].")
    if columns is not None:
        kept = StructType([find_column(kept, name, "columns") for name in columns])
    _refuse_unknown_types(kept)
    output_columns, task = scoring.added(kept.names), scoring.task(opened.schema)
    parts = opened.files.in_order(parts_of_files(session, opened.files.num_bytes))

    def function(computed: Sequence[OutputColumn]) -> functools.partial[Iterator[pa.RecordBatch]]:
        return functools.partial(predict_files, task, computed, arrow_schema(kept), opened.files, parts)

    return _mapped(numbered_parts(session, parts), kept, output_columns, function, scoring.profile(session))


def collected_predictions(dataset: DataFrame | Files, scoring: Scoring) -> Any:
    """Returns the model's outputs for all rows in the dataset's order, nested as Keras' ``predict`` nests them.

    The order of files is that of their paths.

    Raises:
        ClusterError: The frame's session was stopped, or there is none.
        SchemaError: A features column is missing or unusable.
        DataError: There are no rows, or one does not fit the model.
    """
    rows: FrameRows | FileRows
    if isinstance(dataset, Files):
        session = active_session(caller="predict")
        opened = open_files(dataset, scoring.info, scoring.selection)
        task, number = scoring.task(opened.schema), parts_of_files(session, opened.files.num_bytes)
        rows = FileRows(session, opened.files, task.schema, number, seed=None, in_order=True)
    else:
        require_running(dataset.sparkSession)
        task = scoring.task(dataset.schema)
        rows = FrameRows(dataset.select(*selected_columns(dataset.schema, task.schema)), task.schema)
    profile = profile_of(rows.session, scoring.profile(rows.session))
    results = rows.run(functools.partial(predict_arrays, task), barrier=False, profile=profile)
    parts: list[list[Values]] = [[] for _ in scoring.info.outputs]
    for result in results:
        for part, values in zip(parts, unpacked_outputs(bytes(result["result"]), len(parts)), strict=True):
            part += values
    if not parts[0]:
        raise DataError("predict: expected rows. Received: none.")
    return _with_lists(pack(scoring.info.y, [joined(part) for part in parts]))


def _with_lists(outputs: Any) -> Any:
    """Returns outputs nested in lists where they are in tuples."""
    if isinstance(outputs, dict):
        return {name: _with_lists(part) for name, part in outputs.items()}
    return [_with_lists(part) for part in outputs] if isinstance(outputs, tuple) else outputs


def _computed(output_columns: Sequence[OutputColumn]) -> dict[OutputColumn, OutputColumn]:
    """Returns the column to compute for each one to add: of those that hold the same, there is one."""
    contents = list(dict.fromkeys(replace(column, name="") for column in output_columns))
    return {column: replace(column, name=f"r{contents.index(replace(column, name=''))}") for column in output_columns}


def _values(results: Mapping[OutputColumn, Column]) -> list[Column]:
    """Returns the columns to add, under their names."""
    return [result.alias(column.name) for column, result in results.items()]


def _prepared(
    columns: StructType, info: ModelInfo, selection: ColumnSelection, preprocessing: Callable[..., Any] | None
) -> tuple[DataSchema, PackedFunction | None]:
    """Returns the schema that the columns that travel become, and what is to be made of that."""
    require_predicting(info)
    if preprocessing is not None:
        names = [input_info.name for input_info in info.inputs]
        function = PackedFunction.of(preprocessing, target_inputs(info, selection), names)
        return raw_input_schema(columns, selection), function
    schema = input_schema(columns, info, selection)
    # Most of so many elements are zero, as a rule.
    wide = {field.columns[0] for field in schema.inputs if (field.width or 0) > _WIDE}
    return schema.with_sparse(wide.intersection(undecided_vectors(columns, schema))), None


def require_predicting(info: ModelInfo) -> None:
    """Raises ConfigurationError unless a model gives each row a prediction of its own."""
    if not info.has_call:
        raise ConfigurationError(
            "model: expected a class with a call method, which gives predictions. Received: one without, which can be "
            "trained alone. Give it a call, or predict with a part of it: elephant.predict_udf(fitted.model.PART)."
        )
    if info.is_stateful:
        raise ConfigurationError(
            "model: expected one that gives each row a prediction of its own, wherever it lies. Received: one with "
            "stateful=True, whose rows go on where those of the batch before have ended. Predict with fitted.model in "
            "one process, or build the model with stateful=False, set_weights(fitted.model.get_weights()), and give it "
            "to elephant.KerasModel."
        )


def require_evaluable(info: ModelInfo) -> None:
    """Raises ConfigurationError unless a model is compiled, and gives each row a prediction of its own."""
    if not info.is_compiled:
        raise ConfigurationError(
            "model: expected a compiled model, whose loss and metrics evaluate computes. Received: one without them. "
            "Call compile(optimizer=..., loss=..., metrics=...) before you pass it to KerasModel.",
            topic="a-model-that-is-not-compiled",
        )
    if info.is_stateful:
        require_predicting(info)


def checked_batch_size(batch_size: int | None, name: str = "inferenceBatchSize") -> int | None:
    """Returns it; raises ConfigurationError, in which it has its name, unless it is at least one, or not set."""
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"{name}: expected an integer of at least 1. Received: {batch_size}.")
    return batch_size


def has_arrow_udfs(frame: DataFrame) -> bool:
    """Returns whether PySpark, here and at the server that runs the frame, has UDFs on Arrow arrays."""
    return hasattr(F, "arrow_udf") and release(frame.sparkSession.version) >= _ARROW_UDF_SINCE


def arrow_udf(task: Prediction, columns: Sequence[OutputColumn]) -> Any:
    """Returns the UDF from prepared inputs to output columns: a struct of them, or the one that there is.

    Spark runs it once for every row: what it takes to be deterministic it repeats, where a filter uses the result.
    """
    kind = _type_of(columns[0]) if len(columns) == 1 else struct_of(columns)
    function = functools.partial(predict_structs, task, tuple(columns))
    return as_arrow_udf(function, kind).asNondeterministic()


def as_arrow_udf(function: Callable[[Iterable[Any]], Iterator[pa.Array]], kind: DataType) -> Any:
    """Returns a function on an iterator of Arrow arrays as a UDF, which Spark takes to be deterministic."""

    def run(chunks: Iterator[pa.Array]) -> Iterator[pa.Array]:
        # Spark reads the kind of UDF off these types; of several columns each chunk is a tuple.
        return function(chunks)

    # PySpark's own types ask for a kind of UDF beside.
    make: Any = F.arrow_udf
    return make(run, kind)


def struct_of(columns: Sequence[OutputColumn]) -> StructType:
    """Returns the type of a struct of output columns."""
    return StructType([StructField(column.name, _type_of(column)) for column in columns])


def _type_of(column: OutputColumn) -> DataType:
    return VectorUDT() if column.is_vector else spark_type(column.arrow_type)


def _with_udf(
    frame: DataFrame, inputs: Sequence[Column], task: Prediction, output_columns: Sequence[OutputColumn]
) -> DataFrame:
    """Returns the frame with the columns added; its own ones stay what they were to whoever holds them."""
    computed = _computed(output_columns)
    columns = list(dict.fromkeys(computed.values()))
    result = arrow_udf(task, columns)
    # True of all rows, and nothing that Spark could leave out. Straight above a Parquet scan, Spark 4.3 hands columns
    # to the UDF, and copies all of them, inputs included, row by row into new ones; behind a filter it hands rows,
    # and its JVM takes a sixth less time.
    rows = frame.filter(F.spark_partition_id() >= 0)
    predicted = rows.select("*", result(*inputs).alias(_RESULT))
    whole = F.col(_RESULT)
    results = {column: whole.getField(made.name) if len(columns) > 1 else whole for column, made in computed.items()}
    # All others by a star: their names may repeat, or hold dots.
    return predicted.select("*", *_values(results)).drop(_RESULT)


def _with_map(
    frame: DataFrame,
    inputs: Sequence[Column],
    task: Prediction,
    output_columns: Sequence[OutputColumn],
    profile: TaskProfile | None,
) -> DataFrame:
    """Returns the same, made by a map through which all columns pass, and come out as new ones."""
    names = [f"c{place}" for place in range(len(frame.columns) + len(inputs))]
    given = frame.select("*", *inputs).toDF(*names)
    return _mapped(
        given, frame.schema, output_columns, lambda made: functools.partial(predict_batches, task, made), profile
    )


def _mapped(
    given: DataFrame,
    kept: StructType,
    output_columns: Sequence[OutputColumn],
    function: Callable[[Sequence[OutputColumn]], Callable[..., Iterator[pa.RecordBatch]]],
    profile: TaskProfile | None,
) -> DataFrame:
    """Returns the columns that come out of a map: those that are kept, and those that are added.

    Args:
        function: Returns the map, which makes both of what it is given.
        profile: What each of its tasks asks for; None leaves it what the application's tasks have.

    Raises:
        ConfigurationError: This PySpark has no profiles for a lazy map.
    """
    if profile is not None and not SINCE_4:
        raise ConfigurationError(
            "inferenceUseGpu=True: expected PySpark 4.0 or later for transform. Received: an older one. Set "
            f"spark.task.resource.{profile.resource}.amount, or call predict or evaluate, which run at once."
        )
    options: dict[str, Any] = {} if profile is None else {"profile": profile_of(given.sparkSession, profile)}
    computed = _computed(output_columns)
    columns = tuple(dict.fromkeys(computed.values()))
    fields = [StructField(f"c{i}", f.dataType, f.nullable, f.metadata) for i, f in enumerate(kept.fields)]
    mapped = given.mapInArrow(function(columns), StructType([*fields, *struct_of(columns).fields]), **options)
    values = _values({column: F.col(made.name) for column, made in computed.items()})
    selected = mapped.select(*(F.col(field.name) for field in fields), *values)
    return selected.toDF(*kept.names, *(column.name for column in output_columns))


def _refuse_unknown_types(columns: StructType) -> None:
    """Raises SchemaError for columns of files of which Spark has no type, and which it therefore cannot be given."""
    for column in columns.fields:
        if _has_null_type(column.dataType):
            raise SchemaError(
                f"transform: expected columns of types that Spark has. Received: column {column.name!r} of a type that "
                "it has not. Name those to keep: transform(path, columns=[...])."
            )


def _has_null_type(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_null_type(field.dataType) for field in kind.fields)
    parts = (getattr(kind, name, None) for name in ("elementType", "keyType", "valueType"))
    return isinstance(kind, NullType) or any(_has_null_type(part) for part in parts if part is not None)


def _refuse_taken_names(columns: Sequence[str], names: Sequence[str]) -> None:
    # Spark tells names apart without regard to case, unless it is told otherwise.
    taken = [name.lower() for name in columns]
    for name in names:
        if name.lower() in taken:
            raise SchemaError(
                f"transform: expected a DataFrame without a column {name!r}, which it would add. "
                f"Received: columns {', '.join(columns)}. Drop it, or set predictionCol, probabilityCol or "
                "rawPredictionCol."
            )
        taken.append(name.lower())
