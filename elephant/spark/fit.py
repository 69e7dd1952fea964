"""A fit from the driver: launched, started again after a loss, and its result."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elephant.checkpoint.manager import CheckpointManager, CheckpointSink, CheckpointWriter
from elephant.checkpoint.memory import StatesInMemory
from elephant.checkpoint.state import joined, place_in_words, require_same_fit
from elephant.checkpoint.table_states import TableFiles, remove_files, tables_of
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.checks.preflight import LOOKS, Requirements, preflight_checked
from elephant.cluster.checks.session_checks import encrypts
from elephant.cluster.executors import allocates_dynamically, is_decommissioned, patient
from elephant.cluster.gpu_plan import ResourcePlan
from elephant.cluster.piece_rows import in_virtual_shards
from elephant.cluster.row_source import RowSource
from elephant.cluster.session import is_local, is_remote, ports_of, session_settings, setting
from elephant.cluster.spark_job import counted
from elephant.cluster.warm_workers import warm_workers
from elephant.config import FitConfig
from elephant.data.schema import DataSchema, RowSpec
from elephant.data.to_numpy import to_values
from elephant.data.virtual_shards import number_of_pieces
from elephant.driver.asynchronous_fit import train_workers
from elephant.driver.coordinator import Coordinator, FitResult
from elephant.driver.coordinator_location import attempts_at_ranks, coordinates_on_executors
from elephant.driver.driver_turns import SynchronousEpochs
from elephant.driver.elastic.fit import ElasticFit, SlotsFreedError
from elephant.driver.gossip.fit import train_in_gossip
from elephant.driver.recovery.restarts import Recovery, options_of_fit
from elephant.driver.run_ranks import RETRIES, run_ranks, the_coordinator
from elephant.driver.server_model import ServerModel
from elephant.driver.server_processes import require_ports
from elephant.errors import (
    CheckpointError,
    ClusterError,
    ConfigurationError,
    TrainingError,
    UnsupportedError,
    help_url,
    warn_user,
)
from elephant.monitor.events import ShardsMoved
from elephant.monitor.progress import Progress
from elephant.rank.asynchronous.async_callbacks import worker_copies
from elephant.rank.callbacks.callback_rules import packages_of
from elephant.rank.callbacks.remote_files import require_absolute_paths
from elephant.rank.callbacks.shared_state import SharedState
from elephant.rank.input.preprocessing import model_rows
from elephant.rank.job import TrainingJob
from elephant.spark.hadoop_files import checkpoint_folder
from elephant.task.model_batches import pickled
from elephant.task.rendezvous import installed_versions, no_rows
from elephant.task.specs import TaskSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CODE = "The model's code or a callback"


def open_checkpoints(session: SparkSession, config: FitConfig) -> CheckpointManager | None:
    """Opens the folder of a fit's checkpoints; returns None where it makes none.

    Raises:
        ConfigurationError: The folder has checkpoints of another fit, or the fit is not to go on from them.
        CheckpointError: The checkpoints cannot be read, or none can be written.
    """
    if config.checkpoint_path is None:
        return None
    folder = checkpoint_folder(session, config.checkpoint_path)
    checkpoints = CheckpointManager(folder, keep_best=config.keep_best)
    manifests = checkpoints.manifests()
    if manifests and not config.resume:
        raise ConfigurationError(
            f"checkpointPath: expected a folder without checkpoints. Received: {config.checkpoint_path}, which has one "
            f"of {place_in_words(*manifests[-1].place)}. Pass resume=True to go on from there, or give the fit another "
            "folder, or remove this one.",
            topic="checkpoints",
        )
    if manifests:
        require_same_fit(options_of_fit(manifests[-1].facts, config.checkpoint_path), config, config.checkpoint_path)
    if not any(manifest.is_done(config.epochs) for manifest in manifests):
        # Found out after the first epoch otherwise, which would be lost.
        checkpoints.require_writable()
    return checkpoints


def remove_checkpoints(session: SparkSession, config: FitConfig) -> None:
    """Removes the checkpoints of a fit that has ended."""
    if config.checkpoint_path is not None:
        manager = CheckpointManager(checkpoint_folder(session, config.checkpoint_path))
        # What is not removed is in nobody's way.
        with contextlib.suppress(Exception):
            for of_tables in filter(None, (tables_of(manifest.facts) for manifest in manager.manifests())):
                remove_files([of_tables[0]], of_tables[1])
        manager.remove()


def description_of(config: FitConfig, params: Mapping[str, Any] | None = None) -> str:
    """Returns the name of a fit's jobs on Spark's pages.

    Args:
        params: Params that are this fit's own, by name; those of a grid, say.

    >>> description_of(FitConfig(num_workers=4, epochs=9), {"epochs": 9, "seed": 7, "callbacks": []})
    'elephant fit: 4 workers, 9 epochs, synchronous, seed=7, callbacks'
    """
    workers = counted(config.num_workers, "worker")
    workers = workers if config.elastic is None else f"{config.elastic[0]} to {config.elastic[1]} workers"
    parts = [workers, counted(config.epochs, "epoch"), config.mode]
    for name, value in (params or {}).items():
        if name not in ("numWorkers", "epochs", "mode"):
            # What is no number or word may be of any length.
            parts.append(f"{name}={value}" if isinstance(value, int | float | str) else name)
    return f"elephant fit: {', '.join(parts)}"


def train(rows: RowSource, job: TrainingJob, progress: Progress) -> FitResult:
    """Trains in the mode that the job asks for; from its last checkpoint on, and again after a failure, where asked to.

    Args:
        progress: Shown what happens.

    Raises:
        ConfigurationError: Checkpoints are in the way, or of another fit.
        TrainingError: The fit failed.
    """
    if job.config.gossips and coordinates_on_executors(rows.session):
        raise UnsupportedError(
            "mode='gossip': expected executors that reach the driver, which tells workers who their peers are. "
            "Received: a session in which rank 0 coordinates the fit. Use mode='synchronous' or 'asynchronous'."
        )
    if (job.config.checkpoint_seconds or job.config.keep_best) and coordinates_on_executors(rows.session):
        raise UnsupportedError(
            "checkpointSeconds, keepBest: expected executors that reach the driver, which writes the checkpoints. "
            "Received: a session in which rank 0 coordinates the fit: there is one checkpoint then, of the end. "
            "Leave both out."
        )
    job = replace(job, folder_of=functools.partial(checkpoint_folder, rows.session))
    elastic = ElasticFit.of(rows.session, job, progress)
    if elastic is not None:
        rows = in_virtual_shards(rows, number_of_pieces(elastic.policy.most))
        job = replace(job, schema=job.schema.in_pieces())
    on_executors = coordinates_on_executors(rows.session)
    in_tasks = job.config.forms_generations and not on_executors
    policy = None if elastic is None else elastic.policy
    recovery = Recovery(
        open_checkpoints(rows.session, job.config),
        job.config,
        progress,
        policy,
        in_tasks=in_tasks,
        is_decommissioned=functools.partial(is_decommissioned, rows.session),
    )
    # Workers that go at their own pace Spark runs again, and their servers know where they are.
    mode: Callable[..., FitResult] = train_asynchronously
    if job.config.is_synchronous:
        mode = functools.partial(train_synchronously, recovery=recovery)
    if on_executors:
        # What rank 0 keeps there comes with the end of its job, or is lost with it.
        job = replace(job, config=job.config.changed(max_restarts=0))
    table_files = TableFiles(recovery.checkpoint_facts)
    with contextlib.closing(table_files):
        if job.model.info.sharded:
            table_files.begin()
        while True:
            checkpoint = recovery.latest()
            if checkpoint is not None and checkpoint.finished:
                return recovery.result_of(checkpoint)
            sized = job if elastic is None else elastic.sized(job)
            try:
                with recovery.writer() as checkpoint_writer, _watched(elastic, checkpoint_writer, job.config) as states:
                    if states is not None and checkpoint_writer is not None and job.model.info.sharded:
                        states = table_files.watched(states, checkpoint_writer)
                    result = mode(rows, replace(sized, state=recovery.state), progress, states)
                    table_files.keep_result(result.variables)
                    if checkpoint_writer is not None:
                        _finish(checkpoint_writer, result)
            except SlotsFreedError:
                continue
            except ClusterError:
                # The pre-flight counts slots too, and some may have gone since they were counted for this attempt.
                if elastic is not None and elastic.has_lost_slots():
                    elastic.sizes.pop()
                    continue
                raise
            except TrainingError as error:
                if recovery.goes_on_after(error):
                    continue
                raise
            history = result.history if recovery.state is None else joined(recovery.state.history, result.history)
            sizes = {} if elastic is None else {"workers": elastic.sizes, **_moves(progress.record.moves)}
            statistics = {**recovery.counted(result.statistics), **sizes, **progress.straggler_watch.statistics}
            return replace(result, history=history, statistics=statistics)


def _moves(moves: Sequence[ShardsMoved]) -> dict[str, Any]:
    """Returns ``moves`` of `elephant.KerasModel.training_statistics`; nothing where no rows have moved."""
    names = ("epoch", "moves", "rows", "seconds")
    entries = [{name: getattr(moved, name) for name in names} for moved in moves]
    return {"moves": entries} if entries else {}


def _watched(
    elastic: ElasticFit | None, states: CheckpointWriter | StatesInMemory | None, config: FitConfig
) -> contextlib.AbstractContextManager[CheckpointSink | None]:
    """Returns a receiver of an attempt's states; of an elastic fit one that looks for free slots at ends of epochs."""
    if elastic is None or states is None:
        return contextlib.nullcontext(states)
    return elastic.watched(states, config.epochs)


