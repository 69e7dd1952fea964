"""A Spark action beside the driver's main thread, and Spark's words for its end, by which its errors are told apart."""

from __future__ import annotations

import contextlib
import itertools
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

from elephant.cluster.session import is_remote, jvm_context
from elephant.cluster.spark_private import gateway_of, java_context
from elephant.errors import ClusterError, JobCancelledError, TrainingError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_CAUSE_LINES = 12
# What comes after it over Spark Connect is for those who work on Spark.
_JVM_STACK = "JVM stacktrace:"

_DESCRIPTION = "spark.job.description"

_CANCEL_GRACE_S = 10.0
_CANCEL_AGAIN_S = 0.5

# What a task hands to the driver: a rank, and its result or a piece of it.
ResultRow = tuple[int, bytes]
# The same, as one row of Spark SQL.
RESULT_SCHEMA = "rank int, result binary"


class InputStreamError(TrainingError):
    """Spark hands on no more rows. It knows why, such as a row that cannot be computed, and says it of the task."""


class SparkWords(Enum):
    """Words of Spark 3.5 to 4.3 for an error, classic and over Spark Connect, as a regular expression."""

    EXECUTOR_LOST = r"ExecutorLostFailure|java\.net\.SocketException|ExecutorDeadException"
    # A task that is gone with all that it could say.
    TASK_LOST = r"ExecutorLostFailure|Python worker exited unexpectedly"
    # Spark ends Python workers of a cancelled job seconds later, when one of them may work for the next job.
    WORKER_ENDED = r"Python worker exited unexpectedly|java\.io\.IOException: Stream closed"
    ASKED_TO_END = r"asked to end \(SIGTERM\)|the driver ended the run"  # a task of ranks
    APPLICATION_GONE = r"SparkContext was shut down|stopped SparkContext|FetchFailed|All masters are unresponsive"
    CANCELLED = r"Job \d+ cancelled[^\n]*|\[?OPERATION_CANCELED\]?[^\n]*"
    STOPPED = r'SparkContext\.dagScheduler\(\)" is null'  # in the middle of a call
    TOO_FEW_SLOTS = r"SPARK-24819"
    FORBIDDEN_CHAIN = r"SPARK-2482[01]"  # of a barrier stage
    LOST_EXECUTOR = r"ExecutorLostFailure \(executor (\S+)"
    FAILED_TASK = r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully"
    OUT_OF_MEMORY = r"possible container OOM|OOMKilled"  # Kubernetes; YARN's report says itself what to raise
    OTHER_PYTHON = r"different version:? (.+?) than that in driver"
    NO_PROGRAM = r'Cannot run program "([^"]+)"'
    NO_MODULE = r"No module named '([^']+)'"
    DRIVER_UNREACHED = (  # what a task of elephant's raises
        r"elephant\.\w+: (connecting to the driver did not end[^\n]*|[^\n]+ listens no more[^\n]*|"
        r"Cannot connect to [^\n]*)"
    )
    NO_PATH = r"PATH_NOT_FOUND|Path does not exist"
    PATH_TAKEN = r"PATH_ALREADY_EXISTS|FileAlreadyExistsException"
    UNKNOWN_SCHEME = r"UnsupportedFileSystemException|No FileSystem for scheme|No filesystem for scheme"

    def search(self, report: object) -> re.Match[str] | None:
        """Returns where the words are in an error or its text; None where they are not, or there is no error."""
        return None if report is None else re.search(self.value, str(report))


def lost_with(report: str) -> tuple[str, int | None]:
    """Returns the executor and the partition that Spark's report on a failed barrier job says were lost.

    >>> lost_with("barrier task ResultTask(8, 1) finished unsuccessfully.\\nExecutorLostFailure (executor 2 exited")
    ('2', 1)
    >>> lost_with("Job 3 cancelled")
    ('', None)
    """
    executor, task = SparkWords.LOST_EXECUTOR.search(report), SparkWords.FAILED_TASK.search(report)
    return ("" if executor is None else executor[1], None if task is None else int(task[1]))


def cause_of(error: Exception | None) -> str:
    """Returns the telling lines of Spark's report: what comes after its preamble and before the JVM's stack."""
    text = str(error).split("finished unsuccessfully.")[-1].split(_JVM_STACK)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = list(itertools.takewhile(lambda line: not line.startswith("at "), lines))
    if len(told) > _CAUSE_LINES:
        # The last line of a traceback says what it is about.
        told = [told[0], "...", *told[2 - _CAUSE_LINES :]]
    return "\n".join(told)


@contextlib.contextmanager
def described(session: SparkSession, text: str) -> Iterator[None]:
    """Says in Spark's pages what the jobs are that this thread, and each `SparkJob` that it starts, run in the block.

    The text comes behind the description that there is, the user's own or that of an outer block, which comes back.
    Over Spark Connect, where clients describe nothing, the text is a tag.
    """
    if is_remote(session):
        # Commas end a tag.
        tag = text.replace(",", ";")
        session.addTag(tag)
        try:
            yield
        finally:
            session.removeTag(tag)
        return
    context: Any = jvm_context(session)
    spark, before = None, None
    # The block itself has more to say of a session that was stopped, or whose JVM has ended.
    with contextlib.suppress(Exception):
        if context is not None and has_own_properties(context):
            spark = java_context(context).sc()
            before = spark.getLocalProperties()
            # A copy: PySpark has all threads of a CrossValidator share one object.
            own = before.clone()
            own.setProperty(_DESCRIPTION, ": ".join(part for part in (before.getProperty(_DESCRIPTION), text) if part))
            spark.setLocalProperties(own)
    try:
        yield
    finally:
        if spark is not None and before is not None:
            with contextlib.suppress(Exception):
                spark.setLocalProperties(before)


