"""Checks of a session's settings and task slots.

Left to itself Spark answers with ten minutes of silence and a line in a log. The
answer is known before: it is the same count that Spark's scheduler compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from elephant.cluster.checks.registry import FAILURE, OK, UNKNOWN, WARNING, CheckResult, Phase, check, check_result
from elephant.cluster.gpu_plan import HOSTS, NONE, SPARK, ResourcePlan
from elephant.cluster.session import (
    DYNAMIC_ALLOCATION,
    allocates_executors,
    cpus_of_task,
    is_local,
    is_true,
    local_cores,
    tasks_on,
    whole_number,
)

ALLOCATION = "dynamic allocation"
# What has Spark encrypt tasks on their way to executors, besides spark.authenticate with SASL encryption.
_OF_TASKS = ("spark.ssl.rpc.enabled", "spark.network.crypto.enabled")
# What asks Spark to encrypt something else, and so says that what is here is to be encrypted.
_OF_OTHERS = ("spark.ssl.enabled", "spark.io.encryption.enabled")
_SASL = "spark.authenticate.enableSaslEncryption"
_NO_LIMIT = 2**31 - 1
# Resident memory of a process that has imported TensorFlow and Keras, and of the Python worker that started it.
TRAINING_PROCESS_MB = 640
PYTHON_WORKER_MB = 110
_SOURCES = {
    SPARK: "GPUs that Spark gives to tasks",
    HOSTS: "the GPUs of each host, if it has any, shared out among its ranks",
    NONE: "the CPU",
}


@check(Phase.SLOTS, when=lambda facts: facts["plan"] is not None or facts["obstacle"])
def check_devices(plan: ResourcePlan | None, obstacle: str) -> CheckResult:
    """Returns where the devices of the ranks come from, or the obstacle to it."""
    name, expected = "devices", "settings that can give the workers what they ask for"
    if plan is None:
        return check_result(name, FAILURE, expected=expected, received=obstacle.rstrip("."), text=obstacle)
    received = _SOURCES[plan.devices] + "".join(f"; {note}" for note in plan.notes)
    return check_result(name, OK, expected=expected, received=received)


@check(Phase.SLOTS, when=lambda facts: facts["together"] and not facts["dynamic"])
def check_slots(
    name: str,
    num_workers: int,
    slots: int | None,
    settings: Mapping[str, str],
    *,
    resource: str = "",
    servers: int = 0,
) -> CheckResult:
    """Returns whether all ranks of a synchronous fit can run at the same time; with no slots known, by the settings.

    A task takes a resource besides its cores, such as ``1 gpu``. Parameter servers on executors take slots besides.
    """
    slots = configured_slots(settings) if slots is None else slots
    needed = num_workers + servers
    return check_result(
        f"{name}={num_workers}" + (f" and parameterServers={servers} on executors" if servers else ""),
        UNKNOWN if slots is None else slots >= needed,
        expected=f"{needed} task slots at the same time" + (f", each with {resource}" if resource else ""),
        received="a session that does not tell; Spark's own check remains" if slots is None else slots,
        remedy="" if slots is None else _remedy(name, needed, slots, settings, resource),
        topic="more-workers-than-slots",
    )


@check(Phase.SLOTS, when=lambda facts: not facts["together"] and not facts["dynamic"])
def check_some_slot(num_workers: int, slots: int | None, settings: Mapping[str, str], *, servers: int) -> CheckResult:
    """Returns whether one worker of an asynchronous fit can run, besides its parameter servers.

    Workers of an asynchronous fit need not run at the same time: with fewer slots they take turns.
    """
    slots = configured_slots(settings) if slots is None else slots
    name = f"parameterServers={servers} with serverPlacement='executors'" if servers else f"numWorkers={num_workers}"
    expected = f"at least {servers + 1} task slots, one of them for a worker" if servers else "at least one task slot"
    if slots is None:
        received = "a session that does not tell; Spark waits for them"
        return check_result(name, UNKNOWN, expected=expected, received=received)
    if slots <= servers:
        remedy = (
            "Lower parameterServers, use serverPlacement='driver', or give the application more executors or cores."
            if servers
            else _why_no_executor(settings)
        )
        return check_result(
            name, FAILURE, expected=expected, received=slots or "none", remedy=remedy, topic="more-workers-than-slots"
        )
    turns = slots - servers < num_workers
    expected = "a task slot for each worker" if turns else expected
    remedy = f"{num_workers} workers on {slots - servers} task slots: they take turns, each with all of its epochs."
    return check_result(name, WARNING if turns else OK, expected=expected, received=slots, remedy=remedy)


def configured_slots(settings: Mapping[str, str]) -> int | None:
    """Returns how many slots a session can have by its settings alone; None when they do not tell.

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
    """Returns advice for an application without any executor: Spark itself only says that it waits."""
    host = settings.get("spark.driver.host", "")
    place = f"the driver at {host} (spark.driver.host)" if host else "the driver (spark.driver.host)"
    return (
        "No executor runs: another application may hold the cluster's cores (spark.cores.max limits what one takes), "
        "no worker may have room for spark.executor.cores and spark.executor.memory, or executors may not reach "
        f"{place}. The cluster manager's page and the executors' logs tell which."
    )


