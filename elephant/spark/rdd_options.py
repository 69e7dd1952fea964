"""The options of `elephant.SparkModel`: those of the estimator, by the names of `elephant.config`'s fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import keras

from elephant.config import AsynchronousOptions, FitConfig
from elephant.errors import ConfigurationError
from elephant.modeling.model_info import ModelFacts
from elephant.spark.data_params import to_class_weight
from elephant.training.algorithms import check_algorithm
from elephant.training.callbacks import check_callbacks
from elephant.training.driver_callbacks import check_asynchronous_callbacks

# What SparkModel and its fit have arguments of their own for.
_GIVEN_ELSEWHERE = {
    "mode",
    "num_workers",
    "epochs",
    "batch_size",
    "validation_fraction",
    "frequency",
    "verbose",
    "asynchronous",
    "port",
}
_OF_SERVERS = tuple(field.name for field in fields(AsynchronousOptions))
_ALL = {field.name for field in fields(FitConfig)} | set(_OF_SERVERS) | {"class_weight", "augmentation"}
OPTIONS = tuple(sorted(_ALL - _GIVEN_ELSEWHERE))
_EXPLAINED = {
    "parameter_server_mode": " Elephant has one protocol between workers and servers: leave it out.",
    "elephas_optimizer": " The servers apply the optimizer that the model was compiled with: leave it out.",
    "validation_fraction": " Pass validation_split to fit.",
}


def refuse_unknown(caller: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises TypeError for a keyword argument that is not known; the error lists those that are.

    Args:
        caller: What was called.
        given: The keyword arguments.
        known: Their names.
    """
    unknown = [name for name in given if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else _EXPLAINED.get(unknown[0], "")
        raise TypeError(
            f"{caller} has no argument {unknown[0]!r}.{_EXPLAINED.get(unknown[0], hint)} Known: {', '.join(known)}."
        )


def plain_word(value: Any) -> Any:
    """Returns the value of a member of an enumeration, such as Elephas has for modes; other values as they are."""
    return getattr(value, "value", value)


def fit_config(options: Mapping[str, Any], port: int | None, **given: Any) -> FitConfig:
    """Returns the options of a fit, checked.

    Args:
        options: Those of `OPTIONS` that the user gave.
        port: The parameter server's; a synchronous fit has none, and does not mind.
        given: The fields of `elephant.config.FitConfig` that have arguments of their own.

    Raises:
        ConfigurationError: A value is out of its range, or two of them exclude each other.
    """
    of_servers = {name: value for name, value in options.items() if name in _OF_SERVERS}
    if port is not None and given["mode"] != "synchronous":
        of_servers["port"] = port
    given_class_weight(options)
    others = {
        name: value
        for name, value in options.items()
        if name not in (*_OF_SERVERS, "class_weight", "augmentation") and value is not None
    }
    return FitConfig(**given, **others, asynchronous=AsynchronousOptions(**of_servers))


def given_class_weight(options: Mapping[str, Any]) -> dict[int, float] | None:
    """Returns the option ``class_weight``; None where there is none.

    Raises:
        ConfigurationError: It is no dictionary of weights by class.
    """
    given = options.get("class_weight")
    try:
        return to_class_weight(given) if given else None
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"class_weight: {error}") from error


def check_fit(config: FitConfig, facts: ModelFacts, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises for options, a model and callbacks that do not go together."""
    facts.check_rates(config, replacing="learning_rate", scaling="scale_learning_rate")
    if config.is_synchronous:
        check_callbacks(callbacks)
    else:
        check_algorithm(config)
        check_asynchronous_callbacks(callbacks)
