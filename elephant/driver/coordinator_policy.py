"""Policies of a coordinator: what ends a run, whose failure it is, and what Spark repairs, in each mode of a fit."""

from __future__ import annotations

import contextlib
import linecache
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

from elephant.checkpoint.state import FitState
from elephant.cluster.spark_job import SparkWords, cause_of, lost_with
from elephant.errors import (
    COORDINATOR_LOST,
    ENDED,
    FROZEN,
    SUPERSEDED,
    ElephantError,
    NetworkError,
    PreemptedError,
    RowsMovedError,
    ServerFailedError,
    TrainingError,
    WorkerFailure,
    first_line,
    is_retryable,
    kind_of,
    user_error,
    warn_user,
)
from elephant.monitor.events import (
    CallbacksDone,
    CallbacksDue,
    EpochEnded,
    EpochPart,
    Event,
    Finished,
    RankFailure,
    RankGone,
    RankSilent,
    Started,
    StepEnded,
    StopRequested,
    TaskSilent,
)
from elephant.monitor.record import FitRecord
from elephant.net.addresses import Address

# Of the fit as a whole, whichever rank it was that met them.
_OF_FIT = {kind_of(kind("")): kind for kind in (ServerFailedError, RowsMovedError, PreemptedError)}
TOPICS = {ENDED: "a-process-that-ended", FROZEN: "a-worker-that-is-silent"}
_MORE_MEMORY = "\nRaise spark.executor.memoryOverhead, or lower what a worker holds, such as batchSize."
_FRAME = re.compile(r'  File "(.+)", line (\d+)(?:, in .+)?')


class ProgressDisplay(Protocol):
    """Shows events; see `elephant.monitor.progress.Progress`."""

    def show(self, event: Event) -> None:
        """Takes an event."""

    def note(self, text: str) -> None:
        """Takes a line about the run as a whole."""

    def awaits(self, text: str) -> None:
        """Takes what a run waits for that has not begun; nothing where it waits for nothing."""


class Epochs(Protocol):
    """Makes the fit's epochs of those of its workers; see `elephant.driver.driver_epochs`."""

    def add(self, part: EpochPart) -> list[EpochEnded]:
        """Returns the epochs that have ended with this part of one."""

    def stop(self) -> None:
        """Has all workers stop."""

    def remind(self) -> None:
        """Repeats to servers that have come back what they may have forgotten."""

    def note(self, event: Started | StepEnded) -> None:
        """Takes a worker's start, or the news that it has trained."""

    def keep_up(self, *, is_wanted: bool = False) -> None:
        """Makes a checkpoint within the epoch where it is time for one, or somebody wants it."""


class CoordinatorPolicy(ABC):
    """Decisions of a coordinator in which the modes of a fit differ.

    Attributes:
        together: Whether ranks take every step together: a lost one ends the run, as soon as somebody has had the time
            to say why it was lost.
    """

    together: ClassVar[bool]

    @abstractmethod
    def check(self) -> None:
        """Raises what has failed besides the ranks."""

    def add(self, event: Event, record: FitRecord) -> None:
        """Takes an event into the record of the run, or repairs what it is about."""
        record.add(event)

    @abstractmethod
    def is_complete(self, record: FitRecord) -> bool:
        """Returns whether all that the run is for has come."""

    @abstractmethod
    def root_failure(self, record: FitRecord) -> RankFailure | None:
        """Returns the failure that the run ends with, without those that only followed from it."""

    @abstractmethod
    def step_of(self, rank: int, record: FitRecord) -> int | None:
        """Returns the step that a rank was in, as far as that is known."""

    def completed(self, state: FitState) -> FitState:
        """Returns a state of the fit, as rank 0 tells it, with what the driver knows."""
        return state

    def want_state(self) -> None:  # noqa: B027 - nothing, where states cannot be had on demand
        """Has a state of the fit made soon."""

    def confirm_state(self, epochs: int, step: int) -> None:  # noqa: B027 - nothing, where nobody waits for it
        """Tells who has sent a state of so many epochs and steps that it is here."""

    def has_begun(self, record: FitRecord) -> bool:
        """Returns whether any rank has begun its work, or failed of itself."""
        return bool(record.started) or any(not failure.is_echo for failure in record.failures)

    def unexplained(self, record: FitRecord, job_error: Exception | None) -> ElephantError:
        """Returns the error of a run of which no rank has said why it failed: one has vanished, or left its peers."""
        rank = _vanished(record, job_error)
        if rank is not None:
            why = "" if job_error is None else f": {cause_of(job_error)}"
            text = f"its process and its Spark task were lost without an error report{why}"
            text += _MORE_MEMORY if SparkWords.OUT_OF_MEMORY.search(why) else ""
            return failure_of(rank, text, record, step=self.step_of(rank, record), topic=TOPICS[ENDED])
        if record.failures and record.started:
            return as_error(record.failures[0])
        return TrainingError(f"the Spark job failed, and no rank said why: {cause_of(job_error)}")


