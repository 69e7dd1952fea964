"""Batch normalization over the rows of all ranks, instead of each rank's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from elephant.backends import current
from elephant.backends.keras_private import flat_layers, has_moments, moments_of, reduction_axes, replace_moments
from elephant.collective.communicator import Communicator
from elephant.errors import UnsupportedError


def synchronize(
    layers: Sequence[keras.layers.BatchNormalization], communicator: Communicator, share: Callable[[], float]
) -> None:
    """Makes batch normalization layers use the mean and variance of the rows of all ranks.

    Each rank's mean and variance are gathered and combined (Chan, Golub & LeVeque 1983, equation 2.1), and
    gradients flow back through the gathering; so N ranks train as one process on all rows.

    Args:
        layers: Some of the model's, on every rank the same.

    Raises:
        UnsupportedError: Keras is a version whose layers work otherwise.
    """
    for layer in layers:
        if not has_moments(layer):
            raise UnsupportedError(
                f"syncBatchNorm: this version of Keras, {keras.__version__}, is not known. Leave it out."
            )
        replace_moments(layer, _moments_of_all_ranks(moments_of(layer), layer, communicator, share))


def synchronized_layers(model: keras.Model, every: bool) -> list[keras.layers.BatchNormalization]:
    """Returns the batch normalization layers that use the rows of all ranks.

    Args:
        every: Whether all of them do, and not those alone that are built with ``synchronized=True``.
    """
    return [layer for layer in batch_norm_layers(model) if every or getattr(layer, "synchronized", False)]


def momenta(model: keras.Model, variables: Sequence[keras.Variable]) -> np.ndarray:
    """Returns how much of each element of some variables a training step leaves; NaN where that is not known.

    Args:
        variables: Of it, such as its moving statistics.
    """
    known = {
        id(variable): float(layer.momentum)
        for layer in flat_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.non_trainable_variables
    }
    parts = [np.full(int(np.prod(one.shape)), known.get(id(one), np.nan)) for one in variables]
    return np.concatenate([np.empty(0), *parts])


def steps_of_all(
    own: np.ndarray, base: np.ndarray, state: np.ndarray, momentum: np.ndarray, *, steps: int, workers: int
) -> np.ndarray:
    """Returns a worker's own moving averages as if it had taken the steps of all workers, on rows like its own.

    After k steps of momentum p from the base b they are ``p^k b`` and what the rows have added. Averaged as they are, N
    workers' averages would lag behind those of one process, which takes N k steps. They would lag as well if a worker
    went on from the base, an average in which others' last steps are missing: what its rows add goes to its own.

    Args:
        own: What this returned before; the base at first.
        base: The average over the workers that the steps began with.
        state: What they have made of it.

    >>> own, base, state = np.array([0.5]), np.zeros(1), np.array([0.19])
    >>> steps_of_all(own, base, state, np.array([0.9]), steps=2, workers=2).round(4).tolist()
    [0.672]
    """
    known = (momentum >= 0) & (momentum < 1)
    left = np.where(known, momentum, 0.0) ** steps
    of_all = left**workers
    advanced = of_all * own + (1 - of_all) / (1 - left) * (state - left * base)
    return np.where(known, advanced, state)


def batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns a model's batch normalization layers."""
    return [layer for layer in flat_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]


def _moments_of_all_ranks(
    own_moments: Callable[..., Any],
    layer: keras.layers.BatchNormalization,
    communicator: Communicator,
    share: Callable[[], float],
) -> Callable[..., Any]:
    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = own_moments(inputs, mask)
        count = ops.broadcast_to(_count(inputs, mask, reduction_axes(layer)), ops.shape(mean))
        block = ops.stack([mean, variance, ops.cast(count, mean.dtype)])
        (parts,) = current().host_op(
            lambda own: [_gathered_blocks(own, communicator, share())],
            lambda _, gradient: [_gathered_gradient(gradient, communicator, share())],
            [block],
            [((communicator.world_size, *block.shape), block.dtype)],
        )
        means, variances, counts = parts[:, 0], parts[:, 1], parts[:, 2]
        total = ops.sum(counts, axis=0)
        mean = ops.sum(counts * means, axis=0) / total
        variance = ops.sum(counts * (variances + ops.square(means - mean)), axis=0) / total
        return mean, variance

    return moments


def _count(inputs: Any, mask: Any, axes: Any) -> Any:
    """Returns how many values each mean is of."""
    shape = ops.shape(inputs)
    if mask is None:
        return math.prod(shape[axis] for axis in axes)
    kept = ops.broadcast_to(ops.cast(ops.expand_dims(mask, -1), inputs.dtype), shape)
    return ops.sum(kept) / shape[-1]


def _gathered_blocks(block: np.ndarray, communicator: Communicator, share: float) -> np.ndarray:
    """Returns the blocks of all ranks, shape (ranks, ...); zeros of a rank without a share."""
    return np.stack(communicator.allgather(np.ascontiguousarray(block) if share else np.zeros_like(block)))


def _gathered_gradient(gradient: np.ndarray, communicator: Communicator, share: float) -> np.ndarray:
    """Returns the gradient of this rank's block from that of all blocks.

    The hook in the optimizer multiplies by this rank's share afterwards, so it is divided by it here.
    """
    weighted = gradient * gradient.dtype.type(share) if share else np.zeros_like(gradient)
    communicator.allreduce_(weighted)
    own = weighted[communicator.rank]
    return own / gradient.dtype.type(share) if share else np.zeros_like(own)
