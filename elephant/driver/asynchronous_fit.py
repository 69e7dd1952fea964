"""Asynchronous fit from the driver: workers that go at their own pace, with parameter servers and their epochs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elephant.checkpoint.manager import CheckpointSink
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.broadcast import for_tasks
from elephant.cluster.spark_job import end_attempt
from elephant.driver.coordinator import Coordinator, EventSource, FitResult, refusals
from elephant.driver.coordinator_location import coordinates_on_executors
from elephant.driver.coordinator_policy import AsynchronousPolicy, ProgressDisplay, require_all_steps
from elephant.driver.launcher import SparkTaskLauncher
from elephant.driver.replay import attempt_beside_rank_0
from elephant.driver.run_ranks import RunAttempt, open_channel, run_ranks, the_coordinator
from elephant.driver.server_processes import DriverServers, ExecutorServers, ServerGroup, number_of_parts, parts_of
from elephant.monitor.progress import Progress
from elephant.parameter_server.control_client import ControlClient
from elephant.parameter_server.process import listening_sockets
from elephant.parameter_server.server import added_up
from elephant.task.specs import AsyncFitSpec, CoordinatorSpec, RunContext, ServerAddresses, TaskSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.cluster.row_source import RowSource
    from elephant.driver.server_model import ServerModel
    from elephant.rank.job import TrainingJob


def train_workers(
    rows: RowSource,
    spec: TaskSpec,
    job: TrainingJob,
    model: ServerModel,
    progress: Progress,
    checkpoint_writer: CheckpointSink | None = None,
) -> FitResult:
    """Trains on workers that go at their own pace against parameter servers; afterwards the model has their weights.

    Args:
        spec: The workers' part of the training; its job is a pickled `elephant.rank.job.TrainingJob`.
        progress: Shown what happens.
        checkpoint_writer: Writes checkpoints; None makes none.

    Raises:
        CheckpointError: A checkpoint could not be written.
        DataError: Rows that cannot be trained on.
        ClusterError: The cluster cannot run the fit, or a port is taken.
        WorkerFailure: A worker failed; it has the worker's own traceback.
        ServerFailedError: A parameter server has given the fit up, or is lost for good.
        TrainingError: The fit failed otherwise.
    """
    if coordinates_on_executors(rows.session):
        return _train_on_executors(rows, spec, job, model, progress, checkpoint_writer)
    attempt_on = functools.partial(_attempt_with_servers, spec, job, model, progress, checkpoint_writer)
    result = run_ranks(partitioned(rows, spec), spec, progress, attempt_on)
    progress.note(summary_line(result.statistics))
    return result


@contextlib.contextmanager
def _attempt_with_servers(
    spec: TaskSpec,
    job: TrainingJob,
    model: ServerModel,
    progress: Progress,
    checkpoint_writer: CheckpointSink | None,
    rows: RowSource,
) -> Iterator[RunAttempt[FitResult]]:
    session, addresses = rows.session, driver_addresses(rows.session)
    with contextlib.ExitStack() as closing:
        run, channel = closing.enter_context(open_channel(addresses, spec))
        servers = closing.enter_context(_servers(session, job, model, run, addresses[1]))
        fit = closing.enter_context(
            AsynchronousFit(
                job, model, servers, run.token, run.run_id, channel, progress, checkpoint_writer,
                num_ranks=spec.plan.world_size, end_attempt=functools.partial(end_attempt, session),
            )
        )  # fmt: skip
        launcher = SparkTaskLauncher(rows, _addresses(servers, job, model))
        yield RunAttempt(launcher, run, channel, fit.coordinator, lambda _: fit.result())


def partitioned(rows: RowSource, spec: TaskSpec) -> RowSource:
    """Returns rows in as many partitions as a fit has workers."""
    # Rows that a column marks for validation often lie together: a partition of nothing else would have no epochs.
    count = spec.plan.slots_needed
    keeps = spec.schema is not None and spec.schema.validation is None and rows.has_partitions(count)
    return rows if keeps else rows.repartitioned(count)


def _addresses(servers: ServerGroup, job: TrainingJob, model: ServerModel) -> ServerAddresses:
    return ServerAddresses(servers=servers.addresses, layout=model.layout.to_json(), num_workers=job.config.num_ranks)


class AsynchronousFit:
    """Coordinator of an asynchronous fit with the epochs of its workers and their callbacks, for the ``with`` block.

    Args:
        job: The workers' job; its callbacks are the user's own.
        model: The model, whose weights the servers keep.
        servers: The parameter servers.
        token: The secret of the run.
        run_id: The run.
        events: Where the workers report.
        display: Shown what they report.
        checkpoint_writer: Takes states that the fit could go on from; None keeps none.
        num_ranks: Number of workers.
        end_attempt: Ends one attempt at a Spark task; None where nothing can.

    Attributes:
        coordinator: Listens to the workers.
    """

    def __init__(
        self,
        job: TrainingJob,
        model: ServerModel,
        servers: ServerGroup,
        token: bytes,
        run_id: str,
        events: EventSource,
        display: ProgressDisplay,
        checkpoint_writer: CheckpointSink | None,
        *,
        num_ranks: int,
        end_attempt: Callable[[int], bool] | None,
    ) -> None:
        # Here, because it imports Keras, which an executor's Python worker must not.
        from elephant.driver.driver_epochs import DriverEpochs

        self._config, self._model, self._servers = job.config, model, servers
        self._most_steps = job.most_steps
        with contextlib.ExitStack() as closing:
            self._control = ControlClient(
                servers.control_addresses,
                token=token,
                run_id=run_id,
                layout=model.layout,
                timeouts=job.config.timeouts,
                require_alive=servers.require_alive,
            )
            closing.callback(self._control.close)
            self._control.require_folders(model.table_places)
            self._epochs = DriverEpochs(job, model, self._control, checkpoint_writer, show=display.show)
            closing.callback(self._epochs.close)
            self._policy = AsynchronousPolicy(
                display,
                servers=servers,
                epochs=self._epochs,
                num_ranks=num_ranks,
                end_attempt=end_attempt,
                patience_s=job.config.timeouts.collective_s if job.config.trains_in_rounds else None,
            )
            self.coordinator = Coordinator(events, display, self._policy, checkpoint_writer)
            self._epochs.begin()
            self._closing = closing.pop_all()

    def __enter__(self) -> AsynchronousFit:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def result(self) -> FitResult:
        """Returns the result, once the workers have ended well.

        Raises:
            DataError: No worker had rows to train on.
            TrainingError: Servers lack steps of a worker, or cannot be reached.
        """
        coordinator, epochs, policy = self.coordinator, self._epochs, self._policy
        config, model = self._config, self._model
        history = coordinator.history()
        counted = self._control.statistics()
        refused = (counted, coordinator.statistics, {"refused_connections": self._servers.turned_away})
        statistics = {
            **counted,
            "refused_connections": added_up(part["refused_connections"] for part in refused),
            "training_s": policy.training_s,
            "wait_s_per_step": epochs.wait_s / epochs.steps if epochs.steps else 0.0,
            "worker_retries": policy.retries,
        }
        if model.pushes_every_step and not epochs.stopped:
            require_all_steps(
                coordinator.record,
                statistics["positions"],
                epochs=config.epochs,
                batch_size=config.rank_batch_size,
                steps_per_epoch=config.steps_per_epoch,
                most_steps=self._most_steps,
            )
        epochs.end()
        return FitResult(
            variables=model.variables(), rows=model.rows, history=history, statistics=statistics,
            plan=coordinator.record.plan,
        )  # fmt: skip


def _train_on_executors(
    rows: RowSource,
    spec: TaskSpec,
    job: TrainingJob,
    model: ServerModel,
    progress: Progress,
    checkpoint_writer: CheckpointSink | None,
) -> FitResult:
    """Runs a fit whose executors do not reach the driver: servers, channel and callbacks are beside rank 0."""
    from pyspark import cloudpickle

    config = job.config
    if config.asynchronous.server_placement == "executors":
        progress.note("serverPlacement='executors': as rank 0 coordinates, all parameter servers are beside it")
    fit = AsyncFitSpec(callbacks=job.callbacks, rows=model.rows, state=job.state, keeps=checkpoint_writer is not None)
    extras = cloudpickle.dumps(fit)
    coordinator_spec = CoordinatorSpec(
        program="asynchronous",
        extras=for_tasks(rows.session, extras, len(extras)),
        servers=number_of_parts(model.layout, config),
        port=config.asynchronous.port,
        layout=model.layout.to_json(),
    )
    attempt_on = functools.partial(
        attempt_beside_rank_0,
        coordinator_spec,
        spec,
        progress,
        result=the_coordinator,
        checkpoint_writer=checkpoint_writer,
    )
    coordinator = run_ranks(rows.repartitioned(spec.plan.slots_needed), spec, progress, attempt_on)
    progress.note(summary_line(coordinator.statistics))
    return coordinator.result()


def _servers(session: SparkSession, job: TrainingJob, model: ServerModel, run: RunContext, bind: str) -> ServerGroup:
    config, options = job.config, job.config.asynchronous
    parts = parts_of(model, config, run.run_id)
    if options.server_placement == "executors":
        return ExecutorServers(
            session, parts, run=run, bind=bind, port=options.port, ports=config.ports, timeouts=config.timeouts
        )
    listeners = listening_sockets(bind, options.port, len(parts), config.ports)
    return DriverServers(parts, listeners, token=run.token, advertised=run.driver[0])


def summary_line(statistics: Mapping[str, Any]) -> str:
    """Returns a line about a fit's exchanges.

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
