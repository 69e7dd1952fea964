"""The rules by which a server applies what is pushed to it, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from elephant.errors import ConfigurationError
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers.base import Addition, Rule
from elephant.parameter_server.optimizers.rules import SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, RMSprop
from elephant.parameter_server.optimizers.schedules import schedule_of
from elephant.parameter_server.optimizers.wrappers import (
    Decayed,
    NormClipped,
    Unscaled,
    ValueClipped,
    clipping_of,
    without_clipping,
)

_WRAPPERS = ("weight_decay", "clip", "loss_scale")


def rule_of(spec: Mapping[str, Any], layout: Layout) -> Rule:
    """Returns the rule that a JSON value describes.

    Args:
        spec: ``{"name": "add"}``, or the ``"name"`` of an optimizer, its ``"learning_rate"`` (a number, or a schedule
            as for ``schedule_of``) and the arguments of its class. For all optimizers also:
            ``"weight_decay"``: ``{"rate": 0.01, "excluded": [[start, stop], ...]}``, where the pairs
            are what does not decay in the vector of all variables; ``"clip"``: ``{"norm": 1.0}`` for each
            variable, ``{"global_norm": 1.0}`` or ``{"value": 0.5}``; ``"loss_scale"``: what gradients are divided by.

    Raises:
        ConfigurationError: There is no such name, or no such option.

    >>> rule_of({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}, Layout([("a", (3,))])).slots
    ('momentum',)
    """
    spec, norms = without_clipping(spec)
    rule = _bare(spec)
    if spec.get("weight_decay") is not None:
        rule = _built(Decayed, spec, "weight_decay", rule)
    if spec.get("clip") is not None:
        rule = _built(_value_clipped, spec, "clip", rule)
    if spec.get("loss_scale") is not None:
        rule = Unscaled(rule, spec["loss_scale"])
    if norms:
        clipping_of(norms, layout)
        rule = NormClipped(rule, norms)
    return rule


def _bare(spec: Mapping[str, Any]) -> Rule:
    name = spec.get("name")
    if name == "add" and len(spec) == 1:
        return Addition()
    if name not in _OPTIMIZERS:
        raise ConfigurationError(
            f"rule: expected one of {', '.join(KNOWN)}, and no options for 'add'. Received: {dict(spec)!r}."
        )
    options = {key: value for key, value in spec.items() if key not in ("name", "learning_rate", *_WRAPPERS)}
    if not np.float32(options.get("epsilon", 1)) > 0:
        # Where a gradient has always been zero, as between two variables, the weight would become NaN.
        raise ConfigurationError(f"epsilon: expected a float32 above zero. Received: {options['epsilon']!r}.")
    rate = schedule_of(spec.get("learning_rate"))
    try:
        return _OPTIMIZERS[name](learning_rate=rate, **options)
    except TypeError as error:
        raise ConfigurationError(f"rule: expected options of {name!r}. Received: {dict(spec)!r} ({error}).") from error


def _built(wrapper: Callable[..., Rule], spec: Mapping[str, Any], key: str, rule: Rule) -> Rule:
    try:
        return wrapper(rule, **spec[key])
    except TypeError as error:
        raise ConfigurationError(f"{key}: expected its options. Received: {spec[key]!r} ({error}).") from error


def _value_clipped(rule: Rule, *, value: float) -> Rule:
    return ValueClipped(rule, value)


def _sgd(*, learning_rate: Any, momentum: float = 0.0, nesterov: bool = False) -> Rule:
    if momentum == 0:
        return SGD(learning_rate=learning_rate)
    return (Nesterov if nesterov else Momentum)(learning_rate=learning_rate, momentum=momentum)


_OPTIMIZERS: dict[str, Callable[..., Rule]] = {
    "sgd": _sgd,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "adam": Adam,
    "adamw": AdamW,
}
KNOWN = ("add", *_OPTIMIZERS)
