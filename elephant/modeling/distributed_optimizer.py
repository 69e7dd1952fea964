"""`elephant.DistributedOptimizer`: an optimizer for training loops of the user's own, under `elephant.run`.

It has the hook of a fit (`elephant.backends.Backend.average_gradients`) with another weighting: a
fit knows the rows of every step beforehand, a loop may tell its own as it goes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.gradient_averager import GradientAverager
from elephant.collective import api
from elephant.collective.communicator import Communicator
from elephant.collective.fusion import measure_link
from elephant.compression import check_compression
from elephant.errors import ConfigurationError
from elephant.modeling.variables import parts_of


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    num_rows: Callable[[], int] | None = None,
    compression: str | None = None,
    bucket_bytes: int | None = None,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer average the gradients over all ranks before it applies them.

    Every rank calls ``apply`` or ``apply_gradients`` equally often: in a loop, in a
    ``tf.function``, or through ``model.fit`` of a model compiled with the optimizer.
    Clipping, weight decay and moving averages of weights see the average. Gradients of
    embeddings stay slices. What a loop that is run eagerly looks up in a table counts as the
    model's own places, such as positions, as long as all ranks look up the same; a
    ``tf.function`` tells them apart. Let the ranks start from the same weights with
    `elephant.broadcast_variables`, and build and wrap the optimizer inside of the function
    that `elephant.run` runs.

    Args:
        optimizer: A Keras optimizer; with mixed_float16 the outermost one, which is
            ``keras.optimizers.LossScaleOptimizer(...)``.
        num_rows: Tells how many rows this rank brings to the step at hand; called on the host at
            every step. With it the average weighs each rank by its rows, which is exact for ragged
            batches and for ranks without rows. None weighs all ranks alike.
        compression: How gradients are encoded where they cross hosts; see `elephant.compression`.
        bucket_bytes: Gradients of about this many bytes travel together, while the next ones are
            computed. None measures the link between hosts and chooses, so that all ranks must call
            this at the same point; zero puts all in one bucket.

    Returns:
        The optimizer itself, which averages from now on; in a world of one nothing is changed.

    Raises:
        ConfigurationError: It is no optimizer, or averages already; and in the first step, when it
            is compiled by XLA or wrapped in a LossScaleOptimizer.
        UnsupportedError: Keras has a backend that elephant does not know.

    Examples:
        >>> import elephant
        >>> optimizer = elephant.DistributedOptimizer(keras.optimizers.Adam(name="adam"))
        >>> optimizer.name
        'adam'
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(f"optimizer: expected a keras.optimizers.Optimizer. Received: {optimizer!r}.")
    check_compression(compression)
    _refuse_wrapped(optimizer)
    communicator = api.current_collective()
    if communicator.world_size > 1:
        link = measure_link(communicator) if communicator.crosses_hosts and bucket_bytes is None else None
        share = RowShare(communicator, num_rows)
        averager = GradientAverager(communicator, share, compression=compression, bucket_bytes=bucket_bytes, link=link)
        _average_first(optimizer, averager)
    return optimizer


def broadcast_variables(variables: Sequence[Any], root: int = 0) -> None:
    """Gives every rank the root's values, so that all start alike.

    Args:
        variables: Variables of Keras or of its backend, such as ``model.variables`` or
            ``optimizer.variables``; the same shapes and dtypes in the same order on every rank.
        root: The rank whose values all get.

    Raises:
        ConfigurationError: There is no such rank, or something is no variable.
        NetworkError: Another rank is gone, too late, or has other variables.

    Examples:
        >>> import elephant
        >>> weight = keras.Variable([1.0, 2.0])
        >>> elephant.broadcast_variables([weight])
    """
    communicator = api.current_collective()
    for index, variable in enumerate(variables):
        if not hasattr(variable, "assign"):
            raise ConfigurationError(f"variables[{index}]: expected a variable. Received: {variable!r}.")
        value = np.array(keras.ops.convert_to_numpy(variable), order="C")
        communicator.broadcast_(value, root)
        if communicator.rank != root:
            variable.assign(value)


class RowShare:
    """This rank's part of the rows of all ranks in a step.

    Args:
        communicator: Connects the ranks.
        num_rows: This rank's rows; None stands for the same number on every rank.
    """

    def __init__(self, communicator: Communicator, num_rows: Callable[[], int] | None) -> None:
        self._communicator = communicator
        self._num_rows = num_rows

    def __call__(self) -> float:
        """Returns the part, from zero to one; all ranks call it."""
        if self._num_rows is None:
            return 1.0 / self._communicator.world_size
        rows = self._num_rows()
        total = np.array([rows], np.int64)
        if rows < 0:
            raise ConfigurationError(f"num_rows: expected a number of rows. Received: {rows!r}.")
        self._communicator.allreduce_(total)
        return float(rows / total[0]) if total[0] else 0.0


def _average_first(optimizer: keras.optimizers.Optimizer, averager: GradientAverager) -> None:
    backend = current()
    backend.average_gradients(averager, optimizer, None)
    api.register(averager)
    apply_averaged, looked = optimizer.apply, False

    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        nonlocal looked
        if not looked:
            _refuse_inner(optimizer)
        looked = True
        backend.refuse_step()
        try:
            return apply_averaged(grads, trainable_variables)
        except Exception as error:
            # A framework may raise an error of its own.
            if averager.error is not None and averager.error is not error:
                raise averager.error from error
            raise

    apply.averages_over_ranks = True  # type: ignore[attr-defined]
    optimizer.apply = apply


def _refuse_wrapped(optimizer: keras.optimizers.Optimizer) -> None:
    for part in (optimizer, getattr(optimizer, "inner_optimizer", None), *parts_of(optimizer)):
        if getattr(getattr(part, "apply", None), "averages_over_ranks", False):
            raise ConfigurationError(
                "optimizer: expected one that does not average over the ranks yet. Received: "
                f"{optimizer.name!r}, which was given to DistributedOptimizer before. Wrap it once, outermost."
            )


def _refuse_inner(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises when a LossScaleOptimizer calls: it would skip the exchange on ranks whose gradients overflow alone."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.optimizers.LossScaleOptimizer) and owner.inner_optimizer is optimizer:
            raise ConfigurationError(
                "optimizer: expected DistributedOptimizer outermost, so that all ranks see the same overflows. "
                "Received: one inside of a LossScaleOptimizer, which model.compile adds under mixed_float16. Pass "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        frame = frame.f_back
