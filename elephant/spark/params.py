"""Params of the estimator, the model and the UDF: values, types, and what they become."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

import keras
from pyspark.ml.param import Param, Params, TypeConverters

from elephant.compression import check_compression
from elephant.config import AsynchronousOptions, FitConfig, Timeouts, check_frequency, check_mode
from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import ModelSpec
from elephant.spark.column_selection import ColumnSelection
from elephant.spark.model_files import source_of
from elephant.training.algorithms import check_algorithm
from elephant.training.callbacks import check_callbacks
from elephant.training.driver_callbacks import check_asynchronous_callbacks
from elephant.training.job import BatchFunctions

_P = TypeVar("_P", bound=Params)


def with_accessors(cls: type[_P]) -> type[_P]:
    """Adds ``getName`` and ``setName`` for every param that a class declares, as all of Spark ML has them."""
    for name, param in list(vars(cls).items()):
        if isinstance(param, Param):
            title = name[0].upper() + name[1:]
            setattr(cls, f"get{title}", _getter(name, param.doc))
            setattr(cls, f"set{title}", _setter(name, param.doc))
    return cls


def _getter(name: str, doc: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    get.__doc__ = f"Returns {name}: {doc}."
    return get


def _setter(name: str, doc: str) -> Callable[[Any, Any], Any]:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_value.__doc__ = f"Sets {name}: {doc}. Returns the instance."
    return set_value


def optional(instance: Params, param: Param[Any]) -> Any:
    """Returns a param's value, or None when it is not set."""
    return instance.getOrDefault(param) if instance.isDefined(param) else None


def to_columns(value: Any) -> str | list[str]:
    """Returns one column name, or a list of them; raises TypeError for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(name, str) for name in value):
        return list(value)
    raise TypeError(f"expected a column name or a list of column names. Received: {value!r}.")


def to_columns_by_name(value: Any) -> dict[str, str | list[str]] | list[str]:
    """Returns columns by the name of an input or output, or a list in their order; raises TypeError for the rest."""
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        return {name: to_columns(columns) for name, columns in value.items()}
    columns = to_columns(value)
    if isinstance(columns, list):
        return columns
    raise TypeError(f"expected a dictionary of columns by name, or a list of columns. Received: {value!r}.")


def to_weight_columns(value: Any) -> str | dict[str, str]:
    """Returns a column name, or one by the name of each output; raises TypeError for anything else."""
    if isinstance(value, Mapping):
        return {str(name): TypeConverters.toString(column) for name, column in value.items()}
    return str(TypeConverters.toString(value))


@with_accessors
class ColumnParams(Params):
    """Columns that both the estimator and its model name."""

    featuresCol = Param(
        Params._dummy(),
        "featuresCol",
        "features: one column (array of numbers, ml vector, number), or a list of numeric columns that make one vector",
        typeConverter=to_columns,
    )
    inputCols = Param(
        Params._dummy(),
        "inputCols",
        "for models with several inputs: columns by the name of the input, or a list in the order of the inputs",
        typeConverter=to_columns_by_name,
    )
    predictionCol = Param(
        Params._dummy(),
        "predictionCol",
        "column to add: the class (cross-entropy losses) or the value (one output unit) as double, else an array",
        typeConverter=TypeConverters.toString,
    )
    probabilityCol = Param(
        Params._dummy(),
        "probabilityCol",
        "column to add for classifiers: the classes' probabilities as an ml vector",
        typeConverter=TypeConverters.toString,
    )
    inferenceBatchSize = Param(
        Params._dummy(),
        "inferenceBatchSize",
        "rows that transform and evaluate put through the model at a time",
        typeConverter=TypeConverters.toInt,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            featuresCol="features", predictionCol="prediction", probabilityCol="probability", inferenceBatchSize=1024
        )

    def input_choice(self) -> ColumnSelection:
        """Returns which columns are the model's inputs; raises ConfigurationError when two params choose them."""
        _refuse_both(self, self.featuresCol, "features", self.inputCols)
        return ColumnSelection(features=self.getOrDefault(self.featuresCol), inputs=optional(self, self.inputCols))