class DriverTurns(Protocol):
    """Runs callbacks on the driver; see `elephant.driver.driver_turns.SynchronousEpochs`."""

    def take_turn(self, due: CallbacksDue) -> CallbacksDone:
        """Runs them; returns their answer."""

    def with_states(self, state: FitState) -> FitState:
        """Returns a state of the fit with what they remember."""


class FirstRank(Protocol):
    """Speaks to rank 0; see `elephant.monitor.channel.Channel`."""

    def answer(self, done: CallbacksDone) -> None:
        """Tells it what callbacks on the driver ask for."""

    def ask_for_state(self) -> None:
        """Asks it for a state of the fit soon."""

    def confirm_state(self, epochs: int, step: int) -> None:
        """Tells it that the state of so many epochs and steps is here."""


class SynchronousPolicy(CoordinatorPolicy):
    """Ranks that take every step together: the loss of one ends the run.

    Args:
        progress: Shown the epochs after which callbacks have run on the driver.
        turns: Runs these; None where there are none.
        first_rank: Rank 0, where there is something to tell it.
    """

    together = True

    def __init__(
        self,
        progress: ProgressDisplay | None = None,
        turns: DriverTurns | None = None,
        first_rank: FirstRank | None = None,
    ) -> None:
        self._progress = progress
        self._turns = turns
        self._first_rank = first_rank

    def check(self) -> None:
        """Does nothing: there are ranks alone."""

    def add(self, event: Event, record: FitRecord) -> None:
        record.add(event)
        if isinstance(event, CallbacksDue) and self._turns is not None and self._first_rank is not None:
            done = self._turns.take_turn(event)
            self._first_rank.answer(done)
            if event.epoch is not None:
                ended = EpochEnded(rank=0, epoch=event.epoch, logs=done.logs)
                record.add(ended)
                if self._progress is not None:
                    self._progress.show(ended)

    def want_state(self) -> None:
        if self._first_rank is not None:
            self._first_rank.ask_for_state()

    def confirm_state(self, epochs: int, step: int) -> None:
        if self._first_rank is not None:
            self._first_rank.confirm_state(epochs, step)

    def completed(self, state: FitState) -> FitState:
        return state if self._turns is None else self._turns.with_states(state)

    def is_complete(self, record: FitRecord) -> bool:
        return record.trained is not None and record.started.keys() <= record.finished

    def root_failure(self, record: FitRecord) -> RankFailure | None:
        return next((failure for failure in record.failures if not failure.is_echo), None)

    def step_of(self, rank: int, record: FitRecord) -> int | None:
        """Returns the latest step that is known: all ranks take the same one at a time."""
        steps = [failure.step for failure in record.failures if failure.step is not None]
        return max(steps or record.next_steps.values(), default=None)


class ReplayPolicy(SynchronousPolicy):
    """Ranks whose reports rank 0 has written down: they come at once, when the job has ended, or are lost with it.

    Args:
        is_lost: Returns whether the job has failed, and its reports are lost.
        ranks_per_task: Ranks of each Spark task.
    """

    def __init__(self, is_lost: Callable[[], bool], *, ranks_per_task: int = 1) -> None:
        super().__init__()
        self._is_lost = is_lost
        self._ranks_per_task = ranks_per_task

    def root_failure(self, record: FitRecord) -> RankFailure | None:
        """Returns the first cause, or else the first failure: a task that fails does not fail the job."""
        return super().root_failure(record) or next(iter(record.failures), None)

    def has_begun(self, record: FitRecord) -> bool:
        """Returns whether any rank has begun, or may have: the reports of a job that failed are lost."""
        return self._is_lost() or super().has_begun(record)

    def unexplained(self, record: FitRecord, job_error: Exception | None) -> ElephantError:
        executor, partition = lost_with(str(job_error))
        if partition is None:
            return super().unexplained(record, job_error)
        return WorkerFailure(
            "its Spark task failed, and with it is lost what the ranks had said, which rank 0 keeps until the end: "
            f"{cause_of(job_error)}",
            rank=partition * self._ranks_per_task,
            host="its host",
            executor=executor,
        )


