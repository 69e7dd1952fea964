"""Coordinator: collects the events of a run and decides its outcome, a result or the first cause of a failure."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from elephant.checkpoint.writer import CheckpointSink
from elephant.cluster.process import ENDED, EXITED, FROZEN
from elephant.cluster.spark_job import cancellation, cause_of, lost_driver, lost_with
from elephant.cluster.task import SUPERSEDED
from elephant.data.schema import RowSpec
from elephant.errors import ClusterError, ElephantError, NetworkError, TrainingError, WorkerFailure, user_error
from elephant.monitor.events import (
    EpochEnded,
    Event,
    Finished,
    RankFailed,
    RankGone,
    RankSilent,
    Started,
    StateSaved,
    StepEnded,
    TaskSilent,
    TrainingFinished,
)
from elephant.monitor.log_stream import TokenBucket
from elephant.monitor.progress import History

# Spark's words for an executor, or a Python worker of it, that was lost.
LOST = ("ExecutorLostFailure", "java.net.SocketException", "ExecutorDeadException")

_POLL_S = 0.1
# How long those that know why a rank was lost, its Spark task above all, may take to say it.
_CAUSE_GRACE_S = 2.0
# How long the tasks of ranks that have said all may take to end. A fit needs nothing more of them.
_END_GRACE_S = 10.0
# Between two lines about connections that were refused.
_REFUSALS_S = 60.0
_MOST_HOSTS_SHOWN = 5
# Spark's words for a task that is gone with all that it could say.
_TASK_LOST = ("ExecutorLostFailure", "Python worker exited unexpectedly")


def is_retryable(kind: str) -> bool:
    """Returns whether an error is of a kind that another attempt of the same task may not meet.

    Args:
        kind: What `elephant.errors.kind_of` says of it.

    >>> is_retryable("elephant.PeerLostError"), is_retryable("elephant.DataError"), is_retryable("ConnectionResetError")
    (True, False, False)
    """
    return kind in _PASSING


def may_retry(failed: RankFailed) -> bool:
    """Returns whether the whole fit may not meet a rank's failure again: all that passes, but for exits of its own.

    >>> killed = RankFailed(rank=0, host="a", kind=ENDED, message="its process was killed (signal 9)")
    >>> left = RankFailed(rank=0, host="a", kind=ENDED, message="its process exited with 3: something called os._exit")
    >>> may_retry(killed), may_retry(left)
    (True, False)
    """
    return is_retryable(failed.kind) and not failed.message.startswith(EXITED)


def is_lost(job_error: BaseException | None) -> bool:
    """Returns whether Spark says of a job that it failed with an executor."""
    return job_error is not None and any(word in str(job_error) for word in LOST)


def _kinds(error: type[NetworkError]) -> set[str]:
    return {f"elephant.{error.__name__}"}.union(*(_kinds(child) for child in error.__subclasses__()))


_PASSING = frozenset({ENDED, FROZEN, *_kinds(NetworkError)} - {SUPERSEDED})


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of a fit.

    Args:
        variables: The trained model's, in the order of `elephant.modeling.variables.read_variables`.
        rows: Shapes and types of one row of its input.
        history: One number per epoch by metric, over all workers.
        statistics: Counts; see `elephant.spark.model.KerasModel.training_statistics`.
        plan: Where each rank ran; see `elephant.spark.model.KerasModel.plan`.
    """

    variables: list[np.ndarray]
    rows: RowSpec
    history: dict[str, list[float]]
    statistics: dict[str, Any] = field(default_factory=dict)
    plan: list[dict[str, Any]] = field(default_factory=list)


class RunningJob(Protocol):
    """What runs the ranks; see `elephant.cluster.spark_job.SparkJob`."""

    error: Exception | None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""


