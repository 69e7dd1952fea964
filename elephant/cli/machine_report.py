"""Checks of the driver's machine for elephant doctor."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from elephant.cli.setting_checks import check_proxies, check_temporary_folder
from elephant.cluster.checks.checks import oldest_arrow
from elephant.cluster.checks.executor_facts import BACKENDS
from elephant.cluster.checks.result import FAILURE, OK, WARNING, CheckResult, check_result
from elephant.cluster.java import ensure_java
from elephant.cluster.session import NEWEST_JAVA, minor, release
from elephant.errors import ClusterError

_PACKAGES = ("pyspark", "pandas", "pyarrow", "numpy", "keras")
_SPARK_CORE = re.compile(r"spark-core_[\d.]+-(\d[\w.]*)\.jar")

# What setup.py demands.
_OLDEST = {"keras": "3.5", "numpy": "1.26", "pyspark": "3.5", "tensorflow": "2.18"}
_FIRST_OF_WARNINGS_OF_PANDAS_3 = Version("4.2")


@dataclass(frozen=True, kw_only=True)
class JavaFacts:
    """What the search for Java came to.

    Args:
        wanted: What this Spark needs.
        version: The feature version of what was found; None when nothing was.
        place: Where it was found.
        error: Why nothing was.
    """

    wanted: str
    version: int | None = None
    place: str = ""
    error: str = ""


def find_java(spark_version: str) -> JavaFacts:
    """Looks for a Java that Spark runs on, and makes it ``JAVA_HOME`` of this process, as sessions need it."""
    maximum = NEWEST_JAVA.get(minor(spark_version))
    wanted = f"Java {maximum}" if maximum else "Java 17 or newer"
    try:
        java = ensure_java(maximum=maximum)
    except ClusterError as error:
        return JavaFacts(wanted=wanted, error=str(error))
    return JavaFacts(wanted=wanted, version=java.version, place=f"{java.path} ({java.origin})")


def package_versions() -> dict[str, str]:
    """Returns the versions of installed packages that a fit uses, by name; of TensorFlow whatever it is called."""
    names = {name: (name,) for name in _PACKAGES} | BACKENDS
    versions = {name: _first_version(distributions) for name, distributions in names.items()}
    return {name: version for name, version in versions.items() if version}


def _first_version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def has_distutils() -> bool:
    """Returns whether ``distutils`` can be imported; setuptools brings it where Python has it no more."""
    return any(importlib.util.find_spec(name) is not None for name in ("distutils", "setuptools"))


def keras_backend() -> str:
    """Returns the Keras backend that is asked for, as Keras looks for it, without importing it."""
    named = os.environ.get("KERAS_BACKEND")
    if named:
        return named
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return str(json.loads((home / "keras.json").read_text(encoding="utf-8")).get("backend") or "tensorflow")
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


def complaints_of_pyspark() -> dict[str, str]:
    """Returns what PySpark says of pandas and pyarrow where it has a minimum; nothing of those it accepts."""
    from pyspark.sql.pandas import utils

    checks: Mapping[str, Callable[[], None]] = {
        "pandas": utils.require_minimum_pandas_version,
        "pyarrow": utils.require_minimum_pyarrow_version,
    }
    return {name: _complaint(check) for name, check in checks.items()}


def _complaint(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        return str(error)
    return ""


def spark_at(home: str) -> tuple[bool, str]:
    """Returns whether a folder holds Spark, and its version; empty when it cannot be told."""
    folder = Path(home)
    complete = (folder / "bin" / "spark-submit").exists() and (folder / "jars").is_dir()
    with contextlib.suppress(OSError):
        for jar in (folder / "jars").iterdir():
            version = _SPARK_CORE.fullmatch(jar.name)
            if version is not None:
                return complete, version[1]
    return complete, ""


def temporary_folder() -> tuple[str, bool, int]:
    """Returns the folder for temporary files, whether a file can be written there, and its free bytes."""
    try:
        folder = tempfile.gettempdir()
    except OSError:
        # Python has tried all that it knows.
        return os.environ.get("TMPDIR", "/tmp"), False, 0
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="elephant-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError:
        return folder, False, shutil.disk_usage(folder).free
    return folder, True, shutil.disk_usage(folder).free


def processors() -> int:
    """Returns how many processors this machine has."""
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Returns this machine's memory, or None when it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def descriptor_limit() -> int:
    """Returns how many files and sockets this process may open; -1 when there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def shared_memory_bytes() -> int | None:
    """Returns what is free in /dev/shm; None where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def python_version() -> str:
    """Returns this Python's version."""
    return platform.python_version()