class WatchedServers(Protocol):
    """Servers that a coordinator looks after; see `elephant.driver.server_processes.ServerGroup`."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Addresses for workers."""

    def check(self) -> list[str]:
        """Returns lines for the user about changes; raises TrainingError where one is lost for good."""


class AsynchronousPolicy(CoordinatorPolicy):
    """Workers that go at their own pace against parameter servers.

    A worker whose process was lost is Spark's to run again, and does not end the fit. One
    that failed by itself (the user's code, the data) does, at once.

    Args:
        progress: Shown what is repaired.
        servers: Looked after meanwhile.
        epochs: Takes what workers say of their epochs.
        num_ranks: Workers of the fit.
        end_attempt: Called with the number of an attempt at a task, to end it; returns whether that is possible. None
            where the workers' tasks are one barrier stage, of which Spark runs none again.
        patience_s: How long workers that train in rounds wait for one that was lost; None where nobody waits.

    Attributes:
        retries: How often a worker was started in place of one that was lost, or that another attempt overtook.
    """

    together = False

    def __init__(
        self,
        progress: ProgressDisplay,
        *,
        servers: WatchedServers,
        epochs: Epochs,
        num_ranks: int,
        end_attempt: Callable[[int], bool] | None,
        patience_s: float | None = None,
    ) -> None:
        self._progress = progress
        self._end_attempt = end_attempt
        self._patience_s = patience_s
        # When workers that are awaited in rounds were lost.
        self._away: dict[int, float] = {}
        self._done: set[int] = set()
        self._servers = servers
        self._epochs = epochs
        self._num_ranks = num_ranks
        self._frozen: set[int] = set()
        self._lost: list[RankFailure] = []
        self._began_at = self._ended_at = 0.0
        self.retries = 0

    @property
    def training_s(self) -> float:
        """Seconds from the first worker's start to the last end of an epoch."""
        return self._ended_at - self._began_at

    def check(self) -> None:
        """Repairs servers that were lost; raises ServerFailedError where that is not possible."""
        notes = self._servers.check()
        for note in notes:
            self._progress.note(note)
        if notes:
            self._require_same_round()
            # Their last rounds are in the snapshot, or they will never come again.
            self._away |= dict.fromkeys(self._done, time.monotonic())
            # A server that cannot be reached even now is reported by the next check.
            with contextlib.suppress(NetworkError):
                self._epochs.remind()
        self._require_all_workers()
        # One that is missed now is made later; a server that is lost says so itself.
        with contextlib.suppress(NetworkError):
            self._epochs.keep_up()

    def want_state(self) -> None:
        with contextlib.suppress(NetworkError):
            self._epochs.keep_up(is_wanted=True)

    def _require_same_round(self) -> None:
        """Raises ServerFailedError when a server went back to a round that the other servers have left behind."""
        if self._patience_s is not None and len(self._servers.addresses) > 1:
            error = ServerFailedError(
                "aggregation='server': expected all parameter servers to be in the same round. Received: one of "
                f"{len(self._servers.addresses)} that was lost, and came back from an earlier one. Fit again, from the "
                "last checkpoint with checkpointPath and maxRestarts; or leave parameterServers at 1, which goes on."
            )
            error.retryable = True
            raise error

    def _require_all_workers(self) -> None:
        """Raises TrainingError when one that the others wait for in rounds has been away for too long."""
        since = min(self._away.values(), default=None)
        if self._patience_s is None or since is None or time.monotonic() - since <= self._patience_s:
            return
        rank = min(self._away, key=lambda rank: self._away[rank])
        error = TrainingError(
            f"aggregation='server': expected rank {rank}, which was lost, to be started again within "
            f"{self._patience_s:g} s, because a round needs all workers. Received: nothing of it. Give the application "
            "as many task slots as numWorkers, or raise timeouts={'collective_s': ...}. If the rank had ended, a "
            "parameter server was lost whose last snapshot could not be written: look at its disk."
        )
        error.retryable = True
        raise error

    def add(self, event: Event, record: FitRecord) -> None:
        self._note_presence(event, record)
        if isinstance(event, RankFailure):
            self._add_failure(event, record)
        elif isinstance(event, RankSilent):
            self._progress.note(f"nothing was heard from rank {event.rank} for {event.silent_s:.0f} s")
        elif isinstance(event, TaskSilent):
            self._add_frozen(event, record)
        elif isinstance(event, EpochPart):
            self._ended_at = time.monotonic()
            for epoch in self._epochs.add(event):
                record.add(epoch)
                self._progress.show(epoch)
        elif isinstance(event, StopRequested):
            self._epochs.stop()
        else:
            if isinstance(event, Started):
                self._note_start(event, record)
            if isinstance(event, Started | StepEnded):
                self._epochs.note(event)
            record.add(event)

    def _note_presence(self, event: Event, record: FitRecord) -> None:
        is_overtaken = isinstance(event, RankFailure) and event.kind == SUPERSEDED
        if isinstance(event, RankGone | RankFailure | TaskSilent) and not is_overtaken:
            if event.rank not in record.finished:
                self._away.setdefault(event.rank, time.monotonic())
        elif isinstance(event, Started | StepEnded | EpochPart | Finished):
            # Another attempt may have begun before the end of the first was heard of.
            self._away.pop(event.rank, None)
        if isinstance(event, Finished) and event.rank in record.started and record.started[event.rank].training_rows:
            self._done.add(event.rank)

    def _note_start(self, started: Started, record: FitRecord) -> None:
        if not record.started:
            self._began_at = self._ended_at = time.monotonic()
        known = record.started.get(started.rank)
        if known is not None:
            self.retries += 1
            self._progress.note(f"rank {started.rank} goes on, on {started.host}")
            if (known.training_rows, known.validation_rows) != (started.training_rows, started.validation_rows):
                warn_user(_other_rows(known, started))

    def _add_frozen(self, task: TaskSilent, record: FitRecord) -> None:
        """Has Spark run a task again that froze before its worker had begun; once, and where Spark can be asked."""
        if self._end_attempt is None or task.rank in self._frozen or not self._end_attempt(task.attempt):
            record.add(task)
            return
        self._frozen.add(task.rank)
        self.retries += task.rank not in record.started
        self._progress.note(
            f"rank {task.rank} on {task.host} was lost: nothing was heard from its Spark task for {task.silent_s:.0f} "
            "s. Spark runs it again, the others go on"
        )

    def _add_failure(self, failure: RankFailure, record: FitRecord) -> None:
        if self._end_attempt is None or not (failure.kind == SUPERSEDED or is_retryable(failure.kind)):
            record.add(failure)
            return
        if failure.kind == SUPERSEDED:
            # Its own error would count as a failure, and with speculation on, a slow task is overtaken again and again.
            self._end_attempt(failure.attempt)
            return
        self._lost.append(failure)
        # One that has begun is counted when the next attempt begins: a lost executor says nothing.
        self.retries += failure.rank not in record.started
        reason = first_line(failure.message).split(". ")[0].rstrip(".")
        self._progress.note(
            f"rank {failure.rank} on {failure.host} was lost: {reason}. Spark runs it again, the others go on"
        )

    def is_complete(self, record: FitRecord) -> bool:
        return len(record.finished) == self._num_ranks

    def root_failure(self, record: FitRecord) -> RankFailure | None:
        return next(iter(record.failures), None)

    def step_of(self, rank: int, record: FitRecord) -> int | None:
        return record.next_steps.get(rank)

    def unexplained(self, record: FitRecord, job_error: Exception | None) -> ElephantError:
        if not self._lost:
            return super().unexplained(record, job_error)
        last = self._lost[-1]
        error = as_error(last)
        if not isinstance(error, WorkerFailure):
            return error
        times = sum(failure.rank == last.rank for failure in self._lost)
        return WorkerFailure(
            f"{error.summary} This was its loss number {times}, after which Spark gave it up (spark.task.maxFailures).",
            rank=error.rank,
            host=error.host,
            executor=error.executor,
            step=error.step,
            log_tail=error.log_tail,
            topic=error.topic,
        )


