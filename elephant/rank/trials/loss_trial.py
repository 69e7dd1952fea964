"""Trial of model and losses on a rank's rows, before any step: whether the average over the ranks is that of all rows.

Models that are made of Keras' layers and losses of single rows need none.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from elephant.backends.keras_private import added_losses, flat_layers, loss_function
from elephant.errors import UnsupportedError
from elephant.modeling.model_info import has_own_step
from elephant.rank.metrics.batch_means import counted_by_rows
from elephant.rank.metrics.metric_sums import may_not_add_up, metrics_that_do_not_add_up
from elephant.rank.trials.coupling import ROWS, SUM, RankLoss, RankLosses, is_by_row
from elephant.rank.trials.row_dependence import (
    RowTrial,
    as_tensor,
    may_depend,
    rows_worth_trying,
    take_rows,
    try_rows,
    undisturbed,
)

logger = logging.getLogger(__name__)

# Returns so many rows of a shard as a batch, at each turn others; None after the last one.
Sample = Callable[[int, int], Any]

# A loss alone is soon computed, and so of more rows than a model.
_MOST_OF_LOSS = 256
_MOST_ELEMENTS = 1 << 22
# Rows whose outputs are tried for those that differ most in their loss.
_CANDIDATES = 6
# For the losses of other rows, before any step.
_FIRST_S = 0.03
_TOLERANCE = 1e-4
# The error of computing in half precision.
_COARSE = 3e-2

_EXPECTED_LOSS = (
    "loss: expected the mean over the rows of a batch, or a compiled loss that is their sum, without which N workers "
    "do not give what one process does."
)
_MEET = (
    "rows meet in the model's call or in a layer, as in a mean over the first axis or a tensordot over all axes. "
    "Compute each row by itself."
)
_MEAN_OF_LAYER = "Keras adds up what add_loss gets: pass it a mean, self.add_loss(keras.ops.mean(loss)). "


class _Computed(NamedTuple):
    """The loss of some rows, and each compiled loss' value of them with the number of its elements."""

    loss: float
    losses: dict[RankLoss, tuple[float, float | None]]


def try_out(
    losses: RankLosses,
    model: keras.Model,
    batch: Any,
    *,
    sample: Sample | None = None,
    allowed: bool = False,
    metrics: bool = True,
) -> LossTrial | None:
    """Finds out whether rows meet in a model, what each loss is, and whether the ranks' average is that of all rows.

    The losses of some rows are computed together, and in two parts. Not where they draw at random, cannot be
    computed like this, or are not finite. The model's variables are afterwards as before.

    Args:
        losses: Those of the model.
        batch: ``x``, ``y`` and ``sample_weight``, None for what there is not; tensors or numpy arrays (rows, ...).
        sample: Gives other rows, for the losses alone.
        allowed: Warns where it would raise.
        metrics: Whether to look at the metrics too, and warn of those that do not add up.

    Returns:
        What tries the losses on further rows; None where there is nothing to try.

    Raises:
        UnsupportedError: The ranks' average would be another one.
    """
    tolerance = _COARSE if model.compute_dtype not in ("float32", "float64") else _TOLERANCE
    found: list[str] = []
    not_sums: list[str] = []
    trial = None
    try:
        with undisturbed(model) as reset:
            rows, row_trial = _rows_to_call(model, batch), None
            # Rows of arrays are sooner taken than those of tensors.
            if may_depend(model) and _num_rows(rows) > 1:
                row_trial = try_rows(model, rows[0], reset, tolerance)
            rows = keras.tree.map_structure(as_tensor, rows)
            if row_trial is not None:
                found += _meetings(model, row_trial, rows)
            if not found and _num_rows(rows) > 1 and _needs_trial(model, row_trial):
                trial = LossTrial(losses, model, row_trial, rows, tolerance, sample)
                found += trial.first(batch)
            if metrics:
                not_sums = _not_sums(model, rows)
    except Exception as error:
        logger.info("the loss was not tried out: %s: %s", type(error).__name__, error)
        trial = None
    if metrics and _num_rows(batch) < 2:
        warnings.warn(
            "loss: expected a worker with two rows or more, of which it is tried whether N workers do what one process "
            "does. Received: one row on each. A loss or model in which rows meet is not found.",
            stacklevel=2,
        )
    if not_sums:
        warnings.warn(
            f"metrics: expected metrics that add up over parts of the rows. Received: {', '.join(not_sums)}. "
            "Of several workers their numbers are not those of one process.",
            stacklevel=2,
        )
    refuse(found, allowed=allowed)
    return None if found else trial


