"""A fit in either kind of mode: from the prepared columns and the job to the fitted model."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pyspark import cloudpickle

from elephant.checkpoint.writer import Keeper
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.asynchronous import launch_workers
from elephant.cluster.hosting import executors_host
from elephant.cluster.launch import launch
from elephant.cluster.preflight import Needs, cleared
from elephant.cluster.rendezvous import no_rows
from elephant.cluster.servers import require_ports
from elephant.cluster.sources import RowSource
from elephant.cluster.warm_processes import warm_workers
from elephant.data.schema import DENSE, RAGGED, DataSchema, Field, RowSpec
from elephant.errors import ConfigurationError, DataError
from elephant.monitor.progress import Progress
from elephant.spark.recovery import Recovery
from elephant.spark.trained import Trained
from elephant.training.algorithms import advice
from elephant.training.callbacks import packages_of
from elephant.training.job import TrainingJob
from elephant.training.preprocessing import model_rows
from elephant.training.served_model import ServedModel
from elephant.training.worker_callbacks import worker_copies

# Whose call of fit a warning is about: as many frames up as there are between.
_OF_THE_USER = 8


def train(rows: RowSource, job: TrainingJob, progress: Progress) -> Trained:
    """Trains in the mode that the job asks for; from its last checkpoint on, and again after a failure, where asked to.

    Args:
        rows: The prepared columns.
        job: What to do.
        progress: Shown what happens.

    Raises:
        ConfigurationError: Checkpoints are in the way, or of another fit.
        TrainingError: The fit failed.
    """
    mode = train_synchronously if job.config.is_synchronous else train_asynchronously

    def attempt(job: TrainingJob, keeper: Keeper | None) -> Trained:
        return mode(rows, job, progress, keeper)

    return Recovery(rows.session, job.config, progress).train(job, attempt)


def train_synchronously(rows: RowSource, job: TrainingJob, progress: Progress, keeper: Keeper | None = None) -> Trained:
    """Trains on ranks that take every step together.

    Args:
        rows: The prepared columns.
        job: What to do.
        progress: Shown what happens.
        keeper: Writes checkpoints; None makes none.
    """
    needs, job = _needs(rows, job, packages_of(job.callbacks)), replace(job, config=job.config.by_rank())
    config = job.config
    pickled = _pickled(job)
    if config.scale_learning_rate:
        progress.note(f"the learning rate is multiplied by {needs.num_workers}, the number of workers")
    with cleared(rows.session, needs, progress.note) as plan:
        outcome = launch(
            rows,
            job=pickled,
            backend=job.model.settings.backend,
            schema=job.schema,
            plan=plan,
            timeouts=config.timeouts,
            progress=progress,
            keeper=keeper,
            warm=warm_workers(rows.session, config),
        )
    return Trained(
        variables=outcome.variables,
        rows=outcome.rows,
        history=outcome.history,
        statistics=outcome.statistics,
        plan=outcome.plan,
    )


def train_asynchronously(
    rows: RowSource, job: TrainingJob, progress: Progress, keeper: Keeper | None = None
) -> Trained:
    """Trains on workers that go at their own pace against parameter servers.

    Args:
        rows: The prepared columns.
        job: What to do.
        progress: Shown what happens.
        keeper: Writes checkpoints; None makes none.
    """
    hosted = executors_host(rows.session)
    # Callbacks have their epochs on the driver, or on the rank that hosts for it.
    packages = packages_of(job.callbacks)
    if not hosted:
        _require_here(packages)
    needs = _needs(rows, job, packages if hosted else ())
    job = replace(job, config=job.config.by_rank())
    config, options = job.config, job.config.asynchronous
    # Workers get the weights from the servers, and need to know of a state only that there is one.
    state = None if job.state is None else job.state.without_arrays()
    pickled = _pickled(replace(job, callbacks=worker_copies(job.callbacks), state=state))
    warning = advice(config)
    if warning is not None:
        warnings.warn(warning, UserWarning, stacklevel=_OF_THE_USER)
    if options.server_placement != "executors" and not hosted:
        # Known at once, and so said before anything else is begun.
        require_ports(driver_addresses(rows.session)[1], options.port, options.parameter_servers)
    if hosted:
        # Its workers meet at the one that hosts, and so run at the same time.
        needs = replace(needs, synchronous=True, servers=0)
    with cleared(rows.session, needs, progress.note) as plan:
        spec = _row_spec(rows, job.schema) if job.preprocessing.target is None else _row_spec_of_model(rows, job)
        model = ServedModel(job, spec)
        left = launch_workers(rows, job=job, pickled=pickled, model=model, plan=plan, progress=progress, keeper=keeper)
    refused, applied = left.statistics["refused"], left.statistics["updates"]
    if refused:
        warnings.warn(
            f"expected updates of finite numbers. Received: {refused:,} with NaN or infinities, which were left out; "
            f"{applied:,} were applied. Lower the learning rate, clip gradients, or look for rows with NaN.",
            UserWarning,
            stacklevel=_OF_THE_USER,
        )
    return Trained(
        variables=model.variables(), rows=spec, history=left.history, statistics=left.statistics, plan=left.plan
    )


def _needs(rows: RowSource, job: TrainingJob, packages: Sequence[str]) -> Needs:
    backend, rows_bytes = job.model.settings.backend, rows.estimated_bytes()
    return Needs.of_fit(job.config, backend=backend, rows_bytes=rows_bytes, packages=packages)


def _require_here(packages: Sequence[str]) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(
                f"callbacks: expected {name} to be installed on the driver, where the epochs of callbacks end. "
                f"Received: none. Run pip install {name}, or leave the callback out."
            )


def _row_spec(rows: RowSource, schema: DataSchema) -> RowSpec:
    """Returns what one row of the input is, of the first row where the model does not tell it."""
    unknown = [field for field in schema.inputs if field.width is None]
    first = rows.first_row()
    if first is None:
        raise no_rows()
    return schema.row_spec({field.role: _natural(first[field.role], field) for field in unknown})


def _row_spec_of_model(rows: RowSource, job: TrainingJob) -> RowSpec:
    if rows.first_row() is None:
        raise no_rows()
    return model_rows(job.model_schema)


def _natural(value: Any, field: Field) -> tuple[int, ...]:
    if value is None:
        raise DataError(f"{field.title}: expected no nulls. Received: a null in the first row.")
    if hasattr(value, "asDict") or isinstance(value, dict):
        # A vector, as Spark keeps it, in a row of a DataFrame or of files.
        return (int(value["size"] or len(value["values"])),)
    if isinstance(value, (bytes, bytearray)) and field.kind == DENSE:
        # A tensor's raw bytes.
        return (len(value) // np.dtype(field.dtype).itemsize,)
    shape: tuple[int, ...] = ()
    while isinstance(value, list):
        shape, value = (*shape, len(value)), value[0] if value else None
    return shape[1:] if field.kind == RAGGED else shape


def _pickled(job: TrainingJob) -> bytes:
    try:
        return cloudpickle.dumps(job)
    except Exception as error:
        raise ConfigurationError(
            f"The model's code or a callback cannot be sent to the executors: {type(error).__name__}: {error}. "
            "Do not keep a SparkSession, a lock, a file or a socket in it."
        ) from error
