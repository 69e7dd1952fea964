"""What the ranks of one run say until it ends, and what that makes: a result, or the error that came first."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from elephant.cluster.spark_job import SparkJob
from elephant.data.schema import RowSpec
from elephant.errors import ClusterError, ElephantError, TrainingError, WorkerFailure, user_error
from elephant.monitor.channel import Channel
from elephant.monitor.events import EpochEnded, Event, Failed, Gone, Silent, Started, Trained
from elephant.monitor.history import History
from elephant.monitor.progress import Progress

_POLL_S = 0.1
_CAUSE_GRACE_S = 3.0
_CAUSE_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a fit that went well leaves.

    Args:
        history: One number per epoch by metric, over all workers.
        variables: The trained model's variables.
        rows: What one row of its input is.
    """

    history: dict[str, list[float]]
    variables: list[np.ndarray]
    rows: RowSpec


class Following:
    """Keeps what the ranks of one run say until it ends.

    Args:
        channel: Where they say it.
        progress: Shown what they say.
    """

    def __init__(self, channel: Channel, progress: Progress) -> None:
        self._channel = channel
        self._progress = progress
        self._history = History()
        self._started: dict[int, Started] = {}
        self._failures: list[Failed] = []
        self._trained: Trained | None = None
        self._silent: Silent | None = None
        self._gone: list[Gone] = []

    @property
    def began(self) -> bool:
        """Whether any rank has begun its work, or failed of itself."""
        return bool(self._started) or any(not failure.is_echo for failure in self._failures)

    def until_ended(self, job: SparkJob) -> None:
        """Listens until the job has ended, or a rank has fallen silent."""
        while job.running and not self._is_lost:
            self._take(_POLL_S)
        while self._take(0.0):
            pass
        if job.error is not None and not self._is_lost:
            self._await_cause()

    @property
    def _is_lost(self) -> bool:
        """Whether there is no point in waiting for the job to end by itself."""
        return self._silent is not None

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
        elif isinstance(event, Gone):
            self._gone.append(event)

    def raise_failure(self, job_error: Exception | None) -> None:
        """Raises why the run failed, if it did: the cause, where a rank or the driver knows it."""
        if self._causes:
            raise as_error(self._causes[0]) from job_error
        if self._silent is not None:
            raise WorkerFailure(
                f"nothing was heard from it for {self._silent.silent_s:.0f} s: the process is frozen, "
                "or its connection to the driver is cut",
                rank=self._silent.rank,
                host=self._host_of(self._silent.rank),
            )
        if job_error is None:
            return
        if "No module named 'elephant'" in str(job_error):
            raise ClusterError(
                "expected elephant to be installed where the executors' Python is. Received: No module named "
                "'elephant'. Install elephant-spark there, or ship an environment (spark.archives)."
            ) from job_error
        raise self._unexplained(job_error) from job_error

    @property
    def _causes(self) -> list[Failed]:
        """What ranks failed of, the first one first, without what only followed from it."""
        return [failure for failure in self._failures if not failure.is_echo]

    def _unexplained(self, job_error: Exception) -> ElephantError:
        """Returns what there is to say when no rank has told a cause: one has vanished, or left its peers alone."""
        told = {failure.rank for failure in self._failures}
        vanished = next((gone for gone in self._gone if gone.rank not in told), None)
        if vanished is not None:
            return WorkerFailure(
                f"its process ended without a word, and so did its Spark task: {_cause(job_error)}",
                rank=vanished.rank,
                host=self._host_of(vanished.rank),
            )
        if self._failures and self._started:
            return as_error(self._failures[0])
        return TrainingError(f"the Spark job failed, and no rank said why: {_cause(job_error)}")

    def _host_of(self, rank: int) -> str:
        return self._started[rank].host if rank in self._started else "its host"

    def outcome(self) -> Outcome:
        """Returns what a fit left; raises TrainingError when it left nothing."""
        if self._trained is None:
            raise TrainingError(
                "expected the trained model from rank 0. Received: nothing, though its task ended well."
            )
        return Outcome(
            history=self._history.as_dict(),
            variables=list(self._trained.arrays),
            rows=RowSpec.from_json(self._trained.rows),
        )


def as_error(failure: Failed) -> ElephantError:
    """Returns the error that a rank's failure is on the driver."""
    return user_error(failure.kind, failure.message) or WorkerFailure(
        f"{failure.kind.removeprefix('elephant.')}: {failure.message}",
        rank=failure.rank,
        host=failure.host,
        traceback=failure.traceback,
        log_tail=failure.log_tail,
    )


def _cause(error: Exception) -> str:
    """Returns the telling lines of Spark's report: what comes after its own preamble, without the JVM's stack."""
    text = str(error).split("finished unsuccessfully.")[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    return "\n".join(lines[:_CAUSE_LINES])
