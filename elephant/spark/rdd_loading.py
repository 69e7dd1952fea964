"""`load_spark_model`: from a file to the `SparkModel` or `SparkMLlibModel` that was saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from elephant.spark.mllib_model import SparkMLlibModel
from elephant.spark.model_files import read_model
from elephant.spark.rdd_model import SparkModel
from elephant.spark.rdd_options import OPTIONS


def load_spark_model(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None, *, trusted: bool | None = None
) -> SparkModel:
    """Returns the `SparkModel` or `SparkMLlibModel` that was saved, by elephant or by Elephas.

    Args:
        path: As `SparkModel.save` takes it. A file that Keras alone has written becomes a `SparkModel` too.
        custom_objects: Custom layers, losses, metrics and functions by name.
        trusted: Whether code in the file, such as lambdas, may run. None asks the Spark setting
            ``spark.elephant.trustSavedModels``, which is false unless it is set.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigurationError: Keras cannot load it, or it holds code that is not trusted.
    """
    model, saved = read_model(path, custom_objects, trusted=trusted)
    kind = SparkMLlibModel if saved.get("class_name") == "SparkMLlibModel" else SparkModel
    known = ("mode", "frequency", "num_workers", "batch_size", "port", *OPTIONS)
    config = {name: value for name, value in saved.get("config", {}).items() if name in known}
    return kind(model, custom_objects=custom_objects, **config)
