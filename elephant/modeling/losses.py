"""What a model was compiled with: the loss of each output, and which outputs metrics look at."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elephant.data.nest import Nest, num_leaves
from elephant.errors import ConfigurationError, UnsupportedError

_MEAN_REDUCTIONS = {"sum_over_batch_size", "mean"}


def check_reduction(loss: Any) -> None:
    """Raises UnsupportedError unless a batch's loss is the mean over its rows.

    Only then is the average of the ranks' gradients, weighted by their rows, the
    gradient of all rows together.
    """
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction not in _MEAN_REDUCTIONS:
        raise UnsupportedError(
            f"loss: expected the reduction 'sum_over_batch_size'. Received: {reduction!r}, "
            "for which N workers would not give what one process gives. Compile with "
            "reduction='sum_over_batch_size' and scale the learning rate instead."
        )


def by_output(loss: Any, nest: Nest, names: Sequence[str], given: Sequence[str]) -> list[Any]:
    """Returns the loss of each output, in whichever of Keras' forms they were compiled; None where there is none.

    Args:
        loss: One for all outputs; or a list or dictionary that is nested as the outputs are, or by their names.
        nest: How the outputs are nested.
        names: Their names; in a dictionary of outputs its keys.
        given: Keras' own names of them.

    Raises:
        ConfigurationError: A list has another length than the outputs.

    >>> by_output({"b": "mse", "a": "mae"}, (0, 1), ["a", "b"], ["a", "b"])
    ['mae', 'mse']
    >>> by_output({"deep": ["mse", None], "flat": "mae"}, {"deep": (0, 1), "flat": 2}, ["x", "y", "flat"], ["x"] * 3)
    ['mse', None, 'mae']
    """
    losses: list[Any] = [None] * len(names)
    if len(names) == 1 and isinstance(loss, (list, tuple)) and isinstance(nest, int):
        return [loss[0] if loss else None]
    if isinstance(loss, Mapping) and not isinstance(nest, dict):
        return [loss.get(name, loss.get(other)) for name, other in zip(names, given, strict=True)]
    _spread(loss, nest, losses)
    return losses


def _spread(loss: Any, nest: Nest, losses: list[Any]) -> None:
    if isinstance(nest, int):
        losses[nest] = loss
    elif isinstance(loss, Mapping) and isinstance(nest, dict):
        for key, part in nest.items():
            _spread(loss.get(key), part, losses)
    elif isinstance(loss, (list, tuple)):
        parts = list(nest.values()) if isinstance(nest, dict) else list(nest)
        if len(loss) != len(parts):
            raise ConfigurationError(
                f"model: expected one loss for each of {num_leaves(nest)} outputs. Received: {loss!r}."
            )
        for one, part in zip(loss, parts, strict=True):
            _spread(one, part, losses)
    else:
        for part in nest.values() if isinstance(nest, dict) else nest:
            _spread(loss, part, losses)


def outputs_of_losses(loss: Any) -> tuple[list[str], Nest]:
    """Returns names of the outputs, and how they are nested, of a model that only its losses tell them of.

    >>> outputs_of_losses({"age": "mse", "kind": "mae"})
    (['age', 'kind'], {'age': 0, 'kind': 1})
    """
    if isinstance(loss, Mapping) and loss:
        names = [str(name) for name in loss]
        return names, {name: place for place, name in enumerate(names)}
    if isinstance(loss, (list, tuple)) and len(loss) > 1:
        return [str(place) for place in range(len(loss))], tuple(range(len(loss)))
    return ["output"], 0


def measured_outputs(model: keras.Model, names: Sequence[str], given: Sequence[str]) -> list[bool]:
    """Returns of each output whether a metric was compiled for it alone.

    Args:
        model: A compiled model.
        names: Names of its outputs; in a dictionary of outputs its keys.
        given: Keras' own names of them.
    """
    measured = [False] * len(names)
    compiled = getattr(model, "_compile_metrics", None)
    for metrics in (getattr(compiled, "_user_metrics", None), getattr(compiled, "_user_weighted_metrics", None)):
        for place, (name, other) in enumerate(zip(names, given, strict=True)):
            if isinstance(metrics, Mapping):
                found = metrics.get(name, metrics.get(other))
            elif isinstance(metrics, (list, tuple)) and len(metrics) == len(names) > 1:
                found = metrics[place]
            else:
                found = None
            measured[place] = measured[place] or bool(found)
    return measured


def check_compiled(model: keras.Model) -> None:
    """Raises ConfigurationError for what a model was compiled with and Keras would refuse in the first step alone.

    Keras resolves names of losses and metrics, and matches them with outputs, when the first batch comes. That is
    tried here, beside the model, with symbols in the place of labels and outputs. A model that does not know its
    outputs, and a class of the user's, which may make something else of them, are left to Keras.

    Args:
        model: A compiled model.
    """
    loss, metrics = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    for weight in keras.tree.flatten(getattr(loss, "_user_loss_weights", None)):
        if weight is not None and not _is_number(weight):
            raise ConfigurationError(
                f"model: expected numbers as loss_weights, the third argument of compile. Received: {weight!r}. "
                "Metrics go by their name: compile(optimizer, loss, metrics=[...])."
            )
    if not type(model).__module__.startswith("keras.") or not getattr(model, "outputs", None):
        return
    structure = getattr(model, "_outputs_struct", None)
    if structure is None:
        structure = model.outputs if len(model.outputs) > 1 else model.outputs[0]
    outputs = keras.tree.map_structure(lambda tensor: keras.KerasTensor(tensor.shape, tensor.dtype), structure)
    tried = []
    if loss is not None:
        tried.append(type(loss)(loss._user_loss, loss._user_loss_weights, output_names=loss.output_names))
    if metrics is not None:
        given = (metrics._user_metrics, metrics._user_weighted_metrics)
        tried.append(type(metrics)(*given, output_names=metrics.output_names))
    try:
        for compiled in tried:
            compiled.build(outputs, outputs)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"model: expected losses and metrics that Keras can match with the outputs of {model.name!r}. Received: "
            f"{error.args[0] if error.args else error}"
        ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Real, np.ndarray, keras.Variable)) or keras.ops.is_tensor(value)


def loss_name(loss: Any) -> str:
    """Returns the loss' name as Keras spells its function, whichever form the user chose.

    >>> loss_name("sparse_categorical_crossentropy"), loss_name("BinaryCrossentropy")
    ('sparse_categorical_crossentropy', 'binary_crossentropy')
    """
    if isinstance(loss, str):
        name = loss
    elif inspect.isfunction(loss):
        name = loss.__name__
    else:
        name = type(loss).__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def from_logits(loss: Any) -> bool:
    """Returns whether a loss takes what still needs its softmax or sigmoid."""
    return bool(loss.get_config().get("from_logits", False)) if isinstance(loss, keras.losses.Loss) else False


def takes_labels_like_outputs(loss: Any) -> bool:
    """Returns whether labels have the output's shape: not for class numbers, and unknown for a loss of the user's."""
    code = loss if inspect.isfunction(loss) else type(loss)
    of_keras = isinstance(loss, str) or (inspect.getmodule(code) or keras).__name__.startswith("keras.")
    return of_keras and not loss_name(loss).startswith("sparse_")
