"""Files wherever users keep them: on this machine, on any file system that Spark reaches, or that fsspec knows.

A path without a scheme, or with ``file:``, that is read or written through a Spark session is the
session's business (its default file system may be HDFS); without one it is a file of this machine. Other
schemes go to the Hadoop client that Spark carries, and those it does not know, such as ``memory://``, to fsspec.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from pyspark.sql import SparkSession

from elephant.cluster.sessions import jvm_context
from elephant.errors import ConfigurationError
from elephant.spark import remote_files
from elephant.storage.filesystem import copy_in_order, mounted_here, spark_form

# One letter is a drive of Windows.
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):")


def write_file(session: SparkSession, path: str, content: bytes, *, overwrite: bool = False) -> None:
    """Writes one file; raises what the file system raises when it is there already.

    Args:
        session: The Spark session, classic or of Spark Connect.
        path: Any path that Spark takes: ``hdfs://``, ``s3a://``, ``dbfs:/``, ``file:/`` or without a scheme;
            or one that fsspec takes.
        content: All of it.
        overwrite: Whether to replace what is there.
    """
    path, context = spark_form(path), jvm_context(session)
    if not hadoop_knows(session, path):
        _write_with_fsspec(path, content, overwrite)
    elif context is None:
        _write_without_jvm(session, path, content, overwrite)
    else:
        with tempfile.TemporaryDirectory(prefix="elephant-save-") as folder:
            local = Path(folder) / "content"
            local.write_bytes(content)
            file_system, hadoop_path, local_path = _hadoop(context, path, local)
            file_system.copyFromLocalFile(False, overwrite, local_path, hadoop_path)


def read_file(session: SparkSession, path: str) -> bytes | None:
    """Returns the content of one file, or None when there is none."""
    path, context = spark_form(path), jvm_context(session)
    if not hadoop_knows(session, path):
        return _read_with_fsspec(path)
    if context is None:
        return remote_files.read(session, path)
    with tempfile.TemporaryDirectory(prefix="elephant-load-") as folder:
        local = Path(folder) / "content"
        file_system, hadoop_path, local_path = _hadoop(context, path, local)
        if not file_system.exists(hadoop_path):
            return None
        # The raw local file system leaves no checksum file beside the copy.
        file_system.copyToLocalFile(False, hadoop_path, local_path, True)
        return local.read_bytes()


def _write_without_jvm(session: SparkSession, path: str, content: bytes, overwrite: bool) -> None:
    mounted = mounted_here(path)
    if mounted is None:
        remote_files.write(session, path, content, overwrite=overwrite)
        return
    if not overwrite and mounted.exists():
        raise FileExistsError(f"expected no file at {path}. Received: a path where one is.")
    with tempfile.NamedTemporaryFile(prefix="elephant-save-") as local:
        local.write(content)
        local.flush()
        copy_in_order(local.name, mounted)


def write_model_bytes(path: str | os.PathLike[str], content: bytes, *, overwrite: bool = True) -> None:
    """Writes a model's file, without a Spark session where none is needed.

    Args:
        path: A path of this machine, where it has no scheme; or a URL of a file system that Hadoop or fsspec knows.
        content: All of it.
        overwrite: Whether to replace a file that is there.

    Raises:
        FileExistsError: The file is there, and is not to be replaced.
        FileNotFoundError: Its folder is not there.
        ConfigurationError: Nothing here knows the URL's scheme.
    """
    text, local = os.fspath(path), local_path(path)
    if not overwrite and read_model_bytes(path) is not None:
        raise FileExistsError(f"expected no file at {text}, or overwrite=True. Received: a path where one is.")
    session = running_session()
    if local is not None:
        if not local.parent.is_dir():
            raise FileNotFoundError(f"expected a folder {local.parent} for {local.name}. Received: none. Make it.")
        # First beside it, so that no half of a model takes the place of a whole one.
        unfinished = local.with_name(f".{local.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            unfinished.write_bytes(content)
            unfinished.replace(local)
        finally:
            unfinished.unlink(missing_ok=True)
    elif session is not None:
        write_file(session, text, content, overwrite=True)
    else:
        _write_with_fsspec(text, content, overwrite=True)


def read_model_bytes(path: str | os.PathLike[str]) -> bytes | None:
    """Returns the content of a model's file, or None when there is none; the path is one of `write_model_bytes`."""
    local = local_path(path)
    if local is not None:
        return local.read_bytes() if local.is_file() else None
    session = running_session()
    return _read_with_fsspec(os.fspath(path)) if session is None else read_file(session, os.fspath(path))


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Returns where a path is on this machine; None for a URL of another file system."""
    text = os.fspath(path)
    mounted, match = mounted_here(text), _SCHEME.match(text)
    if mounted is not None:
        return mounted
    if match is None:
        return Path(text).expanduser()
    return Path(unquote(urlparse(text).path)) if match[1] == "file" else None


def running_session() -> SparkSession | None:
    """Returns the session of this process, where Spark runs in it."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    try:
        from pyspark import SparkContext
    except ImportError:
        # A client of Spark Connect without the rest of Spark.
        return None
    context = SparkContext._active_spark_context
    return None if context is None else SparkSession(context)


def hadoop_knows(session: SparkSession, path: str) -> bool:
    """Returns whether Hadoop has a file system for a path's scheme."""
    match = _SCHEME.match(path)
    if match is None:
        return True
    context = jvm_context(session)
    if context is None:
        return remote_files.knows(session, path)
    from py4j.protocol import Py4JJavaError

    try:
        configuration = context._jsc.hadoopConfiguration()
        context._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(match[1], configuration)
    except Py4JJavaError as error:
        if "UnsupportedFileSystemException" in str(error.java_exception):
            return False
        raise
    return True


def _write_with_fsspec(path: str, content: bytes, overwrite: bool) -> None:
    file_system, inner = _fsspec(path)
    if not overwrite and file_system.exists(inner):
        raise FileExistsError(f"expected no file at {path}. Received: a path where one is.")
    parent = inner.rpartition("/")[0]
    if parent:
        file_system.makedirs(parent, exist_ok=True)
    file_system.pipe_file(inner, content)


def _read_with_fsspec(path: str) -> bytes | None:
    file_system, inner = _fsspec(path)
    return bytes(file_system.cat_file(inner)) if file_system.isfile(inner) else None


def _fsspec(path: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it."""
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise ConfigurationError(
            f"path: expected a file system that Spark knows. Received: {path!r}. Start the Spark session first, if it "
            "knows it; or pip install 'elephant-spark[fsspec]', which knows others."
        ) from error
    try:
        file_system, inner = core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(
            f"path: expected a file system that Spark or fsspec knows. Received: {path!r}: {error}"
        ) from error
    return file_system, str(inner)


def _hadoop(context: Any, path: str, local: Path) -> tuple[Any, Any, Any]:
    hadoop = context._jvm.org.apache.hadoop.fs
    target = hadoop.Path(path)
    return target.getFileSystem(context._jsc.hadoopConfiguration()), target, hadoop.Path(f"file://{local}")
