"""The jobs that train: from the beginning, or from where a fit was interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from elephant.jobs.command_line import layered, require_one
from elephant.jobs.datasets import read_rows
from elephant.jobs.models import estimator_of
from elephant.jobs.output import Output
from elephant.jobs.settings import RESUME, TRAIN
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
    from elephant.jobs.kept_jobs import keeping_job
    from elephant.spark.persistence import history_of
    from elephant.spark.recovery import require_own_folder

    output = Output(session, settings["output"], settings.get("saveMode", DEFAULT_SAVE_MODE))
    output.refuse_inside(settings)
    if output.is_kept():
        return history_of(session, output.path)
    estimator = estimator_of(settings)
    rows = read_rows(session, settings)
    output.require_writable()
    with contextlib.ExitStack() as keeping:
        if "checkpointPath" in settings:
            # A fit that is refused must not leave its settings beside the checkpoints of another one.
            require_own_folder(session, estimator.fit_config())
            keeping.enter_context(keeping_job(session, settings))
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
        ConfigurationError: There is no job beside the checkpoints, or one that names code, which is not trusted.
    """
    from elephant.jobs.kept_jobs import kept_job, require_trusted_code

    before = kept_job(session, settings["checkpointPath"])
    require_trusted_code(session, before, settings)
    # A job that was to write where nothing is, and finds its output there, has been done.
    before["saveMode"] = {DEFAULT_SAVE_MODE: "ignore"}.get(
        before.get("saveMode", DEFAULT_SAVE_MODE), before.get("saveMode")
    )
    return train(session, {**layered(before, settings), "resume": True})


TRAINING = Job(TRAIN, "Trains a Keras model on Spark executors, and writes a KerasModel.", check_training, train)
RESUMING = Job(RESUME, "Goes on with a fit that was interrupted, from its checkpoints.", check_resuming, resume)
