"""What an application's settings say of its cluster, as far as the placing of ranks depends on it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from elephant.cluster.session import (
    allocates_executors,
    cpus_of_task,
    jvm_context,
    local_cores,
    release,
    session_settings,
    setting,
)
from elephant.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL, STANDALONE, MANAGED, UNKNOWN, OTHER = "local", "standalone", "managed", "unknown", "other"
_OF_SCHEDULER = ("spark.task.", "spark.executor.", "spark.dynamicAllocation.", "spark.master")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*\d+\s*,\s*(\d+)\s*,.*")


def scheduling_settings(session: SparkSession, resource: str) -> dict[str, str]:
    """Returns an application's settings, and ``spark.version``, as Spark's scheduler has them.

    Args:
        session: The Spark session. What it was told since the application began is without effect on the scheduler.
    """
    settings, context = session_settings(session), jvm_context(session)
    if context is not None:
        started_with = dict(context.getConf().getAll())
        others = {name: value for name, value in settings.items() if not name.startswith(_OF_SCHEDULER)}
        return {**others, **{name: started_with[name] for name in started_with if name.startswith(_OF_SCHEDULER)}}
    for name in (f"spark.executor.resource.{resource}.amount", f"spark.task.resource.{resource}.amount"):
        value = setting(session, name)
        if value is not None:
            settings[name] = value
    return settings


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What the settings say of the cluster.

    Args:
        kind: How its executors are started.
        master: As it was set.
        version: Spark's; one that is not known counts as a new one.
        dynamic: Whether executors come and go.
        cores: Of an executor; None of a standalone one that takes what its worker has, and of ``local[*]``.
        task_cpus: Of a task.
        held: Devices of an executor; zero when it asks for none.
        asked: Devices of a task, or the fraction of one.
        resource: What Spark calls the devices.
        script: What executors find theirs with; empty where they are told of them.
        vendor: Of the devices, which Kubernetes asks for.
    """

    kind: str
    master: str
    version: Version
    dynamic: bool
    cores: int | None
    task_cpus: float
    held: int
    asked: float
    resource: str
    script: str = ""
    vendor: str = ""

    @classmethod
    def of(cls, conf: Mapping[str, str], resource: str) -> ClusterSettings:
        """Returns what the settings say; raises ConfigurationError for one that is no number.

        Args:
            conf: What `scheduling_settings` returned.
        """
        master = conf.get("spark.master", "").strip()
        kind, held = _kind(master), f"spark.executor.resource.{resource}"
        return cls(
            kind=kind,
            master=master,
            version=release(conf.get("spark.version") or "99"),
            dynamic=allocates_executors(conf),
            cores=_cores(conf, master, kind),
            task_cpus=_cores_of_task(conf),
            held=int(number(conf, f"{held}.amount", 0)),
            asked=_whole(number(conf, f"spark.task.resource.{resource}.amount", 0)),
            resource=resource,
            script=conf.get(f"{held}.discoveryScript", "").strip(),
            vendor=conf.get(f"{held}.vendor", "").strip(),
        )

    @property
    def cores_setting(self) -> str:
        """The name of the setting that gives cores to executors."""
        return "spark.master" if self.kind == LOCAL else "spark.executor.cores"

    @property
    def executor_setting(self) -> str:
        """The name of the setting that gives devices to executors."""
        return f"spark.executor.resource.{self.resource}.amount"

    @property
    def task_setting(self) -> str:
        """The name of the setting that gives devices to tasks."""
        return f"spark.task.resource.{self.resource}.amount"


def _cores_of_task(conf: Mapping[str, str]) -> float:
    # Refuses what is no number.
    number(conf, "spark.task.cpus", 1)
    return cpus_of_task(conf)


def _whole(amount: float) -> float:
    """Returns an amount of devices per task: more than half a device is a whole one, which no second task fits on."""
    return 1.0 if 0.5 < amount < 1 else amount


def _kind(master: str) -> str:
    if master == "local" or master.startswith("local["):
        return LOCAL
    if master.startswith(("spark://", "local-cluster[")):
        return STANDALONE
    if master.startswith(("yarn", "k8s://")):
        return MANAGED
    return OTHER if master else UNKNOWN


def number(conf: Mapping[str, str], name: str, default: float) -> float:
    """Returns a setting that is a number of zero or more; raises ConfigurationError when it is something else."""
    text = conf.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigurationError(
            f"{name}: expected a number of zero or more. Received: {text!r}. Set it to one, or leave it out."
        )
    return value


def _cores(conf: Mapping[str, str], master: str, kind: str) -> int | None:
    if kind == LOCAL:
        # How many cores local[*] has is known on the driver's machine alone.
        return None if "*" in master else local_cores(master)
    cluster = _LOCAL_CLUSTER.fullmatch(master)
    if conf.get("spark.executor.cores", "").strip():
        return int(number(conf, "spark.executor.cores", 1))
    if cluster:
        return int(cluster[1])
    return 1 if kind == MANAGED else None
