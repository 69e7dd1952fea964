"""A Spark action beside the driver's main thread is cancelled however late it is submitted."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest
from py4j.clientserver import ClientServer
from tables import every_case

from elephant.cluster import spark_job
from elephant.cluster.spark_job import SparkJob, cancellation, described
from elephant.errors import JobCancelledError


@pytest.fixture(autouse=True)
def no_jvm(monkeypatch):
    """Takes a JVM away that tests before have started: PySpark has threads inherit from it."""
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_gateway", None)


class Session:
    """A session over Spark Connect: jobs have tags, and can be interrupted once they run."""

    def __init__(self):
        self.submitted, self.interrupted = threading.Event(), threading.Event()

    def addTag(self, tag):
        pass

    def interruptTag(self, tag):
        if self.submitted.is_set():
            self.interrupted.set()


Session.__module__ = "pyspark.sql.connect.session"


class LockedSession:
    """A classic session whose JVM is kept from Python: whatever asks it for something is refused."""

    def __getattr__(self, name):
        raise RuntimeError(f"Py4JSecurityException: Method {name} is not whitelisted")


def test_job_when_the_jvm_is_kept_from_python_then_runs_without_a_tag():
    job = SparkJob(LockedSession(), "tag", lambda: ["row"])
    job.wait(30)
    job.cancel()
    assert job.error is None and job.rows == ["row"]


def test_job_when_cancelled_before_it_is_submitted_then_is_cancelled_all_the_same():
    session = Session()

    def action():
        time.sleep(0.7)
        session.submitted.set()
        if not session.interrupted.wait(30):
            return []
        raise RuntimeError("[OPERATION_CANCELED] Operation has been canceled.")

    job = SparkJob(session, "tag", action)
    time.sleep(0.1)
    job.cancel()
    assert not job.running and session.interrupted.is_set()
    # What the job says of it is no error: this side wanted it.
    assert job.error is None


def test_job_when_the_wait_for_it_is_interrupted_then_still_runs_and_is_cancelled():
    session = Session()

    def action():
        session.submitted.set()
        if session.interrupted.wait(30):
            raise RuntimeError("[OPERATION_CANCELED] Operation has been canceled.")
        return []

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        job = SparkJob(session, "tag", action)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            job.wait(30)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert job.running
    job.cancel()
    assert not job.running and session.interrupted.is_set()


@every_case(
    ("said", "kept"),
    [
        ("Job 4 cancelled part of cancelled job group nightly", "job group nightly"),
        (
            "x\n[SPARK_JOB_CANCELLED] Job 4 cancelled as part of cancellation of all jobs SQLSTATE: XXKDA\n\tat",
            "all jobs",
        ),
        ("Job 7 cancelled because Stage 9 was cancelled", "Stage 9"),
        ("Job 1 cancelled because SparkContext was shut down", "SparkContext was shut down"),
        ("[OPERATION_CANCELED] Operation has been canceled. SQLSTATE: HY008", "has been canceled"),
        (
            'NullPointerException: the return value of "org.apache.spark.SparkContext.dagScheduler()" is null',
            "SparkContext was shut down",
        ),
    ],
)
def test_cancellation_when_spark_says_it_in_any_way_then_is_an_error_of_its_own(said, kept):
    error = cancellation(RuntimeError(said))
    assert type(error) is JobCancelledError and kept in str(error) and "\n" not in str(error)


def test_cancellation_when_a_job_failed_otherwise_then_is_none():
    assert cancellation(None) is None
    assert cancellation(RuntimeError("Job aborted due to stage failure: ValueError: boom")) is None


def test_cancel_when_nobody_is_left_to_be_asked_then_raises_nothing_of_its_own():
    ended = threading.Event()

    class Gone(Session):
        def interruptTag(self, tag):
            ended.set()
            raise ConnectionRefusedError("the server is gone")

    def action():
        ended.wait(30)
        raise RuntimeError("the server is gone")

    job = SparkJob(Gone(), "tag", action)
    job.cancel()
    assert not job.running and ended.is_set()


class Properties(dict):
    """Properties of Java's."""

    def clone(self):
        return Properties(self)

    getProperty = dict.get
    setProperty = dict.__setitem__


class Context:
    """A context with one thread, whose local properties may be those of another thread too."""

    _gateway = ClientServer.__new__(ClientServer)

    def __init__(self, properties):
        self._jsc = SimpleNamespace(sc=lambda: self)
        self.properties = properties

    def getLocalProperties(self):
        return self.properties

    def setLocalProperties(self, properties):
        self.properties = properties


def test_description_when_blocks_are_nested_and_fail_then_the_user_s_own_is_there_again(monkeypatch):
    shared, seen = Properties({"spark.job.description": "nightly"}), []
    context = Context(shared)
    monkeypatch.setattr(spark_job, "jvm_context", lambda session: context)
    with pytest.raises(KeyError), described(LockedSession(), "elephant fit"):
        seen.append(context.properties)
        with described(LockedSession(), "first row"):
            seen.append(context.properties)
            raise KeyError("x")
    names = [each["spark.job.description"] for each in seen]
    assert names == ["nightly: elephant fit", "nightly: elephant fit: first row"]
    # Nor did another thread with the same properties see any of it.
    assert context.properties is shared and shared == {"spark.job.description": "nightly"}


def test_description_when_the_session_has_stopped_then_the_block_runs_all_the_same(monkeypatch):
    # A context that was stopped has no properties.
    monkeypatch.setattr(spark_job, "jvm_context", lambda session: object())
    with described(LockedSession(), "elephant fit"):
        pass


def test_description_when_there_is_no_context_then_is_a_tag_for_the_block():
    session, tags = Session(), []
    session.addTag, session.removeTag = tags.append, tags.remove
    with described(session, "elephant fit: 2 workers, 1 epoch"):
        assert tags == ["elephant fit: 2 workers; 1 epoch"]
    assert tags == []
