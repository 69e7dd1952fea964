"""The executors of an application as its driver knows them, and how many tasks they run at the same time."""

from __future__ import annotations

import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elephant.cluster.session import (
    DYNAMIC_ALLOCATION,
    allocates_executors,
    cpus_of_task,
    is_remote,
    jvm_context,
    local_cores,
    session_settings,
    setting,
    tasks_on,
    whole_number,
)
from elephant.cluster.spark_private import explained, java_context, pair_of
from elephant.errors import ClusterError
from elephant.timeouts import Timeouts

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_TOO_FEW_S = 20.0
_POLL_S = 0.5
# Of the reason for which Spark has removed an executor.
_DECOMMISSIONED = "decommission"
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*")
_LOOK_S = 2.0
_NEWS_S = 0.05
_USUAL_PART_BYTES, _MOST_PART_BYTES = 128 << 20, 1 << 30
_SPLITS = re.compile(r"Range \(.*splits=(?:Some\()?(\d+)")


@dataclass(frozen=True, kw_only=True)
class Executor:
    """One executor."""

    name: str  # Spark's id of it; driver in local mode
    host: str
    cores: int
    # addresses of each resource, such as GPUs, by its name
    resources: Mapping[str, Sequence[str]] = field(default_factory=dict)


_making = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class TaskProfile:
    """Resources of each task of the training stage, where they differ from those of the application's tasks."""

    cpus: float
    resource: str
    amount: int
    # devices of each executor that is started for the stage, with dynamic allocation; zero where the stage runs on
    # the executors that there are
    held: int = 0
    script: str = ""  # what such an executor finds its devices with; empty where it is told of them
    vendor: str = ""

    def build(self) -> ResourceProfile:
        """Returns it as Spark takes it."""
        from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests

        builder = ResourceProfileBuilder()
        builder.require(TaskResourceRequests().cpus(self.cpus).resource(self.resource, float(self.amount)))
        if self.held:
            # Cores and memory are those of the application's executors, as long as nobody names them.
            builder.require(
                ExecutorResourceRequests().resource(
                    self.resource, self.held, discoveryScript=self.script, vendor=self.vendor
                )
            )
        return builder.build


_profiles: weakref.WeakKeyDictionary[SparkSession, dict[TaskProfile, ResourceProfile]] = weakref.WeakKeyDictionary()


def profile_of(session: SparkSession, profile: TaskProfile | None) -> ResourceProfile | None:
    """Returns a profile as Spark takes it, made once for each session; None for none.

    Spark keeps every one that it was ever told of. Where executors come and go, it starts some for every new profile,
    though it be equal to an older one.
    """
    if profile is None:
        return None
    with _making:
        made = _profiles.setdefault(session, {})
        if profile not in made:
            made[profile] = profile.build()
        return made[profile]


def running_executors(session: SparkSession) -> list[Executor] | None:
    """Returns the executors that run tasks now, by name; None on Spark Connect, which does not tell."""
    context = jvm_context(session)
    if context is None:
        return None
    listed = java_context(context).sc().statusStore().executorList(True)
    summaries = [listed.apply(index) for index in range(listed.size())]
    # One that dynamic allocation has started for a profile runs no other tasks.
    executors = [_executor(summary) for summary in summaries if summary.resourceProfileId() == 0]
    # The driver of a cluster is listed too, without cores.
    return sorted((one for one in executors if one.cores), key=lambda one: one.name)


def is_decommissioned(session: SparkSession, executor: str) -> bool:
    """Returns whether Spark was told to give an executor up, as before its machine is taken away; no where unknown.

    Args:
        executor: Spark's id of one that runs, or that is lost by now.
    """
    try:
        context = jvm_context(session)
        if context is None or local_cores(setting(session, "spark.master") or "") is not None:
            return False
        return _is_decommissioned(java_context(context).sc(), executor)
    except Exception:
        # Spark itself is gone, which is not what the caller has to say.
        return False


def _is_decommissioned(scala: Any, executor: str) -> bool:
    scheduler, began = scala.taskScheduler(), time.monotonic()
    while time.monotonic() - began < _LOOK_S:
        if bool(scheduler.getExecutorDecommissionState(executor).isDefined()):
            return True
        is_alive = bool(scheduler.isExecutorAlive(executor))
        listed = scala.statusStore().executorList(False)
        reasons = [
            str(one.removeReason())
            for one in (listed.apply(index) for index in range(listed.size()))
            if one.id() == executor and not one.isActive()
        ]
        if reasons or is_alive:
            return any(_DECOMMISSIONED in reason for reason in reasons)
        # The scheduler has forgotten it, and its pages have not heard of that yet.
        time.sleep(_NEWS_S)
    return False