def _finish(checkpoint_writer: CheckpointWriter | StatesInMemory, result: FitResult) -> None:
    try:
        # A fit that was lost between its last epoch and its end has none left to train.
        checkpoint_writer.finish(result.variables, trained=any(result.history.values()))
    except CheckpointError as error:
        # The model is here, and worth more than its checkpoint.
        warn_user(f"The fit has ended well, and its last checkpoint is missing: {error}")


def train_synchronously(
    rows: RowSource,
    job: TrainingJob,
    progress: Progress,
    checkpoint_writer: CheckpointSink | None = None,
    recovery: Recovery | None = None,
) -> FitResult:
    """Trains on ranks that take every step together.

    Args:
        progress: Shown what happens.
        checkpoint_writer: Writes checkpoints; None makes none.
        recovery: Says from where ranks begin again after a loss; None ends the fit with it.
    """
    job = _with_settings(job, rows)
    epochs = SynchronousEpochs(job, replayed=coordinates_on_executors(rows.session))
    _require_here(packages_of(epochs.callbacks))
    job = epochs.job_of_ranks()
    if not is_local(setting(rows.session, "spark.master") or ""):
        require_absolute_paths(job.callbacks)
    config, requirements = job.config, _needs(rows, job, packages_of(job.callbacks))
    if config.elastic is not None and allocates_dynamically(rows.session):
        # Spark has no barrier stage there.
        requirements = requirements.as_tasks()
    pickled_job = pickled(job, _CODE)
    if job.callbacks or epochs.callbacks:
        progress.note(epochs.places())
    if config.scale_learning_rate:
        noun = "workers" if config.pipeline_stages is None else "copies of the model"
        progress.note(f"the learning rate is multiplied by {config.batches_per_step}, the number of {noun}")
    if config.pipeline_stages is not None:
        last = "rank 0 is" if config.num_replicas == 1 else f"ranks 0 to {config.num_replicas - 1} are"
        progress.note(
            f"the model is in {config.num_stages} stages, with {counted(config.num_replicas, 'rank')} each; {last} the "
            "last one, where rows are counted"
        )
    progress.awaits(LOOKS)
    with preflight_checked(rows.session, requirements, progress.note) as plan, contextlib.closing(epochs):
        spec = _task_spec("fit", rows, job, pickled_job, plan, progress)
        begins_again = config.forms_generations
        attempt_on = attempts_at_ranks(
            rows.session,
            spec,
            progress,
            result=the_coordinator,
            checkpoint_writer=checkpoint_writer,
            turns=epochs,
            recovering=recovery if begins_again else None,
        )
        retries = () if begins_again else RETRIES
        coordinator = run_ranks(rows.in_partitions(plan.slots_needed), spec, progress, attempt_on, retries)
        return _ended(epochs, coordinator)


