"""File systems by URL: pyarrow's, fsspec's, the mounts of this machine, and its scratch space.

``dbfs:/models/a`` is ``/dbfs/models/a`` for everything that opens files, and
``dbfs:/Volumes/c/s/v/a`` is ``/Volumes/c/s/v/a``. To Spark, ``/dbfs/models/a`` would be
the folder ``dbfs`` within DBFS. Both mounts take a file from its first byte to its last
and nothing else: no seeking back, no appending. What writes otherwise writes to a local
file first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elephant.errors import ClusterError, ConfigurationError, DataError

# Set for the process of a rank: its own folder, which its Spark task removes, however the process ends.
WORK_FOLDER = "ELEPHANT_WORK_FOLDER"
# Words of the error of a full disk.
NO_ROOM = "expected room on the local disk"
# No room, a quota that is used up, a file that may not grow.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_DBFS_URL = re.compile(r"^dbfs:/*", re.IGNORECASE)
_DBFS, _VOLUMES = "/dbfs/", "/Volumes/"
# Catalog, schema and name.
_VOLUME_PARTS = 3
_RUNTIME = "DATABRICKS_RUNTIME_VERSION"
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_ROOT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(//[^/]*|(?=/))")
# Hadoop's names of what Arrow calls otherwise.
_ALIASES = {"s3a": "s3", "s3n": "s3"}
_CREDENTIALS = (
    "Credentials come from the environment, the files or the role of the host (AWS_ACCESS_KEY_ID, ~/.aws), not from "
    "Spark's settings."
)


def local_folder() -> str:
    """Returns the folder for temporary data of this executor: Spark's own, which Spark cleans, or the system's."""
    for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if folder and os.access(folder, os.W_OK):
            return folder
    return tempfile.gettempdir()


def scratch_folder() -> str | None:
    """Returns the folder for temporary files of this process; None leaves that to the system.

    A rank whose work folder is gone is about to end, and would leave behind what it put elsewhere.
    """
    return os.environ.get(WORK_FOLDER) or None


def private_folder(path: Path) -> Path:
    """Makes a folder that nobody but this user can enter, where there is none; returns it.

    Raises:
        OSError: It cannot be made, or is somebody else's.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    known = path.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.geteuid() or known.st_mode & 0o077:
        raise PermissionError(f"expected {path} to be a folder of this user alone")
    return path


def require_safe_library(path: Path) -> None:
    """Raises PermissionError for code that every user of this machine could replace, or a folder above it.

    Args:
        path: Of the library, or the folder of code, absolute.
    """
    for place in (path, *path.parents):
        mode = place.stat().st_mode
        # In a sticky folder, as /tmp is, nobody replaces what is another user's.
        is_sticky = stat.S_ISDIR(mode) and bool(mode & stat.S_ISVTX)
        if mode & stat.S_IWOTH and not is_sticky:
            raise PermissionError(f"{place} can be written to by every user: take that away (chmod o-w)")


def is_full(error: OSError) -> bool:
    """Returns whether writing failed because there is no room."""
    return error.errno in _NO_ROOM


def disk_full(folder: Path, *, written: int, wanted: int) -> ClusterError:
    """Returns the error of rows for which a disk has no room."""
    free = shutil.disk_usage(folder.parent).free
    return ClusterError(
        f"{folder.parent}: {NO_ROOM} for this worker's rows. Received: a full disk after "
        f"{_megabytes(written)} of rows; the next {_megabytes(wanted)} did not fit ({_megabytes(free)} are free "
        "without them). Let spark.local.dir (or SPARK_LOCAL_DIRS) name a larger disk, free some room there, or use "
        "more workers on more hosts."
    )


def _megabytes(count: int) -> str:
    """Returns a number of bytes for a message.

    >>> _megabytes(1_234_567_890)
    '1,234.6 MB'
    """
    return f"{count / 1e6:,.1f} MB"


def local_form(path: str) -> str:
    """Returns the path by which files of a mount are opened; other paths and URLs stay as they are.

    >>> local_form("dbfs:/models/a"), local_form("dbfs:/Volumes/c/s/v/a"), local_form("s3://bucket/a")
    ('/dbfs/models/a', '/Volumes/c/s/v/a', 's3://bucket/a')
    """
    scheme = _DBFS_URL.match(path)
    if scheme is None:
        return path
    inner = "/" + path[len(scheme[0]) :]
    return inner if inner.startswith(_VOLUMES) else _DBFS + inner[1:]


def spark_form(path: str) -> str:
    """Returns the path by which Spark finds a file of a mount; elsewhere than on Databricks, paths stay as they are."""
    if os.environ.get(_RUNTIME) and f"{path}/".startswith(_DBFS):
        return "dbfs:/" + path[len(_DBFS) :].lstrip("/")
    return path


def is_mounted(path: str) -> bool:
    """Returns whether a path leads to a mount, which takes files only from their first byte to their last.

    >>> is_mounted("dbfs:/models/a"), is_mounted("/Volumes/c/s/v/a"), is_mounted("/data/a")
    (True, True, False)
    """
    return f"{local_form(path)}/".startswith((_DBFS, _VOLUMES))


def url_root(path: str) -> str:
    """Returns scheme and host of a URL; nothing for a path. One letter is a drive of Windows, a name may have a colon.

    >>> url_root("s3://bucket/a"), url_root("hdfs:/data/a"), url_root("run:1"), url_root("C:/data")
    ('s3://bucket', 'hdfs:', '', '')
    """
    match = _ROOT.match(path)
    return "" if match is None else match[0]


def mounted_here(path: str) -> Path | None:
    """Returns the place of a mount's file on this machine; None for other paths, and where there is no such mount."""
    local = local_form(path)
    if f"{local}/".startswith(_DBFS):
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


