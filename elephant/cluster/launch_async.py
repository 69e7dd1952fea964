"""One asynchronous fit, seen from the driver: start its servers and its workers, follow them, fetch what they leave."""

from __future__ import annotations

import contextlib
import functools
import secrets
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elephant.checkpoint.writer import CheckpointSink, CheckpointWriter
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.async_coordinator import AsyncCoordinator
from elephant.cluster.coordinator import FitResult, refusals
from elephant.cluster.coordinator_location import coordinates_on_executors
from elephant.cluster.coordinator_spec import AsyncFitSpec, CoordinatorSpec
from elephant.cluster.executors import ExecutorAbsence
from elephant.cluster.gpu.plan import ResourcePlan, profile_of
from elephant.cluster.launch import run_with_coordinator_task
from elephant.cluster.rank_task import run_worker
from elephant.cluster.rendezvous import installed_versions
from elephant.cluster.row_source import RowSource
from elephant.cluster.server_processes import DriverServers, ServerGroup, number_of_parts, parts_of
from elephant.cluster.server_stage import ExecutorServers
from elephant.cluster.spark_job import SparkJob, end_attempt
from elephant.cluster.task import RunContext, ServerAddresses, TaskSpec
from elephant.cluster.warm_processes import warm_workers
from elephant.config import FitConfig
from elephant.monitor.channel import Channel
from elephant.monitor.progress import Progress
from elephant.parameter_server.control_client import ControlClient
from elephant.parameter_server.process import listening_sockets
from elephant.parameter_server.statistics import added_up

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.training.driver_callbacks import DriverEpochs
    from elephant.training.job import TrainingJob
    from elephant.training.server_model import ServerModel


def launch_workers(
    rows: RowSource,
    *,
    job: TrainingJob,
    pickled: bytes,
    model: ServerModel,
    plan: ResourcePlan,
    progress: Progress,
    checkpoint_writer: CheckpointWriter | None = None,
) -> FitResult:
    """Runs one asynchronous fit; afterwards the model holds what was learnt.

    Args:
        rows: The prepared columns.
        job: What the workers are to do.
        pickled: The same as it travels.
        model: The driver's model.
        plan: How many tasks there are, and where the devices of their workers come from.
        progress: Shown what happens.
        keeper: Writes checkpoints; None makes none.

    Raises:
        CheckpointError: A checkpoint could not be written.
        DataError: Rows that cannot be trained on.
        ClusterError: The cluster cannot run the fit, or a port is taken.
        WorkerFailure: A worker failed; it has the worker's own traceback.
        ServerFailedError: A parameter server has given the fit up, or is lost for good.
        TrainingError: The fit failed otherwise.
    """
    config, session = job.config, rows.session
    if coordinates_on_executors(session):
        return _launch_on_executors(rows, job, pickled, model, plan, progress, checkpoint_writer)
    run_id, token = uuid.uuid4().hex, secrets.token_bytes(32)
    advertised, bind = driver_addresses(session)
    with contextlib.ExitStack() as closing:
        channel = closing.enter_context(Channel(bind_host=bind, token=token, run_id=run_id, timeouts=config.timeouts))
        run = RunContext(run_id=run_id, token=token, driver=(advertised, channel.port))
        servers = closing.enter_context(_servers(rows.session, job, model, run, bind))
        control = ControlClient(
            servers.control_addresses, token=token, run_id=run_id, layout=model.layout, timeouts=config.timeouts
        )
        closing.callback(control.close)
        epochs = new_epochs(job, model, control, checkpoint_writer)
        closing.callback(epochs.close)
        coordinator = AsyncCoordinator(
            channel,
            progress,
            servers=servers,
            epochs=epochs,
            num_ranks=plan.world_size,
            end_attempt=functools.partial(end_attempt, session),
            checkpoint_writer=checkpoint_writer,
        )
        epochs.begin()
        _run_workers(
            rows, _spec(rows, job, pickled, plan, progress), run, _served_fit(servers, job, model), coordinator, channel
        )
        result = result_of(coordinator, control, epochs, servers, model, config)
    progress.note(summary_line(result.statistics))
    return result


def result_of(
    coordinator: AsyncCoordinator,
    control: ControlClient,
    epochs: DriverEpochs,
    servers: ServerGroup,
    model: ServerModel,
    config: FitConfig,
) -> FitResult:
    """Returns the result of a fit whose workers have ended well.

    Raises:
        DataError: No worker had rows to train on.
        TrainingError: Servers that were lost lack steps, or cannot be reached.
    """
    history = coordinator.history()
    statistics = _statistics(control.statistics(), epochs, servers, coordinator)
    if servers.restarts and model.pushes_every_step and not epochs.stopped:
        coordinator.require_all_steps(statistics["positions"], epochs=config.epochs, batch_size=config.rank_batch_size)
    epochs.end()
    return FitResult(
        variables=model.variables(), rows=model.rows, history=history, statistics=statistics, plan=coordinator.plan
    )


