"""Resource plan: where the GPUs and cores of each rank come from, by the application's settings.

Spark schedules GPUs only as far as it is told to. What tasks get by the
application's settings is taken as it is where that is right: whole devices, as many as a worker asks for.
Otherwise the training stage, and it alone, asks for them (Spark's stage-level scheduling),
on executors that hold them. Where Spark knows of no GPUs, the ranks of a host share out those
that are there. And some settings cannot work at all, of which Spark would not say a word.
"""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from packaging.version import Version

from elephant.cluster.executors import TaskProfile
from elephant.cluster.session import (
    allocates_executors,
    cpus_of_task,
    jvm_context,
    local_cores,
    release,
    session_settings,
    setting,
    started_with,
    tasks_on,
)
from elephant.config import FitConfig
from elephant.errors import ClusterError, ConfigurationError, expect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK, HOSTS, NONE = "spark", "hosts", "none"
_EXECUTOR_AMOUNT = re.compile(r"spark\.executor\.resource\.(.+)\.amount")
_TASK_AMOUNT = re.compile(r"spark\.task\.resource\.(.+)\.amount")
# How executors are started.
LOCAL, STANDALONE, MANAGED, UNKNOWN, OTHER = "local", "standalone", "managed", "unknown", "other"
RESOURCE_SETTING = "spark.elephant.gpuResource"
_OF_SCHEDULER = ("spark.task.", "spark.executor.", "spark.dynamicAllocation.", "spark.master")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*\d+\s*,\s*(\d+)\s*,.*")
# Task profiles without executors of their own: for YARN and Kubernetes by SPARK-45250 and SPARK-45495.
_TASK_PROFILES = {STANDALONE: Version("3.4"), MANAGED: Version("3.5.1"), UNKNOWN: Version("4")}
# Profiles with executors of their own, which dynamic allocation starts.
_EXECUTOR_PROFILES = {STANDALONE: Version("3.4"), MANAGED: Version("3.1"), UNKNOWN: Version("4")}
# Before, an executor's device is cut into the fractions of the application's tasks for all stages, and a
# stage that asks for a whole one gets one of these (SPARK-45527).
_WHOLE_AGAIN = Version("4")


def scheduling_settings(session: SparkSession, resource: str) -> dict[str, str]:
    """Returns an application's settings, and ``spark.version``, as Spark's scheduler has them since it began."""
    settings, context = session_settings(session), jvm_context(session)
    if context is not None:
        begun_with = started_with(context)
        others = {name: value for name, value in settings.items() if not name.startswith(_OF_SCHEDULER)}
        return {**others, **{name: begun_with[name] for name in begun_with if name.startswith(_OF_SCHEDULER)}}
    for name in (f"spark.executor.resource.{resource}.amount", f"spark.task.resource.{resource}.amount"):
        value = setting(session, name)
        if value is not None:
            settings[name] = value
    return settings


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Cluster of an application by its settings."""

    kind: str
    master: str
    version: Version  # Spark's; one that is not known counts as a new one
    dynamic: bool
    cores: int | None  # of an executor; None of a standalone one that takes what its worker has, and of local[*]
    task_cpus: float
    held: int  # devices of an executor; zero when it asks for none
    asked: float  # devices of a task, or the fraction of one
    resource: str
    script: str = ""
    vendor: str = ""

    @classmethod
    def of(cls, conf: Mapping[str, str], resource: str) -> ClusterSettings:
        """Reads the settings; raises ConfigurationError for one that is no number."""
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


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """Request of a fit, or of a run of a function, to the cluster.

    Raises:
        ConfigurationError: A value is none of those.
    """

    num_workers: int = 1
    use_gpu: bool | str = "auto"  # True demands GPUs, False hides them, "auto" takes those that there are
    gpus_per_worker: int = 1  # GPUs of each task, each of which is one rank
    gpu_resource: str = "gpu"
    synchronous: bool = True  # whether all tasks run at the same time, in a barrier stage

    def __post_init__(self) -> None:
        named = isinstance(self.gpu_resource, str) and bool(self.gpu_resource.strip())
        use = self.use_gpu
        expect(_is_count(self.num_workers), "num_workers", "an integer of at least 1", self.num_workers)
        expect(use is True or use is False or use == "auto", "use_gpu", "True, False or 'auto'", use)
        expect(_is_count(self.gpus_per_worker), "gpus_per_worker", "an integer of at least 1", self.gpus_per_worker)
        expect(named, "gpu_resource", "the name of a resource", self.gpu_resource)

    @classmethod
    def of_fit(cls, config: FitConfig) -> ResourceRequest:
        """Returns the request of a fit."""
        return cls(
            num_workers=config.num_workers,
            use_gpu=config.use_gpu,
            gpus_per_worker=config.gpus_per_worker,
            synchronous=config.is_synchronous,
        )

    def named_in(self, session: SparkSession) -> ResourceRequest:
        """Returns the same with the session's name of GPUs, where the usual one is asked for."""
        named = setting(session, RESOURCE_SETTING) if self.gpu_resource == "gpu" else None
        return replace(self, gpu_resource=named) if named is not None else self

    @property
    def demands(self) -> bool:
        """True if a rank without a GPU is an error."""
        return bool(self.use_gpu) and self.use_gpu != "auto"


