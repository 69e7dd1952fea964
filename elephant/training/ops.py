"""Operations on tensors of all ranks, through which gradients flow: for losses over the rows of all of them.

They stand in a model's call, in a loss, or in a ``train_step``, as operations of `keras.ops` do, and work on every
backend of Keras: eagerly, in a ``tf.function`` (without XLA), in a function that JAX has compiled.

A gradient is that of the average of all ranks' losses: the loss of each depends on what all have brought. In the steps
of a fit each rank counts as much as it has rows in the step, and one without rows brings nothing. In a function of
`elephant.run` all ranks count alike. So N ranks give what one process gives on the rows of all of them.

In a fit, what is computed outside of the training steps is computed by each rank for itself, as in a world of one: an
evaluation, and the trials of a loss before the first step. So is all that ranks compute between two averages of weights
(``frequency``), and asynchronously.

On JAX, whose programs know all shapes before they run, all ranks bring the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from elephant.backends import current
from elephant.collective import api
from elephant.collective.operation import is_half
from elephant.errors import ConfigurationError


def allreduce(tensor: Any, op: str = "sum") -> Any:
    """Returns the elementwise sum or mean of a tensor over all ranks.

    Args:
        tensor: Of floats, of the same shape on all ranks.
        op: ``"sum"``, or ``"mean"``: over the ranks that have rows.

    Raises:
        ConfigurationError: The operation is none of these.

    Examples:
        >>> from keras import ops
        >>> from elephant.training.ops import allreduce
        >>> allreduce(ops.ones(2), "mean").shape[0]
        2
    """
    if op not in ("sum", "mean"):
        raise ConfigurationError(f"op: expected sum or mean. Received: {op!r}.")

    def reduced(array: np.ndarray) -> np.ndarray:
        total = _total(array)
        return total / total.dtype.type(_ranks_with_rows()) if op == "mean" else total

    tensor = ops.convert_to_tensor(tensor)
    return _op(
        lambda own: reduced(_brought(own)),
        lambda own, gradient: _back(reduced(_weighed(gradient))),
        tensor,
        tensor.shape,
    )


def allgather(tensor: Any) -> Any:
    """Returns the rows of all ranks, those of rank 0 first.

    Args:
        tensor: Of shape (rows, ...); the numbers of rows may differ between ranks, but on JAX.

    Examples:
        >>> from keras import ops
        >>> from elephant.training.ops import allgather
        >>> allgather(ops.ones((2, 3))).shape[0]
        2
    """

    def gathered(own: np.ndarray) -> np.ndarray:
        communicator, share = api.current_exchange()
        return np.concatenate(communicator.allgather(own if share else own[:0]))

    def gradient_of(own: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        communicator, share = api.current_exchange()
        rows = [int(count[0]) for count in communicator.allgather(np.array([len(own) if share else 0]))]
        parts = np.split(_weighed(gradient), np.cumsum(rows)[:-1])
        total = _added(communicator.alltoall(parts))
        return _back(total) if share else np.zeros_like(own)

    tensor = ops.convert_to_tensor(tensor)
    return _op(gathered, gradient_of, tensor, (_rows(tensor, api.current_exchange()[0].world_size), *tensor.shape[1:]))


def reduce_scatter(tensor: Any) -> Any:
    """Returns this rank's rows of the sum of a tensor over all ranks, as many on each rank.

    Args:
        tensor: Of floats, shape (rows, ...), the same on all ranks; its rows are divided evenly.

    Examples:
        >>> from keras import ops
        >>> from elephant.training.ops import reduce_scatter
        >>> reduce_scatter(ops.ones((2, 3))).shape[0]
        2
    """

    def scattered(own: np.ndarray) -> np.ndarray:
        communicator, _ = api.current_exchange()
        _require_even(own, communicator.world_size)
        return communicator.reduce_scatter(_brought(own))

    def gradient_of(own: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        return _back(np.concatenate(api.current_exchange()[0].allgather(_weighed(gradient))))

    tensor = ops.convert_to_tensor(tensor)
    return _op(scattered, gradient_of, tensor, (_rows(tensor, divided=True), *tensor.shape[1:]))


def alltoall(tensor: Any) -> Any:
    """Sends each rank a part of the rows, and returns those that came, from rank 0 first.

    Args:
        tensor: Of floats, shape (rows, ...), the same on all ranks; its rows are divided evenly, by rank.

    Examples:
        >>> from keras import ops
        >>> from elephant.training.ops import alltoall
        >>> alltoall(ops.ones((2, 3))).shape[0]
        2
    """

    def exchanged(own: np.ndarray) -> np.ndarray:
        communicator, _ = api.current_exchange()
        _require_even(own, communicator.world_size)
        return np.concatenate(communicator.alltoall(np.split(own, communicator.world_size)))

    tensor = ops.convert_to_tensor(tensor)
    return _op(
        lambda own: exchanged(_brought(own)),
        lambda own, gradient: _back(exchanged(_weighed(gradient))),
        tensor,
        (_rows(tensor), *tensor.shape[1:]),
    )


def _op(
    forward: Callable[[np.ndarray], np.ndarray],
    backward: Callable[[np.ndarray, np.ndarray], np.ndarray],
    tensor: Any,
    shape: Sequence[int | None],
) -> Any:
    """Puts an operation of one tensor into the step."""

    def as_given(array: np.ndarray, like: np.ndarray) -> np.ndarray:
        return np.asarray(array, like.dtype)

    spec: Any = (tuple(shape), tensor.dtype)
    (result,) = current().host_op(
        lambda own: [_checked(as_given(forward(np.asarray(own)), own), shape)],
        lambda own, gradient: [as_given(backward(np.asarray(own), np.asarray(gradient)), own)],
        [tensor],
        [spec],
    )
    return result


def _checked(result: np.ndarray, shape: Sequence[int | None]) -> np.ndarray:
    if current().fixed_shapes and result.shape != tuple(shape):
        raise ConfigurationError(
            f"elephant.training.ops on {current().title}: expected the same number of rows from all ranks, {shape} in "
            f"all. Received: {result.shape}. Let all batches have the same number of rows."
        )
    return result


def _rows(tensor: Any, times: int = 1, *, divided: bool = False) -> int | None:
    """Returns how many rows come of a tensor's; None where that is known only when it is computed."""
    if not current().fixed_shapes:
        return None
    return tensor.shape[0] // api.current_exchange()[0].world_size if divided else tensor.shape[0] * times


