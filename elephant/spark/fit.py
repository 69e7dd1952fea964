"""A fit from the driver: launched, restarted after a loss, and its result.

Spark does not run a failed barrier job again, so the driver does, with a new run id: from the last
checkpoint, or from the beginning where there is none. What failed of the user's code or data fails again, and is
not tried twice.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.checkpoint.manager import Checkpoint, CheckpointManager, CheckpointSink, CheckpointWriter
from elephant.checkpoint.memory import StatesInMemory
from elephant.checkpoint.state import (
    CheckpointManifest,
    FitState,
    changes_of,
    joined,
    place_in_words,
    require_same_fit,
)
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.checks.preflight import Requirements, preflight_checked
from elephant.cluster.gpu_plan import ResourcePlan
from elephant.cluster.row_source import RowSource
from elephant.cluster.session import is_local, is_remote, setting
from elephant.cluster.spark_job import counted, described
from elephant.cluster.warm_workers import warm_workers
from elephant.config import FitConfig
from elephant.data.json_types import require_parts, require_type
from elephant.data.schema import SCALAR, DataSchema, RowSpec
from elephant.data.to_numpy import to_values
from elephant.driver.asynchronous_fit import train_workers
from elephant.driver.coordinator import Coordinator, FitResult
from elephant.driver.coordinator_location import barrier_attempts, coordinates_on_executors
from elephant.driver.driver_turns import SynchronousEpochs
from elephant.driver.gossip.fit import train_in_gossip
from elephant.driver.run_ranks import RETRIES, run_ranks, the_coordinator
from elephant.driver.server_model import ServerModel
from elephant.driver.server_processes import require_ports
from elephant.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    PreemptedError,
    RowsMovedError,
    TrainingError,
    UnsupportedError,
    first_line,
    warn_user,
)
from elephant.modeling.model_spec import ModelSpec
from elephant.monitor.progress import Progress
from elephant.rank.asynchronous.async_callbacks import worker_copies
from elephant.rank.callbacks.callback_rules import packages_of
from elephant.rank.callbacks.remote_files import require_absolute_paths
from elephant.rank.callbacks.shared_state import SharedState
from elephant.rank.input.preprocessing import model_rows
from elephant.rank.job import TrainingJob
from elephant.spark.hadoop_files import checkpoint_folder
from elephant.storage.folder import DAMAGES
from elephant.task.model_batches import pickled
from elephant.task.rendezvous import installed_versions, no_rows
from elephant.task.specs import TaskSpec, result_row

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

# The most class numbers; Keras gets a weight for each.
_MOST_CLASSES = 1_000_000
_CODE = "The model's code or a callback"


def class_weights(
    given: Mapping[int, float] | str | None,
    spec: ModelSpec,
    schema: DataSchema,
    rows_of: Callable[[DataSchema], RowSource] | None,
) -> dict[int, float] | None:
    """Returns a ``class_weight`` for Keras' fit: a weight for every class of the model's output.

    Keras itself gives classes without one the weight 1 when it has arrays, and fails on them in the
    middle of an epoch when it has a dataset.

    Args:
        given: Weights by class, as the user gave them, `BALANCED`, or None.
        spec: The model.
        schema: What it trains on.
        rows_of: Returns the rows with some of their columns; None where a function makes the labels.

    Raises:
        ConfigurationError: The fit has sample weights too, or labels that are no classes: Keras refuses these as well.
        DataError: A label is null, or no number.
    """
    if given is None:
        return None
    if schema.weights:
        raise ConfigurationError(
            "classWeight: expected a fit without weightCol: Keras takes one of the two. Received: both. "
            "Multiply the column by the weight of the row's class."
        )
    if len(schema.labels) != 1 or len(spec.info.outputs) != 1:
        raise ConfigurationError(
            f"classWeight: expected a model with one output and a label column. Received: {len(spec.info.outputs)} "
            f"outputs and {len(schema.labels)} label columns. Give weightCol={{output: column}} instead."
        )
    label, shape = schema.labels[0], spec.info.outputs[0].shape
    if label.kind != SCALAR and (label.shape is None or len(label.shape) != 1):
        raise ConfigurationError(
            f"classWeight: expected labels that are class numbers or one-hot. Received: {label.title} with arrays of "
            f"shape {label.shape}. Give weightCol instead."
        )
    if isinstance(given, str):
        if rows_of is None:
            raise ConfigurationError(
                f"classWeight: expected weights by class, because preprocessing makes the labels. Received: {given!r}."
            )
        given = _balanced(rows_of, schema)
    classes = max([*given, 1, *((shape[-1] - 1,) if shape and shape[-1] else ())]) + 1
    return {number: float(given.get(number, 1.0)) for number in range(classes)}


def _balanced(rows_of: Callable[[DataSchema], RowSource], schema: DataSchema) -> dict[int, float]:
    """Returns weights with which all classes that there are count alike, and 1 on average over the rows."""
    labelled = DataSchema(inputs=(), labels=schema.labels, validation=schema.validation)
    counts: Counter[int] = Counter()
    rows = rows_of(labelled)
    with described(rows.session, "rows per class"):
        results = rows.run(functools.partial(_count_labels, labelled), barrier=False)
    for result in results:
        counts.update({int(label): count for label, count in json.loads(bytes(result["result"])).items()})
    if counts and max(counts) >= _MOST_CLASSES:
        raise ConfigurationError(
            f"classWeight: expected class numbers below {_MOST_CLASSES:,} in {schema.labels[0].title}. "
            f"Received: {max(counts):,}."
        )
    return {label: counts.total() / (len(counts) * count) for label, count in counts.items()}


def _count_labels(schema: DataSchema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields how many rows of one partition, without those for validation, have each label; `RowSource.run` runs it."""
    counts, shape, first_row = Counter[str](), None, 0
    label = schema.labels[0]
    for batch in (batch for batch in batches if batch.num_rows):
        values, shape = to_values(batch.column(label.role), label, first_row=first_row, row_shape=shape)
        labels = np.asarray(values).reshape(batch.num_rows, -1)
        labels = labels[:, 0] if labels.shape[1] == 1 else labels.argmax(axis=1)
        if np.any(labels % 1):
            raise DataError(
                f"classWeight: expected class numbers in {label.title}. Received: {labels[labels % 1 != 0][0]}."
            )
        if schema.validation is not None:
            marked = batch.column(schema.validation.role).to_numpy(zero_copy_only=False)
            labels = labels[~marked.astype(bool)]
        first_row += batch.num_rows
        for value, count in zip(*np.unique(labels, return_counts=True), strict=True):
            counts[str(int(value))] += int(count)
    yield result_row(0, json.dumps(counts).encode())


