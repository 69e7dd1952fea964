"""Commands on the user's own model and rows: where they run, what is trained, and how they end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from elephant.cluster.session import require_master
from elephant.errors import ClusterError, ConfigurationError, short_text
from elephant.jobs.inputs import require_code
from elephant.jobs.settings import TRAIN, Setting, settings_of
from elephant.jobs.submission import leave_out_warnings, read_settings, require_one, shown_line
from elephant.kinds import SPARK_OPTIONS, TEXT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Result = TypeVar("Result")
PLACE = (
    Setting("master", TEXT, "a Spark master, such as spark://host:7077; executors of this machine without one"),
    Setting("remote", TEXT, "a Spark Connect server, such as sc://host:15002, instead of --master"),
    Setting("conf", SPARK_OPTIONS, "a Spark setting, such as spark.task.cpus=4"),
)
# What is trained here is measured and thrown away.
_OF_WHOLE_FITS = {
    "output", "saveMode", "numWorkers", "epochs", "stepsPerEpoch", "checkpointPath", "checkpointEpochs",
    "checkpointSeconds", "keepBest", "resume", "maxRestarts", "validationFraction", "validationIndicatorCol",
    "callbacks", "driverCallbacks", "eventsPath", "verbose",
}  # fmt: skip


def training_settings(left_out: Collection[str] = ()) -> tuple[Setting, ...]:
    """Returns the settings of ``train.py`` that say what a step computes.

    Args:
        left_out: Names of others that a command has no use for.
    """
    return tuple(one for one in settings_of(TRAIN) if one.name not in _OF_WHOLE_FITS and one.name not in left_out)


def run_command(
    name: str,
    description: str,
    settings: Sequence[Setting],
    words: Sequence[str],
    work: Callable[[SparkSession, Mapping[str, Any]], Result],
    report: Callable[[Result, Mapping[str, Any]], int],
) -> int:
    """Does in a Spark session what the arguments ask for, and returns the exit code.

    Args:
        name: Of the command.
        description: For ``--help``.
        settings: That it has.
        words: The arguments.
        work: Takes a session and the settings.
        report: Prints what work has returned, when the session has ended; returns the exit code.

    Raises:
        SystemExit: ``--help`` was asked for, and has been printed.
    """
    # As `python -m` has it: the model's module is looked for where the user is.
    sys.path += [folder for folder in (os.getcwd(),) if folder not in sys.path]
    try:
        given = read_settings(name, description, settings, words)
        leave_out_warnings()
        check(given)
        require_code(given)
        _ship_modules()
        session = _started_session(name, given)
        with contextlib.ExitStack() as closing:
            closing.callback(_stop, session)
            result = work(session, given)
    except ConfigurationError as error:
        return failed(name, error, 2)
    except Exception as error:
        return failed(name, error, 1)
    return report(result, given)


def check(settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError unless the settings say what to train on what, and where."""
    require_one(settings, "data", "table")
    require_one(settings, "model")
    if "master" in settings and "remote" in settings:
        require_one(settings, "master", "remote")
    require_master(settings.get("master", ""))


def note(name: str, text: str) -> None:
    """Writes a line to standard error."""
    sys.stderr.write(f"{name}: {text}\n")
    sys.stderr.flush()


def failed(name: str, error: Exception, code: int) -> int:
    """Says why a command has failed, in one line, and returns its exit code."""
    note(name, shown_line(error))
    return code


def _ship_modules() -> None:
    """Has the modules beside which the user stands travel with the model's function, so that executors need none."""
    from pyspark import cloudpickle

    folder = os.getcwd()
    for module in list(sys.modules.values()):
        if module.__name__ != "__main__" and os.path.dirname(getattr(module, "__file__", None) or "") == folder:
            cloudpickle.register_pickle_by_value(module)


def _started_session(name: str, settings: Mapping[str, Any]) -> SparkSession:
    from elephant.cli.doctor import DEFAULT_WORKERS, start_session

    where = {key: settings.get(key) for key in ("master", "remote")}
    most = max(settings.get("workers", [DEFAULT_WORKERS]))
    try:
        return start_session(**where, conf=settings.get("conf", {}), workers=most, app_name=name)
    except Exception as error:
        raise ClusterError(f"expected a Spark session. Received: {short_text(error)}.") from error


def _stop(session: SparkSession) -> None:
    # A JVM may be gone. What was found out stands.
    with contextlib.suppress(Exception):
        session.stop()
