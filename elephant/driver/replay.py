"""Coordinator beside rank 0, as the driver sees it: it reads the record of the run when the run has ended."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from elephant.checkpoint.manager import CheckpointSink
from elephant.cluster.session import setting
from elephant.cluster.spark_job import SparkJob
from elephant.driver.coordinator import Coordinator
from elephant.driver.coordinator_policy import ReplayPolicy
from elephant.driver.launcher import RankJob, SparkLauncher
from elephant.driver.run_ranks import RunAttempt
from elephant.monitor.events import Event, StepEnded, unpacked
from elephant.monitor.progress import Progress
from elephant.net.addresses import Address
from elephant.net.tls import new_token
from elephant.task.coordinator_task import EVENTS
from elephant.task.rank_task import run_coordinator_partition
from elephant.task.specs import CoordinatorSpec, RunContext, TaskSpec
from elephant.task.task import results_by_rank

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.cluster.row_source import RowSource, TaskFunction

Result = TypeVar("Result")
# An address for documentation (RFC 5737): the way to it is the way to everywhere.
_ANYWHERE: Address = ("192.0.2.1", 9)


class SparkCoordinatorLauncher(SparkLauncher):
    """Starts ranks in a barrier stage, and the coordinator beside rank 0.

    Args:
        coordinator: What is beside rank 0.
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
        """Does nothing: rank 0 has seen who came, and has written it down."""
        return {}

    @property
    def awaited(self) -> str:
        """Nothing that is known before the job has ended."""
        return ""

    def dismiss(self) -> None:
        """Does nothing: rank 0 has told the others."""


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

    def awaits(self, text: str) -> None:
        """Shows what the run waits for."""
        self._progress.awaits(text)


@contextlib.contextmanager
def attempt_beside_rank_0(
    coordinator_spec: CoordinatorSpec,
    spec: TaskSpec,
    progress: Progress,
    rows: RowSource,
    *,
    result: Callable[[Coordinator, RankJob], Result],
    checkpoint_writer: CheckpointSink | None = None,
) -> Iterator[RunAttempt[Result]]:
    """Opens an attempt at ranks whose coordinator is beside rank 0, for the ``with`` block.

    Args:
        coordinator_spec: What is beside rank 0.
        spec: What the run asks for.
        progress: Shown what has happened, in the end.
        rows: The rows.
        result: What comes of ranks that have ended well.
        checkpoint_writer: Writes the last checkpoint, in the end; None makes none.
    """
    progress.note("rank 0 coordinates this run: its progress is shown when it has ended")
    events = LoggedEvents()
    coordinator = replay_coordinator(events, progress, checkpoint_writer, ranks_per_task=spec.plan.gpus_per_worker)
    token = new_token(encryption=spec.encryption)
    context = RunContext(run_id=uuid.uuid4().hex, token=token, driver=_direction(rows.session))
    launcher = SparkCoordinatorLauncher(rows, coordinator_spec, events)
    yield RunAttempt(launcher, context, events, coordinator, lambda job: result(coordinator, job))


def replay_coordinator(
    events: LoggedEvents,
    progress: Progress,
    checkpoint_writer: CheckpointSink | None = None,
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
