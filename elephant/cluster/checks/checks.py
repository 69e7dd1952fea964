"""Checks of a session, its slots and its executors.

Left to itself Spark answers with ten minutes of silence and a line in a log. The
answer is known before: it is the same count that Spark's scheduler compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from packaging.version import Version

from elephant.cluster.checks.executor_facts import BACKENDS, ExecutorFacts, ExecutorReport
from elephant.cluster.checks.result import FAILURE, OK, UNKNOWN, WARNING, CheckResult, check_result
from elephant.cluster.session import (
    DYNAMIC_ALLOCATION,
    allocates_executors,
    cpus_of_task,
    is_local,
    is_true,
    local_cores,
    minor,
    release,
    tasks_on,
    whole_number,
)
from elephant.errors import first_line

ALLOW_PLAINTEXT = "spark.elephant.allowPlaintext"
# What asks Spark to encrypt what goes over the network, besides spark.authenticate with SASL encryption.
_ENCRYPTION = ("spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled")
_SASL = "spark.authenticate.enableSaslEncryption"
_NO_LIMIT = 2**31 - 1

# Less than this is no room for anything; more than this and there may still be too little for the rows.
FLOOR_BYTES = 64 << 20
SCARCE_BYTES = 1 << 30
# The oldest pyarrow that elephant works with, as setup.py has it, and PySpark from 4.2 on.
_OLDEST_ARROW, _OLDEST_ARROW_SINCE_4_2 = 15, 18
_NAMED = 3
_ONE_ENVIRONMENT = "Ship one environment to all of them (spark.archives, or PYSPARK_PYTHON)."
_OTHER_PYTHON = re.compile(r"different version:? (.+?) than that in driver")
_NO_PROGRAM = re.compile(r'Cannot run program "([^"]+)"')
_CANCELLED = re.compile(r"SPARK_JOB_CANCELLED|OPERATION_CANCELED|cancelled part of cancelled job|cancelled because")
_NO_MODULE = re.compile(r"No module named '([^']+)'")


def check_slots(
    name: str, num_workers: int, slots: int | None, settings: Mapping[str, str], *, resource: str = ""
) -> CheckResult:
    """Returns whether all ranks of a synchronous fit can run at the same time.

    Args:
        slots: Tasks that the cluster runs at the same time; None when that is not known.
        resource: What a task takes besides cores, such as ``1 gpu``; for the message.
    """
    slots = configured_slots(settings) if slots is None else slots
    return check_result(
        f"{name}={num_workers}",
        UNKNOWN if slots is None else slots >= num_workers,
        expected=f"{num_workers} task slots at the same time" + (f", each with {resource}" if resource else ""),
        received="a session that does not tell; Spark's own check remains" if slots is None else slots,
        remedy="" if slots is None else _remedy(name, num_workers, slots, settings, resource),
    )


def check_some_slot(num_workers: int, slots: int | None, settings: Mapping[str, str], *, servers: int) -> CheckResult:
    """Returns whether one worker of an asynchronous fit can run, besides its parameter servers.

    Workers of an asynchronous fit need not run at the same time: with fewer slots they take turns.

    Args:
        slots: Tasks that the cluster runs at the same time; None when that is not known.
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
        return check_result(name, FAILURE, expected=expected, received=slots or "none", remedy=remedy)
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
    """Returns where to look when an application has no executor at all: Spark itself only says that it waits."""
    host = settings.get("spark.driver.host", "")
    place = f"the driver at {host} (spark.driver.host)" if host else "the driver (spark.driver.host)"
    return (
        "No executor runs: another application may hold the cluster's cores (spark.cores.max limits what one takes), "
        "no worker may have room for spark.executor.cores and spark.executor.memory, or executors may not reach "
        f"{place}. The cluster manager's page and the executors' logs tell which."
    )


