"""What there is on each executor: asked by one small job that needs neither elephant nor Keras there.

The answers are kept for as long as an application has the same executors, so that a
second fit pays nothing.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from elephant.cluster.executors import running_executors
from elephant.cluster.session import setting
from elephant.cluster.spark_job import SparkJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Distributions that hold what Keras computes with, by backend.
BACKENDS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly", "tensorflow-macos"),
    "jax": ("jax",),
    "torch": ("torch",),
}
PACKAGES = (
    "keras", "pyarrow", "numpy", "pandas", "pyspark", "tensorboard",
    *(name for names in BACKENDS.values() for name in names),
)  # fmt: skip
_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class ExecutorFacts:
    """What one executor says of itself.

    Args:
        host: Its host's name.
        executor: Spark's id of it; empty when it cannot be told.
        executable: The Python that runs its tasks.
        python: Its version.
        elephant: Version of elephant there; empty without one.
        packages: Versions of installed packages, by name.
        folder: Where training processes keep rows.
        free_bytes: Room there; None when it cannot be told.
        writable: Whether files can be written there.
        variables: Environment variables that matter.
        backends: Backends of Keras that can be imported there.
    """

    host: str
    executor: str = ""
    executable: str = ""
    python: str = ""
    elephant: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    free_bytes: int | None = None
    writable: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    backends: Sequence[str] = ()

    @property
    def place(self) -> str:
        """The executor, for messages."""
        return f"executor {self.executor} on {self.host}" if self.executor else self.host


@dataclass(frozen=True, kw_only=True)
class ExecutorReport:
    """What a look at the executors came to.

    Args:
        facts: One of every executor that answered.
        error: What Spark said when the job failed; empty when it did not.
        missing: Executors that did not answer, because others took their tasks or time was up.
    """

    facts: Sequence[ExecutorFacts] = ()
    error: str = ""
    missing: int = 0


def facts_function(packages: Sequence[str], backends: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """Returns the function that tells the facts.

    It is made here, inside another one, because Spark then sends its code along: an executor
    without elephant, or with an old one, can still say so.
    """

    def read_facts() -> dict[str, Any]:
        import importlib.metadata
        import importlib.util
        import os
        import platform
        import shutil
        import socket
        import sys
        import tempfile

        def version(name: str) -> str:
            try:
                return importlib.metadata.version(name)
            except Exception:
                return ""

        def elephant_version() -> str:
            try:
                from elephant import __version__
            except Exception:
                return ""
            return __version__

        def executor() -> str:
            # The executor's JVM is an ancestor of this process, and has its own id among its arguments.
            process = os.getppid()
            try:
                while process > 1:
                    with open(f"/proc/{process}/cmdline", "rb") as file:
                        arguments = file.read().split(b"\0")
                    if b"--executor-id" in arguments:
                        return arguments[arguments.index(b"--executor-id") + 1].decode()
                    with open(f"/proc/{process}/stat", "rb") as file:
                        process = int(file.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, ValueError, IndexError):
                pass
            return ""

        named = [folder for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if folder]
        usable = [folder for folder in named if os.access(folder, os.W_OK)]
        try:
            folder = (usable or [tempfile.gettempdir()])[0]
            free = shutil.disk_usage(folder).free
        except OSError:
            folder, free = (named or ["no folder for temporary files"])[0], 0
        wanted = ("KERAS_BACKEND", "PYSPARK_PYTHON", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        return {
            "host": socket.gethostname(),
            "executor": executor(),
            "executable": sys.executable,
            "python": platform.python_version(),
            "elephant": elephant_version(),
            "packages": {name: found for name in packages if (found := version(name))},
            "folder": folder,
            "free_bytes": free,
            "writable": os.access(folder, os.W_OK),
            "variables": {name: os.environ[name] for name in wanted if name in os.environ},
            "backends": [name for name in backends if importlib.util.find_spec(name) is not None],
        }

    return read_facts


def driver_facts() -> ExecutorFacts:
    """Returns the same facts of the driver's own process."""
    return as_facts(facts_function(PACKAGES, tuple(BACKENDS))())


