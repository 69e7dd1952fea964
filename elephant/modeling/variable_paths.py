"""Paths of a model's variables: the keys of a fit's state, the same in every process and whatever the cuts are.

A variable's path is made of the names of the layers around it, from the model inward, and of its own name:
``encoder/dense_1/kernel``. Names that Keras has numbered by itself (``dense_7``, by a count of all the layers that a
process has made) are numbered anew, in the order of the layer that holds them, the first one without a number; so are
names that one layer holds twice. Names that the user has given stay, and the model's own is left out. What an optimizer
keeps for a weight has the weight's path and a name: ``encoder/dense_1/kernel/momentum``.

`Variable.path` is none of this: it depends on how often the process has built the model, and on whether from code or
from an archive; and two variables may have the same.

::

    model/PATH             a weight, or all rows of a table
    optimizer/PATH         a variable of the optimizer; optimizer_1/PATH of a second one of the model's, and so on
    scale/NAME             how an optimizer scales the loss: may be missing, and begins anew then
    random/RANK/PATH       a random generator, each rank its own; of stages, each replica
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elephant.backends.keras_private import optimized_variables, own_generators, own_layers, own_states, own_weights
from elephant.errors import ConfigurationError
from elephant.modeling.layers.sharded_embedding import ShardedEmbedding
from elephant.modeling.variables import frozen_weights, optimizers_of, read_values, state_variables
from elephant.net.buffers import equal_bits
from elephant.tables.stored import shape_of

MODEL, OPTIMIZER, SCALE = "model/", "optimizer/", "scale/"
_OF_MODEL = re.compile(r"(model|optimizer(_\d+)?|scale)/")
_NAMED_IN_ERRORS = 5


class _Names:
    """Names of what one layer holds, each once.

    Args:
        owner: The layer's name as Keras has it.
        own: The same in paths.
    """

    def __init__(self, owner: str, own: str) -> None:
        self._owner, self._own = owner, own
        self._given: set[str] = set()

    def of(self, name: str, kind: str) -> str:
        """Returns the name in paths of a thing of a class."""
        if name.startswith(f"{self._owner}_"):
            # Layers name inner ones after themselves.
            name = self._own + name.removeprefix(self._owner)
        name = without_number(name, kind)
        found, count = name, 0
        while found in self._given:
            count += 1
            found = f"{name}_{count}"
        self._given.add(found)
        return found


def without_number(name: str, kind: str) -> str:
    """Returns a name without the number that Keras has given it; the user's own names as they are.

    >>> without_number("dense_7", "Dense"), without_number("forward_lstm_2", "LSTM"), without_number("block_4", "Dense")
    ('dense', 'forward_lstm', 'block_4')
    """
    base = re.sub(r"_\d+$", "", name)
    return base if base.replace("_", "").endswith(kind.replace("_", "").lower()) else name


def variable_paths(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the variables of a built model by path, those of its random generators too, in `variables`' order."""
    return _variables_and_tables(model)[0]


def _variables_and_tables(model: keras.Model) -> tuple[dict[str, keras.Variable], dict[str, keras.Variable]]:
    found: dict[str, keras.Variable] = {}
    tables: dict[str, Any] = {}
    seen: set[int] = set()

    def visit(layer: keras.layers.Layer, prefix: str, own: str) -> None:
        names = _Names(layer.name, own)
        generators = [generator.state for generator in own_generators(layer)]
        for variable in (*own_weights(layer), *own_states(layer), *generators):
            if id(variable) not in seen:
                found[prefix + names.of(variable.name, "variable")] = variable
        seen.update(map(id, (*own_weights(layer), *own_states(layer), *generators)))
        if isinstance(layer, ShardedEmbedding):
            tables.update({prefix + names.of(one.name, "variable"): one for one in layer.table_variables})
        for inner in own_layers(layer):
            # A layer of two has the path of the first one that holds it.
            if id(inner) not in seen:
                seen.add(id(inner))
                name = names.of(inner.name, type(inner).__name__)
                visit(inner, f"{prefix}{name}/", name)

    visit(model, "", without_number(model.name, type(model).__name__))
    return found, tables