def has_own_properties(context: Any) -> bool:
    """Returns whether each thread of Python has one of the JVM's (PYSPARK_PIN_THREAD), which has the properties."""
    from py4j.clientserver import ClientServer

    return isinstance(gateway_of(context), ClientServer)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> counted(1, "worker"), counted(2, "epoch")
    ('1 worker', '2 epochs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class SparkJob:
    """A Spark action in a thread of its own, so that the driver can listen, and cancel it.

    Where the JVM is kept from Python, as on some shared clusters, there is no way to cancel: the action goes
    on until its tasks hear that nobody follows them any more.

    What the action raises after `cancel` is no `error`.
    """

    def __init__(self, session: SparkSession, tag: str, action: Callable[[], list[Any]]) -> None:
        from pyspark import InheritableThread

        self._session = session
        self._tag = tag
        self._action = action
        self._cancelled = False
        # Not the thread itself: a join that is interrupted takes it for ended (Python 3.10 to 3.12).
        self._ended = threading.Event()
        self.error: Exception | None = None
        self.rows: list[Any] = []
        # Inherits the scheduler pool, job group and description of the calling thread.
        own = {"session": session} if is_remote(session) else {}
        thread = InheritableThread(target=self._run, name=f"elephant-job-{tag}", **own)
        thread.daemon = True
        thread.start()

    def _run(self) -> None:
        try:
            context = jvm_context(self._session)
            if context is not None:
                context.addJobTag(self._tag)
            elif is_remote(self._session):
                self._session.addTag(self._tag)
            if not self._cancelled:
                self.rows = self._action()
        except Exception as error:
            if not self._cancelled:
                self.error = error
        finally:
            self._ended.set()

    @property
    def running(self) -> bool:
        """True if the action has not returned yet."""
        return not self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        """Waits until the action has returned, or for so long."""
        self._ended.wait(timeout_s)

    def cancel(self) -> None:
        """Ends the job's tasks, and waits for the action to return."""
        self._cancelled = True
        deadline = time.monotonic() + _CANCEL_GRACE_S
        # More than once: one that is only being submitted is not there yet to be cancelled.
        while self.running and time.monotonic() < deadline:
            # Nothing is to be ended where nobody is left to ask, and what ended the fit tells more.
            with contextlib.suppress(Exception):
                self._ask_to_cancel()
            self._ended.wait(_CANCEL_AGAIN_S)

    def _ask_to_cancel(self) -> None:
        context = jvm_context(self._session)
        if context is not None:
            context.cancelJobsWithTag(self._tag)
        elif is_remote(self._session):
            self._session.interruptTag(self._tag)


def cancellation(error: Exception | None) -> JobCancelledError | None:
    """Returns the error of a job that somebody cancelled; None for a job that ended otherwise.

    >>> cancellation(RuntimeError("[SPARK_JOB_CANCELLED] Job 7 cancelled part of cancelled job group nightly"))
    JobCancelledError('the Spark job was cancelled: Job 7 cancelled part of cancelled job group nightly')
    >>> cancellation(RuntimeError("Job aborted due to stage failure")) is None
    True
    """
    said = SparkWords.CANCELLED.search(error)
    if said is not None:
        return JobCancelledError(f"the Spark job was cancelled: {said[0].strip()}")
    if SparkWords.STOPPED.search(error) is not None:
        return JobCancelledError("the Spark job was cancelled: the SparkContext was shut down")
    return None


def lost_driver(error: Exception | None) -> ClusterError | None:
    """Returns the error of a job whose application's JVM ended under it; None for a job that ended otherwise.

    >>> lost_driver(ConnectionRefusedError(111, "Connection refused"))
    ClusterError("expected Spark's JVM beside the driver's Python to go on. Received: its end ...
    >>> lost_driver(RuntimeError("Job aborted due to stage failure")) is None
    True
    """
    # What Py4J raises for a call that it was in the middle of, and for those that come after.
    if not isinstance(error, ConnectionError) and type(error).__name__ != "Py4JNetworkError":
        return None
    return ClusterError(
        "expected Spark's JVM beside the driver's Python to go on. Received: its end "
        f"({type(error).__name__}: {error}). The system may have killed it for its memory (spark.driver.memory), or "
        "somebody else did. Start Python and the session again."
    )


def end_attempt(session: SparkSession, attempt: int) -> bool:
    """Ends one attempt at a task, which does not count as a failure of that task; returns whether Spark can be asked.

    It cannot on Spark Connect.
    """
    context = jvm_context(session)
    if context is None:
        return False
    java_context(context).sc().killTaskAttempt(attempt, True, "another attempt goes on in its place")
    return True


def result_row(rank: int, result: bytes) -> pa.RecordBatch:
    """Returns a `ResultRow` as one row of `RESULT_SCHEMA`.

    Of buffers, because ``pa.array`` imports pandas into each of Spark's Python workers: 0.2 s of the first task there.

    >>> result_row(3, b"abc").to_pylist()
    [{'rank': 3, 'result': b'abc'}]
    """
    import pyarrow as pa

    numbers = pa.Array.from_buffers(pa.int32(), 1, [None, pa.py_buffer(struct.pack("i", rank))])
    ends = pa.py_buffer(struct.pack("2i", 0, len(result)))
    return pa.RecordBatch.from_arrays(
        [numbers, pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(result)])], ["rank", "result"]
    )
