"""The pre-flight check: can the cluster run all ranks at the same time, or one worker at least?

Left to itself Spark answers with ten minutes of silence and a line in a log. The
answer is known before: it is the same count that Spark's scheduler compares.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elephant.cluster.sessions import jvm_context
from elephant.errors import ClusterError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.5


def require_slots(
    session: SparkSession,
    num_workers: int,
    *,
    timeout_s: float,
    note: Callable[[str], None],
    name: str = "numWorkers",
) -> None:
    """Waits until the cluster has a task slot for every rank.

    Executors may still be starting, or be replaced after a failure; a local master has
    all its slots at once and is not waited for. On Spark Connect the count is not to be
    had, and Spark's own check remains.

    Args:
        session: The Spark session.
        num_workers: Slots that are needed at the same time.
        timeout_s: How long to wait for executors.
        note: Told that the wait has begun.
        name: What the user calls the number.

    Raises:
        ClusterError: There are too few slots, or the configuration forbids a barrier stage.
    """
    _refuse_dynamic_allocation(session)
    slots = awaited_slots(session, num_workers, timeout_s, note)
    if slots is not None and slots < num_workers:
        raise ClusterError(_too_few(session, name, num_workers, slots))


def require_some_slot(
    session: SparkSession, num_workers: int, *, servers: int, timeout_s: float, note: Callable[[str], None]
) -> None:
    """Waits until the cluster has a task slot for one worker, besides those for parameter servers.

    Workers of an asynchronous fit need not run at the same time: with fewer slots they take
    turns. Executors that come and go as Spark allocates them are not waited for.

    Args:
        session: The Spark session.
        num_workers: Workers.
        servers: Slots that parameter servers take.
        timeout_s: How long to wait for executors.
        note: Told that the wait has begun, or that workers take turns.

    Raises:
        ClusterError: There is no slot for a worker.
    """
    if allocates_dynamically(session):
        return
    slots = awaited_slots(session, num_workers + servers, timeout_s, note)
    if slots is None:
        return
    if slots <= servers:
        raise ClusterError(
            f"parameterServers={servers} with serverPlacement='executors': expected at least {servers + 1} task slots, "
            f"one of them for a worker. Received: {slots}. Lower parameterServers, use serverPlacement='driver', or "
            "give the application more executors or cores."
            if servers
            else "expected at least one task slot. Received: none. Start executors, or see why there are none."
        )
    if slots - servers < num_workers:
        note(f"{num_workers} workers on {slots - servers} task slots: they take turns, each with all of its epochs")


def expected_slots(session: SparkSession) -> int | None:
    """Returns how many tasks can run at the same time, now or when all promised executors run; None when unknown."""
    slots = count_slots(session)
    if slots is None or allocates_dynamically(session):
        return None
    return max(slots, promised_slots(session.conf.get("spark.master", "") or "", _conf_of(session)) or 0)


def awaited_slots(session: SparkSession, wanted: int, timeout_s: float, note: Callable[[str], None]) -> int | None:
    """Returns how many slots there are once there are enough, or no more to be expected; None when unknown.

    Args:
        session: The Spark session.
        wanted: Slots that are enough.
        timeout_s: How long to wait for executors.
        note: Told that the wait has begun.
    """
    slots = count_slots(session)
    if slots is None:
        return None
    promised = promised_slots(session.conf.get("spark.master", "") or "", _conf_of(session))
    may_come = promised is None or promised >= wanted
    deadline = time.monotonic() + (timeout_s if may_come else 0.0)
    if slots < wanted and time.monotonic() < deadline:
        note(f"waiting for {wanted} task slots: the cluster has {slots} so far")
    while slots < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        slots = count_slots(session) or 0
    return slots


def count_slots(session: SparkSession) -> int | None:
    """Returns how many tasks the cluster can run at the same time, or None where that is not to be had."""
    context = jvm_context(session)
    if context is None:
        return None
    scheduler = context._jsc.sc()
    return int(scheduler.maxNumConcurrentTasks(scheduler.resourceProfileManager().defaultResourceProfile()))


def promised_slots(master: str, conf: Mapping[str, str]) -> int | None:
    """Returns how many task slots the application will have when all its executors run; None when nothing says.

    >>> promised_slots("local[4]", {})
    0
    >>> promised_slots("local-cluster[3,2,1024]", {"spark.task.cpus": "2"})
    3
    >>> promised_slots("yarn", {"spark.executor.instances": "2", "spark.executor.cores": "4"})
    8
    """
    task_cpus = int(conf.get("spark.task.cpus") or 1)
    if master == "local" or master.startswith("local["):
        # All of them are there at once: none is still to come.
        return 0
    cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*", master)
    if cluster:
        return int(cluster[1]) * (int(cluster[2]) // task_cpus)
    if "spark.executor.instances" in conf:
        return int(conf["spark.executor.instances"]) * (int(conf.get("spark.executor.cores") or 1) // task_cpus)
    return None


def _conf_of(session: SparkSession) -> dict[str, str]:
    names = ("spark.task.cpus", "spark.executor.instances", "spark.executor.cores")
    values = ((name, session.conf.get(name, None)) for name in names)
    return {name: value for name, value in values if value is not None}


def _is_local(session: SparkSession) -> bool:
    master = session.conf.get("spark.master", "") or ""
    return master == "local" or master.startswith("local[")


def allocates_dynamically(session: SparkSession) -> bool:
    """Returns whether Spark starts and ends executors as tasks come and go."""
    return (session.conf.get("spark.dynamicAllocation.enabled", "false") or "").lower() == "true"


def _refuse_dynamic_allocation(session: SparkSession) -> None:
    if allocates_dynamically(session):
        raise ClusterError(
            "expected spark.dynamicAllocation.enabled=false: Spark refuses a barrier stage otherwise. "
            "Received: true. Set it to false, and spark.executor.instances to the executors you need."
        )


def _too_few(session: SparkSession, name: str, num_workers: int, slots: int) -> str:
    remedy = (
        f"Lower {name} to {slots}, or start Spark with master local[{num_workers}]."
        if _is_local(session)
        else f"Lower {name} to {slots}, or give the application more executors or cores "
        f"(spark.task.cpus is {session.conf.get('spark.task.cpus', '1')})."
    )
    return f"{name}={num_workers}: expected {num_workers} task slots at the same time. Received: {slots}. {remedy}"
