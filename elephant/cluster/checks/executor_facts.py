"""Facts of each executor: asked by one small job that needs neither elephant nor Keras there.

The answers are kept for as long as an application has the same executors, so that a
second fit pays nothing.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from elephant.backends import BACKENDS, VARIABLE, backend_named, log_levels
from elephant.cluster.executors import running_executors
from elephant.cluster.reachability import way_to_driver
from elephant.cluster.session import jvm_context, setting
from elephant.cluster.spark_job import SparkJob, described

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES = (
    "keras", "pyarrow", "numpy", "pandas", "pyspark", "tensorboard",
    *(name for backend in BACKENDS.values() for name in backend.packages),
)  # fmt: skip
_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class ExecutorFacts:
    """Facts that one executor, or the driver, tells of itself."""

    host: str
    executor: str = ""  # Spark's id of it; empty when it cannot be told
    executable: str = ""
    python: str = ""
    elephant: str = ""  # empty without one
    packages: Mapping[str, str] = field(default_factory=dict)  # versions by name
    folder: str = ""  # where training processes keep rows
    free_bytes: int | None = None
    writable: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    backends: Sequence[str] = ()  # of Keras, that can be imported
    time: float = 0.0
    shared_memory_bytes: int | None = None
    descriptors: int = -1  # -1 is no limit
    unreached: str = ""  # why it does not reach the driver

    @property
    def place(self) -> str:
        """The executor, for messages."""
        return f"executor {self.executor} on {self.host}" if self.executor else self.host


@dataclass(frozen=True, kw_only=True)
class ExecutorReport:
    """Facts of every executor that answered, or why Spark failed the job that asked."""

    facts: Sequence[ExecutorFacts] = ()
    error: str = ""
    missing: int = 0  # did not answer, because others took their tasks or time was up
    place: str = ""  # where they were to reach the driver


def facts_function(
    packages: Sequence[str],
    backends: Sequence[str],
    connect_back: Callable[[], str] | None = None,
    preload: Callable[[], None] | None = None,
) -> Callable[[], dict[str, Any]]:
    """Returns the function that tells the facts.

    It is made here, inside another one, because Spark then sends its code along: an executor
    without elephant, or with an old one, can still say so.

    Args:
        connect_back: Returns why the driver is not reached; None asks nothing.
        preload: Begins what a fit will need on the executor; None begins nothing.
    """
    variables = (VARIABLE, "PYSPARK_PYTHON", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")

    def read_facts() -> dict[str, Any]:
        import importlib.metadata
        import importlib.util
        import os
        import platform
        import resource
        import shutil
        import socket
        import sys
        import tempfile
        import time

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
        try:
            shared = shutil.disk_usage("/dev/shm").free
        except OSError:
            shared = None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if preload is not None:
            preload()
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
            "variables": {name: os.environ[name] for name in variables if name in os.environ},
            "backends": [name for name in backends if importlib.util.find_spec(name) is not None],
            "time": time.time(),
            "shared_memory_bytes": shared,
            "descriptors": -1 if limit == resource.RLIM_INFINITY else limit,
            "unreached": "" if connect_back is None else connect_back(),
        }

    return read_facts


def gpu_function(timeout_s: float, backend: str) -> Callable[[], dict[str, Any]]:
    """Returns the function that tells which GPUs an executor has, and whether a backend can use them.

    The framework is imported in a process of its own: a Python worker of Spark's that had
    once taken hold of a GPU would keep it.
    """
    code, errors_alone = backend_named(backend).count_gpus, log_levels("3")

    def detect_gpus() -> dict[str, Any]:
        import os
        import shutil
        import socket
        import subprocess
        import sys

        def output(*command: str) -> tuple[str, str]:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=timeout_s,
                    check=False,
                    env={**os.environ, **errors_alone},
                )
            except subprocess.TimeoutExpired:
                return "", f"no answer within {timeout_s:g} s"
            except OSError as error:
                return "", str(error)
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return done.stdout.decode(errors="replace"), "" if done.returncode == 0 else "".join(last)

        program = shutil.which("nvidia-smi")
        listed, complaint = output(program, "-L") if program else ("", "no nvidia-smi")
        counted, error = output(sys.executable, "-c", code)
        numbers = [line.split()[1] for line in counted.splitlines() if line.startswith("gpus ")]
        return {
            "host": socket.gethostname(),
            "gpus": [line for line in listed.splitlines() if line.startswith("GPU ")],
            "complaint": complaint,
            "usable": int(numbers[0]) if numbers else None,
            "error": error,
        }

    return detect_gpus


def driver_facts() -> ExecutorFacts:
    """Returns the same facts of the driver's own process."""
    return as_facts(facts_function(PACKAGES, tuple(BACKENDS))())


