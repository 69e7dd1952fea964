"""Where a job writes: nothing is there, or all of it. What a job is writing lies beside the place until it is whole.

::

    DIR/.NAME.unfinished-*    what a job is writing; one that was killed leaves it, and nobody reads it
    DIR/.NAME.replaced-*      what was there before, while a new one takes its place
    DIR/NAME                  renamed from the first; ``_SUCCESS`` in a folder says, last of all, that it is whole

Where a rename is a copy, as on object stores, a job that is killed in it leaves a folder without ``_SUCCESS``,
which is never taken for a whole one.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from elephant.cluster.sessions import jvm_context
from elephant.data.mounts import spark_form
from elephant.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MARK = "_SUCCESS"


class Output:
    """One path that a job writes to.

    Args:
        session: The Spark session, whose file systems count.
        path: A file or a folder, by any path that Spark takes.
        save_mode: What to do where there is something already: ``"errorifexists"``, ``"overwrite"``, ``"ignore"``.
        is_folder: Whether the job writes a folder, which ``_SUCCESS`` then closes.
    """

    def __init__(self, session: SparkSession, path: str, save_mode: str, *, is_folder: bool = True) -> None:
        context = jvm_context(session)
        if context is None:
            raise UnsupportedError(
                "output: expected a Spark session with a JVM, which jobs have that spark-submit starts with --master. "
                "Received: one of Spark Connect. Leave --remote out."
            )
        from py4j.protocol import Py4JJavaError

        self._hadoop: Any = context._jvm.org.apache.hadoop.fs
        self.path = path
        named = self._hadoop.Path(spark_form(path))
        try:
            self._files = named.getFileSystem(context._jsc.hadoopConfiguration())
        except Py4JJavaError as error:
            raise ConfigurationError(
                f"output: expected a path on a file system that Spark knows. Received: {path!r}: {error.java_exception}"
            ) from error
        self._target = self._files.makeQualified(named)
        self._save_mode = save_mode
        self._is_folder = is_folder

    @property
    def is_finished(self) -> bool:
        """Whether a whole output is there."""
        return bool(self._files.exists(self._mark if self._is_folder else self._target))

    def is_kept(self) -> bool:
        """Returns whether what is there stays, and there is nothing to do; asked before the work, not after it.

        Raises:
            FileExistsError: There is something that the save mode does not let the job replace.
        """
        if self._save_mode == "overwrite" or not self._files.exists(self._target):
            return False
        if self._save_mode == "ignore" and self.is_finished:
            return True
        state = "which is whole" if self.is_finished else f"without the {MARK} with which jobs close what is whole"
        raise FileExistsError(
            f"output: expected a path where there is nothing. Received: {self.path}, {state}. "
            f"Name another one, or pass --save-mode overwrite{' or ignore' if self.is_finished else ''}."
        )

    @contextlib.contextmanager
    def staged(self) -> Iterator[str]:
        """Gives the path to write to; what is there when the block ends well takes its place, whole.

        Raises:
            OSError: The file system refuses to rename it.
        """
        staged = self._beside("unfinished")
        try:
            yield str(staged.toString())
            # Another run may have ended since the work began.
            if not self.is_kept():
                self._commit(staged)
        finally:
            # What the block raised tells more than a JVM that is gone, and deletes nothing.
            with contextlib.suppress(Exception):
                self._files.delete(staged, True)

    def _commit(self, staged: Any) -> None:
        # Last of all, and not among the first files that a store copies.
        if self._is_folder:
            self._files.delete(self._hadoop.Path(staged, MARK), False)
        replaced = self._set_aside()
        try:
            self._rename(staged, self._target)
        except BaseException:
            if replaced is not None:
                self._files.delete(self._target, True)
                self._rename(replaced, self._target)
            raise
        if self._is_folder:
            self._files.create(self._mark, True).close()
        if replaced is not None:
            self._files.delete(replaced, True)

    def _set_aside(self) -> Any:
        """Moves away what is there and may be replaced; returns where it is, or None."""
        if not self._files.exists(self._target):
            return None
        replaced = self._beside("replaced")
        self._rename(self._target, replaced)
        return replaced

    def _rename(self, source: Any, target: Any) -> None:
        if not self._files.rename(source, target):
            raise OSError(f"output: expected a file system that renames. Received: {source.toString()}, which stays.")

    def _beside(self, what: str) -> Any:
        # Names that begin with a dot are no data to Spark.
        return self._hadoop.Path(self._target.getParent(), f".{self._target.getName()}.{what}-{uuid.uuid4().hex[:12]}")

    @property
    def _mark(self) -> Any:
        return self._hadoop.Path(self._target, MARK)