def optimizer_paths(
    optimizer: keras.optimizers.Optimizer, paths: Mapping[str, keras.Variable], prefix: str = OPTIMIZER
) -> dict[str, keras.Variable]:
    """Returns the variables of an optimizer by path.

    Args:
        paths: Those of the weights, of the whole model or of one stage.
        prefix: Of the optimizer.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    updated = {id(variable) for variable in optimized_variables(inner)}
    # Keras names what it keeps for a weight after the weight, in one word.
    by_word: dict[str, list[str]] = {}
    for path, variable in paths.items():
        if id(variable) in updated:
            by_word.setdefault(variable.path.replace("/", "_"), []).append(path)
    of_inner = {id(variable) for variable in inner.variables}
    names, found = _Names("", ""), {}
    for variable in optimizer.variables:
        if id(variable) not in of_inner:
            found[SCALE + variable.name] = variable
            continue
        weights, slot = _slot_of(variable.name, by_word)
        # Where weights share a word, the first variable of a name is for the first one.
        free = (path for weight in weights if (path := f"{prefix}{weight}/{slot}") not in found)
        found[next(free, None) or prefix + names.of(variable.name, "variable")] = variable
    return found


def _slot_of(name: str, by_word: Mapping[str, list[str]]) -> tuple[list[str], str]:
    """Returns the weights that a variable may have been named after, and the rest of its name."""
    words = name.split("_")
    for end in reversed(range(1, len(words))):
        weights = by_word.get("_".join(words[:end]))
        if weights is not None:
            return weights, "_".join(words[end:])
    return [], name


def state_paths(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the weights of a built model, the variables of its optimizers, and its tables by path.

    Random generators are left out.
    """
    paths, tables = _variables_and_tables(model)
    weights = {id(variable) for variable in model.weights}
    found = {MODEL + path: variable for path, variable in paths.items() if id(variable) in weights}
    found |= {MODEL + path: variable for path, variable in tables.items()}
    for number, optimizer in enumerate(optimizers_of(model)):
        found |= optimizer_paths(optimizer, paths, optimizer_prefix(number))
    return found


def optimizer_prefix(number: int) -> str:
    """Returns the beginning of the paths of one of a model's optimizers, by its place among them."""
    return f"optimizer_{number}/" if number else OPTIMIZER


def generator_paths(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the states of a model's random generators by path, without a replica."""
    weights = {id(variable) for variable in model.weights}
    return {path: variable for path, variable in variable_paths(model).items() if id(variable) not in weights}


def read_generators(states: Iterable[keras.Variable]) -> np.ndarray:
    """Returns the states of random generators, int64 of shape (generators, 2)."""
    rows = [np.asarray(keras.ops.convert_to_numpy(state)).astype(np.int64) for state in states]
    return np.reshape(rows, (-1, 2)).astype(np.int64)


def paths_in_order(model: keras.Model) -> list[str]:
    """Returns the paths of `elephant.modeling.variables.state_variables`, which other code knows by their places."""
    by_variable = {id(variable): path for path, variable in state_paths(model).items()}
    return [by_variable[id(variable)] for variable in state_variables(model)]


class StateReader:
    """Reads the state of one model time and again: a frozen weight once, as long as nothing assigns to it."""

    def __init__(self) -> None:
        # Copies of the frozen weights that are as they were the first time, by path; None before.
        self._frozen: dict[str, np.ndarray] | None = None

    def read(self, model: keras.Model) -> tuple[dict[str, np.ndarray], list[str]]:
        """Returns copies of what `state_paths` names, and the paths of frozen weights that are as they were at first.

        The copies of these are the same arrays each time.
        """
        paths = state_paths(model)
        if self._frozen is None:
            frozen = {id(variable) for variable in frozen_weights(model)}
            self._frozen = read_by_path({path: variable for path, variable in paths.items() if id(variable) in frozen})
        else:
            self._frozen = {
                path: value
                for path, value in self._frozen.items()
                if equal_bits(np.asarray(keras.ops.convert_to_numpy(paths[path])), value)
            }
        others = read_by_path({path: variable for path, variable in paths.items() if path not in self._frozen})
        return {path: self._frozen[path] if path in self._frozen else others[path] for path in paths}, [*self._frozen]


def read_by_path(variables: Mapping[str, keras.Variable]) -> dict[str, np.ndarray]:
    """Returns copies of the values of variables, by the same paths."""
    return dict(zip(variables, read_values(variables.values()), strict=True))


def assign_state(
    variables: Mapping[str, keras.Variable],
    arrays: Mapping[str, np.ndarray],
    *,
    remedy: str,
    partly: tuple[str, ...] = (),
) -> None:
    """Gives variables the values of a state.

    Args:
        variables: By path: all of `state_paths`, or those of one stage.
        arrays: By path; those of other kinds are left out.
        remedy: What to do where the state is that of another model.
        partly: Beginnings of paths that either side may lack. Those of `SCALE` are among them anyway.

    Raises:
        ConfigurationError: The state has other variables than these.
    """
    partly = (SCALE, *partly)
    expected = [path for path in variables if path in arrays or not path.startswith(partly)]
    of_state = [path for path in arrays if _OF_MODEL.match(path) and not path.startswith(partly)]
    values = {path: arrays[path] for path in expected if path in arrays}
    missing = [path for path in expected if path not in values]
    more = [path for path in of_state if path not in variables]
    shapes = {path: (shape_of(value), tuple(variables[path].shape)) for path, value in values.items()}
    others = [f"{path} of shape {kept}, not {own}" for path, (kept, own) in shapes.items() if kept != own]
    differences = {"without": missing, "with more": more, "with others": others}
    received = [f"{word}: {_listed(paths)}" for word, paths in differences.items() if paths]
    if received:
        raise ConfigurationError(
            f"model: expected a state with the {len(variables)} variables that the model and its optimizer have. "
            f"Received: one {'; '.join(received)}. {remedy}"
        )
    for path, value in values.items():
        variables[path].assign(value)


def _listed(paths: Sequence[str]) -> str:
    more = len(paths) - _NAMED_IN_ERRORS
    return ", ".join(paths[:_NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")
