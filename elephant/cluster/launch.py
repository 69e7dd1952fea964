"""One fit, seen from the driver: start the barrier job, follow its ranks, and end it whatever happens."""

from __future__ import annotations

import functools
import secrets
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elephant.cluster.following import Following, Outcome
from elephant.cluster.partitions import num_partitions
from elephant.cluster.rendezvous import installed_versions
from elephant.cluster.spark_job import SparkJob
from elephant.cluster.task import RESULT_SCHEMA, Run, TaskSpec, train_partition
from elephant.config import FitConfig
from elephant.data.schema import DataSchema
from elephant.errors import ClusterError
from elephant.monitor.channel import Channel
from elephant.monitor.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORBIDDEN_CHAIN = ("SPARK-24820", "SPARK-24821")
# Spark's words for an executor, or a Python worker of it, that was lost before it ran anything.
_PASSING = ("ExecutorLostFailure", "java.net.SocketException", "ExecutorDeadException")


def launch(
    frame: DataFrame, *, job: bytes, backend: str, schema: DataSchema, config: FitConfig, progress: Progress
) -> Outcome:
    """Runs one fit as one barrier job.

    Args:
        frame: The prepared columns.
        job: The pickled `elephant.training.job.TrainingJob`.
        backend: The Keras backend to train with: the driver's.
        schema: What the columns hold.
        config: The options of the fit.
        progress: Shown what happens.

    Raises:
        DataError: Rows that cannot be trained on.
        ClusterError: The cluster cannot run the fit.
        WorkerError: A rank failed; it has the rank's own traceback.
        TrainingError: The fit failed otherwise.
    """
    spec = TaskSpec(
        driver_versions=installed_versions(), job=job, backend=backend, schema=schema, timeouts=config.timeouts
    )
    kept = num_partitions(frame) == config.num_workers
    partitioned = frame if kept else frame.repartition(config.num_workers)
    retried = False
    while True:
        following, error = _run_once(partitioned, spec, progress)
        if partitioned is frame and _says(error, _FORBIDDEN_CHAIN):
            partitioned = frame.repartition(config.num_workers)
        elif not retried and not following.began and _says(error, _PASSING):
            retried = True
            progress.note("an executor was lost before any worker began: starting once more")
        else:
            return following.outcome(error)


def _run_once(frame: DataFrame, spec: TaskSpec, progress: Progress) -> tuple[Following, Exception | None]:
    """Runs the barrier job to its end; returns what the ranks said, and the job's error if it failed."""
    session = frame.sparkSession
    run_id, token = uuid.uuid4().hex, secrets.token_bytes(32)
    advertised, bind = driver_addresses(session)
    with Channel(bind_host=bind, token=token, run_id=run_id, timeouts=spec.timeouts) as channel:
        run = Run(run_id=run_id, token=token, driver=(advertised, channel.port))
        task = functools.partial(train_partition, spec, run)
        ranks = frame.mapInArrow(task, RESULT_SCHEMA, barrier=True)
        following = Following(channel, progress)
        spark_job = SparkJob(session, f"elephant-{run_id}", ranks.collect)
        try:
            following.until_ended(spark_job)
        finally:
            spark_job.cancel()
            channel.dismiss()
        return following, spark_job.error


def driver_addresses(session: SparkSession) -> tuple[str, str]:
    """Returns the address that executors reach the driver at, and the one that it binds to."""
    advertised = session.conf.get("spark.driver.host", None)
    if not advertised:
        raise ClusterError("expected spark.driver.host to be set. Received: nothing.")
    bind = session.conf.get("spark.driver.bindAddress", None) or advertised
    return advertised, bind


def _says(error: Exception | None, words: Sequence[str]) -> bool:
    return error is not None and any(word in str(error) for word in words)
