"""Launchers: they start the ranks of a run, which a coordinator then listens to.

Ranks that need each other run in a barrier stage, workers that go at their own pace in ordinary tasks. The coordinator
is on the driver, or beside rank 0 where executors do not reach the driver.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import secrets
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from elephant.checkpoint.writer import CheckpointWriter
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.coordinator import Coordinator, EventSource, FitResult, RunningJob, is_lost
from elephant.cluster.coordinator_location import coordinates_on_executors
from elephant.cluster.coordinator_policy import ReplayPolicy, SynchronousPolicy
from elephant.cluster.coordinator_spec import CoordinatorSpec
from elephant.cluster.coordinator_task import EVENTS, run_coordinator_partition
from elephant.cluster.executors import ExecutorAbsence
from elephant.cluster.gpu.plan import profile_of
from elephant.cluster.rank_task import run_partition, run_worker
from elephant.cluster.rendezvous import no_rows
from elephant.cluster.session import setting
from elephant.cluster.spark_job import SparkJob
from elephant.cluster.task import RunContext, ServerAddresses, TaskSpec, results_by_rank
from elephant.config import Timeouts
from elephant.monitor.channel import Channel
from elephant.monitor.event_log import unpacked
from elephant.monitor.events import Event, StepEnded
from elephant.monitor.progress import Progress
from elephant.net.addresses import Address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.cluster.row_source import RowSource, TaskFunction

# An address for documentation (RFC 5737): the way to it is the way to everywhere.
_ANYWHERE: Address = ("192.0.2.1", 9)

# Spark's words for a Python worker that has ended. It ends those of a cancelled job seconds later, when one of them may
# work for the next job.
_CRASHED = ("Python worker exited unexpectedly", "java.io.IOException: Stream closed")
_FORBIDDEN_CHAIN = ("SPARK-24820", "SPARK-24821")


class RankJob(RunningJob, Protocol):
    """Ranks that were started; see `elephant.cluster.spark_job.SparkJob`."""

    @property
    def rows(self) -> Sequence[Any]:
        """Rows of `elephant.cluster.task.result_rows`, when all have ended well."""

    def cancel(self) -> None:
        """Ends the ranks."""


class EventChannel(EventSource, Protocol):
    """Source of events that can tell ranks that the run is over."""

    def dismiss(self) -> None:
        """Tells all ranks that the run is over."""


class Launcher(ABC):
    """Starts the ranks of one run."""

    @property
    @abstractmethod
    def addresses(self) -> tuple[str, str]:
        """Address that ranks reach this process at, and the one that it listens on."""

    @abstractmethod
    def start(self, spec: TaskSpec, run: RunContext) -> RankJob:
        """Starts all ranks.

        Args:
            spec: What the run asks for.
            run: Which attempt this is, and how to reach the coordinator.
        """

    def watch(self, timeouts: Timeouts) -> Callable[[], None] | None:
        """Returns a function that raises ClusterError where the ranks can never end; None where that cannot be."""
        return None


class SparkLauncher(Launcher):
    """Starts each rank beside a task of one Spark job.

    Args:
        rows: The rows, a partition for each task.
    """

    is_barrier: ClassVar[bool]

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows

    @property
    def addresses(self) -> tuple[str, str]:
        return driver_addresses(self._rows.session)

    @abstractmethod
    def task(self, spec: TaskSpec, run: RunContext) -> TaskFunction:
        """Returns what each task runs."""

    def start(self, spec: TaskSpec, run: RunContext) -> SparkJob:
        session = self._rows.session
        profile = profile_of(session, spec.plan.profile)
        action = functools.partial(self._rows.run, self.task(spec, run), barrier=self.is_barrier, profile=profile)
        return SparkJob(session, f"elephant-{run.run_id}", action)

    def watch(self, timeouts: Timeouts) -> Callable[[], None]:
        return ExecutorAbsence(self._rows.session, timeouts.executors_s).check


class SparkBarrierLauncher(SparkLauncher):
    """Starts ranks that need each other: Spark runs all tasks of a barrier stage at the same time."""

    is_barrier = True

    def task(self, spec: TaskSpec, run: RunContext) -> TaskFunction:
        return functools.partial(run_partition, spec, run)


class SparkTaskLauncher(SparkLauncher):
    """Starts workers that go at their own pace, each of which Spark runs again when it is lost.

    Args:
        rows: The rows, a partition for each task.
        servers: The parameter servers.
    """

    is_barrier = False

    def __init__(self, rows: RowSource, servers: ServerAddresses) -> None:
        super().__init__(rows)
        self._servers = servers

    def task(self, spec: TaskSpec, run: RunContext) -> TaskFunction:
        return functools.partial(run_worker, spec, run, self._servers)


class SparkCoordinatorLauncher(SparkLauncher):
    """Starts ranks in a barrier stage, and the coordinator beside rank 0.

    Args:
        rows: The rows, a partition for each task.
        coordinator: What is beside rank 0.
        events: Gets what the job leaves.
    """

    is_barrier = True

    def __init__(self, rows: RowSource, coordinator: CoordinatorSpec, events: LoggedEvents) -> None:
        super().__init__(rows)
        self._coordinator = coordinator
        self._events = events

    def task(self, spec: TaskSpec, run: RunContext) -> TaskFunction:
        return functools.partial(run_coordinator_partition, spec, run, self._coordinator)

    def start(self, spec: TaskSpec, run: RunContext) -> SparkJob:
        job = super().start(spec, run)
        self._events.follow(job)
        return job


class LoggedEvents:
    """Events of a job that has ended, one after the other; while it runs there are none."""

    def __init__(self) -> None:
        self._job: SparkJob | None = None
        self._events: Iterator[Event] | None = None

    def follow(self, job: SparkJob) -> None:
        """Reads what this job leaves."""
        self._job = job

    def is_lost(self) -> bool:
        """Returns whether the job has failed, and what it would have left is gone."""
        return self._job is not None and self._job.error is not None

    def next_event(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None when there is none."""
        if self._job is None:
            return None
        if self._job.running:
            self._job.wait(timeout_s)
            return None
        if self._events is None:
            self._events = iter(unpacked(results_by_rank(self._job.rows).get(EVENTS, b"")))
        return next(self._events, None)

    @property
    def turned_away(self) -> Mapping[str, int]:
        """Nothing: rank 0 has seen who came, and has written it down."""
        return {}

    def dismiss(self) -> None:
        """Nothing: rank 0 has told the others."""


