"""Launching the ranks of a synchronous run in a barrier stage, with the coordinator on the driver or beside rank 0."""

from __future__ import annotations

import functools
import ipaddress
import secrets
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from elephant.checkpoint.writer import CheckpointWriter
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.coordinator import Coordinator, FitResult, is_lost
from elephant.cluster.coordinator_location import coordinates_on_executors
from elephant.cluster.coordinator_policy import ReplayPolicy, SynchronousPolicy
from elephant.cluster.coordinator_spec import CoordinatorSpec
from elephant.cluster.coordinator_task import EVENTS, run_coordinator_partition
from elephant.cluster.executors import ExecutorAbsence
from elephant.cluster.gpu.plan import ResourcePlan, profile_of
from elephant.cluster.rank_task import run_partition
from elephant.cluster.rendezvous import installed_versions, no_rows
from elephant.cluster.row_source import FrameRows, RowSource
from elephant.cluster.session import setting
from elephant.cluster.spark_job import SparkJob
from elephant.cluster.task import RunContext, TaskSpec, results_by_rank
from elephant.cluster.warm_processes import COLD, WarmWorkers
from elephant.config import Timeouts
from elephant.data.schema import DataSchema
from elephant.monitor.channel import Channel
from elephant.monitor.event_log import unpacked
from elephant.monitor.events import Event, StepEnded
from elephant.monitor.progress import Progress
from elephant.net.addresses import Address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# An address for documentation (RFC 5737): the way to it is the way to everywhere.
_ANYWHERE: Address = ("192.0.2.1", 9)

# Spark's words for a Python worker that has ended. It ends those of a cancelled job seconds later, when one of them may
# work for the next job.
_CRASHED = ("Python worker exited unexpectedly", "java.io.IOException: Stream closed")
_FORBIDDEN_CHAIN = ("SPARK-24820", "SPARK-24821")