def has_no_executor(session: SparkSession) -> bool:
    """Returns whether a cluster has given the application no executor at all, as far as that is to be had."""
    context = jvm_context(session)
    if context is None or local_cores(setting(session, "spark.master") or "") is not None:
        return False
    try:
        # One call tells it of large clusters; the driver is in this list too.
        many = len(java_context(context).sc().statusTracker().getExecutorInfos()) > 1
        return not many and running_executors(session) == []
    except Exception:
        # The JVM is gone, of which its job says more.
        return False


class ExecutorAbsence:
    """Notices that an application has had no executor for so long that none is to be expected.

    Spark itself waits for ever. Where it starts executors as they are needed, their absence says nothing.
    """

    def __init__(self, session: SparkSession, limit_s: float) -> None:
        self._session = session
        self._limit_s = limit_s
        self._next_look = self._since = time.monotonic() + _LOOK_S

    def check(self) -> None:
        """Looks now and then; raises ClusterError when there has been no executor for too long."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if not has_no_executor(self._session) or allocates_dynamically(self._session):
            self._since = now
        elif now - self._since > self._limit_s:
            raise ClusterError(
                f"expected executors that go on with the fit. Received: none for {self._limit_s:g} s, and the cluster "
                "starts no others. Its pages and logs say why they ended; timeouts.executors_s is how long is waited."
            )


def _executor(summary: Any) -> Executor:
    return Executor(
        name=summary.id(),
        host=summary.hostPort().rsplit(":", 1)[0],
        cores=summary.totalCores(),
        resources=_resources(summary.resources()),
    )


def _resources(by_name: Any) -> dict[str, list[str]]:
    found, entries = {}, by_name.iterator()
    while entries.hasNext():
        name, given = pair_of(entries.next())
        found[str(name)] = [str(address) for address in given.addresses()]
    return found


def slots_of(
    executors: Sequence[Executor], *, task_cpus: float = 1, resources: Mapping[str, float] | None = None
) -> int:
    """Returns how many tasks executors run at the same time, each of which takes some cores and resources.

    >>> two = [Executor(name=name, host="h", cores=8, resources={"gpu": ["0", "1"]}) for name in "01"]
    >>> slots_of(two, task_cpus=2), slots_of(two, resources={"gpu": 1}), slots_of(two, resources={"gpu": 0.25})
    (8, 4, 16)
    >>> slots_of(two, task_cpus=0.5)
    32
    """
    return sum(
        min(
            [
                tasks_on(executor.cores, task_cpus),
                *(_shares(len(executor.resources.get(name, ())), amount) for name, amount in (resources or {}).items()),
            ]
        )
        for executor in executors
    )


def _shares(addresses: int, amount: float) -> int:
    if amount <= 0:
        return 2**31
    # Spark divides one address between whole tasks only: of 0.4 each, two have one.
    return addresses // int(amount) if amount >= 1 else addresses * int(1 / amount + 1e-9)


def count_slots(session: SparkSession, profile: TaskProfile | None = None) -> int | None:
    """Returns how many tasks, of a profile or the application's own, can run at the same time now; None if unknown."""
    context = jvm_context(session)
    if profile is not None:
        executors = running_executors(session)
        resources = {profile.resource: profile.amount}
        return None if executors is None else slots_of(executors, task_cpus=profile.cpus, resources=resources)
    if context is None:
        return _parallelism(session) if is_remote(session) else None
    scheduler = java_context(context).sc()
    return int(scheduler.maxNumConcurrentTasks(scheduler.resourceProfileManager().defaultResourceProfile()))


def _parallelism(session: SparkSession) -> int | None:
    """Returns how many tasks can run at the same time by Spark's plan of a range; None where that does not follow.

    Spark divides a range by the cores of its executors, unless it is told otherwise. Of fewer than two cores on a
    cluster it makes two.
    """
    settings = session_settings(session)
    if "spark.default.parallelism" in settings or settings.get("spark.sql.leafNodeDefaultParallelism"):
        return None
    splits = _SPLITS.search(explained(session.range(1)))
    return None if splits is None else tasks_on(int(splits[1]), cpus_of_task(settings))


