"""Preload of Keras: executors import it ahead of a fit, while the user's program still reads and prepares.

The import takes seconds of a fit. So the first model that a program makes has the executors begin it, in the processes
from which ranks are forked later. One small job does that, and asks for the facts that the fit checks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elephant.cluster.checks.executor_facts import known_executors
from elephant.cluster.executors import Executor, expected_slots, running_executors, slots_of
from elephant.cluster.session import cpus_of_task, is_remote, jvm_context, session_settings
from elephant.cluster.spark_job import has_own_properties
from elephant.cluster.spark_private import active_context
from elephant.cluster.warm_workers import WarmWorkers, warm_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_GROUP, _ABOUT = "elephant-preload", "elephant: executors import Keras, ahead of a fit"
# For slots that are busy. The fit's own tasks have it imported then.
_JOB_S = 60.0
# A fit right behind its model waits so long for the job's tasks, beside which its own would miss executors.
_AWAIT_S = 15.0
# For executors that are promised: those of a new session come one after the other.
_EXECUTORS_S = 30.0
_POLL_S, _LONGEST_POLL_S = 0.1, 2.0
# Takes limits, and how many ranks an executor may have; returns what a task calls.
PreloadOf = Callable[[WarmWorkers, int], Callable[[], None]]


class _Preload:
    """The preload of one application, whose place a fit takes that comes before its job has begun."""

    def __init__(self) -> None:
        self._state = threading.Lock()
        self._has_job = self._is_left_to_fit = False
        self._ended = threading.Event()

    def run(self, session: SparkSession, preload_of: PreloadOf) -> None:
        """Runs the job. Whatever fails here, the fit will meet, and tell; a session that was stopped has nobody."""
        try:
            with contextlib.suppress(Exception):
                self._run(session, preload_of)
        finally:
            self._ended.set()

    def await_end(self) -> None:
        """Waits for a moment, and not again, until a job that has begun has ended; has none begin from now on."""
        with self._state:
            waits, self._has_job, self._is_left_to_fit = self._has_job, False, True
        if waits:
            self._ended.wait(_AWAIT_S)

    def _run(self, session: SparkSession, preload_of: PreloadOf) -> None:
        limits, wanted, context = warm_workers(session), expected_slots(session), jvm_context(session)
        if limits.limit == 0 or wanted is None or context is None:
            return
        task_cpus = cpus_of_task(session_settings(session))
        executors = _executors_with(session, wanted, task_cpus)
        if not executors:
            return
        with self._state:
            if self._is_left_to_fit:
                return
            self._has_job = True
        if has_own_properties(context):
            # Apart from the jobs of the user's own group, who may wait for these, or cancel them.
            context.setJobGroup(_GROUP, _ABOUT)
        slots = slots_of(executors, task_cpus=task_cpus)
        preload = preload_of(limits, min(-(-slots // len(executors)), limits.limit))
        known_executors.look(session, tasks=len(executors), timeout_s=_JOB_S, preload=preload)


_begun: weakref.WeakKeyDictionary[Any, _Preload] = weakref.WeakKeyDictionary()
_beginning = threading.Lock()
_driver = os.getpid()


def begin_preload(session_of: Callable[[], SparkSession | None], preload_of: PreloadOf) -> None:
    """Has the executors of this process' application import Keras, once, in the background.

    Nothing is begun without a session, on Spark Connect, with dynamic allocation, whose executors come and go as
    tasks do, and where no process may wait. Nothing is told of it: a fit that finds no process has one imported.

    Args:
        session_of: Returns the session, of an application that there is.
        preload_of: Returns what its tasks do.
    """
    if os.getpid() != _driver:
        # Forked from the driver, with which it shares the connection to the JVM, and perhaps a lock that is held.
        return
    with contextlib.suppress(Exception):
        context = active_context()
        if context is None:
            return
        with _beginning:
            if context in _begun:
                return
            session = session_of()
            if session is None or is_remote(session):
                return
            preload = _Preload()
            # Not one that inherits the properties of the user's jobs.
            threading.Thread(target=preload.run, args=(session, preload_of), name=_GROUP, daemon=True).start()
            _begun[context] = preload


def await_preload() -> None:
    """Waits for a moment until the job of `begin_preload` has ended, where it has begun; else the fit takes its place.

    Tasks of both at the same time would miss executors.
    """
    context = active_context()
    preload = None if context is None else _begun.get(context)
    if preload is not None:
        preload.await_end()


def _executors_with(session: SparkSession, wanted: int, task_cpus: float) -> list[Executor]:
    """Returns the executors once they have so many slots, or those that there are after a while."""
    deadline, pause_s = time.monotonic() + _EXECUTORS_S, _POLL_S
    while True:
        executors = running_executors(session) or []
        slots = slots_of(executors, task_cpus=task_cpus)
        if slots >= max(wanted, 1) or time.monotonic() > deadline:
            return executors
        time.sleep(pause_s)
        # Of many executors, each look takes the driver's time.
        pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)
