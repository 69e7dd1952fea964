"""Files by Hadoop: single files, checkpoint folders, and copies on the driver.

Reading is Spark's: it reads any file as rows of bytes. Writing is what it has no way for
that keeps a file's name, but for ``copyFromLocalToFs``, which takes paths without a scheme
and refuses a local file system. What that does not take, one task of a small job writes, with the
file systems that the executors' Python knows.

A path without a scheme, or with ``file:``, that is read or written through a Spark session is the
session's business (its default file system may be HDFS); without one it is a file of this machine. Other
schemes go to the Hadoop client that Spark carries, and those it does not know, such as ``memory://``, to pyarrow
and fsspec.

Executors share no disk with the driver in general, and have no Hadoop client in Python: what rank 0 has
comes to the driver over the channel, and goes from there wherever Spark writes its own files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlparse

from elephant.cluster.session import is_remote, jvm_context
from elephant.cluster.spark_job import SparkWords
from elephant.errors import ConfigurationError
from elephant.storage.filesystem import absolute, copy_in_order, is_mounted, mounted_here, open_file_system, spark_form
from elephant.storage.folder import Folder, LocalFolder, folder_at, write_whole

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

# Well below what one message of Spark Connect may hold.
_PIECE_BYTES = 2**20
_PIECES = "place int, content binary"
_ANSWER = "error string"

# One letter is a drive of Windows.
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):")


def knows(session: SparkSession, path: str) -> bool:
    """Returns whether Spark has a file system for a path's scheme."""
    try:
        _ = session.read.format("binaryFile").load(path).schema
    except Exception as error:
        return SparkWords.UNKNOWN_SCHEME.search(error) is None
    return True


def read(session: SparkSession, path: str) -> bytes | None:
    """Returns the content of one file, or None when there is none."""
    from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)

    size, place = F.col("length"), F.col("place")
    first = F.expr(f"sequence(0L, greatest(length - 1, 0L), {_PIECE_BYTES}L)")
    try:
        files = session.read.format("binaryFile").load(path)
        pieces = files.select(size, "content", F.explode(first).alias("place")).select(
            "place", F.substring("content", (place + 1).cast("int"), F.lit(_PIECE_BYTES)).alias("content")
        )
        rows = pieces.collect()
    except Exception as error:
        if SparkWords.NO_PATH.search(error):
            return None
        raise
    return b"".join(bytes(row["content"]) for row in sorted(rows, key=lambda row: int(row["place"]))) if rows else None


def names(session: SparkSession, folder: str) -> list[str]:
    """Returns the names of the files in a folder, sorted; none where there is no folder."""
    try:
        rows = session.read.format("binaryFile").load(folder).select("path").collect()
    except Exception as error:
        if SparkWords.NO_PATH.search(error):
            return []
        raise
    return sorted(str(row["path"]).rsplit("/", 1)[-1] for row in rows)


def write(session: SparkSession, path: str, content: bytes, *, overwrite: bool) -> None:
    """Writes one file, with the folders that it lies in.

    Raises:
        FileExistsError: The file is there, and is not to be replaced.
        ConfigurationError: Neither Spark nor the executors' Python can write there.
    """
    if not overwrite and path.rsplit("/", 1)[-1] in names(session, path):
        raise FileExistsError(f"expected no file at {path}. Received: a path where one is.")
    if "://" in path or path.startswith("file:") or not _copied(session, path, content):
        _run(session, functools.partial(_write_here, path), content)


def remove(session: SparkSession, path: str) -> None:
    """Removes one file, or a folder with all that is in it; does nothing where there is none."""
    _run(session, functools.partial(_remove_here, path), b"")


def _copied(session: SparkSession, path: str, content: bytes) -> bool:
    """Has the Connect server write a file to its default file system; returns whether it did."""
    if not is_remote(session):
        return False
    with tempfile.TemporaryDirectory(prefix="elephant-save-") as folder:
        local = Path(folder) / "content"
        local.write_bytes(content)
        try:
            session.copyFromLocalToFs(str(local), path)
        except Exception:
            # A local file system is refused, and so is a scheme; platforms have further reasons of their own.
            return False
    return True


