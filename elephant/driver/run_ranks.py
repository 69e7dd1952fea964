"""Run of ranks: they are started, listened to until all have ended, and started once more where none had begun.

`run_ranks` is the one way to run ranks: of a fit or a function, on Spark or as processes of this machine. What
differs is the `RunAttempt` that it carries out: who starts the ranks, where they report, and who listens.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from elephant.checkpoint.manager import CheckpointSink
from elephant.cluster.executors import awaited_slots
from elephant.cluster.spark_job import SparkWords
from elephant.driver.coordinator import Coordinator, EventSource
from elephant.driver.coordinator_policy import DriverTurns, SynchronousPolicy
from elephant.driver.launcher import Launcher, RankJob
from elephant.driver.recovery.generations import EarlierTurns, Generations, Recovering
from elephant.monitor.channel import Channel
from elephant.monitor.progress import Progress
from elephant.net.tls import new_token
from elephant.task.specs import RunContext, TaskSpec
from elephant.task.task import results_by_rank

Rows = TypeVar("Rows")
Result = TypeVar("Result")


class Turns(DriverTurns, EarlierTurns, Protocol):
    """Callbacks on the driver, which may go back to a state of before."""


@dataclass(frozen=True)
class RestartsOfTasks:
    """Way of a fit's ranks to begin again in the Spark job that they have."""

    recovering: Recovering  # decides whether they do, and from where
    spec: TaskSpec  # what the run asks for
    end_attempt: Callable[[int], bool]  # ends an attempt at a task that is frozen; returns whether that is possible

    def generations(self, channel: Channel, turns: EarlierTurns | None) -> Generations:
        """Returns the generations of one attempt."""
        plan = self.spec.plan
        return Generations(
            channel,
            self.recovering,
            turns,
            ranks=[task * plan.gpus_per_worker for task in range(plan.slots_needed)],
            slots_s=self.spec.timeouts.slot_patience_s,
            end_attempt=self.end_attempt,
        )


class EventChannel(EventSource, Protocol):
    """Source of events that can tell ranks that the run is over."""

    def dismiss(self) -> None:
        """Tells all ranks that the run is over."""


@dataclass(frozen=True)
class RunAttempt(Generic[Result]):
    """One attempt at a run, ready to start."""

    launcher: Launcher  # starts the ranks
    context: RunContext  # which attempt this is, and how ranks reach the channel
    channel: EventChannel  # where they report
    coordinator: Coordinator  # listens there, and knows afterwards whether they have failed
    result: Callable[[RankJob], Result]  # what comes of ranks that have ended well


@dataclass(frozen=True)
class Retry:
    """Error of a Spark job of which no rank has begun, after which the ranks are started once more."""

    words: tuple[SparkWords, ...]  # one of which the job's error has
    prepare: Callable[[Any, TaskSpec, Progress], Any]  # returns the rows to start with; None where that is no use
    note: str = ""  # says why, once that is done
    refused: bool = False  # whether Spark refuses such a job, so that no rank can have begun, whoever lost its reports


def _same(rows: Any, spec: TaskSpec, progress: Progress) -> Any:
    return rows


def _with_slots(rows: Any, spec: TaskSpec, progress: Progress) -> Any:
    """Waits for slots that Spark missed: an executor that was lost counts as one of the cluster for some seconds."""
    needed = spec.plan.slots_needed
    slots = awaited_slots(rows.session, needed, spec.timeouts.slot_patience_s, progress.note, spec.plan.profile)
    return rows if slots is not None and slots >= needed else None


def _repartitioned(rows: Any, spec: TaskSpec, progress: Progress) -> Any:
    return rows.repartitioned(spec.plan.slots_needed)


# Retries of a barrier job, of which each is made once at most.
RETRIES = (
    Retry(
        (SparkWords.EXECUTOR_LOST, SparkWords.WORKER_ENDED),
        _same,
        "an executor, or a Python worker of it, was lost before any worker began: starting once more",
    ),
    Retry(
        (SparkWords.TOO_FEW_SLOTS,),
        _with_slots,
        "an executor was lost before any worker began, and another has come: starting once more",
    ),
    # The rows' own partitions come from a union or a coalesce, which no barrier stage may contain.
    Retry((SparkWords.FORBIDDEN_CHAIN,), _repartitioned, refused=True),
)


