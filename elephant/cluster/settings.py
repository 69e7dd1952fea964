"""The settings of a Spark session, on a classic one and on Spark Connect, as plain values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from elephant.cluster.sessions import jvm_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DYNAMIC_ALLOCATION = "spark.dynamicAllocation.enabled"
_LOCAL = re.compile(r"local\[\s*(\d+|\*)\s*(?:,.*)?\]")


def session_settings(session: SparkSession) -> dict[str, str]:
    """Returns what is set in a session: ``spark.*`` by name, and its version as ``spark.version``.

    Where a platform keeps some settings to itself, they are missing.

    Args:
        session: The Spark session.
    """
    settings = {"spark.version": str(session.version)}
    context = jvm_context(session)
    if context is not None:
        settings.update(context.getConf().getAll())
    # Spark SQL's own, which hold what was set in the running session; a property from PySpark 4.0 on.
    own = getattr(type(session.conf), "getAll", None)
    if own is not None:
        settings.update(_read_all(session))
    elif context is None:
        settings.update({name: value for name in _NAMES if (value := setting(session, name)) is not None})
    return settings


def _read_all(session: SparkSession) -> Mapping[str, str]:
    try:
        return dict(session.conf.getAll)
    except Exception:
        return {}


def setting(session: SparkSession, name: str) -> str | None:
    """Returns one setting of a session; None where it is not set, or not to be read.

    Args:
        session: The Spark session.
        name: Its whole name.
    """
    try:
        value: Any = session.conf.get(name, None)
    except Exception:
        return None
    return None if value is None else str(value)


def is_true(settings: Mapping[str, str], name: str) -> bool:
    """Returns whether a setting is switched on.

    >>> is_true({"spark.ssl.enabled": "TRUE "}, "spark.ssl.enabled"), is_true({}, "spark.ssl.enabled")
    (True, False)
    """
    return (settings.get(name) or "").strip().lower() == "true"


def whole_number(settings: Mapping[str, str], name: str, default: int) -> int:
    """Returns a setting that counts something; the default where it is not set, or no number.

    >>> whole_number({"spark.task.cpus": "2"}, "spark.task.cpus", 1), whole_number({}, "spark.task.cpus", 1)
    (2, 1)
    """
    try:
        return int(settings.get(name, "").strip())
    except ValueError:
        return default


def cpus_of_task(settings: Mapping[str, str]) -> float:
    """Returns the cores of a task: a whole number, or from Spark 4.3 on a fraction of one.

    >>> cpus_of_task({"spark.task.cpus": "2"}), cpus_of_task({"spark.task.cpus": "0.5"}), cpus_of_task({})
    (2, 0.5, 1)
    """
    try:
        cpus = float(settings.get("spark.task.cpus", "").strip())
    except ValueError:
        return 1
    if not (math.isfinite(cpus) and cpus > 0):
        return 1
    return int(cpus) if cpus.is_integer() else cpus


def tasks_on(cores: int, task_cpus: float) -> int:
    """Returns how many tasks run on so many cores at the same time.

    >>> tasks_on(4, 2), tasks_on(4, 0.5), tasks_on(1, 0.1)
    (2, 8, 10)
    """
    # By their decimal digits, as Spark counts.
    return int(Decimal(cores) / Decimal(str(task_cpus)))


def is_local(master: str) -> bool:
    """Returns whether tasks run in the driver's own JVM.

    >>> is_local("local[4]"), is_local("local"), is_local("local-cluster[2,1,1024]")
    (True, True, False)
    """
    return local_cores(master) is not None


def allocates_executors(settings: Mapping[str, str]) -> bool:
    """Returns whether Spark starts and ends executors as tasks come and go; in local mode it makes nothing of that.

    >>> allocates_executors({"spark.dynamicAllocation.enabled": "true", "spark.master": "yarn"})
    True
    >>> allocates_executors({"spark.dynamicAllocation.enabled": "true", "spark.master": "local[2]"})
    False
    """
    return is_true(settings, DYNAMIC_ALLOCATION) and not is_local(settings.get("spark.master") or "")


def local_cores(master: str) -> int | None:
    """Returns how many tasks a local master runs at a time; None of another master.

    >>> local_cores("local[4]"), local_cores("local"), local_cores("yarn")
    (4, 1, None)
    """
    if master == "local":
        return 1
    cores = _LOCAL.fullmatch(master)
    if cores is None:
        return None
    return (os.cpu_count() or 1) if cores[1] == "*" else int(cores[1])


# What is asked for by name where a session does not list its settings: Spark Connect before 4.0.
_NAMES = (
    "spark.app.id",
    "spark.authenticate",
    "spark.authenticate.enableSaslEncryption",
    "spark.driver.bindAddress",
    "spark.driver.host",
    DYNAMIC_ALLOCATION,
    "spark.dynamicAllocation.maxExecutors",
    "spark.dynamicAllocation.minExecutors",
    "spark.dynamicAllocation.shuffleTracking.enabled",
    "spark.elephant.allowPlaintext",
    "spark.elephant.warmWorkers",
    "spark.executor.cores",
    "spark.executor.instances",
    "spark.executor.memory",
    "spark.executor.memoryOverhead",
    "spark.executor.memoryOverheadFactor",
    "spark.io.encryption.enabled",
    "spark.master",
    "spark.network.crypto.enabled",
    "spark.python.worker.reuse",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures",
    "spark.shuffle.service.enabled",
    "spark.speculation",
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
    "spark.task.cpus",
)
