"""Params of the estimator, the model and the UDF, declared by the table of `elephant.options`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import keras
from pyspark.ml.param import Param, Params, TypeConverters

from elephant.backends import BACKENDS, current
from elephant.compression import check_compression
from elephant.config import FitConfig, Timeouts
from elephant.driver.driver_callbacks import check_asynchronous_callbacks
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.model_info import ModelInfo
from elephant.monitor.listeners import FitListener
from elephant.options import (
    BALANCED,
    FIT,
    INPUT,
    LABEL,
    OPTION,
    OPTIONS,
    ROWS,
    SERVERS,
    Option,
    Scope,
    check_pairs,
    full_mode,
    options_of,
    to_columns,
    to_columns_by_name,
    to_weight_columns,
)
from elephant.parameter_server.protocol import check_encoding
from elephant.rank.callback_rules import check_callbacks
from elephant.rank.job import BatchFunctions, limited
from elephant.spark.columns.column_selection import ColumnSelection
from elephant.spark.saving.model_files import source_of

_P = TypeVar("_P", bound=Params)
# Of a value, where a stage is shown.
_LONGEST_TEXT = 60


def with_params(*scopes: Scope) -> Callable[[type[_P]], type[_P]]:
    """Returns a class decorator that declares the params of some scopes."""

    def declare(cls: type[_P]) -> type[_P]:
        for option in options_of(*scopes):
            _declare(cls, option.param, option.help, _converter(option))
        return cls

    return declare


def _declare(cls: type[Params], name: str, doc: str, converter: Callable[[Any], Any]) -> None:
    """Gives a class a param with a getter and a setter, as all of Spark ML has them."""

    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    get.__doc__ = f"Returns {name}: {doc}."
    set_value.__doc__ = f"Sets {name}: {doc}. Returns the instance."
    title = name[0].upper() + name[1:]
    setattr(cls, name, Param(Params._dummy(), name, doc, typeConverter=converter))
    setattr(cls, f"get{title}", get)
    setattr(cls, f"set{title}", set_value)


def optional(instance: Params, param: Param[Any] | str) -> Any:
    """Returns a param's value, or None when it is not set."""
    return instance.getOrDefault(param) if instance.isDefined(param) else None


def to_function(value: Any) -> Callable[..., Any]:
    """Returns a function; raises TypeError for anything else."""
    if callable(value):
        function: Callable[..., Any] = value
        return function
    raise TypeError(f"expected a function on a batch. Received: {value!r}.")


def to_class_weight(value: Any) -> dict[int, float] | str:
    """Returns weights by class, or the word for those that balance them; raises TypeError for anything else."""
    if isinstance(value, str) and value == BALANCED:
        return value
    if isinstance(value, Mapping) and value:
        weights = {int(label): float(weight) for label, weight in value.items()}
        if all(label >= 0 and 0 <= weight < math.inf for label, weight in weights.items()):
            return weights
    raise TypeError(
        "expected a dictionary of weights, finite and at least 0, by class, such as {0: 1.0, 1: 5.0}, or "
        f"{BALANCED!r}. Received: {value!r}."
    )


def to_callbacks(value: Any) -> list[keras.callbacks.Callback]:
    """Returns Keras callbacks as a list; raises when it holds one that cannot run on workers."""
    callbacks = list(value) if isinstance(value, Iterable) else [value]
    check_callbacks([one for one in callbacks if not isinstance(one, keras.callbacks.BackupAndRestore)])
    return callbacks


def to_driver_callbacks(value: Any) -> list[keras.callbacks.Callback | FitListener]:
    """Returns Keras callbacks and listeners as a list; raises as `to_callbacks`."""
    given = list(value) if isinstance(value, Iterable) else [value]
    check_callbacks([one for one in given if not isinstance(one, FitListener)])
    return given


def to_mode(value: Any) -> str:
    """Returns the full name of a mode; raises ConfigurationError for an unknown one."""
    mode = full_mode(value)
    OPTION["mode"].check(mode, "mode")
    return str(mode)