def open_checkpoints(session: SparkSession, config: FitConfig) -> CheckpointManager | None:
    """Opens the folder of a fit's checkpoints; returns None where it makes none.

    Raises:
        ConfigurationError: The folder has checkpoints of another fit, or the fit is not to go on from them.
        CheckpointError: The checkpoints cannot be read.
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
            "folder, or remove this one."
        )
    if manifests:
        require_same_fit(options_of_fit(manifests[-1].facts, config.checkpoint_path), config, config.checkpoint_path)
    return checkpoints


def remove_checkpoints(session: SparkSession, config: FitConfig) -> None:
    """Removes the checkpoints of a fit that has ended."""
    if config.checkpoint_path is not None:
        CheckpointManager(checkpoint_folder(session, config.checkpoint_path)).remove()


# What a checkpoint tells of its fit besides arrays; some of it in one mode alone.
_FACTS = {
    "rows": dict[str, Any],
    "num_workers": int,
    "stopped": bool,
    "optimizer_names": list[str],
    "callbacks": list[Any],
    "begun": bool,
    "variables": list[str],
    "optimizers": list[list[Any]],
    "ledgers": list[dict[str, list[Any]]],
    "parts": list[Any],
}


def options_of_fit(info: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    """Returns the options of the fit that has left a checkpoint.

    Raises:
        CheckpointError: It is a checkpoint of something else.
    """
    options = info.get("fit")
    if not isinstance(options, Mapping):
        raise CheckpointError(
            f"checkpointPath={url}: expected a checkpoint with the options of its fit. Received: {options!r}. "
            "Restore the folder, or remove it to begin from the first epoch."
        )
    try:
        require_parts(info, _FACTS)
        require_type(options.get("num_workers"), int, "num_workers")
        RowSpec.from_json(info["rows"])
        missing = [name for name in ("stopped", "optimizer_names", "callbacks") if name not in info]
        if missing:
            raise TypeError(f"expected {', '.join(missing)}")
    except DAMAGES as error:
        raise CheckpointError(
            f"checkpointPath={url}: expected a checkpoint of a fit. Received: one that tells other things of it: "
            f"{type(error).__name__}: {error} Restore the folder, or remove it to begin from the first epoch."
        ) from error
    return options


def _other_batches(manifest: CheckpointManifest | FitState, config: FitConfig) -> str:
    """Returns why a fit has other batches than that of a checkpoint; nothing where it has the same."""
    kept = manifest.facts.get("fit")
    kept = kept if isinstance(kept, Mapping) else {}
    workers, batch_size = config.num_ranks, config.rank_batch_size
    workers_before, size_before = kept.get("num_workers", workers), kept.get("batch_size", batch_size)
    changes = [f"{counted(workers_before, 'worker')} before, {workers} now"] if workers_before != workers else []
    changes += [f"batches of {size_before} rows before, of {batch_size} now"] if size_before != batch_size else []
    cache_before = kept.get("cache", config.cache)
    changes += [f"cache={cache_before!r} before, {config.cache!r} now"] if cache_before != config.cache else []
    if config.pipeline_stages is not None or config.distribution is not None:
        changes += ["a model that is divided begins with an epoch"]
    return "; ".join(changes)


class Recovery:
    """The checkpoints and restarts of one fit.

    Raises:
        ConfigurationError: There are checkpoints, and the fit is not to go on from them; or they are of another fit.
        CheckpointError: The checkpoints cannot be read.
    """

    def __init__(self, session: SparkSession, config: FitConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._checkpoints: CheckpointManager | StatesInMemory | None = open_checkpoints(session, config)
        if self._checkpoints is None and config.keeps_states:
            self._checkpoints = StatesInMemory()
        self._restarts = 0
        # Whether ranks have other rows than those of checkpoints within an epoch.
        self._rows_moved = False

    def latest(self) -> Checkpoint | None:
        """Returns the checkpoint to go on from."""
        if self._checkpoints is None:
            return None
        skipped_manifests: list[CheckpointManifest | FitState] = []

        def suits(manifest: CheckpointManifest | FitState) -> bool:
            if self._suits(manifest):
                return True
            skipped_manifests.append(manifest)
            return False

        checkpoint = self._checkpoints.latest(self._progress.note, epochs=self._config.epochs, suits=suits)
        self._note_left_out(skipped_manifests, checkpoint)
        if checkpoint is None:
            return None
        state = checkpoint.state
        kept = options_of_fit(state.facts, self._checkpoints.url)
        require_same_fit(kept, self._config, self._checkpoints.url)
        if not checkpoint.finished and state.epochs >= self._config.epochs:
            self._progress.note(
                f"all epochs are done ({state.epochs} of {self._config.epochs}): only the end of the fit is left, from "
                f"the checkpoint in {self._checkpoints.url}"
            )
        elif not checkpoint.finished:
            within = f" and {counted(state.step, 'step')} of the next one" if state.step else ""
            self._progress.note(
                f"going on after epoch {state.epochs} of {self._config.epochs}{within}, from the checkpoint in "
                f"{self._checkpoints.url}"
            )
            for change in changes_of(kept, self._config):
                self._progress.note(change)
        return checkpoint

    def _suits(self, manifest: CheckpointManifest | FitState) -> bool:
        """Returns whether the fit can go on from a checkpoint: within an epoch, as long as batches are the same."""
        is_next = manifest.epochs < self._config.epochs and not self._rows_moved
        return not manifest.step or (is_next and not _other_batches(manifest, self._config))

    def _note_left_out(
        self, skipped_manifests: Sequence[CheckpointManifest | FitState], taken: Checkpoint | None
    ) -> None:
        """Says what is lost of the newest checkpoint where that is one within an epoch which does not suit."""
        newest = max(skipped_manifests, key=lambda manifest: (manifest.epochs, manifest.step), default=None)
        done = 0 if taken is None else taken.state.epochs
        if newest is None or not done <= newest.epochs < self._config.epochs or (taken and taken.state.step):
            return
        why = _other_batches(newest, self._config)
        why = why or "the workers have other rows, or the model other metrics, than before"
        begin = "beginning anew, without a checkpoint of the end of an epoch"
        lost = f"{counted(newest.epochs - done, 'epoch')} and " * (newest.epochs > done)
        lost += counted(newest.step, "step")
        if taken is not None:
            begin = f"going on from the end of epoch {done}"
            lost += " of the next one" * (newest.epochs == done)
        self._progress.note(f"{why}: {begin}, {lost} {'is' if lost.startswith('1 step') else 'are'} trained again")

    def result_of(self, checkpoint: Checkpoint) -> FitResult:
        """Returns the result of a fit that has left its last checkpoint."""
        state = checkpoint.state
        why = "a callback had stopped it" if state.facts["stopped"] else f"{self._config.epochs} were asked for"
        self._progress.note(f"nothing is left to train: {state.epochs} epochs are done, and {why}")
        return FitResult(
            variables=list(checkpoint.result),
            rows=RowSpec.from_json(state.facts["rows"]),
            history=joined(state.history, {}),
            statistics={"refused_connections": {}, **self.counted({})},
        )

    def writer(self) -> contextlib.AbstractContextManager[CheckpointWriter | StatesInMemory | None]:
        """Returns a receiver of the fit's states, for a ``with`` block; it is None where none are wanted."""
        if isinstance(self._checkpoints, CheckpointManager):
            return CheckpointWriter(self._checkpoints)
        return contextlib.nullcontext() if self._checkpoints is None else self._checkpoints

    def counted(self, statistics: Mapping[str, object]) -> dict[str, object]:
        """Returns the statistics of a fit with the number of restarts, where there may be any."""
        return {**statistics, **({"restarts": self._restarts} if self._config.max_restarts else {})}

    def _has_come_further(self, state: FitState | None) -> bool:
        """Returns whether there is a newer state than that which an attempt had gone on from."""
        newest = None if self._checkpoints is None else self._checkpoints.latest(lambda note: None)
        before = (0, 0) if state is None else (state.epochs, state.step)
        return newest is not None and (newest.state.epochs, newest.state.step) > before

    def goes_on_after(self, error: TrainingError, state: FitState | None) -> bool:
        """Returns whether the fit starts again after an error; counts it, unless it only went on from no good place.

        Args:
            state: What it had gone on from; None where it had begun.
        """
        if isinstance(error, RowsMovedError) and state is not None and state.step:
            self._rows_moved = True
            return True
        # Those within an epoch that are written from here on are of the rows that workers have now.
        self._rows_moved = False
        if isinstance(error, PreemptedError) and self._config.max_restarts and self._has_come_further(state):
            self._progress.note(f"the fit goes on without the worker that has left: {first_line(error)}")
            return True
        if not error.retryable or self._restarts >= self._config.max_restarts:
            return False
        self._restarts += 1
        again = f"{self._restarts} of {self._config.max_restarts}"
        self._progress.note(f"the fit failed and starts again ({again}): {first_line(error)}")
        return True