@check(Phase.SETTINGS)
def check_dynamic_allocation(
    settings: Mapping[str, str], *, num_workers: int, synchronous: bool, servers: int = 0, together: bool = False
) -> CheckResult:
    """Returns whether executors that come and go are in the way of a fit.

    Spark refuses a barrier stage with it. Asynchronous workers, and those that train in rounds, are ordinary tasks;
    their rows are behind a shuffle, which must outlive the executors that wrote it.
    """
    name, per_executor = ALLOCATION, _slots_per_executor(settings)
    instances = max(math.ceil(num_workers / per_executor), 1)
    if not allocates_executors(settings):
        received = "true, which local mode does without" if is_true(settings, DYNAMIC_ALLOCATION) else "false"
        return check_result(name, OK, expected=f"{DYNAMIC_ALLOCATION}=false", received=received)
    if synchronous:
        remedy = (
            f"Set it to false, and spark.executor.instances={instances} or more (spark.cores.max on a standalone "
            "cluster), when the application starts; or train with numWorkers=(least, most), aggregation='server' or "
            "mode='asynchronous', which run with it."
        )
        expected = f"{DYNAMIC_ALLOCATION}=false: all workers of a fixed number need their slots at once"
        return check_result(
            name, FAILURE, expected=expected, received="true", remedy=remedy, topic="dynamic-allocation"
        )
    most = whole_number(settings, "spark.dynamicAllocation.maxExecutors", _NO_LIMIT) * per_executor
    if most < servers + (num_workers if together else 1):
        workers = f"{num_workers} workers at the same time" if together else "at least one worker"
        return check_result(
            name,
            FAILURE,
            expected=f"room for {servers} parameter servers and {workers}",
            received=f"at most {most} task slots (spark.dynamicAllocation.maxExecutors)",
            remedy=f"Set spark.dynamicAllocation.maxExecutors={math.ceil((servers + num_workers) / per_executor)}.",
        )
    return _remaining_executors(settings, instances, most - servers, num_workers)


def _remaining_executors(settings: Mapping[str, str], instances: int, most: int, num_workers: int) -> CheckResult:
    """Returns advice for an asynchronous fit on executors that come and go."""
    name, advice = ALLOCATION, []
    tracked = is_true(settings, "spark.dynamicAllocation.shuffleTracking.enabled")
    # Spark's own default has been true since 3.4.
    unset = "spark.dynamicAllocation.shuffleTracking.enabled" not in settings
    if not (tracked or unset or is_true(settings, "spark.shuffle.service.enabled")):
        advice.append("spark.dynamicAllocation.shuffleTracking.enabled=true keeps executors whose shuffle is read")
    if whole_number(settings, "spark.dynamicAllocation.minExecutors", 0) < instances:
        advice.append(f"spark.dynamicAllocation.minExecutors={instances} lets all workers start at once")
    if most < num_workers:
        advice.append(f"with spark.dynamicAllocation.maxExecutors as it is, workers take turns on {most} task slots")
    return check_result(
        name,
        not advice,
        otherwise=WARNING,
        expected="executors that stay as long as the fit",
        received="true, with which they come when tasks wait and go when they are idle",
        remedy=f"{'; '.join(advice)}.",
    )


