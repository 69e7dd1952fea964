"""Params of the estimator, the model and the UDF, declared by the table of `elephant.options`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import keras
from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import (
    HasBatchSize,
    HasFeaturesCol,
    HasLabelCol,
    HasLearningRate,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from elephant.backends import BACKENDS, current
from elephant.backends.keras_private import layout_map_of
from elephant.cluster.spark_private import set_params, unowned_parent
from elephant.compression import check_compression
from elephant.config import FitConfig
from elephant.driver.driver_callbacks import check_asynchronous_callbacks
from elephant.errors import ConfigurationError, ElephantError, UnsupportedError, brief_errors
from elephant.kinds import DISTRIBUTION
from elephant.modeling.model_info import ModelInfo
from elephant.monitor.listeners import FitListener
from elephant.options import (
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
    in_params,
    options_of,
    remedy_for,
)
from elephant.parameter_server.protocol import check_encoding
from elephant.rank.callbacks.callback_rules import check_callbacks
from elephant.rank.job import BatchFunctions, limited
from elephant.spark.columns.column_selection import ColumnSelection

_P = TypeVar("_P", bound=Params)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# Params of which None is a value, beside another one that they have when nobody sets them.
_NONE_SAYS = {option.param for option in OPTIONS if option.takes_none and option.default is not None}
# Methods of an estimator that its fitted model lacks, and the reverse.
_ELSEWHERE = {
    **dict.fromkeys(("transform", "evaluate", "predict"), "Call fit first: the fitted model that it returns has it."),
    "fit": "It is fitted; KerasEstimator(fitted).fit(df) trains it further.",
}
# Letters of a value, where a stage is shown.
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
        return set_given(self, {name: value})

    get.__doc__ = f"Returns {name}: {doc}."
    set_value.__doc__ = f"Sets {name}: {doc}. Returns the instance."
    title = name[0].upper() + name[1:]
    setattr(cls, name, Param(unowned_parent(), name, doc, typeConverter=converter))
    setattr(cls, f"get{title}", get)
    setattr(cls, f"set{title}", brief_errors(set_value))


def set_given(stage: _P, given: Mapping[str, Any]) -> _P:
    """Sets params by name, and returns the stage; None takes a value away, unless it says something itself."""
    for name, value in given.items():
        if value is None and name not in _NONE_SAYS:
            stage.clear(stage.getParam(name))
        else:
            try:
                set_params(stage, **{name: value})
            except TypeError as error:
                # Spark's repeats the converter's, which is behind it.
                raise TypeError(str(error.__context__ or error)) from None
    return stage


def noting_keywords(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a method that sets params: ``vars(self)["_input_kwargs"]`` gets the keywords that its caller has named.

    `pyspark.keyword_only` does the same, and allows no argument by place.
    """

    @functools.wraps(method)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        vars(args[0])["_input_kwargs"] = kwargs
        return method(*args, **kwargs)

    return call


def require_own(stage: Params, params: object, advice: str) -> None:
    """Raises ConfigurationError for params of another stage, of which Spark takes no notice.

    Args:
        params: A map of params, or several.
        advice: What to do instead.
    """
    maps = params if isinstance(params, list | tuple) else [params]
    for param in (param for one in maps if isinstance(one, Mapping) for param in one):
        # A map for an estimator serves its model too, which has fewer params.
        if isinstance(param, Param) and param.parent != stage.uid:
            raise ConfigurationError(
                f"params: expected params of {stage.uid}. Received: {param.name} of {param.parent}, which would "
                f"change nothing. {advice}"
            )


def optional(instance: Params, param: Param[Any] | str) -> Any:
    """Returns a param's value, or None when it is not set."""
    return instance.getOrDefault(param) if instance.isDefined(param) else None


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    check_callbacks([one for one in callbacks if not isinstance(one, keras.callbacks.BackupAndRestore)])


def _check_driver_callbacks(callbacks: Sequence[Any]) -> None:
    check_callbacks([one for one in callbacks if not isinstance(one, FitListener)])


# Keras, and the codecs, say what else they expect of these.
_CHECKS: dict[str, Callable[[Any], None]] = {
    "callbacks": _check_callbacks,
    "driver_callbacks": _check_driver_callbacks,
    "compression": check_compression,
}


