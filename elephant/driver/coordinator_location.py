"""Location of the coordinator: the driver, or rank 0 where executors cannot reach the driver.

The driver of a classic session is reached: Spark itself needs that, and the pre-flight tells where a firewall lets
Spark's ports pass alone. A client of Spark Connect reaches its server, and nothing says that executors reach the
client: it may sit behind a firewall, or address translation. So it listens for a moment, and one task of a small Spark
job tries to come to it; what came of it holds as long as the session.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from elephant.checkpoint.manager import CheckpointSink
from elephant.cluster.checks.executor_facts import ask_executors
from elephant.cluster.reachability import COORDINATOR, EXECUTORS, probe_of
from elephant.cluster.session import is_remote, setting
from elephant.cluster.spark_job import end_attempt
from elephant.driver.coordinator import Coordinator
from elephant.driver.launcher import RankJob, SparkBarrierLauncher, SparkRestartableLauncher
from elephant.driver.recovery.generations import Recovering
from elephant.driver.replay import attempt_beside_rank_0
from elephant.driver.run_ranks import RestartsOfTasks, RunAttempt, Turns, attempt_here
from elephant.errors import ConfigurationError, NetworkError, first_line
from elephant.monitor.progress import Progress
from elephant.task.specs import CoordinatorSpec, TaskSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.cluster.row_source import RowSource

Result = TypeVar("Result")

logger = logging.getLogger(__name__)
_FORMER_SETTING = "spark.elephant.hosting"
_AUTO, _DRIVER = "auto", "driver"
_PROBE_S = 3.0
# The first job of an application starts Python on its executors, which takes a busy machine long.
_ANSWER_S = 120.0
_reached: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def coordinates_on_executors(session: SparkSession) -> bool:
    """Returns whether the coordinator is to run beside rank 0, and not on the driver.

    Args:
        session: The Spark session; its ``spark.elephant.coordinator`` decides, unless that is ``auto`` or not set.

    Raises:
        ConfigurationError: The setting has another value, or its former name.
    """
    wanted = _wanted(session)
    if wanted != _AUTO:
        return wanted == EXECUTORS
    if not is_remote(session):
        return False
    reached = _reached.get(session)
    if reached is None:
        reached = is_reached(session)
    if reached is None:
        # Not known, and tried again for the next fit: beside rank 0 it works in any case.
        return True
    _reached[session] = reached
    return not reached


def may_coordinate_on_executors(session: SparkSession) -> bool:
    """Returns whether the coordinator runs beside rank 0 at least where executors do not reach the driver.

    Raises:
        ConfigurationError: Its ``spark.elephant.coordinator`` has another value.
    """
    wanted = _wanted(session)
    return wanted == EXECUTORS or (wanted == _AUTO and is_remote(session))


def _wanted(session: SparkSession) -> str:
    if former := setting(session, _FORMER_SETTING):
        raise ConfigurationError(
            f"{_FORMER_SETTING}: expected its new name, {COORDINATOR}. Received: {former!r}. Set that one to it, and "
            f"unset {_FORMER_SETTING}."
        )
    wanted = setting(session, COORDINATOR) or _AUTO
    if wanted not in (_AUTO, _DRIVER, EXECUTORS):
        raise ConfigurationError(f"{COORDINATOR}: expected auto, driver or executors. Received: {wanted!r}.")
    return wanted


def is_reached(session: SparkSession) -> bool | None:
    """Returns whether an executor reaches this process, which one task of a small Spark job tries.

    None says that no slot was free for that task in time, or that it failed, which the look at the cluster explains.
    """
    with contextlib.ExitStack() as closing:
        try:
            place, connect_back = closing.enter_context(probe_of(session, _PROBE_S))
        except NetworkError as error:
            logger.info("this client has no address for executors: %s", error)
            return False
        try:
            (hindrance,) = ask_executors(session, connect_back, tasks=1, timeout_s=_ANSWER_S)
        except Exception as error:
            logger.info("no executor has tried whether it reaches this client: %s", first_line(error))
            return None
    logger.info("executors %s", f"do not reach this client at {place}: {hindrance}" if hindrance else f"reach {place}")
    return not hindrance


def attempts_at_ranks(
    session: SparkSession,
    spec: TaskSpec,
    progress: Progress,
    *,
    result: Callable[[Coordinator, RankJob], Result],
    checkpoint_writer: CheckpointSink | None = None,
    turns: Turns | None = None,
    recovering: Recovering | None = None,
) -> Callable[[RowSource], AbstractContextManager[RunAttempt[Result]]]:
    """Returns a function that opens an attempt at ranks of one job, with the coordinator where it can be.

    Args:
        session: The Spark session.
        spec: What the run asks for.
        progress: Shown what happens.
        result: What comes of ranks that have ended well.
        checkpoint_writer: Writes checkpoints; None makes none.
        turns: Runs callbacks on the driver, where the coordinator is there; None where there are none.
        recovering: Has ranks begin again within the job, where the coordinator is on the driver; None ends the attempt
            with a loss.
    """
    if coordinates_on_executors(session):
        beside = CoordinatorSpec(program="synchronous")
        return functools.partial(
            attempt_beside_rank_0,
            beside,
            spec,
            progress,
            result=result,
            checkpoint_writer=checkpoint_writer,
        )
    recovery = None
    if recovering is not None:
        recovery = RestartsOfTasks(recovering, spec, functools.partial(end_attempt, session))
    return functools.partial(
        attempt_here,
        SparkBarrierLauncher if recovery is None else SparkRestartableLauncher,
        spec,
        progress,
        result=result,
        checkpoint_writer=checkpoint_writer,
        turns=turns,
        recovery=recovery,
    )
