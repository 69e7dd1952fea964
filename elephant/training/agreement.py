"""What the ranks make one at the end of an epoch: metrics, moving statistics, and the check that they still agree."""

from __future__ import annotations

import zlib

import keras
import numpy as np

from elephant.collective.base import Collective
from elephant.data.epoch_plan import EpochPlan
from elephant.errors import TrainingError
from elephant.modeling.variables import assign_flat, flatten, metric_variables, moving_statistics, read_variables


def sum_metrics(model: keras.Model, collective: Collective) -> dict[str, float]:
    """Returns the model's metrics over the rows of all ranks.

    A metric keeps sums and counts; added up over the ranks they are what one process
    would hold. An average of each rank's results would be something else.
    """
    variables = metric_variables(model)
    sums = flatten(variables)
    collective.allreduce_(sums)
    assign_flat(variables, sums)
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def average_moving_statistics(model: keras.Model, collective: Collective, plan: EpochPlan) -> None:
    """Replaces each rank's moving statistics by the average over the ranks, weighted by their training rows."""
    variables = moving_statistics(model)
    if not variables:
        return
    share = plan.training_rows[collective.rank] / sum(plan.training_rows)
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
            "weights must do the same on every rank."
        )


def share_variables(model: keras.Model, collective: Collective) -> None:
    """Gives every rank the variables of rank 0."""
    from elephant.modeling.variables import state_variables

    for variable, value in zip(state_variables(model), read_variables(model), strict=True):
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy()
        collective.broadcast_(flat)
        variable.assign(flat.view(value.dtype).reshape(value.shape))


def any_rank(flag: bool, collective: Collective) -> bool:
    """Returns whether the flag is set on any rank."""
    flags = np.array([flag], dtype=np.int64)
    collective.allreduce_(flags, op="max")
    return bool(flags[0])