def steps_of_epoch(
    rows: int, batch_size: int, steps_per_epoch: int | None = None, most_steps: int | None = None
) -> int:
    """Returns the steps of the epoch of a worker that trains by itself, as the driver knows them.

    Args:
        rows: Of the worker, to train on.
        batch_size: Rows of a step.
        steps_per_epoch: Steps of an epoch; None means those of all rows.
        most_steps: Steps of an epoch at most; None does not limit them.

    >>> steps_of_epoch(33, 8), steps_of_epoch(33, 8, 20), steps_of_epoch(0, 8, 20), steps_of_epoch(33, 8, most_steps=2)
    (5, 20, 0, 2)
    """
    steps = steps_per_epoch if steps_per_epoch and rows else -(-rows // batch_size)
    return steps if most_steps is None else min(steps, most_steps)


def require_all_steps(
    record: FitRecord,
    positions: Mapping[str, int],
    *,
    epochs: int,
    batch_size: int,
    steps_per_epoch: int | None = None,
    most_steps: int | None = None,
) -> None:
    """Raises TrainingError when servers lack steps of a worker at the end of a fit.

    Args:
        record: The reports of the workers.
        positions: The last step of each partition that all servers have applied.
        epochs: Of the fit.
        batch_size: Rows of a step.
        steps_per_epoch: Steps of an epoch; None means those of all rows.
        most_steps: Steps of an epoch at most; None does not limit them.
    """
    for rank, started in sorted(record.started.items()):
        rows = started.training_rows
        expected = epochs * steps_of_epoch(rows, batch_size, steps_per_epoch, most_steps)
        known = positions.get(str(rank), 0)
        if known < expected:
            raise TrainingError(
                f"expected all {expected} steps of rank {rank} in the model. Received: {known}. Where a "
                "parameter server was lost after the worker had finished, its last snapshot had not been written: look "
                "at the disk of the folder for temporary files. Fit again."
            )


def failure_of(rank: int, summary: str, record: FitRecord, *, step: int | None, topic: str) -> WorkerFailure:
    """Returns the failure of a rank that said nothing of it itself."""
    started = record.started.get(rank)
    return WorkerFailure(
        summary,
        rank=rank,
        host="its host" if started is None else started.host,
        executor="" if started is None else started.executor,
        step=step,
        topic=topic,
    )


def _vanished(record: FitRecord, job_error: Exception | None) -> int | None:
    """Returns the rank that vanished with its Spark task, or None where each has said something."""
    reported = {failure.rank for failure in record.failures}
    gone = [event.rank for event in record.gone if event.rank not in reported]
    executor, partition = lost_with(str(job_error))
    on_it = [rank for rank, started in sorted(record.started.items()) if executor and started.executor == executor]
    # Connections end in any order: those of ranks that were left alone may do so first.
    return next(iter([*on_it, *(rank for rank in gone if rank == partition), *gone]), None)


def as_error(failure: RankFailure) -> ElephantError:
    """Returns the error that a rank's failure is on the driver."""
    if failure.kind in _OF_FIT:
        return _OF_FIT[failure.kind](failure.message, topic=failure.topic)
    if failure.kind == COORDINATOR_LOST:
        # No rank's failure: it only ran beside one.
        place = f"executor {failure.executor} on {failure.host}" if failure.executor else failure.host
        return TrainingError(f"{place}: {failure.message}")
    return user_error(failure.kind, failure.message, failure.topic) or WorkerFailure(
        f"{failure.kind.removeprefix('elephant.')}: {failure.message}",
        rank=failure.rank,
        host=failure.host,
        executor=failure.executor,
        step=failure.step,
        traceback=with_sources(failure.traceback),
        log_tail=failure.log_tail,
        topic=failure.topic or TOPICS.get(failure.kind, ""),
    )


def with_sources(trace: str) -> str:
    """Returns a rank's traceback with the lines of source that its host lacks: those of notebooks and main scripts.

    >>> linecache.cache["<cell 3>"] = (1, None, ["raise ValueError(1)"], "<cell 3>")
    >>> print(with_sources('  File "<cell 3>", line 1, in on_epoch_end\\nValueError: 1'))
      File "<cell 3>", line 1, in on_epoch_end
        raise ValueError(1)
    ValueError: 1
    """
    lines = trace.splitlines()
    for place in reversed(range(len(lines))):
        frame = _FRAME.fullmatch(lines[place])
        if frame is not None and not "".join(lines[place + 1 : place + 2]).startswith("    "):
            source = linecache.getline(frame[1], int(frame[2])).strip()
            lines[place + 1 : place + 1] = [f"    {source}"] if source else []
    return "\n".join(lines)


def _other_rows(before: Started, now: Started) -> str:
    return (
        f"rank {now.rank}: expected the {before.training_rows} training and {before.validation_rows} validation rows "
        f"that it had before it was lost. Received: {now.training_rows} and {now.validation_rows}. The DataFrame is "
        "computed anew and comes out differently, so that some rows count twice and others not at all: write it to "
        "disk, or checkpoint it, before fit."
    )
