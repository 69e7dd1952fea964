"""Checks of executors: what they have against what the driver has, their hosts, and the ways between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packaging.version import Version

from elephant.backends import BACKENDS, DEFAULT, VARIABLE
from elephant.cluster.checks.executor_facts import ExecutorFacts, ExecutorReport
from elephant.cluster.checks.registry import (
    FAILURE,
    OK,
    UNKNOWN,
    WARNING,
    CheckResult,
    Phase,
    check,
    check_result,
    run_phase,
)
from elephant.cluster.session import minor, release
from elephant.cluster.spark_job import SparkWords
from elephant.errors import first_line

# Less than this is no room for anything; more than this and there may still be too little for the rows.
FLOOR_BYTES = 64 << 20
SCARCE_BYTES = 1 << 30
# The oldest pyarrow that elephant works with, as setup.py has it, and PySpark from 4.2 on.
_OLDEST_ARROW, _OLDEST_ARROW_SINCE_4_2 = "14.0.1", "18"
_NAMED = 3
_ONE_ENVIRONMENT = "Ship one environment to all of them (spark.archives, or PYSPARK_PYTHON)."
_TOPIC_OF_DISKS = "disks-files-and-encryption"
_TOPIC = "other-packages-on-the-executors"
_FIREWALL = (
    "Set spark.driver.host to an address of the driver that executors reach, and let connections from the executors "
    "to the driver's free ports through the firewall."
)
_FEW_DESCRIPTORS = 1024
_SKEW_S = 30.0


def check_executors(
    report: ExecutorReport,
    driver: ExecutorFacts,
    *,
    backend: str | None,
    keras: bool = True,
    rows_bytes: int | None = None,
    packages: Sequence[str] = (),
) -> list[CheckResult]:
    """Returns the results of the checks of executors.

    Args:
        backend: The Keras backend to compute with; None leaves it to Keras.
        keras: Whether the executors need Keras.
        rows_bytes: What the rows of a fit take, by an estimate; None without one.
        packages: What callbacks need besides, of `elephant.cluster.checks.executor_facts.PACKAGES`.
    """
    return run_phase(
        Phase.EXECUTORS,
        facts=report.facts,
        error=report.error,
        missing=report.missing,
        driver=driver,
        backend=backend or DEFAULT,
        keras=keras,
        rows_bytes=rows_bytes,
        packages=packages,
    )


def _answered(facts: Mapping[str, Any]) -> bool:
    return not facts["error"]


def _needs_keras(facts: Mapping[str, Any]) -> bool:
    return not facts["error"] and bool(facts["keras"])


@check(Phase.EXECUTORS, when=lambda facts: facts["error"])
def check_answer(error: str, driver: ExecutorFacts) -> CheckResult:
    """Explains why Spark refused, or failed, the small job that asks the executors."""
    expected = f"Python {minor(driver.python)} on every executor, as on the driver"
    kinds = (SparkWords.OTHER_PYTHON, SparkWords.NO_PROGRAM, SparkWords.NO_MODULE)
    other, program, module = (kind.search(error) for kind in kinds)
    if other is not None:
        remedy = "Set PYSPARK_PYTHON (spark.pyspark.python) to a Python of that version, or ship one (spark.archives)."
        return check_result(
            "Python", FAILURE, expected=expected, received=f"Python {other[1]}", remedy=remedy, topic=_TOPIC
        )
    if program is not None:
        remedy = "Set PYSPARK_PYTHON (spark.pyspark.python) to a program that every executor has."
        return check_result(
            "Python", FAILURE, expected=expected, received=f"no program {program[1]}", remedy=remedy, topic=_TOPIC
        )
    if module is not None:
        return check_result(
            "executors",
            FAILURE,
            expected="elephant and what PySpark needs to be installed where the executors' Python is",
            received=f"No module named {module[1]!r}",
            remedy=_ONE_ENVIRONMENT,
            topic=_TOPIC,
        )
    if SparkWords.CANCELLED.search(error):
        received = "that somebody cancelled it"
        return check_result("executors", FAILURE, expected="an answer to one small job", received=received)
    remedy = "See the executors' logs, if the fit fails too."
    return check_result(
        "executors", WARNING, expected="an answer to one small job", received=first_line(error)[:300], remedy=remedy
    )


@check(Phase.EXECUTORS, when=_answered)
def check_python(facts: Sequence[ExecutorFacts], driver: ExecutorFacts) -> CheckResult:
    """Returns whether the executors' Python is the driver's, to the minor version."""
    wrong = [
        (one.place, f"{one.python} ({one.executable})") for one in facts if minor(one.python) != minor(driver.python)
    ]
    expected = f"{minor(driver.python)}, the driver's, on every executor"
    return _compared("Python", expected, wrong, good=driver.python, remedy=_ONE_ENVIRONMENT)


@check(Phase.EXECUTORS, when=_answered)
def check_elephant(facts: Sequence[ExecutorFacts], driver: ExecutorFacts) -> CheckResult:
    """Returns whether the executors have the driver's version of elephant."""
    wrong = [(one.place, one.elephant or "none") for one in facts if one.elephant != driver.elephant]
    expected = f"{driver.elephant}, the driver's, to be installed where the executors' Python is"
    remedy = f"Install elephant-spark=={driver.elephant} there, or ship one environment (spark.archives)."
    return _compared("elephant", expected, wrong, good=driver.elephant, remedy=remedy)


