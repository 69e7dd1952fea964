"""Batch normalization over the rows of all ranks, instead of each rank's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from elephant.collective.communicator import Communicator
from elephant.errors import UnsupportedError


def synchronize(model: keras.Model, collective: Communicator, share: Callable[[], float]) -> int:
    """Makes the model's batch normalization layers use the mean and variance of the rows of all ranks.

    Each rank's mean and variance are gathered and combined (Chan, Golub & LeVeque 1983, equation 2.1), and
    gradients flow back through the gathering; so N ranks train as one process on all rows.

    Returns:
        How many layers there are.

    Raises:
        UnsupportedError: Keras runs on another backend than TensorFlow, or is a version whose layers work otherwise.
    """
    layers = _layers(model)
    if layers and keras.backend.backend() != "tensorflow":
        raise UnsupportedError(
            f"syncBatchNorm: expected the Keras backend tensorflow. Received: {keras.backend.backend()!r}."
        )
    for layer in layers:
        if not hasattr(layer, "_moments"):
            raise UnsupportedError(
                f"syncBatchNorm: this version of Keras, {keras.__version__}, is not known. Leave it out."
            )
        layer._moments = _moments_of_all_ranks(layer._moments, layer, collective, share)
    return len(layers)


def momenta(model: keras.Model, variables: Sequence[keras.Variable]) -> np.ndarray:
    """Returns how much of each element of some variables a training step leaves; NaN where that is not known.

    Args:
        variables: Of it, such as its moving statistics.
    """
    known = {
        id(variable): float(layer.momentum)
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.non_trainable_variables
    }
    parts = [np.full(int(np.prod(one.shape)), known.get(id(one), np.nan)) for one in variables]
    return np.concatenate([np.empty(0), *parts])


def steps_of_all(base: np.ndarray, state: np.ndarray, momentum: np.ndarray, *, steps: int, workers: int) -> np.ndarray:
    """Returns moving averages as if this worker had taken the steps of all workers, on rows like its own.

    After k steps of momentum p from the base b they are ``p^k b`` and what the rows have added. Averaged as they are, N
    workers' averages would lag behind those of one process, which takes N k steps.

    >>> steps_of_all(np.zeros(1), np.array([0.19]), np.array([0.9]), steps=2, workers=2).round(4).tolist()
    [0.3439]
    """
    left = np.where((momentum >= 0) & (momentum < 1), momentum, 0.0) ** steps
    of_all = left**workers
    advanced = of_all * base + (1 - of_all) / (1 - left) * (state - left * base)
    return np.where((momentum >= 0) & (momentum < 1), advanced, state)


def normalisation_statistics(model: keras.Model) -> list[keras.Variable]:
    """Returns the moving averages of the model's batch normalization layers."""
    return [variable for layer in _layers(model) for variable in layer.non_trainable_variables]


def _layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def _moments_of_all_ranks(
    own_moments: Callable[..., Any],
    layer: keras.layers.BatchNormalization,
    collective: Communicator,
    share: Callable[[], float],
) -> Callable[..., Any]:
    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        import tensorflow as tf

        mean, variance = own_moments(inputs, mask)
        count = _count(inputs, mask, layer._reduction_axes)
        parts = _gather(tf.stack([mean, variance, tf.fill(tf.shape(mean), count)]), collective, share)
        means, variances, counts = parts[:, 0], parts[:, 1], parts[:, 2]
        total = tf.reduce_sum(counts, axis=0)
        mean = tf.reduce_sum(counts * means, axis=0) / total
        variance = tf.reduce_sum(counts * (variances + tf.square(means - mean)), axis=0) / total
        return mean, variance

    return moments


def _count(inputs: Any, mask: Any, axes: Any) -> Any:
    """Returns how many values each mean is of."""
    import tensorflow as tf

    shape = tf.shape(inputs)
    if mask is None:
        return tf.cast(tf.reduce_prod(tf.gather(shape, list(axes))), inputs.dtype)
    kept = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), inputs.dtype), shape)
    return tf.reduce_sum(kept) / tf.cast(shape[-1], inputs.dtype)


def _gather(block: Any, collective: Communicator, share: Callable[[], float]) -> Any:
    """Returns the blocks of all ranks, shape (ranks, ...); a rank that brings no rows gives zeros.

    Its gradient is that of the average over the ranks: every rank's loss depends on every block.
    """
    import tensorflow as tf

    def gather_on_host(values: np.ndarray) -> np.ndarray:
        own = values if share() else np.zeros_like(values)
        return np.stack(collective.allgather(own))

    def spread_on_host(gradient: np.ndarray) -> np.ndarray:
        own_share = share()
        weighted = gradient * gradient.dtype.type(own_share) if own_share else np.zeros_like(gradient)
        collective.allreduce_(weighted)
        # The hook in the optimizer will multiply by this rank's share.
        own = weighted[collective.rank]
        return own / gradient.dtype.type(own_share) if own_share else np.zeros_like(own)

    @tf.custom_gradient
    def gather(values: Any) -> tuple[Any, Callable[[Any], Any]]:
        (gathered,) = tf.numpy_function(gather_on_host, [values], [values.dtype], stateful=True)
        gathered.set_shape([collective.world_size, *values.shape])

        def gradient(upstream: Any) -> Any:
            (own,) = tf.numpy_function(spread_on_host, [upstream], [upstream.dtype], stateful=True)
            own.set_shape(values.shape)
            return own

        return gathered, gradient

    return gather(block)