def to_compression(value: Any) -> str:
    """Returns the name of a compression; raises ConfigurationError for an unknown one."""
    check_compression(value)
    return str(value)


def to_path(value: Any) -> str:
    """Returns a path as text; raises TypeError for what is none."""
    return str(TypeConverters.toString(os.fspath(value)))


def to_timeouts(value: Any) -> dict[str, float]:
    """Returns seconds by their names in `elephant.config.Timeouts`, of which it raises the errors."""
    checked = Timeouts.of(value)
    return asdict(checked) if isinstance(value, Timeouts) else {name: float(value[name]) for name in value}


def _checked(option: Option) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        option.check(value, option.param)
        return value

    return convert


_OF_TYPES = {
    int: TypeConverters.toInt,
    float: TypeConverters.toFloat,
    bool: TypeConverters.toBoolean,
    str: TypeConverters.toString,
}
_OF_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "features_col": to_columns,
    "input_cols": to_columns_by_name,
    "label_col": to_columns,
    "label_cols": to_columns_by_name,
    "weight_col": to_weight_columns,
    "preprocessing": to_function,
    "augmentation": to_function,
    "class_weight": to_class_weight,
    "callbacks": to_callbacks,
    "driver_callbacks": to_driver_callbacks,
    "events_path": to_path,
    "trace_path": to_path,
    "compression": to_compression,
    "checkpoint_path": to_path,
    "timeouts": to_timeouts,
    "mode": to_mode,
}


def _converter(option: Option) -> Callable[[Any], Any]:
    """Returns a converter for a param's type; Spark has none for several types, whose range is checked instead."""
    return _OF_OPTIONS.get(option.name) or _OF_TYPES.get(option.type) or _checked(option)


@with_params(INPUT, LABEL)
class ModelParams(Params):
    """Params that both the estimator and its model have: columns, and what is done with rows before the model."""

    if TYPE_CHECKING:
        # Params, getters and setters, which are made when the class is.
        def __getattr__(self, name: str) -> Any: ...

    def __init__(self) -> None:
        super().__init__()
        # A label that is not set is none: the estimator's constructor sets it.
        own = [option for option in OPTIONS if option.name != "label_col" and self.hasParam(option.param)]
        self._setDefault(**{option.param: option.default for option in own if option.default is not None})


@with_params(ROWS, FIT, SERVERS)
class TrainingParams(ModelParams):
    """Params of the estimator."""


_declare(
    TrainingParams,
    "model",
    "a compiled keras.Model, a function without arguments that returns one, the path of one, or a fitted model",
    source_of,
)


def values_of(stage: Params, *scopes: Scope) -> SimpleNamespace:
    """Returns the params of some scopes as attributes with the options' names; None where one is not set."""
    return SimpleNamespace(**{option.name: optional(stage, option.param) for option in options_of(*scopes)})


def plain_params(stage: Params) -> dict[str, Any]:
    """Returns the values of a stage's params by name, of those that JSON can hold."""
    plain = str | int | float | list | dict
    values = {param.name: optional(stage, param) for param in stage.params}
    plain_values = {name: value for name, value in values.items() if isinstance(value, plain)}
    return {name: value for name, value in plain_values.items() if not name.lower().endswith("callbacks")}


def chosen_values(stage: Params) -> dict[str, str]:
    """Returns the params that have another value than their default, as text, in the order of the table."""
    own = [(option, optional(stage, option.param)) for option in OPTIONS if stage.hasParam(option.param)]
    return {option.param: _as_text(value) for option, value in own if value not in (option.default, [])}


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple) and value and isinstance(value[0], keras.callbacks.Callback):
        return f"[{', '.join(type(callback).__name__ for callback in value)}]"
    text = str(getattr(value, "__qualname__", None) or repr(value))
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."


def input_choice(stage: Params) -> ColumnSelection:
    """Returns the columns of the model's inputs; raises ConfigurationError when two params choose them."""
    given = values_of(stage, INPUT)
    check_pairs(given, INPUT)
    return ColumnSelection(features=given.features_col, inputs=given.input_cols)