@dataclass(frozen=True, kw_only=True)
class ResourcePlan:
    """Source of the ranks' devices, and its cost in slots."""

    # "spark" gives them to tasks; "hosts", the ranks of a host share out those that it has, if it has any; "none",
    # ranks compute on the CPU and GPUs are hidden from them
    devices: str
    required: bool = False
    resource: str = "gpu"
    gpus_per_worker: int = 1  # devices, and with them ranks, of each task
    # what the training stage asks for by itself; None leaves it what the application's tasks have
    profile: TaskProfile | None = None
    task_cpus: float = 1
    slots_needed: int = 1
    # tasks of it that one executor can run at the same time; None where no setting tells
    slots_per_executor: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks: one of each device, or one of each task that has none."""
        return self.slots_needed * self.gpus_per_worker


def plan(conf: Mapping[str, str], request: ResourceRequest) -> ResourcePlan:
    """Returns where the devices of a fit come from, by `scheduling_settings`, which may be few on Spark Connect.

    Raises:
        ClusterError: The settings cannot give what is asked for; it names the one to change.
        ConfigurationError: What is asked for contradicts itself, or a setting is no number.
    """
    # Settings that were made by hand may be numbers and booleans, too.
    conf = {name: str(value) for name, value in conf.items() if value is not None}
    cluster = ClusterSettings.of(conf, request.gpu_resource)
    _refuse_local_task_resources(conf, cluster)
    _refuse_dynamic_barrier(cluster, request)
    if not request.use_gpu:
        return _without_devices(cluster, request)
    if cluster.kind == LOCAL:
        return _planned(cluster, request, HOSTS)
    if not cluster.held and not (cluster.kind == UNKNOWN and cluster.asked):
        return _planned(cluster, request, HOSTS, notes=_note_of_unscheduled(conf, request))
    if cluster.held and cluster.held < request.gpus_per_worker:
        raise ClusterError(
            f"gpusPerWorker={request.gpus_per_worker}: expected {cluster.executor_setting} of at least "
            f"{request.gpus_per_worker}, because a worker's GPUs are those of one executor. "
            f"Received: {cluster.held}. Raise it, or lower gpusPerWorker.",
            topic="gpus",
        )
    if cluster.asked == request.gpus_per_worker:
        return _planned(cluster, request, SPARK, amount=cluster.asked)
    obstacle = _obstacle(cluster)
    if obstacle is None:
        return _with_profile(cluster, request)
    return _without_profile(cluster, request, obstacle)


def prediction_profile(session: SparkSession) -> TaskProfile | None:
    """Returns the profile of tasks that predict, which are to have a GPU each; None where all tasks have one.

    Raises:
        ClusterError: Spark cannot give them one; it names the setting to change.
    """
    request = ResourceRequest(use_gpu=True, synchronous=False).named_in(session)
    settings = scheduling_settings(session, request.gpu_resource)
    cluster = ClusterSettings.of(settings, request.gpu_resource)
    if cluster.kind != LOCAL and cluster.asked:
        return None
    planned = plan(settings, request)
    if planned.profile is None:
        raise ClusterError(
            f"inferenceUseGpu=True: expected executors with GPUs ({cluster.executor_setting}), for which a stage can "
            f"ask by itself. Received: {cluster.held} on each, with master {cluster.master or 'unknown'}. Set it on a "
            f"cluster; where this stands, set {cluster.task_setting}; or leave inferenceUseGpu out."
        )
    return planned.profile


def slots_per_executor(*, cores: int | None, task_cpus: float, held: int | None, amount: float) -> int | None:
    """Returns how many tasks an executor runs at the same time, by its cores and its devices; None when unknown.

    >>> slots_per_executor(cores=8, task_cpus=2, held=2, amount=1)
    2
    >>> slots_per_executor(cores=8, task_cpus=1, held=2, amount=0.3)
    6
    """
    by_cores = None if cores is None else tasks_on(cores, task_cpus)
    by_devices = None
    if amount and held is not None:
        by_devices = held * parts(amount) if amount < 1 else int(held // amount)
    counts = [count for count in (by_cores, by_devices) if count is not None]
    # Devices alone are an upper bound: how many cores there are, nobody has said.
    return min(counts) if by_cores is not None else None


def parts(amount: float) -> int:
    """Returns how many tasks share a device of which each takes a fraction.

    >>> parts(0.25), parts(0.3), parts(0.1)
    (4, 3, 10)
    """
    return math.floor(min(1 / amount, sys.maxsize) + 1e-9)


def _refuse_local_task_resources(conf: Mapping[str, str], cluster: ClusterSettings) -> None:
    for name in sorted(conf):
        if cluster.kind == LOCAL and _TASK_AMOUNT.fullmatch(name) and number(conf, name, 0):
            raise ClusterError(
                f"{name}: expected no such setting with master {cluster.master}, whose tasks have no resources: every "
                f"job, also one without a GPU, would wait for ever. Received: {conf[name]}. "
                "Leave it out: the ranks of this host share out the GPUs that nvidia-smi lists.",
                topic="gpus",
            )


def _refuse_dynamic_barrier(cluster: ClusterSettings, request: ResourceRequest) -> None:
    if request.synchronous and cluster.dynamic:
        raise ClusterError(
            "expected spark.dynamicAllocation.enabled=false: Spark refuses a barrier stage otherwise. "
            "Received: true. Set it to false, and spark.executor.instances to the executors you need.",
            topic="dynamic-allocation",
        )


def _without_devices(cluster: ClusterSettings, request: ResourceRequest) -> ResourcePlan:
    if request.gpus_per_worker > 1:
        raise ConfigurationError(
            f"gpusPerWorker: expected useGpu=True or 'auto'. Received: gpusPerWorker={request.gpus_per_worker} "
            "with useGpu=False. Leave one of the two out."
        )
    notes: tuple[str, ...] = ()
    if cluster.asked:
        notes = (
            f"useGpu=False: GPUs are hidden from the workers, yet {cluster.task_setting} is {cluster.asked:g}, so that "
            "each of their tasks waits for a GPU and keeps it",
        )
    return _planned(cluster, request, NONE, amount=cluster.asked, notes=notes)


def _planned(
    cluster: ClusterSettings,
    request: ResourceRequest,
    devices: str,
    *,
    amount: float = 0,
    profile: TaskProfile | None = None,
    notes: tuple[str, ...] = (),
) -> ResourcePlan:
    slots = slots_per_executor(
        cores=cluster.cores, task_cpus=cluster.task_cpus, held=cluster.held or None, amount=amount
    )
    if slots == 0:
        raise ClusterError(
            f"expected executors with room for a task: spark.task.cpus is {cluster.task_cpus:g}, and each takes "
            f"{amount:g} of {cluster.resource}. Received: {cluster.cores} cores "
            f"({cluster.cores_setting}), {cluster.held} of {cluster.resource} ({cluster.executor_setting}). "
            "Raise these, or lower spark.task.cpus.",
            topic="gpus",
        )
    return ResourcePlan(
        devices=devices,
        required=request.demands,
        resource=request.gpu_resource,
        gpus_per_worker=request.gpus_per_worker,
        profile=profile,
        task_cpus=cluster.task_cpus,
        slots_needed=request.num_workers,
        slots_per_executor=slots,
        notes=notes,
    )


def _note_of_unscheduled(conf: Mapping[str, str], request: ResourceRequest) -> tuple[str, ...]:
    if not request.demands:
        # Nothing is said of GPUs to those who may have none.
        return ()
    names = sorted(found[1] for name in conf if (found := _EXECUTOR_AMOUNT.fullmatch(name)))
    others = f". If they are called otherwise, set {RESOURCE_SETTING} to {' or '.join(names)}" if names else ""
    return (
        f"spark.executor.resource.{request.gpu_resource}.amount is not set, so that Spark schedules no GPUs: the ranks "
        f"of each host share out those that nvidia-smi lists there{others}",
    )


def _obstacle(cluster: ClusterSettings) -> str | None:
    """Returns why the training stage cannot ask for devices by itself; None when it can."""
    needed = (_EXECUTOR_PROFILES if cluster.dynamic else _TASK_PROFILES).get(cluster.kind)
    if needed is None:
        return f"a stage cannot ask for them by itself with master {cluster.master}"
    if cluster.version < needed:
        return f"a stage cannot ask for them by itself with master {cluster.master} in Spark {cluster.version}"
    if cluster.kind == UNKNOWN and not cluster.held:
        return "it is not known what executors hold"
    if 0 < cluster.asked < 1 and cluster.version < _WHOLE_AGAIN and not cluster.dynamic:
        return (
            f"Spark {cluster.version} divides each GPU among the application's tasks, and gives these parts to a stage "
            f"that asks for whole ones. Without {cluster.task_setting}, the training stage asks for them by itself"
        )
    return None


def _with_profile(cluster: ClusterSettings, request: ResourceRequest) -> ResourcePlan:
    amount = request.gpus_per_worker
    notes = [f"the training stage asks for {amount} of {cluster.resource} per task ({_task_setting_text(cluster)})"]
    profile = TaskProfile(cpus=cluster.task_cpus, resource=cluster.resource, amount=amount)
    if cluster.dynamic:
        profile = replace(profile, held=cluster.held, script=cluster.script, vendor=cluster.vendor)
        notes.append(
            "Spark starts executors of their own for that stage, because it allocates them dynamically: where all GPUs "
            "are those of others, it waits until these are idle and end. To train on the executors that there are, set "
            f"{cluster.task_setting}={amount}"
        )
    return _planned(cluster, request, SPARK, amount=amount, profile=profile, notes=tuple(notes))


def _task_setting_text(cluster: ClusterSettings) -> str:
    return f"{cluster.task_setting} is {cluster.asked:g}" if cluster.asked else f"{cluster.task_setting} is not set"


def _without_profile(cluster: ClusterSettings, request: ResourceRequest, obstacle: str) -> ResourcePlan:
    """Returns the plan where tasks have what the settings give them, or nothing; raises where that is not right."""
    wanted = request.gpus_per_worker
    remedy = f"Set {cluster.task_setting}={wanted} for the application: {obstacle}."
    if not cluster.asked:
        note = (
            f"{cluster.task_setting} is not set, so that tasks have no GPU of Spark's: the ranks of each host share "
            f"out those that nvidia-smi lists there. {remedy}"
        )
        return _planned(cluster, request, HOSTS, notes=(note,))
    if cluster.asked > wanted:
        spare = f"each task holds {cluster.asked:g} GPUs and uses {wanted}. {remedy}"
        return _planned(cluster, request, SPARK, amount=cluster.asked, notes=(spare,))
    if cluster.asked >= 1 or wanted > 1:
        raise ClusterError(
            f"gpusPerWorker={wanted}: expected tasks of {wanted} GPUs. Received: {cluster.task_setting} of "
            f"{cluster.asked:g}. {remedy}",
            topic="gpus",
        )
    taken = _planned(cluster, request, SPARK, amount=cluster.asked)
    if request.num_workers > 1 and not _one_task_per_executor(cluster):
        raise ClusterError(
            f"{cluster.task_setting}={cluster.asked:g}: expected whole GPUs for the ranks of a fit: fractions put up "
            f"to {parts(cluster.asked)} of them on one device, where they wait for each other. {remedy}",
            topic="gpus",
        )
    return taken


def _one_task_per_executor(cluster: ClusterSettings) -> bool:
    return cluster.cores is not None and tasks_on(cluster.cores, cluster.task_cpus) == 1


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= 1