@with_accessors
class LabelParams(Params):
    """What a model's outputs are compared with, by the estimator and by its model."""

    labelCol = Param(
        Params._dummy(),
        "labelCol",
        "label: a number, a boolean, an array of numbers or an ml vector; not set means that there is none",
        typeConverter=TypeConverters.toString,
    )
    labelCols = Param(
        Params._dummy(),
        "labelCols",
        "for models with several outputs: columns by the name of the output, or a list in the order of the outputs",
        typeConverter=to_columns_by_name,
    )
    weightCol = Param(
        Params._dummy(),
        "weightCol",
        "sample weights: a numeric column, or one by the name of each output; not set means 1 for every row",
        typeConverter=to_weight_columns,
    )

    def with_labels(self, choice: ColumnSelection) -> ColumnSelection:
        """Returns the choice of columns with those of labels and weights; raises as `input_choice`."""
        _refuse_both(self, self.labelCol, "label", self.labelCols)
        return replace(
            choice,
            label=optional(self, self.labelCol),
            labels=optional(self, self.labelCols),
            weight=optional(self, self.weightCol),
        )


def _refuse_both(params: Params, one: Param[Any], default: str, several: Param[Any]) -> None:
    # The constructor sets the default itself, which nobody has asked for.
    if optional(params, several) is not None and optional(params, one) not in (None, default):
        raise ConfigurationError(
            f"{several.name}: expected {one.name} not to be set, which names the one column. Received: "
            f"{one.name}={params.getOrDefault(one)!r} beside {several.name}={params.getOrDefault(several)!r}."
        )


def to_function(value: Any) -> Callable[..., Any]:
    """Returns a function; raises TypeError for anything else."""
    if callable(value):
        function: Callable[..., Any] = value
        return function
    raise TypeError(f"expected a function on a batch. Received: {value!r}.")


def to_class_weight(value: Any) -> dict[int, float]:
    """Returns weights by class; raises TypeError for anything else."""
    if isinstance(value, Mapping) and value:
        weights = {int(label): float(weight) for label, weight in value.items()}
        if all(label >= 0 and 0 <= weight < math.inf for label, weight in weights.items()):
            return weights
    raise TypeError(
        "expected a dictionary of weights, finite and at least 0, by class, such as {0: 1.0, 1: 5.0}. "
        f"Received: {value!r}."
    )


@with_accessors
class PreprocessingParams(Params):
    """What both a fit and the model that it returns do with rows before the model sees them."""

    preprocessing = Param(
        Params._dummy(),
        "preprocessing",
        "a function from a batch, a dictionary of columns, to what the model takes; runs on the workers",
        typeConverter=to_function,
    )


