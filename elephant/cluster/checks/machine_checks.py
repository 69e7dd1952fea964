"""Checks of the driver's machine: Python and its packages, Java, Spark's home, room, proxies and addresses."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from elephant.backends import BACKENDS, DEFAULT, asked_for
from elephant.cluster.checks.executor_checks import FLOOR_BYTES, SCARCE_BYTES, oldest_arrow
from elephant.cluster.checks.registry import (
    FAILURE,
    OK,
    WARNING,
    CheckResult,
    Phase,
    check,
    check_result,
    run_phase,
)
from elephant.cluster.checks.session_checks import TRAINING_PROCESS_MB
from elephant.cluster.local import ensure_java
from elephant.cluster.session import NEWEST_JAVA, minor, release
from elephant.errors import ClusterError

_PACKAGES = ("pyspark", "pandas", "pyarrow", "numpy", "keras")
_SPARK_CORE = re.compile(r"spark-core_[\d.]+-(\d[\w.]*)\.jar")

# What setup.py demands.
_OLDEST = {"keras": "3.12.4", "numpy": "1.23.5", "pyspark": "3.5"} | {
    name: backend.oldest for name, backend in BACKENDS.items()
}
# Newer ones that it does not take: they run code that a model's file brings.
_REFUSED = {"keras": ("3.13.*", "3.14.*", "3.15.0")}
_OLDEST_PANDAS = "1.5.3"
_FIRST_OF_WARNINGS_OF_PANDAS_3 = Version("4.2")


def find_java(spark_version: str) -> dict[str, Any]:
    """Makes a Java that Spark runs on ``JAVA_HOME`` of this process, and returns the facts of `check_java`."""
    maximum = NEWEST_JAVA.get(minor(spark_version))
    wanted = f"Java {maximum}" if maximum else "Java 17 or newer"
    try:
        java = ensure_java(maximum=maximum)
    except ClusterError as error:
        return {"wanted": wanted, "error": str(error), "version": None, "place": ""}
    return {"wanted": wanted, "error": "", "version": java.version, "place": f"{java.path} ({java.origin})"}


def package_versions() -> dict[str, str]:
    """Returns the versions of installed packages that a fit uses, by name; of TensorFlow whatever it is called."""
    names = {name: (name,) for name in _PACKAGES} | {name: one.packages for name, one in BACKENDS.items()}
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


def complaints_of_pyspark() -> dict[str, str]:
    """Returns PySpark's complaints about pandas and pyarrow; nothing about versions that it accepts."""
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


def memory_bytes() -> int | None:
    """Returns this machine's memory, or None when it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


@check(Phase.PACKAGES)
def check_driver_python(python: str, spark_version: str, *, has_distutils: bool) -> CheckResult:
    """Returns whether this Python runs elephant and this PySpark, of which 3.5 imports ``distutils``."""
    if release(python) < Version("3.10"):
        remedy = "Make the environment with Python 3.10 to 3.13."
        return check_result("Python here", FAILURE, expected="Python 3.10 or newer", received=python, remedy=remedy)
    return check_result(
        "Python here",
        has_distutils or not spark_version or release(spark_version) >= Version("4"),
        expected="Python with distutils, which PySpark 3.5 imports",
        received=python if has_distutils or release(spark_version) >= Version("4") else f"{python} without distutils",
        remedy="Run pip install setuptools.",
    )


@check(Phase.PACKAGES)
def check_packages(versions: Mapping[str, str], backend: str) -> list[CheckResult]:
    """Returns whether the driver's packages are there, and new enough."""
    wanted = ["pyspark", "keras", "numpy", "pyarrow"] + ([backend] if backend in _OLDEST else [])
    oldest = {**_OLDEST, "pyarrow": oldest_arrow(versions.get("pyspark", ""))}
    check_results = [_check_package(name, versions.get(name, ""), oldest[name]) for name in wanted]
    if backend not in BACKENDS:
        remedy = "Set KERAS_BACKEND to one of them, for driver and executors (spark.executorEnv.KERAS_BACKEND)."
        expected = f"one of {', '.join(BACKENDS)}"
        check_results.append(check_result("Keras backend", FAILURE, expected=expected, received=backend, remedy=remedy))
    return [*check_results, _check_pandas(versions.get("pandas", ""), versions.get("pyspark", ""))]


def _check_package(name: str, version: str, oldest: str) -> CheckResult:
    refused = _REFUSED.get(name, ())
    wanted = ",".join([f">={oldest}", *(f"!={one}" for one in refused)])
    remedy = f"Run pip install '{name}{wanted}'."
    return check_result(
        name,
        release(version) in SpecifierSet(wanted),
        expected=f"{name} {oldest} or newer" + (f", and none of {', '.join(refused)}" if refused else ""),
        received=version or "not installed",
        remedy="Run pip install 'elephant-spark[local]'." if name in ("pyspark", DEFAULT) else remedy,
    )


def _check_pandas(version: str, spark_version: str) -> CheckResult:
    expected = f"pandas {_OLDEST_PANDAS} to 2, which PySpark's conversions and predict_udf use"
    if release(version) >= Version("3") and release(spark_version) >= _FIRST_OF_WARNINGS_OF_PANDAS_3:
        expected = f"pandas 2, which PySpark {spark_version} recommends"
    return check_result(
        "pandas",
        Version(_OLDEST_PANDAS) <= release(version) < Version("3"),
        otherwise=WARNING,
        expected=expected,
        received=version or "not installed",
        remedy=f"Run pip install 'pandas>={_OLDEST_PANDAS},<3'.",
    )