def oldest_arrow(spark_version: str) -> str:
    """Returns the first version of pyarrow that goes with a version of PySpark.

    >>> oldest_arrow("3.5.9"), oldest_arrow("4.2.0")
    ('14.0.1', '18')
    """
    return _OLDEST_ARROW_SINCE_4_2 if release(spark_version) >= Version("4.2") else _OLDEST_ARROW


@check(Phase.EXECUTORS, when=_answered)
def check_arrow(facts: Sequence[ExecutorFacts], driver: ExecutorFacts) -> CheckResult:
    """Returns whether the executors have a pyarrow that is new enough, and, if not the driver's, says so."""
    version = driver.packages.get("pyarrow", "none")
    versions = {one.place: one.packages.get("pyarrow", "none") for one in facts}
    oldest = oldest_arrow(driver.packages.get("pyspark", ""))
    old = [(place, found) for place, found in versions.items() if release(found) < Version(oldest)]
    if old:
        expected = f"pyarrow {oldest} or newer on every executor"
        return _compared("Arrow", expected, old, good="", remedy=f"Install pyarrow=={version} there.")
    other = [(place, found) for place, found in versions.items() if release(found).major != release(version).major]
    expected = f"pyarrow {version}, the driver's, on every executor"
    remedy = f"They understand each other; one version is still safer. {_ONE_ENVIRONMENT}"
    return _compared("Arrow", expected, other, good=version, remedy=remedy, otherwise=WARNING)


@check(Phase.EXECUTORS, when=_answered)
def check_disk(facts: Sequence[ExecutorFacts], *, rows_bytes: int | None = None) -> CheckResult:
    """Returns whether the executors have room on disk for the rows of training processes; an estimate refuses none."""
    name, expected = "disk", "room on the local disk for the rows"
    remedy = (
        "Let spark.local.dir (or SPARK_LOCAL_DIRS) name a larger disk, free some room there, "
        "or use more workers on more hosts."
    )
    known = [one for one in facts if one.free_bytes is not None]
    locked = [(one.place, f"{one.folder}, which cannot be written to") for one in known if not one.writable]
    full = [(one.place, _room(one)) for one in known if (one.free_bytes or 0) < FLOOR_BYTES]
    if locked or full:
        expected += f", {FLOOR_BYTES >> 20} MB at least"
        return _compared(name, expected, locked or full, good="", remedy=remedy, topic=_TOPIC_OF_DISKS)
    share = 0 if rows_bytes is None else rows_bytes / max(len(known), 1)
    wanted = max(SCARCE_BYTES, share)
    scarce = [(one.place, _room(one)) for one in known if (one.free_bytes or 0) < wanted]
    least = min((one.free_bytes or 0 for one in known), default=0)
    return _compared(
        name,
        f"{expected}, {_gigabytes(wanted)} or more on each executor"
        + ("" if rows_bytes is None or share <= SCARCE_BYTES else ", by Spark's estimate of them"),
        scarce,
        good=f"{_gigabytes(least)} free" if known else "no executor to ask",
        remedy=remedy,
        otherwise=WARNING,
    )


