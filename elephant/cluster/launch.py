"""One run, seen from the driver: start the barrier job, follow its ranks, and end it whatever happens."""

from __future__ import annotations

import functools
import secrets
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elephant.checkpoint.writer import Keeper
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.executors import Absence
from elephant.cluster.following import Following, Outcome
from elephant.cluster.host_place import HostSpec
from elephant.cluster.hosted_run import run_hosted
from elephant.cluster.hosting import executors_host
from elephant.cluster.passing import is_lost
from elephant.cluster.profiles import profile_of
from elephant.cluster.rank import run_partition
from elephant.cluster.rendezvous import installed_versions, no_rows
from elephant.cluster.resources import ResourcePlan
from elephant.cluster.sources import FrameRows, RowSource
from elephant.cluster.spark_job import SparkJob
from elephant.cluster.task import Run, TaskSpec, results_by_rank
from elephant.cluster.warm_processes import COLD, WarmWorkers
from elephant.config import Timeouts
from elephant.data.schema import DataSchema
from elephant.monitor.channel import Channel
from elephant.monitor.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's words for a Python worker that has ended. It ends those of a cancelled job seconds later, when one of them may
# work for the next job.
_CRASHED = ("Python worker exited unexpectedly", "java.io.IOException: Stream closed")
_FORBIDDEN_CHAIN = ("SPARK-24820", "SPARK-24821")


def launch(
    rows: RowSource,
    *,
    job: bytes,
    backend: str,
    schema: DataSchema,
    plan: ResourcePlan,
    timeouts: Timeouts,
    progress: Progress,
    keeper: Keeper | None = None,
    warm: WarmWorkers = COLD,
) -> Outcome:
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
    following, spark_job = _run(rows if kept else rows.repartitioned(plan.slots_needed), spec, progress, keeper)
    if kept and _says(spark_job.error, _FORBIDDEN_CHAIN):
        following, spark_job = _run(rows.repartitioned(plan.slots_needed), spec, progress, keeper)
    following.raise_failure(spark_job.error)
    if not following.began:
        # Where Spark knows that a DataFrame has no rows, it may make no task at all of it.
        raise no_rows()
    return following.outcome()


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
    following, spark_job = _run(FrameRows(session.range(0, count, 1, count)), spec, progress)
    following.raise_failure(spark_job.error)
    by_rank = results_by_rank(spark_job.rows)
    return [by_rank[rank] for rank in range(plan.world_size)]


def _run(
    rows: RowSource, spec: TaskSpec, progress: Progress, keeper: Keeper | None = None
) -> tuple[Following, SparkJob]:
    """Runs the barrier job, a second time when it was lost before it began."""
    following, spark_job = _run_once(rows, spec, progress, keeper)
    if not following.began and (is_lost(spark_job.error) or _says(spark_job.error, _CRASHED)):
        progress.note("an executor, or a Python worker of it, was lost before any worker began: starting once more")
        following, spark_job = _run_once(rows, spec, progress, keeper)
    return following, spark_job


def _run_once(rows: RowSource, spec: TaskSpec, progress: Progress, keeper: Keeper | None) -> tuple[Following, SparkJob]:
    """Runs the barrier job to its end; returns what the ranks said, and the job, which may have failed."""
    session = rows.session
    if executors_host(session):
        return run_hosted(rows, spec, HostSpec(program="gang"), progress, keeper)
    run_id, token = uuid.uuid4().hex, secrets.token_bytes(32)
    advertised, bind = driver_addresses(session)
    with Channel(bind_host=bind, token=token, run_id=run_id, timeouts=spec.timeouts) as channel:
        run = Run(run_id=run_id, token=token, driver=(advertised, channel.port))
        task = functools.partial(run_partition, spec, run)
        following, profile = Following(channel, progress, keeper), profile_of(session, spec.plan.profile)
        action = functools.partial(rows.run, task, barrier=True, profile=profile)
        spark_job = SparkJob(session, f"elephant-{run_id}", action)
        try:
            following.until_ended(spark_job, Absence(session, spec.timeouts.executors_s).check)
        finally:
            spark_job.cancel()
            channel.dismiss()
        return following, spark_job


def _says(error: Exception | None, words: Sequence[str]) -> bool:
    return error is not None and any(word in str(error) for word in words)
