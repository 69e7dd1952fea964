"""Whether the loss of a batch is the mean over its rows, tried out on a rank's first rows before any step.

Only then is the average of the ranks' gradients, weighted by their rows, the gradient of all rows together. A sum, a
mean over some of the rows' elements, and a loss over pairs of rows are none, and nothing of the model says so.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import keras
import numpy as np

from elephant.errors import UnsupportedError
from elephant.modeling.facts import has_own_step
from elephant.modeling.losses import loss_name

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


def may_couple_rows(model: keras.Model) -> bool:
    """Returns whether more than Keras' losses of single rows makes up a model's loss.

    That of a ``train_step`` of its own nobody can try out; layers that keep a state for every row of a batch would
    keep that of the try.

    Args:
        model: A compiled model.
    """
    if has_own_step(model) or any(getattr(layer, "stateful", False) for layer in model._flatten_layers()):
        return False
    if type(model).compute_loss is not keras.Model.compute_loss:
        return True
    if not all(_is_by_row(loss) for loss in keras.tree.flatten(getattr(model, "loss", None)) if loss is not None):
        return True
    return any(not type(layer).__module__.startswith("keras.") for layer in model._flatten_layers(include_self=True))


def check_rows_count_alone(model: keras.Model, batch: Any, *, allowed: bool = False) -> None:
    """Compares the loss of some rows with that of their parts.

    Not where an output carries a mask: Keras divides by what is not masked, which the documentation says. Nor where
    the loss draws at random, cannot be computed like this, or is not finite.

    Args:
        model: A built and compiled model; what it has counted is forgotten.
        batch: ``x``, ``y`` and ``sample_weight``, None for what there is not; tensors or numpy arrays (rows, ...).
        allowed: Warns where it would raise.

    Raises:
        UnsupportedError: They differ.
    """
    try:
        found = _whole_and_parts(model, batch)
    except Exception as error:
        logger.info("the loss was not tried out: %s: %s", type(error).__name__, error)
        return
    finally:
        model.reset_metrics()
    if found is None:
        return
    whole, parts, rows = found
    mean = float(np.average(parts, weights=rows))
    tolerance = _COARSE if model.compute_dtype not in ("float32", "float64") else _TOLERANCE
    if abs(whole - mean) <= tolerance * max(abs(whole), *map(abs, parts)) + 1e-7:
        return
    is_sum = abs(whole - sum(parts)) <= tolerance * abs(whole)
    text = (
        "loss: expected the mean over the rows of a batch, without which N workers do not give what one process does. "
        f"Received: {whole:.6g} of {sum(rows)} rows together, and {mean:.6g} as the mean of their parts by rows. "
        + ("It is their sum: divide it by the number of rows. " if is_sum else "Return a value of each row. ")
    )
    if not allowed:
        raise UnsupportedError(
            text + "Or pass allowBatchCoupledLoss=True: each worker then computes it on the rows of its own batch."
        )
    warnings.warn(text + "allowBatchCoupledLoss=True lets it be so.", stacklevel=2)


def _is_by_row(loss: Any) -> bool:
    if getattr(loss, "ignore_class", None) is not None:
        return False
    module = "keras." if isinstance(loss, str) else str(getattr(loss, "__module__", type(loss).__module__))
    return module.startswith("keras.") and loss_name(loss) in _BY_ROW


def _whole_and_parts(model: keras.Model, batch: Any) -> tuple[float, list[float], list[int]] | None:
    num_rows = int(keras.tree.flatten(batch[0])[0].shape[0])
    cut = num_rows - max(num_rows // 3, 1)
    if num_rows < 2:
        return None
    whole = _loss_of(model, batch)
    if whole is None or not np.isfinite(whole) or _loss_of(model, batch) != whole:
        return None
    ranges = [(0, cut), (cut, num_rows)]
    parts = [_loss_of(model, _rows_between(batch, first, last)) for first, last in ranges]
    known = [part for part in parts if part is not None and np.isfinite(part)]
    return (whole, known, [last - first for first, last in ranges]) if len(known) == len(parts) else None


def _loss_of(model: keras.Model, batch: Any) -> float | None:
    """Returns the loss of a batch as an inference computes it; None where an output carries a mask."""
    x, y, weights = batch
    outputs = model(x, training=False)
    if any(getattr(output, "_keras_mask", None) is not None for output in keras.tree.flatten(outputs)):
        return None
    return float(model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=False))


def _rows_between(batch: Any, first: int, last: int) -> Any:
    return keras.tree.map_structure(lambda array: None if array is None else array[first:last], batch)