def _converter(option: Option) -> Callable[[Any], Any]:
    """Returns a param's converter: a value of another type is a TypeError, one out of range elephant's error."""
    check = _CHECKS.get(option.name)

    def convert(given: Any) -> Any:
        if given is None and option.takes_none:
            return None
        try:
            value = option.kind.value_of(_plain_distribution(given))
        except ElephantError:
            raise
        except TypeError as error:
            raise TypeError(f"{option.param}: {error}") from None
        except ValueError as error:
            raise ConfigurationError(f"{option.param}: {error}") from None
        if check is not None:
            check(value)
        return value

    return convert


def _plain_distribution(given: Any) -> Any:
    """Returns a `ModelParallel` as JSON has it: its devices are made in the workers; anything else as it is."""
    if not isinstance(given, keras.distribution.ModelParallel):
        return given
    return {**DISTRIBUTION.value_of(layout_map_of(given)), "batch_dim_name": given.batch_dim_name}


if TYPE_CHECKING:
    # All params with their getters and setters, which are made when the classes are.
    from elephant.spark.param_types import ModelParamTypes, TrainingParamTypes
else:
    # Spark's own code finds params by these classes. Those of elephant keep their names, and take more values.
    class ModelParamTypes(
        HasFeaturesCol, HasLabelCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol, HasWeightCol
    ):
        """Spark's classes of the params of estimator and model."""

    class TrainingParamTypes(HasValidationIndicatorCol, HasSeed, HasBatchSize, HasLearningRate):
        """Those of the estimator alone."""


@with_params(INPUT, LABEL)
class ModelParams(ModelParamTypes):
    """Params that both the estimator and its model have: columns, and what is done with rows before the model."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Of a param that there is no more, or of its getter or setter.
            param = name[3:4].lower() + name[4:] if name[:3] in ("get", "set") else name
            remedy = remedy_for(param).strip() or _ELSEWHERE.get(name)
            # Python appends a full stop and what it thinks was meant.
            end = f". {remedy}".rstrip(".") if remedy else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{end}")

        def __setattr__(self, name: str, value: Any) -> None:
            # Its Python name is tried as well.
            param = OPTION[name].param if name in OPTION else name
            if isinstance(getattr(type(self), param, None), Param) and not isinstance(value, Param):
                raise AttributeError(
                    f"{name}: expected params to be set by their setters, because Spark keeps them. Received: "
                    f"{type(self).__name__}.{name} = {value!r}. Call set{param[:1].upper()}{param[1:]}({value!r})."
                )
            super().__setattr__(name, value)

    def __init__(self) -> None:
        # Not those of Spark's classes, which only set defaults of theirs: of `HasSeed`, a hash that may be below zero.
        Params.__init__(self)
        own = [option for option in OPTIONS if self.hasParam(option.param)]
        self._setDefault(**{option.param: option.default for option in own if option.default is not None})


@with_params(ROWS, FIT, SERVERS)
class TrainingParams(ModelParams, TrainingParamTypes):
    """Params of the estimator."""


def values_of(stage: Params, *scopes: Scope) -> SimpleNamespace:
    """Returns the params of some scopes as attributes with the options' names; None where one is not set."""
    return SimpleNamespace(**{option.name: optional(stage, option.param) for option in options_of(*scopes)})


def plain_params(stage: Params) -> dict[str, Any]:
    """Returns the values of a stage's params by name, of those that JSON can hold."""
    plain = str | int | float | list | dict
    values = {param.name: optional(stage, param) for param in stage.params}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    plain_values = {name: value for name, value in values.items() if isinstance(value, plain)}
    return {name: value for name, value in plain_values.items() if not name.lower().endswith("callbacks")}


def chosen_values(stage: Params) -> dict[str, str]:
    """Returns the params that have another value than their default, as text, in the order of the table."""
    own = [(option, optional(stage, option.param)) for option in OPTIONS if stage.hasParam(option.param)]
    return {option.param: _as_text(value) for option, value in own if value not in (option.default, [])}


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple) and value and isinstance(value[0], keras.callbacks.Callback | FitListener):
        return f"[{', '.join(type(callback).__name__ for callback in value)}]"
    text = str(getattr(value, "__qualname__", None) or repr(value))
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."


def input_selection(stage: Params) -> ColumnSelection:
    """Returns the columns of the model's inputs."""
    return ColumnSelection(features=values_of(stage, INPUT).features_col)


def labelled_selection(stage: Params) -> ColumnSelection:
    """Returns the columns of inputs, labels and weights."""
    given = values_of(stage, LABEL)
    return replace(input_selection(stage), label=given.label_col, weight=given.weight_col)