class EventSource(Protocol):
    """Where ranks say something; see `elephant.monitor.channel.Channel`."""

    def next_event(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None when none comes in time."""

    @property
    def turned_away(self) -> Mapping[str, int]:
        """How many connections of each host have not shown that they belong to the run."""


class ProgressDisplay(Protocol):
    """Shown what ranks say; see `elephant.monitor.progress.Progress`."""

    def show(self, event: Event) -> None:
        """Takes an event."""

    def note(self, text: str) -> None:
        """Takes a line about the run as a whole."""


class Coordinator:
    """Keeps what the ranks of one run say until it ends.

    Args:
        channel: Where they say it.
        progress: Shown what they say.
        keeper: Writes checkpoints; None makes none.
    """

    def __init__(
        self, channel: EventSource, progress: ProgressDisplay, checkpoint_writer: CheckpointSink | None = None
    ) -> None:
        self._channel = channel
        self._checkpoint_writer = checkpoint_writer
        self._progress = progress
        self._history = History()
        self._started: dict[int, Started] = {}
        self._failures: list[RankFailed] = []
        self._trained: TrainingFinished | None = None
        self._finished: set[int] = set()
        self._complete_at: float | None = None
        self._silent: RankSilent | TaskSilent | None = None
        self._gone: list[RankGone] = []
        self._lost_at: float | None = None
        self._gave_up = False
        self._next_steps: dict[int, int] = {}
        self._told_of = 0
        self._may_tell = TokenBucket(per_second=1 / _REFUSALS_S, burst=1)

    @property
    def statistics(self) -> dict[str, Any]:
        """What was counted, by the names that `elephant.KerasModel.training_statistics` has for it."""
        return {"refused_connections": dict(self._channel.turned_away)}

    @property
    def began(self) -> bool:
        """Whether any rank has begun its work, or failed of itself."""
        return bool(self._started) or any(not failure.is_echo for failure in self._failures)

    @property
    def plan(self) -> list[dict[str, Any]]:
        """Where each rank ran: ``rank``, ``host``, ``executor``, ``device``, ``devices`` and ``threads``."""
        return [
            {
                "rank": rank,
                "host": started.host,
                "executor": started.executor,
                "device": started.device,
                "devices": list(started.devices),
                "threads": started.threads,
            }
            for rank, started in sorted(self._started.items())
        ]

    def until_ended(self, job: RunningJob, watch: Callable[[], None] | None = None) -> None:
        """Listens until the job has ended, or there is no point in waiting for that.

        Args:
            job: The job.
            watch: Called meanwhile; raises where the job can never end.
        """
        while job.running and not self._is_decided:
            if watch is not None:
                watch()
            self._take(_POLL_S)
            self._note_refusals()
        self._gave_up = job.running
        while self._take(0.0):
            pass
        self._note_refusals(last=True)
        if job.error is not None:
            self._note_loss()
            while self._may_receive_more(job.error):
                self._take(_POLL_S)

    def _note_refusals(self, *, last: bool = False) -> None:
        """Says who was turned away since the last time: once a minute at most, and in the end."""
        turned_away = self._channel.turned_away
        count = sum(turned_away.values())
        if count > self._told_of and (self._may_tell.take() or last):
            self._told_of = count
            self._progress.note(f"{refusals(turned_away)}: they did not prove that they belong to this run")

    @property
    def _is_decided(self) -> bool:
        """Whether it is known that the run has failed, and of what, as far as anybody will say."""
        return bool(self._causes) or self._silent is not None or self._has_waited or self._has_rested

    @property
    def _has_rested(self) -> bool:
        """Whether all that the fit is for came some time ago: a task that goes on is frozen."""
        return self._complete_at is not None and time.monotonic() - self._complete_at > _END_GRACE_S

    @property
    def _is_complete(self) -> bool:
        """Whether all that the fit is for has come."""
        return self._trained is not None and self._started.keys() <= self._finished

    @property
    def _has_waited(self) -> bool:
        """Whether a rank was lost some time ago, and nobody has said why since: nor will anybody."""
        return self._lost_at is not None and time.monotonic() - self._lost_at > _CAUSE_GRACE_S

    def _may_receive_more(self, job_error: Exception) -> bool:
        """Whether a rank may still say why the job has failed: those that failed because of it may speak sooner."""
        if self._is_decided or self._complete_at is not None or _known_cause(job_error) is not None:
            return False
        if self._gone and any(word in str(job_error) for word in _TASK_LOST):
            return False
        return bool(self._started or self._failures)

    def _take(self, timeout_s: float) -> bool:
        if self._checkpoint_writer is not None:
            self._checkpoint_writer.check()
        event = self._channel.next_event(timeout_s)
        if event is None:
            return False
        self._keep(event)
        self._progress.show(event)
        return True

    def _keep(self, event: Event) -> None:
        if isinstance(event, Started):
            if event.note and event.note not in {started.note for started in self._started.values()}:
                warnings.warn(event.note, UserWarning, stacklevel=2)
            self._started[event.rank] = event
            if event.first_step is not None:
                self._next_steps[event.rank] = event.first_step
        elif isinstance(event, StepEnded):
            self._next_steps[event.rank] = event.epoch * event.steps + event.step + 1
        elif isinstance(event, EpochEnded) and event.rank == 0:
            self._history.add(event.logs)
        elif isinstance(event, TrainingFinished):
            self._trained = event
        elif isinstance(event, Finished):
            self._finished.add(event.rank)
            if self._is_complete:
                self._complete_at = time.monotonic()
        elif isinstance(event, StateSaved):
            if self._checkpoint_writer is not None:
                self._checkpoint_writer.keep(event.state)
        elif isinstance(event, RankFailed):
            self._failures.append(event)
            self._note_loss()
        elif isinstance(event, RankSilent | TaskSilent):
            self._silent = event
        elif isinstance(event, RankGone):
            self._gone.append(event)
            self._note_loss()

    def _note_loss(self) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()

    def raise_failure(self, job_error: Exception | None) -> None:
        """Raises why the run failed, if it did: the cause, where a rank or the driver knows it."""
        try:
            self._raise_failure(job_error)
        except TrainingError as error:
            error.retryable = self._is_retryable(job_error)
            raise

    def _is_retryable(self, job_error: Exception | None) -> bool:
        """Whether the run may be started again: it did not fail of the user's code or data, nor was it cancelled."""
        if self._causes:
            return may_retry(self._causes[0])
        if self._silent is not None:
            return True
        return cancellation(job_error) is None and (bool(self._started) or is_lost(job_error))

    def _raise_failure(self, job_error: Exception | None) -> None:
        if self._causes:
            raise as_error(self._causes[0]) from job_error
        if self._silent is not None:
            raise self._failure_of_silence(self._silent)
        if self._complete_at is not None:
            # All that the fit is for has come: what ends its tasks afterwards, or keeps them from it, takes nothing.
            return
        known = _known_cause(job_error)
        if known is not None:
            raise known from job_error
        if job_error is None and not self._gave_up:
            return
        if "No module named 'elephant'" in str(job_error):
            raise ClusterError(
                "expected elephant to be installed where the executors' Python is. Received: No module named "
                "'elephant'. Install elephant-spark there, or ship an environment (spark.archives)."
            ) from job_error
        raise self._unexplained(job_error) from job_error

    @property
    def _causes(self) -> list[RankFailed]:
        """What ranks failed of, the first one first, without what only followed from it."""
        return [failure for failure in self._failures if not failure.is_echo]

    def _unexplained(self, job_error: Exception | None) -> ElephantError:
        """Returns what there is to say when no rank has told a cause: one has vanished, or left its peers alone."""
        vanished = self._vanished(job_error)
        if vanished is not None:
            why = "" if job_error is None else f": {cause_of(job_error)}"
            return self._failure_of(vanished, f"its process ended without a word, and so did its Spark task{why}")
        if self._failures and self._started:
            return as_error(self._failures[0])
        return TrainingError(f"the Spark job failed, and no rank said why: {cause_of(job_error)}")

    def _vanished(self, job_error: Exception | None) -> int | None:
        """Returns the rank that vanished with its Spark task, or None where each has said something."""
        told = {failure.rank for failure in self._failures}
        gone = [event.rank for event in self._gone if event.rank not in told]
        executor, partition = lost_with(str(job_error))
        on_it = [rank for rank, started in sorted(self._started.items()) if executor and started.executor == executor]
        # Connections end in any order: those of ranks that were left alone may do so first.
        return next(iter([*on_it, *(rank for rank in gone if rank == partition), *gone]), None)

    def _failure_of(self, rank: int, summary: str) -> WorkerFailure:
        """Returns the failure of a rank that said nothing of it itself."""
        started = self._started.get(rank)
        return WorkerFailure(
            summary,
            rank=rank,
            host="its host" if started is None else started.host,
            executor="" if started is None else started.executor,
            step=self._step_of(rank),
        )

    def _failure_of_silence(self, silent: RankSilent | TaskSilent) -> WorkerFailure:
        if isinstance(silent, RankSilent):
            text = (
                f"nothing was heard from it for {silent.silent_s:.0f} s: the process is frozen, "
                "or its connection to the driver is cut"
            )
            return self._failure_of(silent.rank, text)
        text = (
            f"nothing was heard from its Spark task for {silent.silent_s:.0f} s: its Python worker is frozen (stopped "
            "by a signal, or on a host that is swapping), or its connection to the driver is cut"
        )
        return WorkerFailure(text, rank=silent.rank, host=silent.host, executor=silent.executor)

    def _step_of(self, rank: int) -> int | None:
        """Returns the step that a rank was in, as far as that is known: all ranks take the same one at a time."""
        steps = [failure.step for failure in self._failures if failure.step is not None]
        return max(steps or self._next_steps.values(), default=None)

    def result(self) -> FitResult:
        """Returns what a fit left; raises TrainingError when it left nothing."""
        if self._trained is None:
            raise TrainingError(
                "expected the trained model from rank 0. Received: nothing, though its task ended well."
            )
        return FitResult(
            history=self._history.as_dict(),
            variables=list(self._trained.arrays),
            rows=RowSpec.from_json(self._trained.rows),
            plan=self.plan,
            statistics=self.statistics,
        )


def refusals(counts: Mapping[str, int]) -> str:
    """Returns how many connections were refused, and from where.

    >>> refusals({"10.0.0.7": 1, "10.0.0.9": 1200})
    'refused connections: 1,201, from 10.0.0.9 (1,200), 10.0.0.7 (1)'
    """
    most = sorted(counts.items(), key=lambda item: -item[1])
    hosts = [f"{host} ({count:,})" for host, count in most[:_MOST_HOSTS_SHOWN]]
    more = [f"{len(most) - len(hosts)} more"] if len(most) > len(hosts) else []
    return f"refused connections: {sum(counts.values()):,}, from {', '.join([*hosts, *more])}"


def as_error(failure: RankFailed) -> ElephantError:
    """Returns the error that a rank's failure is on the driver."""
    return user_error(failure.kind, failure.message) or WorkerFailure(
        f"{failure.kind.removeprefix('elephant.')}: {failure.message}",
        rank=failure.rank,
        host=failure.host,
        executor=failure.executor,
        step=failure.step,
        traceback=failure.traceback,
        log_tail=failure.log_tail,
    )


def _known_cause(job_error: Exception | None) -> ElephantError | None:
    """Returns why a job ended, where no rank can know it."""
    return cancellation(job_error) or lost_driver(job_error)