def run_ranks(
    rows: Rows,
    spec: TaskSpec,
    progress: Progress,
    attempt_on: Callable[[Rows], AbstractContextManager[RunAttempt[Result]]],
    retries: Sequence[Retry] = (),
) -> Result:
    """Runs ranks until all have ended; returns what comes of them.

    Args:
        rows: The rows, a partition for each task.
        spec: What the run asks for.
        progress: Shown why ranks are started once more.
        attempt_on: Opens an attempt on the rows, for a ``with`` block.
        retries: When to make another attempt.

    Raises:
        CheckpointError: A checkpoint could not be written.
        ConfigurationError: Code is missing on the executors, or a function's result does not pickle.
        DataError: Rows that cannot be trained on.
        ClusterError: The cluster cannot run the ranks.
        WorkerFailure: A rank failed; it has the rank's own traceback.
        TrainingError: The run failed otherwise.
        Exception: Whatever a callback on the driver raises.
    """
    left = list(retries)
    while True:
        with attempt_on(rows) as attempt:
            job = attempt.launcher.start(spec, attempt.context)
            try:
                attempt.coordinator.until_ended(job, attempt.launcher.watch(spec.timeouts))
            finally:
                job.cancel()
                attempt.channel.dismiss()
                attempt.coordinator.bring_files()
            retry = _retry_after(job.error, left, began=attempt.coordinator.began)
            again = None if retry is None else retry.prepare(rows, spec, progress)
            if retry is None or again is None:
                attempt.coordinator.raise_failure(job.error)
                return attempt.result(job)
        left.remove(retry)
        rows = again
        if retry.note:
            progress.note(retry.note)


def _retry_after(error: Exception | None, left: Sequence[Retry], *, began: bool) -> Retry | None:
    """Returns the retry for an error, of those that were not made yet."""
    possible = (retry for retry in left if retry.refused or not began)
    return next((retry for retry in possible if any(words.search(error) for words in retry.words)), None)


@contextlib.contextmanager
def open_channel(
    addresses: tuple[str, str], spec: TaskSpec, *, begins_again: bool = False
) -> Iterator[tuple[RunContext, Channel]]:
    """Opens the channel of a new attempt in this process, for the ``with`` block.

    Args:
        addresses: `Launcher.addresses`.
        spec: What the run asks for.
        begins_again: Whether tasks stay connected, and form a new generation after a loss.
    """
    run_id, token = uuid.uuid4().hex, new_token(encryption=spec.encryption)
    (advertised, bind), timeouts = addresses, spec.timeouts
    with Channel(
        bind_host=bind, token=token, run_id=run_id, timeouts=timeouts, begins_again=begins_again, ports=spec.ports
    ) as channel:
        yield RunContext(run_id=run_id, token=token, driver=(advertised, channel.port)), channel


@contextlib.contextmanager
def attempt_here(
    launcher_of: Callable[[Rows], Launcher],
    spec: TaskSpec,
    progress: Progress,
    rows: Rows,
    *,
    result: Callable[[Coordinator, RankJob], Result],
    checkpoint_writer: CheckpointSink | None = None,
    turns: Turns | None = None,
    recovery: RestartsOfTasks | None = None,
) -> Iterator[RunAttempt[Result]]:
    """Opens an attempt at ranks that need each other, with the coordinator in this process, for the ``with`` block.

    Args:
        launcher_of: Returns what starts them.
        spec: What the run asks for.
        progress: Shown what happens.
        rows: The rows.
        result: What comes of ranks that have ended well.
        checkpoint_writer: Writes checkpoints; None makes none.
        turns: Runs callbacks on the driver; None where there are none.
        recovery: Has ranks begin again after a loss; None where a loss ends the attempt.
    """
    with (
        contextlib.closing(launcher_of(rows)) as launcher,
        open_channel(launcher.addresses, spec, begins_again=recovery is not None) as (context, channel),
    ):
        policy = SynchronousPolicy(progress, turns, channel)
        generations = None if recovery is None else recovery.generations(channel, turns)
        coordinator = Coordinator(channel, progress, policy, checkpoint_writer, generations)
        yield RunAttempt(launcher, context, channel, coordinator, lambda job: result(coordinator, job))


def the_coordinator(coordinator: Coordinator, job: RankJob) -> Coordinator:
    """Returns the coordinator of a fit, which has its result and its events."""
    return coordinator


def results_of(world_size: int, coordinator: Coordinator, job: RankJob) -> list[bytes]:
    """Returns the pickled results of a function, by rank."""
    by_rank = results_by_rank(job.rows)
    return [by_rank[rank] for rank in range(world_size)]
