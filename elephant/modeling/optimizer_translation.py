"""A Keras optimizer as a rule of the parameter server: its options as a JSON value, its slots as flat vectors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import BACKEND_CLASSES, decays, optimized_variables, rate_or_schedule, step_counter
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers import OPTIMIZERS, KnownOptimizer, rule_of

_SCHEDULES = (
    keras.optimizers.schedules.ExponentialDecay,
    keras.optimizers.schedules.InverseTimeDecay,
    keras.optimizers.schedules.PiecewiseConstantDecay,
    keras.optimizers.schedules.PolynomialDecay,
    keras.optimizers.schedules.CosineDecay,
    keras.optimizers.schedules.CosineDecayRestarts,
)
_WAY_OUT = (
    "Or let each worker train with its own optimizer, which may then be any, and exchange every few steps: frequency=k "
    "for k steps, or frequency='epoch'."
)


def translate(optimizer: keras.optimizers.Optimizer, layout: Layout) -> dict[str, Any]:
    """Returns the rule of the parameter server that does what an optimizer does, as a JSON value for ``rule_of``.

    The loss scale of a `LossScaleOptimizer` changes as it trains, so it stays with the workers: what they push is
    what its inner optimizer is given. A variable without a gradient in some step counts as one whose
    gradient is zero: Keras leaves it out, also from weight decay and from the decay of momentum.

    Raises:
        UnsupportedError: The rules do not have this optimizer, or an option of it.
        ConfigurationError: The optimizer is not built, or for other variables.
    """
    optimizer = inner_optimizer(optimizer)
    name, known = _known(optimizer)
    _check_options(optimizer)
    variables = _variables(optimizer, layout)
    spec = {"name": name, "learning_rate": _learning_rate(rate_or_schedule(optimizer))}
    spec |= {argument: _plain(getattr(optimizer, argument)) for argument in known.arguments}
    spec |= _weight_decay(optimizer, variables, layout) | _clip(optimizer)
    if optimizer.loss_scale_factor is not None:
        spec["loss_scale"] = float(optimizer.loss_scale_factor)
    rule_of(spec, layout)
    return spec


def slots_of(optimizer: keras.optimizers.Optimizer, layout: Layout) -> tuple[list[np.ndarray], int]:
    """Returns the slots of a built optimizer, for a server that goes on from there.

    Args:
        optimizer: As for ``translate``.
        layout: As for ``translate``.

    Returns:
        New float32 vectors of shape (``layout.num_values``,), in the order of the rule's slots, and the number
        of updates that the optimizer has applied.

    Raises:
        UnsupportedError: As for ``translate``.
        ConfigurationError: As for ``translate``.
    """
    optimizer = inner_optimizer(optimizer)
    slots = [
        layout.pack([keras.ops.convert_to_numpy(variable) for variable in variables])
        for variables in _slot_variables(optimizer, layout)
    ]
    return slots, int(keras.ops.convert_to_numpy(step_counter(optimizer)))


def restore_slots(
    optimizer: keras.optimizers.Optimizer, layout: Layout, slots: Sequence[np.ndarray], iterations: int
) -> None:
    """Gives an optimizer what a server has kept, so that it goes on from there.

    Args:
        optimizer: As for ``translate``.
        layout: As for ``translate``.
        slots: Float32 of shape (``layout.num_values``,) each, in the order of the rule's slots.

    Raises:
        UnsupportedError: As for ``translate``.
        ConfigurationError: As for ``translate``, or the slots are others than the rule's.
    """
    optimizer = inner_optimizer(optimizer)
    places = _slot_variables(optimizer, layout)
    received, expected = [np.shape(slot) for slot in slots], [(layout.num_values,)] * len(places)
    if received != expected:
        raise ConfigurationError(f"slots: expected vectors of the shapes {expected}. Received: {received}.")
    for flat, variables in zip(slots, places, strict=True):
        for view, variable in zip(layout.views(flat), variables, strict=True):
            variable.assign(view)
    step_counter(optimizer).assign(iterations)


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that a `LossScaleOptimizer` wraps, and any other one as it is."""
    return optimizer.inner_optimizer if type(optimizer) is keras.optimizers.LossScaleOptimizer else optimizer


def _known(optimizer: keras.optimizers.Optimizer) -> tuple[str, KnownOptimizer]:
    """Returns the name of an optimizer's rule, and the optimizer as parameter servers know it."""
    kind = _class_of(optimizer)
    for name, known in OPTIMIZERS.items():
        if kind is getattr(keras.optimizers, known.keras):
            return name, known
    names = ", ".join(known.keras for known in OPTIMIZERS.values())
    raise UnsupportedError(
        f"optimizer: expected one of {names}, exactly: a subclass may do anything else. "
        f"Received: {kind.__module__}.{kind.__qualname__}. Compile with one of them. {_WAY_OUT}"
    )


