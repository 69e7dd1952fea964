"""One fit, seen from the driver: start the barrier job, follow its ranks, and end it whatever happens."""

from __future__ import annotations

import functools
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.cluster.partitions import num_partitions
from elephant.cluster.rendezvous import installed_versions
from elephant.cluster.task import RESULT_SCHEMA, Run, TaskSpec, train_partition
from elephant.config import FitConfig
from elephant.data.schema import DataSchema
from elephant.errors import ClusterError, ElephantError, TrainingError, WorkerError, user_error
from elephant.monitor.channel import Channel
from elephant.monitor.events import EpochEnded, Event, Failed, Silent, Started, Trained
from elephant.monitor.history import History
from elephant.monitor.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_POLL_S = 0.1
_CAUSE_GRACE_S = 3.0
_CANCEL_GRACE_S = 10.0
_FORBIDDEN_CHAIN = ("SPARK-24820", "SPARK-24821")
# Spark's words for an executor, or a Python worker of it, that was lost before it ran anything.
_PASSING = ("ExecutorLostFailure", "java.net.SocketException", "ExecutorDeadException")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a fit that went well leaves.

    Args:
        history: One number per epoch by metric, over all workers.
        variables: The trained model's variables.
        row_shape: Shape of one input row.
        ranks: What each rank said when it started.
    """

    history: dict[str, list[float]]
    variables: list[np.ndarray]
    row_shape: tuple[int, ...]
    ranks: list[Started]


class SparkJob:
    """A Spark action in a thread of its own, so that the driver can listen, and cancel it.

    Args:
        session: The Spark session.
        tag: Marks the job's tasks for cancelling.
        action: What runs it, such as ``frame.collect``.
    """

    def __init__(self, session: SparkSession, tag: str, action: Callable[[], Any]) -> None:
        from pyspark import InheritableThread

        self._session = session
        self._tag = tag
        self._action = action
        self.error: Exception | None = None
        # Inherits the scheduler pool, job group and description of the calling thread.
        self._thread = InheritableThread(target=self._run, name=f"elephant-job-{tag}")
        self._thread.daemon = True
        self._thread.start()

    def _run(self) -> None:
        tags = getattr(self._session, "_sc", None)
        try:
            if tags is not None:
                tags.addJobTag(self._tag)
            else:
                self._session.addTag(self._tag)
            self._action()
        except Exception as error:
            self.error = error

    @property
    def running(self) -> bool:
        """Whether the action has not returned yet."""
        return self._thread.is_alive()

    def cancel(self) -> None:
        """Ends the job's tasks, and waits for the action to return."""
        if self.running:
            context = getattr(self._session, "_sc", None)
            if context is not None:
                context.cancelJobsWithTag(self._tag)
            else:
                self._session.interruptTag(self._tag)
            self._thread.join(timeout=_CANCEL_GRACE_S)


def launch(
    frame: DataFrame, *, job: bytes, backend: str, schema: DataSchema, config: FitConfig, progress: Progress
) -> Outcome:
    """Runs one fit as one barrier job.

    Args:
        frame: The prepared columns.
        job: The pickled `elephant.training.job.TrainingJob`.
        backend: The Keras backend to train with: the driver's.
        schema: What the columns hold.
        config: The options of the fit.
        progress: Shown what happens.

    Raises:
        DataError: Rows that cannot be trained on.
        ClusterError: The cluster cannot run the fit.
        WorkerError: A rank failed; it has the rank's own traceback.
        TrainingError: The fit failed otherwise.
    """
    spec = TaskSpec(
        driver_versions=installed_versions(), job=job, backend=backend, schema=schema, timeouts=config.timeouts
    )
    kept = num_partitions(frame) == config.num_workers
    partitioned = frame if kept else frame.repartition(config.num_workers)
    retried = False
    while True:
        following, error = _run_once(partitioned, spec, progress)
        if partitioned is frame and _says(error, _FORBIDDEN_CHAIN):
            partitioned = frame.repartition(config.num_workers)
        elif not retried and not following.began and _says(error, _PASSING):
            retried = True
            progress.note("an executor was lost before any worker began: starting once more")
        else:
            return following.outcome(error)