def description_of(config: FitConfig, params: Mapping[str, Any] | None = None) -> str:
    """Returns the name of a fit's jobs on Spark's pages.

    Args:
        params: Params that are this fit's own, by name; those of a grid, say.

    >>> description_of(FitConfig(num_workers=4, epochs=9), {"epochs": 9, "seed": 7, "callbacks": []})
    'elephant fit: 4 workers, 9 epochs, synchronous, seed=7, callbacks'
    """
    parts = [counted(config.num_workers, "worker"), counted(config.epochs, "epoch"), config.mode]
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
    mode = train_synchronously if job.config.is_synchronous else train_asynchronously
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
    recovery = Recovery(rows.session, job.config, progress)
    if job.config.checkpoint_path is None and coordinates_on_executors(rows.session):
        # What rank 0 keeps there comes with the end of its job, or is lost with it.
        job = replace(job, config=job.config.changed(max_restarts=0))
    while True:
        checkpoint = recovery.latest()
        if checkpoint is not None and checkpoint.finished:
            return recovery.result_of(checkpoint)
        state = None if checkpoint is None else checkpoint.state
        try:
            with recovery.writer() as checkpoint_writer:
                result = mode(rows, replace(job, state=state), progress, checkpoint_writer)
                if checkpoint_writer is not None:
                    _finish(checkpoint_writer, result)
        except TrainingError as error:
            if recovery.goes_on_after(error, state):
                continue
            raise
        history = result.history if state is None else joined(state.history, result.history)
        statistics = {**recovery.counted(result.statistics), **progress.straggler_watch.statistics}
        return replace(result, history=history, statistics=statistics)