def _run(session: SparkSession, action: Callable[[bytes], None], content: bytes) -> None:
    """Runs an action with a file's content in one task on an executor."""
    import pyarrow as pa

    places = range(0, max(len(content), 1), _PIECE_BYTES)
    pieces = [(index, content[place : place + _PIECE_BYTES]) for index, place in enumerate(places)]
    table = pa.table({"place": pa.array([p for p, _ in pieces], pa.int32()), "content": [piece for _, piece in pieces]})
    frame: Any = session.createDataFrame(table.to_pandas() if not is_remote(session) else table, _PIECES)
    answers = frame.coalesce(1).mapInArrow(functools.partial(_act, action), _ANSWER).collect()
    problem = next((row["error"] for row in answers if row["error"]), None)
    if problem is not None:
        raise ConfigurationError(
            f"path: expected a path that Spark, or the executors' Python, can write to. Received: {problem} "
            "Without a JVM at hand, use a path without a scheme, or one that pyarrow or fsspec opens on the executors."
        )


def _act(action: Callable[[bytes], None], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Calls an action with the content that comes in pieces; yields what was wrong, or None."""
    import pyarrow as pa

    pieces = [row for batch in batches for row in batch.to_pylist()]
    content = b"".join(piece["content"] for piece in sorted(pieces, key=lambda piece: int(piece["place"])))
    problem = None
    try:
        action(content)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    yield pa.RecordBatch.from_arrays([pa.array([problem], pa.string())], ["error"])


def _write_here(path: str, content: bytes) -> None:
    system, inner = open_file_system(absolute(path))
    system.create_dir(inner.rpartition("/")[0], recursive=True)
    with system.open_output_stream(inner) as stream:
        stream.write(content)


def _remove_here(path: str, content: bytes) -> None:
    from pyarrow import fs as arrow_fs

    system, inner = open_file_system(absolute(path))
    kind = system.get_file_info(inner).type
    if kind == arrow_fs.FileType.Directory:
        system.delete_dir(inner)
    elif kind == arrow_fs.FileType.File:
        system.delete_file(inner)


def write_file(session: SparkSession, path: str, content: bytes, *, overwrite: bool = False) -> None:
    """Writes one file; raises what the file system raises when it is there already.

    Args:
        path: Any path that Spark takes: ``hdfs://``, ``s3a://``, ``dbfs:/``, ``file:/`` or without a scheme;
            or one that fsspec takes.
    """
    path, context = spark_form(path), jvm_context(session)
    if not hadoop_knows(session, path):
        if not overwrite and _read_here(path) is not None:
            raise FileExistsError(f"expected no file at {path}. Received: a path where one is.")
        _write_here(path, content)
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
        return _read_here(path)
    if context is None:
        return read(session, path)
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
        write(session, path, content, overwrite=overwrite)
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
        write_whole(local, lambda file: file.write(content))
    elif session is not None:
        write_file(session, text, content, overwrite=True)
    else:
        _write_here(text, content)


def read_model_bytes(path: str | os.PathLike[str]) -> bytes | None:
    """Returns the content of a model's file, or None when there is none; the path is one of `write_model_bytes`."""
    local = local_path(path)
    if local is not None:
        return local.read_bytes() if local.is_file() else None
    session = running_session()
    return _read_here(os.fspath(path)) if session is None else read_file(session, os.fspath(path))


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Returns the place of a path on this machine; None for a URL of another file system."""
    text = os.fspath(path)
    mounted, match = mounted_here(text), _SCHEME.match(text)
    if mounted is not None:
        return mounted
    if match is None:
        return Path(text).expanduser()
    return Path(unquote(urlparse(text).path)) if match[1] == "file" else None


def running_session() -> SparkSession | None:
    """Returns the session of this process, where Spark runs in it."""
    from pyspark.sql import SparkSession

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
        return knows(session, path)
    from py4j.protocol import Py4JJavaError

    try:
        configuration = context._jsc.hadoopConfiguration()
        context._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(match[1], configuration)
    except Py4JJavaError as error:
        if SparkWords.UNKNOWN_SCHEME.search(error.java_exception):
            return False
        raise
    return True


def _read_here(path: str) -> bytes | None:
    from pyarrow import fs as arrow_fs

    system, inner = open_file_system(absolute(path))
    if system.get_file_info(inner).type != arrow_fs.FileType.File:
        return None
    with system.open_input_stream(inner) as stream:
        return bytes(stream.read())


def _hadoop(context: Any, path: str, local: Path) -> tuple[Any, Any, Any]:
    hadoop = context._jvm.org.apache.hadoop.fs
    target = hadoop.Path(path)
    return target.getFileSystem(context._jsc.hadoopConfiguration()), target, hadoop.Path(f"file://{local}")


def checkpoint_folder(session: SparkSession, path: str) -> Folder:
    """Returns the folder of a path, as Spark understands it.

    Args:
        path: ``hdfs://``, ``s3a://``, ``dbfs:/``, ``file:/`` or without a scheme; or one that pyarrow or fsspec opens.

    Raises:
        ConfigurationError: Nothing here knows the path's scheme.
    """
    path, context = spark_form(path), jvm_context(session)
    if context is None:
        mounted = mounted_here(path)
        if mounted is None and is_mounted(path):
            raise ConfigurationError(
                f"checkpointPath: expected a path that this process opens, which writes the checkpoints where it has "
                f"no JVM. Received: {path!r}, whose mount is not on this machine. Use a URL that pyarrow or fsspec "
                "opens here, such as s3://, or run this in a notebook of the cluster."
            )
        return folder_at(path) if mounted is None else MountedFolder(mounted, path)
    if not hadoop_knows(session, path):
        return folder_at(path)
    hadoop = context._jvm.org.apache.hadoop.fs
    with _as_os_errors():
        system = hadoop.Path(path).getFileSystem(context._jsc.hadoopConfiguration())
        if str(system.getScheme()) == "file":
            # Python's own way is faster, and waits for the disk.
            return LocalFolder(str(system.makeQualified(hadoop.Path(path)).toUri().getPath()), path)
    return HadoopFolder(hadoop, system, path)


class MountedFolder(LocalFolder):
    """A folder of a mount that takes files from their first byte to their last, and nothing else."""

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        with tempfile.TemporaryDirectory(prefix="elephant-checkpoint-") as folder:
            local = Path(folder) / "content"
            with open(local, "wb") as file:
                fill(file)
            self.require_disk()
            copy_in_order(local, self._path / name)


class HadoopFolder(Folder):
    """A folder of a file system that the Hadoop client of Spark's JVM knows."""

    def __init__(self, hadoop: Any, system: Any, url: str) -> None:
        self._hadoop = hadoop
        self._system = system
        self.url = url

    def _at(self, name: str) -> Any:
        return self._hadoop.Path(f"{self.url.rstrip('/')}/{name}")

    def names(self) -> list[str]:
        with _as_os_errors():
            folder = self._hadoop.Path(self.url)
            if not self._system.exists(folder):
                return []
            return sorted(str(file.getPath().getName()) for file in self._system.listStatus(folder) if file.isFile())

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        with tempfile.TemporaryDirectory(prefix="elephant-checkpoint-") as folder:
            local = Path(folder) / "content"
            with open(local, "wb") as file:
                fill(file)
            with _as_os_errors():
                self._system.copyFromLocalFile(False, False, self._hadoop.Path(f"file://{local}"), self._at(name))

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        with tempfile.TemporaryDirectory(prefix="elephant-checkpoint-") as folder:
            local = Path(folder) / "content"
            with _as_os_errors():
                if not self._system.exists(self._at(name)):
                    raise FileNotFoundError(f"{self.url}/{name}")
                # The raw local file system leaves no checksum file beside the copy.
                self._system.copyToLocalFile(False, self._at(name), self._hadoop.Path(f"file://{local}"), True)
            with open(local, "rb") as file:
                yield file

    def remove(self, name: str) -> None:
        with _as_os_errors():
            self._system.delete(self._at(name), False)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raises what a file system of the JVM raises as OSError, as those of Python do."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except Py4JJavaError as error:
        raise OSError(str(error.java_exception)) from error
    except PySparkException as error:
        # Some of Java's own exceptions have become one of PySpark's on their way.
        raise OSError(str(error)) from error
    except Py4JError as error:
        raise OSError(f"Spark's JVM: {error}") from error
