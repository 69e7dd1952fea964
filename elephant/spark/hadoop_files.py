"""Files and folders by the paths that Spark takes: through Hadoop, a session without a JVM, or Python.

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
import io
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlparse

from elephant.cluster.session import is_remote, jvm_context
from elephant.cluster.spark_job import SparkWords
from elephant.cluster.spark_private import active_context, java_context, jvm_of
from elephant.errors import ConfigurationError
from elephant.monitor.handle import session_of_fit
from elephant.storage.filesystem import is_mounted, mounted_here, spark_form
from elephant.storage.folder import File, Folder, LocalFolder, file_at, folder_at, local_copy

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

# Well below what one message of Spark Connect may hold.
_PIECE_BYTES = 2**20

# One letter is a drive of Windows.
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):")


def write_file(session: SparkSession, path: str, content: bytes, *, overwrite: bool = False) -> None:
    """Writes one file, with the folders that it lies in.

    Args:
        path: Any path that Spark takes: ``hdfs://``, ``s3a://``, ``dbfs:/``, ``file:/`` or without a scheme;
            or one that pyarrow or fsspec takes.

    Raises:
        FileExistsError: The file is there, and is not to be replaced.
        ConfigurationError: Neither Spark nor the executors' Python can write there.
    """
    _file_of(session, path).write(content, overwrite=overwrite)


def read_file(session: SparkSession, path: str) -> bytes | None:
    """Returns the content of one file, or None when there is none; the path is one of `write_file`."""
    return _file_of(session, path).read()


def is_file(session: SparkSession, path: str) -> bool:
    """Returns whether a path, one of `write_file`, leads to a file, and not to a folder or nothing."""
    file = _file_of(session, path)
    return file.folder.has(file.name)


def is_there(session: SparkSession, path: str) -> bool:
    """Returns whether a path, perhaps a pattern, leads to anything; True as well where only Spark's reader can tell."""
    context: Any = jvm_context(session)
    if context is None:
        return True
    try:
        with _as_os_errors():
            if not hadoop_knows(session, path):
                return True
            place = jvm_of(context).org.apache.hadoop.fs.Path(spark_form(path))
            found = place.getFileSystem(java_context(context).hadoopConfiguration()).globStatus(place)
            return found is not None and len(found) > 0
    except OSError:
        return True


def write_model_bytes(path: str | os.PathLike[str], content: bytes, *, overwrite: bool = True) -> None:
    """Writes a model's file, without a Spark session where none is needed.

    Args:
        path: A path of this machine, where it has no scheme; or a URL of a file system that Hadoop or fsspec knows.

    Raises:
        FileExistsError: The file is there, and is not to be replaced.
        FileNotFoundError: Its folder is not there.
        ConfigurationError: Nothing here knows the URL's scheme.
    """
    local = local_path(path)
    if local is not None and not local.parent.is_dir():
        raise FileNotFoundError(f"expected a folder {local.parent} for {local.name}. Received: none. Make it.")
    _model_file(path).write(content, overwrite=overwrite)


def write_model_files(path: str | os.PathLike[str], folder: Path) -> None:
    """Writes all files of a folder beside a path, one of `write_model_bytes`, with the folders above it; or none.

    Raises:
        FileExistsError: There is one of them already.
        ConfigurationError: Nothing here knows the URL's scheme.
    """
    parent, slash, name = os.fspath(path).rstrip("/").rpartition("/")
    # On this machine they get their names when all are there.
    local, partial = local_path(path), f".{name}-{uuid.uuid4().hex}"
    partial = "" if local is None else f"{partial}/"
    # By which servers know a SavedModel: they find it whole.
    found = sorted(folder.rglob("*"), key=lambda file: (file.name == "saved_model.pb", file))
    written: list[File] = []
    try:
        for file in (file for file in found if file.is_file()):
            target = _model_file(f"{parent}{slash}{partial}{file.relative_to(folder).as_posix()}")
            target.write(file.read_bytes())
            written.append(target)
        if local is not None:
            for made in (local.parent / partial).iterdir():
                require_no_model(local.parent / made.name)
                made.rename(local.parent / made.name)
    except BaseException:
        for target in written:
            with contextlib.suppress(OSError, ConfigurationError):
                target.folder.remove(target.name)
        raise
    finally:
        if local is not None:
            shutil.rmtree(local.parent / partial, ignore_errors=True)


def require_no_model(path: str | os.PathLike[str]) -> None:
    """Raises FileExistsError where there is a file, an export, or on this machine a folder that is not empty."""
    local, text = local_path(path), os.fspath(path).rstrip("/")
    if local is None:
        files = [_model_file(place) for place in (text, f"{text}/saved_model.pb")]
        is_there = any(file.folder.has(file.name) for file in files)
    else:
        is_there = any(local.iterdir()) if local.is_dir() else os.path.lexists(local)
    if is_there:
        raise FileExistsError(f"path: expected nothing there yet. Received: {text}. Remove it, or pass another path.")