def _class_of(optimizer: keras.optimizers.Optimizer) -> type:
    """Returns an optimizer's class; where a backend has a class of its own in its place, Keras' one."""
    kind = type(optimizer)
    return next(one for one in kind.__mro__ if not one.__module__.startswith(BACKEND_CLASSES))


def _check_options(optimizer: keras.optimizers.Optimizer) -> None:
    kind = _class_of(optimizer)
    # Averages of weights are lost wherever servers keep the weights.
    ways_out = {"use_ema": "Or use mode='synchronous'.", "gradient_accumulation_steps": _WAY_OUT}
    for option, way_out in ways_out.items():
        if getattr(optimizer, option, None):
            raise UnsupportedError(
                f"optimizer: expected {kind.__name__} without {option}, which the parameter server does not have. "
                f"Received: {option}={getattr(optimizer, option)!r}. Compile without it. {way_out}"
            )


def _variables(optimizer: keras.optimizers.Optimizer, layout: Layout) -> list[Any]:
    """Returns the variables that the optimizer updates, in the order of the layout."""
    if not optimizer.built:
        raise ConfigurationError(
            f"optimizer: expected {optimizer.name!r} to be built. Call optimizer.build(model.trainable_variables)."
        )
    variables = list(optimized_variables(optimizer))
    received = [tuple(variable.shape) for variable in variables]
    expected = [segment.shape for segment in layout.segments]
    if received != expected:
        raise ConfigurationError(
            f"optimizer: expected it to be built for variables of the shapes {expected}. Received: {received}."
        )
    for variable in variables:
        _check_variable(variable)
    return variables


def _check_variable(variable: Any) -> None:
    constraint = getattr(variable, "constraint", None)
    if constraint is not None:
        raise UnsupportedError(
            f"model: expected variables without constraints, which the parameter server does not apply. Received: "
            f"{variable.path} with {type(constraint).__name__}. Build the layer without it. {_WAY_OUT}"
        )
    if getattr(variable, "overwrite_with_gradient", False):
        raise UnsupportedError(
            f"model: expected variables that an optimizer updates. Received: {variable.path}, whose gradient is its "
            f"new value, as float8 training has it. {_WAY_OUT}"
        )


def _learning_rate(rate: Any) -> float | dict[str, Any]:
    if isinstance(rate, keras.Variable):
        return float(keras.ops.convert_to_numpy(rate))
    if type(rate) not in _SCHEDULES:
        known = ", ".join(known.__name__ for known in _SCHEDULES)
        raise UnsupportedError(
            f"learning_rate: expected a number, or one of the schedules {known}, exactly. Received: {rate!r}, whose "
            f"values only this process can compute. Compile with one of them. {_WAY_OUT}"
        )
    options = {key: _plain(value) for key, value in rate.get_config().items() if key != "name"}
    first = options["values"][0] if "values" in options else rate.initial_learning_rate
    if not isinstance(first, float):
        raise UnsupportedError(
            f"learning_rate: expected a schedule that begins with a float. Received: {type(rate).__name__} that begins "
            f"with {first!r}, for which Keras computes in whole numbers. Write {float(first)!r}."
        )
    return {"schedule": _snake(type(rate).__name__), **options}


def _weight_decay(optimizer: keras.optimizers.Optimizer, variables: list[Any], layout: Layout) -> dict[str, Any]:
    if not optimizer.weight_decay:
        return {}
    asked = [current().decayed_variable(variable) for variable in variables]
    excluded = [
        [segment.start, segment.stop]
        for segment, variable in zip(layout.segments, asked, strict=True)
        if not decays(optimizer, variable)
    ]
    return {"weight_decay": {"rate": float(optimizer.weight_decay), "excluded": excluded}}


def _clip(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    # The order in which Keras asks.
    for option, name in (("clipnorm", "norm"), ("global_clipnorm", "global_norm"), ("clipvalue", "value")):
        limit = getattr(optimizer, option)
        if limit and limit > 0:
            return {"clip": {name: float(limit)}}
    return {}


def _slot_variables(optimizer: keras.optimizers.Optimizer, layout: Layout) -> list[list[Any]]:
    """Returns the variables of each slot, in the rule's order of slots and the layout's of variables."""
    rule = rule_of(translate(optimizer, layout), layout)
    _, known = _known(optimizer)
    return [list(getattr(optimizer, known.slots[name])) for name in rule.slots]


def _snake(name: str) -> str:
    """Returns a class' name as rules spell it.

    >>> _snake("CosineDecayRestarts")
    'cosine_decay_restarts'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value)
