"""Moving statistics of replicas, such as those of batch normalization, which no gradient keeps alike."""

from __future__ import annotations

import keras
import numpy as np

from elephant.collective.communicator import Communicator
from elephant.modeling.variables import assign_flat, flatten, moving_statistics


def average_moving_statistics(model: keras.layers.Layer, communicator: Communicator, share: float) -> None:
    """Replaces each rank's moving statistics by the average over the ranks, weighted by the rows of each.

    Args:
        model: Equal on all ranks but for its statistics.
        share: The part of all rows that were this rank's.
    """
    variables = moving_statistics(model)
    if not variables:
        return
    statistics = flatten(variables) * share if share else np.zeros(sum(int(np.prod(v.shape)) for v in variables))
    communicator.allreduce_(statistics)
    assign_flat(variables, statistics)
