"""State of a model in stages: the variables of all stages by path, whatever the cuts are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from elephant.collective.communicator import Communicator
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.stages import OPTION, ModelStage
from elephant.modeling.variables import random_generators

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


def whole_variables(model: keras.Model) -> dict[str, Any]:
    """Returns the variables of a model and of its optimizer, by the paths of `stage_variables`."""
    of_optimizer = {_OF_OPTIMIZER + variable.path: variable for variable in model.optimizer.variables}
    return {variable.path: variable for variable in model.variables} | of_optimizer


def share_state(own: Mapping[str, Any], whole: Mapping[str, Any], stages: Communicator, *, optimizer: bool) -> None:
    """Gives the variables of a whole model the values that they have in their stages, on all ranks of a replica.

    Args:
        own: The variables of this rank's stage.
        whole: Those of the whole model.
        stages: The ranks of the replica.
        optimizer: Whether those of the optimizer get theirs, too.
    """
    chosen = [name for name in own if name in whole and (optimizer or not name.startswith(_OF_OPTIMIZER))]
    for root in range(stages.world_size):
        for name in stages.broadcast_object(chosen, root):
            variable = own[name] if root == stages.rank else whole[name]
            value = stages.broadcast(keras.ops.convert_to_numpy(variable), root)
            if whole[name] is not own.get(name):
                whole[name].assign(value)


def gathered_state(own: Mapping[str, Any], stages: Communicator) -> dict[str, np.ndarray] | None:
    """Returns the values of the variables of all stages on the rank of the last one, and None on the others.

    Args:
        own: The variables of this rank's stage.
        stages: The ranks of one replica, the last stage first.
    """
    if stages.rank:
        names = np.frombuffer(json.dumps(list(own)).encode(), np.uint8)
        stages.send([names, *map(keras.ops.convert_to_numpy, own.values())], 0)
        return None
    whole = {name: np.array(keras.ops.convert_to_numpy(variable)) for name, variable in own.items()}
    for rank in range(1, stages.world_size):
        names, *values = stages.recv(rank)
        whole |= dict(zip(json.loads(names.tobytes()), values, strict=True))
    return whole


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


def share_values(stage: ModelStage, replicas: Communicator) -> None:
    """Gives replicas the same values, and random generators of their own."""
    generators = {id(variable) for variable in random_generators(stage)}
    for variable in stage.variables:
        value = replicas.broadcast(keras.ops.convert_to_numpy(variable))
        if id(variable) in generators and replicas.rank:
            seeds = np.random.SeedSequence([*map(int, value.ravel()), replicas.rank])
            value = seeds.generate_state(value.size).reshape(value.shape).astype(value.dtype)
        variable.assign(value)
