"""Values of a stage's variables, read from a model's archive: of a file on the disk, the members of the stage alone."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from elephant.backends.keras_private import flat_layers, load_some_layers
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.archive_inspection import UNREADABLE
from elephant.modeling.keras_archive import extract_weights
from elephant.modeling.model_spec import ModelSpec
from elephant.modeling.stages import OPTION, ModelStage
from elephant.storage.filesystem import scratch_folder

_OPTIMIZER = "optimizer/vars"


def load_stage(spec: ModelSpec, model: keras.Model, stage: ModelStage, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives the variables of a stage, and of its optimizer, the values that they have in the whole model.

    The other variables are not read. What a function builds has its initializers' values already.

    Args:
        spec: The model's source.
        model: What `ModelSpec.build_structure` returned.
        stage: A part of it.
        optimizer: That of the stage's weights, built; a copy of the model's.

    Raises:
        ConfigurationError: The archive is damaged, or of another model.
    """
    if spec.archive is not None:
        with tempfile.TemporaryDirectory(prefix="elephant-values-", dir=scratch_folder()) as folder:
            try:
                file = spec.weights_file or extract_weights(spec.archive, Path(folder))
                _load_layers(file, model, stage)
                _load_optimizer(file, model, optimizer)
            except UnsupportedError:
                raise
            except UNREADABLE as error:
                raise ConfigurationError(
                    f"model: expected the weights that Keras has saved of {model.name!r}. Received: "
                    f"{type(error).__name__}: {error}. Save the model again."
                ) from error
    if spec.variables is not None:
        _assign_listed(spec.variables, model, stage, optimizer)


def _load_layers(file: Path, model: keras.Model, stage: ModelStage) -> None:
    own = {id(layer) for layer in flat_layers(stage)}
    others = [
        layer
        for layer in flat_layers(model, include_self=False)
        # A nested model may be cut: what is inside of it is looked at by itself.
        if not any(id(inner) in own for inner in flat_layers(layer))
    ]
    load_some_layers(model, file, [*others, model.optimizer])


def _load_optimizer(file: Path, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives an optimizer its part of what was saved, where the saved one had been used."""
    paths = _optimizer_paths(model)
    with h5py.File(file) as saved:
        if _OPTIMIZER in saved and len(saved[_OPTIMIZER]) == len(paths):
            for variable, place in _places(optimizer, paths):
                variable.assign(np.array(saved[_OPTIMIZER][str(place)]))


def _assign_listed(
    values: Sequence[np.ndarray], model: keras.Model, stage: ModelStage, optimizer: keras.optimizers.Optimizer
) -> None:
    """Gives variables their values of a list, as `elephant.modeling.variables.read_variables` returns it."""
    own, weights = {id(variable) for variable in stage.variables}, model.weights
    for variable, value in zip(weights, values, strict=False):
        if id(variable) in own:
            variable.assign(value)
    of_optimizer, paths = values[len(weights) :], _optimizer_paths(model)
    if len(of_optimizer) == len(paths):
        for variable, place in _places(optimizer, paths):
            variable.assign(of_optimizer[place])


def _optimizer_paths(model: keras.Model) -> list[str]:
    """Returns the paths of the variables that the optimizer of the whole model has, in its order.

    It is built for stand-ins of the weights, of one element each.
    """
    whole = type(model.optimizer).from_config(model.optimizer.get_config())
    whole.build([_stand_in(variable) for variable in model.trainable_variables])
    return [variable.path for variable in whole.variables]


def _stand_in(weight: Any) -> keras.Variable:
    """Returns a variable of one element with the path, kind and dimensions of a weight."""
    *scopes, name = weight.path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(np.zeros((1,) * len(weight.shape)), dtype=weight.dtype, name=name)


def _places(optimizer: keras.optimizers.Optimizer, paths: Sequence[str]) -> list[tuple[Any, int]]:
    """Returns the variables of a stage's optimizer with their places among those of the whole one.

    Some have no path in the optimizer's scope, and names that are numbered: they are known where each stage has all.

    Raises:
        UnsupportedError: Some are not known.
    """
    places = {path: place for place, path in enumerate(paths) if "/" in path}
    unnamed = [place for place, path in enumerate(paths) if "/" not in path]
    others = [variable for variable in optimizer.variables if variable.path not in places]
    if len(others) != len(unnamed) or len(places) + len(unnamed) < len(paths):
        raise UnsupportedError(
            f"{OPTION}: expected an optimizer whose state is known by the paths of its variables. Received: "
            f"{type(optimizer).__name__} that has been used. Compile the model anew, which begins with an optimizer "
            "that has not."
        )
    named = [(variable, places[variable.path]) for variable in optimizer.variables if variable.path in places]
    return [*named, *zip(others, unnamed, strict=True)]