@check(Phase.PACKAGES)
def check_minimums(complaints: Mapping[str, str]) -> list[CheckResult]:
    """Returns PySpark's own words on packages that it has a minimum for; nothing where it is content."""
    return [
        check_result(
            f"{name} for PySpark",
            not complaint,
            expected=f"a {name} that this PySpark accepts",
            received=complaint.rstrip(".") or "accepted",
            remedy=f"Install the version of {name} that it names, on the executors as well.",
        )
        for name, complaint in complaints.items()
    ]


@check(Phase.JAVA)
def check_java(error: str, version: int | None, place: str, *, wanted: str) -> CheckResult:
    """Returns whether there is a Java that this Spark runs on; ``wanted`` is such as ``Java 17 or newer``."""
    return check_result(
        "Java",
        not error,
        expected=f"{wanted} for Spark",
        received=error.rstrip(".") if error else f"{version} in {place}",
        remedy="Set JAVA_HOME to one, or run pip install 'elephant-spark[local]', which brings one.",
    )


@check(Phase.JAVA)
def check_spark_home(home: str, home_version: str, package_version: str, *, complete: bool) -> CheckResult:
    """Returns whether ``SPARK_HOME`` fits the PySpark that is imported, and has ``bin/spark-submit`` and ``jars``."""
    name, remedy = "SPARK_HOME", "Unset SPARK_HOME, or let it name the Spark whose version PySpark has."
    expected = f"a Spark {minor(package_version)} there, or no SPARK_HOME"
    if not home:
        return check_result(name, OK, expected=expected, received="not set: the Spark of the pyspark package")
    if not complete:
        received = f"{home}, without bin/spark-submit and jars"
        return check_result(name, FAILURE, expected=expected, received=received, remedy=remedy)
    same = not home_version or not package_version or minor(home_version) == minor(package_version)
    received = f"{home} ({home_version or 'version unknown'})"
    return check_result(name, same, expected=expected, received=received, remedy=remedy)


@check(Phase.JAVA, when=lambda facts: not facts["own"])
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


@check(Phase.MACHINE)
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


@check(Phase.MACHINE)
def check_proxies(variables: Mapping[str, str], *, remote: str) -> CheckResult:
    """Returns whether gRPC would go to a Spark Connect server through a proxy. Elephant's own sockets take none."""
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


@check(Phase.ADDRESS)
def check_address(host: str, addresses: Sequence[str], error: str, *, needed: bool = True) -> CheckResult:
    """Returns whether the driver has an address that it can tell executors."""
    return check_result(
        "driver's address",
        not error,
        otherwise=FAILURE if needed else WARNING,
        expected="an address of the driver that executors can be told",
        received=error.rstrip(".") if error else _described(host, *addresses),
        remedy="Set spark.driver.host to the address at which executors reach this machine.",
    )


@check(Phase.APPLICATION)
def check_machine(cores: int, memory_bytes: int | None, *, workers: int, local: bool) -> CheckResult:
    """Returns whether this machine carries the training processes of executors that are its own."""
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


def _described(host: str, advertised: str, listening: str) -> str:
    """Returns the driver's addresses, each once.

    >>> _described("driver", "10.0.0.1", "0.0.0.0"), _described("10.0.0.1", "10.0.0.1", "10.0.0.1")
    ('driver = 10.0.0.1, listening on 0.0.0.0', '10.0.0.1')
    """
    named = f"{host} = {advertised}" if host.strip("[]") not in ("", advertised) else advertised
    return named if listening == advertised else f"{named}, listening on {listening}"


def examine_packages() -> list[CheckResult]:
    """Returns whether Python and its packages fit each other."""
    versions = package_versions()
    spark = versions.get("pyspark", "")
    return run_phase(
        Phase.PACKAGES,
        python=platform.python_version(),
        spark_version=spark,
        has_distutils=has_distutils(),
        versions=versions,
        backend=asked_for(),
        complaints=complaints_of_pyspark() if spark else {},
    )


def examine_machine(*, remote: str) -> list[CheckResult]:
    """Returns whether the driver's machine has room, and no proxy is in the way of a Spark Connect server."""
    folder, writable, free = temporary_folder()
    return run_phase(
        Phase.MACHINE, folder=folder, writable=writable, free_bytes=free, variables=os.environ, remote=remote
    )


def examine_spark(*, master: str, own: bool) -> list[CheckResult]:
    """Returns whether Java, and what names Spark and its Python, are as PySpark needs them.

    Args:
        master: The Spark master; empty when it is not known yet.
        own: Whether the session will be one of `elephant.cluster.local.local_session`, whose executors run on
            the Python of this process.
    """
    spark = package_versions().get("pyspark", "")
    home, program = os.environ.get("SPARK_HOME", ""), os.environ.get("PYSPARK_PYTHON", "")
    complete, version = spark_at(home) if home else (False, "")
    return run_phase(
        Phase.JAVA,
        **find_java(spark),
        home=home,
        home_version=version,
        package_version=spark,
        complete=complete,
        own=own,
        value=program,
        found=shutil.which(program or "python3") or "",
        this=sys.executable,
        local=master.startswith("local"),
    )
