"""Rows for several fits: read and preprocessed once, and on the executors' disks until the fits are done."""

from __future__ import annotations

import functools
import hashlib
import io
import re
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import keras
import numpy as np
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.ml import Estimator
from pyspark.ml.param import Param

from elephant.cluster.prepared_rows import ROW_SCHEMA, Fold, PreparedRows, RowFunction, RowsOnDisk
from elephant.cluster.row_source import RowSource
from elephant.cluster.warm_workers import warm_workers
from elephant.config import FitConfig
from elephant.data.schema import DataSchema
from elephant.data.to_arrow import raw_type
from elephant.errors import warn_user
from elephant.modeling.model_spec import ModelSpec
from elephant.rank.input.preprocessing import schema_from_text, takes_generator
from elephant.spark.columns.spark_types import spark_schema
from elephant.spark.file_formats import Files
from elephant.spark.params import TrainingParams, column_selection, optional
from elephant.spark.training_data import TrainingData, is_frame, rows_of_files, rows_of_frame
from elephant.spark.tuning.trial_runs import GridRuns
from elephant.task.model_batches import PackedFunction, PreprocessingTask, pickled, preprocessed_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FUNCTION = "preprocessing: the function"
# Names of inputs that have none of the user's: Keras counts them on from model to model.
_UNNAMED = re.compile(r"keras_tensor(_\d+)?")
# Part of a layer that Keras has saved, which has the time.
_SAVED_WHEN = "metadata.json"
# Since Spark 4.1 a message of rows has a limit in bytes; before, in rows alone.
_BATCH_ROWS, _BATCH_BYTES = (f"spark.sql.execution.arrow.max{what}PerBatch" for what in ("Records", "Bytes"))
# Of a message, which Arrow in Java keeps below twice as much.
_MOST_BYTES = 1 << 30


class PreparedFrame:
    """A DataFrame whose rows stay on the executors, for the fits of a ``with`` block; see `elephant.prepared`.

    Args:
        frame: The user's DataFrame, with a column of fold numbers where there are folds.
        fold: The rows for validation of fits on it; None leaves these to the estimator.
        on_disk: What executors keep of it; None begins with nothing.
    """

    def __init__(self, frame: DataFrame, fold: Fold | None = None, on_disk: RowsOnDisk | None = None) -> None:
        self.frame, self.fold = frame, fold
        self.on_disk = RowsOnDisk() if on_disk is None else on_disk

    def with_validation(self, fold: Fold) -> PreparedFrame:
        """Returns the same rows, kept once for all folds, with those of one fold for validation."""
        return PreparedFrame(self.frame, fold, self.on_disk)

    @property
    def sparkSession(self) -> SparkSession:
        """The session of the DataFrame."""
        return self.frame.sparkSession

    def release(self) -> None:
        """Has the executors remove the rows; fits that follow read them from the DataFrame."""
        self.on_disk.release()

    def __enter__(self) -> PreparedFrame:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"prepared({self.frame!r})"


def rows_of_dataset(
    stage: TrainingParams, spec: ModelSpec, dataset: DataFrame | PreparedFrame | Files, config: FitConfig
) -> TrainingData:
    """Returns the rows of a dataset as a stage trains on them.

    Of a dataset that executors keep, they are read, and preprocessed, here where no fit has asked for the same before.

    Args:
        spec: Its model.
    """
    selection, function = column_selection(stage), optional(stage, stage.preprocessing)
    preprocessed, info = function is not None, spec.info
    if optional(stage, stage.augmentation) is not None:
        # It may give the classes of the rows other numbers, or make vectors of them.
        free: dict[str, Any] = {"num_classes": None, "is_elementwise": False}
        info = replace(info, outputs=tuple(replace(output, **free) for output in info.outputs))
    if isinstance(dataset, Files):
        return rows_of_files(dataset, info, selection, config, preprocessed=preprocessed)
    if not isinstance(dataset, PreparedFrame):
        return rows_of_frame(dataset, info, selection, preprocessed=preprocessed)
    fold = dataset.fold
    if fold is not None:
        selection = replace(selection, validation=None if fold.number is None else fold.column)
    data = rows_of_frame(dataset.frame, info, selection, preprocessed=preprocessed, on_disk=dataset.on_disk, fold=fold)
    if function is None or takes_generator(function) or config.elastic is not None or dataset.on_disk.is_released:
        return data
    return _preprocessed(data, function, spec, config) or data


def as_asked(rows: RowSource, schema: DataSchema, config: FitConfig) -> RowSource:
    """Returns the rows in the partitions that a fit asks for."""
    # Rows that a column marks are dealt out anew where workers go at their own pace.
    is_dealt = not config.is_synchronous and schema.validation is not None
    return rows.repartitioned(config.num_workers) if is_dealt else rows.in_partitions(config.num_workers)


