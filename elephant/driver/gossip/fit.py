"""Fit in gossip mode from the driver: ordinary Spark tasks whose workers average their weights in pairs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elephant.checkpoint.manager import CheckpointSink
from elephant.cluster.spark_job import end_attempt
from elephant.driver.asynchronous_fit import partitioned
from elephant.driver.coordinator import Coordinator, FitResult, refusals
from elephant.driver.coordinator_policy import AsynchronousPolicy, Epochs, ProgressDisplay
from elephant.driver.gossip.directory import GossipDirectory
from elephant.driver.launcher import Launcher, SparkTaskLauncher
from elephant.driver.run_ranks import RunAttempt, open_channel, run_ranks
from elephant.errors import SUPERSEDED, TrainingError
from elephant.monitor.events import (
    EpochPart,
    Event,
    Finished,
    PeerReady,
    RankFailure,
    RankGone,
    RankSilent,
    WorkerModel,
)
from elephant.monitor.progress import Progress
from elephant.monitor.record import FitRecord
from elephant.task.specs import ServerAddresses, TaskSpec

if TYPE_CHECKING:
    from elephant.cluster.row_source import RowSource
    from elephant.driver.server_model import ServerModel
    from elephant.rank.job import TrainingJob


class GossipPolicy(AsynchronousPolicy):
    """Workers that go at their own pace and exchange with each other; what is lost is repaired as with servers.

    Args:
        progress: Shown what is repaired.
        directory: Tells workers who their peers are.
        epochs: Takes what workers say of their epochs.
        num_ranks: Workers of the fit.
        end_attempt: See `AsynchronousPolicy`.
    """

    def __init__(
        self,
        progress: ProgressDisplay,
        *,
        directory: GossipDirectory,
        epochs: Epochs,
        num_ranks: int,
        end_attempt: Callable[[int], bool] | None,
    ) -> None:
        super().__init__(progress, servers=directory, epochs=epochs, num_ranks=num_ranks, end_attempt=end_attempt)
        self._directory = directory

    def add(self, event: Event, record: FitRecord) -> None:
        if isinstance(event, PeerReady):
            self._directory.join(event)
            return
        if isinstance(event, WorkerModel):
            self._directory.add_model(event)
            return
        if isinstance(event, EpochPart):
            self._directory.count(event)
        elif isinstance(event, RankGone | RankSilent | Finished) or _is_loss(event):
            self._directory.leave(event.rank)
        super().add(event, record)


def _is_loss(event: Event) -> bool:
    """Returns whether an event is the failure of a worker that no later attempt has taken the place of."""
    return isinstance(event, RankFailure) and event.kind != SUPERSEDED


def train_in_gossip(
    rows: RowSource,
    spec: TaskSpec,
    job: TrainingJob,
    model: ServerModel,
    progress: Progress,
    checkpoint_writer: CheckpointSink | None = None,
) -> FitResult:
    """Trains on workers that average their weights in pairs; afterwards the model has the average of them all.

    Args:
        spec: The workers' part of the training; its job is a pickled `elephant.rank.job.TrainingJob`.
        progress: Shown what happens.
        checkpoint_writer: Writes checkpoints; None makes none.

    Raises:
        CheckpointError: A checkpoint could not be written.
        DataError: Rows that cannot be trained on.
        ClusterError: The cluster cannot run the fit.
        WorkerFailure: A worker failed; it has the worker's own traceback.
        TrainingError: The fit failed otherwise.
    """
    session = rows.session

    def launcher_of(rows: RowSource, servers: ServerAddresses) -> Launcher:
        return SparkTaskLauncher(rows, servers)

    attempt_on = functools.partial(
        gossip_attempt,
        launcher_of,
        spec,
        job,
        model,
        progress,
        checkpoint_writer,
        functools.partial(end_attempt, session),
    )
    result = run_ranks(partitioned(rows, spec), spec, progress, attempt_on)
    progress.note(gossip_line(result.statistics))
    return result


@contextlib.contextmanager
def gossip_attempt(
    launcher_of: Callable[[Any, ServerAddresses], Launcher],
    spec: TaskSpec,
    job: TrainingJob,
    model: ServerModel,
    progress: Progress,
    checkpoint_writer: CheckpointSink | None,
    end_attempt: Callable[[int], bool] | None,
    rows: Any,
) -> Iterator[RunAttempt[FitResult]]:
    """Opens an attempt at a fit in gossip mode, for the ``with`` block.

    Args:
        launcher_of: Returns what starts the workers, of the rows and of what they are to know of the model.
        end_attempt: Ends one attempt at a task; None where nothing can.
        rows: The rows.
    """
    # Here, because it imports Keras, which an executor's Python worker must not.
    from elephant.driver.driver_epochs import DriverEpochs

    num_workers = spec.plan.world_size
    servers = ServerAddresses(servers=(), layout=model.layout.to_json(), num_workers=num_workers)
    with contextlib.ExitStack() as closing:
        launcher = closing.enter_context(contextlib.closing(launcher_of(rows, servers)))
        run, channel = closing.enter_context(open_channel(launcher.addresses, spec))
        directory = GossipDirectory(
            model, channel.tell, num_workers=num_workers, resumes=job.state is not None, positions=model.positions()
        )
        epochs = DriverEpochs(job, model, directory, checkpoint_writer, keep_now=directory.keep_now, show=progress.show)
        closing.enter_context(contextlib.closing(epochs))
        policy = GossipPolicy(
            progress, directory=directory, epochs=epochs, num_ranks=num_workers, end_attempt=end_attempt
        )
        coordinator = Coordinator(channel, progress, policy, checkpoint_writer)
        epochs.begin()

        def result(_: object) -> FitResult:
            history = coordinator.history()
            directory.end()
            _require_contributions(coordinator.record, directory, stopped=epochs.stopped)
            statistics = {
                **coordinator.statistics,
                **directory.statistics,
                "training_s": policy.training_s,
                "wait_s_per_step": epochs.wait_s / epochs.steps if epochs.steps else 0.0,
                "worker_retries": policy.retries,
            }
            epochs.end()
            return FitResult(
                variables=model.variables(),
                rows=model.rows,
                history=history,
                statistics=statistics,
                plan=coordinator.record.plan,
            )

        yield RunAttempt(launcher, run, channel, coordinator, result)


def _require_contributions(record: FitRecord, directory: GossipDirectory, *, stopped: bool) -> None:
    """Raises TrainingError when the average lacks a worker that had rows, and the fit was not stopped before."""
    expected = sum(started.training_rows > 0 for started in record.started.values())
    if not stopped and directory.contributors < expected:
        raise TrainingError(
            f"mode='gossip': expected the weights of {expected} workers in the average. Received: those of "
            f"{directory.contributors}. Fit again."
        )


def gossip_line(statistics: Mapping[str, Any]) -> str:
    """Returns a line about a fit's exchanges.

    >>> gossip_line({"exchanges": 300, "missed": 4, "training_s": 2.0, "bytes_sent": 8e6, "wait_s_per_step": 0.004,
    ...              "refused": 0, "refused_connections": {}})
    '300 exchanges, 150.0/s, 4 MB/s, 4.0 ms of waiting per step, 4 missed, 0 moves refused'
    """
    seconds = max(float(statistics["training_s"]), 1e-9)
    strangers = statistics["refused_connections"]
    return (
        f"{statistics['exchanges']:,} exchanges, {statistics['exchanges'] / seconds:.1f}/s, "
        f"{statistics['bytes_sent'] / seconds / 1e6:.3g} MB/s, {1e3 * statistics['wait_s_per_step']:.1f} ms of waiting "
        f"per step, {statistics['missed']:,} missed, {statistics['refused']:,} moves refused"
        f"{'; ' + refusals(strangers) if strangers else ''}"
    )
