"""What a model takes and gives, read off the model once: shapes, dtype, and what its loss makes of its output."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras

from elephant.data.nest import Nest, from_json
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
class InputFacts:
    """One input of a model.

    Args:
        name: Keras' name of it.
        shape: Shape of one row, None where a dimension is free.
        dtype: Type of its elements; ``"string"`` for strings.
        sparse: Whether it takes sparse tensors.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    sparse: bool = False


@dataclass(frozen=True)
class OutputFacts:
    """One output of a model, and what its loss makes of it.

    Args:
        name: Keras' name of it.
        shape: Shape of one row; None when unknown.
        kind: ``"classes"`` (one probability per class), ``"binary"`` (the probability of class 1),
            ``"value"`` (one number) or ``"array"``.
        from_logits: Whether a classifier's output still needs its softmax or sigmoid.
        label_shape: Shape of one row's label where the output tells it, and None elsewhere.
        has_loss: Whether a loss compares it with labels.
    """

    name: str
    shape: tuple[int | None, ...] | None
    kind: str
    from_logits: bool
    label_shape: tuple[int | None, ...] | None
    has_loss: bool = True


@dataclass(frozen=True)
class ModelFacts:
    """What the rest of elephant needs to know of a model.

    Args:
        inputs: Its inputs; none when they are unknown, as those of a subclass that was not built from `keras.Input`.
        outputs: Its outputs; one without a shape when they are unknown.
        x: How the inputs are nested.
        y: How the outputs are.
        dtype: The model's floating-point type, for labels and weights.
        scheduled_rate: Whether the optimizer's learning rate follows a schedule.
        own_step: Whether its class has a ``train_step`` of its own.
    """

    inputs: tuple[InputFacts, ...]
    outputs: tuple[OutputFacts, ...]
    x: Nest
    y: Nest
    dtype: str
    scheduled_rate: bool
    own_step: bool

    @classmethod
    def of(cls, model: keras.Model) -> ModelFacts:
        """Reads the facts off a compiled model; raises when it is of a form that cannot be trained here."""
        inputs = list(getattr(model, "inputs", None) or [])
        structure = getattr(model, "_inputs_struct", None)
        names = _names(structure, [str(tensor.name) for tensor in inputs])
        floatx = keras.backend.floatx()
        return cls(
            inputs=tuple(_input_facts(name, tensor) for name, tensor in zip(names, inputs, strict=True)),
            outputs=_outputs_of(model),
            x=_nest_like(structure, inputs),
            y=_nest_like(getattr(model, "_outputs_struct", None), getattr(model, "outputs", None) or []),
            dtype="float64" if floatx == "float64" else "float32",
            scheduled_rate=_is_scheduled(model.optimizer),
            own_step=has_own_step(model),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a form that JSON holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, form: dict[str, Any]) -> ModelFacts:
        """Returns what `to_json` was made of."""
        inputs = (InputFacts(**{name: _tuple(value) for name, value in part.items()}) for part in form["inputs"])
        outputs = (OutputFacts(**{name: _tuple(value) for name, value in part.items()}) for part in form["outputs"])
        nests = {name: from_json(form[name]) for name in ("x", "y")}
        return cls(**{**form, **nests, "inputs": tuple(inputs), "outputs": tuple(outputs)})


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


def _input_facts(name: str, tensor: Any) -> InputFacts:
    return InputFacts(
        name=name,
        shape=tuple(tensor.shape[1:]),
        dtype=str(keras.backend.standardize_dtype(tensor.dtype)),
        sparse=bool(getattr(tensor, "sparse", False)),
    )


def _outputs_of(model: keras.Model) -> tuple[OutputFacts, ...]:
    tensors = list(getattr(model, "outputs", None) or [])
    given = [str(name) for name in getattr(model, "output_names", None) or ["output"] * max(len(tensors), 1)]
    names = _names(getattr(model, "_outputs_struct", None), given)
    # A train_step of the user's own computes its losses itself.
    losses = _losses_by_output(model.loss, names, given)
    return tuple(
        _output_facts(name, None if not tensors else tuple(tensors[place].shape[1:]), losses[place])
        for place, name in enumerate(names)
    )


def _output_facts(name: str, shape: tuple[int | None, ...] | None, loss: Any) -> OutputFacts:
    check_reduction(loss)
    return OutputFacts(
        name=name,
        shape=shape,
        kind=_output_kind("" if loss is None else _loss_name(loss), shape),
        from_logits=_from_logits(loss),
        label_shape=None if loss is None else _label_shape(loss, shape),
        has_loss=loss is not None,
    )


def _names(structure: Any, given: list[str]) -> list[str]:
    """Returns the keys of a model's dictionary of tensors, in their order as a list; the tensors' own names else."""
    if isinstance(structure, dict) and len(structure) == len(given):
        return sorted(structure)
    return given


def _losses_by_output(loss: Any, names: list[str], given: list[str]) -> list[Any]:
    """Returns the loss of each output, in whichever of Keras' forms they were compiled.

    Args:
        loss: What the model was compiled with.
        names: Of the outputs; in a dictionary of outputs its keys.
        given: Keras' own names of them.
    """
    if isinstance(loss, dict):
        return [loss.get(name, loss.get(other)) for name, other in zip(names, given, strict=True)]
    if isinstance(loss, (list, tuple)):
        if len(loss) != len(names):
            raise ConfigurationError(f"model: expected one loss for each of {len(names)} outputs. Received: {loss!r}.")
        return list(loss)
    return [loss] * len(names)


def _nest_like(structure: Any, tensors: Sequence[Any]) -> Nest:
    if structure is None or not isinstance(structure, (dict, list, tuple)):
        return 0 if len(tensors) <= 1 else tuple(range(len(tensors)))
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    return from_json(keras.tree.map_structure(lambda tensor: places[id(tensor)], structure))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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
