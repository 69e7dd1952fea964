"""State of a model in stages: the variables of all stages by path, whatever the cuts are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elephant.collective.communicator import Communicator
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.stages import OPTION, ModelStage
from elephant.modeling.variables import moving_statistics, random_generators

_OF_OPTIMIZER = "optimizer/"


def stage_variables(model: keras.Model, stage: ModelStage, optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns the variables of a stage and of its optimizer, by path.

    Raises:
        UnsupportedError: Two variables of the model have one path.
    """
    of_model = [variable.path for variable in model.variables]
    repeated = sorted({path for path in of_model if of_model.count(path) > 1})
    if repeated:
        raise UnsupportedError(
            f"{OPTION}: expected variables with paths of their own. Received: {', '.join(repeated)}, twice. Give "
            "the layers names."
        )
    own = {variable.path: variable for variable in stage.variables}
    return own | {_OF_OPTIMIZER + variable.path: variable for variable in optimizer.variables}


def gathered_state(own: Mapping[str, Any], stages: Communicator) -> dict[str, np.ndarray] | None:
    """Returns the values of the variables of all stages on the rank of the last one, and None on the others.

    Args:
        own: The variables of this rank's stage.
        stages: The ranks of one replica, the last stage first.
    """
    if stages.rank:
        stages.send([_bytes_of(list(own)), *map(keras.ops.convert_to_numpy, own.values())], 0)
        return None
    whole = {name: np.array(keras.ops.convert_to_numpy(variable)) for name, variable in own.items()}
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
    own = {variable.path for variable in stage.variables}
    given = [variable for variable in model.weights if variable.path in own]
    if stages.rank:
        stages.send([_bytes_of([variable.path for variable in given])], 0)
        for variable in given:
            # Each is asked for: a message that waits is a copy.
            stages.recv(0)
            stages.send([keras.ops.convert_to_numpy(variable)], 0)
        return
    owners = {path: rank for rank in range(1, stages.world_size) for path in _names_of(stages.recv(rank)[0])}
    for variable in model.weights:
        if variable.path in own:
            yield np.array(keras.ops.convert_to_numpy(variable))
        else:
            stages.send([], owners[variable.path])
            (value,) = stages.recv(owners[variable.path])
            yield value


def _bytes_of(names: Sequence[str]) -> np.ndarray:
    return np.frombuffer(json.dumps(list(names)).encode(), np.uint8)


def _names_of(array: np.ndarray) -> list[str]:
    names: list[str] = json.loads(array.tobytes())
    return names


def assign_state(own: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> None:
    """Gives variables the values of a state, which may lack the optimizer's part.

    Raises:
        ConfigurationError: A variable of the model is not there.
    """
    for name, variable in own.items():
        if name in state:
            variable.assign(state[name])
        elif not name.startswith(_OF_OPTIMIZER):
            raise ConfigurationError(f"state: expected a value of {name!r}. Received: {', '.join(state)}.")


def average_statistics(stage: ModelStage, replicas: Communicator) -> None:
    """Gives moving statistics the means over the replicas."""
    for variable in moving_statistics(stage):
        variable.assign(replicas.allreduce(keras.ops.convert_to_numpy(variable), "mean"))


def share_values(stage: ModelStage, replicas: Communicator) -> None:
    """Gives replicas the same values, and random generators of their own."""
    generators = {id(variable) for variable in random_generators(stage)}
    for variable in stage.variables:
        value = replicas.broadcast(keras.ops.convert_to_numpy(variable))
        if id(variable) in generators and replicas.rank:
            seeds = np.random.SeedSequence([*map(int, value.ravel()), replicas.rank])
            value = seeds.generate_state(value.size).reshape(value.shape).astype(value.dtype)
        variable.assign(value)
