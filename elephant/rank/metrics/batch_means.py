"""Means that are fed one number for each batch, such as a loss: of several ranks, a batch's parts count as their rows.

Keras' `Mean` counts a number without a weight as one, whatever its batch has of rows. So do trackers of losses that
are fed in a ``train_step`` or ``compute_loss``, functions as metrics that return one number, and on TensorFlow the
losses of several outputs. In one process that is a mean over batches. A rank has only a part of each batch: its number
counts as its part of the batch's rows, and those of all ranks together count as one again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from elephant.backends import current
from elephant.backends.gradient_averager import GradientAverager
from elephant.backends.keras_private import replaced_mean_update


def count_shares(model: keras.Model, averager: GradientAverager) -> None:
    """Makes a number of a batch count as this rank's part of the batch's rows, in training steps.

    Args:
        averager: Knows the part, once it is bound to the ranks.
    """
    step = model.train_step

    def share() -> list[np.ndarray]:
        return [np.asarray(averager.share(), np.float32)]

    def train_step(*given: Any) -> Any:
        # By a call on the host: the part may be another one in every step.
        with _counted_as(lambda: current().call_on_host(averager.noting_failure(share), [], [((), "float32")])[0]):
            return step(*given)

    model.train_step = train_step


def count_rows(model: keras.Model) -> None:
    """Makes a number of a batch count as the batch's rows in a model's tests: other processes have batches too."""
    step = model.test_step
    if getattr(step, "counts_rows", False):
        return

    def test_step(*given: Any) -> Any:
        # On JAX a state comes before the data.
        with counted_by_rows(given[-1]):
            return step(*given)

    test_step.counts_rows = True  # type: ignore[attr-defined]
    model.test_step, model.test_function = test_step, None


def counted_by_rows(data: Any) -> contextlib.AbstractContextManager[None]:
    """Gives numbers of a batch the weight of its rows, for the time of a ``with`` block."""
    first = next(part for part in keras.tree.flatten(data) if part is not None)
    return _counted_as(lambda: ops.shape(first)[0])


def _counted_as(weight: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Gives numbers without a weight of their own one, for the time of a ``with`` block in which a step is traced."""

    def weighing(update_state: Callable[..., Any]) -> Callable[..., Any]:
        def weighted(self: keras.metrics.Mean, values: Any, sample_weight: Any = None) -> Any:
            values = ops.convert_to_tensor(values, dtype=self.dtype)
            if sample_weight is None and len(values.shape) == 0:
                sample_weight = weight()
            return update_state(self, values, sample_weight=sample_weight)

        return weighted

    return replaced_mean_update(weighing)
