"""Output of a job: nothing is there, or all of it. What a job is writing lies beside the place until it is whole.

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
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elephant.cluster.session import jvm_context
from elephant.cluster.spark_private import java_context, jvm_of
from elephant.errors import ConfigurationError, UnsupportedError, first_line
from elephant.options import key_of
from elephant.storage.filesystem import spark_form

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MARK = "_SUCCESS"


class Output:
    """One path that a job writes to.

    Args:
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

        self._hadoop: Any = jvm_of(context).org.apache.hadoop.fs
        self.path = path
        self._conf = java_context(context).hadoopConfiguration()
        named = self._hadoop.Path(spark_form(path))
        try:
            self._files = named.getFileSystem(self._conf)
        except Py4JJavaError as error:
            raise ConfigurationError(
                f"output: expected a path on a file system that Spark knows. Received: {path!r}: {error.java_exception}"
            ) from error
        self._target = self._files.makeQualified(named)
        self._save_mode = save_mode
        self._is_folder = is_folder

    def refuse_inside(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigurationError where what the job reads, or its checkpoints, would be replaced with the output."""
        for name in ("checkpointPath", "data", "model"):
            within = self._within(settings[name]) if name in settings else None
            # Rows and a model may be replaced by what the job makes of them.
            if within is not None and (within or name == "checkpointPath"):
                raise ConfigurationError(
                    f"output: expected a folder that does not hold {key_of(name)}, {settings[name]}. "
                    f"Received: {self.path}, which is replaced as a whole. Put one beside the other."
                )

    def _within(self, path: str) -> int | None:
        """Returns how many folders a path lies below the output, 0 where it is the same, or None where it does not."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            named = self._hadoop.Path(spark_form(path))
            place = named.getFileSystem(self._conf).makeQualified(named)
        except (PySparkException, Py4JError):
            # No path, such as module:function; or one that pyarrow opens, and Spark does not know.
            return None
        depth = 0
        while place is not None and not place.equals(self._target):
            place, depth = place.getParent(), depth + 1
        return None if place is None else depth

    @property
    def is_finished(self) -> bool:
        """True if a whole output is there."""
        return bool(self._files.exists(self._mark if self._is_folder else self._target))

    def is_saved(self) -> bool:
        """Returns whether what is there stays, and there is nothing to do; asked before the work, not after it.

        Raises:
            FileExistsError: There is something that the save mode does not let the job replace.
        """
        if not self._files.exists(self._target):
            return False
        if not self._is_folder and self._files.getFileStatus(self._target).isDirectory():
            raise FileExistsError(f"output: expected the path of a file. Received: {self.path}, which is a folder.")
        if self._save_mode == "overwrite":
            return False
        if self._save_mode == "ignore" and self.is_finished:
            return True
        state = "which is whole" if self.is_finished else f"without the {MARK} with which jobs close what is whole"
        raise FileExistsError(
            f"output: expected a path where there is nothing. Received: {self.path}, {state}. "
            f"Name another one, or pass --save-mode overwrite{' or ignore' if self.is_finished else ''}."
        )

    def require_writable(self) -> None:
        """Raises ConfigurationError where nothing can be written beside the output; asked before the work, too."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        trial = self._beside("unfinished")
        try:
            made = self._files.mkdirs(trial)
            self._files.delete(trial, True)
            reason = "no folder can be made beside it"
        except (PySparkException, Py4JError) as error:
            made, reason = False, first_line(error)
        if not made:
            raise ConfigurationError(
                f"output: expected a path that can be written to. Received: {self.path}: {reason}."
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
            if not self.is_saved():
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
