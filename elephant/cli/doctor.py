"""elephant doctor: facts of this machine and of the cluster, put before all checks of `elephant.cluster.checks`.

It runs the pre-flight of a fit and looks further: at the driver's machine, at each executor, at
the ways between them, and in the end it runs a small function on all ranks. Whatever collects
facts has a deadline, so that doctor ends whatever it meets.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from elephant.backends import asked_for
from elephant.cluster.checks.executor_checks import check_executors
from elephant.cluster.checks.executor_facts import (
    ExecutorReport,
    ask_executors,
    driver_facts,
    examine_executors,
    gpu_function,
)
from elephant.cluster.checks.machine_checks import (
    examine_machine,
    examine_packages,
    examine_spark,
    memory_bytes,
)
from elephant.cluster.checks.preflight import Requirements, check_session
from elephant.cluster.checks.registry import FAILURE, OK, UNKNOWN, CheckResult, Phase, check_result, run_phase
from elephant.cluster.executors import awaited_slots, count_slots, running_executors
from elephant.cluster.gpu_plan import ResourceRequest
from elephant.cluster.session import is_local, is_remote, jvm_context, session_settings
from elephant.config import Timeouts
from elephant.errors import ConfigurationError, NetworkError, short_text
from elephant.options import OPTION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

DEFAULT_WORKERS = 2
_APP_NAME = "elephant doctor"

_START_S = 180.0
_STOP_S = 30.0
# A job is cancelled at its own deadline; this is for what does not heed that.
_GRACE_S = 20.0
_PROBE_S = 5.0
_CONNECT_S = 20.0
_UNKNOWN_EXECUTORS = 4
# Of a fit: its processes may have to import Keras first.
_FIT_S = 300.0
# Those that differ in how workers meet.
_FIT_MODES = ("synchronous", "asynchronous")


def diagnose(
    session: SparkSession,
    *,
    num_workers: int | None = None,
    mode: str = "synchronous",
    gpu: bool = False,
    fit: bool = False,
    timeout_s: float = 60.0,
) -> list[CheckResult]:
    """Looks whether a fit would work in a session, from a notebook or inside a job.

    A few small Spark jobs are run, and nothing is left behind. It takes seconds.

    Args:
        num_workers: Workers of the fit; None means as many as there are task slots.
        mode: Mode of the fit, as `elephant.KerasEstimator` has it.
        gpu: Whether each worker is to have a GPU.
        fit: Whether to train a built-in model for ten seconds in each mode, and to tell the seconds of each phase.
        timeout_s: Seconds that a single check may take; a fit has more.

    Returns:
        What each check found, in the order in which they ran. A fit would fail when ``check_result.failed``
        of one of them is true; ``print(finding)`` says what was expected, what was found, and what to do.

    Raises:
        ConfigurationError: An argument is out of its range.
    """
    mode = OPTION["mode"].value_of(mode)
    if num_workers is not None and num_workers < 1:
        raise ConfigurationError(f"num_workers: expected an integer of at least 1, or None. Received: {num_workers!r}.")
    if not timeout_s > 0:
        raise ConfigurationError(f"timeout_s: expected more than 0 seconds. Received: {timeout_s!r}.")
    packages = examine_packages()
    return packages + _examine_cluster(
        session, num_workers=num_workers, mode=mode, gpu=gpu, fit=fit, timeout_s=timeout_s
    )


def examine(arguments: argparse.Namespace) -> list[CheckResult]:
    """Returns the results of ``elephant doctor``, by the arguments that `elephant.cli.main` has read."""
    remote, master = arguments.remote or "", arguments.master or ""
    # PySpark cannot even be imported without some of these; what does not depend on it is looked at all the same.
    look = examine_packages
    check_results = checked("packages", arguments.timeout, look, expected="packages that fit", remedy="")
    check_results += examine_machine(remote=remote)
    if not remote:
        look = functools.partial(examine_spark, master=master, own=not master and not submitted())
        check_results += checked("Java", arguments.timeout, look, expected="a Java that answers", remedy="")
    needed = {"Java", "pyspark", "SPARK_HOME", "Python here"}
    hindered = [found.name for found in check_results if found.failed and found.name in needed]
    if hindered:
        reason = f"no session: see {', '.join(hindered)}"
        return [*check_results, check_result("Spark session", UNKNOWN, expected="a session", received=reason)]
    return check_results + _in_session(arguments)


def submitted() -> bool:
    """Returns whether this process was started by ``spark-submit``, which has a session for it."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def start_session(
    *, master: str | None, remote: str | None, conf: Mapping[str, str], workers: int | None, app_name: str = _APP_NAME
) -> SparkSession:
    """Starts a session of a Spark master or Connect server, takes that of ``spark-submit``, or makes a local one."""
    from pyspark.sql import SparkSession

    from elephant.cluster.local import local_session

    if master is None and remote is None and not submitted():
        return local_session(workers or DEFAULT_WORKERS, app_name=app_name, conf=conf)
    builder = SparkSession.builder.appName(app_name)
    if remote is not None:
        builder = builder.remote(remote)
    elif master is not None:
        # Otherwise the progress bar is written into the table.
        builder = builder.master(master).config("spark.ui.showConsoleProgress", "false")
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


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
            fit=arguments.fit,
            timeout_s=arguments.timeout,
        )
    finally:
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