@check(Phase.EXECUTORS, when=_needs_keras)
def check_keras(facts: Sequence[ExecutorFacts], driver: ExecutorFacts) -> CheckResult:
    """Returns whether the executors have the driver's version of Keras."""
    version = driver.packages.get("keras", "none")
    wrong = [(one.place, found) for one in facts if (found := one.packages.get("keras", "none")) != version]
    return _compared(
        "Keras", f"{version}, the driver's, on every executor", wrong, good=version, remedy=_ONE_ENVIRONMENT
    )


@check(Phase.EXECUTORS, when=_needs_keras)
def check_backend(facts: Sequence[ExecutorFacts], driver: ExecutorFacts, backend: str) -> CheckResult:
    """Returns whether the executors have what Keras computes with; another version of it is only worth knowing."""
    version = _backend_version(driver, backend)
    missing = [(one.place, "none") for one in facts if backend not in one.backends]
    if missing:
        remedy = f"Install {backend} there, or ship one environment (spark.archives)."
        return _compared(backend, f"{backend} on every executor", missing, good="", remedy=remedy)
    other = [
        (one.place, found or "an unknown version")
        for one in facts
        if version and minor(found := _backend_version(one, backend)) != minor(version)
    ]
    expected = f"{version or 'any version'}, the driver's, on every executor"
    remedy = "A model may compute differently there. " + _ONE_ENVIRONMENT
    return _compared(backend, expected, other, good=version, remedy=remedy, otherwise=WARNING)


@check(Phase.EXECUTORS, when=_needs_keras)
def check_chosen_backend(facts: Sequence[ExecutorFacts], backend: str) -> CheckResult:
    """Returns whether the executors' environment names another backend than the model's, with which workers compute."""
    named = ((one.place, one.variables.get(VARIABLE, backend)) for one in facts)
    return _compared(
        VARIABLE,
        f"{backend}, the model's, on executors that have the variable",
        [(place, found) for place, found in named if found != backend],
        good=backend,
        remedy=f"Workers compute with {backend}. The driver's Keras chooses: in cluster mode, the driver has none of "
        "your shell's variables, so pass spark.yarn.appMasterEnv.KERAS_BACKEND or "
        "spark.kubernetes.driverEnv.KERAS_BACKEND; or take the variable from the executors.",
        otherwise=WARNING,
    )


@check(Phase.EXECUTORS, when=_answered)
def check_packages_of_callbacks(facts: Sequence[ExecutorFacts], packages: Sequence[str]) -> list[CheckResult]:
    """Returns whether the executors have what callbacks need, which any of them may run."""
    return [
        _compared(
            name,
            f"{name} on every executor, for a callback",
            [(one.place, "none") for one in facts if name not in one.packages],
            good="there",
            remedy=f"Install {name} there, or leave the callback out.",
            topic="callbacks",
        )
        for name in packages
    ]


@check(Phase.EXECUTORS, when=lambda facts: facts["missing"] and not facts["error"])
def check_missing(missing: int) -> CheckResult:
    """Returns that some executors did not answer."""
    return check_result(
        "executors",
        UNKNOWN,
        expected="an answer of every executor",
        received=f"none of {missing}, whose task slots are busy",
        remedy="Each rank is compared with the driver again before it trains.",
    )


def _backend_version(facts: ExecutorFacts, backend: str) -> str:
    names = BACKENDS[backend].packages if backend in BACKENDS else (backend,)
    return next((facts.packages[name] for name in names if name in facts.packages), "")


def _room(facts: ExecutorFacts) -> str:
    return f"{(facts.free_bytes or 0) / 1e6:,.1f} MB free in {facts.folder}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


def _compared(
    name: str,
    expected: str,
    wrong: Iterable[tuple[str, str]],
    *,
    good: str,
    remedy: str,
    otherwise: str = FAILURE,
    topic: str = _TOPIC,
) -> CheckResult:
    """Returns a result of what executors have that differs, each with its place."""
    by_value: dict[str, list[str]] = {}
    for place, value in wrong:
        by_value.setdefault(value, []).append(place)
    if not by_value:
        return check_result(name, OK, expected=expected, received=good)
    listed = [f"{value} on {_places(places)}" for value, places in by_value.items()]
    received = "; ".join(listed[:_NAMED]) + (f"; and so on: {len(listed)} in all" if len(listed) > _NAMED else "")
    return check_result(name, otherwise, expected=expected, received=received, remedy=remedy, topic=topic)