def as_facts(said: Mapping[str, Any]) -> ExecutorFacts:
    """Returns facts from what an executor said; what this version does not know is left out.

    Args:
        said: What `facts_function` returned there.
    """
    known = {field.name for field in fields(ExecutorFacts)}
    return ExecutorFacts(**{name: value for name, value in said.items() if name in known})


def on_partitions(function: Callable[[], Any]) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Returns what ``mapInArrow`` runs: the function once a partition, its result as JSON in the column ``said``."""

    def call(batches: Iterable[Any]) -> Iterator[Any]:
        import json

        import pyarrow

        for _ in batches:
            pass
        yield pyarrow.RecordBatch.from_arrays([pyarrow.array([json.dumps(function())])], ["said"])

    return call


def ask_executors(session: SparkSession, function: Callable[[], Any], *, tasks: int, timeout_s: float) -> Any:
    """Runs a function in so many tasks at the same time, as far as there are slots.

    Returns:
        What it returned in each task, as JSON would keep it.

    Raises:
        TimeoutError: The job did not end in time.
        Exception: What Spark raises of a job that failed.
    """
    frame = session.range(0, tasks, 1, tasks).mapInArrow(on_partitions(function), "said string")
    job = SparkJob(session, f"elephant-look-{uuid.uuid4().hex}", frame.collect)
    deadline = time.monotonic() + timeout_s
    try:
        while job.running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        ended = not job.running
    finally:
        # Time is up, or the user has interrupted.
        job.cancel()
    if not ended:
        raise TimeoutError(f"tasks on the executors did not end within {timeout_s:g} s")
    if job.error is not None:
        raise job.error
    return [json.loads(row["said"]) for row in job.rows]


class Executors:
    """What is known of the executors of this process' applications, asked once for each set of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[tuple[str | None, tuple[str, ...] | None], ExecutorReport] | None = None

    def known(self, session: SparkSession) -> ExecutorReport | None:
        """Returns what the executors have said, if they are still the same; None when they must be asked."""
        key = _key(session)
        with self._lock:
            return self._known[1] if self._known is not None and self._known[0] == key else None

    def look(self, session: SparkSession, *, tasks: int, timeout_s: float) -> ExecutorReport:
        """Asks the executors, and keeps what they say.

        Args:
            tasks: Tasks to ask with where the number of executors is not known.
        """
        key = _key(session)
        names = key[1]
        look = examine_executors(session, tasks=tasks if names is None else len(names), timeout_s=timeout_s)
        if not look.error and not (names is not None and look.missing):
            with self._lock:
                self._known = (key, look)
        return look

    def forget(self) -> None:
        """Forgets what is known: the next pre-flight asks."""
        with self._lock:
            self._known = None


def _key(session: SparkSession) -> tuple[str | None, tuple[str, ...] | None]:
    """Returns what tells one application, and one set of its executors, from another."""
    running = running_executors(session)
    return setting(session, "spark.app.id"), None if running is None else tuple(one.name for one in running)


def examine_executors(session: SparkSession, *, tasks: int, timeout_s: float) -> ExecutorReport:
    """Asks the executors for their facts."""
    if not tasks:
        return ExecutorReport()
    try:
        said = ask_executors(session, facts_function(PACKAGES, tuple(BACKENDS)), tasks=tasks, timeout_s=timeout_s)
    except Exception as error:
        return ExecutorReport(error=str(error) or type(error).__name__, missing=tasks)
    by_place = {(one["host"], one["executor"]): as_facts(one) for one in said}
    facts = [by_place[place] for place in sorted(by_place)]
    named = any(one.executor for one in facts)
    return ExecutorReport(facts=facts, missing=max(tasks - len(facts), 0) if named else 0)


known_executors = Executors()