def _preprocessed(
    data: TrainingData, function: Callable[..., Any], spec: ModelSpec, config: FitConfig
) -> TrainingData | None:
    """Returns the rows that a function makes of those that executors keep, who keep these too; None if they cannot."""
    source, target_schema = data.source, data.target_schema
    if not isinstance(source, PreparedRows) or target_schema is None:
        return None
    # What it makes depends neither on the rows for validation nor on the classes that the loss tells apart.
    labels = tuple(replace(label, num_classes=None) for label in target_schema.labels)
    wanted = replace(target_schema, labels=labels, validation=None)
    names = [input_info.name for input_info in spec.info.inputs]
    task = PreprocessingTask(
        function=PackedFunction.of(function, wanted, names),
        schema=(source.stored_rows or source).schema or data.schema,
        settings=pickled(spec.settings, "Keras' settings"),
        backend=spec.settings.backend,
        batch_size=config.rank_batch_size,
        warm=warm_workers(source.session, config.timeouts),
    )
    told = [str(place) if _UNNAMED.fullmatch(name) else name for place, name in enumerate(names)]
    content = pickled((function, task.schema, wanted, told, spec.settings), _FUNCTION, dumps=_comparable)
    made = RowFunction(key=hashlib.sha256(content).digest(), applied=functools.partial(_frame_of, task))
    source = replace(source, function=made)
    as_asked(source, data.schema, config)
    schemas = [schema_from_text(text, target_schema) for text in source.on_disk.row_schemas(made.key)]
    # Where partitions disagree, the fit says which.
    if len(schemas) != 1 or not _can_be_sent(schemas[0], source.session):
        return None
    return TrainingData(lambda _: source, schemas[0], target_schema, is_preprocessed=True)


def _frame_of(task: PreprocessingTask, frame: DataFrame) -> DataFrame:
    """Returns a frame of what a task makes of another one's rows; see `RowFunction`."""
    made = pa.schema([(field.role, raw_type(field)) for field in task.function.target_schema.batch_fields])
    columns, marks = spark_schema(made), task.schema.validation
    if marks is not None:
        columns = columns.add(marks.role, frame.schema.fields[task.schema.columns.index(marks.columns[0])].dataType)
    function = functools.partial(preprocessed_batches, task, ROW_SCHEMA)
    return frame.mapInArrow(function, columns.add(ROW_SCHEMA, "binary"))


def _can_be_sent(schema: DataSchema, session: SparkSession) -> bool:
    """Returns whether Spark's messages hold preprocessed rows; warns where they are too large."""
    if any(0 in (field.shape or (None,)) for field in schema.batch_fields):
        # Raw bytes do not tell how many elements without a value a row has.
        return False
    row_bytes = sum(
        (field.width or 0) * np.dtype(field.dtype).itemsize for field in schema.batch_fields if field.is_fixed
    )
    rows = int(session.conf.get(_BATCH_ROWS) or 0)
    if 0 < rows * row_bytes <= _MOST_BYTES or _limits_bytes(session):
        return True
    warn_user(
        f"The preprocessed rows could not be kept on the executors, and each fit preprocesses them again: Spark sends "
        f"{rows:,} rows of {row_bytes:,} bytes at once. Set {_BATCH_ROWS}={max(_MOST_BYTES // row_bytes, 1)}."
    )
    return False


def _limits_bytes(session: SparkSession) -> bool:
    # Not every Spark knows the setting, and only without a default of the caller's it tells its own.
    try:
        return bool(session.conf.get(_BATCH_BYTES))
    except Exception:
        return False


class _Comparable(cloudpickle.CloudPickler):
    """Pickler that writes equal functions alike: Keras notes in layers when it has saved them."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.layers.Layer):
            reduced = obj.__reduce__()
            archive = reduced[1][0] if isinstance(reduced, tuple) and len(reduced[1]) == 1 else None
            if isinstance(archive, io.BytesIO):
                with zipfile.ZipFile(archive) as files:
                    names = sorted(set(files.namelist()) - {_SAVED_WHEN})
                    return list, ([(name, files.read(name)) for name in names],)
        return super().reducer_override(obj)


def _comparable(value: Any) -> bytes:
    content = io.BytesIO()
    _Comparable(content).dump(value)
    return content.getvalue()


class FitsOfGrid(Iterator[tuple[int, Any]]):
    """Fits of several param maps on the same rows, which are read once; threads may take them one by one.

    Args:
        estimator: It stays as it is.
        rows: What it fits on. Those kept for these fits alone are released when all are done, or nobody takes any more.
        param_maps: One for each fit.
        runs: Those of an experiment tracker, one for each fit.
    """

    def __init__(
        self,
        estimator: Estimator[Any],
        rows: DataFrame | PreparedFrame | Files,
        param_maps: Sequence[dict[Param[Any], Any]],
        runs: GridRuns,
    ) -> None:
        is_kept = len(param_maps) > 1 and is_frame(rows) and not isinstance(rows, PreparedFrame)
        kept = PreparedFrame(cast("DataFrame", rows)) if is_kept else None
        self._estimator, self._param_maps, self._runs = estimator, list(param_maps), runs
        self._rows = rows if kept is None else kept
        self._begun = self._done = 0
        self._counting = threading.Lock()
        self._release: Callable[[], None] = (lambda: None) if kept is None else kept.release
        weakref.finalize(self, self._release).atexit = False

    def __next__(self) -> tuple[int, Any]:
        with self._counting:
            place = self._begun
            if place >= len(self._param_maps):
                raise StopIteration
            self._begun += 1
        try:
            with self._runs.run_of(place):
                return place, self._estimator.fit(cast(Any, self._rows), self._param_maps[place])
        finally:
            with self._counting:
                self._done += 1
                if self._done == len(self._param_maps):
                    self._release()
