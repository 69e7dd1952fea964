"""Saving of estimators and fitted models: Spark ML metadata, with the Keras model beside it.

::

    path/metadata/      the params as JSON, as every Spark ML stage has them, and names of code
    path/model.keras    the model, if Keras can serialize it: any Keras opens it
    path/code.pkl       callbacks, and what has no name that other processes know: of a notebook, say
    path/variables.npz  the variables of a model that a function builds

Code is custom objects, the model function, callbacks and functions on batches. ``code.pkl`` is read for those who are
trusted alone: `elephant.spark.saving.trust`.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle  # noqa: S403  (for what the user trusts)
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import keras
import numpy as np
from packaging.version import Version
from pyspark import cloudpickle
from pyspark.errors import AnalysisException, PySparkException
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import SparkSession

from elephant.backends import BACKENDS
from elephant.cluster.session import jvm_context, release
from elephant.cluster.spark_job import SparkWords
from elephant.cluster.spark_private import clear_for_overwrite, metadata_text, reset_uid, set_param_values
from elephant.data.json_types import require_parts, require_types
from elephant.data.schema import RowSpec
from elephant.errors import ConfigurationError, ElephantError, brief_errors, warn_user
from elephant.modeling.archive_inspection import UNREADABLE, KnownCode, code_of_file
from elephant.modeling.keras_saving import LAMBDA
from elephant.modeling.model_info import ModelInfo
from elephant.modeling.model_spec import KerasSettings, ModelSpec
from elephant.net.buffers import portable
from elephant.spark.hadoop_files import is_file, local_path, read_file, write_file
from elephant.spark.saving.model_files import SUFFIXES
from elephant.spark.saving.trust import (
    is_trusted,
    name_of,
    named,
    require_trust,
    safely_named,
    what_a_pickle_names,
)
from elephant.storage.filesystem import spark_form

FUNCTIONS = ("preprocessing", "augmentation")
_FILES = ("code.pkl", "variables.npz", "model.keras")
CODE = ("callbacks", "driverCallbacks", *FUNCTIONS)
_NOT_JSON = ("model", "classWeight", *CODE)
_CUSTOM, _BUILDER = "customObjects.", "builder"
_FITTED = "elephant.spark.model.KerasModel"
# Parts of the metadata, where they are there.
_METADATA = {
    "class": str,
    "uid": str,
    "sparkVersion": str,
    "paramMap": dict[str, Any],
    "defaultParamMap": dict[str, Any],
    "files": list[str],
    "code": dict[str, str | None],
    "kerasModel": dict[str, Any],
    "history": dict[str, list[float | None]],
    "trainingStatistics": dict[str, Any],
    "plan": list[dict[str, Any]],
    "seconds": float | None,
    "classWeight": str | list[list[Any]] | dict[str, Any],
}
_Saved = TypeVar("_Saved", bound="SavedStage")


@dataclass(frozen=True, kw_only=True)
class SavedParts:
    """Parts of a stage that its params in JSON do not have.

    Args:
        spec: The Keras model.
        code: Functions and callbacks, by their use.
        about: What else there is to write down, as JSON has it.
    """

    spec: ModelSpec
    code: dict[str, Any]
    about: dict[str, Any]


class SavedStage(Params, MLWritable, MLReadable[Any]):
    """A stage that is saved in a folder, and loaded from there."""

    @abstractmethod
    def _parts(self) -> SavedParts:
        """Returns the parts that are saved besides params."""

    @classmethod
    @abstractmethod
    def _of_parts(cls: type[_Saved], parts: SavedParts) -> _Saved:
        """Returns a stage of the parts that were saved, without its params in JSON."""

    def write(self) -> StageWriter:
        """Returns the writer: ``stage.write().overwrite().save(path)``."""
        return StageWriter(self)

    @classmethod
    def read(cls) -> StageReader:
        """Returns the reader: ``load(path)`` of the class is the short form."""
        return StageReader(cls)

    @classmethod
    @brief_errors
    def load(cls: type[_Saved], path: str | os.PathLike[str], *, trusted: bool | None = None) -> _Saved:
        """Loads an instance from a path; ``read().load(path, trusted=...)`` is the long form.

        Args:
            path: Where ``save`` has written it.
            trusted: Whether code that is saved there may run: classes and functions that are neither registered with
                Keras nor to be imported here, callbacks, lambdas in the model. None asks the Spark setting
                ``spark.elephant.trustSavedModels``, which is false unless it is set.

        Raises:
            ConfigurationError: There is such code, and it is not trusted; or a module that it needs is not here.
            FileNotFoundError: Nothing was saved there.
        """
        loaded: _Saved = cls.read().load(os.fspath(path), trusted=trusted)
        return loaded


class StageWriter(MLWriter):
    """Writer of a stage; it clears a path through the JVM, and does without where there is none."""

    def __init__(self, stage: SavedStage) -> None:
        super().__init__()
        self._stage = stage

    @brief_errors
    def save(self, path: str) -> None:
        """Writes to a path; raises FileExistsError where there is something, unless ``overwrite()`` was called."""
        super().save(path)

    def saveImpl(self, path: str) -> None:
        """Writes to a path that does not exist, or that ``overwrite()`` has cleared."""
        try:
            with _known_to_hadoop(path):
                _save(self, self._stage, path, self._stage._parts())
        except Exception as error:
            if SparkWords.PATH_TAKEN.search(error) is None:
                raise
            raise FileExistsError(
                f"path: expected a path where nothing is saved yet. Received: {path}. Replace what is there with "
                f"write().overwrite().save({path!r}), or pass another path."
            ) from None

    def _handleOverwrite(self, path: str) -> None:
        # Without a JVM each file takes the place of the one before, and the metadata tell which ones count.
        if jvm_context(self.sparkSession) is not None:
            with _known_to_hadoop(path):
                clear_for_overwrite(self, spark_form(path))


class StageReader(MLReader[Any]):
    """Reader of a stage of one class."""

    def __init__(self, cls: type[SavedStage]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str, *, trusted: bool | None = None) -> Any:
        """Returns the stage that was written to the path; the arguments are those of `SavedStage.load`."""
        with _readable(path), _known_to_hadoop(path):
            metadata, contents = _read(self, self._cls, path)
        return stage_of(self._cls, metadata, contents, path, trusted=is_trusted(trusted, self.sparkSession))


def stage_of(
    cls: type[SavedStage], metadata: dict[str, Any], contents: Mapping[str, bytes | None], path: str, *, trusted: bool
) -> Any:
    """Returns the stage that was written in a folder.

    Args:
        metadata: As Spark reads them.
        contents: The other files there, by name; None for one that is not there.
        path: The folder, in errors.

    Raises:
        ConfigurationError: There is code that is not trusted, or not here; or something is not what was written.
    """
    with _readable(path):
        require_parts(metadata, _METADATA)
        parts = _parts_of(metadata, contents, path, trusted=trusted)
        stage = cls._of_parts(parts)
        reset_uid(stage, metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
    return stage


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turns what reading raises that is not what it seems into an error of elephant's."""
    try:
        yield
    except ConfigurationError as error:
        # What a value is told by does not know where it stands.
        raise error if path in str(error) else ConfigurationError(f"load: {path}: {error}") from error
    except (ElephantError, OSError, PySparkException):
        raise
    except UNREADABLE as error:
        raise ConfigurationError(
            f"load: {path}: expected what save or write has made. Received: something else, or damaged: "
            f"{type(error).__name__}: {error} Restore the folder, or save there again."
        ) from error


