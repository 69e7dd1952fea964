"""A fit in either kind of mode: from the prepared columns and the job to the fitted model."""

from __future__ import annotations

import warnings
from dataclasses import replace

from pyspark import cloudpickle
from pyspark.sql import DataFrame

from elephant.cluster.asynchronous import launch_workers
from elephant.cluster.launch import driver_addresses, launch
from elephant.cluster.rendezvous import no_rows
from elephant.cluster.servers import require_ports
from elephant.cluster.slots import require_slots, require_some_slot
from elephant.data.schema import FEATURES, Field
from elephant.errors import ConfigurationError, DataError
from elephant.monitor.progress import Progress
from elephant.spark.model import KerasModel
from elephant.training.algorithms import advice
from elephant.training.job import TrainingJob
from elephant.training.served_model import ServedModel
from elephant.training.worker_callbacks import worker_copies


def fit_synchronously(frame: DataFrame, job: TrainingJob, progress: Progress) -> KerasModel:
    """Trains on ranks that take every step together.

    Args:
        frame: The prepared columns.
        job: What to do.
        progress: Shown what happens.
    """
    config = job.config
    pickled = _pickled(job)
    if config.scale_learning_rate:
        progress.note(f"the learning rate is multiplied by {config.num_workers}, the number of workers")
    require_slots(frame.sparkSession, config.num_workers, timeout_s=config.timeouts.slots_s, note=progress.note)
    outcome = launch(
        frame,
        job=pickled,
        backend=job.model.settings.backend,
        schema=job.schema,
        config=config,
        progress=progress,
    )
    return KerasModel(job.model.with_variables(outcome.variables, outcome.row_shape), history=outcome.history)


def fit_asynchronously(frame: DataFrame, job: TrainingJob, progress: Progress) -> KerasModel:
    """Trains on workers that go at their own pace against parameter servers.

    Args:
        frame: The prepared columns.
        job: What to do.
        progress: Shown what happens.
    """
    config, options = job.config, job.config.asynchronous
    pickled = _pickled(replace(job, callbacks=worker_copies(job.callbacks)))
    warning = advice(config)
    if warning is not None:
        warnings.warn(warning, UserWarning, stacklevel=4)
    on_executors = options.parameter_servers if options.server_placement == "executors" else 0
    if not on_executors:
        # Known at once, and so said before anything else is begun.
        require_ports(driver_addresses(frame.sparkSession)[1], options.port, options.parameter_servers)
    require_some_slot(
        frame.sparkSession,
        config.num_workers,
        servers=on_executors,
        timeout_s=config.timeouts.slots_s,
        note=progress.note,
    )
    row_shape = _row_shape(frame, job.schema.features)
    model = ServedModel(job, row_shape)
    left = launch_workers(frame, job=job, pickled=pickled, model=model, progress=progress)
    refused, applied = left.statistics["refused"], left.statistics["updates"]
    if refused:
        warnings.warn(
            f"expected updates of finite numbers. Received: {refused:,} with NaN or infinities, which were left out; "
            f"{applied:,} were applied. Lower the learning rate, clip gradients, or look for rows with NaN.",
            UserWarning,
            stacklevel=4,
        )
    return KerasModel(
        job.model.with_variables(model.variables(), row_shape),
        history=left.history,
        training_statistics=left.statistics,
    )


def _row_shape(frame: DataFrame, features: Field) -> tuple[int, ...]:
    """Returns the shape of one input row, of the first row where the model does not tell it."""
    if features.width is not None:
        if frame.isEmpty():
            raise no_rows()
        return features.row_shape(features.width)
    first = frame.select(FEATURES).first()
    if first is None:
        raise no_rows()
    if first[0] is None:
        raise DataError(f"{features.title}: expected no nulls. Received: a null in the first row.")
    return features.row_shape(len(first[0]))


def _pickled(job: TrainingJob) -> bytes:
    try:
        return cloudpickle.dumps(job)
    except Exception as error:
        raise ConfigurationError(
            f"The model's code or a callback cannot be sent to the executors: {type(error).__name__}: {error}. "
            "Do not keep a SparkSession, a lock, a file or a socket in it."
        ) from error
