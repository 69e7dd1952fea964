"""Spark sessions: their kind, their settings and versions, and the environment of this process.

A session of Spark Connect has none, and on some shared clusters the JVM is there and
refuses what is asked of it. Whatever needs the JVM asks `jvm_context` for it, and has
another way for None.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from elephant.cluster.spark_private import context_of, java_context, jvm_of, settings_in_json
from elephant.errors import ClusterError, ConfigurationError, UnsupportedError, nearest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.net.addresses import Ports

# The newest Java that a Spark version runs on, where there is a limit: PySpark 3.5 breaks wherever Arrow is used.
NEWEST_JAVA = {"3.5": 17}

_CONNECT = "pyspark.sql.connect."
_locked: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_started_with: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
DYNAMIC_ALLOCATION = "spark.dynamicAllocation.enabled"
# Masters that Spark brings along, by the name that begins their URL; other cluster managers have others.
_MASTERS = {
    "local": "local, local[N] or local[*]",
    "local-cluster": "local-cluster[EXECUTORS,CORES,MEGABYTES]",
    "spark": "spark://HOST:PORT; the port is 7077 unless the master was given another",
    "yarn": "yarn; --deploy-mode says where the driver runs",
    "k8s": "k8s://https://HOST:PORT",
    "sc": "a master; sc:// is the URL of a Spark Connect server, which --remote takes",
}
_RENAMED = {"yarn-client": "yarn", "yarn-cluster": "yarn", "kubernetes": "k8s"}
_MASTER = re.compile(
    r"local(\[\s*(\d+|\*)\s*(,\s*\d+\s*)?\])?|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]"
    r"|spark://[^,/\s]+:\d+(,[^,/\s]+:\d+)*|yarn|k8s://\S+"
)
_LOCAL = re.compile(r"local\[\s*(\d+|\*)\s*(?:,.*)?\]")
# What is asked for by name where a session does not list its settings: Spark Connect before 4.0.
_PORTS = "spark.elephant.ports"
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
    "spark.elephant.gpuResource",
    _PORTS,
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


def release(version: str) -> Version:
    """Returns a version without its suffix, such as a platform's or that of a development version; 0 for none.

    >>> release("4.0.1-amzn-0"), release("4.0.0.dev1") >= Version("4"), release("none")
    (<Version('4.0.1')>, True, <Version('0')>)
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return Version(numbers[0] if numbers else "0")


def minor(version: str) -> str:
    """Returns the first two numbers of a version, such as ``3.11``."""
    return ".".join(version.split(".")[:2])


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for as long as the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_remote(session: SparkSession) -> bool:
    """Returns whether a session is one of Spark Connect."""
    return any(kind.__module__.startswith(_CONNECT) for kind in type(session).__mro__)


def require_connect(session: SparkSession) -> None:
    """Raises UnsupportedError where a session is one of Spark Connect, and PySpark is too old to run jobs beside it."""
    import pyspark

    # Threads tell it better than numbers: platforms count the versions of their clients otherwise.
    if is_remote(session) and "session" not in inspect.signature(pyspark.InheritableThread.__init__).parameters:
        raise UnsupportedError(
            f"Spark Connect: expected PySpark 4.0 or newer. Received: {pyspark.__version__}, which runs no job beside "
            "the thread that follows it. Use a classic session, or install a newer PySpark on client and server."
        )


def require_running(session: SparkSession) -> None:
    """Raises ClusterError where a classic session was stopped: Spark itself fails a bare assertion then."""
    if not is_remote(session) and _is_stopped(session):
        raise ClusterError(
            "expected a running Spark session. Received: one that was stopped. Start another, and read the rows there."
        )


def jvm_context(session: SparkSession) -> Any | None:
    """Returns the session's `pyspark.SparkContext`, or None where its JVM is not to be had."""
    if is_remote(session):
        return None
    if session not in _locked:
        _locked[session] = _is_locked(session)
    return None if _locked[session] else context_of(session)


def _is_stopped(session: Any) -> bool:
    try:
        return java_context(context_of(session)) is None
    except Exception:
        # Not to be seen where the context is kept from Python.
        return False


def _is_locked(session: Any) -> bool:
    """Returns whether the JVM is kept from Python, as on shared clusters of some platforms."""
    try:
        context = context_of(session)
        java_context(context).sc().applicationId()
        jvm_of(context).org.apache.hadoop.fs.Path("/")
    except Exception:
        # Py4JSecurityException, or an error of the platform's own: none of them is of a kind known here.
        return True
    return False


def ports_of(given: Ports, settings: Mapping[str, str]) -> Ports:
    """Returns the ports that processes may listen on: those given, or else those of a session's settings.

    Raises:
        ConfigurationError: ``spark.elephant.ports`` has none.

    >>> ports_of(None, {"spark.elephant.ports": "40000-40100"}), ports_of((9, 9), {"spark.elephant.ports": "1-2"})
    ((40000, 40100), (9, 9))
    """
    from elephant.kinds import PORTS

    text = settings.get(_PORTS, "")
    if given is not None or not text:
        return given
    try:
        first, last = PORTS.value_of(text)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{_PORTS}: {error}") from None
    return first, last


def session_settings(session: SparkSession) -> dict[str, str]:
    """Returns a session's settings: ``spark.*`` by name, and its version as ``spark.version``.

    Where a platform keeps some settings to itself, they are missing.
    """
    settings = {"spark.version": str(session.version)}
    context = jvm_context(session)
    if context is not None:
        settings.update(started_with(context))
    # Spark SQL's own, which hold what was set in the running session; a property from PySpark 4.0 on.
    own = getattr(type(session.conf), "getAll", None)
    if own is not None:
        settings.update(_read_all(session))
    elif context is None:
        settings.update({name: value for name in _NAMES if (value := setting(session, name)) is not None})
    return settings


def started_with(context: Any) -> Mapping[str, str]:
    """Returns the settings of an application, which its context has had since it began."""
    if context not in _started_with:
        _started_with[context] = dict(context.getConf().getAll())
    return _started_with[context]


def _read_all(session: SparkSession) -> Mapping[str, str]:
    with contextlib.suppress(Exception):
        # PySpark itself asks the JVM three times for each of them, 15 ms for all.
        return dict(json.loads(settings_in_json(session, jvm_context(session))))
    with contextlib.suppress(Exception):
        return dict(session.conf.getAll)
    return {}


def setting(session: SparkSession, name: str) -> str | None:
    """Returns one setting of a session; None where it is not set, or not to be read."""
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


def require_master(master: str) -> None:
    """Raises ConfigurationError where a master's URL is one of Spark's own, misspelled.

    Anything else passes: it may be that of another cluster manager, which only Spark can tell.

    >>> [require_master(master) for master in ("local[*]", "spark://one:7077,two:7077", "yarn", "nomad://host", "")]
    [None, None, None, None, None]
    >>> require_master("loca[2]")
    Traceback (most recent call last):
    elephant.errors.ConfigurationError: master: expected local, local[N] or local[*]. Received: 'loca[2]'.
    """
    if _MASTER.fullmatch(master):
        return
    begin = re.match(r"[\w-]*", master.lower())
    name = _RENAMED.get(begin[0], begin[0]) if begin else ""
    if name not in _MASTERS and "://" not in master:
        name = nearest(name, _MASTERS, cutoff=0.75)
    if name in _MASTERS:
        raise ConfigurationError(f"master: expected {_MASTERS[name]}. Received: {master!r}.")


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
