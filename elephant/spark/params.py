"""The params of estimator and model: names, documentation, converters and defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
from pyspark.ml.param import Param, Params, TypeConverters

from elephant.compression import check_compression
from elephant.config import FitConfig, check_frequency, check_mode
from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import ModelSource
from elephant.spark.accessors import optional, with_accessors
from elephant.spark.choice import ColumnChoice
from elephant.spark.column_params import ColumnParams, LabelParams
from elephant.spark.data_params import DataParams
from elephant.spark.given_models import source_of
from elephant.spark.place_params import PlaceParams
from elephant.spark.server_params import ServerParams
from elephant.training.algorithms import check_algorithm
from elephant.training.callbacks import check_callbacks
from elephant.training.driver_callbacks import check_asynchronous_callbacks


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


def to_model(value: Any) -> ModelSource:
    """Returns the model as a value that travels."""
    return source_of(value)


@with_accessors
class TrainingParams(ColumnParams, LabelParams, DataParams, ServerParams, PlaceParams):
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

    def column_choice(self) -> ColumnChoice:
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
            **self.place_options(),
        )
