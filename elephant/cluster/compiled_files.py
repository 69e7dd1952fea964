"""Compiled Python files of an executor's processes, where they would be kept nowhere.

Images of containers often come without compiled files of their packages, and have none written: by
``PYTHONDONTWRITEBYTECODE``, or because the packages are read-only. Each process then compiles Keras and its backend
again, which takes as long as the import itself, or longer. Here they get a folder of their own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from elephant.backends import asked_for
from elephant.rank.executor import executor_above
from elephant.storage.filesystem import local_folder, private_folder, require_safe_library

PREFIX, UNWRITTEN = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"
FOLDER = "pycache"


def compiled_files(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that have a process keep its compiled files with this executor; none where it need not.

    They lie in Spark's local folder, which Spark removes with the executor. Python runs what it finds there: the
    folder is this user's alone, or is not used.

    Args:
        environment: Of the process, without them. A folder that it names stays.
    """
    if environment.get(PREFIX) or executor_above(os.getpid()) is None or not _are_lost(environment):
        return {}
    place = local_folder()
    if place not in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        # Nobody would remove them from the system's folder.
        return {}
    try:
        folder = private_folder(Path(place).absolute() / FOLDER)
        require_safe_library(folder)
    except OSError:
        return {}
    # Python takes an empty variable for none.
    return {PREFIX: str(folder), **({UNWRITTEN: ""} if UNWRITTEN in environment else {})}


def _are_lost(environment: Mapping[str, str]) -> bool:
    """Returns whether the files of the backend, which are most, are not there and would not be written."""
    try:
        found = importlib.util.find_spec(asked_for(environment))
        if found is None or found.origin is None:
            return False
        compiled = Path(importlib.util.cache_from_source(found.origin))
    except (ImportError, ValueError, NotImplementedError):
        # A module that no file is known of.
        return False
    folder = next(place for place in compiled.parents if place.is_dir())
    return not compiled.exists() and (bool(environment.get(UNWRITTEN)) or not os.access(folder, os.W_OK))
