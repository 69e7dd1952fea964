"""How estimators and fitted models are saved: Spark ML metadata, with the Keras model beside it.

::

    path/metadata/      the params as JSON, as every Spark ML stage has them
    path/model.keras    the model, if Keras can serialise it: any Keras opens it
    path/code.pkl       custom objects, the model function, callbacks and functions on batches, if there are any
    path/variables.npz  the variables of a model that a function builds

``code.pkl`` is Python code: load only from paths whose writers you trust.
"""

from __future__ import annotations

import io
import pickle  # noqa: S403  (only from a path that the user names to load a model from)
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from pyspark import cloudpickle
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter
from pyspark.sql import SparkSession

from elephant.cluster.sessions import jvm_context
from elephant.data.mounts import spark_form
from elephant.data.schema import RowSpec
from elephant.errors import ConfigurationError
from elephant.modeling.facts import ModelFacts
from elephant.modeling.settings import KerasSettings
from elephant.modeling.source import ModelSource
from elephant.spark.storage import read_file, write_file

if TYPE_CHECKING:
    from elephant.spark.estimator import KerasEstimator
    from elephant.spark.model import KerasModel

_FUNCTIONS = ("preprocessing", "augmentation")
_FILES = ("code.pkl", "variables.npz", "model.keras")
_NOT_JSON = ("model", "callbacks", "classWeight", *_FUNCTIONS)


class _Writer(MLWriter):
    """A writer that can clear a path through the JVM, and does without where there is none."""

    def _handleOverwrite(self, path: str) -> None:
        # Without a JVM each file takes the place of the one before, and the metadata tell which ones count.
        if jvm_context(self.sparkSession) is not None:
            super()._handleOverwrite(spark_form(path))


class EstimatorWriter(_Writer):
    """Writes a `KerasEstimator`."""

    def __init__(self, instance: KerasEstimator) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Writes to a path that does not exist, or that ``overwrite()`` has cleared."""
        source = self._instance.getOrDefault(self._instance.model)
        given = {param.name: value for param, value in self._instance._paramMap.items()}
        code = {name: given[name] for name in _NOT_JSON if name != "model" and name in given and given[name] != []}
        _save(self, self._instance, path, source, code, {})


class EstimatorReader(MLReader["KerasEstimator"]):
    """Reads a `KerasEstimator`."""

    def __init__(self, cls: type[KerasEstimator]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> KerasEstimator:
        """Returns the estimator that was written to the path."""
        metadata, source, code = _load(self, self._cls, path)
        # A param that was not set when it was saved is none that is set by default.
        not_json = {name: code[name] for name in _NOT_JSON if name in code}
        estimator = self._cls(model=source, labelCol=None, **not_json)
        estimator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(estimator, metadata)
        return estimator


class ModelWriter(_Writer):
    """Writes a `KerasModel`."""

    def __init__(self, instance: KerasModel) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Writes to a path that does not exist, or that ``overwrite()`` has cleared."""
        fitted = self._instance
        about = {"history": fitted.history, "trainingStatistics": fitted.training_statistics, "plan": fitted.plan}
        _save(self, fitted, path, fitted.source, _functions_of(fitted), about)