class LoggedEvents:
    """The events of a job that has ended, one after the other; while it runs there are none.

    Args:
        job: The job, whose rank 0 leaves them.
    """

    def __init__(self, job: SparkJob) -> None:
        self._job = job
        self._events: Iterator[Event] | None = None

    def is_lost(self) -> bool:
        """Returns whether the job has failed, and what it would have left is gone."""
        return self._job.error is not None

    def next_event(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None when there is none."""
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


def replay_coordinator(
    job: SparkJob, progress: Progress, checkpoint_writer: CheckpointWriter | None = None, *, ranks_per_task: int = 1
) -> Coordinator:
    """Returns a coordinator that takes what rank 0 has written down of its run as if it were heard now.

    Args:
        job: The job.
        progress: Shown what the ranks have reported, but for steps.
        checkpoint_writer: Writes the last checkpoint; None makes none.
        ranks_per_task: Ranks of each Spark task.
    """
    record = LoggedEvents(job)
    policy = ReplayPolicy(record.is_lost, ranks_per_task=ranks_per_task)
    return Coordinator(record, WithoutSteps(progress), policy, checkpoint_writer)


def run_with_coordinator_task(
    rows: RowSource,
    spec: TaskSpec,
    host: CoordinatorSpec,
    progress: Progress,
    checkpoint_writer: CheckpointWriter | None = None,
) -> tuple[Coordinator, SparkJob]:
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
    run = RunContext(run_id=uuid.uuid4().hex, token=secrets.token_bytes(32), driver=_direction(session))
    task = functools.partial(run_coordinator_partition, spec, run, host)
    progress.note("rank 0 hosts the channel of this run, because of which its progress is shown when it has ended")
    action = functools.partial(rows.run, task, barrier=True, profile=profile_of(session, spec.plan.profile))
    spark_job = SparkJob(session, f"elephant-{run.run_id}", action)
    coordinator = replay_coordinator(spark_job, progress, checkpoint_writer, ranks_per_task=spec.plan.gpus_per_worker)
    try:
        coordinator.until_ended(spark_job, ExecutorAbsence(session, spec.timeouts.executors_s).check)
    finally:
        spark_job.cancel()
    return coordinator, spark_job


def _direction(session: SparkSession) -> Address:
    """Returns an address in the direction of the cluster's own network, as executors see it."""
    host = (setting(session, "spark.driver.host") or "").strip("[]")
    try:
        return str(ipaddress.ip_address(host)), _ANYWHERE[1]
    except ValueError:
        return _ANYWHERE


def launch(
    rows: RowSource,
    *,
    job: bytes,
    backend: str,
    schema: DataSchema,
    plan: ResourcePlan,
    timeouts: Timeouts,
    progress: Progress,
    checkpoint_writer: CheckpointWriter | None = None,
    warm: WarmWorkers = COLD,
) -> FitResult:
    """Runs one fit as one barrier job.

    Args:
        rows: The prepared columns.
        job: The pickled `elephant.training.job.TrainingJob`.
        backend: The Keras backend to train with: the driver's.
        schema: What the columns hold.
        plan: How many tasks there are, and where the devices of their ranks come from.
        timeouts: How long waits may last.
        progress: Shown what happens.
        keeper: Writes checkpoints; None makes none.
        warm: How many processes may wait on an executor that have imported Keras.

    Raises:
        CheckpointError: A checkpoint could not be written.
        DataError: Rows that cannot be trained on.
        ClusterError: The cluster cannot run the fit.
        WorkerFailure: A rank failed; it has the rank's own traceback.
        TrainingError: The fit failed otherwise.
    """
    spec = TaskSpec(
        program="fit",
        driver_versions=installed_versions(),
        job=job,
        backend=backend,
        schema=schema,
        timeouts=timeouts,
        shows_output=progress.shows_output,
        plan=plan,
        warm=warm,
    )
    kept = rows.has_partitions(plan.slots_needed)
    coordinator, spark_job = _run(
        rows if kept else rows.repartitioned(plan.slots_needed), spec, progress, checkpoint_writer
    )
    if kept and _says(spark_job.error, _FORBIDDEN_CHAIN):
        coordinator, spark_job = _run(rows.repartitioned(plan.slots_needed), spec, progress, checkpoint_writer)
    coordinator.raise_failure(spark_job.error)
    if not coordinator.began:
        # Where Spark knows that a DataFrame has no rows, it may make no task at all of it.
        raise no_rows()
    return coordinator.result()


def launch_function(
    session: SparkSession,
    *,
    call: bytes,
    plan: ResourcePlan,
    backend: str | None,
    timeouts: Timeouts,
    environment: dict[str, str],
    progress: Progress,
) -> list[bytes]:
    """Calls one function on every rank of one barrier job.

    Args:
        session: The Spark session.
        call: The pickled `elephant.training.program.FunctionCall`.
        plan: How many tasks there are, and where the devices of their ranks come from.
        backend: The Keras backend for functions that use Keras; None leaves it to Keras.
        timeouts: How long waits may last.
        environment: Variables for the ranks' processes.
        progress: Shown what happens.

    Returns:
        The pickled results, by rank.

    Raises:
        ConfigurationError: Code is missing on the executors, or a result does not pickle.
        ClusterError: The cluster cannot run the function.
        WorkerFailure: A rank failed; it has the rank's own traceback.
        TrainingError: The job failed otherwise.
    """
    # A function may need no Keras: versions of it are not compared.
    versions = {name: version for name, version in installed_versions().items() if name != "keras"}
    spec = TaskSpec(
        program="function",
        driver_versions=versions,
        job=call,
        backend=backend,
        schema=None,
        timeouts=timeouts,
        environment=environment,
        shows_output=progress.shows_output,
        plan=plan,
    )
    count = plan.slots_needed
    coordinator, spark_job = _run(FrameRows(session.range(0, count, 1, count)), spec, progress)
    coordinator.raise_failure(spark_job.error)
    by_rank = results_by_rank(spark_job.rows)
    return [by_rank[rank] for rank in range(plan.world_size)]


def _run(
    rows: RowSource, spec: TaskSpec, progress: Progress, checkpoint_writer: CheckpointWriter | None = None
) -> tuple[Coordinator, SparkJob]:
    """Runs the barrier job, a second time when it was lost before it began."""
    coordinator, spark_job = _run_once(rows, spec, progress, checkpoint_writer)
    if not coordinator.began and (is_lost(spark_job.error) or _says(spark_job.error, _CRASHED)):
        progress.note("an executor, or a Python worker of it, was lost before any worker began: starting once more")
        coordinator, spark_job = _run_once(rows, spec, progress, checkpoint_writer)
    return coordinator, spark_job


def _run_once(
    rows: RowSource, spec: TaskSpec, progress: Progress, checkpoint_writer: CheckpointWriter | None
) -> tuple[Coordinator, SparkJob]:
    """Runs the barrier job to its end; returns what the ranks said, and the job, which may have failed."""
    session = rows.session
    if coordinates_on_executors(session):
        return run_with_coordinator_task(
            rows, spec, CoordinatorSpec(program="synchronous"), progress, checkpoint_writer
        )
    run_id, token = uuid.uuid4().hex, secrets.token_bytes(32)
    advertised, bind = driver_addresses(session)
    with Channel(bind_host=bind, token=token, run_id=run_id, timeouts=spec.timeouts) as channel:
        run = RunContext(run_id=run_id, token=token, driver=(advertised, channel.port))
        task = functools.partial(run_partition, spec, run)
        coordinator, profile = (
            Coordinator(channel, progress, SynchronousPolicy(), checkpoint_writer),
            profile_of(session, spec.plan.profile),
        )
        action = functools.partial(rows.run, task, barrier=True, profile=profile)
        spark_job = SparkJob(session, f"elephant-{run_id}", action)
        try:
            coordinator.until_ended(spark_job, ExecutorAbsence(session, spec.timeouts.executors_s).check)
        finally:
            spark_job.cancel()
            channel.dismiss()
        return coordinator, spark_job


def _says(error: Exception | None, words: Sequence[str]) -> bool:
    return error is not None and any(word in str(error) for word in words)