@dataclass(frozen=True)
class Found:
    """One file."""

    path: str  # as its file system calls it
    size: int  # bytes
    modified_ns: int | None  # when it was last written, in ns since 1970; None when the file system does not tell


def absolute(path: str) -> str:
    """Returns a path of this host as an absolute one, and a URL as it is.

    >>> absolute("s3://bucket/rows"), absolute("/data/../rows")
    ('s3://bucket/rows', '/rows')
    """
    path = local_form(path)
    scheme = _SCHEME.match(path)
    # A name may have a colon in it.
    is_url = scheme is not None and not (scheme[2] is None and os.path.exists(path))
    return path if is_url else os.path.abspath(os.path.expanduser(path))


def open_file_system(url: str) -> tuple[Any, str]:
    """Returns the file system of an absolute path or URL, and the path in it.

    Raises:
        ConfigurationError: No file system is known for it.
    """
    from pyarrow import ArrowInvalid
    from pyarrow import fs as arrow_fs

    scheme = _SCHEME.match(url)
    if scheme is None:
        return arrow_fs.LocalFileSystem(), url
    name = scheme[1].lower()
    if name == "file":
        return arrow_fs.LocalFileSystem(), "/" + re.sub(r"^file:/*", "", url, flags=re.IGNORECASE)
    try:
        system, path = arrow_fs.FileSystem.from_uri(_ALIASES.get(name, name) + url[len(scheme[1]) :])
        return system, path
    except (ArrowInvalid, NotImplementedError, OSError) as error:
        return _through_fsspec(url, error)


def _through_fsspec(url: str, cause: Exception) -> tuple[Any, str]:
    from pyarrow import fs as arrow_fs

    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"path: expected a path or URL that pyarrow or fsspec opens. Received: {url!r}: {cause}; {error}. "
            "Install fsspec and its package for this kind of URL, on the driver and the executors."
        ) from error
    return arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(system)), str(path)


def list_files(url: str) -> tuple[str, list[Found]]:
    """Returns the path in its file system, and all files below it that hold data, sorted by their paths.

    Names that begin with ``_`` or ``.`` are left out, as Spark leaves them out.

    Raises:
        ConfigurationError: There is nothing there, or nothing that this process may read.
    """
    from pyarrow import fs as arrow_fs

    system, root = open_file_system(url)
    with _readable(url):
        about = system.get_file_info(root)
    if about.type == arrow_fs.FileType.NotFound:
        raise ConfigurationError(f"path: expected a file or a folder. Received: {url!r}, where there is none.")
    if about.type == arrow_fs.FileType.File:
        return root, [_found(about)]
    root = root.rstrip("/") or "/"
    with _readable(url):
        below = system.get_file_info(arrow_fs.FileSelector(root, recursive=True))
    files = [_found(info) for info in below if info.type == arrow_fs.FileType.File and info.size]
    return root, sorted((file for file in files if not is_hidden(file.path[len(root) :])), key=lambda file: file.path)


@contextlib.contextmanager
def _readable(url: str) -> Iterator[None]:
    """Turns a file system's refusal into an error that says where credentials come from."""
    try:
        yield
    except OSError as error:
        remedy = _CREDENTIALS if url_root(url) else "See who may read it."
        raise ConfigurationError(
            f"path: expected a path that this process may read. Received: {url!r}: {error}. {remedy}"
        ) from error


def is_hidden(path: str) -> bool:
    """Returns whether a path below a folder is none of its data.

    >>> is_hidden("/part-0.parquet"), is_hidden("/_delta_log/0.json"), is_hidden("/_day=3/part-0.parquet")
    (False, True, False)
    """
    parts = path.strip("/").split("/")
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts)


def has_folder(url: str, name: str) -> bool:
    """Returns whether a folder has another one of a name."""
    from pyarrow import fs as arrow_fs

    system, root = open_file_system(url)
    with _readable(url):
        about = system.get_file_info(f"{root.rstrip('/')}/{name}")
    return bool(about.type == arrow_fs.FileType.Directory)


def find_file(system: Any, path: str) -> Found | None:
    """Returns the facts of a file now; None when it is not there."""
    from pyarrow import fs as arrow_fs

    info = system.get_file_info(path)
    return _found(info) if info.type == arrow_fs.FileType.File else None


def refuse_other_file(system: Any, file: Found) -> None:
    """Raises DataError when a file is no longer what it was, was never here, or may not be read here."""
    try:
        now = find_file(system, file.path)
    except OSError as error:
        raise DataError(
            f"{file.path}: expected a file that this host may read, which the driver has listed. Received: {error}. "
            f"{_CREDENTIALS} Executors do not have the driver's: set theirs (spark.executorEnv.AWS_ACCESS_KEY_ID), "
            "give their hosts a role, or pass a DataFrame, whose rows Spark reads."
        ) from error
    if now is None:
        raise DataError(
            f"{file.path}: expected the file that the driver has seen. Received: no such file on this executor. "
            "Files must be where every executor reads them, under the same path, and stay until they are read."
        )
    if now != file:
        raise DataError(
            f"{file.path}: expected the {file.size:,} bytes that the driver has seen. Received: {now.size:,} bytes, "
            "written since. Files must not change after they are listed: write to a new path, or call "
            "fit, transform or what it was once more. Copies on several hosts need one time: make them with cp -p or "
            "rsync -t."
        )


def _found(info: Any) -> Found:
    modified = None if info.mtime is None else int(info.mtime_ns)
    return Found(path=str(info.path), size=int(info.size or 0), modified_ns=modified)
