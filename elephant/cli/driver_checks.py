"""Checks of what is installed on the driver's machine. Plain facts go in, findings come out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from elephant.cluster.executor_checks import minor, oldest_arrow
from elephant.cluster.finding import FAILURE, OK, WARNING, Finding, finding

# What setup.py demands.
_OLDEST = {"keras": (3, 5), "numpy": (1, 26), "pyspark": (3, 5), "tensorflow": (2, 18)}
_FIRST_OF_WARNINGS_OF_PANDAS_3 = (4, 2)


def check_python(version: str, spark_version: str, *, has_distutils: bool) -> Finding:
    """Returns whether this Python runs elephant and this PySpark.

    Args:
        version: Of Python.
        spark_version: Of PySpark.
        has_distutils: Whether ``distutils`` can be imported, which PySpark 3.5 does.
    """
    if _numbers(version) < (3, 10):
        remedy = "Make the environment with Python 3.10 to 3.13."
        return finding("Python here", FAILURE, expected="Python 3.10 or newer", received=version, remedy=remedy)
    return finding(
        "Python here",
        has_distutils or not spark_version or _numbers(spark_version) >= (4,),
        expected="Python with distutils, which PySpark 3.5 imports",
        received=version if has_distutils or _numbers(spark_version) >= (4,) else f"{version} without distutils",
        remedy="Run pip install setuptools.",
    )


def check_packages(versions: Mapping[str, str], backend: str, *, alone: bool = False) -> list[Finding]:
    """Returns whether the driver's packages are there, and new enough.

    Args:
        versions: Of installed packages, by name; one that is missing is not installed.
        backend: The Keras backend that is asked for.
        alone: Whether the fit has one worker, which trains with any backend.
    """
    wanted = ["pyspark", "keras", "numpy", "pyarrow"] + ([backend] if backend in _OLDEST else [])
    oldest = {**_OLDEST, "pyarrow": (oldest_arrow(versions.get("pyspark", "")),)}
    findings = [_check_package(name, versions.get(name, ""), oldest[name]) for name in wanted]
    if backend != "tensorflow":
        remedy = "Set KERAS_BACKEND=tensorflow, for the driver and for the executors (spark.executorEnv.KERAS_BACKEND)."
        expected = "tensorflow, with which more than one worker trains"
        there = bool(versions.get(backend))
        status, received = (WARNING if alone and there else FAILURE), backend + ("" if there else ", not installed")
        findings.append(finding("Keras backend", status, expected=expected, received=received, remedy=remedy))
    return [*findings, _check_pandas(versions.get("pandas", ""), versions.get("pyspark", ""))]


def _check_package(name: str, version: str, first: tuple[int, ...]) -> Finding:
    oldest = ".".join(str(number) for number in first)
    remedy = f"Run pip install '{name}>={oldest}'."
    return finding(
        name,
        bool(version) and _numbers(version) >= first,
        expected=f"{name} {oldest} or newer",
        received=version or "not installed",
        remedy="Run pip install 'elephant-spark[local]'." if name in ("pyspark", "tensorflow") else remedy,
    )


def _check_pandas(version: str, spark_version: str) -> Finding:
    expected = "pandas 2, which PySpark's conversions and predict_udf use"
    if version and _numbers(version) >= (3,) and _numbers(spark_version) >= _FIRST_OF_WARNINGS_OF_PANDAS_3:
        expected = f"pandas 2, which PySpark {spark_version} recommends"
    return finding(
        "pandas",
        (2,) <= _numbers(version) < (3,),
        otherwise=WARNING,
        expected=expected,
        received=version or "not installed",
        remedy="Run pip install 'pandas>=2,<3'.",
    )


def check_minimum(name: str, complaint: str) -> Finding:
    """Returns what PySpark itself says of a package that it has a minimum for.

    Args:
        name: The package.
        complaint: What PySpark raises; empty when it is content.
    """
    return finding(
        f"{name} for PySpark",
        not complaint,
        expected=f"a {name} that this PySpark accepts",
        received=complaint.rstrip(".") or "accepted",
        remedy=f"Install the version of {name} that it names, on the executors as well.",
    )


def check_java(error: str, version: int | None, place: str, *, wanted: str) -> Finding:
    """Returns whether there is a Java that this Spark runs on.

    Args:
        error: Why none was found; empty when one was.
        version: Its feature version.
        place: Where it is.
        wanted: What is expected, such as ``Java 17 or newer``.
    """
    return finding(
        "Java",
        not error,
        expected=f"{wanted} for Spark",
        received=error.rstrip(".") if error else f"{version} in {place}",
        remedy="Set JAVA_HOME to one, or run pip install 'elephant-spark[local]', which brings one.",
    )


def check_spark_home(home: str, version: str, package_version: str, *, complete: bool) -> Finding:
    """Returns whether ``SPARK_HOME`` fits the PySpark that is imported.

    Args:
        home: What it is set to; empty when it is not.
        version: Of the Spark there; empty when it cannot be told.
        package_version: Of PySpark.
        complete: Whether ``bin/spark-submit`` and ``jars`` are there.
    """
    name, remedy = "SPARK_HOME", "Unset SPARK_HOME, or let it name the Spark whose version PySpark has."
    expected = f"a Spark {minor(package_version)} there, or no SPARK_HOME"
    if not home:
        return finding(name, OK, expected=expected, received="not set: the Spark of the pyspark package")
    if not complete:
        received = f"{home}, without bin/spark-submit and jars"
        return finding(name, FAILURE, expected=expected, received=received, remedy=remedy)
    same = not version or not package_version or minor(version) == minor(package_version)
    return finding(name, same, expected=expected, received=f"{home} ({version or 'version unknown'})", remedy=remedy)


def check_python_program(value: str, found: str, this: str, *, local: bool) -> Finding:
    """Returns whether the Python of the executors is there, as far as this machine can tell.

    Args:
        value: What ``PYSPARK_PYTHON`` is set to; empty when it is not, and executors take ``python3``.
        found: The program behind it on this machine; empty when there is none.
        this: The Python that this process runs on.
        local: Whether executors run on this machine.
    """
    named = value or "not set: python3"
    if not local:
        received = f"{named}, which each executor looks for"
        return finding("PYSPARK_PYTHON", OK, expected="a program that executors have", received=received)
    return finding(
        "PYSPARK_PYTHON",
        FAILURE if not found else OK if found == this else WARNING,
        expected=f"the Python of this process, {this}",
        received=f"{named}, which is {found or 'not on this machine'}",
        remedy=f"Set PYSPARK_PYTHON={this}, unless the other one has the same packages.",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, to compare.

    >>> _numbers("4.0.0.dev1"), _numbers("")
    ((4, 0, 0), ())
    """
    numbers = []
    for part in version.split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        numbers.append(int(digits[0]))
    return tuple(numbers)
