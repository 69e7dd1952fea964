"""The jobs that train: from the beginning, or from where a fit was interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from elephant.errors import ConfigurationError
from elephant.jobs.command_line import layered, require_one
from elephant.jobs.datasets import read_rows
from elephant.jobs.job_file import JOB_NAME, kept, read_kept
from elephant.jobs.models import estimator_of
from elephant.jobs.output import Output
from elephant.jobs.settings import RESUME, TRAIN, settings_of
from elephant.jobs.submission import Job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_SAVE_MODE = "errorifexists"


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

    Args:
        session: The Spark session.
        settings: What `check_training` has passed.

    Raises:
        FileExistsError: There is something at the output that is not to be replaced.
    """
    import elephant

    output = Output(session, settings["output"], settings.get("saveMode", DEFAULT_SAVE_MODE))
    if output.is_kept():
        return elephant.KerasModel.load(output.path).history
    estimator = estimator_of(settings)
    rows = read_rows(session, settings)
    _keep(session, settings)
    fitted = estimator.fit(cast("DataFrame", rows))
    with output.staged() as path:
        fitted.write().save(path)
    return fitted.history


def resume(session: SparkSession, settings: Mapping[str, Any]) -> dict[str, list[float]]:
    """Goes on with a fit that was interrupted, as the job beside its checkpoints says, and returns the history.

    Args:
        session: The Spark session.
        settings: The path of the checkpoints, and what is to be otherwise than in that job.

    Raises:
        ConfigurationError: There is no job beside the checkpoints.
    """
    from elephant.spark.storage import read_file

    place = _job_path(settings["checkpointPath"])
    content = read_file(session, place)
    if content is None:
        raise ConfigurationError(
            f"checkpoint-path: expected the folder of a job that train.py began, with {JOB_NAME}. "
            f"Received: {settings['checkpointPath']!r}, where there is none."
        )
    before = read_kept(content, settings_of(TRAIN), place)
    # What this job wrote before it was interrupted no more, it has written: nothing is left to do.
    before["saveMode"] = {DEFAULT_SAVE_MODE: "ignore"}.get(
        before.get("saveMode", DEFAULT_SAVE_MODE), before.get("saveMode")
    )
    return train(session, {**layered(before, settings), "resume": True})


def _keep(session: SparkSession, settings: Mapping[str, Any]) -> None:
    """Writes what this job is beside its checkpoints, for the one that may have to go on with it."""
    from elephant.spark.storage import write_file

    if "checkpointPath" in settings:
        write_file(session, _job_path(settings["checkpointPath"]), kept(settings), overwrite=True)


def _job_path(checkpoint_path: str) -> str:
    return f"{checkpoint_path.rstrip('/')}/{JOB_NAME}"


TRAINING = Job(TRAIN, "Trains a Keras model on Spark executors, and writes a KerasModel.", check_training, train)
RESUMING = Job(RESUME, "Goes on with a fit that was interrupted, from its checkpoints.", check_resuming, resume)
