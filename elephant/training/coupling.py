"""Losses and metrics that are no mean over the rows of a batch: made exact over the ranks, or refused.

Gradients are averaged with each rank's part of the rows, which is right where a batch's loss is the mean over its rows.
A mean over some of the elements, such as those that a mask or an ignored class leaves, is weighted by its part of
these, and a sum by one. Of anything else, such as a loss over pairs of rows, nothing of the model tells; it is found
by trying the loss out on a rank's first rows before any step.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from elephant.backends import current
from elephant.backends.gradient_averager import GradientAverager
from elephant.errors import UnsupportedError
from elephant.modeling.model_info import computes_own_loss, has_own_step, loss_name
from elephant.training.batch_means import counted_by_rows
from elephant.training.metric_sums import may_not_add_up, metrics_that_do_not_add_up

logger = logging.getLogger(__name__)

# So many rows tell; more would take longer.
MOST_ROWS = 32
_TOLERANCE = 1e-4
# Of computing in half precision.
_COARSE = 3e-2
# Of Keras, which compute each row by itself.
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
        self.is_by_row = _is_by_row(loss)
        self._loss = loss
        self._losses = losses

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self._loss(y_true, y_pred, sample_weight)
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

    Attributes:
        weigh: What is made of a loss' value; None where it stays, as in validation.
        losses: The losses, once Keras has made them of what was compiled.
    """

    def __init__(self, model: keras.Model, averager: GradientAverager) -> None:
        self.weigh: _Weigh | None = None
        self.losses: list[RankLoss] = []
        self._averager = averager
        self._kinds: Sequence[str] = ()
        compiled, step = getattr(model, "_compile_loss", None), model.train_step
        if compiled is None:
            return
        make = compiled.build

        def build(*args: Any, **kwargs: Any) -> None:
            make(*args, **kwargs)
            self._take_over(compiled)

        def train_step(*args: Any, **kwargs: Any) -> Any:
            with self._weighing(self._in_step):
                return step(*args, **kwargs)

        if compiled.built:
            self._take_over(compiled)
        compiled.build, model.train_step = build, train_step

    def _take_over(self, compiled: Any) -> None:
        entries = compiled._flat_losses
        self.losses = [RankLoss(entry.loss, self) for entry in entries]
        compiled._flat_losses = [entry._replace(loss=loss) for entry, loss in zip(entries, self.losses, strict=True)]
        self.settle(self._kinds)

    def settle(self, kinds: Sequence[str]) -> None:
        """Takes what a rank has found out by `try_out`.

        Args:
            kinds: Of each loss; empty where nothing was found out.
        """
        self._kinds = kinds
        for loss, kind in zip(self.losses, kinds, strict=False):
            loss.kind = kind

    @contextlib.contextmanager
    def _weighing(self, weigh: _Weigh) -> Iterator[None]:
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

        def factor(*known: np.ndarray) -> list[np.ndarray]:
            found = loss.factor(averager.share(), float(known[0]) if known else None, total)
            return [np.asarray(found, np.float32)]

        def total(elements: float) -> float:
            return float(averager.collective.allreduce(np.array([elements]))[0])

        given = [] if elements is None else [elements]
        (of_ranks,) = current().call_on_host(averager.noting_failure(factor), given, [((), "float32")])
        return value * ops.cast(of_ranks, value.dtype)

    def try_out(self, model: keras.Model, batch: Any, *, allowed: bool = False) -> None:
        """Finds out what each loss is, and whether the ranks' average is then the loss of all rows; warns of metrics.

        Some rows are computed together, and in two parts. Not where the loss draws at random, cannot be
        computed like this, or is not finite. The model's variables are afterwards as before.

        Args:
            batch: ``x``, ``y`` and ``sample_weight``, None for what there is not; tensors or numpy arrays (rows, ...).
            allowed: Warns where it would raise.

        Raises:
            UnsupportedError: The ranks' average would be another one.
        """
        tolerance = _COARSE if model.compute_dtype not in ("float32", "float64") else _TOLERANCE
        batch = keras.tree.map_structure(_as_tensor, batch)
        state = [(variable, ops.convert_to_numpy(variable)) for variable in model.non_trainable_variables]
        try:
            found = self._tried(model, batch, tolerance)
            num_rows = _num_rows(batch)
            first = num_rows - max(num_rows // 3, 1)
            parts = [_rows_between(batch, 0, first), _rows_between(batch, first, num_rows)] if first else []
            metrics = metrics_that_do_not_add_up(model, batch, parts, _computing_metrics(model)) if parts else []
        except Exception as error:
            logger.info("the loss was not tried out: %s: %s", type(error).__name__, error)
            return
        finally:
            for variable, value in state:
                variable.assign(value)
            model.reset_metrics()
        if metrics:
            warnings.warn(
                f"metrics: expected metrics that add up over parts of the rows. Received: {', '.join(metrics)}. "
                "Of several workers their numbers are not those of one process.",
                stacklevel=2,
            )
        if found is None or _is_mean(*found, tolerance):
            return
        whole, parts, rows = found
        remedy = "Return a value of each row. "
        if any(layer._losses for layer in model._flatten_layers()):
            remedy = "Keras adds up what add_loss gets: pass it a mean, self.add_loss(keras.ops.mean(loss)). "
        elif self.losses and all(loss.is_by_row for loss in self.losses):
            remedy = (
                "The compiled losses are of single rows: so rows meet in the model's call or in a layer, as in a "
                "tensordot over all axes. Compute each row by itself. "
            )
        text = (
            "loss: expected the mean over the rows of a batch, or their sum, without which N workers do not give what "
            f"one process does. Received: {whole:.6g} of {sum(rows)} rows together, and "
            f"{np.average(parts, weights=rows):.6g} as the mean of their parts. {remedy}"
        )
        if not allowed:
            raise UnsupportedError(
                text + "Or pass allowBatchCoupledLoss=True: each worker then computes it on the rows of its own batch."
            )
        warnings.warn(text + "allowBatchCoupledLoss=True lets it be so.", stacklevel=2)

    def _tried(self, model: keras.Model, batch: Any, tolerance: float) -> tuple[float, list[float], list[int]] | None:
        """Returns the loss of some rows, and of two parts of them as ranks would have it, and the parts' rows."""
        num_rows = _num_rows(batch)
        rows = [num_rows - max(num_rows // 3, 1), max(num_rows // 3, 1)]
        if num_rows < 2:
            return None
        whole = self._computed(model, batch)
        if self._computed(model, batch).loss != whole.loss:
            return None
        batches = [_rows_between(batch, 0, rows[0]), _rows_between(batch, rows[0], num_rows)]
        parts = [self._computed(model, part) for part in batches]
        if not np.isfinite([whole.loss, *(part.loss for part in parts)]).all():
            return None
        shares = [count / num_rows for count in rows]
        for loss, value in whole.values.items():
            loss.kind = _kind(loss, value, [part.values[loss] for part in parts], shares, tolerance)
        weighted = [self._computed(model, part, share, whole).loss for part, share in zip(batches, shares, strict=True)]
        return whole.loss, weighted, rows

    def _computed(
        self, model: keras.Model, batch: Any, share: float = 1.0, whole: _Computed | None = None
    ) -> _Computed:
        """Returns the loss of an inference on a batch, or on a rank's part of a whole with this share."""
        values: dict[RankLoss, tuple[float, float | None]] = {}

        def noted(loss: RankLoss, value: Any, elements: Any) -> Any:
            values[loss] = _number(value), None if elements is None else _number(elements)
            if whole is None:
                return value
            return value * loss.factor(share, values[loss][1], lambda _: whole.values[loss][1] or 0.0)

        x, y, weights = batch
        outputs = model(x, training=False)
        with self._weighing(noted):
            loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=False)
        return _Computed(_number(loss), values)


def may_couple_rows(model: keras.Model) -> bool:
    """Returns whether more than Keras' losses and metrics of single rows makes up what a model is trained with.

    That of a ``train_step`` of its own nobody can try out.
    """
    if has_own_step(model):
        return False
    if computes_own_loss(model) or may_not_add_up(model):
        return True
    return not all(_is_by_row(loss) for loss in keras.tree.flatten(getattr(model, "loss", None)) if loss is not None)


class _Computed(NamedTuple):
    """The loss of some rows, and each compiled loss' value of them with the number of its elements."""

    loss: float
    values: dict[RankLoss, tuple[float, float | None]]


def _is_by_row(loss: Any) -> bool:
    code = getattr(loss, "fn", loss)
    module = "keras." if isinstance(code, str) else str(getattr(code, "__module__", type(code).__module__))
    by_row = module.startswith("keras.") and loss_name(code) in _BY_ROW
    # Along an axis that was chosen it may look at several rows.
    along_rows = getattr(loss, "_fn_kwargs", {}).get("axis", -1) != -1
    return by_row and not along_rows and getattr(loss, "reduction", None) in (*_MEANS, None)


def _elements(loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Returns by what Keras divides a sum over elements, where it tells, None where it does not."""
    counted_in = current().count_dtype
    mask, ignored = _mask_of(y_pred), getattr(loss, "ignore_class", None)
    if ignored is not None:
        counted = ops.not_equal(y_true, ops.cast(ignored, keras.backend.standardize_dtype(y_true.dtype)))
        mask = counted if mask is None else ops.logical_and(ops.reshape(counted, ops.shape(mask)), mask)
    if loss.reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = ops.cast(sample_weight, counted_in)
        if mask is None:
            return ops.sum(weights)
        missing = len(mask.shape) - len(weights.shape)
        weights = ops.reshape(weights, (*ops.shape(weights), *(1,) * missing)) if missing > 0 else weights
        return ops.sum(ops.cast(mask, counted_in) * weights)
    return None if mask is None else ops.sum(ops.cast(mask, counted_in))


def _mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras has given to a tensor; not every backend's tensors carry it themselves."""
    from keras.src import backend

    ask = getattr(backend, "get_keras_mask", None)
    return getattr(tensor, "_keras_mask", None) if ask is None else ask(tensor)


def _kind(
    loss: RankLoss,
    whole: tuple[float, float | None],
    parts: Sequence[tuple[float, float | None]],
    shares: Sequence[float],
    tolerance: float,
) -> str:
    """Returns the kind of a loss by how its parts make the whole; the one taken for granted where none does."""
    given = loss.kind
    for loss.kind in dict.fromkeys([given, ROWS, SUM]):
        factors = [
            loss.factor(share, part[1], lambda _: whole[1] or 0.0) for share, part in zip(shares, parts, strict=True)
        ]
        if _is_mean(
            whole[0], [part[0] * factor for part, factor in zip(parts, factors, strict=True)], shares, tolerance
        ):
            return loss.kind
    return given


def _is_mean(whole: float, parts: Sequence[float], weights: Sequence[float], tolerance: float) -> bool:
    mean = float(np.average(parts, weights=weights))
    return abs(whole - mean) <= tolerance * max(abs(whole), *map(abs, parts)) + 1e-7


def _computing_metrics(model: keras.Model) -> Callable[..., object]:
    """Returns a function that has a model's metrics look at a batch: ``x``, ``y``, ``sample_weight``."""

    def compute(x: Any, y: Any, sample_weight: Any) -> None:
        with counted_by_rows(x):
            model.compute_metrics(x, y, model(x, training=False), sample_weight)

    return compute


def _number(scalar: Any) -> float:
    # PyTorch warns of a float of what has a gradient.
    return float(keras.ops.convert_to_numpy(scalar))


def _as_tensor(array: Any) -> Any:
    """Returns a tensor in place of an array, as a step gets it; strings and sparse tensors are tensors already."""
    return ops.convert_to_tensor(array) if isinstance(array, np.ndarray) else array


def _num_rows(batch: Any) -> int:
    return int(keras.tree.flatten(batch[0])[0].shape[0])


def _rows_between(batch: Any, first: int, last: int) -> Any:
    return keras.tree.map_structure(lambda array: None if array is None else array[first:last], batch)