def _wide(array: np.ndarray) -> np.ndarray:
    """Returns an array in a dtype in which ranks' values can be added up."""
    return array.astype(np.float32) if is_half(array.dtype) else array


def _brought(own: np.ndarray) -> np.ndarray:
    """Returns this rank's values; zeros where it has no rows."""
    return _wide(own) if api.current_exchange()[1] else np.zeros_like(_wide(own))


def _weighed(gradient: np.ndarray) -> np.ndarray:
    """Returns a gradient of this rank's loss as it counts in that of all ranks."""
    wide, share = _wide(gradient), api.current_exchange()[1]
    return wide * wide.dtype.type(share) if share else np.zeros_like(wide)


def _back(total: np.ndarray) -> np.ndarray:
    """Returns the gradient of what this rank has brought: the average multiplies it by this rank's part afterwards."""
    share = api.current_exchange()[1]
    return total / total.dtype.type(share) if share else np.zeros_like(total)


def _total(array: np.ndarray) -> np.ndarray:
    return api.current_exchange()[0].allreduce(array)


def _ranks_with_rows() -> float:
    communicator, share = api.current_exchange()
    return max(float(communicator.allreduce(np.array([float(share > 0)]))[0]), 1.0)


def _added(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the sum of arrays of one shape, in their order."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def _require_even(own: np.ndarray, world_size: int) -> None:
    if len(own) % world_size:
        raise ConfigurationError(
            f"tensor: expected rows that {world_size} ranks divide evenly. Received: {len(own)} rows."
        )
