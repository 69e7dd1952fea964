"""Coordinator: collects the events of a run and decides its outcome, a result or the first cause of a failure.

It runs on the driver, or beside rank 0 (`elephant.driver.coordinator_process`). In what the modes of a fit differ, its
policy decides (`elephant.driver.coordinator_policy`).
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from elephant.checkpoint.manager import CheckpointSink
from elephant.cluster.spark_job import SparkWords, cancellation, lost_driver
from elephant.data.schema import RowSpec
from elephant.driver.coordinator_policy import TOPICS, CoordinatorPolicy, ProgressDisplay, as_error, failure_of
from elephant.driver.recovery.generations import Generations
from elephant.errors import (
    FROZEN,
    ClusterError,
    DataError,
    ElephantError,
    TrainingError,
    WorkerFailure,
    is_retryable,
    warn_user,
)
from elephant.monitor.events import (
    Event,
    FilesLeft,
    Finished,
    RankFailure,
    RankGone,
    RankSilent,
    Started,
    StateArrays,
    StateSaved,
    TaskSilent,
)
from elephant.monitor.handle import require_wanted
from elephant.monitor.log_stream import TokenBucket
from elephant.monitor.record import FitRecord
from elephant.storage.user_files import MOST_BYTES, put_down

_POLL_S = 0.1
_FIRST_STEP = "workers prepare the model, and trace it in their first step"
# How long those that know why a rank was lost, its Spark task above all, may take to say it.
_CAUSE_GRACE_S = 2.0
# How long the tasks of ranks that have said all may take to end. A fit needs nothing more of them.
_END_GRACE_S = 10.0
# Between two lines about connections that were refused.
_REFUSALS_S = 60.0
_MOST_HOSTS_SHOWN = 5
_LOST_AGAIN = (SparkWords.EXECUTOR_LOST, SparkWords.TASK_LOST, SparkWords.WORKER_ENDED, SparkWords.ASKED_TO_END)
# A tuple, because all events of a run are compared with it.
_LOSSES = (RankFailure, RankGone)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of a fit.

    Args:
        variables: The trained model's, in the order of `elephant.modeling.variables.read_variables`; its weights alone
            where no rank had the whole model.
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
    """Job that runs the ranks; see `elephant.cluster.spark_job.SparkJob`."""

    @property
    def error(self) -> Exception | None:
        """The error that it has failed of, if it has."""

    @property
    def running(self) -> bool:
        """True if it has not ended."""


class EventSource(Protocol):
    """Source of the ranks' events; see `elephant.monitor.channel.Channel`."""

    def next_event(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None when none comes in time."""

    @property
    def turned_away(self) -> Mapping[str, int]:
        """Number of refused connections by host: they did not prove that they belong to the run."""

    @property
    def awaited(self) -> str:
        """Words for all that ranks wait for before they begin; empty where that is not known."""


class Coordinator:
    """Listens to the ranks of one run until it ends, and knows the outcome.

    Args:
        progress: Shown what they report.
        checkpoint_writer: Writes checkpoints; None makes none.
        generations: Has ranks begin again after a loss; None where a loss ends the run.

    Attributes:
        record: The reports so far, of the ranks that there are now.
        policy: As given.
    """

    def __init__(
        self,
        events: EventSource,
        progress: ProgressDisplay,
        policy: CoordinatorPolicy,
        checkpoint_writer: CheckpointSink | None = None,
        generations: Generations | None = None,
    ) -> None:
        self.record = FitRecord(together=policy.together)
        self._generations = generations
        self._events = events
        self._progress = progress
        self.policy = policy
        self._checkpoint_writer = checkpoint_writer
        self._complete_at: float | None = None
        self._is_state_wanted = False
        # A state of which arrays are still to come, those of the driver, and those that have come.
        self._state_coming: tuple[StateSaved, Mapping[str, np.ndarray], list[np.ndarray]] | None = None
        # Those of the last state, which come with the first one alone.
        self._frozen_arrays: Mapping[str, np.ndarray] = {}
        self._lost_at: float | None = None
        self._gave_up = False
        self._num_noted = 0
        self._may_note = TokenBucket(per_second=1 / _REFUSALS_S, burst=1)

    @property
    def statistics(self) -> dict[str, Any]:
        """Counts, by their names in `elephant.KerasModel.training_statistics`."""
        counts = self.record.statistics or {"refused_connections": dict(self._events.turned_away)}
        return counts if self._generations is None else {**counts, "recoveries": self._generations.recoveries}

    @property
    def began(self) -> bool:
        """True if any rank has begun its work, or failed of itself."""
        return self.policy.has_begun(self.record)

    def until_ended(self, job: RunningJob, watch: Callable[[], None] | None = None) -> None:
        """Listens until the job has ended, or there is no point in waiting for that.

        Args:
            watch: Called meanwhile; raises where the job can never end.
        """
        while job.running and (not self._is_decided or self._begins_again()):
            require_wanted()
            if watch is not None:
                watch()
            self._progress.awaits(self._awaited)
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

    @property
    def _awaited(self) -> str:
        if not self.began:
            return self._events.awaited
        return _FIRST_STEP if self.record.is_before_steps else ""

    def _begins_again(self) -> bool:
        """Has the ranks begin again after a loss, where they can; returns whether they do."""
        if self._generations is None or self._complete_at is not None:
            return False
        error = self._error(None, goes_on=True)
        if isinstance(error, TrainingError):
            error.retryable = self._is_retryable(None)
        if error is None or not self._generations.begin_after(error, self.record):
            return False
        files = self.record.files
        self.record = FitRecord(together=self.policy.together)
        self.record.files = files
        self._state_coming, self._lost_at = None, None
        return True

    def bring_files(self) -> None:
        """Puts what the user's code has written on ranks into the folder of this process, once ranks have been told
        that the run is over; says what came, and warns of what did not."""
        with contextlib.suppress(ElephantError):
            while (event := self._events.next_event(0.0)) is not None:
                if isinstance(event, FilesLeft):
                    self.record.add(event)
        left = self.record.files
        if not left:
            return
        line, lost = put_down({rank: event.files for rank, event in left.items()}, Path())
        if line:
            self._progress.note(line)
        lost += [f"{name} of rank {event.rank}" for _, event in sorted(left.items()) for name in event.left_out]
        if lost:
            text = (
                f"files that workers wrote to relative paths are lost: {', '.join(lost)}. A fit brings back "
                f"{MOST_BYTES >> 20} MiB of rank 0, and as much of all other workers together. Write more to an "
                "absolute path of a shared or mounted file system."
            )
            self._progress.note(text)
            warn_user(text)

    def _note_refusals(self, *, last: bool = False) -> None:
        """Says who was turned away since the last time: once a minute at most, and in the end."""
        turned_away = self._events.turned_away
        count = sum(turned_away.values())
        if count > self._num_noted and (self._may_note.take() or last):
            self._num_noted = count
            self._progress.note(f"{refusals(turned_away)}: they did not prove that they belong to this run")

    @property
    def _is_decided(self) -> bool:
        """True if all has come, or the failure of the run and its cause are known, as far as anybody will say."""
        failed = self.policy.root_failure(self.record) is not None or self.record.silent is not None
        # If nobody has said for some time why a rank was lost, nobody will.
        is_lost = self.policy.together and (_is_past(self._lost_at, _CAUSE_GRACE_S) or self._has_lost_a_task)
        # A task that goes on when all that the fit is for came some time ago is frozen.
        return failed or is_lost or _is_past(self._complete_at, _END_GRACE_S)

    @property
    def _has_lost_a_task(self) -> bool:
        return self._generations is not None and any(gone.with_task for gone in self.record.gone)

    def _may_receive_more(self, job_error: Exception) -> bool:
        """Returns whether a rank may still say why the job has failed: those that failed of it may speak sooner."""
        if not self.policy.together or self._is_decided or self._complete_at is not None:
            return False
        if _known_cause(job_error) is not None:
            return False
        if self.record.gone and SparkWords.TASK_LOST.search(job_error):
            return False
        return bool(self.record.started or self.record.failures)

    def _take(self, timeout_s: float) -> bool:
        self.policy.check()
        if self._generations is not None:
            self._generations.check()
        if self._checkpoint_writer is not None:
            self._checkpoint_writer.check()
            if self._checkpoint_writer.is_wanted:
                self._is_state_wanted = True
                self.policy.want_state()
        event = self._events.next_event(timeout_s)
        if event is None:
            return False
        if (whole := self._whole(event)) is not None and self._add(whole):
            self._progress.show(whole)
        return True

    def _whole(self, event: Event) -> Event | None:
        """Returns an event with all that belongs to it; None where more of it is to come."""
        if isinstance(event, StateSaved):
            # What the driver knows is of now: when the last array is here, ranks may be epochs further on.
            state = self.policy.completed(event.state)
            self._state_coming = (replace(event, facts=dict(state.facts)), state.arrays, [])
            if event.shapes is None:
                return self._completed(event.arrays)
            event = StateArrays(rank=event.rank)
        if not isinstance(event, StateArrays):
            return event
        if self._state_coming is None:
            return None
        saved, _, parts = self._state_coming
        parts += event.arrays
        arrays = (
            saved.joined(parts) if sum(part.size for part in parts) >= sum(map(math.prod, saved.shapes or [])) else None
        )
        return None if arrays is None else self._completed(arrays)

    def _completed(self, arrays: Sequence[np.ndarray]) -> Event | None:
        """Returns the state that was coming, with its arrays, those of the driver, and frozen weights of before."""
        if self._state_coming is None:
            return None
        saved, of_driver, _ = self._state_coming
        self._state_coming = None
        frozen = saved.facts.get("frozen", [])
        named = {name: one for name, one in self._frozen_arrays.items() if name in frozen}
        named |= {**dict(zip(saved.names, arrays, strict=True)), **of_driver}
        self._frozen_arrays = {name: named[name] for name in frozen}
        return replace(saved, shapes=None, names=list(named), arrays=list(named.values()))

    def _add(self, event: Event) -> bool:
        """Takes an event; returns whether it is one to show."""
        if isinstance(event, Started) and event.note and event.note not in self.record.notes:
            warn_user(event.note)
        self.policy.add(event, self.record)
        if self._generations is not None:
            self._generations.add(event, self.record)
        if isinstance(event, Finished) and self.policy.is_complete(self.record):
            self._complete_at = time.monotonic()
            if self._generations is not None:
                self._generations.release()
        elif isinstance(event, StateSaved) and self._checkpoint_writer is not None:
            is_shown = self._checkpoint_writer.keep(event.state)
            self._is_state_wanted = False
            self.policy.confirm_state(event.epochs, event.step)
            return is_shown
        elif isinstance(event, Started) and self._is_state_wanted:
            # It may have been asked for before rank 0 was there.
            self.policy.want_state()
        elif isinstance(event, _LOSSES):
            self._note_loss()
        return True

    def _note_loss(self) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()

    def raise_failure(self, job_error: Exception | None) -> None:
        """Raises why the run failed, if it did: the cause, where a rank or the driver knows it."""
        error = self._error(job_error)
        if isinstance(error, TrainingError):
            error.retryable = self._is_retryable(job_error)
            error.is_counted = self._generations is not None and self._generations.are_awaited
        if error is not None:
            raise error from job_error

    def _is_retryable(self, job_error: Exception | None) -> bool:
        """Returns whether the run may be started again: unless the user's code or data failed, or it was cancelled."""
        failure = self.policy.root_failure(self.record)
        if failure is not None and not failure.is_echo:
            return is_retryable(failure.kind)
        if self.record.silent is not None or self._has_lost_a_task:
            return True
        if self._generations is not None and self._generations.are_awaited:
            # Spark has given a task up that was to come again. What it says of rows that cannot be computed stands.
            return any(words.search(job_error) for words in _LOST_AGAIN) and cancellation(job_error) is None
        # There were slots enough when the run began: one has been lost since.
        is_loss = SparkWords.EXECUTOR_LOST.search(job_error) or SparkWords.TOO_FEW_SLOTS.search(job_error)
        return cancellation(job_error) is None and bool(self.record.started or is_loss)

    def _error(self, job_error: Exception | None, *, goes_on: bool = False) -> ElephantError | None:
        """Returns why the run failed, or None where it did not.

        Args:
            goes_on: Whether the job is still there, of ranks that were lost.
        """
        if self._generations is not None and self._complete_at is not None:
            # Its tasks are still heard of, and it needs nothing more of them.
            return None
        failure = self.policy.root_failure(self.record)
        if failure is not None:
            return as_error(failure)
        if self.record.silent is not None:
            return self._failure_of_silence(self.record.silent)
        if self._complete_at is not None:
            # All that the fit is for has come: what ends its tasks afterwards, or keeps them from it, takes nothing.
            return None
        known = _known_cause(job_error)
        if known is not None or (job_error is None and not self._gave_up and not goes_on):
            return known
        if "elephant" in re.findall(SparkWords.NO_MODULE.value, str(job_error)):
            return ClusterError(
                "expected elephant to be installed where the executors' Python is. Received: No module named "
                "'elephant'. Install elephant-spark there, or ship an environment (spark.archives).",
                topic="other-packages-on-the-executors",
            )
        unreached = SparkWords.DRIVER_UNREACHED.search(job_error)
        if unreached is not None and not self.record.started:
            return ClusterError(
                f"expected executors that reach the driver. Received: {unreached[1].rstrip('.')}. Set "
                "spark.driver.host to an address of the driver that they reach, and let their connections to its "
                "ports through the firewall (the param ports gives a range).",
                topic="a-port-that-is-blocked",
            )
        return self.policy.unexplained(self.record, job_error)

    def _failure_of_silence(self, silent: RankSilent | TaskSilent) -> WorkerFailure:
        if isinstance(silent, RankSilent):
            text = (
                f"nothing was heard from it for {silent.silent_s:.0f} s: the process is frozen, "
                "or its connection to the driver is cut"
            )
            step = self.policy.step_of(silent.rank, self.record)
            return failure_of(silent.rank, text, self.record, step=step, topic=TOPICS[FROZEN])
        text = (
            f"nothing was heard from its Spark task for {silent.silent_s:.0f} s: its Python worker is frozen (stopped "
            "by a signal, or on a host that is swapping), or its connection to the driver is cut"
        )
        return WorkerFailure(text, rank=silent.rank, host=silent.host, executor=silent.executor, topic=TOPICS[FROZEN])

    def history(self) -> dict[str, list[float]]:
        """Returns one number per epoch by metric; raises DataError when no rank had rows to train on."""
        if not sum(started.training_rows for started in self.record.started.values()):
            raise DataError(
                "expected rows to train on. Received: rows that are all marked for validation.", topic="no-rows"
            )
        return self.record.history

    def result(self) -> FitResult:
        """Returns the result of a fit; raises TrainingError when there is none."""
        trained = self.record.trained
        if trained is None:
            raise TrainingError(
                "expected the trained model from rank 0. Received: nothing, though its task ended well."
            )
        return FitResult(
            history=self.record.history,
            variables=list(trained.arrays),
            rows=RowSpec.from_json(trained.rows),
            plan=self.record.plan,
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


def _is_past(moment: float | None, grace_s: float) -> bool:
    return moment is not None and time.monotonic() - moment > grace_s


def _known_cause(job_error: Exception | None) -> ElephantError | None:
    """Returns why a job ended, where no rank can know it."""
    return cancellation(job_error) or lost_driver(job_error)