@contextlib.contextmanager
def _known_to_hadoop(path: str) -> Iterator[None]:
    """Turns Spark's refusal of a scheme into an error of elephant's."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ElephantError) or SparkWords.UNKNOWN_SCHEME.search(error) is None:
            raise
        raise ConfigurationError(
            f"path: expected a path that Spark's Hadoop client knows: what is saved is a folder that Spark writes. "
            f"Received: {path!r}. Use a scheme that it knows (s3a:// with the package hadoop-aws for s3://), or save "
            "the model's file alone, such as path + '.keras', which pyarrow or fsspec write."
        ) from error


def _save(writer: MLWriter, stage: SavedStage, path: str, parts: SavedParts) -> None:
    spec, code = parts.spec, dict(parts.code)
    params = {param.name: value for param, value in set_param_values(stage).items() if param.name not in _NOT_JSON}
    about = {
        "facts": spec.info.to_json(),
        "settings": asdict(spec.settings),
        "rows": spec.rows.to_json() if spec.rows else None,
    }
    code |= {f"{_CUSTOM}{name}": value for name, value in spec.custom_objects.items()}
    if spec.builder is not None:
        code[_BUILDER] = spec.builder
    names = {use: name_of(value) for use, value in code.items()}
    files = _files_of(spec, {use: value for use, value in code.items() if names[use] is None})
    extra = {**parts.about, "kerasModel": about, "code": names, "files": sorted(files)}
    _save_metadata(writer, stage, path, extra, params)
    for name, content in files.items():
        write_file(writer.sparkSession, f"{path}/{name}", content, overwrite=writer.shouldOverwrite)


def _files_of(spec: ModelSpec, code: dict[str, Any]) -> dict[str, bytes]:
    """Returns the files beside the metadata, by name."""
    files = {}
    if spec.archive is not None:
        files["model.keras"] = spec.archive
    if spec.variables is not None:
        buffer = io.BytesIO()
        # Files of numpy know no bfloat16.
        np.savez(buffer, *map(portable, spec.variables))
        files["variables.npz"] = buffer.getvalue()
    if code:
        files["code.pkl"] = cloudpickle.dumps(code)
    return files


def _save_metadata(
    writer: MLWriter,
    stage: SavedStage,
    path: str,
    extra: dict[str, Any],
    params: dict[str, Any],
) -> None:
    session, path = writer.sparkSession, spark_form(path)
    if jvm_context(session) is not None or not writer.shouldOverwrite:
        DefaultParamsWriter.saveMetadata(stage, path, _metadata_context(session), extraMetadata=extra, paramMap=params)
        return
    # As Spark writes them, but over those that are there.
    text = metadata_text(stage, _metadata_context(session), extra, params)
    frame = session.createDataFrame([(text,)], "value string").coalesce(1)
    frame.write.mode("overwrite").text(f"{path}/metadata")


def history_of(session: SparkSession, path: str) -> dict[str, list[float]]:
    """Returns the history of the fitted model at a path, of which nothing else is loaded."""
    metadata = DefaultParamsReader.loadMetadata(spark_form(path), _metadata_context(session), _FITTED)
    return dict(metadata["history"])


def _read(reader: MLReader[Any], cls: type, path: str) -> tuple[dict[str, Any], dict[str, bytes | None]]:
    """Returns the metadata in a folder, and the other files there by name; None for one that is not there."""
    session, path = reader.sparkSession, os.fspath(path)
    local = local_path(path)
    if path.endswith(SUFFIXES) and (is_file(session, path) or (local is not None and local.is_file())):
        raise ConfigurationError(
            f"load: expected a folder that save or write has made. Received: {path}, a file of Keras. "
            "keras.saving.load_model opens it, and KerasEstimator(model=path) trains it further."
        )
    context = _metadata_context(session)
    try:
        metadata = DefaultParamsReader.loadMetadata(spark_form(path), context)
    except AnalysisException as error:
        if "PATH_NOT_FOUND" not in str(error):
            raise
        raise FileNotFoundError(
            f"load: expected a folder that save or write has made. Received: {path}, where there is none."
        ) from None
    require_parts(metadata, _METADATA)
    if metadata["class"] != f"{cls.__module__}.{cls.__name__}":
        saved = metadata["class"].rpartition(".")[2]
        raise ConfigurationError(
            f"load: expected a folder that a {cls.__name__} has saved. Received: {path}, which a {saved} has. "
            f"{saved}.load(path) opens it."
        )
    files = metadata["files"]
    return metadata, {name: read_file(session, f"{path}/{name}") if name in files else None for name in _FILES}


def _parts_of(
    metadata: dict[str, Any], contents: Mapping[str, bytes | None], path: str, *, trusted: bool
) -> SavedParts:
    pickled, archive, variables = contents["code.pkl"], contents["model.keras"], contents["variables.npz"]
    try:
        if trusted:
            code = _trusted_code(metadata, pickled)
        else:
            code, refused = _safe_code(metadata, pickled, path)
            known = KnownCode(found=_custom_objects(code))
            require_trust(f"load: {path}", refused + code_of_file(archive or b"", ".keras", known))
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"load: {path} needs code that is not here: {error}. Make the module that defines the "
            "custom objects, the model function or the callbacks importable, and load again.",
            topic="loading-and-saving",
        ) from error
    about = metadata["kerasModel"]
    rows, settings = about["rows"], KerasSettings(**about["settings"])
    require_types(settings)
    if settings.backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}. Received: {settings.backend!r}.")
    _note_backend(settings.backend, path)
    spec = ModelSpec(
        info=ModelInfo.from_json(about["facts"]),
        settings=settings,
        archive=archive,
        builder=code.get(_BUILDER),
        variables=None if variables is None else _arrays(variables),
        rows=None if rows is None else RowSpec.from_json(rows),
        custom_objects=_custom_objects(code),
        safe_mode=not trusted,
    )
    return SavedParts(spec=spec, code=code, about=metadata)


def _note_backend(saved: str, path: str) -> None:
    here = keras.config.backend()
    if saved != here:
        warn_user(
            f"{path}: expected the Keras backend {saved!r}, which the model was saved with. Received: {here!r} in this "
            f"process. Executors train it and predict with {saved!r}; what is computed here may come out otherwise. "
            f"Set KERAS_BACKEND={saved} before anything imports Keras; in cluster mode by "
            "spark.yarn.appMasterEnv.KERAS_BACKEND or spark.kubernetes.driverEnv.KERAS_BACKEND."
        )


def _trusted_code(metadata: Mapping[str, Any], pickled: bytes | None) -> dict[str, Any]:
    """Returns classes, functions and callbacks by their use."""
    code = {use: named(name) for use, name in metadata["code"].items() if name is not None}
    if pickled is not None:
        code.update(pickle.loads(pickled))  # noqa: S301  (see the import)
    return code


def _safe_code(metadata: Mapping[str, Any], pickled: bytes | None, path: str) -> tuple[dict[str, Any], list[str]]:
    """Returns classes and functions by their use, and what would run that is not here, or not to be used unasked."""
    code, refused = dict[str, Any](), []
    for use, name in metadata["code"].items():
        custom = use.removeprefix(_CUSTOM) if use.startswith(_CUSTOM) else None
        known = None if custom is None else keras.saving.get_registered_object(custom)
        value = known or (None if name is None else safely_named(name, path, is_called=use == _BUILDER))
        if value is None and custom is not None and custom.startswith(LAMBDA):
            # The archive has it too, and is asked for lambdas of its own.
            continue
        if value is None:
            refused.append(f"{use} (pickled)" if name is None else f"{use}={name}")
        else:
            code[use] = value
    return code, [*refused, what_a_pickle_names(pickled)] if refused and pickled is not None else refused


def _custom_objects(code: Mapping[str, Any]) -> dict[str, Any]:
    return {use.removeprefix(_CUSTOM): code[use] for use in code if use.startswith(_CUSTOM)}


def _arrays(content: bytes) -> tuple[np.ndarray, ...]:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays = tuple(archive[f"arr_{index}"] for index in range(len(archive.files)))
    for array in arrays:
        # Those of bfloat16 have no kind of their own.
        if array.dtype.kind not in "biufcV":
            raise ValueError(f"variables.npz: expected numbers. Received: an array of {array.dtype}.")
    return arrays


def _metadata_context(session: SparkSession) -> Any:
    """Returns the first argument of Spark's metadata writer: PySpark 3.5 wants the context, 4 the session."""
    import pyspark

    return session if release(pyspark.__version__) >= Version("4") else session.sparkContext