def _examine_cluster(
    session: SparkSession, *, num_workers: int | None, mode: str, gpu: bool, fit: bool, timeout_s: float
) -> list[CheckResult]:
    limit_s = timeout_s + _GRACE_S
    try:
        examination = within(
            limit_s,
            lambda: ClusterExamination(session, num_workers=num_workers, mode=mode, gpu=gpu, timeout_s=timeout_s),
            "cluster",
        )
    except Exception as error:
        return [_no_session(short_text(error))]
    steps = {"settings": examination.settings, "executors": examination.executors}
    if gpu:
        steps["GPUs"] = examination.gpus
    check_results: list[CheckResult] = []
    for name, step in steps.items():
        remedy = "See the logs of the driver and of the executors."
        check_results += checked(name, limit_s, step, expected="an answer", remedy=remedy)
    # A trial that can only fail says nothing new, and waits long for it.
    if mode == "synchronous" and not any(found.failed for found in check_results):
        remedy = "See the logs of the executors."
        check_results += checked("trial run", limit_s, examination.trial, expected="ranks that meet", remedy=remedy)
    for each in _FIT_MODES if fit and not any(found.failed for found in check_results) else ():
        look, remedy = functools.partial(examination.fit, each), "See the logs of the executors."
        check_results += checked(f"fit, {each}", _FIT_S + _GRACE_S, look, expected="a fit that ends", remedy=remedy)
    return check_results


class ClusterExamination:
    """Facts of one session and its executors, in the order in which they are asked for."""

    def __init__(
        self, session: SparkSession, *, num_workers: int | None, mode: str, gpu: bool, timeout_s: float
    ) -> None:
        from elephant.driver.coordinator_location import may_coordinate_on_executors

        self._session = session
        self._settings = session_settings(session)
        self._synchronous = mode == "synchronous"
        self._gpu = gpu
        self._timeout_s = timeout_s
        self._may_coordinate_on_executors = may_coordinate_on_executors(session)
        # Executors that are still starting when the session is already there.
        awaited_slots(session, num_workers or 1, min(timeout_s, Timeouts().slot_patience_s), _stay_silent)
        self._num_workers = num_workers or count_slots(session) or 1

    def settings(self) -> list[CheckResult]:
        """Checks the session's settings and its slots."""
        settings, master = self._settings, self._settings.get("spark.master", "")
        count, synchronous = self._num_workers, self._synchronous
        request = ResourceRequest(num_workers=count, use_gpu=True if self._gpu else "auto", synchronous=synchronous)
        requirements = Requirements(num_workers=count, synchronous=synchronous, slots_s=0.0, request=request)
        has_jvm = jvm_context(self._session) is not None
        return check_session(self._session, settings, requirements, _stay_silent).check_results + run_phase(
            Phase.APPLICATION,
            settings=settings,
            synchronous=synchronous,
            counted=has_jvm,
            cores=os.cpu_count() or 1,
            memory_bytes=memory_bytes(),
            workers=count,
            # Its executors are on the driver's machine.
            local=has_jvm and (is_local(master) or master.startswith("local-cluster[")),
        )

    def executors(self) -> list[CheckResult]:
        """Checks the executors' facts, and whether they reach the driver."""
        from elephant.cluster.addresses import driver_addresses
        from elephant.cluster.reachability import probe_of

        host = "" if is_remote(self._session) else self._settings.get("spark.driver.host", "")
        with contextlib.ExitStack() as closing:
            addresses, problem, needed, place, connect_back = ("", ""), "", True, "", None
            try:
                addresses = driver_addresses(self._session)
                place, connect_back = closing.enter_context(probe_of(self._session, _PROBE_S))
            except Exception as error:
                # Any other error than that of the network would end a fit as well.
                problem, needed = (
                    short_text(error),
                    not (self._may_coordinate_on_executors and isinstance(error, NetworkError)),
                )
            check_results = run_phase(Phase.ADDRESS, host=host, addresses=addresses, error=problem, needed=needed)
            return check_results + self._asked(connect_back, place)

    def _asked(self, connect_back: Callable[[], str] | None, place: str) -> list[CheckResult]:
        running = running_executors(self._session)
        tasks = max(len(running), 1) if running is not None else max(self._num_workers, _UNKNOWN_EXECUTORS)
        began = time.time()
        try:
            report = examine_executors(self._session, tasks=tasks, timeout_s=self._timeout_s, connect_back=connect_back)
        except Exception as error:
            return check_executors(ExecutorReport(error=short_text(error)), driver_facts(), backend=None)
        ended = time.time()
        # Nobody knows how many should have answered where a session does not tell its executors.
        report = report if running is not None else replace(report, missing=0)
        driver, by_place = driver_facts(), {one.place: one for one in report.facts}
        shared = {name: one.shared_memory_bytes for name, one in by_place.items()}
        return check_executors(report, driver, backend=asked_for()) + run_phase(
            Phase.HOSTS,
            unreached={name: one.unreached for name, one in by_place.items() if one.unreached},
            asked=len(by_place),
            place=place,
            needed=not self._may_coordinate_on_executors,
            limits={"the driver": driver.descriptors} | {name: one.descriptors for name, one in by_place.items()},
            sizes={name: size for name, size in shared.items() if size is not None},
            # An answer was given somewhere between the two: what lies outside is certain to be off.
            offsets={name: _outside(one.time, began, ended) for name, one in by_place.items()},
        )

    def gpus(self) -> list[CheckResult]:
        """Returns whether the executors have GPUs that the Keras backend can use, one for each worker."""
        running = running_executors(self._session)
        tasks = max(len(running), 1) if running is not None else self._num_workers
        look = gpu_function(self._timeout_s, asked_for())
        answers = ask_executors(self._session, look, tasks=tasks, timeout_s=2 * self._timeout_s)
        return run_phase(Phase.GPUS, facts=answers, wanted=self._num_workers, backend=asked_for())

    def trial(self) -> list[CheckResult]:
        """Returns whether ranks of a barrier stage meet, connect, and add up their numbers, as in a fit."""
        import elephant

        began, count = time.monotonic(), self._num_workers
        if count == 1:
            # It would be a plain call, without Spark.
            return []
        timeouts = Timeouts(connect_s=_CONNECT_S, collective_s=_CONNECT_S, heartbeat_s=_CONNECT_S, slots_s=0.0)
        sums, error = list[int](), ""
        with _cancelled_after(self._session, self._timeout_s):
            try:
                sums = elephant.run(sum_of_ranks, num_workers=count, spark=self._session, verbose=0, timeouts=timeouts)
            except Exception as caught:
                error = short_text(caught)
        return run_phase(Phase.TRIAL, num_workers=count, ranks=sums, seconds=time.monotonic() - began, error=error)

    def fit(self, mode: str) -> list[CheckResult]:
        """Trains a built-in model for some seconds, and returns the seconds of each phase."""
        from elephant.spark.trial_fit import trial_fit

        name, timeouts = f"fit, {mode}", Timeouts(slots_s=_CONNECT_S)
        with _cancelled_after(self._session, _FIT_S):
            try:
                found = trial_fit(self._session, num_workers=self._num_workers, mode=mode, timeouts=timeouts)
            except Exception as error:
                remedy = "Do what the error says; the logs of the executors tell more."
                return [
                    check_result(name, FAILURE, expected="a fit that ends", received=short_text(error), remedy=remedy)
                ]
        return [check_result(name, OK, expected="a fit that ends", received=str(found))]


