"""A job from its command line to its exit code, as `spark-submit` runs it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elephant.errors import ClusterError, ElephantError
from elephant.jobs.command_line import read_settings
from elephant.jobs.outcome import DONE, code_of, json_line, line_of
from elephant.jobs.settings import settings_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What of TensorFlow's chatter can be turned off, on the driver as on the workers.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "1"}


@dataclass(frozen=True)
class Job:
    """One of the jobs.

    Args:
        name: As it is called: ``"train"``.
        description: What it does, in a sentence.
        check: Raises ConfigurationError for settings that do not go together; called before Spark starts.
        work: Does it, and returns the result that is printed as JSON.
    """

    name: str
    description: str
    check: Callable[[Mapping[str, Any]], None]
    work: Callable[[SparkSession, Mapping[str, Any]], Any]


def submit(job: Job, words: Sequence[str]) -> int:
    """Runs a job and returns its exit code; the last line on standard output is its result as JSON.

    Args:
        job: What to run.
        words: The command line, without the script.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    script = f"{job.name}.py"
    try:
        settings = read_settings(script, job.description, settings_of(job.name), words)
        job.check(settings)
        result = _run(job, settings)
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, (ElephantError, FileExistsError, KeyboardInterrupt)):
            # Nobody meant this one to happen: where it did is worth the lines.
            traceback.print_exc()
        sys.stderr.write(f"{script}: {line_of(error)}\n")
        return code_of(error)
    sys.stdout.write(json_line(result) + "\n")
    sys.stdout.flush()
    return DONE


def _run(job: Job, settings: Mapping[str, Any]) -> Any:
    session = _session(job.name)
    try:
        return job.work(session, settings)
    finally:
        _stop(session)


def _stop(session: SparkSession) -> None:
    try:
        session.stop()
    except Exception as error:
        # A JVM that is gone. What the work came to stands: a result that is whole, or the error that ended it.
        sys.stderr.write(f"the Spark session did not stop: {line_of(error)}\n")


def _session(name: str) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        return SparkSession.builder.appName(f"elephant {name}").getOrCreate()
    except (PySparkException, Py4JError, RuntimeError) as error:
        raise ClusterError(
            f"expected a Spark session. Received: {line_of(error)} See whether the master runs, and what the settings "
            "of spark-submit ask of it."
        ) from error
