"""A submitted job: its run, its exit code, and its report."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elephant.cluster.spark_job import SparkWords
from elephant.errors import (
    ClusterError,
    ConfigurationError,
    ElephantError,
    JobCancelledError,
    NetworkError,
    TrainingError,
    UnsupportedError,
    first_paragraph,
)
from elephant.jobs.arguments import read_settings
from elephant.jobs.settings import settings_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DONE = 0
FAILED = 1
WRONG_ARGUMENTS = 2
TRY_AGAIN = 3
INTERRUPTED = 130
_PYTHON_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Failure): .*", re.MULTILINE)

# What of TensorFlow's chatter can be turned off, on the driver as on the workers.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "1"}


def code_of(error: BaseException) -> int:
    """Returns the exit code of a job that ends with an error.

    >>> code_of(ConfigurationError("epochs: expected ...")), code_of(ClusterError("numWorkers=4: ..."))
    (2, 3)
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, (ConfigurationError, UnsupportedError)):
        return WRONG_ARGUMENTS
    if isinstance(error, (ClusterError, NetworkError)) or _is_retryable(error):
        return TRY_AGAIN
    return FAILED


def _is_retryable(error: BaseException) -> bool:
    if isinstance(error, TrainingError) and not isinstance(error, JobCancelledError):
        return error.retryable
    return bool(SparkWords.EXECUTOR_LOST.search(error) or SparkWords.APPLICATION_GONE.search(error))


def line_of(error: BaseException) -> str:
    """Returns an error as one line: the first paragraph of elephant's own, and what a Python worker raised."""
    text = str(error)
    if not isinstance(error, (ElephantError, FileExistsError)):
        raised = _PYTHON_ERROR.findall(text)
        text = raised[-1] if raised else f"{type(error).__name__}: {text}" if text else type(error).__name__
    return first_paragraph(text)


def json_line(result: Any) -> str:
    """Returns a result as one line of JSON, in which numbers that are not finite are null.

    >>> json_line({"loss": [0.5, float("nan")]})
    '{"loss": [0.5, null]}'
    """
    return json.dumps(_finite(result))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class JobKind:
    """One of the jobs."""

    name: str  # as it is called: "train"
    description: str
    # raises ConfigurationError for settings that do not go together; called before Spark starts
    check: Callable[[Mapping[str, Any]], None]
    work: Callable[[SparkSession, Mapping[str, Any]], Any]  # does it, and returns the result that is printed as JSON


def submit(job: JobKind, words: Sequence[str]) -> int:
    """Runs a job and returns its exit code; the last line on standard output is its result as JSON."""
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


def _run(job: JobKind, settings: Mapping[str, Any]) -> Any:
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