def sum_of_ranks() -> int:
    """Returns the sum of all ranks' numbers, counted from one; what each rank of the trial runs."""
    import numpy as np

    from elephant.collective import allreduce, rank

    return int(allreduce(np.array([rank() + 1]))[0])


@contextlib.contextmanager
def _cancelled_after(session: SparkSession, timeout_s: float) -> Iterator[None]:
    """Cancels the Spark jobs of the block when it has not ended in time."""
    tag, context = f"elephant-doctor-{uuid.uuid4().hex}", jvm_context(session)
    add, remove, cancel = (
        (session.addTag, session.removeTag, session.interruptTag)
        if context is None
        else (context.addJobTag, context.removeJobTag, context.cancelJobsWithTag)
    )
    timer = threading.Timer(timeout_s, functools.partial(cancel, tag))
    timer.name, timer.daemon = "elephant-doctor-timer", True
    add(tag)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        remove(tag)
        timer.join(timeout_s)


def _outside(moment: float, first: float, last: float) -> float:
    """Returns how far a moment lies outside of a span of time; negative before it.

    >>> _outside(5.0, 1.0, 2.0), _outside(1.5, 1.0, 2.0), _outside(0.0, 1.0, 2.0)
    (3.0, 0.0, -1.0)
    """
    return max(moment - last, 0.0) + min(moment - first, 0.0)


def _stay_silent(text: str) -> None:
    """Takes what a fit would print."""


class CheckTimeoutError(Exception):
    """A check did not end in the time that it was given."""


def within(timeout_s: float, function: Callable[[], Result], name: str) -> Result:
    """Calls a function in a thread, and waits for it so long; a thread that hangs ends with the process.

    Raises:
        CheckTimeoutError: The function did not return in time.
        BaseException: What the function raised.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name=f"elephant-doctor-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise CheckTimeoutError(name)
    if errors:
        raise errors[0]
    return results[0]


def checked(
    name: str, timeout_s: float, check: Callable[[], list[CheckResult]], *, expected: str, remedy: str
) -> list[CheckResult]:
    """Returns the results of a check, or, where it hangs or fails itself, a result that says so, with the remedy."""
    try:
        return within(timeout_s, check, name)
    except CheckTimeoutError:
        received = f"nothing within {timeout_s:g} s"
    except Exception as error:
        received = short_text(error)
    return [check_result(name, FAILURE, expected=expected, received=received, remedy=remedy)]
