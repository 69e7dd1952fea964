"""State of a model in stages: the variables of all stages by path, whatever the cuts are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elephant.collective.communicator import Communicator
from elephant.modeling.stages import ModelStage
from elephant.modeling.variable_paths import (
    MODEL,
    OPTIMIZER,
    SCALE,
    assign_state,
    generator_paths,
    optimizer_paths,
    read_generators,
    state_paths,
    variable_paths,
)
from elephant.modeling.variables import random_generators

_RANDOM = "random/"
_SAME_MODEL = "Load the state of the same model, whatever its cuts were."


def stage_variables(
    model: keras.Model, stage: ModelStage, optimizer: keras.optimizers.Optimizer, replica: int
) -> dict[str, Any]:
    """Returns the variables of a stage and of its optimizer by path, as `elephant.modeling.variable_paths` has them."""
    own = {id(variable) for variable in stage.variables}
    paths = {path: variable for path, variable in variable_paths(model).items() if id(variable) in own}
    drawn = {path: variable for path, variable in generator_paths(model).items() if path in paths}
    weights = {MODEL + path: variable for path, variable in paths.items() if path not in drawn}
    generators = {f"{_RANDOM}{replica}/{path}": variable for path, variable in drawn.items()}
    return weights | optimizer_paths(optimizer, paths) | generators


def whole_variables(model: keras.Model, replica: int) -> dict[str, Any]:
    """Returns the variables of a model and of its optimizer, by the paths of `stage_variables`."""
    drawn = {f"{_RANDOM}{replica}/{path}": variable for path, variable in generator_paths(model).items()}
    return state_paths(model) | drawn


def share_state(own: Mapping[str, Any], whole: Mapping[str, Any], stages: Communicator, *, optimizer: bool) -> None:
    """Gives the variables of a whole model the values that they have in their stages, on all ranks of a replica.

    Args:
        own: The variables of this rank's stage.
        whole: Those of the whole model.
        stages: The ranks of the replica.
        optimizer: Whether those of the optimizer get theirs, too.
    """
    kinds = (MODEL, _RANDOM, OPTIMIZER, SCALE) if optimizer else (MODEL, _RANDOM)
    chosen = [path for path in own if path in whole and path.startswith(kinds)]
    for root in range(stages.world_size):
        for path in stages.broadcast_object(chosen, root):
            variable = own[path] if root == stages.rank else whole[path]
            value = stages.broadcast(keras.ops.convert_to_numpy(variable), root)
            if whole[path] is not own.get(path):
                whole[path].assign(value)


def gathered_state(
    own: Mapping[str, Any], stages: Communicator, replicas: Communicator
) -> dict[str, np.ndarray] | None:
    """Returns the values of the variables of all stages on rank 0, and None on the others.

    Args:
        own: The variables of this rank's stage.
        stages: The ranks of this replica, the last stage first.
        replicas: The ranks of this stage, each with random generators of its own.
    """
    drawn = [path for path in own if path.startswith(_RANDOM)]
    whole = {path: np.array(keras.ops.convert_to_numpy(own[path])) for path in own if path not in drawn}
    for replica, rows in enumerate(replicas.allgather(read_generators(own[path] for path in drawn))):
        paths = [f"{_RANDOM}{replica}/{path.split('/', 2)[2]}" for path in drawn]
        whole |= dict(zip(paths, rows, strict=True))
    if replicas.rank:
        return None
    if stages.rank:
        stages.send([_bytes_of(list(whole)), *whole.values()], 0)
        return None
    for rank in range(1, stages.world_size):
        names, *values = stages.recv(rank)
        whole |= dict(zip(_names_of(names), values, strict=True))
    return whole


def gathered_weights(model: keras.Model, stage: ModelStage, stages: Communicator) -> Iterator[np.ndarray]:
    """Yields a model's weights in its order, one at a time, on the rank of the last stage, and none on the others.

    Args:
        model: The whole one, whose other stages need no values.
        stages: The ranks of one replica, the last stage first.
    """
    own = {id(variable) for variable in stage.variables}
    path_of = {id(variable): path for path, variable in variable_paths(model).items()}
    weights = {path_of[id(variable)]: variable for variable in model.weights}
    given = [path for path, variable in weights.items() if id(variable) in own]
    if stages.rank:
        stages.send([_bytes_of(given)], 0)
        for path in given:
            # Each is asked for: a message that waits is a copy.
            stages.recv(0)
            stages.send([keras.ops.convert_to_numpy(weights[path])], 0)
        return
    owners = {path: rank for rank in range(1, stages.world_size) for path in _names_of(stages.recv(rank)[0])}
    for path, variable in weights.items():
        if id(variable) in own:
            yield np.array(keras.ops.convert_to_numpy(variable))
        else:
            stages.send([], owners[path])
            (value,) = stages.recv(owners[path])
            yield value


def _bytes_of(names: Sequence[str]) -> np.ndarray:
    return np.frombuffer(json.dumps(list(names)).encode(), np.uint8)


def _names_of(array: np.ndarray) -> list[str]:
    names: list[str] = json.loads(array.tobytes())
    return names


def load_variables(own: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> None:
    """Gives the variables of a stage the values of a state, which may lack what is none of the model's weights.

    Raises:
        ConfigurationError: A weight is not there, or of another shape.
    """
    kept = {path: state[path] for path in own if path in state}
    assign_state(own, kept, remedy=_SAME_MODEL, partly=(OPTIMIZER, _RANDOM))


def share_values(stage: ModelStage, replicas: Communicator) -> None:
    """Gives replicas the same values, and random generators of their own."""
    generators = {id(variable) for variable in random_generators(stage)}
    for variable in stage.variables:
        value = replicas.broadcast(keras.ops.convert_to_numpy(variable))
        if id(variable) in generators and replicas.rank:
            seeds = np.random.SeedSequence([*map(int, value.ravel()), replicas.rank])
            value = seeds.generate_state(value.size).reshape(value.shape).astype(value.dtype)
        variable.assign(value)