def _ended(epochs: SynchronousEpochs, coordinator: Coordinator) -> FitResult:
    """Returns the result of a synchronous fit, after the end of training for its callbacks on the driver."""
    if not coordinator.began:
        # Where Spark knows that a DataFrame has no rows, it may make no task at all of it.
        raise no_rows()
    result = coordinator.result()
    return replace(result, variables=epochs.end(result.variables, result.rows, coordinator.record.epochs))


def train_asynchronously(
    rows: RowSource,
    job: TrainingJob,
    progress: Progress,
    checkpoint_writer: CheckpointSink | None = None,
) -> FitResult:
    """Trains on workers that go at their own pace, against parameter servers or in pairs.

    Args:
        progress: Shown what happens.
        checkpoint_writer: Writes checkpoints; None makes none.
    """
    job = _with_settings(job, rows)
    on_executors = coordinates_on_executors(rows.session)
    copies = worker_copies(job.callbacks, SharedState(job.callbacks, job.model, job.preprocessing.given))
    job = replace(job, callbacks=(*job.callbacks, *job.driver_callbacks), driver_callbacks=())
    # Callbacks have their epochs on the driver, or on the rank that hosts for it.
    packages = packages_of(job.callbacks)
    if not on_executors:
        _require_here(packages)
    requirements = _needs(rows, job, packages if on_executors else ())
    config, options = job.config, job.config.asynchronous
    # Workers get the weights from the servers, and need to know of a state only that there is one.
    state = None if job.state is None else job.state.without_arrays()
    pickled_job = pickled(replace(job, callbacks=copies, driver_callbacks=(), state=state), _CODE)
    warning = None if config.gossips else config.new_algorithm().advice(config.frequency)
    if warning is not None:
        warn_user(warning)
    if options.server_placement != "executors" and not on_executors and not config.gossips:
        # Known at once, and so said before anything else is begun.
        require_ports(driver_addresses(rows.session)[1], options.port, options.parameter_servers)
    if on_executors:
        # Its workers meet at the one that hosts, and so run at the same time.
        requirements = replace(requirements, synchronous=True, servers=0)
    progress.awaits(LOOKS)
    with preflight_checked(rows.session, requirements, progress.note) as plan:
        spec = _row_spec(rows, job.schema) if job.preprocessing.target_schema is None else _row_spec_of_model(rows, job)
        model = ServerModel(job, spec)
        program, train_all = ("gossip", train_in_gossip) if config.gossips else ("asynchronous", train_workers)
        task_spec = _task_spec(program, rows, job, pickled_job, plan, progress)
        result = train_all(rows, task_spec, job, model, progress, checkpoint_writer)
    counts = result.statistics
    refused, applied = counts["refused"], counts["exchanges" if config.gossips else "updates"]
    if refused:
        warn_user(
            f"expected updates of finite numbers. Received: {refused:,} with NaN or infinities, which were left out; "
            f"{applied:,} were {'exchanged' if config.gossips else 'applied'}. Lower the learning rate, clip "
            f"gradients, or look for rows with NaN. See {help_url('nan')}"
        )
    return result