def _run_once(frame: DataFrame, spec: TaskSpec, progress: Progress) -> tuple[_Following, Exception | None]:
    """Runs the barrier job to its end; returns what the ranks said, and the job's error if it failed."""
    session = frame.sparkSession
    run_id, token = uuid.uuid4().hex, secrets.token_bytes(32)
    advertised, bind = driver_addresses(session)
    with Channel(bind_host=bind, token=token, run_id=run_id, timeouts=spec.timeouts) as channel:
        run = Run(run_id=run_id, token=token, driver=(advertised, channel.port))
        task = functools.partial(train_partition, spec, run)
        ranks = frame.mapInArrow(task, RESULT_SCHEMA, barrier=True)
        following = _Following(channel, progress)
        spark_job = SparkJob(session, f"elephant-{run_id}", ranks.collect)
        try:
            following.until_ended(spark_job)
        finally:
            spark_job.cancel()
            channel.dismiss()
        return following, spark_job.error


def driver_addresses(session: SparkSession) -> tuple[str, str]:
    """Returns the address that executors reach the driver at, and the one that it binds to."""
    advertised = session.conf.get("spark.driver.host", None)
    if not advertised:
        raise ClusterError("expected spark.driver.host to be set. Received: nothing.")
    bind = session.conf.get("spark.driver.bindAddress", None) or advertised
    return advertised, bind


class _Following:
    """Keeps what the ranks of one job say until it ends."""

    def __init__(self, channel: Channel, progress: Progress) -> None:
        self._channel = channel
        self._progress = progress
        self._history = History()
        self._started: dict[int, Started] = {}
        self._failures: list[Failed] = []
        self._trained: Trained | None = None
        self._silent: Silent | None = None

    @property
    def began(self) -> bool:
        """Whether any rank has trained, or failed of itself."""
        return bool(self._started) or any(not failure.is_echo for failure in self._failures)

    def until_ended(self, job: SparkJob) -> None:
        while job.running and self._silent is None:
            self._take(_POLL_S)
        while self._take(0.0):
            pass
        if job.error is not None and self._silent is None:
            self._await_cause()

    def _await_cause(self) -> None:
        """Waits for the rank that failed first: those that failed because of it may speak sooner."""
        deadline = time.monotonic() + _CAUSE_GRACE_S
        while self._failures and all(failure.is_echo for failure in self._failures) and time.monotonic() < deadline:
            self._take(_POLL_S)

    def _take(self, timeout_s: float) -> bool:
        event = self._channel.next_event(timeout_s)
        if event is None:
            return False
        self._keep(event)
        self._progress.show(event)
        return True

    def _keep(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started[event.rank] = event
        elif isinstance(event, EpochEnded) and event.rank == 0:
            self._history.add(event.logs)
        elif isinstance(event, Trained):
            self._trained = event
        elif isinstance(event, Failed):
            self._failures.append(event)
        elif isinstance(event, Silent):
            self._silent = event

    def outcome(self, job_error: Exception | None) -> Outcome:
        """Returns what the fit left, or raises why it failed."""
        causes = [failure for failure in self._failures if not failure.is_echo]
        if causes:
            raise _as_error(causes[0]) from job_error
        if self._silent is not None:
            host = self._started[self._silent.rank].host if self._silent.rank in self._started else "its host"
            raise WorkerError(
                f"nothing was heard from it for {self._silent.silent_s:.0f} s: the process is frozen, "
                "or its connection to the driver is cut",
                rank=self._silent.rank,
                host=host,
            )
        if job_error is not None and "No module named 'elephant'" in str(job_error):
            raise ClusterError(
                "expected elephant to be installed where the executors' Python is. Received: No module named "
                "'elephant'. Install elephant-spark there, or ship an environment (spark.archives)."
            ) from job_error
        if job_error is not None:
            raise TrainingError(f"the Spark job failed, and no rank said why: {job_error}") from job_error
        if self._trained is None:
            raise TrainingError(
                "expected the trained model from rank 0. Received: nothing, though its task ended well."
            )
        return Outcome(
            history=self._history.as_dict(),
            variables=list(self._trained.arrays),
            row_shape=tuple(self._trained.row_shape),
            ranks=[self._started[rank] for rank in sorted(self._started)],
        )


def _as_error(failure: Failed) -> ElephantError:
    return user_error(failure.kind, failure.message) or WorkerError(
        f"{failure.kind}: {failure.message}",
        rank=failure.rank,
        host=failure.host,
        traceback=failure.traceback,
        log_tail=failure.log_tail,
    )


def _says(error: Exception | None, words: Sequence[str]) -> bool:
    return error is not None and any(word in str(error) for word in words)