def this_python() -> str:
    """Returns the program that this process runs on."""
    return sys.executable


def program_of(name: str) -> str:
    """Returns the program behind a name on this machine; empty when there is none.

    Args:
        name: What ``PYSPARK_PYTHON`` is set to.
    """
    return shutil.which(name) or ""


def check_python(version: str, spark_version: str, *, has_distutils: bool) -> CheckResult:
    """Returns whether this Python runs elephant and this PySpark.

    Args:
        has_distutils: Whether ``distutils`` can be imported, which PySpark 3.5 does.
    """
    if release(version) < Version("3.10"):
        remedy = "Make the environment with Python 3.10 to 3.13."
        return check_result("Python here", FAILURE, expected="Python 3.10 or newer", received=version, remedy=remedy)
    return check_result(
        "Python here",
        has_distutils or not spark_version or release(spark_version) >= Version("4"),
        expected="Python with distutils, which PySpark 3.5 imports",
        received=version if has_distutils or release(spark_version) >= Version("4") else f"{version} without distutils",
        remedy="Run pip install setuptools.",
    )


def check_packages(versions: Mapping[str, str], backend: str, *, alone: bool = False) -> list[CheckResult]:
    """Returns whether the driver's packages are there, and new enough."""
    wanted = ["pyspark", "keras", "numpy", "pyarrow"] + ([backend] if backend in _OLDEST else [])
    oldest = {**_OLDEST, "pyarrow": str(oldest_arrow(versions.get("pyspark", "")))}
    check_results = [_check_package(name, versions.get(name, ""), oldest[name]) for name in wanted]
    if backend != "tensorflow":
        remedy = "Set KERAS_BACKEND=tensorflow, for the driver and for the executors (spark.executorEnv.KERAS_BACKEND)."
        expected = "tensorflow, with which more than one worker trains"
        there = bool(versions.get(backend))
        status, received = (WARNING if alone and there else FAILURE), backend + ("" if there else ", not installed")
        check_results.append(check_result("Keras backend", status, expected=expected, received=received, remedy=remedy))
    return [*check_results, _check_pandas(versions.get("pandas", ""), versions.get("pyspark", ""))]


def _check_package(name: str, version: str, oldest: str) -> CheckResult:
    remedy = f"Run pip install '{name}>={oldest}'."
    return check_result(
        name,
        release(version) >= Version(oldest),
        expected=f"{name} {oldest} or newer",
        received=version or "not installed",
        remedy="Run pip install 'elephant-spark[local]'." if name in ("pyspark", "tensorflow") else remedy,
    )


def _check_pandas(version: str, spark_version: str) -> CheckResult:
    expected = "pandas 2, which PySpark's conversions and predict_udf use"
    if release(version) >= Version("3") and release(spark_version) >= _FIRST_OF_WARNINGS_OF_PANDAS_3:
        expected = f"pandas 2, which PySpark {spark_version} recommends"
    return check_result(
        "pandas",
        Version("2") <= release(version) < Version("3"),
        otherwise=WARNING,
        expected=expected,
        received=version or "not installed",
        remedy="Run pip install 'pandas>=2,<3'.",
    )


def check_minimum(name: str, complaint: str) -> CheckResult:
    """Returns what PySpark itself says of a package that it has a minimum for.

    Args:
        complaint: What PySpark raises; empty when it is content.
    """
    return check_result(
        f"{name} for PySpark",
        not complaint,
        expected=f"a {name} that this PySpark accepts",
        received=complaint.rstrip(".") or "accepted",
        remedy=f"Install the version of {name} that it names, on the executors as well.",
    )


