"""What the workers of an asynchronous fit say until it ends: epochs, lost processes that Spark replaces, errors."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Protocol

from elephant.checkpoint.writer import CheckpointSink
from elephant.cluster.coordinator import Coordinator, EventSource, ProgressDisplay, as_error, is_retryable
from elephant.cluster.server_processes import ServerGroup
from elephant.cluster.spark_job import cancellation
from elephant.cluster.task import SUPERSEDED
from elephant.errors import (
    DataError,
    ElephantError,
    NetworkError,
    ServerFailedError,
    TrainingError,
    WorkerFailure,
    kind_of,
)
from elephant.monitor.events import (
    EpochEnded,
    EpochPart,
    Event,
    RankFailed,
    RankSilent,
    Started,
    StopRequested,
    TaskSilent,
)

_SERVER_FAILED = kind_of(ServerFailedError(""))


class Epochs(Protocol):
    """What makes the fit's epochs of those of its workers; see `elephant.training.driver_callbacks`."""

    def add(self, part: EpochPart) -> list[EpochEnded]:
        """Returns the epochs that have ended with this part of one."""

    def stop(self) -> None:
        """Has all workers stop."""

    def remind(self) -> None:
        """Tells servers that have come back what they may have forgotten."""


class AsyncCoordinator(Coordinator):
    """Keeps what the workers of one asynchronous fit say until it ends.

    A worker whose process was lost is Spark's to run again, and does not end the fit. One
    that failed by itself (the user's code, the data) does, at once.

    Args:
        channel: Where they say it.
        progress: Shown what they say.
        servers: Looked after meanwhile.
        epochs: Told what workers say of their epochs.
        num_ranks: Workers of the fit.
        end_attempt: Called with the number of an attempt at a task, to end it; returns whether that is possible.
        keeper: Writes checkpoints; asked whether it can.

    Attributes:
        retries: How often a worker was started in place of one that was lost, or that another attempt overtook.
    """

    def __init__(
        self,
        channel: EventSource,
        progress: ProgressDisplay,
        *,
        servers: ServerGroup,
        epochs: Epochs,
        num_ranks: int,
        end_attempt: Callable[[int], bool],
        checkpoint_writer: CheckpointSink | None = None,
    ) -> None:
        super().__init__(channel, progress, checkpoint_writer)
        self._end_attempt = end_attempt
        self._servers = servers
        self._epochs = epochs
        self._num_ranks = num_ranks
        self._frozen: set[int] = set()
        self._lost: list[RankFailed] = []
        self._began_at = self._ended_at = 0.0
        self.retries = 0

    @property
    def training_s(self) -> float:
        """Seconds from the first worker's start to the last end of an epoch."""
        return self._ended_at - self._began_at

    @property
    def _is_decided(self) -> bool:
        return bool(self._failures) or self._silent is not None or self._has_rested

    @property
    def _is_complete(self) -> bool:
        return len(self._finished) == self._num_ranks

    def _may_receive_more(self, job_error: Exception) -> bool:
        return False

    def _step_of(self, rank: int) -> int | None:
        return self._next_steps.get(rank)

    def _take(self, timeout_s: float) -> bool:
        try:
            notes = self._servers.check()
        except ServerFailedError as error:
            # Lost for good, as far as this run can tell.
            error.retryable = cancellation(error) is None
            raise
        for note in notes:
            self._progress.note(note)
        if notes:
            # A server that cannot be reached even now is reported by the next check.
            with contextlib.suppress(NetworkError):
                self._epochs.remind()
        return super()._take(timeout_s)

    def _keep(self, event: Event) -> None:
        if isinstance(event, RankFailed):
            self._keep_failure(event)
        elif isinstance(event, RankSilent):
            self._progress.note(f"nothing was heard from rank {event.rank} for {event.silent_s:.0f} s")
        elif isinstance(event, TaskSilent):
            self._keep_frozen(event)
        elif isinstance(event, EpochPart):
            self._ended_at = time.monotonic()
            for epoch in self._epochs.add(event):
                self._history.add(epoch.logs)
                self._progress.show(epoch)
        elif isinstance(event, StopRequested):
            self._epochs.stop()
        else:
            if isinstance(event, Started):
                self._handshake(event)
            super()._keep(event)

    def _handshake(self, started: Started) -> None:
        if not self._started:
            self._began_at = self._ended_at = time.monotonic()
        known = self._started.get(started.rank)
        if known is not None:
            self.retries += 1
            self._progress.note(f"rank {started.rank} goes on, on {started.host}")
            if (known.training_rows, known.validation_rows) != (started.training_rows, started.validation_rows):
                warnings.warn(_other_rows(known, started), UserWarning, stacklevel=2)

    def _keep_frozen(self, task: TaskSilent) -> None:
        """Has Spark run a task again that froze before its worker had begun; once, and where Spark can be asked."""
        if task.rank in self._frozen or not self._end_attempt(task.attempt):
            super()._keep(task)
            return
        self._frozen.add(task.rank)
        self.retries += task.rank not in self._started
        self._progress.note(
            f"rank {task.rank} on {task.host} was lost: nothing was heard from its Spark task for {task.silent_s:.0f} "
            "s. Spark runs it again, the others go on"
        )

    def _keep_failure(self, failed: RankFailed) -> None:
        if failed.kind == SUPERSEDED:
            # Its own error would count as a failure, and with speculation on, a slow task is overtaken again and again.
            self._end_attempt(failed.attempt)
            return
        if not is_retryable(failed.kind):
            super()._keep(failed)
            return
        self._lost.append(failed)
        # One that has begun is counted when the next attempt begins: a lost executor says nothing.
        self.retries += failed.rank not in self._started
        reason = failed.message.split(". ")[0].splitlines()[0].rstrip(".")
        self._progress.note(
            f"rank {failed.rank} on {failed.host} was lost: {reason}. Spark runs it again, the others go on"
        )

    def _raise_failure(self, job_error: Exception | None) -> None:
        if self._failures and self._failures[0].kind == _SERVER_FAILED:
            raise ServerFailedError(self._failures[0].message) from job_error
        super()._raise_failure(job_error)

    @property
    def _causes(self) -> list[RankFailed]:
        return self._failures

    def _unexplained(self, job_error: Exception | None) -> ElephantError:
        if not self._lost:
            return super()._unexplained(job_error)
        last = self._lost[-1]
        error = as_error(last)
        if not isinstance(error, WorkerFailure):
            return error
        times = sum(failed.rank == last.rank for failed in self._lost)
        return WorkerFailure(
            f"{error.summary} This was its loss number {times}, after which Spark gave it up (spark.task.maxFailures).",
            rank=error.rank,
            host=error.host,
            executor=error.executor,
            step=error.step,
            log_tail=error.log_tail,
        )

    def history(self) -> dict[str, list[float]]:
        """Returns one number per epoch by metric; raises DataError when no worker had rows to train on."""
        if not sum(started.training_rows for started in self._started.values()):
            raise DataError("expected rows to train on. Received: rows that are all marked for validation.")
        return self._history.as_dict()

    def require_all_steps(self, positions: Mapping[str, int], *, epochs: int, batch_size: int) -> None:
        """Raises TrainingError when servers lack steps of a worker that had finished, and could not repeat them.

        Args:
            positions: The last step of each partition that all servers have applied.
            epochs: Of the fit.
            batch_size: Rows of a step.
        """
        for rank, started in sorted(self._started.items()):
            expected = epochs * -(-started.training_rows // batch_size)
            known = positions.get(str(rank), 0)
            if known < expected:
                raise TrainingError(
                    f"expected all {expected} steps of rank {rank} in the model. Received: {known}. A parameter server "
                    "was lost after the worker had finished, and its last snapshot had not been written. Look at the "
                    "disk of the folder for temporary files, and fit again."
                )


def _other_rows(before: Started, now: Started) -> str:
    return (
        f"rank {now.rank}: expected the {before.training_rows} training and {before.validation_rows} validation rows "
        f"that it had before it was lost. Received: {now.training_rows} and {now.validation_rows}. The DataFrame is "
        "computed anew and comes out differently, so that some rows count twice and others not at all: write it to "
        "disk, or checkpoint it, before fit."
    )
