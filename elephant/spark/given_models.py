"""Models as users give them: in hand, as a function, as a path to a saved one, or fitted before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras

from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import ModelSource, model_source
from elephant.spark.model_files import read_model


def source_of(
    model: object, custom_objects: Mapping[str, Any] | None = None, *, trusted: bool | None = None
) -> ModelSource:
    """Returns the source of a user's model.

    Args:
        model: A compiled `keras.Model`; a function without arguments that returns one; the path of one that Keras
            has saved, wherever `elephant.spark.storage.read_model_bytes` reads; or a fitted `KerasModel`, with
            which training goes on from its weights and its optimizer's state.
        custom_objects: Custom layers, losses and metrics by name.
        trusted: Whether code in the file of a path may run: `elephant.spark.trust.is_trusted`.

    Raises:
        ConfigurationError: It is none of these, is not compiled, or cannot be rebuilt; its file holds code that is
            not trusted.
    """
    if isinstance(model, (str, os.PathLike)):
        return model_source(_loaded(model, custom_objects, trusted), custom_objects)
    fitted = None if isinstance(model, keras.Model) else getattr(model, "source", None)
    return model_source(fitted if isinstance(fitted, ModelSource) else model, custom_objects)


def _loaded(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None, trusted: bool | None
) -> keras.Model:
    try:
        return read_model(path, custom_objects, trusted=trusted)[0]
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"model: expected the path of a saved model. Received: {os.fspath(path)!r}, where there is no file."
        ) from error