def check_java(error: str, version: int | None, place: str, *, wanted: str) -> CheckResult:
    """Returns whether there is a Java that this Spark runs on.

    Args:
        error: Why none was found; empty when one was.
        wanted: What is expected, such as ``Java 17 or newer``.
    """
    return check_result(
        "Java",
        not error,
        expected=f"{wanted} for Spark",
        received=error.rstrip(".") if error else f"{version} in {place}",
        remedy="Set JAVA_HOME to one, or run pip install 'elephant-spark[local]', which brings one.",
    )


def check_spark_home(home: str, version: str, package_version: str, *, complete: bool) -> CheckResult:
    """Returns whether ``SPARK_HOME`` fits the PySpark that is imported.

    Args:
        home: What it is set to; empty when it is not.
        version: Of the Spark there; empty when it cannot be told.
        complete: Whether ``bin/spark-submit`` and ``jars`` are there.
    """
    name, remedy = "SPARK_HOME", "Unset SPARK_HOME, or let it name the Spark whose version PySpark has."
    expected = f"a Spark {minor(package_version)} there, or no SPARK_HOME"
    if not home:
        return check_result(name, OK, expected=expected, received="not set: the Spark of the pyspark package")
    if not complete:
        received = f"{home}, without bin/spark-submit and jars"
        return check_result(name, FAILURE, expected=expected, received=received, remedy=remedy)
    same = not version or not package_version or minor(version) == minor(package_version)
    return check_result(
        name, same, expected=expected, received=f"{home} ({version or 'version unknown'})", remedy=remedy
    )


def check_python_program(value: str, found: str, this: str, *, local: bool) -> CheckResult:
    """Returns whether the Python of the executors is there, as far as this machine can tell.

    Args:
        value: What ``PYSPARK_PYTHON`` is set to; empty when it is not, and executors take ``python3``.
        found: The program behind it on this machine; empty when there is none.
    """
    named = value or "not set: python3"
    if not local:
        received = f"{named}, which each executor looks for"
        return check_result("PYSPARK_PYTHON", OK, expected="a program that executors have", received=received)
    return check_result(
        "PYSPARK_PYTHON",
        FAILURE if not found else OK if found == this else WARNING,
        expected=f"the Python of this process, {this}",
        received=f"{named}, which is {found or 'not on this machine'}",
        remedy=f"Set PYSPARK_PYTHON={this}, unless the other one has the same packages.",
    )


def examine_packages(*, alone: bool = False) -> list[CheckResult]:
    """Returns whether Python and its packages fit each other."""
    versions = package_versions()
    spark = versions.get("pyspark", "")
    check_results = [check_python(python_version(), spark, has_distutils=has_distutils())]
    check_results += check_packages(versions, keras_backend(), alone=alone)
    if spark:
        check_results += [check_minimum(name, complaint) for name, complaint in complaints_of_pyspark().items()]
    return check_results


def examine_spark(*, master: str, own: bool) -> list[CheckResult]:
    """Returns whether Java, and what names Spark and its Python, are as PySpark needs them.

    Args:
        master: The Spark master; empty when it is not known yet.
        own: Whether the session will be one of `elephant.cluster.local.local_session`, whose executors run on
            the Python of this process.
    """
    spark = package_versions().get("pyspark", "")
    java = find_java(spark)
    home, program = os.environ.get("SPARK_HOME", ""), os.environ.get("PYSPARK_PYTHON", "")
    complete, version = spark_at(home) if home else (False, "")
    check_results = [
        check_java(java.error, java.version, java.place, wanted=java.wanted),
        check_spark_home(home, version, spark, complete=complete),
    ]
    if own:
        return check_results
    found, local = program_of(program or "python3"), master.startswith("local")
    return [*check_results, check_python_program(program, found, this_python(), local=local)]


def examine_machine(*, remote: str) -> list[CheckResult]:
    """Returns whether the driver's machine has room, and no proxy is in the way.

    Args:
        remote: The Spark Connect server; empty without one.
    """
    folder, writable, free = temporary_folder()
    return [
        check_temporary_folder(folder, writable=writable, free_bytes=free),
        check_proxies(os.environ, remote=remote),
    ]