def _slots_per_executor(settings: Mapping[str, str]) -> int:
    return max(tasks_on(whole_number(settings, "spark.executor.cores", 1), cpus_of_task(settings)), 1)


def encrypts(wanted: bool | None, settings: Mapping[str, str]) -> bool:
    """Returns whether the connections of a run are encrypted: as it wants, or where Spark is told to encrypt.

    Args:
        wanted: The option ``encryption``; None leaves it to the settings.
        settings: The session's.

    >>> encrypts(None, {"spark.network.crypto.enabled": "true"}), encrypts(None, {}), encrypts(True, {})
    (True, False, True)
    """
    return bool(_asked_of_spark(settings)) if wanted is None else wanted


def _asked_of_spark(settings: Mapping[str, str]) -> list[str]:
    """Returns the settings that ask Spark to encrypt something; those that cover tasks come first."""
    asked = [name for name in _OF_TASKS if is_true(settings, name)]
    if is_true(settings, "spark.authenticate") and is_true(settings, _SASL):
        asked.append(_SASL)
    return asked + [name for name in _OF_OTHERS if is_true(settings, name)]


@check(Phase.SETTINGS)
def check_encryption(settings: Mapping[str, str], encryption: bool | None, cryptography: bool) -> CheckResult:
    """Returns whether elephant's connections are encrypted where they are to be, and whether their key is safe.

    Args:
        encryption: The option of that name; None where nothing was said.
        cryptography: Whether the package of that name is on the driver.
    """
    asked = _asked_of_spark(settings)
    received = ", ".join(f"{name}=true" for name in asked) or "a session that does not encrypt"
    received += "" if encryption is None else f", and encryption={encryption}"
    if not encrypts(encryption, settings):
        return check_result(
            "encryption",
            not asked,
            otherwise=WARNING,
            expected="connections of elephant's own that are encrypted where Spark is told to encrypt",
            received=received,
            remedy="Gradients and weights cross the network in the clear: leave encryption out.",
        )
    if not cryptography:
        return check_result(
            "encryption",
            FAILURE,
            expected="the package cryptography on the driver, which makes the key pair of each run",
            received=f"none, with {received}",
            remedy="Install it there: pip install 'elephant-spark[tls]'.",
            topic="disks-files-and-encryption",
        )
    covers_tasks = any(name not in _OF_OTHERS for name in asked) or is_local(settings.get("spark.master", ""))
    return check_result(
        "encryption",
        covers_tasks,
        otherwise=WARNING,
        expected="a session that encrypts its tasks, with which the key of elephant's encrypted connections travels",
        received=received,
        remedy="Who reads Spark's own connections can read elephant's: set spark.authenticate and "
        "spark.network.crypto.enabled, or spark.ssl.rpc.enabled.",
    )


@check(Phase.SETTINGS)
def check_disk_encryption(settings: Mapping[str, str]) -> CheckResult:
    """Returns whether the session asks for encrypted local files, which the workers' rows are not."""
    asked = is_true(settings, "spark.io.encryption.enabled")
    return check_result(
        "local files",
        not asked,
        otherwise=WARNING,
        expected="spark.io.encryption.enabled=false: workers keep their rows as plain files in Spark's local folders",
        received="true" if asked else "false",
        remedy="The rows lie there in the clear while a fit runs: encrypt the disk if they must not.",
    )


