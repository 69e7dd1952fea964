"""What the ranks make one at the end of an epoch: metrics, moving statistics, and the check that they still agree."""

from __future__ import annotations

import zlib
from typing import Any

import keras
import numpy as np

from elephant.collective.communicator import Collective
from elephant.errors import TrainingError
from elephant.modeling.variables import (
    assign_flat,
    flatten,
    metric_variables,
    moving_statistics,
    read_variables,
    state_variables,
)
from elephant.training.job import as_numbers


def sum_metrics(model: keras.Model, collective: Collective) -> dict[str, Any]:
    """Returns the model's metrics over the rows of all ranks.

    A metric keeps sums and counts; added up over the ranks they are what one process
    would hold. An average of each rank's results would be something else.
    """
    variables = metric_variables(model)
    sums = flatten(variables)
    collective.allreduce_(sums)
    assign_flat(variables, sums)
    return as_numbers(model.get_metrics_result())


def global_logs(model: keras.Model, collective: Collective, logs: dict[str, Any], share: float) -> dict[str, Any]:
    """Returns an epoch's training logs over all ranks.

    Metrics come from their sums. What a custom ``train_step`` returned besides, such as a
    loss that no metric tracks, is its value in the last step, averaged over the ranks.

    Args:
        model: The model, whose metrics hold this rank's sums.
        collective: Connects the ranks.
        logs: This rank's logs, as Keras made them.
        share: This rank's part of the rows of the last step.
    """
    sum_metrics(model, collective)
    # Summed over all ranks, so that all decide alike which ones were updated.
    results = updated_results(model)
    raw = sorted(name for name, value in as_numbers(logs).items() if name not in results and np.ndim(value) == 0)
    values = np.array([logs[name] for name in raw], dtype=np.float64)
    values = values * share if share else np.zeros_like(values)
    collective.allreduce_(values)
    results = {name: value for name, value in results.items() if name in logs}
    return {**results, **{name: float(value) for name, value in zip(raw, values, strict=True)}}


def updated_results(model: keras.Model) -> dict[str, Any]:
    """Returns what the model's metrics say, without those that are still zero: they were never updated."""
    results = as_numbers(model.get_metrics_result())
    for metric in model.metrics:
        if not any(np.any(keras.ops.convert_to_numpy(variable)) for variable in metric.variables):
            results = {name: value for name, value in results.items() if name not in _names(metric)}
    return results


def _names(metric: keras.metrics.Metric) -> set[str]:
    result = metric.result()
    return set(result) if isinstance(result, dict) else {metric.name}


def average_moving_statistics(model: keras.Model, collective: Collective, share: float) -> None:
    """Replaces each rank's moving statistics by the average over the ranks, weighted by the rows of the epoch.

    Args:
        model: The model.
        collective: Connects the ranks.
        share: This rank's part of the rows.
    """
    variables = moving_statistics(model)
    if not variables:
        return
    statistics = flatten(variables) * share if share else np.zeros(sum(int(np.prod(v.shape)) for v in variables))
    collective.allreduce_(statistics)
    assign_flat(variables, statistics)


def require_equal_weights(model: keras.Model, collective: Collective, epoch: int) -> None:
    """Raises TrainingError on every rank when the ranks' weights have drifted apart."""
    digest = 0
    for variable in model.trainable_variables:
        digest = zlib.crc32(np.asarray(keras.ops.convert_to_numpy(variable)).tobytes(), digest)
    digests = [int(part[0]) for part in collective.allgather(np.array([digest], dtype=np.int64))]
    if len(set(digests)) > 1:
        raise TrainingError(
            f"expected equal weights on all ranks after epoch {epoch + 1}. Received: different ones "
            f"(checksums {', '.join(f'{value:08x}' for value in digests)}). A callback or train_step that changes "
            "weights must do the same on every rank, and only gradients that model.optimizer applies are averaged."
        )


def share_variables(model: keras.Model, collective: Collective) -> None:
    """Gives every rank the variables of rank 0."""
    for variable, value in zip(state_variables(model), read_variables(model), strict=True):
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy()
        collective.broadcast_(flat)
        variable.assign(flat.view(value.dtype).reshape(value.shape))


def any_rank(flag: bool, collective: Collective) -> bool:
    """Returns whether the flag is set on any rank."""
    flags = np.array([flag], dtype=np.int64)
    collective.allreduce_(flags, op="max")
    return bool(flags[0])
