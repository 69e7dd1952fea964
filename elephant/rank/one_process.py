"""One process of plain Keras on the rows of several ranks, which these have to equal."""

from __future__ import annotations

import functools
import itertools
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa

from elephant.backends.gradient_averager import GradientAverager
from elephant.backends.keras_private import flat_layers
from elephant.collective.communicator import LocalCommunicator
from elephant.data.ragged import Values
from elephant.data.shard import Shard, ShardWriter
from elephant.modeling.layers.sync_batch_norm import batch_norm_layers, synchronized_layers
from elephant.modeling.variables import random_generators, read_values
from elephant.rank.input.preprocessed_shard import BatchChanges, prepared_rows
from elephant.rank.input.tensors import Tensors
from elephant.rank.job import TrainingJob, as_numbers, mixed_policy, prepared_model, reseed, set_up_process
from elephant.rank.trials.coupling import RankLosses
from elephant.rank.trials.loss_trial import may_couple_rows, try_out
from elephant.storage.filesystem import scratch_folder


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """Outcome of a fit by one process.

    Args:
        history: One number per epoch, by metric.
        paths: Of all of the model's variables, in its order.
        weights: Those of them that are no state of a random generator, by their place.
        own_statistics: Batch normalization layers that would take each worker's own statistics, by name.
        random_layers: Layers that draw random numbers in training, by name.
        again: The weights of another run of it with other random numbers; None where the model draws none.
        couplings: What was found of a loss, a metric or a layer in which the rows of a batch meet.
    """

    history: dict[str, list[Any]]
    paths: tuple[str, ...]
    weights: dict[int, np.ndarray]
    own_statistics: tuple[str, ...]
    random_layers: tuple[str, ...]
    again: dict[int, np.ndarray] | None
    couplings: tuple[str, ...]


def fit_alone(job: TrainingJob, parts: Sequence[pa.RecordBatch]) -> OneProcess:
    """Trains on the global batches of several ranks by ``keras.Model.fit``, in this process.

    Args:
        job: Of the ranks, which do not shuffle.
        parts: The rows of each rank, in its order.
    """
    set_up_process()
    with tempfile.TemporaryDirectory(prefix="elephant-verify-", dir=scratch_folder()) as folder:
        shard = _shard_of(job, parts, Path(folder) / "shard")
        shard, changes = prepared_rows(job, shard, LocalCommunicator(), 0)
        target = changes.row_shard if changes.any else shard
        rows = target.schema.row_spec(target.row_shapes)
        prepared = functools.partial(prepared_model, job, rows, num_ranks=len(parts), policy=mixed_policy(job.config))
        steps = list(global_batches([part.num_rows for part in parts], job.config.rank_batch_size))
        batches = functools.partial(_batches, job, shard, changes, steps)
        model = prepared()
        before = _weights_of(model)
        history, random_layers = _fit(model, job, batches(), len(steps)), _random_layers(model)
        again = None
        if random_layers:
            other = prepared()
            # A rank's that there is not.
            reseed(other, job.config.seed, len(parts))
            _fit(other, job, batches(), len(steps))
            again = _weights_of(other)
        couplings = _couplings(prepared(), next(batches()))
    after = _weights_of(model)
    moved = {id(model.weights[place]) for place in after if not np.array_equal(before[place], after[place])}
    return OneProcess(
        history=history,
        paths=tuple(variable.path for variable in model.weights),
        weights=after,
        own_statistics=_own_statistics(model, moved, every=job.config.sync_batch_norm),
        random_layers=random_layers,
        again=again,
        couplings=couplings,
    )


def _fit(model: keras.Model, job: TrainingJob, batches: Iterator[Any], steps: int) -> dict[str, list[Any]]:
    epochs = job.config.epochs
    history = model.fit(batches, epochs=epochs, steps_per_epoch=steps, shuffle=False, verbose=0).history
    logs = [as_numbers({name: values[epoch] for name, values in history.items()}) for epoch in range(epochs)]
    return {name: [log[name] for log in logs] for name in logs[0]}


def global_batches(num_rows: Sequence[int], batch_size: int) -> Iterator[np.ndarray]:
    """Yields the rows of each step: the k-th batch of every rank that still has one, rank by rank.

    Args:
        num_rows: Rows of each rank; those of all are numbered one rank after the other.
        batch_size: Of each rank.

    >>> [step.tolist() for step in global_batches([3, 2], 2)]
    [[0, 1, 3, 4], [2]]
    """
    firsts = np.cumsum([0, *num_rows[:-1]])
    for start in range(0, max(num_rows), batch_size):
        ends = [min(start + batch_size, count) for count in num_rows]
        yield np.concatenate([first + np.arange(start, end) for first, end in zip(firsts, ends, strict=True)])


def _shard_of(job: TrainingJob, parts: Sequence[pa.RecordBatch], path: Path) -> Shard:
    with ShardWriter(path, job.schema) as writer:
        for part in parts:
            writer.write(part)
        return Shard(path, job.schema, writer.finish().row_shapes)


def _batches(
    job: TrainingJob, shard: Shard, changes: BatchChanges, steps: Sequence[np.ndarray]
) -> Iterator[tuple[Any, ...]]:
    tensors = Tensors(changes.row_shard if changes.any else shard, job.class_weight)
    for epoch in itertools.count():
        for step, rows in enumerate(steps):
            values: tuple[Values, ...] = shard.take(rows)
            if changes.any:
                values = changes.training(values, epoch, step)
            yield tensors.assembled(tensors.arrays(values))


def _weights_of(model: keras.Model) -> dict[int, np.ndarray]:
    left_out = {id(variable) for variable in random_generators(model)}
    values = enumerate(zip(model.weights, read_values(model.weights), strict=True))
    return {place: value for place, (variable, value) in values if id(variable) not in left_out}


def _own_statistics(model: keras.Model, moved: set[int], *, every: bool) -> tuple[str, ...]:
    """Returns the layers whose moving averages have moved, so that a batch's own statistics were used."""
    shared = {id(layer) for layer in synchronized_layers(model, every)}
    layers = [layer for layer in batch_norm_layers(model) if id(layer) not in shared]
    return tuple(layer.name for layer in layers if moved & {id(one) for one in layer.non_trainable_variables})


def _random_layers(model: keras.Model) -> tuple[str, ...]:
    drawn = {id(variable) for variable in random_generators(model)}

    def draws(layer: keras.layers.Layer) -> bool:
        return any(id(variable) in drawn for variable in layer.variables)

    layers = [layer for layer in flat_layers(model) if draws(layer)]
    return tuple(layer.name for layer in layers if not any(map(draws, flat_layers(layer, include_self=False))))


def _couplings(model: keras.Model, batch: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the warnings of a rank that has tried a model on some rows; the model is spent."""
    if not may_couple_rows(model):
        return ()
    losses = RankLosses(model, GradientAverager(LocalCommunicator(), lambda: 1.0))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try_out(losses, model, keras.utils.unpack_x_y_sample_weight(batch), allowed=True)
    # Not what the framework says of its own.
    return tuple(dict.fromkeys(str(warning.message) for warning in heard if warning.category is UserWarning))
