"""Facts of the driver's machine, for the checks: what is installed, what is set, what there is room for."""

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

from elephant.cluster.executor_facts import BACKENDS
from elephant.cluster.java import ensure_java
from elephant.errors import ClusterError

_PACKAGES = ("pyspark", "pandas", "pyarrow", "numpy", "keras")
_SPARK_CORE = re.compile(r"spark-core_[\d.]+-(\d[\w.]*)\.jar")


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
    """Looks for a Java that Spark runs on, and makes it ``JAVA_HOME`` of this process, as sessions need it.

    Args:
        spark_version: Of PySpark.
    """
    # PySpark 3.5 breaks on newer ones wherever Arrow is used.
    maximum = 17 if spark_version.startswith("3.") else None
    wanted = "Java 17" if maximum else "Java 17 or newer"
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
    """Returns whether a folder holds Spark, and its version; empty when it cannot be told.

    Args:
        home: The folder.
    """
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