def _finish(checkpoint_writer: CheckpointWriter | StatesInMemory, result: FitResult) -> None:
    try:
        # A fit that was lost between its last epoch and its end has none left to train.
        checkpoint_writer.finish(result.variables, trained=any(result.history.values()))
    except CheckpointError as error:
        # The model is here, and worth more than its checkpoint.
        warn_user(f"The fit has ended well, and its last checkpoint is missing: {error}")


def train_synchronously(
    rows: RowSource, job: TrainingJob, progress: Progress, checkpoint_writer: CheckpointSink | None = None
) -> FitResult:
    """Trains on ranks that take every step together.

    Args:
        progress: Shown what happens.
        checkpoint_writer: Writes checkpoints; None makes none.
    """
    epochs = SynchronousEpochs(job, replayed=coordinates_on_executors(rows.session))
    _require_here(packages_of(epochs.callbacks))
    job = epochs.job_of_ranks()
    if not is_local(setting(rows.session, "spark.master") or ""):
        require_absolute_paths(job.callbacks)
    config, requirements = job.config, _needs(rows, job, packages_of(job.callbacks))
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
    with preflight_checked(rows.session, requirements, progress.note) as plan, contextlib.closing(epochs):
        spec = _task_spec("fit", rows, job, pickled_job, plan, progress)
        attempt_on = barrier_attempts(
            rows.session, spec, progress, result=the_coordinator, checkpoint_writer=checkpoint_writer, turns=epochs
        )
        coordinator = run_ranks(rows.in_partitions(plan.slots_needed), spec, progress, attempt_on, RETRIES)
        return _ended(epochs, coordinator)


def _ended(epochs: SynchronousEpochs, coordinator: Coordinator) -> FitResult:
    """Returns the result of a synchronous fit, after the end of training for its callbacks on the driver."""
    if not coordinator.began:
        # Where Spark knows that a DataFrame has no rows, it may make no task at all of it.
        raise no_rows()
    result = coordinator.result()
    return replace(result, variables=epochs.end(result.variables, result.rows, coordinator.record.epochs))


def train_asynchronously(
    rows: RowSource, job: TrainingJob, progress: Progress, checkpoint_writer: CheckpointSink | None = None
) -> FitResult:
    """Trains on workers that go at their own pace, against parameter servers or in pairs.

    Args:
        progress: Shown what happens.
        checkpoint_writer: Writes checkpoints; None makes none.
    """
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
            "gradients, or look for rows with NaN."
        )
    return result


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
        warm=warm_workers(rows.session, job.config),
        # With a local master, ranks stand where the driver does.
        brings_files=is_remote(rows.session) or not is_local(setting(rows.session, "spark.master") or ""),
    )


def _require_here(packages: Sequence[str]) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(
                f"callbacks: expected {name} to be installed on the driver, where the epochs of callbacks end. "
                f"Received: none. Run pip install {name}, or leave the callback out."
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