def labelled_choice(stage: Params) -> ColumnSelection:
    """Returns the columns of inputs, labels and weights; raises as `input_choice`."""
    given = values_of(stage, LABEL)
    check_pairs(given, LABEL)
    return replace(input_choice(stage), label=given.label_col, labels=given.label_cols, weight=given.weight_col)


def column_choice(stage: Params) -> ColumnSelection:
    """Returns the columns that are used to train; raises as `input_choice`."""
    return replace(labelled_choice(stage), validation=values_of(stage, ROWS).validation_indicator_col)


def batch_functions(stage: Params) -> BatchFunctions:
    """Returns the user's functions on batches."""
    given = values_of(stage, INPUT, ROWS)
    return BatchFunctions(preprocess=given.preprocessing, cached=given.cache_preprocessing, augment=given.augmentation)


def fit_config(stage: Params) -> FitConfig:
    """Returns the options of a fit, checked; raises ConfigurationError or UnsupportedError."""
    given = values_of(stage, ROWS, FIT, SERVERS)
    check_pairs(given, ROWS)
    config = limited(FitConfig.of(vars(values_of(stage, FIT, SERVERS))))
    backup = backup_of(given.callbacks)
    if backup is not None:
        config = _backed_up(config, backup)
    facts = stage.getOrDefault("model").facts
    own = (one for one in given.callbacks if one is not backup)
    callbacks = [*own, *(one for one in given.driver_callbacks if not isinstance(one, FitListener))]
    check_fit(config, facts, callbacks, replacing="learningRate", scaling="scaleLearningRate")
    return config


def backup_of(callbacks: Sequence[keras.callbacks.Callback]) -> keras.callbacks.BackupAndRestore | None:
    """Returns the first callback that stands for checkpoints of the fit."""
    return next((one for one in callbacks if isinstance(one, keras.callbacks.BackupAndRestore)), None)


def _backed_up(config: FitConfig, backup: keras.callbacks.BackupAndRestore) -> FitConfig:
    """Returns the options of a fit that makes the checkpoints that a callback asks for."""
    folder = os.fspath(backup.backup_dir)
    if backup.save_freq != "epoch":
        raise UnsupportedError(
            "callbacks: expected BackupAndRestore(save_freq='epoch'): checkpoints are of whole epochs. Received: "
            f"save_freq={backup.save_freq!r}."
        )
    if config.checkpoint_path not in (None, folder):
        raise ConfigurationError(
            f"checkpointPath: expected none, or the folder of BackupAndRestore, {folder}. Received: "
            f"{config.checkpoint_path}. Leave one of the two out."
        )
    return replace(config, checkpoint_path=folder, resume=True)


def check_fit(
    config: FitConfig,
    facts: ModelInfo,
    callbacks: Sequence[keras.callbacks.Callback],
    *,
    replacing: str = "learning_rate",
    scaling: str = "scale_learning_rate",
) -> None:
    """Raises for options, a model and callbacks that do not go together.

    Args:
        config: The options of the fit.
        facts: What is known of the model.
        callbacks: The user's.
        replacing: What the user calls ``learning_rate``.
        scaling: What the user calls ``scale_learning_rate``.
    """
    facts.check_rates(config, replacing=replacing, scaling=scaling)
    facts.check_normalization(config)
    check_compression(config.compression)
    check_transport(config.gpu_transport)
    if config.is_synchronous:
        check_callbacks(callbacks)
    else:
        check_encoding(config.compression)
        config.check_background_exchange()
        check_asynchronous_callbacks(callbacks)


def check_transport(transport: str) -> None:
    """Raises UnsupportedError where gradients are to be reduced on GPUs by a backend that elephant has no way for."""
    backend = current()
    able = [name for name, other in BACKENDS.items() if other.has_nccl]
    if transport == "nccl" and backend.name not in able:
        raise UnsupportedError(
            f"gpuTransport: expected 'auto' or 'host' with the Keras backend {backend.name!r}, whose gradients go "
            "through the host. Received: 'nccl'. Pass 'host', or set KERAS_BACKEND to {' or '.join(able)}."
        )