def check_dynamic_allocation(
    settings: Mapping[str, str], *, num_workers: int, synchronous: bool, servers: int = 0
) -> CheckResult:
    """Returns whether executors that come and go are in the way of a fit.

    Spark refuses a barrier stage with dynamic allocation. Asynchronous workers are ordinary
    tasks, for which Spark asks for executors; their rows are behind a shuffle, which must
    outlive the executors that wrote it.
    """
    name, per_executor = "dynamic allocation", _slots_per_executor(settings)
    instances = max(math.ceil(num_workers / per_executor), 1)
    if not allocates_executors(settings):
        received = "true, which local mode does without" if is_true(settings, DYNAMIC_ALLOCATION) else "false"
        return check_result(name, OK, expected=f"{DYNAMIC_ALLOCATION}=false", received=received)
    if synchronous:
        remedy = (
            f"Set it to false, and spark.executor.instances={instances} or more (spark.cores.max on a standalone "
            "cluster), when the application starts; or train with mode='asynchronous', which runs with it."
        )
        expected = f"{DYNAMIC_ALLOCATION}=false: Spark refuses a barrier stage otherwise"
        return check_result(name, FAILURE, expected=expected, received="true", remedy=remedy)
    most = whole_number(settings, "spark.dynamicAllocation.maxExecutors", _NO_LIMIT) * per_executor
    if most <= servers:
        return check_result(
            name,
            FAILURE,
            expected=f"room for {servers} parameter servers and at least one worker",
            received=f"at most {most} task slots (spark.dynamicAllocation.maxExecutors)",
            remedy=f"Set spark.dynamicAllocation.maxExecutors={math.ceil((servers + num_workers) / per_executor)}.",
        )
    return _remaining_executors(settings, instances, most - servers, num_workers)


def _remaining_executors(settings: Mapping[str, str], instances: int, most: int, num_workers: int) -> CheckResult:
    """Returns what is worth setting for an asynchronous fit on executors that come and go."""
    name, advice = "dynamic allocation", []
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


def check_encryption(settings: Mapping[str, str]) -> CheckResult:
    """Returns whether the session asks for an encrypted network, which elephant's own sockets are not."""
    asked = [name for name in _ENCRYPTION if is_true(settings, name)]
    if is_true(settings, "spark.authenticate") and is_true(settings, _SASL):
        asked.append(_SASL)
    received = ", ".join(f"{name}=true" for name in asked) or "a network that Spark does not encrypt either"
    allowed = is_true(settings, ALLOW_PLAINTEXT)
    return check_result(
        "encryption",
        OK if not asked else WARNING if allowed else FAILURE,
        expected="no setting that asks for encryption: the connections between elephant's own processes are "
        "authenticated, and not encrypted",
        received=received + (f", and {ALLOW_PLAINTEXT}=true" if asked and allowed else ""),
        remedy="Gradients and weights cross the network in the clear."
        if allowed
        else f"Set {ALLOW_PLAINTEXT}=true where gradients and weights may cross the network in the clear, or encrypt "
        "the network below (WireGuard, IPsec, an encrypted pod network).",
    )


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


def check_executors(
    look: ExecutorReport,
    driver: ExecutorFacts,
    *,
    backend: str | None,
    keras: bool = True,
    rows_bytes: int | None = None,
    packages: Sequence[str] = (),
) -> list[CheckResult]:
    """Returns all that is to say of the executors.

    Args:
        driver: The same facts of the driver.
        backend: The Keras backend to compute with; None when no Keras is needed.
        rows_bytes: What the rows of a fit take, by an estimate; None without one.
        packages: What callbacks need besides, of `elephant.cluster.checks.executor_facts.PACKAGES`.
    """
    if look.error:
        return [check_answer(look.error, driver)]
    check_results = [
        check_python(look.facts, driver),
        check_elephant(look.facts, driver),
        check_arrow(look.facts, driver),
        check_disk(look.facts, rows_bytes=rows_bytes),
    ]
    if keras:
        check_results.append(check_keras(look.facts, driver))
        check_results.append(check_backend(look.facts, driver, backend or "tensorflow"))
        check_results.append(check_chosen_backend(look.facts, backend or "tensorflow"))
    check_results += [check_package(look.facts, name) for name in packages]
    if look.missing:
        check_results.append(_not_asked(look.missing))
    return check_results


