"""Preload of Keras: executors import it ahead of a fit, while the user's program still reads and prepares.

The import takes seconds of a fit. So the first model that a program makes has the executors begin it, in the processes
from which ranks are forked later. One small job does that, and asks for the facts that the fit checks.
"""

from __future__ import annotations

import contextlib
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
_POLL_S = 0.1
# Takes limits, and how many ranks an executor may have; returns what a task calls.
PreloadOf = Callable[[WarmWorkers, int], Callable[[], None]]

_begun: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()
_beginning = threading.Lock()


def begin_preload(session_of: Callable[[], SparkSession | None], preload_of: PreloadOf) -> None:
    """Has the executors of this process' application import Keras, once, in the background.

    Nothing is begun without a session, on Spark Connect, with dynamic allocation, whose executors come and go as
    tasks do, and where no process may wait. Nothing is told of it: a fit that finds no process has one imported.

    Args:
        session_of: Returns the session, of an application that there is.
        preload_of: Returns what its tasks do.
    """
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
            from pyspark import InheritableThread

            thread = InheritableThread(target=_preload, args=(session, preload_of), name=_GROUP)
            thread.daemon = True
            _begun[context] = thread
            thread.start()


def await_preload() -> None:
    """Waits for a moment until the job of `begin_preload` has ended."""
    context = active_context()
    thread = None if context is None else _begun.get(context)
    if thread is not None:
        thread.join(_AWAIT_S)


def _preload(session: SparkSession, preload_of: PreloadOf) -> None:
    # Whatever fails here, the fit will meet, and tell; a session that is stopped meanwhile has nobody to tell.
    with contextlib.suppress(Exception):
        limits, wanted, context = warm_workers(session), expected_slots(session), jvm_context(session)
        if limits.limit == 0 or wanted is None or context is None:
            return
        task_cpus = cpus_of_task(session_settings(session))
        executors = _executors_with(session, wanted, task_cpus)
        if not executors:
            return
        if has_own_properties(context):
            # Apart from the jobs of the user's own group, who may wait for these, or cancel them.
            context.setJobGroup(_GROUP, _ABOUT)
        slots = slots_of(executors, task_cpus=task_cpus)
        preload = preload_of(limits, min(-(-slots // len(executors)), limits.limit))
        known_executors.look(session, tasks=len(executors), timeout_s=_JOB_S, preload=preload)


def _executors_with(session: SparkSession, wanted: int, task_cpus: float) -> list[Executor]:
    """Returns the executors once they have so many slots, or those that there are after a while."""
    deadline = time.monotonic() + _EXECUTORS_S
    while True:
        executors = running_executors(session) or []
        slots = slots_of(executors, task_cpus=task_cpus)
        if slots >= max(wanted, 1) or time.monotonic() > deadline:
            return executors
        time.sleep(_POLL_S)