def _places(places: Sequence[str], limit: int = _NAMED) -> str:
    """Returns the first of several places, and how many more there are.

    >>> _places(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    named = ", ".join(places[:limit])
    return named if len(places) <= limit else f"{named} and {len(places) - limit} more"


@check(Phase.HOSTS, when=lambda facts: facts["place"])
def check_reach(unreached: Mapping[str, str], asked: int, place: str, *, needed: bool) -> CheckResult:
    """Returns whether executors reach the driver; where a fit need not, an executor takes the driver's part."""
    name, expected = "way to the driver", f"executors that reach the driver at {place}"
    if not asked:
        return check_result(name, UNKNOWN, expected=expected, received="no executor to ask")
    if not unreached:
        return check_result(name, OK, expected=expected, received=f"{asked} of {asked} executors reach {place}")
    reasons = ", ".join(f"{executor}: {reason}" for executor, reason in unreached.items())
    if not needed:
        remedy = "Rank 0 then coordinates fits in the driver's place; nothing is to be done unless fits fail."
        return check_result(name, WARNING, expected=expected, received=reasons, remedy=remedy)
    topic = "a-port-that-is-blocked"
    return check_result(name, FAILURE, expected=expected, received=reasons, remedy=_FIREWALL, topic=topic)


@check(Phase.HOSTS)
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


@check(Phase.HOSTS)
def check_shared_memory(sizes: Mapping[str, int]) -> CheckResult:
    """Returns whether /dev/shm has a usual size. Elephant itself shares memory without it; other libraries do not."""
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


@check(Phase.HOSTS)
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
    """Lists the first few places, and the number of the others.

    >>> _listed({"a": "1 s", "b": "2 s", "c": "3 s", "d": "4 s"})
    '1 s on a, 2 s on b, 3 s on c, and so on: 4 in all'
    """
    named = ", ".join(f"{value} on {place}" for place, value in list(values.items())[:_NAMED])
    return named if len(values) <= _NAMED else f"{named}, and so on: {len(values)} in all"


@check(Phase.GPUS)
def check_gpus(facts: Sequence[Mapping[str, Any]], *, wanted: int, backend: str) -> CheckResult:
    """Returns whether the hosts of executors, as `gpu_function` asks them, have GPUs that the Keras backend can use."""
    hosts = {one["host"]: one for one in facts}
    listed = sum(len(one["gpus"]) for one in hosts.values())
    usable = sum(one["usable"] or 0 for one in hosts.values())
    expected = f"{wanted} GPUs that {backend} can use"
    received = f"{listed} by nvidia-smi, {usable} by {backend}"
    problems = [f"{name}: {one['complaint'] or one['error']}" for name, one in hosts.items()]
    problems = [problem for problem in problems if not problem.endswith(": ")]
    remedy = (
        f"Install the driver and CUDA that this {backend} needs (pip install '{BACKENDS[backend].gpu_package}')."
        if listed >= wanted
        else "Use executors with GPUs (spark.executor.resource.gpu.amount), or useGpu=False."
    )
    return check_result(
        "GPUs",
        usable >= wanted,
        expected=expected,
        received=received + (f" ({'; '.join(problems)})" if problems and usable < wanted else ""),
        remedy=remedy,
    )


@check(Phase.TRIAL)
def check_trial(num_workers: int, ranks: Sequence[int], seconds: float, error: str) -> CheckResult:
    """Returns whether a run of a small function on all ranks went well, with processes and connections as of a fit."""
    expected_sum = num_workers * (num_workers + 1) // 2
    right = not error and list(ranks) == [expected_sum] * num_workers
    return check_result(
        "trial run",
        right,
        expected=f"a barrier stage of {num_workers} ranks that reach each other, and add up their numbers",
        received=error.rstrip(".")
        or (f"{seconds:.1f} s for {num_workers} ranks" if right else f"the sums {list(ranks)}"),
        remedy="The text above says what was expected. If ranks do not connect, open the ports between executors, and "
        "see which addresses their host names resolve to (docs/clusters.md).",
    )
