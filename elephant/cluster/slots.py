"""Checks of task slots: can the cluster run all ranks at the same time, or one asynchronous worker at least?

Left to itself Spark answers with ten minutes of silence and a line in a log. The
answer is known before: it is the same count that Spark's scheduler compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from elephant.cluster.finding import FAILURE, OK, UNKNOWN, WARNING, Finding, finding
from elephant.cluster.settings import cpus_of_task, is_local, local_cores, tasks_on


def check_slots(
    name: str, num_workers: int, slots: int | None, settings: Mapping[str, str], *, resource: str = ""
) -> Finding:
    """Returns whether all ranks of a synchronous fit can run at the same time.

    Args:
        name: What the user calls the number of workers.
        num_workers: That number.
        slots: Tasks that the cluster runs at the same time; None when that is not known.
        settings: The session's.
        resource: What a task takes besides cores, such as ``1 gpu``; for the message.
    """
    slots = configured_slots(settings) if slots is None else slots
    return finding(
        f"{name}={num_workers}",
        UNKNOWN if slots is None else slots >= num_workers,
        expected=f"{num_workers} task slots at the same time" + (f", each with {resource}" if resource else ""),
        received="a session that does not tell; Spark's own check remains" if slots is None else slots,
        remedy="" if slots is None else _remedy(name, num_workers, slots, settings, resource),
    )


def check_some_slot(num_workers: int, slots: int | None, settings: Mapping[str, str], *, servers: int) -> Finding:
    """Returns whether one worker of an asynchronous fit can run, besides its parameter servers.

    Workers of an asynchronous fit need not run at the same time: with fewer slots they take turns.

    Args:
        num_workers: Workers.
        slots: Tasks that the cluster runs at the same time; None when that is not known.
        settings: The session's.
        servers: Slots that parameter servers take.
    """
    slots = configured_slots(settings) if slots is None else slots
    name = f"parameterServers={servers} with serverPlacement='executors'" if servers else f"numWorkers={num_workers}"
    expected = f"at least {servers + 1} task slots, one of them for a worker" if servers else "at least one task slot"
    if slots is None:
        received = "a session that does not tell; Spark waits for them"
        return finding(name, UNKNOWN, expected=expected, received=received)
    if slots <= servers:
        remedy = (
            "Lower parameterServers, use serverPlacement='driver', or give the application more executors or cores."
            if servers
            else _why_no_executor(settings)
        )
        return finding(name, FAILURE, expected=expected, received=slots or "none", remedy=remedy)
    turns = slots - servers < num_workers
    expected = "a task slot for each worker" if turns else expected
    remedy = f"{num_workers} workers on {slots - servers} task slots: they take turns, each with all of its epochs."
    return finding(name, WARNING if turns else OK, expected=expected, received=slots, remedy=remedy)


def configured_slots(settings: Mapping[str, str]) -> int | None:
    """Returns how many slots a session can have by its settings alone; None when they do not tell.

    Args:
        settings: The session's.

    >>> configured_slots({"spark.master": "local[4]", "spark.task.cpus": "2"})
    2
    >>> configured_slots({"spark.master": "yarn"}) is None
    True
    """
    master = settings.get("spark.master", "")
    # How many cores local[*] has is known on the driver's machine alone.
    cores = None if "*" in master else local_cores(master)
    return None if cores is None else tasks_on(cores, cpus_of_task(settings))


def _remedy(name: str, num_workers: int, slots: int, settings: Mapping[str, str], resource: str) -> str:
    task_cpus = cpus_of_task(settings)
    if is_local(settings.get("spark.master", "")):
        lower = f"Lower {name} to {slots}, or start" if slots else "Start"
        return f"{lower} Spark with master local[{math.ceil(num_workers * task_cpus)}]."
    if not slots and not resource:
        return _why_no_executor(settings)
    lower = f"Lower {name} to {slots}" if slots else "Start executors"
    means = f" or {resource.split()[-1]}s" if resource else ""
    return f"{lower}, or give the application more executors or cores{means} (spark.task.cpus is {task_cpus})."


def _why_no_executor(settings: Mapping[str, str]) -> str:
    """Returns where to look when an application has no executor at all: Spark itself only says that it waits."""
    host = settings.get("spark.driver.host", "")
    place = f"the driver at {host} (spark.driver.host)" if host else "the driver (spark.driver.host)"
    return (
        "No executor runs: another application may hold the cluster's cores (spark.cores.max limits what one takes), "
        "no worker may have room for spark.executor.cores and spark.executor.memory, or executors may not reach "
        f"{place}. The cluster manager's page and the executors' logs tell which."
    )