@with_accessors
class DataParams(PreprocessingParams):
    """What is done with the rows of a worker before and while it trains."""

    classWeight = Param(
        Params._dummy(),
        "classWeight",
        "weights by class, which weigh the loss of rows in training; not set weighs all alike",
        typeConverter=to_class_weight,
    )
    cachePreprocessing = Param(
        Params._dummy(),
        "cachePreprocessing",
        "whether preprocessing runs once and its result is kept, or again in every epoch",
        typeConverter=TypeConverters.toBoolean,
    )
    augmentation = Param(
        Params._dummy(),
        "augmentation",
        "a function from a batch and a random generator to a batch, for every training batch of every epoch",
        typeConverter=to_function,
    )
    cache = Param(
        Params._dummy(),
        "cache",
        "where a worker keeps its rows: 'disk', memory-mapped, or 'memory'",
        typeConverter=TypeConverters.toString,
    )
    stepsPerEpoch = Param(
        Params._dummy(),
        "stepsPerEpoch",
        "steps of an epoch (>= 1), which goes on in the rows where the last one ended; not set means all rows",
        typeConverter=TypeConverters.toInt,
    )
    bucketByLength = Param(
        Params._dummy(),
        "bucketByLength",
        "whether batches are made of sequences of like length, so that little is padded",
        typeConverter=TypeConverters.toBoolean,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(cachePreprocessing=True, cache="disk", bucketByLength=False)

    def batch_functions(self) -> BatchFunctions:
        """Returns the user's functions on batches."""
        return BatchFunctions(
            preprocess=optional(self, self.preprocessing),
            cached=self.getOrDefault(self.cachePreprocessing),
            augment=optional(self, self.augmentation),
        )


def to_use_gpu(value: Any) -> bool | str:
    """Returns True, False or ``"auto"``; raises ConfigurationError for anything else."""
    if value is True or value is False or value == "auto":
        use: bool | str = value
        return use
    raise ConfigurationError(f"useGpu: expected True, False or 'auto'. Received: {value!r}.")


def to_warm_workers(value: Any) -> int | str:
    """Returns ``"auto"`` or an integer of at least 0; raises ConfigurationError for anything else."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_count and value != "auto":
        raise ConfigurationError(f"warmWorkers: expected 'auto' or an integer of at least 0. Received: {value!r}.")
    number: int | str = value
    return number


def to_timeouts(value: Any) -> dict[str, float]:
    """Returns deadlines by their names in `elephant.config.Timeouts`, from such names or from an object of it.

    Raises:
        ConfigurationError: A name is not one of them, or a value is no number of seconds.
    """
    if isinstance(value, Timeouts):
        return asdict(value)
    known = [part.name for part in fields(Timeouts)]
    if not isinstance(value, Mapping) or not set(value) <= set(known):
        raise ConfigurationError(
            f"timeouts: expected elephant.config.Timeouts, or seconds by the names {', '.join(known)}. "
            f"Received: {value!r}."
        )
    Timeouts(**value)
    return {name: float(seconds) for name, seconds in value.items()}


@with_accessors
class PlacementParams(Params):
    """Devices of the workers, and checkpoints."""

    useGpu = Param(
        Params._dummy(),
        "useGpu",
        "True demands GPUs, False hides them, 'auto' takes those that there are",
        typeConverter=to_use_gpu,
    )
    gpusPerWorker = Param(
        Params._dummy(),
        "gpusPerWorker",
        "GPUs of each worker (>= 1), each of which is one rank; the worker's rows and batches are divided",
        typeConverter=TypeConverters.toInt,
    )
    gpuResource = Param(
        Params._dummy(),
        "gpuResource",
        "what Spark calls GPUs, as in spark.executor.resource.NAME.amount",
        typeConverter=TypeConverters.toString,
    )
    mixedPrecision = Param(
        Params._dummy(),
        "mixedPrecision",
        "whether workers compute in 16 bits where the model's layers leave that open",
        typeConverter=TypeConverters.toBoolean,
    )
    checkpointPath = Param(
        Params._dummy(),
        "checkpointPath",
        "a folder, on any file system that Spark or fsspec reaches, for checkpoints; not set makes none",
        typeConverter=TypeConverters.toString,
    )
    checkpointEpochs = Param(
        Params._dummy(),
        "checkpointEpochs",
        "epochs between two checkpoints (>= 1)",
        typeConverter=TypeConverters.toInt,
    )
    resume = Param(
        Params._dummy(),
        "resume",
        "whether to go on from the last checkpoint in checkpointPath, where there is one",
        typeConverter=TypeConverters.toBoolean,
    )
    maxRestarts = Param(
        Params._dummy(),
        "maxRestarts",
        "how often a fit that lost a worker is started again, from its last checkpoint (>= 0)",
        typeConverter=TypeConverters.toInt,
    )
    warmWorkers = Param(
        Params._dummy(),
        "warmWorkers",
        "processes that have imported Keras and wait on each executor for the next fit, at most (>= 0); 'auto' is what "
        "spark.elephant.warmWorkers says, or else 2",
        typeConverter=to_warm_workers,
    )
    timeouts = Param(
        Params._dummy(),
        "timeouts",
        "how long waits may last: seconds by the names of elephant.config.Timeouts; not set leaves its defaults",
        typeConverter=to_timeouts,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            useGpu="auto",
            gpusPerWorker=1,
            gpuResource="gpu",
            mixedPrecision=False,
            checkpointEpochs=1,
            resume=False,
            maxRestarts=0,
            warmWorkers="auto",
        )

    def placement_options(self) -> dict[str, Any]:
        """Returns them by the names of `elephant.config.FitConfig`."""
        return {
            "use_gpu": self.getOrDefault(self.useGpu),
            "gpus_per_worker": self.getOrDefault(self.gpusPerWorker),
            "gpu_resource": self.getOrDefault(self.gpuResource),
            "mixed_precision": self.getOrDefault(self.mixedPrecision),
            "checkpoint_path": optional(self, self.checkpointPath),
            "checkpoint_epochs": self.getOrDefault(self.checkpointEpochs),
            "resume": self.getOrDefault(self.resume),
            "max_restarts": self.getOrDefault(self.maxRestarts),
            "warm_workers": self.getOrDefault(self.warmWorkers),
            "timeouts": Timeouts(**(optional(self, self.timeouts) or {})),
        }


@with_accessors
class ServerParams(Params):
    """What modes with a parameter server are asked to do besides."""

    algorithm = Param(
        Params._dummy(),
        "algorithm",
        "asynchronous modes: what workers push: 'downpour', 'adag', 'dynsgd', 'aeasgd', 'eamsgd' or 'sum'",
        typeConverter=TypeConverters.toString,
    )
    elasticity = Param(
        Params._dummy(),
        "elasticity",
        "asynchronous modes: moving rate of 'aeasgd' and 'eamsgd', in (0, 1); not set means 0.9 / numWorkers",
        typeConverter=TypeConverters.toFloat,
    )
    maxStaleness = Param(
        Params._dummy(),
        "maxStaleness",
        "asynchronous modes: steps that a worker may be ahead of the slowest live one (>= 0); not set means no limit",
        typeConverter=TypeConverters.toInt,
    )
    backgroundExchange = Param(
        Params._dummy(),
        "backgroundExchange",
        "asynchronous modes: whether a worker computes a step while the exchange of the last one goes on",
        typeConverter=TypeConverters.toBoolean,
    )
    parameterServers = Param(
        Params._dummy(),
        "parameterServers",
        "asynchronous modes: processes that the weights are divided over (>= 1)",
        typeConverter=TypeConverters.toInt,
    )
    serverPlacement = Param(
        Params._dummy(),
        "serverPlacement",
        "asynchronous modes: where parameter servers run: 'driver' or 'executors'",
        typeConverter=TypeConverters.toString,
    )
    port = Param(
        Params._dummy(),
        "port",
        "asynchronous modes: the first parameter server's port, the others take the next ones; 0 takes free ones",
        typeConverter=TypeConverters.toInt,
    )
    snapshotSeconds = Param(
        Params._dummy(),
        "snapshotSeconds",
        "asynchronous modes: seconds between two snapshots of a parameter server; 0 makes none by time",
        typeConverter=TypeConverters.toFloat,
    )
    snapshotUpdates = Param(
        Params._dummy(),
        "snapshotUpdates",
        "asynchronous modes: updates between two snapshots of a parameter server; 0 makes none by count",
        typeConverter=TypeConverters.toInt,
    )
    maxRefusedUpdates = Param(
        Params._dummy(),
        "maxRefusedUpdates",
        "asynchronous modes: updates with NaN or infinity that are refused before the fit is given up",
        typeConverter=TypeConverters.toInt,
    )

    def __init__(self) -> None:
        super().__init__()
        default = AsynchronousOptions()
        self._setDefault(
            algorithm=default.algorithm,
            backgroundExchange=default.background_exchange,
            parameterServers=default.parameter_servers,
            serverPlacement=default.server_placement,
            port=default.port,
            snapshotSeconds=default.snapshot_seconds,
            snapshotUpdates=default.snapshot_updates,
            maxRefusedUpdates=default.max_refused_updates,
        )

    def asynchronous_options(self) -> AsynchronousOptions:
        """Returns the options, checked; raises ConfigurationError."""
        return AsynchronousOptions(
            algorithm=self.getOrDefault(self.algorithm),
            elasticity=optional(self, self.elasticity),
            max_staleness=optional(self, self.maxStaleness),
            background_exchange=self.getOrDefault(self.backgroundExchange),
            parameter_servers=self.getOrDefault(self.parameterServers),
            server_placement=self.getOrDefault(self.serverPlacement),
            port=self.getOrDefault(self.port),
            snapshot_seconds=self.getOrDefault(self.snapshotSeconds),
            snapshot_updates=self.getOrDefault(self.snapshotUpdates),
            max_refused_updates=self.getOrDefault(self.maxRefusedUpdates),
        )


def to_mode(value: Any) -> str:
    """Returns the mode; raises ConfigurationError for an unknown one."""
    mode = TypeConverters.toString(value)
    check_mode(mode)
    return mode


def to_frequency(value: Any) -> str | int:
    """Returns how often workers exchange; raises ConfigurationError for what is no frequency."""
    check_frequency(value)
    frequency: str | int = value
    return frequency


def to_compression(value: Any) -> str:
    """Returns the name of a compression; raises ConfigurationError for an unknown one."""
    check_compression(value)
    return str(value)


def to_callbacks(value: Any) -> list[keras.callbacks.Callback]:
    """Returns Keras callbacks as a list; raises when it holds one that cannot run on workers."""
    callbacks = list(value) if isinstance(value, (list, tuple)) else [value]
    check_callbacks(callbacks)
    return callbacks


def to_model(value: Any) -> ModelSpec:
    """Returns the model as a value that travels."""
    return source_of(value)


@with_accessors
class TrainingParams(ColumnParams, LabelParams, DataParams, ServerParams, PlacementParams):
    """What the estimator is asked to do."""

    model = Param(
        Params._dummy(),
        "model",
        "a compiled keras.Model, a function without arguments that returns one, the path of one, or a fitted model",
        typeConverter=to_model,
    )
    validationIndicatorCol = Param(
        Params._dummy(),
        "validationIndicatorCol",
        "a boolean column: true keeps the row for validation; not set means validationFraction",
        typeConverter=TypeConverters.toString,
    )
    mode = Param(
        Params._dummy(),
        "mode",
        "how workers train together: 'synchronous', or with a parameter server 'asynchronous' or 'hogwild'",
        typeConverter=to_mode,
    )
    numWorkers = Param(
        Params._dummy(),
        "numWorkers",
        "workers, each one Spark task (>= 1); of a barrier stage in synchronous mode",
        typeConverter=TypeConverters.toInt,
    )
    epochs = Param(
        Params._dummy(), "epochs", "passes over the training rows (>= 1)", typeConverter=TypeConverters.toInt
    )
    batchSize = Param(
        Params._dummy(),
        "batchSize",
        "rows per worker and step (>= 1): a synchronous step trains on numWorkers times as many",
        typeConverter=TypeConverters.toInt,
    )
    validationFraction = Param(
        Params._dummy(),
        "validationFraction",
        "share of the rows kept for validation, in [0, 1)",
        typeConverter=TypeConverters.toFloat,
    )
    shuffle = Param(
        Params._dummy(),
        "shuffle",
        "whether each worker draws its rows in a new order every epoch",
        typeConverter=TypeConverters.toBoolean,
    )
    seed = Param(
        Params._dummy(),
        "seed",
        "source of the row order, the validation split and the workers' random state",
        typeConverter=TypeConverters.toInt,
    )
    learningRate = Param(
        Params._dummy(),
        "learningRate",
        "replaces the learning rate that the model was compiled with; not set keeps it",
        typeConverter=TypeConverters.toFloat,
    )
    scaleLearningRate = Param(
        Params._dummy(),
        "scaleLearningRate",
        "whether to multiply the learning rate by numWorkers, as larger global batches may want",
        typeConverter=TypeConverters.toBoolean,
    )
    frequency = Param(
        Params._dummy(),
        "frequency",
        "'batch' exchanges gradients each step; an integer k or 'epoch' weights, every k steps or each epoch",
        typeConverter=to_frequency,
    )
    compression = Param(
        Params._dummy(),
        "compression",
        "how gradients are encoded where they cross hosts, such as 'bfloat16'; not set sends them as they are",
        typeConverter=to_compression,
    )
    bucketBytes = Param(
        Params._dummy(),
        "bucketBytes",
        "bytes of gradients that travel together while the next are computed; not set chooses, 0 makes one bucket",
        typeConverter=TypeConverters.toInt,
    )
    syncBatchNorm = Param(
        Params._dummy(),
        "syncBatchNorm",
        "whether batch normalisation uses the statistics of all workers' rows",
        typeConverter=TypeConverters.toBoolean,
    )
    allowBatchCoupledLoss = Param(
        Params._dummy(),
        "allowBatchCoupledLoss",
        "whether a loss may couple the rows of a batch; each worker computes it on its own rows",
        typeConverter=TypeConverters.toBoolean,
    )
    callbacks = Param(
        Params._dummy(),
        "callbacks",
        "Keras callbacks; they run on the workers, or, epochs of asynchronous modes, on the driver",
        typeConverter=to_callbacks,
    )
    verbose = Param(
        Params._dummy(),
        "verbose",
        "0 silent, 1 plan, progress and a table of epochs, 2 without the progress",
        typeConverter=TypeConverters.toInt,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            mode="synchronous",
            numWorkers=1,
            epochs=1,
            batchSize=32,
            validationFraction=0.0,
            shuffle=True,
            seed=0,
            scaleLearningRate=False,
            frequency="batch",
            syncBatchNorm=False,
            allowBatchCoupledLoss=False,
            callbacks=[],
            verbose=1,
        )

    def column_choice(self) -> ColumnSelection:
        """Returns which columns are used to train."""
        return replace(
            self.with_labels(self.input_choice()),
            validation=optional(self, self.validationIndicatorCol),
        )

    def fit_config(self) -> FitConfig:
        """Returns the options of a fit, checked; raises ConfigurationError or UnsupportedError."""
        source = self.getOrDefault(self.model)
        if optional(self, self.validationIndicatorCol) is not None and self.getOrDefault(self.validationFraction) > 0:
            raise ConfigurationError(
                "validationFraction: expected 0 because validationIndicatorCol already chooses the validation rows. "
                f"Received: {self.getOrDefault(self.validationFraction)}."
            )
        config = self._fit_config()
        source.facts.check_rates(config, replacing="learningRate", scaling="scaleLearningRate")
        if not config.is_synchronous:
            check_algorithm(config)
            check_asynchronous_callbacks(self.getOrDefault("callbacks"))
        return config

    def _fit_config(self) -> FitConfig:
        return FitConfig(
            mode=self.getOrDefault(self.mode),
            num_workers=self.getOrDefault(self.numWorkers),
            epochs=self.getOrDefault(self.epochs),
            batch_size=self.getOrDefault(self.batchSize),
            validation_fraction=self.getOrDefault(self.validationFraction),
            shuffle=self.getOrDefault(self.shuffle),
            seed=self.getOrDefault(self.seed),
            learning_rate=optional(self, self.learningRate),
            scale_learning_rate=self.getOrDefault(self.scaleLearningRate),
            frequency=self.getOrDefault(self.frequency),
            compression=optional(self, self.compression),
            bucket_bytes=optional(self, self.bucketBytes),
            sync_batch_norm=self.getOrDefault(self.syncBatchNorm),
            allow_batch_coupled_loss=self.getOrDefault(self.allowBatchCoupledLoss),
            verbose=self.getOrDefault(self.verbose),
            cache=self.getOrDefault(self.cache),
            steps_per_epoch=optional(self, self.stepsPerEpoch),
            bucket_by_length=self.getOrDefault(self.bucketByLength),
            asynchronous=self.asynchronous_options(),
            **self.placement_options(),
        )
