"""The hook in the optimizer: gradients are averaged over the ranks before they are applied.

The outermost optimizer's ``apply`` is the one place that every Keras training
step passes through, a custom ``train_step`` included (the idea of Horovod's
DistributedOptimizer, Sergeev & Del Balso 2018, section 3). Clipping, weight
decay, loss scaling and moving averages come after it and so see the averaged gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from elephant.errors import UnsupportedError
from elephant.modeling.gradient_averager import GradientAverager, GradientGroup, lookups_of


def attach(averager: GradientAverager, optimizer: keras.optimizers.Optimizer) -> None:
    """Makes ``optimizer.apply`` average the gradients over all ranks first.

    Raises:
        UnsupportedError: The Keras backend is one for which there is no hook.
    """
    reduce_in_step, apply = _hook_of_backend(), optimizer.apply

    def apply_averaged(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        return apply(reduce_in_step(averager, id(optimizer), list(grads), variables), trainable_variables)

    optimizer.apply = apply_averaged


def _hook_of_backend() -> Callable[[GradientAverager, int, list[Any], Sequence[Any]], list[Any]]:
    backend = keras.backend.backend()
    if backend not in _IN_STEP:
        raise UnsupportedError(
            f"Keras backend: expected one of {', '.join(_IN_STEP)}. Received: {backend!r}. "
            "Set KERAS_BACKEND=tensorflow for driver and executors."
        )
    return _IN_STEP[backend]


def _average_in_tensorflow_step(
    averager: GradientAverager, owner: int, grads: list[Any], variables: Sequence[Any]
) -> list[Any]:
    """Puts the averaging of all gradients into the step as host callbacks; absent gradients stay absent."""
    import tensorflow as tf

    sparse = [i for i, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
    dense = [i for i, grad in enumerate(grads) if grad is not None and i not in sparse]
    if not dense and not sparse:
        return grads
    # A gradient has its variable's shape, also where the graph does not know it.
    specs = [(tuple(variables[i].shape), grads[i].dtype.as_numpy_dtype) for i in dense]
    slices = [(grads[i].indices, grads[i].values, *lookups_of(grads[i].indices)) for i in sparse]
    callbacks = _Callbacks(averager, averager.group(owner, specs))
    averaged, gathered = callbacks.in_graph([grads[i] for i in dense], slices)
    reduced = list(grads)
    for index, gradient in zip(dense, averaged, strict=True):
        gradient.set_shape(tuple(variables[index].shape))
        reduced[index] = gradient
    for index, (indices, values) in zip(sparse, gathered, strict=True):
        indices.set_shape([None])
        values.set_shape([None, *grads[index].values.shape[1:]])
        reduced[index] = tf.IndexedSlices(values, indices, grads[index].dense_shape)
    return reduced


class _Callbacks:
    """The host callbacks of one ``apply`` in a TensorFlow graph.

    One bucket takes one callback. Several take one each, as soon as their gradients are
    there, and a last one that waits for all: until then the backward pass goes on.
    """

    def __init__(self, averager: GradientAverager, group: GradientGroup) -> None:
        self._averager = averager
        self._group = group
        self._numbers: list[tuple[int, ...]] = []

    def in_graph(
        self, dense: list[Any], sparse: list[tuple[Any, Any, tuple[int, ...], Any]]
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Returns the averaged tensors and the gathered (indices, values) of (indices, values, lookups, sizes)."""
        import tensorflow as tf

        slices = [part for indices, values, _, sizes in sparse for part in (indices, values, sizes)]
        self._numbers = [numbers for _, _, numbers, _ in sparse]
        types = [tensor.dtype for tensor in (*dense, *(part for item in sparse for part in item[:2]))]
        if len(self._group.buckets) == 1:
            outputs = tf.numpy_function(self._whole(len(dense)), [*dense, *slices], types, stateful=True)
        else:
            token = tf.constant(0)
            for number, bucket in enumerate(self._group.buckets):
                gradients = [dense[position] for position in bucket.positions]
                token = tf.numpy_function(self._submit(number), [token, *gradients], tf.int32, stateful=True)
            outputs = tf.numpy_function(self._wait(), [token, *slices], types, stateful=True)
        outputs = list(outputs)
        gathered = outputs[len(dense) :]
        return outputs[: len(dense)], list(zip(gathered[0::2], gathered[1::2], strict=True))

    def _whole(self, num_dense: int) -> Callable[..., list[np.ndarray]]:
        def average(*arrays: np.ndarray) -> list[np.ndarray]:
            averages = self._group.average(arrays[:num_dense], release_host_arrays)
            return [*averages, *self._gathered(arrays[num_dense:])]

        return self._averager.noting_failure(average)

    def _submit(self, number: int) -> Callable[..., np.int32]:
        def submit(token: np.int32, *gradients: np.ndarray) -> np.int32:
            self._group.submit(number, gradients, release_host_arrays)
            return np.int32(token)

        return self._averager.noting_failure(submit)

    def _wait(self) -> Callable[..., list[np.ndarray]]:
        def wait(_: np.int32, *slices: np.ndarray) -> list[np.ndarray]:
            averages = self._group.wait()
            return [*averages, *self._gathered(slices)]

        return self._averager.noting_failure(wait)

    def _gathered(self, slices: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = zip(self._numbers, slices[0::3], slices[1::3], slices[2::3], strict=True)
        return [part for pair in self._averager.gather(list(found)) for part in pair]


def release_host_arrays() -> None:
    """Makes TensorFlow give back the arrays that it has done with: it does so when it next makes a tensor."""
    import tensorflow as tf

    tf.constant(0.0)


_IN_STEP = {"tensorflow": _average_in_tensorflow_step}