def promised_executors(master: str, conf: Mapping[str, str]) -> int | None:
    """Returns how many executors the application will have; None when nothing says, and 0 where it has no others.

    >>> promised_executors("local-cluster[3,2,1024]", {}), promised_executors("k8s://x", {})
    (3, None)
    """
    if local_cores(master) is not None:
        # All slots are there at once: none is still to come.
        return 0
    cluster = _LOCAL_CLUSTER.fullmatch(master)
    if cluster:
        return int(cluster[1])
    number = whole_number(conf, "spark.executor.instances", -1)
    return None if number < 0 else number


def promised_slots(master: str, conf: Mapping[str, str]) -> int | None:
    """Returns how many task slots the application will have when all its executors run; None when nothing says.

    >>> promised_slots("local[4]", {})
    0
    >>> promised_slots("local-cluster[3,2,1024]", {"spark.task.cpus": "2"})
    3
    >>> promised_slots("yarn", {"spark.executor.instances": "2", "spark.executor.cores": "4"})
    8
    """
    executors, cluster = promised_executors(master, conf), _LOCAL_CLUSTER.fullmatch(master)
    cores = int(cluster[2]) if cluster else whole_number(conf, "spark.executor.cores", 1)
    return None if executors is None else executors * tasks_on(cores, cpus_of_task(conf))


def patient(session: SparkSession, timeouts: Timeouts, wanted: int) -> Timeouts:
    """Returns the limits of waits for so many slots: longer ones where the cluster manager is to bring them, and may
    need machines for that."""
    master = setting(session, "spark.master") or ""
    if not master.startswith(("yarn", "k8s")):
        return timeouts
    promised = promised_slots(master, session_settings(session)) or 0
    are_coming = promised >= wanted or allocates_dynamically(session)
    return timeouts.with_new_machines() if are_coming else timeouts


def expected_slots(session: SparkSession, profile: TaskProfile | None = None) -> int | None:
    """Returns how many tasks can run at the same time, now or when all promised executors run; None when unknown."""
    slots = count_slots(session, profile)
    if slots is None or allocates_dynamically(session):
        return None
    if profile is not None:
        # How many devices executors that are still to come will have is not known.
        return slots
    return max(slots, promised_slots(setting(session, "spark.master") or "", session_settings(session)) or 0)


def parts_of_files(session: SparkSession, num_bytes: int) -> int:
    """Returns in how many parts the tasks of a stage read files of so many bytes.

    Every slot has one, or several where one would be large, as a lost task begins its own anew. Where slots are not
    known, parts are as large as Spark makes them.
    """
    slots = expected_slots(session)
    if not slots:
        return max(math.ceil(num_bytes / _USUAL_PART_BYTES), 2)
    return slots * max(math.ceil(num_bytes / (slots * _MOST_PART_BYTES)), 1)


def awaited_slots(
    session: SparkSession,
    wanted: int,
    timeout_s: float,
    note: Callable[[str], None],
    profile: TaskProfile | None = None,
) -> int | None:
    """Returns how many slots there are once there are enough, or no more to be expected; None when unknown.

    Executors may still be starting, or be replaced after a failure; a local master has
    all its slots at once and is not waited for.
    """
    slots = count_slots(session, profile)
    if slots is None:
        return None
    master, settings = setting(session, "spark.master") or "", session_settings(session)
    promised, executors = promised_slots(master, settings), promised_executors(master, settings)
    if promised is not None and promised < wanted:
        # There will never be enough. How many there are, is known when those have come.
        wanted, timeout_s = promised, min(timeout_s, _TOO_FEW_S)
    deadline, complete_since = time.monotonic() + timeout_s, math.inf
    if slots < wanted and time.monotonic() < deadline:
        note(f"waiting for {wanted} task slots: the cluster has {slots} so far")
    while slots < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        slots = count_slots(session, profile) or 0
        # Where all have come, they have fewer slots than their number lets expect: of devices, say. One that was just
        # lost, or has just come, may be known here and not there.
        is_complete = executors is not None and len(running_executors(session) or ()) >= executors
        complete_since = min(complete_since, time.monotonic()) if is_complete else math.inf
        if time.monotonic() - complete_since >= _TOO_FEW_S:
            break
    return slots


def allocates_dynamically(session: SparkSession) -> bool:
    """Returns whether Spark starts and ends executors as tasks come and go."""
    return allocates_executors({name: setting(session, name) or "" for name in (DYNAMIC_ALLOCATION, "spark.master")})
