"""Files of the cluster, reached without a JVM: through Spark Connect, or where the JVM is kept from Python.

Reading is Spark's: it reads any file as rows of bytes. Writing is what it has no way for
that keeps a file's name, but for ``copyFromLocalToFs``, which takes paths without a scheme
and refuses a local file system. What that does not take, one task of a small job writes, with the
file systems that the executors' Python knows.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs as arrow_fs
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)

from elephant.cluster.sessions import is_remote
from elephant.errors import ConfigurationError
from elephant.storage.filesystem import absolute, open_file_system

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Well below what one message of Spark Connect may hold.
_PIECE_BYTES = 2**20
_PIECES = "place int, content binary"
_ANSWER = "error string"
_MISSING = ("PATH_NOT_FOUND", "Path does not exist")
_UNKNOWN_SCHEME = ("UnsupportedFileSystemException", "No FileSystem for scheme", "No filesystem for scheme")


def knows(session: SparkSession, path: str) -> bool:
    """Returns whether Spark has a file system for a path's scheme."""
    try:
        _ = session.read.format("binaryFile").load(path).schema
    except Exception as error:
        return not _says(error, _UNKNOWN_SCHEME)
    return True


def read(session: SparkSession, path: str) -> bytes | None:
    """Returns the content of one file, or None when there is none."""
    size, place = F.col("length"), F.col("place")
    first = F.expr(f"sequence(0L, greatest(length - 1, 0L), {_PIECE_BYTES}L)")
    try:
        files = session.read.format("binaryFile").load(path)
        pieces = files.select(size, "content", F.explode(first).alias("place")).select(
            "place", F.substring("content", (place + 1).cast("int"), F.lit(_PIECE_BYTES)).alias("content")
        )
        rows = pieces.collect()
    except Exception as error:
        if _says(error, _MISSING):
            return None
        raise
    return b"".join(bytes(row["content"]) for row in sorted(rows, key=lambda row: int(row["place"]))) if rows else None


def names(session: SparkSession, folder: str) -> list[str]:
    """Returns the names of the files in a folder, sorted; none where there is no folder."""
    try:
        rows = session.read.format("binaryFile").load(folder).select("path").collect()
    except Exception as error:
        if _says(error, _MISSING):
            return []
        raise
    return sorted(str(row["path"]).rsplit("/", 1)[-1] for row in rows)


def write(session: SparkSession, path: str, content: bytes, *, overwrite: bool) -> None:
    """Writes one file, with the folders that it lies in.

    Args:
        session: The Spark session.
        path: Any path that Spark takes.
        content: All of it.
        overwrite: Whether to replace a file that is there.

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
    system, inner = open_file_system(absolute(path))
    kind = system.get_file_info(inner).type
    if kind == arrow_fs.FileType.Directory:
        system.delete_dir(inner)
    elif kind == arrow_fs.FileType.File:
        system.delete_file(inner)


def _says(error: Exception, words: Iterable[str]) -> bool:
    return any(word in str(error) for word in words)
