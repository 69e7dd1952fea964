"""State of a model's optimizer, of which each rank of a fit has a part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import rebuild_optimizer
from elephant.backends.optimizer_part import OptimizerPart
from elephant.collective.communicator import Communicator
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.model_info import has_own_step
from elephant.modeling.variable_paths import MODEL, OPTIMIZER, paths_in_order, read_by_path, state_paths, variable_paths
from elephant.modeling.variables import optimizers_of, parts_of, read_variables
from elephant.net.buffers import portable

_WITHOUT = "Or leave shardOptimizer out."


class DividedOptimizer:
    """Optimizer of which each rank has the slots of the variables that it updates, and whole in what leaves the ranks.

    All ranks make it, of a model that is whole and equal on all of them: the optimizer keeps the values that it has.

    Raises:
        UnsupportedError: The model or its optimizer cannot be divided so.
    """

    def __init__(self, model: keras.Model, communicator: Communicator) -> None:
        _require_dividable(model)
        self._communicator = communicator
        # In the order in which other code knows the variables by their places.
        self._paths = paths_in_order(model)
        self.optimizer_part = OptimizerPart(communicator, model.trainable_variables)
        before = _optimizer_variables(model)
        _require_slots_of_weights(model, before)
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        rebuild_optimizer(inner, [self.optimizer_part.variables[place] for place in self.optimizer_part.updated])
        own = _optimizer_variables(model)
        known = {path for paths in communicator.allgather_object([*own]) for path in paths}
        if known != before.keys():
            _refuse_slots(inner, known ^ before.keys())
        for path, variable in own.items():
            variable.assign(before[path])
        current().divide_update(model.optimizer, self.optimizer_part)

    @property
    def paths(self) -> list[str]:
        """Paths of all variables that training changes, those of all ranks' slots too."""
        return list(self._paths)

    def gather(self, model: keras.Model) -> dict[str, np.ndarray]:
        """Returns the slots that other ranks have, by path, on rank 0, and nothing on others; all ranks call it."""
        own = read_by_path(_optimizer_variables(model))
        listed = self._communicator.allgather_object([*own])
        if self._communicator.rank:
            missing = [path for path in own if path not in listed[0]]
            self._communicator.send([portable(own[path]) for path in missing], dst=0)
            return {}
        found: dict[str, np.ndarray] = {}
        for rank, paths in enumerate(listed[1:], 1):
            missing = [path for path in paths if path not in listed[0]]
            found |= zip(missing, map(np.array, self._communicator.recv(rank)), strict=True)
        return found

    def read_variables(self, model: keras.Model) -> list[np.ndarray]:
        """Returns on rank 0 what `elephant.modeling.variables.read_variables` returns of a whole optimizer."""
        of_others = self.gather(model)
        if self._communicator.rank:
            return []
        values = {**of_others, **read_by_path(state_paths(model))}
        return [values[path] for path in self._paths]


def divided_optimizer(model: keras.Model, communicator: Communicator, *, wanted: bool) -> DividedOptimizer | None:
    """Divides the state of a model's optimizer over the ranks; None where nobody wants that, or one rank has all."""
    if not wanted or communicator.world_size == 1 or not model.trainable_variables:
        return None
    return DividedOptimizer(model, communicator)


def read_whole(model: keras.Model, divided: DividedOptimizer | None, communicator: Communicator) -> list[np.ndarray]:
    """Returns on rank 0 all variables that training changes, and nothing on others; all ranks call it."""
    if divided is not None:
        return divided.read_variables(model)
    return [] if communicator.rank else read_variables(model)


def require_divided_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises UnsupportedError for callbacks of a rank that look at the whole state of its optimizer.

    Args:
        callbacks: Those that run on ranks.
    """
    saving = (keras.callbacks.ModelCheckpoint, getattr(keras.callbacks, "OrbaxCheckpoint", ()))
    for callback in callbacks:
        if isinstance(callback, saving) and not getattr(callback, "save_weights_only", False):
            raise UnsupportedError(
                f"shardOptimizer: expected callbacks on the workers that save weights alone, because each worker has a "
                f"part of the optimizer's state. Received: {type(callback).__name__}. Pass save_weights_only=True, or "
                f"save_freq='epoch', with which it runs on the driver; checkpointPath keeps the whole. {_WITHOUT}"
            )


def _optimizer_variables(model: keras.Model) -> dict[str, keras.Variable]:
    return {path: variable for path, variable in state_paths(model).items() if not path.startswith(MODEL)}


def _require_slots_of_weights(model: keras.Model, variables: Mapping[str, keras.Variable]) -> None:
    """Raises UnsupportedError for slots whose names do not tell of which weight they are."""
    weights = {id(variable) for variable in model.trainable_variables}
    paths = [OPTIMIZER + path for path, variable in variable_paths(model).items() if id(variable) in weights]
    others = {
        path for path, variable in variables.items() if len(variable.shape) and path.rpartition("/")[0] not in paths
    }
    if others:
        _refuse_slots(getattr(model.optimizer, "inner_optimizer", model.optimizer), others)


def _refuse_slots(optimizer: keras.optimizers.Optimizer, paths: Collection[str]) -> NoReturn:
    raise UnsupportedError(
        "shardOptimizer: expected an optimizer whose variables are slots that are named after weights, and made in its "
        f"build(). Received: {type(optimizer).__name__}, with {', '.join(sorted(paths)[:3])}. {_WITHOUT}"
    )


def _require_dividable(model: keras.Model) -> None:
    if len(optimizers_of(model)) > 1 or has_own_step(model):
        raise UnsupportedError(
            "shardOptimizer: expected a model with one optimizer and Keras' own train_step, after which ranks exchange "
            f"what each has updated. Received: {model.name!r}, which has another one. {_WITHOUT}"
        )
    if model.jit_compile is True and not current().compiles_divided_updates:
        raise UnsupportedError(
            f"shardOptimizer: expected a model that {current().title} does not compile, because ranks exchange weights "
            f"at the end of each step. Received: {model.name!r} with jit_compile=True. Compile it without. {_WITHOUT}"
        )
    optimizer, *more = parts_of(model.optimizer)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if more or optimizer is not inner or type(inner).apply is not keras.optimizers.Optimizer.apply:
        raise UnsupportedError(
            "shardOptimizer: expected one optimizer with Keras' own apply(), which updates each variable by itself. "
            f"Received: {type(inner).__name__}. {_WITHOUT}"
        )
    if inner.use_ema:
        raise UnsupportedError(
            "shardOptimizer: expected an optimizer without moving averages of weights, which take the place of all "
            f"weights in the end. Received: {type(inner).__name__} with use_ema=True. {_WITHOUT}"
        )
    if inner.global_clipnorm and inner.gradient_accumulation_steps:
        raise ConfigurationError(
            "shardOptimizer: expected global_clipnorm or gradient_accumulation_steps, because a worker has the sums of "
            f"its own part of the gradients alone. Received: {type(inner).__name__} with both. Use clipnorm or "
            f"clipvalue. {_WITHOUT}"
        )
