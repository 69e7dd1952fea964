"""A run whose executors do not reach the driver, seen from the driver: it starts the job and reads what that leaves."""

from __future__ import annotations

import functools
import ipaddress
import secrets
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elephant.checkpoint.writer import Keeper
from elephant.cluster.executors import Absence
from elephant.cluster.following import Following, as_error
from elephant.cluster.host_place import HostSpec
from elephant.cluster.hosted_task import EVENTS, run_hosted_partition
from elephant.cluster.profiles import profile_of
from elephant.cluster.settings import setting
from elephant.cluster.sources import RowSource
from elephant.cluster.spark_job import SparkJob
from elephant.cluster.spark_report import cause_of, lost_with
from elephant.cluster.task import Run, TaskSpec, results_by_rank
from elephant.errors import ElephantError, ServerFailedError, WorkerFailure, kind_of
from elephant.monitor.event_log import unpacked
from elephant.monitor.events import Counted, Event, StepEnded
from elephant.monitor.progress import Progress
from elephant.net.addresses import Address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SERVER_FAILED = kind_of(ServerFailedError(""))
# An address for documentation (RFC 5737): the way to it is the way to everywhere.
_ANYWHERE: Address = ("192.0.2.1", 9)


class Record:
    """The events of a job that has ended, one after the other; while it runs there are none."""

    def __init__(self) -> None:
        self._job: SparkJob | None = None
        self._events: Iterator[Event] | None = None

    def follow(self, job: SparkJob) -> None:
        """Reads what this job leaves."""
        self._job = job

    @property
    def is_lost(self) -> bool:
        """Whether the job has failed, and what it would have left is gone."""
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


class Replaying(Following):
    """Keeps what a rank has written down of its run, as if it were heard now.

    Args:
        record: What it has written down.
        progress: Shown what it says.
        keeper: Writes the last checkpoint; None makes none.
        ranks_per_task: Ranks of each Spark task.

    Attributes:
        statistics: What rank 0, and the parameter servers beside it, have counted.
    """

    def __init__(
        self, record: Record, progress: Progress, keeper: Keeper | None = None, *, ranks_per_task: int = 1
    ) -> None:
        super().__init__(record, WithoutSteps(progress), keeper)
        self._record = record
        self._ranks_per_task = ranks_per_task
        self._counted: dict[str, Any] = super().statistics

    @property
    def statistics(self) -> dict[str, Any]:
        return dict(self._counted)

    @property
    def began(self) -> bool:
        """Whether any rank has begun its work, or may have: what a job has left that failed, nobody can tell."""
        return self._record.is_lost or super().began

    def _keep(self, event: Event) -> None:
        if isinstance(event, Counted):
            self._counted = dict(event.statistics)
        super()._keep(event)

    def _raise_failure(self, job_error: Exception | None) -> None:
        first = next(iter([*self._causes, *self._failures]), None)
        if first is not None and first.kind == _SERVER_FAILED:
            raise ServerFailedError(first.message) from job_error
        if first is not None:
            raise as_error(first) from job_error
        super()._raise_failure(job_error)

    def _unexplained(self, job_error: Exception | None) -> ElephantError:
        executor, partition = lost_with(str(job_error))
        if partition is None:
            return super()._unexplained(job_error)
        return WorkerFailure(
            "its Spark task failed, and with it is lost what the ranks had said, which rank 0 keeps until the end: "
            f"{cause_of(job_error)}",
            rank=partition * self._ranks_per_task,
            host="its host",
            executor=executor,
        )


def run_hosted(
    rows: RowSource, spec: TaskSpec, host: HostSpec, progress: Progress, keeper: Keeper | None = None
) -> tuple[Replaying, SparkJob]:
    """Runs a barrier job whose rank 0 hosts what the driver hosts otherwise, to its end.

    Args:
        rows: The rows.
        spec: What the run asks for.
        host: What rank 0 hosts.
        progress: Shown what has happened, in the end.
        keeper: Writes the last checkpoint, in the end; None makes none.

    Returns:
        What the ranks said, and the job, which may have failed.
    """
    session = rows.session
    run = Run(run_id=uuid.uuid4().hex, token=secrets.token_bytes(32), driver=_direction(session))
    task = functools.partial(run_hosted_partition, spec, run, host)
    progress.note("rank 0 hosts the channel of this run, because of which its progress is shown when it has ended")
    record = Record()
    following = Replaying(record, progress, keeper, ranks_per_task=spec.plan.gpus_per_worker)
    action = functools.partial(rows.run, task, barrier=True, profile=profile_of(session, spec.plan.profile))
    spark_job = SparkJob(session, f"elephant-{run.run_id}", action)
    record.follow(spark_job)
    try:
        following.until_ended(spark_job, Absence(session, spec.timeouts.executors_s).check)
    finally:
        spark_job.cancel()
    return following, spark_job


def _direction(session: SparkSession) -> Address:
    """Returns an address in the direction of the cluster's own network, as executors see it."""
    host = (setting(session, "spark.driver.host") or "").strip("[]")
    try:
        return str(ipaddress.ip_address(host)), _ANYWHERE[1]
    except ValueError:
        return _ANYWHERE
