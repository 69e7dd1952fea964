"""The params of where a fit runs, and what becomes of it when it is interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from elephant.config import Timeouts
from elephant.errors import ConfigurationError
from elephant.spark.accessors import optional, with_accessors


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
class PlaceParams(Params):
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

    def place_options(self) -> dict[str, Any]:
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
