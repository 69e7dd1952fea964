"""Inputs of a job: data, and models by file, function or name."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elephant.cluster.spark_private import set_params
from elephant.errors import ConfigurationError, DataError, did_you_mean, first_line
from elephant.jobs.settings import PARAMS, SETTINGS
from elephant.kinds import CALLBACKS, MODEL_FILE, is_reference, missing_argument
from elephant.options import key_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from elephant.modeling.model_spec import ModelSpec
    from elephant.spark.estimator import KerasEstimator
    from elephant.spark.file_formats import Files
    from elephant.spark.model import KerasModel

DEFAULT_FORMAT = "parquet"
# Formats of files. Any other format is the name of a class.
FILE_FORMATS = ("avro", "csv", "delta", "json", "orc", "parquet", "text", "tfrecord")
# What a job can do with a DataFrame, and not with files that executors read.
_OF_FRAMES = ("table", "readOption", "where", "sample", "sampleSeed")


def read_rows(session: SparkSession, settings: Mapping[str, Any]) -> DataFrame | Files:
    """Returns the rows to train on.

    Raises:
        ConfigurationError: Settings exclude each other.
        DataError: Spark cannot read it.
    """
    if not settings.get("direct", False):
        return read_frame(session, settings)
    given = [name for name in _OF_FRAMES if name in settings]
    if given:
        raise ConfigurationError(
            f"direct: expected only data, format and schema beside it: executors read whole files. "
            f"Received: {', '.join(key_of(name) for name in given)}."
        )
    from elephant.spark.file_formats import Files

    return Files(settings["data"], format=settings.get("format"), schema=settings.get("schema"))


def read_frame(session: SparkSession, settings: Mapping[str, Any]) -> DataFrame:
    """Returns a table or the files at a path as a DataFrame, filtered and sampled.

    Raises:
        DataError: Spark cannot read it, or does not understand the condition.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    place = "table" if "table" in settings else "data"
    try:
        frame = session.table(settings["table"]) if place == "table" else _loaded(session, settings)
        if "where" in settings:
            place = "where"
            frame = frame.where(settings["where"])
        # Asked for here, where it is known what for: with Spark Connect, only this resolves names.
        if not frame.columns:
            raise DataError(f"{place}: expected rows with columns. Received: {settings[place]!r}, without any.")
    except (PySparkException, Py4JError) as error:
        received = (
            f"{settings[place]!r} as {settings.get('format', DEFAULT_FORMAT)}"
            if place == "data"
            else repr(settings[place])
        )
        raise DataError(f"{place}: expected what Spark reads. Received: {received}: {first_line(error)}") from error
    return _sampled(frame, settings)


def _loaded(session: SparkSession, settings: Mapping[str, Any]) -> DataFrame:
    from elephant.spark.hadoop_files import is_there

    reader = session.read.format(settings.get("format", DEFAULT_FORMAT)).options(**settings.get("readOption", {}))
    if "schema" in settings:
        reader = reader.schema(settings["schema"])
    # Of Delta's tables a path may name a version. Spark says what is not there, too, below a page of Java's.
    is_path = settings.get("format", DEFAULT_FORMAT) in FILE_FORMATS and settings.get("format") != "delta"
    if is_path and not is_there(session, settings["data"]):
        raise DataError(f"data: expected a path that is there. Received: {settings['data']!r}, where there is nothing.")
    return reader.load(settings["data"])


def _sampled(frame: DataFrame, settings: Mapping[str, Any]) -> DataFrame:
    if "sample" not in settings:
        return frame
    share = settings["sample"]
    if not 0 < share <= 1:
        raise ConfigurationError(f"sample: expected a share in (0, 1]. Received: {share}.")
    return frame.sample(withReplacement=False, fraction=share, seed=settings.get("sampleSeed", 0))


def resolve(setting: str, reference: str) -> Any:
    """Returns the object that a reference names.

    Raises:
        ConfigurationError: There is no such module, or no such name in it.

    Example:
        >>> resolve("--preprocessing", "os.path:join")("a", "b")
        'a/b'
    """
    module, _, name = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{setting}: expected a module that can be imported. Received: {reference!r}: {error}."
            f"{did_you_mean(error.name or module, _modules_beside(error.name or module))} "
            "Ship it: spark-submit --py-files FILE.py (or .zip).",
            topic="jobs-of-spark-submit",
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(
                f"{setting}: expected a name in {module}. Received: {reference!r}, which {module} does not have."
                f"{did_you_mean(part, dir(found))}"
            )
        found = getattr(found, part)
    return found