def column_selection(stage: Params) -> ColumnSelection:
    """Returns the columns that are used to train."""
    return replace(labelled_selection(stage), validation=values_of(stage, ROWS).validation_indicator_col)


def batch_functions(stage: Params) -> BatchFunctions:
    """Returns the user's functions on batches."""
    given = values_of(stage, INPUT, ROWS)
    return BatchFunctions(preprocess=given.preprocessing, augment=given.augmentation)


def fit_config(stage: Params) -> FitConfig:
    """Returns the options of a fit, checked; raises ConfigurationError or UnsupportedError."""
    try:
        return _checked_config(stage)
    except (ConfigurationError, UnsupportedError) as error:
        # `FitConfig` does not know what its options are called here.
        error.args = (in_params(error.message),)
        raise


def _checked_config(stage: Params) -> FitConfig:
    given = values_of(stage, ROWS, FIT, SERVERS)
    check_pairs(given, ROWS)
    config = limited(FitConfig.of(vars(values_of(stage, FIT, SERVERS))))
    backup = backup_of(given.callbacks)
    if backup is not None:
        config = _backed_up(config, backup)
    info = stage.getOrDefault("model").source.info
    own = (one for one in given.callbacks if one is not backup)
    callbacks = [*own, *(one for one in given.driver_callbacks if not isinstance(one, FitListener))]
    check_fit(config, info, callbacks, replacing="learningRate", scaling="scaleLearningRate")
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
    return config.changed(checkpoint_path=folder, resume=True)


def check_fit(
    config: FitConfig,
    info: ModelInfo,
    callbacks: Sequence[keras.callbacks.Callback],
    *,
    replacing: str = "learning_rate",
    scaling: str = "scale_learning_rate",
) -> None:
    """Raises for options, a model and callbacks that do not go together.

    Args:
        config: The options of the fit.
        info: What is known of the model.
        callbacks: The user's.
        replacing: What the user calls ``learning_rate``.
        scaling: What the user calls ``scale_learning_rate``.
    """
    info.check_rates(config, replacing=replacing, scaling=scaling)
    info.check_normalization(config)
    check_compression(config.compression)
    check_transport(config.gpu_transport)
    check_distribution(config)
    check_stages(config, info, callbacks)
    if config.is_synchronous:
        check_callbacks(callbacks)
    else:
        check_encoding(config.compression)
        config.check_background_exchange()
        check_asynchronous_callbacks(callbacks, in_rounds=config.trains_in_rounds)


def check_transport(transport: str) -> None:
    """Raises UnsupportedError where gradients are to be reduced on GPUs by a backend that elephant has no way for."""
    backend = current()
    able = [name for name, other in BACKENDS.items() if other.has_nccl]
    if transport == "nccl" and backend.name not in able:
        raise UnsupportedError(
            f"gpuTransport: expected 'auto' or 'host' with the Keras backend {backend.name!r}, whose gradients go "
            f"through the host. Received: 'nccl'. Pass 'host', or set KERAS_BACKEND to {' or '.join(able)}."
        )


def check_stages(config: FitConfig, info: ModelInfo, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises UnsupportedError for what a model in stages does not have, as far as it can be told without the model."""
    if config.pipeline_stages is None:
        return
    remedy = "Leave it out, or pipelineStages."
    if info.synchronized:
        raise UnsupportedError(
            "pipelineStages: expected batch normalization of the rows of a micro-batch. Received: "
            "BatchNormalization(synchronized=True), whose rows are those of all workers. Build it with "
            "synchronized=False, or leave pipelineStages out."
        )
    for input_info in info.inputs:
        if input_info.sparse:
            raise UnsupportedError(
                f"pipelineStages: expected inputs in dense arrays, which are cut into micro-batches. Received: the "
                f"sparse input {input_info.name!r}. {remedy}"
            )
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise UnsupportedError(
                "callbacks: expected callbacks that leave the optimizer's averages of weights to it, because each "
                f"stage has an optimizer of its own. Received: SwapEMAWeights with pipelineStages. {remedy}"
            )


def check_distribution(config: FitConfig) -> None:
    """Raises UnsupportedError where a model is to be divided by a backend that does not divide any."""
    backend = current()
    if config.distribution is not None and not backend.divides_models:
        able = [name for name, other in BACKENDS.items() if other.divides_models]
        raise UnsupportedError(
            f"distribution: expected the Keras backend {' or '.join(able)}, which divides a model's layers among the "
            f"workers. Received: {backend.name!r}. Set KERAS_BACKEND, or leave distribution out."
        )