def check_answer(error: str, driver: ExecutorFacts) -> CheckResult:
    """Returns what the words mean with which Spark refused or failed the small job that asks the executors."""
    expected = f"Python {minor(driver.python)} on every executor, as on the driver"
    other, program, module = _OTHER_PYTHON.search(error), _NO_PROGRAM.search(error), _NO_MODULE.search(error)
    if other is not None:
        remedy = "Set PYSPARK_PYTHON (spark.pyspark.python) to a Python of that version, or ship one (spark.archives)."
        return check_result("Python", FAILURE, expected=expected, received=f"Python {other[1]}", remedy=remedy)
    if program is not None:
        remedy = "Set PYSPARK_PYTHON (spark.pyspark.python) to a program that every executor has."
        return check_result("Python", FAILURE, expected=expected, received=f"no program {program[1]}", remedy=remedy)
    if module is not None:
        return check_result(
            "executors",
            FAILURE,
            expected="elephant and what PySpark needs to be installed where the executors' Python is",
            received=f"No module named {module[1]!r}",
            remedy=_ONE_ENVIRONMENT,
        )
    if _CANCELLED.search(error):
        received = "that somebody cancelled it"
        return check_result("executors", FAILURE, expected="an answer to one small job", received=received)
    remedy = "See the executors' logs, if the fit fails too."
    return check_result(
        "executors", WARNING, expected="an answer to one small job", received=first_line(error)[:300], remedy=remedy
    )


def check_python(facts: Sequence[ExecutorFacts], driver: ExecutorFacts) -> CheckResult:
    """Returns whether the executors' Python is the driver's, to the minor version."""
    wrong = [
        (one.place, f"{one.python} ({one.executable})") for one in facts if minor(one.python) != minor(driver.python)
    ]
    expected = f"{minor(driver.python)}, the driver's, on every executor"
    return _compared("Python", expected, wrong, good=driver.python, remedy=_ONE_ENVIRONMENT)


def check_elephant(facts: Sequence[ExecutorFacts], driver: ExecutorFacts) -> CheckResult:
    """Returns whether the executors have the driver's version of elephant."""
    wrong = [(one.place, one.elephant or "none") for one in facts if one.elephant != driver.elephant]
    expected = f"{driver.elephant}, the driver's, to be installed where the executors' Python is"
    remedy = f"Install elephant-spark=={driver.elephant} there, or ship one environment (spark.archives)."
    return _compared("elephant", expected, wrong, good=driver.elephant, remedy=remedy)


def check_keras(facts: Sequence[ExecutorFacts], driver: ExecutorFacts) -> CheckResult:
    """Returns whether the executors have the driver's version of Keras."""
    version = driver.packages.get("keras", "none")
    wrong = [(one.place, found) for one in facts if (found := one.packages.get("keras", "none")) != version]
    return _compared(
        "Keras", f"{version}, the driver's, on every executor", wrong, good=version, remedy=_ONE_ENVIRONMENT
    )


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


def check_package(facts: Sequence[ExecutorFacts], name: str) -> CheckResult:
    """Returns whether the executors have what a callback needs, which any of them may run."""
    missing = [(one.place, "none") for one in facts if name not in one.packages]
    expected, remedy = f"{name} on every executor, for a callback", f"Install {name} there, or leave the callback out."
    return _compared(name, expected, missing, good="there", remedy=remedy)