def _modules_beside(module: str) -> list[str]:
    """Returns the modules of the package that a module would be in; those at the top where it would be in none."""
    package = module.rpartition(".")[0]
    folders = getattr(sys.modules.get(package), "__path__", []) if package else None
    return [f"{package}.{beside.name}".lstrip(".") for beside in pkgutil.iter_modules(folders)]


def require_code(settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where code that settings name cannot be imported here, or the model is no function."""
    for setting in SETTINGS:
        given = settings.get(setting.name)
        if given and setting.kind.reference is not None:
            references = given.values() if isinstance(given, Mapping) else [given] if isinstance(given, str) else given
            for reference in references:
                resolve(setting.key, reference)
    model = settings.get("model", "")
    if is_reference(model) and not callable(built := resolve("model", model)):
        raise ConfigurationError(
            f"model: expected a function that returns a model. Received: {model!r}, a {type(built).__name__}."
        )
    if is_reference(model) and (missing := missing_argument(built)):
        raise ConfigurationError(f"model: expected a function without arguments. Received: {model!r}: {missing}.")


def resolve_all(setting: str, references: Mapping[str, str]) -> dict[str, Any]:
    """Returns the objects that several references name, by the keys that they are given under."""
    return {name: resolve(setting, reference) for name, reference in references.items()}


def resolve_callbacks(setting: str, references: Sequence[str]) -> list[Any]:
    """Returns callbacks: those that references name, and those that named classes and functions make.

    A function may return one or a list of them.
    """
    callbacks: list[Any] = []
    for reference in references:
        found = resolve(setting, reference)
        made = found() if callable(found) else found
        callbacks.extend(made if isinstance(made, (list, tuple)) else [made])
    return callbacks


def estimator_of(settings: Mapping[str, Any]) -> KerasEstimator:
    """Returns the estimator that the settings describe.

    Raises:
        ConfigurationError: There is no such model or code, or a value is out of range.
    """
    import elephant

    params = params_of(settings)
    try:
        return elephant.KerasEstimator(model=_trainable(settings), customObjects=_custom_objects(settings), **params)
    except TypeError as error:
        raise ConfigurationError(str(error)) from error


def fitted_model(settings: Mapping[str, Any]) -> KerasModel:
    """Returns the model to predict or evaluate with: a saved `KerasModel`, or a Keras model as one.

    Raises:
        ConfigurationError: There is no such model or code.
    """
    import elephant
    from elephant.spark.params import set_given

    given = _trainable(settings)
    model = given if isinstance(given, elephant.KerasModel) else _wrapped(given, settings)
    return set_given(model, params_of(settings))


def params_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are params of the estimator or its model, with the code that they name."""
    params = {}
    for setting in (setting for setting in PARAMS if setting.name in settings):
        value = settings[setting.name]
        if setting.kind.reference is not None:
            value = (resolve_callbacks if setting.kind is CALLBACKS else resolve)(setting.name, value)
        params[setting.name] = value
    return params


def _trainable(settings: Mapping[str, Any]) -> ModelSpec | Callable[..., Any] | KerasModel:
    """Returns the model in a form that the estimator takes."""
    name, trusted = settings["model"], settings.get("trusted")
    if is_reference(name):
        builder: Callable[..., Any] = resolve("model", name)
        return builder
    if MODEL_FILE.search(name):
        from elephant.spark.saving.model_files import source_of

        return source_of(name, _custom_objects(settings), trusted=trusted)
    return _saved(name, trusted)


def _saved(path: str, trusted: bool | None) -> KerasModel:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    import elephant

    try:
        return elephant.KerasModel.load(path, trusted=trusted)
    except (PySparkException, Py4JError, OSError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            "model: expected a saved KerasModel, a .keras or .h5 file, or module:function. "
            f"Received: {path!r}: {first_line(error)}"
        ) from error


def _wrapped(model: Any, settings: Mapping[str, Any]) -> KerasModel:
    import elephant
    from elephant.spark.saving.model_files import source_of

    fitted = elephant.KerasModel(source_of(model, _custom_objects(settings)))
    # As the estimator has it, where nobody says otherwise.
    set_params(fitted, labelCol="label")
    return fitted


def _custom_objects(settings: Mapping[str, Any]) -> dict[str, Any]:
    return resolve_all("custom-objects", settings.get("customObjects", {}))
