"""Environment of processes that compute: backend, threads, GPUs, and where modules are found.

It is set before anything imports Keras.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from elephant.backends import GROWTH, VARIABLE, asked_for, backend_named, log_levels

# CUDA's: which GPUs a process sees, and by which numbers.
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
# A framework reads these when it looks for devices, which its import does not.
READ_LATE = (VISIBLE, ORDER, *GROWTH)
# Warnings of frameworks are left out.
_LOG_LEVEL = "2"

# Spark's archive of what PySpark talks to Java with, and its version.
_PY4J = re.compile(r"py4j-(.+)-src\.zip")


def process_environment(
    *, threads: int, devices: Sequence[str], backend: str | None, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the environment of a rank's process, set before anything imports Keras.

    Args:
        devices: GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; none hides all GPUs.
        backend: The Keras backend; None leaves it to Keras.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(_import_path()),
        "PYTHONUNBUFFERED": "1",
        **({} if backend is None else {VARIABLE: backend}),
        **device_environment(devices),
        **backend_named(backend or asked_for()).environment(threads),
        **_unless_set(log_levels(_LOG_LEVEL)),
        **(more or {}),
    }


def device_environment(devices: Sequence[str]) -> dict[str, str]:
    """Returns the part of the environment that tells of devices.

    Numbers of GPUs are nvidia-smi's, which CUDA by itself counts in another order.

    Args:
        devices: GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; none hides all GPUs.
    """
    if not devices:
        return {VISIBLE: "-1"}
    return {VISIBLE: ",".join(devices), **_unless_set({ORDER: "PCI_BUS_ID", **GROWTH})}


def _unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def _import_path() -> list[str]:
    """Returns the module path of a rank's process: that of this one, without archives that it can spare.

    Spark puts PySpark as an archive before what is installed. Imported from there all of it is compiled, which
    takes every process half a second as soon as its job has a function or a class of the user's main script.
    """
    return [place for place in sys.path if place and not _is_spare(place)]


def _is_spare(place: str) -> bool:
    """Returns whether a place is one of Spark's archives, and the very same version is installed."""
    name, pyspark = Path(place).name, sys.modules.get("pyspark")
    py4j = _PY4J.fullmatch(name)
    if py4j is not None:
        return _is_installed("py4j", py4j[1])
    in_use = name == "pyspark.zip" and pyspark is not None and str(pyspark.__file__).startswith(place)
    return in_use and _is_installed("pyspark", getattr(pyspark, "__version__", ""))


def _is_installed(distribution: str, version: str) -> bool:
    """Returns whether a package is installed in this version."""
    try:
        return importlib.metadata.version(distribution) == version
    except importlib.metadata.PackageNotFoundError:
        return False