def read_model_bytes(path: str | os.PathLike[str]) -> bytes | None:
    """Returns the content of a model's file, or None when there is none; the path is one of `write_model_bytes`."""
    local = local_path(path)
    return None if local is not None and not local.is_file() else _model_file(path).read()


def _model_file(path: str | os.PathLike[str]) -> File:
    local, session = local_path(path), running_session()
    if local is not None:
        return File(LocalFolder(local.parent), local.name)
    return file_at(os.fspath(path)) if session is None else _file_of(session, os.fspath(path))


def checkpoint_folder(session: SparkSession, path: str) -> Folder:
    """Returns the folder of a path, as Spark understands it; without a JVM, as this process does.

    Args:
        path: ``hdfs://``, ``s3a://``, ``dbfs:/``, ``file:/`` or without a scheme; or one that pyarrow or fsspec opens.

    Raises:
        ConfigurationError: Nothing here knows the path's scheme.
    """
    path = spark_form(path)
    if jvm_context(session) is not None:
        return _hadoop_folder(session, path) if hadoop_knows(session, path) else folder_at(path)
    if mounted_here(path) is None and is_mounted(path):
        raise ConfigurationError(
            f"checkpointPath: expected a path that this process opens, which writes the checkpoints where it has "
            f"no JVM. Received: {path!r}, whose mount is not on this machine. Use a URL that pyarrow or fsspec "
            "opens here, such as s3://, or run this in a notebook of the cluster."
        )
    return folder_at(path)


def is_written_by_jobs(session: SparkSession, path: str) -> bool:
    """Returns whether `write_file` needs a Spark job for a path, which waits where a fit holds all slots."""
    return jvm_context(session) is None and isinstance(_file_of(session, path).folder, SparkFolder)


def qualified(session: SparkSession, path: str) -> str:
    """Returns a path of `write_file` with its file system, as it leads there from elsewhere; as it is, if unknown.

    Raises:
        OSError: Hadoop cannot open the file system.
    """
    context: Any = jvm_context(session)
    if context is None or mounted_here(path) is not None or is_mounted(path):
        return path
    with _as_os_errors():
        if not hadoop_knows(session, path):
            return path
        place = jvm_of(context).org.apache.hadoop.fs.Path(spark_form(path))
        system = place.getFileSystem(java_context(context).hadoopConfiguration())
        return str(system.makeQualified(place).toString())


def _file_of(session: SparkSession, path: str) -> File:
    path = spark_form(path)
    if not hadoop_knows(session, path) or (jvm_context(session) is None and mounted_here(path) is not None):
        return file_at(path)
    parent, slash, name = path.rpartition("/")
    if not slash and _SCHEME.match(path):
        raise ConfigurationError(
            f"path: expected a slash after the scheme, such as file:/data/model.keras. Received: {path!r}."
        )
    # The root of a file system, or the folder of the session's user.
    parent = f"{parent}/" if parent.endswith((":", ":/")) or (path.startswith("/") and not parent) else parent or "."
    folder = SparkFolder(session, parent) if jvm_context(session) is None else _hadoop_folder(session, parent)
    return File(folder, name)


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

    active = session_of_fit() or SparkSession.getActiveSession()
    if active is not None:
        return active
    try:
        context = active_context()
    except ImportError:
        # A client of Spark Connect without the rest of Spark.
        return None
    return None if context is None else SparkSession(context)


def hadoop_knows(session: SparkSession, path: str) -> bool:
    """Returns whether Hadoop has a file system for a path's scheme."""
    match = _SCHEME.match(path)
    if match is None:
        return True
    context = jvm_context(session)
    if context is None:
        try:
            _ = session.read.format("binaryFile").load(path).schema
        except Exception as error:
            return SparkWords.UNKNOWN_SCHEME.search(error) is None
        return True
    from py4j.protocol import Py4JJavaError

    try:
        configuration = java_context(context).hadoopConfiguration()
        jvm_of(context).org.apache.hadoop.fs.FileSystem.getFileSystemClass(match[1], configuration)
    except Py4JJavaError as error:
        if SparkWords.UNKNOWN_SCHEME.search(error.java_exception):
            return False
        raise
    return True