def check_chosen_backend(facts: Sequence[ExecutorFacts], backend: str) -> CheckResult:
    """Returns whether the executors' environment names another backend than the model's, with which workers compute."""
    named = ((one.place, one.variables.get("KERAS_BACKEND", backend)) for one in facts)
    return _compared(
        "KERAS_BACKEND",
        f"{backend}, the model's, on executors that have the variable",
        [(place, found) for place, found in named if found != backend],
        good=backend,
        remedy=f"Workers compute with {backend}. The driver's Keras chooses: a driver in the cluster mode of a "
        "standalone cluster gets none of your variables but SPARK_*, so set os.environ['KERAS_BACKEND'] in the script, "
        "before anything imports Keras; or take the variable from the executors.",
        otherwise=WARNING,
    )


def oldest_arrow(spark_version: str) -> int:
    """Returns the first major version of pyarrow that goes with a version of PySpark.

    >>> oldest_arrow("3.5.9"), oldest_arrow("4.2.0")
    (15, 18)
    """
    return _OLDEST_ARROW_SINCE_4_2 if release(spark_version) >= Version("4.2") else _OLDEST_ARROW


def check_arrow(facts: Sequence[ExecutorFacts], driver: ExecutorFacts) -> CheckResult:
    """Returns whether the executors have a pyarrow that is new enough, and, if not the driver's, says so."""
    version = driver.packages.get("pyarrow", "none")
    versions = {one.place: one.packages.get("pyarrow", "none") for one in facts}
    oldest = oldest_arrow(driver.packages.get("pyspark", ""))
    old = [(place, found) for place, found in versions.items() if release(found).major < oldest]
    if old:
        expected = f"pyarrow {oldest} or newer on every executor"
        return _compared("Arrow", expected, old, good="", remedy=f"Install pyarrow=={version} there.")
    other = [(place, found) for place, found in versions.items() if release(found).major != release(version).major]
    expected = f"pyarrow {version}, the driver's, on every executor"
    remedy = f"They understand each other; one version is still safer. {_ONE_ENVIRONMENT}"
    return _compared("Arrow", expected, other, good=version, remedy=remedy, otherwise=WARNING)


def check_disk(facts: Sequence[ExecutorFacts], *, rows_bytes: int | None = None) -> CheckResult:
    """Returns whether the executors have room on disk for the rows that training processes keep there.

    Args:
        rows_bytes: What all rows take, by an estimate; None without one. An estimate alone refuses nothing.
    """
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
        return _compared(name, expected, locked or full, good="", remedy=remedy)
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


def _backend_version(facts: ExecutorFacts, backend: str) -> str:
    names = BACKENDS.get(backend, (backend,))
    return next((facts.packages[name] for name in names if name in facts.packages), "")


def _room(facts: ExecutorFacts) -> str:
    return f"{(facts.free_bytes or 0) / 1e6:,.1f} MB free in {facts.folder}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


def _compared(
    name: str, expected: str, wrong: Iterable[tuple[str, str]], *, good: str, remedy: str, otherwise: str = FAILURE
) -> CheckResult:
    """Returns a finding of what executors have that differs, each with its place."""
    by_value: dict[str, list[str]] = {}
    for place, value in wrong:
        by_value.setdefault(value, []).append(place)
    if not by_value:
        return check_result(name, OK, expected=expected, received=good)
    listed = [f"{value} on {_places(places)}" for value, places in by_value.items()]
    received = "; ".join(listed[:_NAMED]) + (f"; and so on: {len(listed)} in all" if len(listed) > _NAMED else "")
    return check_result(name, otherwise, expected=expected, received=received, remedy=remedy)


def _places(places: Sequence[str], limit: int = _NAMED) -> str:
    """Returns the first of several places, and how many more there are.

    >>> _places(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    named = ", ".join(places[:limit])
    return named if len(places) <= limit else f"{named} and {len(places) - limit} more"


def _not_asked(missing: int) -> CheckResult:
    return check_result(
        "executors",
        UNKNOWN,
        expected="an answer of every executor",
        received=f"none of {missing}, whose task slots are busy",
        remedy="Each rank is compared with the driver again before it trains.",
    )