def _with_settings(job: TrainingJob, rows: RowSource) -> TrainingJob:
    """Returns a job that has encryption, ports and waits, also where these were left to the session."""
    config, settings = job.config, session_settings(rows.session)
    changes: dict[str, Any] = {"encryption": encrypts(config.encryption, settings)}
    changes["ports"] = ports_of(config.ports, settings)
    if config.elastic is None:
        # Others go on with the workers that are left.
        changes["timeouts"] = patient(rows.session, config.timeouts, config.num_workers)
    return replace(job, config=config.changed(**changes))


def _needs(rows: RowSource, job: TrainingJob, packages: Sequence[str]) -> Requirements:
    backend, rows_bytes = job.model.settings.backend, rows.estimated_bytes()
    return Requirements.of_fit(job.config, backend=backend, rows_bytes=rows_bytes, packages=packages)


def _task_spec(
    program: str, rows: RowSource, job: TrainingJob, pickled_job: bytes, plan: ResourcePlan, progress: Progress
) -> TaskSpec:
    return TaskSpec(
        program=program,
        driver_versions=installed_versions(),
        job=pickled_job,
        backend=job.model.settings.backend,
        schema=job.schema,
        timeouts=job.config.timeouts,
        shows_output=progress.shows_output,
        plan=plan,
        warm=warm_workers(rows.session, job.config.timeouts),
        # With a local master, ranks stand where the driver does.
        brings_files=is_remote(rows.session) or not is_local(setting(rows.session, "spark.master") or ""),
        encryption=bool(job.config.encryption),
        ports=job.config.ports,
    )


def _require_here(packages: Sequence[str]) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(
                f"callbacks: expected {name} to be installed on the driver, where the epochs of callbacks end. "
                f"Received: none. Run pip install {name}, or leave the callback out.",
                topic="callbacks",
            )


def _row_spec(rows: RowSource, schema: DataSchema) -> RowSpec:
    """Returns the spec of one row, by the first one where the model does not tell it."""
    first = rows.first_row()
    if first is None:
        raise no_rows()
    unknown = [field for field in schema.batch_fields if field.width is None]
    return schema.row_spec({field.role: to_values(first.column(field.role), field)[1] or () for field in unknown})


def _row_spec_of_model(rows: RowSource, job: TrainingJob) -> RowSpec:
    if rows.first_row() is None:
        raise no_rows()
    return model_rows(job.model_schema)