@check(Phase.SETTINGS)
def check_idle_timeout(settings: Mapping[str, str]) -> CheckResult:
    """Check that Spark does not end Python workers that train: to Spark they are idle (4.1 and later)."""
    kinds = (("spark.sql.execution.pyspark.udf", "DataFrames and files"), ("spark.python.worker", "RDDs"))
    limits = [
        f"{prefix}.killOnIdleTimeout=true with {seconds} s, which ends fits on {rows}"
        for prefix, rows in kinds
        if _ends_idle(settings, prefix) and (seconds := _idle_seconds(settings, prefix))
    ]
    return check_result(
        "idle Python workers",
        not limits,
        otherwise=WARNING,
        expected="no killOnIdleTimeout: a Python worker sends Spark nothing while its rank trains",
        received="; ".join(limits) or "false",
        remedy="Set it to false for the session that trains, or the timeout above the seconds of the longest fit.",
    )


def _ends_idle(settings: Mapping[str, str], prefix: str) -> bool:
    own, common = f"{prefix}.killOnIdleTimeout", "spark.python.worker.killOnIdleTimeout"
    return is_true(settings, own if own in settings else common)


def _idle_seconds(settings: Mapping[str, str], prefix: str) -> str:
    names = (f"{prefix}.idleTimeoutSeconds", "spark.python.worker.idleTimeoutSeconds")
    given = next((settings[name].strip().lower() for name in names if settings.get(name)), "0")
    return given.removesuffix("s") if given.strip("0s") else ""


@check(Phase.APPLICATION)
def check_barrier_settings(settings: Mapping[str, str], *, counted: bool) -> CheckResult:
    """Returns how long Spark itself waits for task slots of a barrier stage before it gives up."""
    check = "spark.scheduler.barrier.maxConcurrentTasksCheck."
    wait_s = _seconds(settings.get(f"{check}interval", "15s")) * whole_number(settings, f"{check}maxFailures", 40)
    return check_result(
        "barrier check",
        counted or wait_s <= 60,
        otherwise=WARNING,
        expected="an answer of Spark's in a minute where there are too few task slots",
        received=f"after {wait_s:,.0f} s"
        + (", which is never waited for: slots are counted before" if counted else ""),
        remedy=f"Set {check}interval=1s and {check}maxFailures=10 when the application starts.",
    )


@check(Phase.APPLICATION)
def check_authentication(settings: Mapping[str, str]) -> CheckResult:
    """Returns whether Spark asks executors for a secret before it sends them rows and models, where it has any."""
    master = settings.get("spark.master", "")
    name, asks = "authentication", is_true(settings, "spark.authenticate")
    if not master or (master.startswith("local") and not master.startswith("local-cluster")):
        return check_result(name, OK, expected="", received="no executors beside the driver")
    return check_result(
        name,
        asks,
        otherwise=WARNING,
        expected="spark.authenticate=true: without it, whoever reaches the driver's port may join as an executor, and "
        "is sent rows, models and the secrets of fits",
        received=str(asks).lower(),
        remedy="Set spark.authenticate=true when the application starts, and on a standalone cluster "
        "spark.authenticate.secret for its master, workers and applications.",
    )


@check(Phase.APPLICATION)
def check_speculation(settings: Mapping[str, str], *, synchronous: bool) -> CheckResult:
    """Returns whether Spark starts copies of slow tasks; it never does so with a barrier stage."""
    asked = is_true(settings, "spark.speculation")
    return check_result(
        "speculation",
        synchronous or not asked,
        otherwise=WARNING,
        expected="spark.speculation=false: a copy of a slow worker takes its place, and starts its step again",
        received="true, which barrier stages do without" if asked and synchronous else str(asked).lower(),
        remedy="Set spark.speculation=false for applications that train asynchronously.",
    )


