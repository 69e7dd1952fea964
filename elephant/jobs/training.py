"""The training job, and the job that goes on from its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from elephant.errors import CheckpointError, ConfigurationError, DataError, UnsupportedError
from elephant.jobs.inputs import FILE_FORMATS, estimator_of, read_rows
from elephant.jobs.output import Output
from elephant.jobs.settings import RESUME, TRAIN, settings_of
from elephant.jobs.submission import JobKind, layered, read_saved_settings, require_one, saved_settings
from elephant.kinds import is_reference
from elephant.monitor.listeners import saving_model_at
from elephant.options import key_of
from elephant.spark.hadoop_files import checkpoint_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from elephant.storage.folder import Folder

NAME = "job.json"
# Whoever goes on with a job trusts it, or does not: the folder has no say in that.
_SAVED = tuple(setting for setting in settings_of(TRAIN) if setting.name != "trusted")
# SQL calls what it likes: java_method, say.
_NAMED = {"where", *(setting.name for setting in _SAVED if setting.kind.reference is not None)}

DEFAULT_SAVE_MODE = "errorifexists"


@contextlib.contextmanager
def keeping_job(session: SparkSession, settings: Mapping[str, Any]) -> Iterator[None]:
    """Writes what a job is beside its checkpoints; what was there comes back when the fit, in the block, is refused.

    Raises:
        CheckpointError: It cannot be written.
    """
    folder = checkpoint_folder(session, settings["checkpointPath"])
    content = saved_settings({setting.name: settings[setting.name] for setting in _SAVED if setting.name in settings})
    before = _replace(folder, content)
    try:
        yield
    except (ConfigurationError, DataError, UnsupportedError):
        # Settings that cannot work would be those of every job that goes on from here.
        if before is not None:
            _replace(folder, before)
        raise


def _replace(folder: Folder, content: bytes) -> bytes | None:
    """Writes the job, and returns what was there before."""
    try:
        before = _read(folder)
        if before != content:
            folder.remove(NAME)
            folder.write(NAME, lambda file: file.write(content))
    except OSError as error:
        raise CheckpointError(
            f"checkpointPath={folder.url}: expected to write {NAME}. Received: {type(error).__name__}: {error}."
        ) from error
    return before


def resumed_job(session: SparkSession, path: str) -> dict[str, Any]:
    """Returns the settings of the job that has left its checkpoints in a folder.

    Raises:
        ConfigurationError: There is no job, or none that this version knows.
        CheckpointError: The folder cannot be read.
    """
    folder = checkpoint_folder(session, path)
    try:
        content = _read(folder)
    except OSError as error:
        raise CheckpointError(
            f"checkpointPath={folder.url}: expected to read {NAME}. Received: {type(error).__name__}: {error}."
        ) from error
    if content is None:
        raise ConfigurationError(
            f"checkpoint-path: expected the checkpoints of a job that train.py began, with {NAME}. "
            f"Received: {path!r}, where there is none."
        )
    return read_saved_settings(content, _SAVED, f"{path}/{NAME}")


def require_trusted_job(session: SparkSession, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where a job that was kept runs or replaces something, and nobody trusts it.

    Args:
        before: The job that was kept.
        settings: Those that are given now. Whoever gives one again answers for it.
    """
    from elephant.spark.saving.trust import is_trusted, require_trust

    if is_trusted(settings.get("trusted"), session):
        return
    named = [name for name, value in before.items() if _may_run(name, value)]
    if {**before, **settings}.get("saveMode") == "overwrite":
        # Where one of the two is the folder's, it says what is replaced.
        named += [name for name in ("output", "saveMode") if name in before]
    found = [f"{key_of(name)}={before[name]}" for name in named if name not in settings]
    require_trust(
        f"{settings['checkpointPath']}/{NAME}",
        found,
        "Or give these settings again.",
        expected="a job that names neither code nor what it replaces",
    )


def _may_run(name: str, value: Any) -> bool:
    """Returns whether a setting of a job that was kept names code, or what Spark finds code by."""
    if name == "model":
        return is_reference(value)
    if name == "format":
        return value not in FILE_FORMATS
    if name == "readOption":
        # Those of Hadoop, which name classes.
        return any("." in option for option in value)
    return name in _NAMED


def _read(folder: Folder) -> bytes | None:
    if NAME not in folder.names():
        return None
    with folder.reading(NAME) as file:
        return file.read()


def check_training(settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError unless the settings say what to train on what, and where to write it."""
    require_one(settings, "data", "table")
    require_one(settings, "model")
    require_one(settings, "output")


def check_resuming(settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError unless the settings say where the checkpoints are."""
    require_one(settings, "checkpointPath")


def train(session: SparkSession, settings: Mapping[str, Any]) -> dict[str, list[float]]:
    """Trains, writes the fitted model, and returns its history.

    Raises:
        FileExistsError: There is something at the output that is not to be replaced.
    """
    from elephant.spark.fit import open_checkpoints
    from elephant.spark.params import fit_config
    from elephant.spark.saving.persistence import history_of

    output = Output(session, settings["output"], settings.get("saveMode", DEFAULT_SAVE_MODE))
    output.refuse_inside(settings)
    if output.is_saved():
        return history_of(session, output.path)
    estimator = estimator_of(settings)
    rows = read_rows(session, settings)
    output.require_writable()
    with saving_model_at(output.path):
        with contextlib.ExitStack() as keeping:
            if "checkpointPath" in settings:
                # A fit that is refused must not leave its settings beside the checkpoints of another one.
                open_checkpoints(session, fit_config(estimator))
                keeping.enter_context(keeping_job(session, settings))
            fitted = estimator.fit(cast("DataFrame", rows))
        with output.staged() as path:
            fitted.write().save(path)
    return fitted.history


def resume(session: SparkSession, settings: Mapping[str, Any]) -> dict[str, list[float]]:
    """Goes on with a fit that was interrupted, as the job beside its checkpoints says, and returns the history.

    Raises:
        ConfigurationError: There is no job beside the checkpoints, or one that runs or replaces something and is not
            trusted.
    """
    before = resumed_job(session, settings["checkpointPath"])
    require_trusted_job(session, before, settings)
    # A job that was to write where nothing is, and finds its output there, has been done.
    before["saveMode"] = {DEFAULT_SAVE_MODE: "ignore"}.get(
        before.get("saveMode", DEFAULT_SAVE_MODE), before.get("saveMode")
    )
    return train(session, {**layered(before, settings), "resume": True})


TRAINING = JobKind(TRAIN, "Trains a Keras model on Spark executors, and writes a KerasModel.", check_training, train)


RESUMING = JobKind(RESUME, "Goes on with a fit that was interrupted, from its checkpoints.", check_resuming, resume)
