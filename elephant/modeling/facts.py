"""What a model takes and gives, read off the model once: shapes, dtype, and what its loss makes of its output."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import keras

from elephant.errors import ConfigurationError, UnsupportedError

CLASSES, BINARY, VALUE, ARRAY = "classes", "binary", "value", "array"

_CLASS_LOSSES = {
    "categorical_crossentropy",
    "sparse_categorical_crossentropy",
    "categorical_focal_crossentropy",
}
_BINARY_LOSSES = {"binary_crossentropy", "binary_focal_crossentropy"}
_MEAN_REDUCTIONS = {"sum_over_batch_size", "mean"}


@dataclass(frozen=True)
class ModelFacts:
    """What the rest of elephant needs to know of a model.

    Args:
        input_shape: Shape of one input row, None where a dimension is free; None when unknown.
        input_dtype: Type of the input's elements.
        output_shape: Shape of one output row; None when unknown.
        output_kind: ``"classes"`` (one probability per class), ``"binary"`` (the
            probability of class 1), ``"value"`` (one number) or ``"array"``.
        from_logits: Whether a classifier's output still needs its softmax or sigmoid.
        dtype: The model's floating-point type, for labels and weights.
        label_shape: Shape of one row's label where the output tells it, and None elsewhere.
        scheduled_rate: Whether the optimizer's learning rate follows a schedule.
    """

    input_shape: tuple[int | None, ...] | None
    input_dtype: str
    output_shape: tuple[int | None, ...] | None
    output_kind: str
    from_logits: bool
    dtype: str
    label_shape: tuple[int | None, ...] | None
    scheduled_rate: bool

    @classmethod
    def of(cls, model: keras.Model) -> ModelFacts:
        """Reads the facts off a compiled model; raises when it is of a form that cannot be trained here."""
        inputs = _single(getattr(model, "inputs", None), "input", model)
        outputs = _single(getattr(model, "outputs", None), "output", model)
        # A train_step of the user's own computes its losses itself.
        loss = None if has_own_step(model) and model.loss is None else _single_loss(model.loss)
        check_reduction(loss)
        output_shape = None if outputs is None else tuple(outputs.shape[1:])
        floatx = keras.backend.floatx()
        input_dtype = floatx if inputs is None else keras.backend.standardize_dtype(inputs.dtype)
        return cls(
            input_shape=None if inputs is None else tuple(inputs.shape[1:]),
            input_dtype=input_dtype,
            output_shape=output_shape,
            output_kind=_output_kind("" if loss is None else _loss_name(loss), output_shape),
            from_logits=_from_logits(loss),
            dtype="float64" if floatx == "float64" else "float32",
            label_shape=None if loss is None else _label_shape(loss, output_shape),
            scheduled_rate=_is_scheduled(model.optimizer),
        )


def has_own_step(model: keras.Model) -> bool:
    """Returns whether the model's class has a ``train_step`` of its own, as a GAN or a VAE has."""
    return type(model).train_step is not keras.Model.train_step


def check_reduction(loss: Any) -> None:
    """Raises UnsupportedError unless a batch's loss is the mean over its rows.

    Only then is the average of the ranks' gradients, weighted by their rows, the
    gradient of all rows together.
    """
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction not in _MEAN_REDUCTIONS:
        raise UnsupportedError(
            f"loss: expected the reduction 'sum_over_batch_size'. Received: {reduction!r}, "
            "for which N workers would not give what one process gives. Compile with "
            "reduction='sum_over_batch_size' and scale the learning rate instead."
        )


def _single(tensors: Any, what: str, model: keras.Model) -> Any:
    tensors = keras.tree.flatten(tensors) if tensors is not None else []
    if len(tensors) > 1:
        raise UnsupportedError(
            f"model: expected one {what}. Received: {model.name!r} with {len(tensors)} {what}s, "
            "which this version of elephant does not train."
        )
    return tensors[0] if tensors else None


def _single_loss(loss: Any) -> Any:
    losses = [item for item in keras.tree.flatten(loss) if item is not None]
    if len(losses) != 1:
        raise ConfigurationError(f"model: expected one loss. Received: {loss!r}.")
    return losses[0]


def _loss_name(loss: Any) -> str:
    """Returns the loss' name as Keras spells its function, whichever form the user chose.

    >>> _loss_name("sparse_categorical_crossentropy"), _loss_name("BinaryCrossentropy")
    ('sparse_categorical_crossentropy', 'binary_crossentropy')
    """
    if isinstance(loss, str):
        name = loss
    elif inspect.isfunction(loss):
        name = loss.__name__
    else:
        name = type(loss).__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _from_logits(loss: Any) -> bool:
    return bool(loss.get_config().get("from_logits", False)) if isinstance(loss, keras.losses.Loss) else False


def _output_kind(loss_name: str, output_shape: tuple[int | None, ...] | None) -> str:
    units = output_shape[0] if output_shape is not None and len(output_shape) == 1 else None
    if loss_name in _CLASS_LOSSES and output_shape is None or loss_name in _CLASS_LOSSES and (units or 0) > 1:
        return CLASSES
    if loss_name in _BINARY_LOSSES and units == 1:
        return BINARY
    return VALUE if units == 1 else ARRAY


def _label_shape(loss: Any, output_shape: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
    # A loss of the user's own may take labels of any shape.
    of_keras = isinstance(loss, str) or (
        inspect.getmodule(type(loss) if not inspect.isfunction(loss) else loss) or keras
    ).__name__.startswith("keras.")
    return None if not of_keras or _loss_name(loss).startswith("sparse_") else output_shape


def _is_scheduled(optimizer: keras.optimizers.Optimizer) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return isinstance(getattr(inner, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule)
