"""Where a fit's checkpoints are: the driver writes them, so any path is one that the driver's Spark reaches.

Executors share no disk with the driver in general, and have no Hadoop client in Python: what rank 0 has
comes to the driver over the channel, and goes from there wherever Spark writes its own files.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pyspark.sql import SparkSession

from elephant.cluster.sessions import jvm_context
from elephant.errors import ConfigurationError
from elephant.spark.storage import hadoop_knows
from elephant.storage.filesystem import copy_in_order, is_mounted, mounted_here, spark_form
from elephant.storage.folder import Folder, LocalFolder, folder_at


def checkpoint_folder(session: SparkSession, path: str) -> Folder:
    """Returns the folder of a path, as Spark understands it.

    Args:
        session: The Spark session. Without a scheme, the path is one of its default file system. Where there is no
            JVM, as with Spark Connect, it is a path or URL as this process opens it: a Spark job that
            wrote there would wait for a slot that the fit holds.
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
    """A folder of a file system that the Hadoop client of Spark's JVM knows.

    Args:
        hadoop: The JVM's package ``org.apache.hadoop.fs``.
        system: The file system.
        url: The folder.
    """

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
