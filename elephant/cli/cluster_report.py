"""Checks of the cluster for elephant doctor."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import elephant
from elephant.cli import machine_report as facts
from elephant.cli.report import short_text
from elephant.cli.setting_checks import (
    check_address,
    check_barrier_settings,
    check_clocks,
    check_descriptors,
    check_machine,
    check_memory,
    check_python_memory,
    check_shared_memory,
    check_speculation,
    check_worker_reuse,
)
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.checks.checks import check_executors
from elephant.cluster.checks.executor_facts import (
    BACKENDS,
    PACKAGES,
    ExecutorReport,
    as_facts,
    ask_executors,
    driver_facts,
    facts_function,
)
from elephant.cluster.checks.preflight import Requirements, check_session
from elephant.cluster.checks.result import FAILURE, OK, UNKNOWN, WARNING, CheckResult, check_result
from elephant.cluster.coordinator_location import ReachabilityProbe, connect_back_function, may_host
from elephant.cluster.executors import awaited_slots, count_slots, running_executors
from elephant.cluster.gpu.plan import ResourceRequest
from elephant.cluster.session import is_local, is_remote, jvm_context, session_settings
from elephant.collective import allreduce, rank
from elephant.config import Timeouts
from elephant.errors import NetworkError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What TensorFlow says of itself when it is asked in a process of its own.
_TENSORFLOW = "import tensorflow as tf; print('gpus', len(tf.config.list_physical_devices('GPU')))"

_FIREWALL = (
    "Set spark.driver.host to an address of the driver that executors reach, and let connections from the executors "
    "to the driver's free ports through the firewall."
)

_KNOCK_S = 5.0
_CONNECT_S = 20.0
_UNKNOWN_EXECUTORS = 4


def probe_function(
    facts: Callable[[], dict[str, Any]], connect_back: Callable[[], str] | None
) -> Callable[[], dict[str, Any]]:
    """Returns the function that tells an executor's facts.

    Args:
        facts: What `elephant.cluster.checks.executor_facts.facts_function` returned.
        connect_back: What `connect_back_function` returned; None when the driver has no address.
    """

    def probe() -> dict[str, Any]:
        import resource
        import shutil
        import time

        try:
            shared = shutil.disk_usage("/dev/shm").free
        except OSError:
            shared = None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return {
            **facts(),
            "time": time.time(),
            "shared_memory_bytes": shared,
            "descriptors": -1 if limit == resource.RLIM_INFINITY else limit,
            "unreached": None if connect_back is None else connect_back(),
        }

    return probe


def gpu_function(timeout_s: float) -> Callable[[], dict[str, Any]]:
    """Returns the function that tells which GPUs an executor has, and whether TensorFlow can use them.

    TensorFlow is imported in a process of its own: a Python worker of Spark's that had
    once taken hold of a GPU would keep it.
    """
    code = _TENSORFLOW

    def detect_gpus() -> dict[str, Any]:
        import os
        import shutil
        import socket
        import subprocess
        import sys

        def output(*command: str) -> tuple[str, str]:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=timeout_s,
                    check=False,
                    env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                )
            except subprocess.TimeoutExpired:
                return "", f"no answer within {timeout_s:g} s"
            except OSError as error:
                return "", str(error)
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return done.stdout.decode(errors="replace"), "" if done.returncode == 0 else "".join(last)

        program = shutil.which("nvidia-smi")
        listed, complaint = output(program, "-L") if program else ("", "no nvidia-smi")
        counted, error = output(sys.executable, "-c", code)
        numbers = [line.split()[1] for line in counted.splitlines() if line.startswith("gpus ")]
        return {
            "host": socket.gethostname(),
            "gpus": [line for line in listed.splitlines() if line.startswith("GPU ")],
            "complaint": complaint,
            "tensorflow": int(numbers[0]) if numbers else None,
            "error": error,
        }

    return detect_gpus


def check_reach(unreached: Mapping[str, str], asked: int, place: str, *, needed: bool) -> CheckResult:
    """Returns whether executors reach the driver.

    Args:
        needed: Whether a fit fails otherwise; elsewhere an executor takes the driver's part.
    """
    name, expected = "way to the driver", f"executors that reach the driver at {place}"
    if not asked:
        return check_result(name, UNKNOWN, expected=expected, received="no executor to ask")
    if not unreached:
        return check_result(name, OK, expected=expected, received=f"{asked} of {asked} executors reach {place}")
    reasons = ", ".join(f"{executor}: {reason}" for executor, reason in unreached.items())
    if not needed:
        remedy = "Rank 0 then hosts what the driver hosts otherwise; nothing is to be done unless fits fail."
        return check_result(name, WARNING, expected=expected, received=reasons, remedy=remedy)
    return check_result(name, FAILURE, expected=expected, received=reasons, remedy=_FIREWALL)


def check_gpus(facts: Sequence[Mapping[str, Any]], *, wanted: int) -> CheckResult:
    """Returns whether the executors' hosts have GPUs, and TensorFlow can use them.

    Args:
        facts: What `elephant.cli.cluster_report.gpu_function` returned on each.
    """
    hosts = {one["host"]: one for one in facts}
    listed = sum(len(one["gpus"]) for one in hosts.values())
    usable = sum(one["tensorflow"] or 0 for one in hosts.values())
    expected = f"{wanted} GPUs that TensorFlow can use"
    received = f"{listed} by nvidia-smi, {usable} by TensorFlow"
    problems = [f"{name}: {one['complaint'] or one['error']}" for name, one in hosts.items()]
    problems = [problem for problem in problems if not problem.endswith(": ")]
    remedy = (
        "Install the driver and CUDA that this TensorFlow needs (pip install 'tensorflow[and-cuda]')."
        if listed >= wanted
        else "Use executors with GPUs (spark.executor.resource.gpu.amount), or useGpu=False."
    )
    return check_result(
        "GPUs",
        usable >= wanted,
        expected=expected,
        received=received + (f" ({'; '.join(problems)})" if problems and usable < wanted else ""),
        remedy=remedy,
    )


def check_trial(num_workers: int, ranks: Sequence[int], seconds: float, error: str) -> CheckResult:
    """Returns whether a run of a small function on all ranks went well, with processes and connections as of a fit.

    Args:
        error: Why it failed; empty when it did not.
    """
    expected_sum = num_workers * (num_workers + 1) // 2
    right = not error and list(ranks) == [expected_sum] * num_workers
    return check_result(
        "trial run",
        right,
        expected=f"a barrier stage of {num_workers} ranks that reach each other, and add up their numbers",
        received=error.rstrip(".")
        or (f"{seconds:.1f} s for {num_workers} ranks" if right else f"the sums {list(ranks)}"),
        remedy="The text above says what was expected. If ranks do not connect, open the ports between executors, and "
        "see which addresses their host names resolve to (docs/clusters.md).",
    )


def is_on_this_machine(master: str) -> bool:
    """Returns whether a master runs its executors on the driver's machine.

    >>> is_on_this_machine("local-cluster[2,1,1024]"), is_on_this_machine("yarn")
    (True, False)
    """
    return is_local(master) or master.startswith("local-cluster[")


class ClusterExamination:
    """What doctor asks one session, in the order in which it is asked.

    Args:
        num_workers: Workers of the fit; None takes as many as there are slots.
    """

    def __init__(
        self, session: SparkSession, *, num_workers: int | None, mode: str, gpu: bool, timeout_s: float
    ) -> None:
        self._session = session
        self._settings = session_settings(session)
        self._synchronous = mode == "synchronous"
        self._gpu = gpu
        self._timeout_s = timeout_s
        self._remote = jvm_context(session) is None
        self._may_host = may_host(session)
        # Executors that are still starting when the session is already there.
        wanted = num_workers or 1
        awaited_slots(session, wanted, min(timeout_s, Timeouts().slots_s), _stay_silent)
        self._num_workers = num_workers or count_slots(session) or 1
        self._said: list[dict[str, Any]] = []

    def settings(self) -> list[CheckResult]:
        """Returns what the session's settings, and its slots, let expect."""
        settings, master = self._settings, self._settings.get("spark.master", "")
        request = ResourceRequest(
            num_workers=self._num_workers, use_gpu=True if self._gpu else "auto", synchronous=self._synchronous
        )
        needs = Requirements(num_workers=self._num_workers, synchronous=self._synchronous, slots_s=0.0, request=request)
        check_results = check_session(self._session, settings, needs, _stay_silent).check_results
        return [
            *check_results,
            check_barrier_settings(settings, counted=not self._remote),
            check_speculation(settings, synchronous=self._synchronous),
            check_worker_reuse(settings),
            check_memory(settings),
            check_python_memory(settings),
            check_machine(
                facts.processors(),
                facts.memory_bytes(),
                workers=self._num_workers,
                local=is_on_this_machine(master) and not self._remote,
            ),
        ]

    def executors(self) -> list[CheckResult]:
        """Returns what the executors say of themselves, and whether they reach the driver."""
        with contextlib.ExitStack() as closing:
            name = "" if is_remote(self._session) else self._settings.get("spark.driver.host", "")
            try:
                advertised, bind = driver_addresses(self._session)
                listener = closing.enter_context(ReachabilityProbe(bind, advertised))
            except Exception as error:
                # Any other error than that of the network would end a fit as well.
                needed = not (self._may_host and isinstance(error, NetworkError))
                check_results, listener = [check_address("", (), short_text(error), needed=needed)], None
            else:
                check_results = [check_address(name, (advertised, bind), "")]
            connect_back = (
                None if listener is None else connect_back_function(listener.address, listener.token, _KNOCK_S)
            )
            return check_results + self._asked(
                connect_back,
                "" if listener is None else f"{listener.address[0]}:{listener.address[1]}",
            )

    def _asked(self, connect_back: Callable[[], str] | None, place: str) -> list[CheckResult]:
        running = running_executors(self._session)
        tasks = max(len(running), 1) if running is not None else max(self._num_workers, _UNKNOWN_EXECUTORS)
        probe = probe_function(facts_function(PACKAGES, tuple(BACKENDS)), connect_back)
        began = time.time()
        try:
            answers = ask_executors(self._session, probe, tasks=tasks, timeout_s=self._timeout_s)
        except Exception as error:
            return check_executors(ExecutorReport(error=short_text(error)), driver_facts(), backend=None)
        by_place = {as_facts(answer).place: answer for answer in answers}
        self._said = list(by_place.values())
        known = [as_facts(answer) for answer in self._said]
        missing = max(tasks - len(known), 0) if running is not None and known and known[0].executor else 0
        look = ExecutorReport(facts=known, missing=missing)
        check_results = check_executors(look, driver_facts(), backend=facts.keras_backend())
        if connect_back is not None:
            unreached = {name: answer["unreached"] for name, answer in by_place.items() if answer["unreached"]}
            check_results.append(check_reach(unreached, len(by_place), place, needed=not self._may_host))
        return check_results + self._hosts(by_place, began)

    def _hosts(self, by_place: dict[str, dict[str, Any]], began: float) -> list[CheckResult]:
        ended = time.time()
        shared = {name: one["shared_memory_bytes"] for name, one in by_place.items()}
        limits = {"the driver": facts.descriptor_limit()} | {n: one["descriptors"] for n, one in by_place.items()}
        # An answer was given somewhere between the two: what lies outside is certain to be off.
        offsets = {name: _outside(one["time"], began, ended) for name, one in by_place.items()}
        return [
            check_descriptors(limits),
            check_shared_memory({name: size for name, size in shared.items() if size is not None}),
            check_clocks(offsets),
        ]

    def gpus(self) -> list[CheckResult]:
        """Returns whether the executors have GPUs that TensorFlow can use, one for each worker."""
        running = running_executors(self._session)
        look = gpu_function(self._timeout_s)
        tasks = max(len(running), 1) if running is not None else self._num_workers
        answers = ask_executors(self._session, look, tasks=tasks, timeout_s=2 * self._timeout_s)
        return [check_gpus(answers, wanted=self._num_workers)]

    def trial(self) -> list[CheckResult]:
        """Returns whether ranks of a barrier stage meet, connect, and add up their numbers, as in a fit."""
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
        return [check_trial(count, sums, time.monotonic() - began, error)]


def sum_of_ranks() -> int:
    """Returns the sum of all ranks' numbers, counted from one; what each rank of the trial runs."""
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
