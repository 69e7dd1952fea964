"""Record of a fit, or of one of its runs, made of its events: all that reads them reads it here.

A new event is a class in `elephant.monitor.events`, and a method here if there is something to remember of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from elephant.errors import first_line
from elephant.monitor.events import (
    Awaited,
    EpochEnded,
    Event,
    FilesLeft,
    Finished,
    RankEpoch,
    RankFailure,
    RankGone,
    RankSilent,
    RankTrace,
    RunNote,
    ServerCounts,
    ShardsMoved,
    Started,
    StepEnded,
    TaskSilent,
    TrainingFinished,
    WorkersChanged,
)

_PLACE = ("rank", "host", "executor", "device", "devices", "threads")

Taken = TypeVar("Taken", bound=Event)
_METHODS: dict[type[Event], Callable[[FitRecord, Any], Event | None]] = {}


def _takes(
    *kinds: type[Event],
) -> Callable[[Callable[[FitRecord, Taken], Event | None]], Callable[[FitRecord, Taken], Event | None]]:
    """Has a method of the record take the events of some classes; it returns the event where it has completed it."""

    def register(method: Callable[[FitRecord, Taken], Event | None]) -> Callable[[FitRecord, Taken], Event | None]:
        _METHODS.update(dict.fromkeys(kinds, method))
        return method

    return register


@dataclass(frozen=True)
class Loss:
    """Loss of a rank, as far as anybody has said of it: where it ran, and why, in one line."""

    rank: int
    host: str
    reason: str


@dataclass
class Attempt:
    """Process of a rank; a rank that was started again has had several."""

    started: Started
    traces: list[RankTrace] = field(default_factory=list)


def is_one_stage(params: Mapping[str, Any], mode: str | None = None) -> bool:
    """Returns whether the ranks of a fit with these params are one barrier stage, in which none begins again alone.

    Args:
        mode: Taken where the params do not say it.

    >>> is_one_stage({"mode": "synchronous"}), is_one_stage({"mode": "synchronous", "aggregation": "server"})
    (True, False)
    """
    return params.get("mode", mode) == "synchronous" and params.get("aggregation", "allreduce") == "allreduce"


class FitRecord:
    """State of a fit as its events tell it.

    A coordinator has a record of its run; what users see is made of the record of the whole fit, in which ranks may
    start again. Where ranks take every step together, such a start is that of another attempt: what the one before
    has told of ranks counts no more.

    Args:
        together: Whether ranks take every step together.

    Attributes:
        started: The latest start of each rank.
        attempts: All processes of each rank.
        begun_at: When training began last, in seconds since 1970; a worker that takes another one's place begins none.
        steps: The latest step of each rank in an epoch that has not ended.
        awaited: What is waited for before training begins; None where nothing is.
        waits: When each such thing was told of first, in seconds since 1970, by its words without their number; without
            words, when nothing was waited for.
        epochs: Epochs that have ended, with their seconds.
        ended_epochs: How many have, since a rank has started.
        moves: Moves of virtual shards to other ranks, of all attempts.
        notes: Lines about the fit as a whole, and warnings of its ranks.
        losses: Ranks that were lost, each once until it starts again.
        failures: Failures of ranks.
        finished: Ranks that have nothing more to say.
        gone: Connections that ended without a word.
        silent: The last rank, or task, that nothing was heard from for too long.
        trained: The trained model, when it has come.
        statistics: Counts that rank 0 has made in the driver's place, where it did.
        files: What the user's code has left on each rank, and as that of rank -1 in the process of callbacks beside
            rank 0; of a later attempt at a rank, in place of an earlier one.
    """

    def __init__(self, *, together: bool = True) -> None:
        self.together = together
        self.started: dict[int, Started] = {}
        self.attempts: dict[int, list[Attempt]] = {}
        self.begun_at: float | None = None
        self.steps: dict[int, StepEnded] = {}
        self.awaited: Awaited | None = None
        self.waits: dict[str, float] = {}
        self.epochs: list[EpochEnded] = []
        self.ended_epochs = 0
        self.moves: list[ShardsMoved] = []
        self.notes: list[str] = []
        self.losses: list[Loss] = []
        self.failures: list[RankFailure] = []
        self.finished: set[int] = set()
        self.gone: list[RankGone] = []
        self.silent: RankSilent | TaskSilent | None = None
        self.trained: TrainingFinished | None = None
        self.statistics: dict[str, Any] | None = None
        self.files: dict[int, FilesLeft] = {}
        self._rank_epochs: dict[tuple[int, int], RankEpoch] = {}
        # The latest step of each rank that was behind the end of its epoch.
        self._past_steps: dict[int, StepEnded] = {}
        self._of_attempt: set[int] = set()
        self._lost: set[int] = set()
        self._epoch_began = time.monotonic()

    def add(self, event: Event) -> Event:
        """Takes an event; returns it with what only its hearer knows, such as the seconds of an epoch."""
        try:
            method = _METHODS[type(event)]
        except KeyError:
            return event
        return method(self, event) or event

    @property
    def plan(self) -> list[dict[str, Any]]:
        """Place of each rank: ``rank``, ``host``, ``executor``, ``device``, ``devices`` and ``threads``."""
        return [{name: getattr(started, name) for name in _PLACE} for _, started in sorted(self.started.items())]

    @property
    def rank_epochs(self) -> list[RankEpoch]:
        """Parts of each rank's seconds, by epoch and rank."""
        return [epoch for _, epoch in sorted(self._rank_epochs.items())]

    @property
    def next_steps(self) -> dict[int, int]:
        """The step that each rank is in, counted from one over all epochs."""
        first = {rank: event.first_step for rank, event in self.started.items() if event.first_step is not None}
        last = {**self._past_steps, **self.steps}
        return first | {rank: step.epoch * step.steps + step.step + 1 for rank, step in last.items()}

    @property
    def history(self) -> dict[str, list[Any]]:
        """One number per epoch by metric, in the form of Keras' ``History.history``."""
        series: dict[str, list[Any]] = {}
        for epoch in self.epochs:
            for name, value in epoch.logs.items():
                series.setdefault(name, []).append(value)
        return series

    @property
    def history_by_epoch(self) -> dict[str, list[Any]]:
        """One number per epoch by metric; None where an epoch has none, as those before a fit that was resumed."""
        of_epochs = {epoch.epoch: epoch.logs for epoch in self.epochs}
        count = max(of_epochs, default=-1) + 1
        return {name: [of_epochs.get(epoch, {}).get(name) for epoch in range(count)] for name in self.history}

    @property
    def is_before_steps(self) -> bool:
        """True if a rank with rows has begun, and none has told of a step or an epoch."""
        told = self.steps or self._past_steps or self.epochs
        return not told and any(start.training_rows for start in self.started.values())

    @property
    def ended(self) -> set[int]:
        """Ranks that have nothing more to say, or cannot say it."""
        return self.finished | {event.rank for event in (*self.failures, *self.gone)}

    @_takes(StepEnded)
    def _add_step(self, step: StepEnded) -> None:
        # Each rank has a connection of its own: a step may be heard of after the end of its epoch.
        steps = self.steps if step.epoch >= self.ended_epochs else self._past_steps
        steps[step.rank] = step

    @_takes(Awaited)
    def _add_wait(self, awaited: Awaited) -> None:
        self.awaited = awaited if awaited.text else None
        self.waits.setdefault(awaited.text.strip("0123456789"), time.time())

    @_takes(Started)
    def _add_start(self, started: Started) -> None:
        if self.together and started.rank in self._of_attempt:
            self._forget_ranks()
        self._of_attempt.add(started.rank)
        if self.together or started.rank not in self.started:
            # The others go on where a worker comes again that nobody waits for.
            self.begun_at, self._epoch_began = time.time(), time.monotonic()
        self.started[started.rank] = started
        self.attempts.setdefault(started.rank, []).append(Attempt(started))
        self.ended_epochs = 0
        self._lost.discard(started.rank)
        if started.note and started.note not in self.notes:
            self.notes.append(started.note)

    def _forget_ranks(self) -> None:
        """Begins another attempt, for which what the one before has told of ranks does not count."""
        for of_ranks in (self._of_attempt, self._rank_epochs, self.steps, self._past_steps):
            of_ranks.clear()

    @_takes(WorkersChanged)
    def _change_workers(self, changed: WorkersChanged) -> None:
        self._forget_ranks()
        self.started.clear()
        self._lost.clear()

    @_takes(EpochEnded)
    def _add_epoch(self, ended: EpochEnded) -> EpochEnded:
        now = time.monotonic()
        epoch = replace(ended, seconds=now - self._epoch_began) if ended.seconds is None else ended
        self._epoch_began = now
        self.ended_epochs = epoch.epoch + 1
        for rank in [rank for rank, step in self.steps.items() if step.epoch <= epoch.epoch]:
            self._past_steps[rank] = self.steps.pop(rank)
        # A fit that was started again repeats epochs. Workers that take no step together may tell of them in any order.
        after = [one for one in self.epochs if one.epoch > epoch.epoch and not self.together]
        self.epochs = [*(one for one in self.epochs if one.epoch < epoch.epoch), epoch, *after]
        return epoch

    @_takes(RankEpoch)
    def _add_rank_epoch(self, epoch: RankEpoch) -> RankEpoch:
        heard = replace(epoch, heard=time.time()) if epoch.heard is None else epoch
        self._rank_epochs[epoch.epoch, epoch.rank] = heard
        return heard

    @_takes(RankTrace)
    def _add_trace(self, trace: RankTrace) -> RankTrace:
        heard = replace(trace, heard=time.time()) if trace.heard is None else trace
        if trace.rank in self.attempts:
            self.attempts[trace.rank][-1].traces.append(heard)
        return heard

    @_takes(ShardsMoved)
    def _add_move(self, moved: ShardsMoved) -> None:
        self.moves.append(moved)

    @_takes(RunNote)
    def _add_note(self, note: RunNote) -> None:
        self.notes.append(note.text)

    @_takes(Finished)
    def _add_end(self, finished: Finished) -> None:
        self.finished.add(finished.rank)

    @_takes(RankFailure)
    def _add_failure(self, failure: RankFailure) -> None:
        self.failures.append(failure)
        if not failure.is_echo:
            self._lose(failure, failure.host, first_line(f"{failure.kind}: {failure.message}"))

    @_takes(RankGone)
    def _add_gone(self, gone: RankGone) -> None:
        self.gone.append(gone)
        self._lose(gone, "", "its connection has ended without a word")

    @_takes(RankSilent, TaskSilent)
    def _add_silence(self, silent: RankSilent | TaskSilent) -> None:
        self.silent = silent
        host = silent.host if isinstance(silent, TaskSilent) else ""
        self._lose(silent, host, f"nothing was heard from it for {silent.silent_s:.0f} s")

    def _lose(self, event: Event, host: str, reason: str) -> None:
        if event.rank in self._lost:
            return
        self._lost.add(event.rank)
        started = self.started.get(event.rank)
        self.losses.append(Loss(event.rank, host or ("" if started is None else started.host), reason))

    @_takes(TrainingFinished)
    def _add_model(self, finished: TrainingFinished) -> None:
        self.trained = finished

    @_takes(ServerCounts)
    def _add_counts(self, counts: ServerCounts) -> None:
        self.statistics = dict(counts.statistics)

    @_takes(FilesLeft)
    def _add_files(self, files: FilesLeft) -> None:
        self.files[-1 if files.of_coordinator else files.rank] = files
