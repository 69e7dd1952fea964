"""Losses and metrics that are no mean over the rows of a batch: made exact over the ranks, or refused.

Gradients are averaged with each rank's part of the rows, which is right where a batch's loss is the mean over its rows.
A mean over some of the elements, such as those that a mask or an ignored class leaves, is weighted by its part of
these, and a sum by one. Of anything else, such as a loss over pairs of rows, nothing of the model tells; it is found
by trying model and loss out on some of a rank's rows before any step, and the loss on the others by and by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from elephant.backends import current
from elephant.backends.gradient_averager import GradientAverager
from elephant.backends.keras_private import compiled_loss, loss_options, replace_losses
from elephant.errors import UnsupportedError
from elephant.modeling.model_info import loss_name
from elephant.rank.trials.row_dependence import mask_of

# Keras' losses that compute each row by itself.
_BY_ROW = frozenset({
    "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy",
    "categorical_hinge", "cosine_similarity", "hinge", "huber", "kl_divergence", "kld", "kldivergence", "log_cosh",
    "logcosh", "mae", "mape", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
    "mean_squared_logarithmic_error", "mse", "msle", "poisson", "sparse_categorical_crossentropy", "squared_hinge",
})  # fmt: skip

_MEANS = ("sum_over_batch_size", "mean")

# What a loss is: a mean over rows; a mean over elements that are counted, and over rows where none are; a sum.
KINDS = ROWS, ELEMENTS, SUM = "rows", "elements", "sum"

# Takes a loss, its value of this rank's rows, and over how many elements it is the mean, None where nobody knows.
_Weigh = Callable[["RankLoss", Any, Any], Any]


class RankLoss(keras.losses.Loss):
    """One of a model's compiled losses, which counts in the average over the ranks as it does in one process.

    Attributes:
        kind: `ROWS`, `ELEMENTS` or `SUM`.
        is_by_row: Whether it is one of Keras' that compute each row by itself.
    """

    def __init__(self, loss: keras.losses.Loss, losses: RankLosses) -> None:
        super().__init__(name=loss.name, reduction=loss.reduction, dtype=loss.dtype)
        self.kind = SUM if loss.reduction == "sum" else ELEMENTS
        self.is_by_row = is_by_row(loss)
        self._loss = loss
        self._losses = losses

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        # Keras multiplies a mask into PyTorch's tensor itself, which metrics look at afterwards.
        value = self._loss(y_true, y_pred, None if sample_weight is None else ops.copy(sample_weight))
        if self._losses.weigh is None:
            return value
        return self._losses.weigh(self, value, _elements(self._loss, y_true, y_pred, sample_weight))

    def factor(self, share: float, elements: float | None, total: Callable[[float], float]) -> float:
        """Returns the factor of a rank's value, so that the average by rows is the loss of all rows.

        Args:
            elements: Over how many elements its value is the mean; None where nobody knows.
        """
        if self.kind == SUM:
            return 1.0 / share if share else 0.0
        if self.kind == ROWS or elements is None:
            return 1.0
        of_all = total(elements if share else 0.0)
        return elements / (of_all * share) if of_all and share else 1.0


class RankLosses:
    """A model's compiled losses, weighted in every training step so that their average is the loss of all rows.

    Args:
        model: A compiled model; its ``train_step`` and the losses that it was compiled with are replaced.
        averager: Of the ranks' gradients; None where a server weighs them by rows, and knows nothing else of losses.

    Attributes:
        weigh: What is made of a loss' value; None where it stays, as in validation.
        losses: The losses, once Keras has made them of what was compiled.
    """

    def __init__(self, model: keras.Model, averager: GradientAverager | None) -> None:
        self.weigh: _Weigh | None = None
        self.losses: list[RankLoss] = []
        self._averager = averager
        self._kinds: Sequence[str] = ()
        compiled, step = compiled_loss(model), model.train_step
        if compiled is None:
            return
        make = compiled.build

        def build(*args: Any, **kwargs: Any) -> None:
            make(*args, **kwargs)
            self._take_over(compiled)

        def train_step(*args: Any, **kwargs: Any) -> Any:
            with self.weighing(self._in_step):
                return step(*args, **kwargs)

        if compiled.built:
            self._take_over(compiled)
        compiled.build, model.train_step = build, train_step

    def _take_over(self, compiled: Any) -> None:
        self.losses = replace_losses(compiled, lambda loss: RankLoss(loss, self))
        self.settle(self._kinds)

    def settle(self, kinds: Sequence[str]) -> None:
        """Takes what a rank has found out by `elephant.rank.trials.loss_trial.try_out`.

        Args:
            kinds: Of each loss; empty where nothing was found out.
        """
        self._kinds = kinds
        for loss, kind in zip(self.losses, kinds, strict=False):
            loss.kind = kind

    @contextlib.contextmanager
    def weighing(self, weigh: _Weigh) -> Iterator[None]:
        """Makes of every loss' value what a function makes of it, in the block of a ``with`` statement."""
        self.weigh = weigh
        try:
            yield
        finally:
            self.weigh = None

    def _in_step(self, loss: RankLoss, value: Any, elements: Any) -> Any:
        """Puts the factor into the step by a call on the host, which is where the other ranks are known."""
        if loss.is_by_row and elements is None:
            return value
        averager = self._averager
        if averager is None:
            require_mean_of_rows(loss, counts_elements=elements is not None)
            return value

        def factor(*known: np.ndarray) -> list[np.ndarray]:
            found = loss.factor(averager.share(), float(known[0]) if known else None, total)
            return [np.asarray(found, np.float32)]

        def total(elements: float) -> float:
            return float(averager.communicator.allreduce(np.array([elements]))[0])

        given = [] if elements is None else [elements]
        (of_ranks,) = current().call_on_host(averager.noting_failure(factor), given, [((), "float32")])
        return value * ops.cast(of_ranks, value.dtype)


