"""The hook in the optimizer: gradients are averaged over the ranks before they are applied.

The outermost optimizer's ``apply`` is the one place that every Keras training
step passes through, a custom ``train_step`` included (the idea of Horovod's
DistributedOptimizer, Sergeev & Del Balso 2018, section 3). Clipping, weight
decay and moving averages come after it and so see the averaged gradient.

The average weighs each rank by its rows in the step, so that N ranks give what
one process gives on the rows of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from elephant.collective.base import Collective
from elephant.collective.fusion import FusedBuffer
from elephant.data.epoch_plan import EpochPlan
from elephant.errors import UnsupportedError


class GradientAverager:
    """Averages one optimizer's gradients over all ranks, once per step.

    Args:
        collective: Connects the ranks.
        plan: Tells each rank's share of each step's rows.

    Attributes:
        stop_requested: Set by this rank to ask all ranks to stop; travels with the next gradients.
        stop_agreed: True once any rank's request has arrived, on all ranks at the same step.
        error: What the collective raised, which TensorFlow replaces by an error of its own.
    """

    def __init__(self, collective: Collective, plan: EpochPlan) -> None:
        self._collective = collective
        self._plan = plan
        self._step = 0
        self._buffer: FusedBuffer | None = None
        self.stop_requested = False
        self.stop_agreed = False
        self.error: BaseException | None = None

    def attach(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Makes ``optimizer.apply`` average the gradients first. Raises UnsupportedError for other backends."""
        backend = keras.backend.backend()
        if backend not in _IN_STEP:
            raise UnsupportedError(
                f"Keras backend: expected one of {', '.join(_IN_STEP)}. Received: {backend!r}. "
                "Set KERAS_BACKEND=tensorflow for driver and executors."
            )
        reduce_in_step, apply = _IN_STEP[backend], optimizer.apply

        def apply_averaged(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
            return apply(reduce_in_step(self, grads), trainable_variables)

        optimizer.apply = apply_averaged

    def begin_step(self, step: int) -> None:
        """Says which step of the epoch the next gradients belong to, however often they are applied in it."""
        self._step = step

    def average(
        self, dense: Sequence[np.ndarray], sparse: Sequence[tuple[np.ndarray, np.ndarray]] = ()
    ) -> tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
        """Averages the gradients of one step.

        Args:
            dense: This rank's gradients.
            sparse: Gradients of embeddings as (indices, values): they stay slices, because
                optimizers treat rows without a gradient differently from rows with a zero one.

        Returns:
            The averages, in the same order. They are views of a buffer that the next step overwrites.
        """
        share = self._plan.share_at(self._collective.rank, self._step)
        if self._buffer is None:
            self._buffer = FusedBuffer([(array.shape, array.dtype) for array in dense], extra=1)
        self._buffer.pack(dense, scale=share)
        self._buffer.extra[0] = float(self.stop_requested)
        self._buffer.allreduce(self._collective)
        self.stop_agreed = self.stop_agreed or bool(self._buffer.extra[0] > 0)
        return self._buffer.unpack(), [self._gather(indices, values, share) for indices, values in sparse]

    def _gather(self, indices: np.ndarray, values: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
        if share == 0.0:
            indices, values = indices[:0], values[:0]
        scaled = np.ascontiguousarray(values * values.dtype.type(share))
        all_indices = self._collective.allgather(np.ascontiguousarray(indices))
        all_values = self._collective.allgather(scaled)
        return np.concatenate(all_indices), np.concatenate(all_values)


def _reduce_in_tensorflow_step(averager: GradientAverager, grads: Sequence[Any]) -> list[Any]:
    """Puts one host callback for all gradients into the step; absent gradients stay absent."""
    import tensorflow as tf

    dense = [i for i, grad in enumerate(grads) if grad is not None and not isinstance(grad, tf.IndexedSlices)]
    sparse = [i for i, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
    inputs = [grads[i] for i in dense]
    inputs += [part for i in sparse for part in (grads[i].indices, grads[i].values)]
    if not inputs:
        return list(grads)

    def on_host(*arrays: np.ndarray) -> list[np.ndarray]:
        slices = arrays[len(dense) :]
        try:
            averages, gathered = averager.average(
                arrays[: len(dense)], list(zip(slices[0::2], slices[1::2], strict=True))
            )
        except BaseException as error:
            averager.error = error
            raise
        # Copies, because TensorFlow takes arrays as they are: a train_step that applies gradients twice would
        # overwrite those of the first time while its variables are still being updated.
        return [*(average.copy() for average in averages), *(part for pair in gathered for part in pair)]

    outputs = tf.numpy_function(on_host, inputs, [tensor.dtype for tensor in inputs], stateful=True)
    reduced = list(grads)
    for index, output in zip(dense, outputs, strict=False):
        output.set_shape(grads[index].shape)
        reduced[index] = output
    for index, indices, values in zip(sparse, outputs[len(dense) :: 2], outputs[len(dense) + 1 :: 2], strict=True):
        indices.set_shape([None])
        values.set_shape([None, *grads[index].values.shape[1:]])
        reduced[index] = tf.IndexedSlices(values, indices, grads[index].dense_shape)
    return reduced


_IN_STEP: dict[str, Callable[[GradientAverager, Sequence[Any]], list[Any]]] = {"tensorflow": _reduce_in_tensorflow_step}
