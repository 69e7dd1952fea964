"""Checks of settings and of hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from elephant.cluster.checks.checks import FLOOR_BYTES, SCARCE_BYTES
from elephant.cluster.checks.result import FAILURE, OK, WARNING, CheckResult, check_result
from elephant.cluster.session import cpus_of_task, is_true, tasks_on, whole_number

# Resident memory of a process that has imported TensorFlow and Keras, and of the Python worker that started it.
TRAINING_PROCESS_MB = 640
PYTHON_WORKER_MB = 110

_FEW_DESCRIPTORS = 1024
_SKEW_S = 30.0
_NAMED = 3


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
    kubernetes = settings.get("spark.master", "").startswith("k8s")
    # Of programs that are not for the JVM, Kubernetes takes four times as much.
    default = "0.4" if kubernetes else "0.1"
    factor = settings.get("spark.executor.memoryOverheadFactor") or settings.get(
        "spark.kubernetes.memoryOverheadFactor", default
    )
    return max(int(_megabytes(settings.get("spark.executor.memory", "1g")) * float(factor)), 384)


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


def check_proxies(variables: Mapping[str, str], *, remote: str) -> CheckResult:
    """Returns whether a proxy of the environment is in the way. Elephant's own sockets take no notice of one.

    Args:
        remote: The Spark Connect server, which gRPC would go to through a proxy; empty without one.
    """
    names = [name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if variables.get(name)]
    host = urlsplit(remote).hostname or ""
    entries = (variables.get("no_proxy") or variables.get("NO_PROXY") or "").split(",")
    spared = [entry.strip().removeprefix("*").lstrip(".").lower() for entry in entries if entry.strip()]
    # An entry stands for all names that end with it, and a star for all there are.
    through = bool(names and host) and not any(f".{host}".endswith(f".{entry}") or not entry for entry in spared)
    return check_result(
        "proxies",
        not through,
        otherwise=WARNING,
        expected=f"{host or 'the Connect server'} in no_proxy: gRPC goes through the proxy otherwise",
        received=(", ".join(names) or "none") + ("" if through or not names else ", which elephant's sockets ignore"),
        remedy=f"Set no_proxy={host} if the session cannot be made, or breaks.",
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


def check_temporary_folder(folder: str, *, writable: bool, free_bytes: int) -> CheckResult:
    """Returns whether the driver's folder for temporary files can be written to, and has room."""
    enough = FAILURE if not writable or free_bytes < FLOOR_BYTES else WARNING if free_bytes < SCARCE_BYTES else OK
    return check_result(
        "temporary folder",
        enough,
        expected=f"a folder that can be written to, with {SCARCE_BYTES / 1e9:.1f} GB or more free",
        received=f"{folder}, {free_bytes / 1e9:,.1f} GB free" + ("" if writable else ", which cannot be written to"),
        remedy="Set TMPDIR to a folder with room, or free some there.",
    )


def check_machine(cores: int, memory_bytes: int | None, *, workers: int, local: bool) -> CheckResult:
    """Returns whether this machine carries the training processes of executors that are its own.

    Args:
        memory_bytes: Its memory; None when unknown.
    """
    need = workers * TRAINING_PROCESS_MB * 1e6
    received = f"{cores} cores" + ("" if memory_bytes is None else f", {memory_bytes / 1e9:.1f} GB")
    return check_result(
        "this machine",
        not local or memory_bytes is None or memory_bytes >= need,
        otherwise=WARNING,
        expected=f"{TRAINING_PROCESS_MB} MB for each of {workers} training processes, before any model",
        received=received,
        remedy="Use fewer workers, or a cluster.",
    )


def check_address(host: str, addresses: Sequence[str], error: str, *, needed: bool = True) -> CheckResult:
    """Returns whether the driver has an address that it can tell executors.

    Args:
        host: ``spark.driver.host``; empty for a client of Spark Connect, which has no such name.
        error: Why there is none; empty when there is.
        needed: Whether a fit fails without; elsewhere an executor takes the driver's part.
    """
    return check_result(
        "driver's address",
        not error,
        otherwise=FAILURE if needed else WARNING,
        expected="an address of the driver that executors can be told",
        received=error.rstrip(".") if error else _described(host, *addresses),
        remedy="Set spark.driver.host to the address at which executors reach this machine.",
    )


def _described(host: str, advertised: str, listening: str) -> str:
    """Returns the driver's addresses, each once.

    >>> _described("driver", "10.0.0.1", "0.0.0.0"), _described("10.0.0.1", "10.0.0.1", "10.0.0.1")
    ('driver = 10.0.0.1, listening on 0.0.0.0', '10.0.0.1')
    """
    named = f"{host} = {advertised}" if host.strip("[]") not in ("", advertised) else advertised
    return named if listening == advertised else f"{named}, listening on {listening}"


def check_descriptors(limits: Mapping[str, int]) -> CheckResult:
    """Returns whether processes may open enough files and sockets."""
    few = {place: limit for place, limit in limits.items() if 0 <= limit < _FEW_DESCRIPTORS}
    return check_result(
        "open files",
        not few,
        otherwise=WARNING,
        expected=f"{_FEW_DESCRIPTORS} or more files and sockets for each process (ulimit -n)",
        received=_listed({place: str(limit) for place, limit in few.items()})
        or f"{min(limits.values(), default=0)} or more everywhere",
        remedy="Raise the limit where Spark's workers are started (ulimit -n, LimitNOFILE of a service).",
    )


def check_shared_memory(sizes: Mapping[str, int]) -> CheckResult:
    """Returns whether /dev/shm has a usual size. Elephant itself shares memory without it; other libraries do not.

    Args:
        sizes: Free bytes, by place.
    """
    small = {place: size for place, size in sizes.items() if size < FLOOR_BYTES}
    return check_result(
        "/dev/shm",
        not small,
        otherwise=WARNING,
        expected=f"{FLOOR_BYTES >> 20} MB or more for libraries that use it; elephant's ranks share memory without it",
        received=_listed({place: f"{size / 1e6:,.0f} MB free" for place, size in small.items()})
        or (f"{min(sizes.values()) / 1e6:,.0f} MB or more free everywhere" if sizes else "none"),
        remedy="Start containers with a larger one (docker run --shm-size; a Kubernetes emptyDir of medium Memory).",
    )


def check_clocks(offsets: Mapping[str, float]) -> CheckResult:
    """Returns whether executors have the driver's time. A fit does not need it; logs and tickets (Kerberos) do."""
    off = {place: offset for place, offset in offsets.items() if abs(offset) > _SKEW_S}
    return check_result(
        "clocks",
        not off,
        otherwise=WARNING,
        expected=f"clocks that agree within {_SKEW_S:.0f} s",
        received=_listed({place: f"{offset:+.0f} s" for place, offset in off.items()}) or "they agree",
        remedy="Let the hosts keep time (NTP): lines of logs cannot be put in order otherwise.",
    )


def _listed(values: Mapping[str, str]) -> str:
    """Returns what the first few places have, and how many more there are.

    >>> _listed({"a": "1 s", "b": "2 s", "c": "3 s", "d": "4 s"})
    '1 s on a, 2 s on b, 3 s on c, and so on: 4 in all'
    """
    named = ", ".join(f"{value} on {place}" for place, value in list(values.items())[:_NAMED])
    return named if len(values) <= _NAMED else f"{named}, and so on: {len(values)} in all"
