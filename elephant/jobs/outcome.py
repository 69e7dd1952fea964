"""How a job ends: an exit code, a line for those who read logs, a line of JSON for those who read results."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from elephant.errors import (
    ClusterError,
    ConfigurationError,
    ElephantError,
    JobCancelledError,
    NetworkError,
    TrainingError,
    UnsupportedError,
)

DONE = 0
FAILED = 1
WRONG_ARGUMENTS = 2
TRY_AGAIN = 3
INTERRUPTED = 130

# What Spark says of a cluster that went away.
_GONE = re.compile("SparkContext was shut down|stopped SparkContext|FetchFailed|All masters are unresponsive")
_PYTHON_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Failure): .*", re.MULTILINE)


def code_of(error: BaseException) -> int:
    """Returns the exit code of a job that ends with an error.

    >>> code_of(ConfigurationError("epochs: expected ...")), code_of(ClusterError("numWorkers=4: ..."))
    (2, 3)
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, (ConfigurationError, UnsupportedError)):
        return WRONG_ARGUMENTS
    if isinstance(error, (ClusterError, NetworkError)) or _is_passing(error):
        return TRY_AGAIN
    return FAILED


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, TrainingError) and not isinstance(error, JobCancelledError):
        return error.passing
    # It brings pyarrow, which an argument that is wrong need not wait for.
    from elephant.cluster.passing import is_lost

    return is_lost(error) or _GONE.search(str(error)) is not None


def line_of(error: BaseException) -> str:
    """Returns an error as one line: the first paragraph of elephant's own, and what a Python worker raised."""
    text = str(error)
    if not isinstance(error, (ElephantError, FileExistsError)):
        raised = _PYTHON_ERROR.findall(text)
        text = raised[-1] if raised else f"{type(error).__name__}: {text}" if text else type(error).__name__
    # The rest is a worker's traceback, which the executor's log has too.
    return " ".join(text.split("\n\n")[0].split())


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