class WithoutSteps:
    """Shows all but steps: those of a record are there to tell the step of a failure."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def show(self, event: Event) -> None:
        """Shows an event."""
        if not isinstance(event, StepEnded):
            self._progress.show(event)

    def note(self, text: str) -> None:
        """Shows a line about the run as a whole."""
        self._progress.note(text)


@contextlib.contextmanager
def open_channel(addresses: tuple[str, str], timeouts: Timeouts) -> Iterator[tuple[RunContext, Channel]]:
    """Opens the channel of a new run in this process, for the ``with`` block.

    Args:
        addresses: `Launcher.addresses`.
        timeouts: How long waits may last.
    """
    run_id, token = uuid.uuid4().hex, secrets.token_bytes(32)
    advertised, bind = addresses
    with Channel(bind_host=bind, token=token, run_id=run_id, timeouts=timeouts) as channel:
        yield RunContext(run_id=run_id, token=token, driver=(advertised, channel.port)), channel


def coordinate(
    launcher: Launcher, spec: TaskSpec, run: RunContext, channel: EventChannel, coordinator: Coordinator
) -> RankJob:
    """Starts the ranks of a run, and has a coordinator listen until they have ended; returns them.

    Args:
        launcher: Starts the ranks.
        spec: What the run asks for.
        run: Which attempt this is.
        channel: Where the ranks report.
        coordinator: Listens there, and knows afterwards whether they have failed.
    """
    job = launcher.start(spec, run)
    try:
        coordinator.until_ended(job, launcher.watch(spec.timeouts))
    finally:
        job.cancel()
        channel.dismiss()
    return job


def coordinate_here(
    launcher: Launcher, spec: TaskSpec, progress: Progress, checkpoint_writer: CheckpointWriter | None = None
) -> tuple[Coordinator, RankJob]:
    """Runs ranks that need each other to their end, with the coordinator in this process.

    Args:
        launcher: Starts the ranks.
        spec: What the run asks for.
        progress: Shown what happens.
        checkpoint_writer: Writes checkpoints; None makes none.

    Returns:
        The coordinator, which knows the outcome, and the ranks.
    """
    with open_channel(launcher.addresses, spec.timeouts) as (run, channel):
        coordinator = Coordinator(channel, progress, SynchronousPolicy(), checkpoint_writer)
        return coordinator, coordinate(launcher, spec, run, channel, coordinator)


def coordinate_on_executor(
    rows: RowSource,
    spec: TaskSpec,
    coordinator_spec: CoordinatorSpec,
    progress: Progress,
    checkpoint_writer: CheckpointWriter | None = None,
) -> tuple[Coordinator, RankJob]:
    """Runs ranks to their end, with the coordinator beside rank 0.

    Args:
        rows: The rows.
        spec: What the run asks for.
        coordinator_spec: What is beside rank 0.
        progress: Shown what has happened, in the end.
        checkpoint_writer: Writes the last checkpoint, in the end; None makes none.

    Returns:
        A coordinator that has read the other one's events, and the ranks.
    """
    progress.note("rank 0 hosts the channel of this run, because of which its progress is shown when it has ended")
    events = LoggedEvents()
    coordinator = replay_coordinator(events, progress, checkpoint_writer, ranks_per_task=spec.plan.gpus_per_worker)
    run = RunContext(run_id=uuid.uuid4().hex, token=secrets.token_bytes(32), driver=_direction(rows.session))
    launcher = SparkCoordinatorLauncher(rows, coordinator_spec, events)
    return coordinator, coordinate(launcher, spec, run, events, coordinator)


def replay_coordinator(
    events: LoggedEvents,
    progress: Progress,
    checkpoint_writer: CheckpointWriter | None = None,
    *,
    ranks_per_task: int = 1,
) -> Coordinator:
    """Returns a coordinator that takes what rank 0 has written down of its run as if it were heard now."""
    policy = ReplayPolicy(events.is_lost, ranks_per_task=ranks_per_task)
    return Coordinator(events, WithoutSteps(progress), policy, checkpoint_writer)


def _direction(session: SparkSession) -> Address:
    """Returns an address in the direction of the cluster's own network, as executors see it."""
    host = (setting(session, "spark.driver.host") or "").strip("[]")
    try:
        return str(ipaddress.ip_address(host)), _ANYWHERE[1]
    except ValueError:
        return _ANYWHERE


