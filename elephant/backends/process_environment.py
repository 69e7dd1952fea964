"""Environment of a process that computes: its backend, its devices, its threads and its module path."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from elephant.backends import DEFAULT, backend_named

# Spark's archive of what PySpark talks to Java with, and its version.
_PY4J = re.compile(r"py4j-(.+)-src\.zip")
# Frameworks would take all memory of a GPU at once, and leave none for what else is to run on it.
_GROWING = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


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
        **({} if backend is None else {"KERAS_BACKEND": backend}),
        **device_environment(devices),
        **backend_named(backend or os.environ.get("KERAS_BACKEND", DEFAULT)).environment(threads),
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        **(more or {}),
    }


def device_environment(devices: Sequence[str]) -> dict[str, str]:
    """Returns the part of the environment that tells of devices.

    Numbers of GPUs are nvidia-smi's, which CUDA by itself counts in another order.

    Args:
        devices: GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; none hides all GPUs.
    """
    if not devices:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    chosen = {name: os.environ.get(name, value) for name, value in _GROWING.items()}
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices), "CUDA_DEVICE_ORDER": order, **chosen}


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
