"""Keras models in ``.h5`` files, with what Keras 3 itself does not bring back from them.

Keras 3 writes this older form, and reads its weights. But it takes the optimizer out of the compile settings of the
model that it saves, does not load the optimizer's state, and cannot compile models whose loss was given as
``"mse"`` or another short name. So the settings and the state are written beside, in attributes and a group that
Keras leaves alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

# Elephas' name of the attribute, so that its files are understood.
_CONFIG = "distributed_config"
_COMPILED = "elephant_compile_config"
_OPTIMIZER = "elephant_optimizer"


def save_hdf5(path: Path, model: keras.Model, config: str) -> None:
    """Writes a model, its compile settings, its optimizer's state and a text.

    Args:
        path: The file to make.
        model: A compiled model.
        config: Kept beside the model.
    """
    settings = dict(model._compile_config.config)
    compiled = json.dumps(model.get_compile_config())
    try:
        model.save(path)
    finally:
        model._compile_config.config.update(settings)
    with h5py.File(path, "a") as file:
        file.attrs[_CONFIG] = config
        group = file.create_group(_OPTIMIZER)
        # Large models have long settings, for which an attribute is too small.
        group.create_dataset(_COMPILED, data=np.void(compiled.encode()))
        for number, variable in enumerate(model.optimizer.variables if model.optimizer.built else []):
            group.create_dataset(str(number), data=keras.ops.convert_to_numpy(variable))


def load_hdf5(path: Path, custom_objects: Mapping[str, Any], *, safe_mode: bool) -> tuple[keras.Model, str | None]:
    """Returns the model of a file, and the text beside it, if there is one.

    Args:
        path: A file of `save_hdf5`, of Keras or of Elephas.
        custom_objects: Custom layers, losses, metrics and functions by name.
        safe_mode: Whether Keras refuses code in the file.
    """
    with h5py.File(path, "r") as file:
        config = file.attrs.get(_CONFIG)
        training = file.attrs.get("training_config")
        compiled = file[_OPTIMIZER][_COMPILED][()].tobytes().decode() if _OPTIMIZER in file else None
        state = _state(file)
    model = keras.saving.load_model(path, custom_objects=dict(custom_objects), compile=False, safe_mode=safe_mode)
    with keras.saving.custom_object_scope(dict(custom_objects)):
        if compiled is not None:
            model.compile_from_config(json.loads(compiled))
            _restore(model.optimizer, state)
        elif training is not None:
            model.compile(**_arguments(json.loads(training)))
    return model, None if config is None else str(config)


def _state(file: h5py.File) -> list[np.ndarray]:
    group = file.get(_OPTIMIZER, {})
    return [np.asarray(group[str(number)]) for number in range(len(group) - 1)]


def _restore(optimizer: keras.optimizers.Optimizer, state: list[np.ndarray]) -> None:
    """Gives an optimizer that was built for a model's variables its state back."""
    if len(state) == len(optimizer.variables):
        for variable, value in zip(optimizer.variables, state, strict=True):
            variable.assign(value)


def _arguments(training: dict[str, Any]) -> dict[str, Any]:
    """Returns what a model of Keras' own file is compiled with.

    Names, of which ``"mse"`` is one, need no deserialising.
    """
    names = ("loss", "loss_weights", "metrics", "weighted_metrics")
    given = {name: _deserialised(training.get(name)) for name in names}
    return {"optimizer": keras.optimizers.deserialize(training["optimizer_config"]), **given}


def _deserialised(config: Any) -> Any:
    if isinstance(config, dict) and "class_name" in config:
        return keras.saving.deserialize_keras_object(config)
    if isinstance(config, dict):
        return {name: _deserialised(part) for name, part in config.items()}
    if isinstance(config, list):
        return [_deserialised(part) for part in config]
    return config