def _rows_to_call(model: keras.Model, batch: Any) -> Any:
    """Returns as many rows of a batch as are worth calling a model with."""
    count = rows_worth_trying(model, batch[0])
    return take_rows(batch, np.arange(count) * _num_rows(batch) // max(count, 1))


def _needs_trial(model: keras.Model, row_trial: RowTrial | None) -> bool:
    """Returns whether the losses are to be tried, because of themselves or of outputs that could not be compared."""
    return _may_be_coupled(model) or (may_depend(model) and (row_trial is None or not row_trial.can_be_cut))


class LossTrial:
    """Losses of a model, tried on rows: of each batch together, and of two parts of it as ranks would have them.

    Args:
        row_trial: What calls of the model have found; None where it was not called, or calls could not be compared.
        rows: ``x``, ``y`` and ``sample_weight`` of the rows of the model's outputs.
        sample: Gives other rows.
    """

    def __init__(
        self,
        losses: RankLosses,
        model: keras.Model,
        row_trial: RowTrial | None,
        rows: Any,
        tolerance: float,
        sample: Sample | None,
    ) -> None:
        self._losses = losses
        self._model = model
        self._rows = rows
        self._tolerance = tolerance
        self._training = True
        self._outputs: Any = None
        if row_trial is not None and row_trial.can_be_cut:
            self._outputs = row_trial.outputs
        elif not may_depend(model):
            self._outputs = model(rows[0], training=False)
        self._sample = sample if self._outputs is not None else None
        self._turns = itertools.count()
        self._size = _num_rows(rows)
        self._ends = (0, 0)
        if self._outputs is not None:
            sizes = sum(math.prod(output.shape) for output in keras.tree.flatten(self._outputs))
            self._size = max(self._size, min(_MOST_ELEMENTS * self._size // max(sizes, 1), _MOST_OF_LOSS))

    def first(self, batch: Any) -> list[str]:
        """Finds out what the losses are, and tells in words where the ranks' average is then another one."""
        if self._outputs is None:
            batch = self._rows
        batch = take_rows(batch, np.arange(min(self._size, _num_rows(batch))))
        num_rows = _num_rows(batch)
        places = np.arange(num_rows) % _num_rows(self._rows)
        rows = self._with_outputs(batch, places)
        self._training = self._outputs is not None
        if self._draws(rows):
            self._training = False
            if self._draws(rows):
                raise ValueError("expected a loss that does not draw at random")
        computed, parts = (
            self._computed(rows),
            [self._computed(_rows_between(rows, *part)) for part in _parts(num_rows)],
        )
        if not np.isfinite([computed.loss, *(part.loss for part in parts)]).all():
            raise ValueError("expected a loss that is finite")
        shares = [(last - first) / num_rows for first, last in _parts(num_rows)]
        for loss, value in computed.losses.items():
            loss.kind = _kind(loss, value, [part.losses[loss] for part in parts], shares, self._tolerance)
        # Parts may be alike by chance in what a loss is about: those of another order are not, too.
        mixed = take_rows(batch, np.random.default_rng(0).permutation(num_rows))
        found, began = self._compared(rows) or self._compared(self._with_outputs(mixed, places)), time.monotonic()
        if not self.has_tried_all:
            self._ends = self._far_apart(batch)
        while not found and not self.has_tried_all and time.monotonic() - began < _FIRST_S:
            found = self.next()
        return found

    @property
    def has_tried_all(self) -> bool:
        """True if there are no other rows."""
        return self._sample is None

    def end(self) -> None:
        """Has no other rows tried."""
        self._sample = None

    def next(self) -> list[str]:
        """Tells in words where the ranks' average is not the loss of other rows than before; nothing where it is."""
        batch = None if self._sample is None else self._sample(self._size, next(self._turns))
        if batch is None:
            self.end()
            return []
        # Any outputs tell what a loss makes of other labels; most, if one part has others than the other part.
        middle = _parts(_num_rows(batch))[1][0]
        places = np.where(np.arange(_num_rows(batch)) < middle, *self._ends)
        return self._compared(self._with_outputs(batch, places))

    def _with_outputs(self, batch: Any, places: np.ndarray) -> Any:
        """Returns a batch as tensors, with the model's outputs of some of the rows that it was called with."""
        outputs = None if self._outputs is None else _cut(self._outputs, places, _num_rows(self._rows))
        return (*keras.tree.map_structure(as_tensor, batch), outputs)

    def _far_apart(self, batch: Any) -> tuple[int, int]:
        """Returns two of the rows with outputs: of these the losses of a batch are as different as any of some rows."""
        some = np.unique(np.linspace(0, _num_rows(self._rows) - 1, _CANDIDATES).astype(int))
        places = [np.full(_num_rows(batch), place) for place in some]
        losses = np.nan_to_num([self._computed(self._with_outputs(batch, one)).loss for one in places])
        return int(some[losses.argmin()]), int(some[losses.argmax()])

    def _draws(self, rows: Any) -> bool:
        one, other = (self._computed(rows).loss for _ in range(2))
        return one != other

    def _compared(self, rows: Any) -> list[str]:
        num_rows = _num_rows(rows)
        computed = self._computed(rows)
        shares = [(last - first) / num_rows for first, last in _parts(num_rows)]
        parts = [
            self._computed(_rows_between(rows, *part), share, computed).loss
            for part, share in zip(_parts(num_rows), shares, strict=True)
        ]
        if not np.isfinite([computed.loss, *parts]).all() or _is_mean(computed.loss, parts, shares, self._tolerance):
            return []
        remedy = "Return a value of each row. "
        if self._outputs is None and any(added_losses(layer) for layer in flat_layers(self._model)):
            remedy = _MEAN_OF_LAYER
        elif type(self._model).compute_loss is not keras.Model.compute_loss:
            remedy = "Return a mean from compute_loss: keras.ops.mean(loss). "
        elif self._losses.losses and all(loss.is_by_row for loss in self._losses.losses):
            remedy = f"The compiled losses are of single rows: so {_MEET} "
        return [
            f"{_EXPECTED_LOSS} Received: {computed.loss:.6g} of {num_rows} rows together, and "
            f"{np.average(parts, weights=shares):.6g} as the mean of their parts. {remedy}"
        ]

    def _computed(self, rows: Any, share: float = 1.0, computed: _Computed | None = None) -> _Computed:
        """Returns the loss of some rows, or of them as a rank's part of a whole with this share."""
        losses: dict[RankLoss, tuple[float, float | None]] = {}

        def noted(loss: RankLoss, value: Any, elements: Any) -> Any:
            losses[loss] = _number(value), None if elements is None else _number(elements)
            if computed is None:
                return value
            return value * loss.factor(share, losses[loss][1], lambda _: computed.losses[loss][1] or 0.0)

        x, y, weights, outputs = rows
        if outputs is None:
            outputs = self._model(x, training=False)
        compute = loss_function(self._model)
        with self._losses.weighing(noted):
            loss = compute(x=x, y=y, y_pred=outputs, sample_weight=weights, training=self._training)
        return _Computed(_number(loss), losses)


def may_couple_rows(model: keras.Model) -> bool:
    """Returns whether more than Keras' layers, losses and metrics of single rows makes up what a model is trained with.

    That of a ``train_step`` of its own nobody can try out.
    """
    if has_own_step(model):
        return False
    return may_depend(model) or may_not_add_up(model) or _may_be_coupled(model)


def _may_be_coupled(model: keras.Model) -> bool:
    """Returns whether a model has losses that are not known to be of single rows."""
    if type(model).compute_loss is not keras.Model.compute_loss:
        return True
    return not all(is_by_row(loss) for loss in keras.tree.flatten(getattr(model, "loss", None)) if loss is not None)


def refuse(found: Sequence[str], *, allowed: bool) -> None:
    """Raises UnsupportedError with what was found, if anything; warns of it where it is allowed."""
    if not found:
        return
    if not allowed:
        raise UnsupportedError(
            found[0] + "Or pass allowBatchCoupledLoss=True: each worker then computes it on the rows of its own batch, "
            "unless elephant.training.ops brings it those of the others.",
            topic="a-loss-that-depends-on-several-rows",
        )
    warnings.warn(found[0] + "allowBatchCoupledLoss=True lets it be so.", stacklevel=3)


def _meetings(model: keras.Model, row_trial: RowTrial, rows: Any) -> list[str]:
    """Tells in words where rows meet in a model's call and it matters, and where layers add what is no mean."""
    found = []
    for place, moved in enumerate(row_trial.moved):
        if moved is not None and _matters(model, row_trial.outputs, place, rows):
            found.append(
                f"model: expected rows of which each is computed by itself, without which N workers do not give what "
                f"one process does. Received: an output of {model.name!r} in which rows of a size of {moved[1]:.3g} "
                f"change by {moved[0]:.3g} with the other rows of their batch: {_MEET} Or take "
                "keras.layers.BatchNormalization and syncBatchNorm=True for means and variances. "
            )
    if row_trial.added is not None:
        found.append(
            f"{_EXPECTED_LOSS} Received: {row_trial.added.whole:.6g} from add_loss of some rows together, and "
            f"{row_trial.added.mean:.6g} as the mean of their parts. {_MEAN_OF_LAYER}"
        )
    return found


def _matters(model: keras.Model, outputs: Any, place: int, rows: Any) -> bool:
    """Returns whether a model's loss depends on one of its outputs."""
    x, y, weights = rows
    flat = keras.tree.flatten(outputs)
    values = ops.convert_to_numpy(flat[place])
    noise = np.random.default_rng(0).normal(size=values.shape, scale=1 + np.abs(values).max()).astype(values.dtype)
    changed = [*flat[:place], ops.convert_to_tensor(values + noise), *flat[place + 1 :]]
    compute = loss_function(model)
    try:
        one, other = (
            _number(compute(x=x, y=y, y_pred=given, sample_weight=weights, training=True))
            for given in (outputs, keras.tree.pack_sequence_as(outputs, changed))
        )
    except Exception as error:
        logger.info("the loss was not computed of other outputs: %s: %s", type(error).__name__, error)
        return True
    return one != other


def _not_sums(model: keras.Model, rows: Any) -> list[str]:
    """Returns the names of metrics that do not add up over parts of some rows."""
    if _num_rows(rows) < 2:
        return []
    parts = [_rows_between(rows, *part) for part in _parts(_num_rows(rows))]
    return metrics_that_do_not_add_up(model, rows, parts, _computing_metrics(model))


def _parts(num_rows: int) -> list[tuple[int, int]]:
    middle = num_rows - max(num_rows // 3, 1)
    return [(0, middle), (middle, num_rows)]


def _cut(outputs: Any, rows: np.ndarray, num_rows: int) -> Any:
    """Returns rows of tensors; what has none is the same for all."""

    def cut(output: Any) -> Any:
        has_rows = output is not None and len(output.shape) and output.shape[0] == num_rows
        return take_rows(output, rows) if has_rows else output

    return keras.tree.map_structure(cut, outputs)


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


def _num_rows(batch: Any) -> int:
    return int(keras.tree.flatten(batch[0])[0].shape[0])


def _rows_between(batch: Any, first: int, last: int) -> Any:
    return _cut(batch, np.arange(first, last), _num_rows(batch))