class ModelReader(MLReader["KerasModel"]):
    """Reads a `KerasModel`."""

    def __init__(self, cls: type[KerasModel]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> KerasModel:
        """Returns the fitted model that was written to the path."""
        metadata, source, code = _load(self, self._cls, path)
        # Models that were saved by earlier versions have none.
        statistics = metadata.get("trainingStatistics", {})
        model = self._cls(
            source, history=metadata["history"], training_statistics=statistics, plan=metadata.get("plan", [])
        )
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        _set_functions(model, code)
        return model


def _functions_of(instance: KerasEstimator | KerasModel) -> dict[str, Any]:
    """Returns the params that are functions on batches, by name."""
    return {param.name: value for param, value in instance._paramMap.items() if param.name in _FUNCTIONS}


def _set_functions(instance: KerasEstimator | KerasModel, code: dict[str, Any]) -> None:
    instance._set(**{name: code[name] for name in _FUNCTIONS if name in code})


def _save(
    writer: MLWriter,
    instance: KerasEstimator | KerasModel,
    path: str,
    source: ModelSource,
    code: dict[str, Any],
    extra: dict[str, Any],
) -> None:
    params = {param.name: value for param, value in instance._paramMap.items() if param.name not in _NOT_JSON}
    about = {
        "facts": source.facts.to_json(),
        "settings": asdict(source.settings),
        "rows": source.rows.to_json() if source.rows else None,
    }
    files = _files_of(source, code)
    _save_metadata(writer, instance, path, {**extra, "kerasModel": about, "files": sorted(files)}, params)
    for name, content in files.items():
        write_file(writer.sparkSession, f"{path}/{name}", content, overwrite=writer.shouldOverwrite)


def _files_of(source: ModelSource, code: dict[str, Any]) -> dict[str, bytes]:
    """Returns what is written beside the metadata, by the names of the files."""
    files = {}
    if source.custom_objects:
        code["custom_objects"] = dict(source.custom_objects)
    if source.builder is not None:
        code["builder"] = source.builder
    if source.archive is not None:
        files["model.keras"] = source.archive
    if source.variables is not None:
        buffer = io.BytesIO()
        np.savez(buffer, *source.variables)
        files["variables.npz"] = buffer.getvalue()
    if code:
        files["code.pkl"] = cloudpickle.dumps(code)
    return files


def _save_metadata(
    writer: MLWriter,
    instance: KerasEstimator | KerasModel,
    path: str,
    extra: dict[str, Any],
    params: dict[str, Any],
) -> None:
    session, path = writer.sparkSession, spark_form(path)
    if jvm_context(session) is not None or not writer.shouldOverwrite:
        DefaultParamsWriter.saveMetadata(
            instance, path, _metadata_context(session), extraMetadata=extra, paramMap=params
        )
        return
    # As Spark writes them, but over those that are there.
    text = DefaultParamsWriter._get_metadata_to_save(instance, _metadata_context(session), extra, params)
    frame = session.createDataFrame([(text,)], "value string").coalesce(1)
    frame.write.mode("overwrite").text(f"{path}/metadata")


def _load(reader: MLReader[Any], cls: type, path: str) -> tuple[dict[str, Any], ModelSource, dict[str, Any]]:
    session = reader.sparkSession
    context = _metadata_context(session)
    metadata = DefaultParamsReader.loadMetadata(spark_form(path), context, f"{cls.__module__}.{cls.__name__}")
    # Models that were saved by earlier versions do not tell which files they have.
    files = metadata.get("files", _FILES)
    contents = {name: read_file(session, f"{path}/{name}") if name in files else None for name in _FILES}
    pickled, variables = contents["code.pkl"], contents["variables.npz"]
    code = {} if pickled is None else _unpickled(pickled, path)
    about = metadata["kerasModel"]
    rows, settings = about["rows"], KerasSettings(**about["settings"])
    _tell_of_backend(settings.backend, path)
    source = ModelSource(
        facts=ModelFacts.from_json(about["facts"]),
        settings=settings,
        archive=contents["model.keras"],
        builder=code.get("builder"),
        variables=None if variables is None else _arrays(variables),
        rows=None if rows is None else RowSpec.from_json(rows),
        custom_objects=code.get("custom_objects", {}),
    )
    return metadata, source, code


def _tell_of_backend(saved: str, path: str) -> None:
    here = keras.config.backend()
    if saved != here:
        warnings.warn(
            f"{path}: expected the Keras backend {saved!r}, which the model was saved with. Received: {here!r} in this "
            f"process. Executors train it and predict with {saved!r}; what is computed here may come out otherwise. "
            f"Set KERAS_BACKEND={saved} before anything imports Keras: a driver in the cluster mode of a standalone "
            "cluster gets no variables of yours but SPARK_*.",
            UserWarning,
            # The caller of KerasModel.load.
            stacklevel=5,
        )


def _unpickled(pickled: bytes, path: str) -> dict[str, Any]:
    try:
        return dict(pickle.loads(pickled))  # noqa: S301  (see the module's docstring)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"load: {path}/code.pkl needs code that is not here: {error}. Make the module that defines the "
            "custom objects, the model function or the callbacks importable, and load again."
        ) from error


def _arrays(content: bytes) -> tuple[np.ndarray, ...]:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return tuple(archive[f"arr_{index}"] for index in range(len(archive.files)))


def _metadata_context(session: SparkSession) -> Any:
    """Returns what Spark's metadata writer takes: PySpark 3.5 wants the context, 4 the session."""
    import pyspark

    return session if int(pyspark.__version__.split(".")[0]) >= 4 else session.sparkContext