def _launch_on_executors(
    rows: RowSource,
    job: TrainingJob,
    pickled: bytes,
    model: ServerModel,
    plan: ResourcePlan,
    progress: Progress,
    checkpoint_writer: CheckpointWriter | None,
) -> FitResult:
    """Runs a fit whose executors do not reach the driver: rank 0 hosts its servers, its channel and its callbacks."""
    from pyspark import cloudpickle

    config = job.config
    if config.asynchronous.server_placement == "executors":
        progress.note("serverPlacement='executors': as rank 0 hosts them, all parameter servers are beside it")
    fit = AsyncFitSpec(callbacks=job.callbacks, rows=model.rows, state=job.state, keeps=checkpoint_writer is not None)
    host = CoordinatorSpec(
        program="asynchronous",
        extras=cloudpickle.dumps(fit),
        servers=number_of_parts(model.layout, config),
        port=config.asynchronous.port,
        layout=model.layout.to_json(),
    )
    partitioned = rows.repartitioned(plan.slots_needed)
    coordinator, spark_job = run_with_coordinator_task(
        partitioned, _spec(rows, job, pickled, plan, progress), host, progress, checkpoint_writer
    )
    coordinator.raise_failure(spark_job.error)
    progress.note(summary_line(coordinator.statistics))
    return coordinator.result()


def _servers(session: SparkSession, job: TrainingJob, model: ServerModel, run: RunContext, bind: str) -> ServerGroup:
    config, options = job.config, job.config.asynchronous
    parts = parts_of(model, config, run.run_id)
    if options.server_placement == "executors":
        return ExecutorServers(session, parts, run=run, bind=bind, port=options.port, timeouts=config.timeouts)
    listeners = listening_sockets(bind, options.port, len(parts))
    return DriverServers(parts, listeners, token=run.token, advertised=run.driver[0])


def new_epochs(
    job: TrainingJob, model: ServerModel, control: ControlClient, checkpoint_writer: CheckpointSink | None
) -> DriverEpochs:
    """Returns what makes a fit's epochs of those of its workers, and runs the user's callbacks."""
    # Here, because it imports Keras, which an executor's Python worker must not.
    from elephant.training.driver_callbacks import DriverEpochs

    return DriverEpochs(job, model, control, checkpoint_writer)


def _spec(rows: RowSource, job: TrainingJob, pickled: bytes, plan: ResourcePlan, progress: Progress) -> TaskSpec:
    return TaskSpec(
        program="asynchronous",
        driver_versions=installed_versions(),
        job=pickled,
        backend=job.model.settings.backend,
        schema=job.schema,
        timeouts=job.config.timeouts,
        shows_output=progress.shows_output,
        plan=plan,
        warm=warm_workers(rows.session, job.config),
    )


def _served_fit(servers: ServerGroup, job: TrainingJob, model: ServerModel) -> ServerAddresses:
    return ServerAddresses(servers=servers.addresses, layout=model.layout.to_json(), num_workers=job.config.num_ranks)


def _run_workers(
    rows: RowSource,
    spec: TaskSpec,
    run: RunContext,
    served: ServerAddresses,
    coordinator: AsyncCoordinator,
    channel: Channel,
) -> None:
    """Runs the workers' Spark job to its end; raises why it failed, if it did."""
    count, profile = spec.plan.slots_needed, profile_of(rows.session, spec.plan.profile)
    # Rows that a column marks for validation often lie together: a partition of nothing else would have no epochs.
    kept = spec.schema is not None and spec.schema.validation is None and rows.has_partitions(count)
    partitioned = rows if kept else rows.repartitioned(count)
    worker = functools.partial(run_worker, spec, run, served)
    action = functools.partial(partitioned.run, worker, barrier=False, profile=profile)
    spark_job = SparkJob(rows.session, f"elephant-{run.run_id}", action)
    try:
        coordinator.until_ended(spark_job, ExecutorAbsence(rows.session, spec.timeouts.executors_s).check)
    finally:
        spark_job.cancel()
        channel.dismiss()
    coordinator.raise_failure(spark_job.error)


def _statistics(
    counted: Mapping[str, Any], epochs: DriverEpochs, servers: ServerGroup, coordinator: AsyncCoordinator
) -> dict[str, Any]:
    refused = (counted, coordinator.statistics, {"refused_connections": servers.turned_away})
    return {
        **counted,
        "refused_connections": added_up(part["refused_connections"] for part in refused),
        "training_s": coordinator.training_s,
        "wait_s_per_step": epochs.wait_s / epochs.steps if epochs.steps else 0.0,
        "worker_retries": coordinator.retries,
    }


def summary_line(statistics: Mapping[str, Any]) -> str:
    """Returns what there is to say of a fit's exchanges.

    >>> summary_line({"updates": 30, "training_s": 2.0, "bytes_in": 8e6, "bytes_out": 2e6, "wait_s_per_step": 0.004,
    ...               "staleness": {"0": 20, "1": 8, "5": 2}, "refused": 0, "refused_connections": {}})
    '30 updates, 15.0/s, 5 MB/s, 4.0 ms of waiting per step, staleness 0.6 on average and 5 at most, 0 refused'
    """
    seconds = max(float(statistics["training_s"]), 1e-9)
    staleness = {int(value): int(count) for value, count in statistics["staleness"].items() if count}
    total = sum(staleness.values())
    mean = sum(value * count for value, count in staleness.items()) / total if total else 0.0
    strangers = statistics["refused_connections"]
    rate = (statistics["bytes_in"] + statistics["bytes_out"]) / seconds / 1e6
    return (
        f"{statistics['updates']:,} updates, {statistics['updates'] / seconds:.1f}/s, {rate:.3g} MB/s, "
        f"{1e3 * statistics['wait_s_per_step']:.1f} ms of waiting per step, staleness {mean:.1f} on average "
        f"and {max(staleness, default=0)} at most, {statistics['refused']} refused"
        f"{'; ' + refusals(strangers) if strangers else ''}"
    )
