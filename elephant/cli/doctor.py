"""elephant doctor: checks of this machine and of the cluster, told in a table.

It runs the pre-flight of a fit (`elephant.cluster.checks.preflight`) and looks further: at the
driver's machine, at each executor, at the ways between them, and in the end it runs a
small function on all ranks. Every check is a pure function of plain facts with a
deadline around what collects them, so that doctor ends whatever it meets.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elephant.cli.machine_report import examine_machine, examine_packages, examine_spark
from elephant.cli.report import CheckTimeoutError, as_json, as_table, checked, short_text, within
from elephant.cluster.checks.result import FAILURE, UNKNOWN, CheckResult, check_result
from elephant.errors import ConfigurationError
from elephant.options import OPTION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.cli.cluster_report import ClusterExamination

DEFAULT_WORKERS = 2
_APP_NAME = "elephant doctor"

_START_S = 180.0
_STOP_S = 30.0
# A job is cancelled at its own deadline; this is for what does not heed that.
_GRACE_S = 20.0


def submitted() -> bool:
    """Returns whether this process was started by ``spark-submit``, which has a session for it."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def start_session(
    *, master: str | None, remote: str | None, conf: Mapping[str, str], workers: int | None
) -> SparkSession:
    """Starts a session, or takes that of ``spark-submit``.

    Args:
        master: A Spark master; None for another kind.
        remote: A Spark Connect server; None for another kind.
    """
    from pyspark.sql import SparkSession

    from elephant.cluster.local import local_session

    if master is None and remote is None and not submitted():
        return local_session(workers or DEFAULT_WORKERS, app_name=_APP_NAME, conf=conf)
    builder = SparkSession.builder.appName(_APP_NAME)
    if remote is not None:
        builder = builder.remote(remote)
    elif master is not None:
        # Otherwise the progress bar is written into the table.
        builder = builder.master(master).config("spark.ui.showConsoleProgress", "false")
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def diagnose(
    session: SparkSession,
    *,
    num_workers: int | None = None,
    mode: str = "synchronous",
    gpu: bool = False,
    timeout_s: float = 60.0,
) -> list[CheckResult]:
    """Looks whether a fit would work in a session, from a notebook or inside a job.

    A few small Spark jobs are run, and nothing is left behind. It takes seconds.

    Args:
        num_workers: Workers of the fit; None means as many as there are task slots.
        mode: Mode of the fit: ``"synchronous"``, ``"asynchronous"`` or ``"hogwild"``.

    Returns:
        What each check found, in the order in which they ran. A fit would fail when ``check_result.failed``
        of one of them is true; ``print(finding)`` says what was expected, what was found, and what to do.

    Raises:
        ConfigurationError: An argument is out of its range.
    """
    OPTION["mode"].check(mode)
    if num_workers is not None and num_workers < 1:
        raise ConfigurationError(f"num_workers: expected an integer of at least 1, or None. Received: {num_workers!r}.")
    if not timeout_s > 0:
        raise ConfigurationError(f"timeout_s: expected more than 0 seconds. Received: {timeout_s!r}.")
    packages = examine_packages(alone=num_workers == 1 and mode == "synchronous")
    return packages + _examine_cluster(session, num_workers=num_workers, mode=mode, gpu=gpu, timeout_s=timeout_s)


def run(arguments: argparse.Namespace) -> int:
    """Runs ``elephant doctor`` and prints what it found.

    Args:
        arguments: What `elephant.cli.main` has read.

    Returns:
        The exit code: 0 when a fit would work, 1 when it would fail.
    """
    check_results = _examine(arguments)
    sys.stdout.write((as_json(check_results) if arguments.json else as_table(check_results)) + "\n")
    sys.stdout.flush()
    return 1 if any(found.failed for found in check_results) else 0


def _examine(arguments: argparse.Namespace) -> list[CheckResult]:
    remote, master = arguments.remote or "", arguments.master or ""
    # PySpark cannot even be imported without some of these; what does not depend on it is looked at all the same.
    look = functools.partial(examine_packages, alone=arguments.workers == 1 and arguments.mode == "synchronous")
    check_results = checked("packages", arguments.timeout, look, expected="packages that fit", remedy="")
    check_results += examine_machine(remote=remote)
    if not remote:
        look = functools.partial(examine_spark, master=master, own=not master and not submitted())
        check_results += checked("Java", arguments.timeout, look, expected="a Java that answers", remedy="")
    needed = {"Java", "pyspark", "SPARK_HOME", "Python here"}
    hindered = [found.name for found in check_results if found.failed and found.name in needed]
    if hindered:
        return [*check_results, _not_started(f"no session: see {', '.join(hindered)}")]
    return check_results + _in_session(arguments)


def _in_session(arguments: argparse.Namespace) -> list[CheckResult]:
    def start() -> SparkSession:
        return start_session(
            master=arguments.master, remote=arguments.remote, conf=dict(arguments.conf), workers=arguments.workers
        )

    limit_s = max(_START_S, arguments.timeout)
    try:
        session = within(limit_s, start, "session")
    except CheckTimeoutError:
        return [_no_session(f"none within {limit_s:g} s")]
    except Exception as error:
        return [_no_session(short_text(error))]
    try:
        return _examine_cluster(
            session,
            num_workers=arguments.workers,
            mode=arguments.mode,
            gpu=arguments.gpu,
            timeout_s=arguments.timeout,
        )
    finally:
        _stop(session)


def _stop(session: SparkSession) -> None:
    try:
        within(_STOP_S, session.stop, "stop")
    except Exception as error:
        sys.stderr.write(f"the Spark session did not stop: {short_text(error)}\n")


def _no_session(received: str) -> CheckResult:
    return check_result(
        "Spark session",
        FAILURE,
        expected="a session",
        received=received,
        remedy="See whether the master or the server runs, is reached from here, and has the resources that are asked "
        "for; Spark's own words are above.",
    )


def _not_started(reason: str) -> CheckResult:
    return check_result("Spark session", UNKNOWN, expected="a session", received=reason)


def _examine_cluster(
    session: SparkSession, *, num_workers: int | None, mode: str, gpu: bool, timeout_s: float
) -> list[CheckResult]:
    from elephant.cli.cluster_report import ClusterExamination

    limit_s = timeout_s + _GRACE_S
    try:
        examination = within(
            limit_s,
            lambda: ClusterExamination(session, num_workers=num_workers, mode=mode, gpu=gpu, timeout_s=timeout_s),
            "cluster",
        )
    except Exception as error:
        return [_no_session(short_text(error))]
    check_results: list[CheckResult] = []
    for name, check in _steps(examination, gpu).items():
        check_results += checked(
            name, limit_s, check, expected="an answer", remedy="See the logs of the driver and of the executors."
        )
    # A trial that can only fail says nothing new, and waits long for it.
    if mode == "synchronous" and not any(found.failed for found in check_results):
        remedy = "See the logs of the executors."
        check_results += checked("trial run", limit_s, examination.trial, expected="ranks that meet", remedy=remedy)
    return check_results


def _steps(examination: ClusterExamination, gpu: bool) -> Mapping[str, Callable[[], list[CheckResult]]]:
    steps: dict[str, Callable[[], list[CheckResult]]] = {
        "settings": examination.settings,
        "executors": examination.executors,
    }
    if gpu:
        steps["GPUs"] = examination.gpus
    return steps
