"""The rules by which a server applies what is pushed to it, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elephant.errors import ConfigurationError
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers.addition import Addition
from elephant.parameter_server.optimizers.base import Rule
from elephant.parameter_server.optimizers.schedules import schedule_of
from elephant.parameter_server.optimizers.sgd import SGD, Momentum, Nesterov


def rule_of(spec: Mapping[str, Any], layout: Layout) -> Rule:
    """Returns the rule that a JSON value describes.

    Args:
        spec: ``{"name": "add"}``, or the name of an optimizer, its ``"learning_rate"`` (a number, or
            a schedule as for ``schedule_of``) and its options.
        layout: The places of all variables in the whole vector, of which a server may keep a part.

    Raises:
        ConfigurationError: There is no such name, or no such option.

    >>> rule_of({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}, Layout([("a", (3,))])).slots
    ('momentum',)
    """
    options = {key: value for key, value in spec.items() if key not in ("name", "learning_rate")}
    name = spec.get("name")
    if name == "add":
        return Addition()
    if name not in _OPTIMIZERS:
        raise ConfigurationError(f"rule: expected one of {', '.join(KNOWN)}. Received: {name!r}.")
    options["learning_rate"] = schedule_of(spec.get("learning_rate"))
    try:
        return _OPTIMIZERS[name](**options)
    except TypeError as error:
        raise ConfigurationError(f"rule: expected options of {name!r}. Received: {dict(spec)!r} ({error}).") from error


def _sgd(*, learning_rate: Any, momentum: float = 0.0, nesterov: bool = False) -> Rule:
    if momentum == 0:
        return SGD(learning_rate=learning_rate)
    return (Nesterov if nesterov else Momentum)(learning_rate=learning_rate, momentum=momentum)


_OPTIMIZERS: dict[str, Callable[..., Rule]] = {"sgd": _sgd}
KNOWN = ("add", *_OPTIMIZERS)