@check(Phase.APPLICATION)
def check_worker_reuse(settings: Mapping[str, str]) -> CheckResult:
    """Returns whether Spark keeps its Python workers from one job to the next."""
    reused = (settings.get("spark.python.worker.reuse") or "true").strip().lower() != "false"
    return check_result(
        "Python workers",
        reused,
        otherwise=WARNING,
        expected="spark.python.worker.reuse=true",
        received="kept from one job to the next" if reused else "false: every job starts its own",
        remedy="Leave it at its default: each transform pays for the import of Keras otherwise.",
    )


@check(Phase.APPLICATION)
def check_memory(settings: Mapping[str, str]) -> CheckResult:
    """Returns whether a cluster manager that limits memory leaves room for the training processes.

    They run beside the executor's JVM: what they take counts against the memory overhead.
    """
    master = settings.get("spark.master", "")
    name, limited = "memory overhead", master == "yarn" or master.startswith("k8s")
    if not limited:
        return check_result(name, OK, expected="", received="not limited by this cluster manager")
    slots = max(tasks_on(whole_number(settings, "spark.executor.cores", 1), cpus_of_task(settings)), 1)
    need, overhead = slots * (TRAINING_PROCESS_MB + PYTHON_WORKER_MB), overhead_mb(settings)
    return check_result(
        name,
        overhead >= need,
        otherwise=WARNING,
        expected=f"{need:,} MB or more: {slots} training processes on an executor, each of {TRAINING_PROCESS_MB} MB "
        "before any model",
        received=f"{overhead:,} MB",
        remedy=f"Set spark.executor.memoryOverhead={need}m, and more for a large model or batch.",
    )


def overhead_mb(settings: Mapping[str, str]) -> int:
    """Returns the memory that an executor may take beside its JVM's heap, in MB, as Spark reckons it.

    >>> overhead_mb({"spark.executor.memory": "8g"}), overhead_mb({"spark.executor.memoryOverhead": "2g"})
    (819, 2048)
    """
    set_to = settings.get("spark.executor.memoryOverhead", "")
    if set_to:
        return _megabytes(set_to)
    # In cluster mode on Kubernetes, Spark itself sets the second one, to 0.4 for Python; in client mode it does not.
    factor = settings.get("spark.executor.memoryOverheadFactor") or settings.get(
        "spark.kubernetes.memoryOverheadFactor", "0.1"
    )
    return max(int(_megabytes(settings.get("spark.executor.memory", "1g")) * float(factor)), 384)


@check(Phase.APPLICATION)
def check_python_memory(settings: Mapping[str, str]) -> CheckResult:
    """Returns whether Spark limits the memory of Python workers, which training processes inherit."""
    limit = settings.get("spark.executor.pyspark.memory", "")
    return check_result(
        "memory of Python",
        not limit,
        otherwise=WARNING,
        expected="no spark.executor.pyspark.memory: it limits the address space of training processes, of which "
        "TensorFlow takes many gigabytes that it never fills",
        received=limit or "not limited",
        remedy="Leave it out, and raise spark.executor.memoryOverhead instead.",
    )


def _megabytes(text: str) -> int:
    """Returns a size as Spark writes it, in MB; without a unit it is in MB.

    >>> _megabytes("2g"), _megabytes("512m"), _megabytes("300")
    (2048, 512, 300)
    """
    size = re.fullmatch(r"\s*(\d+)\s*([kmgt]?)b?\s*", text.lower())
    if size is None:
        return 0
    return int(size[1]) * {"k": 1, "": 1024, "m": 1024, "g": 1024**2, "t": 1024**3}[size[2]] // 1024


def _seconds(text: str) -> float:
    """Returns a time as Spark writes it, in seconds; without a unit it is in seconds.

    >>> _seconds("15s"), _seconds("2min"), _seconds("500ms"), _seconds("3")
    (15.0, 120.0, 0.5, 3.0)
    """
    time = re.fullmatch(r"\s*(\d+)\s*(us|ms|s|min|m|h|d)?\s*", text.lower())
    if time is None:
        return 0.0
    units = {"us": 1e-6, "ms": 1e-3, None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    return int(time[1]) * units[time[2]]
