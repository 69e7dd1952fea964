"""Modules beside the main script or notebook, whose functions and classes travel as they are.

Executors do not have them. What the script itself defines travels by value anyway; so does, here, what it imports from
its own folder.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from pyspark import cloudpickle

from elephant.backends import BACKENDS

# Executors have these, wherever they lie here: by PYTHONPATH, or with Spark.
PLATFORM = {"elephant", "keras", "numpy", "py4j", "pyspark", *BACKENDS}
# Where pip and Debian install.
INSTALLED = {"site-packages", "dist-packages"}
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def sent_by_value() -> Iterator[bool]:
    """Has cloudpickle write functions and classes of these modules whole; yields whether there are such modules."""
    with _one_at_a_time:
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [module for name, module in beside_script().items() if name not in known]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield bool(modules)
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def beside_script() -> dict[str, ModuleType]:
    """Returns the modules and packages that were imported from the folder of the main script, by name."""
    folder, main = _script_folder(), sys.modules["__main__"]
    return {
        name: module
        for name, module in list(sys.modules.items())
        if "." not in name and module is not main and name not in PLATFORM and _folder_of(module) == folder
    }


def _script_folder() -> Path:
    """Returns the main script's folder; the working folder where a program is run, a notebook's say."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or INSTALLED & set(Path(path).resolve().parts):
        return Path.cwd()
    return Path(path).resolve().parent


def _folder_of(module: ModuleType) -> Path | None:
    """Returns the folder in which a module or package was found; None of one without a file."""
    path = getattr(module, "__file__", None)
    if not path:
        return None
    found = _resolved(path)
    return found.parent.parent if found.name == "__init__.py" else found.parent


@functools.cache
def _resolved(path: str) -> Path:
    """Returns a path without links. Each fit looks at all modules, and the disk takes its time."""
    return Path(path).resolve()