def as_facts(said: Mapping[str, Any]) -> ExecutorFacts:
    """Returns facts from what an executor said; what this version does not know is left out."""
    known = {field.name for field in fields(ExecutorFacts)}
    return ExecutorFacts(**{name: value for name, value in said.items() if name in known})


def on_partitions(function: Callable[[], Any]) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Returns the function of ``mapInArrow``: one call a partition, its result as JSON in the column ``said``."""

    def call(batches: Iterable[Any]) -> Iterator[Any]:
        import json
        import struct

        import pyarrow

        for _ in batches:
            pass
        said = json.dumps(function()).encode()
        # Made of buffers, as in `elephant.cluster.spark_job.result_row`, which may not be there.
        buffers = [None, pyarrow.py_buffer(struct.pack("2i", 0, len(said))), pyarrow.py_buffer(said)]
        yield pyarrow.RecordBatch.from_arrays([pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)], ["said"])

    return call


def as_records(function: Callable[[], Any]) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Returns the function of an RDD's ``mapPartitions`` that does the same as `on_partitions`, without Arrow."""

    def call(records: Iterable[Any]) -> Iterator[Any]:
        import json

        for _ in records:
            pass
        yield {"said": json.dumps(function())}

    return call


def ask_executors(
    session: SparkSession, function: Callable[[], Any], *, tasks: int, timeout_s: float, without_rows: bool = False
) -> Any:
    """Runs a function in so many tasks at the same time, as far as there are slots; returns its results, as of JSON.

    Args:
        without_rows: Whether tasks of `NoRows` come next. Spark has other Python processes for an RDD's tasks than for
            a DataFrame's, each of which has to be started once, so that it is best asked in the same.

    Raises:
        TimeoutError: The job did not end in time.
        Exception: What Spark raises of a job that failed.
    """
    context = jvm_context(session) if without_rows else None
    if context is None:
        collect = session.range(0, tasks, 1, tasks).mapInArrow(on_partitions(function), "said string").collect
    else:
        collect = context.parallelize((), tasks).mapPartitions(as_records(function)).collect
    with described(session, "facts of the executors"):
        job = SparkJob(session, f"elephant-look-{uuid.uuid4().hex}", collect)
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
    """Cache of facts about executors of this process' applications, asked once for each set of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known_report: tuple[tuple[str | None, tuple[str, ...] | None], ExecutorReport] | None = None

    def known(self, session: SparkSession) -> ExecutorReport | None:
        """Returns the executors' facts, if they are still the same; None when they must be asked."""
        key = _key(session)
        with self._lock:
            return self._known_report[1] if self._known_report is not None and self._known_report[0] == key else None

    def look(
        self,
        session: SparkSession,
        *,
        tasks: int,
        timeout_s: float,
        preload: Callable[[], None] | None = None,
        without_rows: bool = False,
    ) -> ExecutorReport:
        """Asks the executors, in so many tasks where their number is not known, and keeps what they say.

        Args:
            preload: See `facts_function`.
            without_rows: See `ask_executors`.
        """
        key = _key(session)
        names = key[1]
        try:
            count = tasks if names is None else len(names)
            with way_to_driver(session) as (place, connect_back):
                report = examine_executors(
                    session,
                    tasks=count,
                    timeout_s=timeout_s,
                    connect_back=connect_back,
                    preload=preload,
                    without_rows=without_rows,
                )
            report = replace(report, place=place)
        except Exception as error:
            return ExecutorReport(error=str(error) or type(error).__name__, missing=tasks)
        if not (names is not None and report.missing):
            with self._lock:
                self._known_report = (key, report)
        return report

    def forget(self) -> None:
        """Forgets what is known: the next pre-flight asks."""
        with self._lock:
            self._known_report = None


def _key(session: SparkSession) -> tuple[str | None, tuple[str, ...] | None]:
    """Returns a key of one application and one set of its executors."""
    running = running_executors(session)
    return setting(session, "spark.app.id"), None if running is None else tuple(one.name for one in running)


def examine_executors(
    session: SparkSession,
    *,
    tasks: int,
    timeout_s: float,
    connect_back: Callable[[], str] | None = None,
    preload: Callable[[], None] | None = None,
    without_rows: bool = False,
) -> ExecutorReport:
    """Asks the executors for their facts; raises what `ask_executors` raises."""
    if not tasks:
        return ExecutorReport()
    function = facts_function(PACKAGES, tuple(BACKENDS), connect_back, preload)
    by_place = {
        (one["host"], one["executor"]): as_facts(one)
        for one in ask_executors(session, function, tasks=tasks, timeout_s=timeout_s, without_rows=without_rows)
    }
    facts = [by_place[place] for place in sorted(by_place)]
    named = any(one.executor for one in facts)
    return ExecutorReport(facts=facts, missing=max(tasks - len(facts), 0) if named else 0)


known_executors = Executors()
