"""Models as users give them: in hand, as a function, as a path to a saved one, or fitted before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
from pyspark.sql import SparkSession

from elephant.errors import ConfigurationError
from elephant.modeling.source import ModelSource, model_source
from elephant.spark.storage import read_file

_ENDINGS = (".keras", ".h5", ".hdf5")


def source_of(model: object, custom_objects: Mapping[str, Any] | None = None) -> ModelSource:
    """Returns the source of a user's model.

    Args:
        model: A compiled `keras.Model`; a function without arguments that returns one; the path of one that Keras
            has saved, local or wherever Spark's Hadoop client reads; or a fitted `KerasModel`, with which
            training goes on from its weights and its optimizer's state.
        custom_objects: Custom layers, losses and metrics by name.

    Raises:
        ConfigurationError: It is none of these, is not compiled, or cannot be rebuilt.
    """
    if isinstance(model, (str, os.PathLike)):
        return model_source(_loaded(os.fspath(model), custom_objects), custom_objects)
    fitted = None if isinstance(model, keras.Model) else getattr(model, "source", None)
    return model_source(fitted if isinstance(fitted, ModelSource) else model, custom_objects)


def _loaded(path: str, custom_objects: Mapping[str, Any] | None) -> keras.Model:
    if not path.endswith(_ENDINGS):
        raise ConfigurationError(f"model: expected a path that ends in {', '.join(_ENDINGS)}. Received: {path!r}.")
    content = _content(path)
    with tempfile.TemporaryDirectory(prefix="elephant-model-") as folder:
        local = Path(folder) / f"model{path[path.rindex('.') :]}"
        local.write_bytes(content)
        try:
            return keras.saving.load_model(local, custom_objects=dict(custom_objects or {}))
        except (NotImplementedError, OSError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"model: Keras cannot load {path}: {error} Pass its custom classes and functions as "
                "customObjects={'Name': Name}."
            ) from error


def _content(path: str) -> bytes:
    local = Path(path.removeprefix("file://"))
    if local.is_file():
        return local.read_bytes()
    session = SparkSession.getActiveSession()
    content = None if session is None else read_file(session, path)
    if content is None:
        where = "here" if session is None else "here or where Spark's Hadoop client reads"
        hint = " Start a Spark session first, to read other file systems." if session is None else ""
        raise ConfigurationError(
            f"model: expected the path of a saved model. Received: {path!r}: no file {where}.{hint}"
        )
    return content