def require_mean_of_rows(loss: RankLoss, *, counts_elements: bool) -> None:
    """Raises UnsupportedError for a loss that a server cannot average, which weighs gradients by rows alone."""
    if loss.kind == SUM or (loss.kind == ELEMENTS and counts_elements):
        received = "a sum" if loss.kind == SUM else "a mean over elements, such as those that a mask leaves"
        raise UnsupportedError(
            "loss: expected a mean over the rows of a batch with aggregation='server', which weighs the gradients of "
            f"workers by their rows. Received: {loss.name!r}, which is {received}. Use aggregation='allreduce'.",
            topic="a-loss-that-depends-on-several-rows",
        )


def is_by_row(loss: Any) -> bool:
    """Returns whether a compiled loss, or the name of one, is one of Keras' that compute each row by itself."""
    code = getattr(loss, "fn", loss)
    module = "keras." if isinstance(code, str) else str(getattr(code, "__module__", type(code).__module__))
    by_row = module.startswith("keras.") and loss_name(code) in _BY_ROW
    # Along an axis that was chosen it may look at several rows.
    along_rows = loss_options(loss).get("axis", -1) != -1
    return by_row and not along_rows and getattr(loss, "reduction", None) in (*_MEANS, None)


def _elements(loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Returns by what Keras divides a sum over elements, where it tells, None where it does not."""
    counted_in = current().count_dtype
    mask, ignored = mask_of(y_pred), getattr(loss, "ignore_class", None)
    if ignored is not None:
        counted = ops.not_equal(y_true, ops.cast(ignored, keras.backend.standardize_dtype(y_true.dtype)))
        mask = counted if mask is None else ops.logical_and(ops.reshape(counted, ops.shape(mask)), mask)
    if loss.reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = ops.cast(sample_weight, counted_in)
        if mask is None:
            return ops.sum(weights)
        missing = len(mask.shape) - len(weights.shape)
        # Weights may have a last axis of one, as labels have.
        weights = ops.squeeze(weights, -1) if missing == -1 else weights
        weights = ops.reshape(weights, (*ops.shape(weights), *(1,) * missing)) if missing > 0 else weights
        return ops.sum(ops.cast(mask, counted_in) * weights)
    return None if mask is None else ops.sum(ops.cast(mask, counted_in))