def train_ranks(
    rows: RowSource, spec: TaskSpec, progress: Progress, checkpoint_writer: CheckpointWriter | None = None
) -> FitResult:
    """Trains on ranks that take every step together, in one barrier job.

    Args:
        rows: The prepared columns.
        spec: The training; its job is a pickled `elephant.training.job.TrainingJob`.
        progress: Shown what happens.
        checkpoint_writer: Writes checkpoints; None makes none.

    Raises:
        CheckpointError: A checkpoint could not be written.
        DataError: Rows that cannot be trained on.
        ClusterError: The cluster cannot run the fit.
        WorkerFailure: A rank failed; it has the rank's own traceback.
        TrainingError: The fit failed otherwise.
    """
    count = spec.plan.slots_needed
    keeps = rows.has_partitions(count)
    coordinator, job = _run(rows if keeps else rows.repartitioned(count), spec, progress, checkpoint_writer)
    if keeps and _mentions(job.error, _FORBIDDEN_CHAIN):
        coordinator, job = _run(rows.repartitioned(count), spec, progress, checkpoint_writer)
    coordinator.raise_failure(job.error)
    if not coordinator.began:
        # Where Spark knows that a DataFrame has no rows, it may make no task at all of it.
        raise no_rows()
    return coordinator.result()


def call_ranks(rows: RowSource, spec: TaskSpec, progress: Progress) -> list[bytes]:
    """Calls one function on every rank of one barrier job; returns the pickled results, by rank.

    Args:
        rows: A partition for each task; what they hold is not looked at.
        spec: The call; its job is a pickled `elephant.training.program.FunctionCall`.
        progress: Shown what happens.

    Raises:
        ConfigurationError: Code is missing on the executors, or a result does not pickle.
        ClusterError: The cluster cannot run the function.
        WorkerFailure: A rank failed; it has the rank's own traceback.
        TrainingError: The job failed otherwise.
    """
    coordinator, job = _run(rows, spec, progress)
    return results_of(coordinator, job, spec.plan.world_size)


def results_of(coordinator: Coordinator, job: RankJob, world_size: int) -> list[bytes]:
    """Returns what each rank's program returned; raises why the run failed, if it did."""
    coordinator.raise_failure(job.error)
    by_rank = results_by_rank(job.rows)
    return [by_rank[rank] for rank in range(world_size)]


def _run(
    rows: RowSource, spec: TaskSpec, progress: Progress, checkpoint_writer: CheckpointWriter | None = None
) -> tuple[Coordinator, RankJob]:
    """Runs the barrier job, a second time when it was lost before it began."""
    coordinator, job = _run_once(rows, spec, progress, checkpoint_writer)
    if not coordinator.began and (is_lost(job.error) or _mentions(job.error, _CRASHED)):
        progress.note("an executor, or a Python worker of it, was lost before any worker began: starting once more")
        coordinator, job = _run_once(rows, spec, progress, checkpoint_writer)
    return coordinator, job


def _run_once(
    rows: RowSource, spec: TaskSpec, progress: Progress, checkpoint_writer: CheckpointWriter | None
) -> tuple[Coordinator, RankJob]:
    if coordinates_on_executors(rows.session):
        coordinator_spec = CoordinatorSpec(program="synchronous")
        return coordinate_on_executor(rows, spec, coordinator_spec, progress, checkpoint_writer)
    return coordinate_here(SparkBarrierLauncher(rows), spec, progress, checkpoint_writer)


def _mentions(error: Exception | None, words: Sequence[str]) -> bool:
    return error is not None and any(word in str(error) for word in words)