def _hadoop_folder(session: SparkSession, path: str) -> Folder:
    context: Any = jvm_context(session)
    hadoop = jvm_of(context).org.apache.hadoop.fs
    with _as_os_errors():
        system = hadoop.Path(path).getFileSystem(java_context(context).hadoopConfiguration())
        # Not its getScheme, which not every file system has.
        if str(system.getUri().getScheme()) == "file":
            # Python's own way is faster, and waits for the disk.
            return LocalFolder(str(system.makeQualified(hadoop.Path(path)).toUri().getPath()), path)
    return HadoopFolder(hadoop, system, path)


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

    def has(self, name: str) -> bool:
        with _as_os_errors():
            return bool(self._system.exists(self._at(name)) and self._system.getFileStatus(self._at(name)).isFile())

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        self._copy(name, fill, overwrite=False)

    def replace(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        # In one call: between two, a process that ends would leave no file.
        self._copy(name, fill, overwrite=True)

    def _copy(self, name: str, fill: Callable[[BinaryIO], object], *, overwrite: bool) -> None:
        with local_copy() as local:
            with open(local, "wb") as file:
                fill(file)
            with _as_os_errors():
                if self._system.exists(self._at(name)) and not self.has(name):
                    # Hadoop would put the copy into it.
                    raise IsADirectoryError(f"expected a file. Received: {self.url}/{name}, which is a folder.")
                self._system.copyFromLocalFile(False, overwrite, self._hadoop.Path(f"file://{local}"), self._at(name))

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        with local_copy() as local:
            with _as_os_errors():
                if not self.has(name):
                    raise FileNotFoundError(f"{self.url}/{name}")
                # The raw local file system leaves no checksum file beside the copy.
                self._system.copyToLocalFile(False, self._at(name), self._hadoop.Path(f"file://{local}"), True)
            with open(local, "rb") as file:
                yield file

    def remove(self, name: str) -> None:
        with _as_os_errors():
            self._system.delete(self._at(name), False)


class SparkFolder(Folder):
    """A folder that Spark reads, for sessions without a JVM; for single files, each of which is a Spark job."""

    def __init__(self, session: SparkSession, url: str) -> None:
        self._session = session
        self.url = url

    def _at(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def names(self) -> list[str]:
        return self._names(self.url)

    def has(self, name: str) -> bool:
        # Spark lists what is in a folder.
        return self._names(self._at(name)) == [name]

    def _names(self, path: str) -> list[str]:
        rows = self._rows(path, lambda files: files.select("path"))
        return sorted(str(row["path"]).rsplit("/", 1)[-1] for row in rows)

    def _rows(self, path: str, chosen: Callable[[DataFrame], DataFrame]) -> list[Any]:
        """Returns rows of what Spark reads as files of bytes; none where there is nothing."""
        try:
            return chosen(self._session.read.format("binaryFile").load(path)).collect()
        except Exception as error:
            if SparkWords.NO_PATH.search(error):
                return []
            raise

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        rows = self._rows(self._at(name), _pieces)
        if not rows:
            raise FileNotFoundError(self._at(name))
        yield io.BytesIO(b"".join(bytes(row["content"]) for row in sorted(rows, key=lambda row: int(row["place"]))))

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        buffer, path = io.BytesIO(), self._at(name)
        fill(buffer)
        if "://" in path or path.startswith("file:") or not self._copied(path, buffer.getvalue()):
            self._run(functools.partial(_write_here, path), buffer.getvalue())

    def remove(self, name: str) -> None:
        self._run(functools.partial(_remove_here, self._at(name)), b"")

    def _copied(self, path: str, content: bytes) -> bool:
        """Has the Connect server write a file to its default file system; returns whether it did."""
        if not is_remote(self._session):
            return False
        with local_copy() as local:
            local.write_bytes(content)
            try:
                self._session.copyFromLocalToFs(str(local), path)
            except Exception:
                # A local file system is refused, and so is a scheme; platforms have further reasons of their own.
                return False
        return True

    def _run(self, action: Callable[[bytes], None], content: bytes) -> None:
        """Runs an action with a file's content in one task on an executor."""
        import pyarrow as pa

        places = range(0, max(len(content), 1), _PIECE_BYTES)
        pieces = [(index, content[place : place + _PIECE_BYTES]) for index, place in enumerate(places)]
        columns = {"place": pa.array([p for p, _ in pieces], pa.int32()), "content": [piece for _, piece in pieces]}
        table = pa.table(columns)
        frame: Any = self._session.createDataFrame(
            table if is_remote(self._session) else table.to_pandas(), "place int, content binary"
        )
        answers = frame.coalesce(1).mapInArrow(functools.partial(_act, action), "error string").collect()
        problem = next((row["error"] for row in answers if row["error"]), None)
        if problem is not None:
            raise ConfigurationError(
                f"path: expected a path that Spark, or the executors' Python, can write to. Received: {problem} "
                "Without a JVM at hand, use a path without a scheme, or one that pyarrow or fsspec opens on the "
                "executors."
            )


def _pieces(files: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)

    first = F.expr(f"sequence(0L, greatest(length - 1, 0L), {_PIECE_BYTES}L)")
    placed = files.select(F.col("length"), "content", F.explode(first).alias("place"))
    part = F.substring("content", (F.col("place") + 1).cast("int"), F.lit(_PIECE_BYTES))
    return placed.select("place", part.alias("content"))


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
    file_at(path).write(content, overwrite=True)


def _remove_here(path: str, content: bytes) -> None:
    file = file_at(path)
    file.folder.remove(file.name)


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
