"""The params that say how rows are kept, prepared and batched on the workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from elephant.spark.accessors import optional, with_accessors
from elephant.training.job import BatchFunctions


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
