"""Paths of Databricks, which name the same file in two ways: as Spark does, and as a file of the machine.

``dbfs:/models/a`` is ``/dbfs/models/a`` for everything that opens files, and
``dbfs:/Volumes/c/s/v/a`` is ``/Volumes/c/s/v/a``. To Spark, ``/dbfs/models/a`` would be
the folder ``dbfs`` within DBFS. Both mounts take a file from its first byte to its last
and nothing else: no seeking back, no appending. What writes otherwise writes to a local
file first.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_SCHEME = re.compile(r"^dbfs:/*", re.IGNORECASE)
_DBFS, _VOLUMES = "/dbfs/", "/Volumes/"
# Catalog, schema and name.
_VOLUME_PARTS = 3
_RUNTIME = "DATABRICKS_RUNTIME_VERSION"


def local_form(path: str) -> str:
    """Returns the path by which files of a mount are opened; other paths and URLs stay as they are.

    >>> local_form("dbfs:/models/a"), local_form("dbfs:/Volumes/c/s/v/a"), local_form("s3://bucket/a")
    ('/dbfs/models/a', '/Volumes/c/s/v/a', 's3://bucket/a')
    """
    scheme = _SCHEME.match(path)
    if scheme is None:
        return path
    inner = "/" + path[scheme.end() :]
    return inner if inner.startswith(_VOLUMES) else _DBFS + inner[1:]


def spark_form(path: str) -> str:
    """Returns the path by which Spark finds a file of a mount; elsewhere than on Databricks, paths stay as they are."""
    if os.environ.get(_RUNTIME) and path.startswith(_DBFS):
        return "dbfs:/" + path.removeprefix(_DBFS).lstrip("/")
    return path


def is_mounted(path: str) -> bool:
    """Returns whether a path leads to a mount, which takes files only from their first byte to their last.

    >>> is_mounted("dbfs:/models/a"), is_mounted("/Volumes/c/s/v/a"), is_mounted("/data/a")
    (True, True, False)
    """
    return local_form(path).startswith((_DBFS, _VOLUMES))


def mounted_here(path: str) -> Path | None:
    """Returns where a file of a mount is on this machine; None for other paths, and where there is no such mount."""
    local = local_form(path)
    if local.startswith(_DBFS):
        return Path(local) if os.path.isdir(_DBFS) else None
    # /Volumes alone says nothing: every Mac has one. A volume is there, or is made elsewhere.
    volume = _VOLUMES + "/".join(local.removeprefix(_VOLUMES).split("/")[:_VOLUME_PARTS])
    return Path(local) if local.startswith(_VOLUMES) and os.path.isdir(volume) else None


def copy_in_order(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copies a file from its first byte to its last, and makes the folder that it goes to."""
    folder = os.path.dirname(os.fspath(target))
    if folder:
        os.makedirs(folder, exist_ok=True)
    # Not shutil.copyfile, which may leave the copying to the system.
    with open(source, "rb") as reading, open(target, "wb") as writing:
        shutil.copyfileobj(reading, writing, 2**20)
