"""Equality of a model and another that was made of what Keras saves of it: options, switches, weights and outputs.

Keras saves names and configs, and need not keep all of a model. What is lost is found here, before a worker trains
something else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from elephant.backends.keras_private import (
    compile_settings,
    decays,
    flat_layers,
    input_structure,
    loss_options,
    rate_or_schedule,
)
from elephant.errors import ConfigurationError
from elephant.modeling.keras_saving import forgotten_attribute
from elephant.modeling.variables import random_generators, read_values

# At the end of a name that Keras gives to what has none of its own.
_NUMBER = re.compile(r"_\d+$")
# What layers are configured with.
_OF_LAYERS = (keras.initializers.Initializer, keras.regularizers.Regularizer, keras.constraints.Constraint)


def refuse_forgotten_options(model: keras.Model, rebuilt: keras.Model) -> None:
    """Raises where saving loses an option.

    Keras gives ``Huber(delta=2.0)`` back with delta 1, and of a user's loss without a ``get_config`` all defaults.
    """
    for given, other in zip(_compiled_parts(model), _compiled_parts(rebuilt), strict=False):
        before, after = loss_options(given), loss_options(other)
        for name, value in before.items():
            if not _same(value, after.get(name)):
                raise _forgotten(given, name, value, after.get(name), "Pass")
    for given, other in zip(_configured_parts(model), _configured_parts(rebuilt), strict=False):
        forgotten = forgotten_attribute(given, other)
        if forgotten is not None:
            raise _forgotten(given, *forgotten, f"Give {type(given).__qualname__} a get_config that has it, or pass")


def _forgotten(given: Any, name: str, value: Any, other: Any, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"model: expected Keras to keep {name}={value!r} of {type(given).__name__} when it saves the model. It gave "
        f"back {other!r}. {remedy} a function that builds and compiles the model instead: "
        "KerasEstimator(model=build_model)."
    )


def _configured_parts(model: keras.Model) -> list[Any]:
    """Returns the objects of a model that may be of the user's classes, in an order that an equal model has too."""
    optimizer = getattr(model, "optimizer", None)
    parts = [*_compiled_parts(model), optimizer, rate_or_schedule(optimizer)]
    for layer in flat_layers(model):
        parts += [layer, *(part for part in vars(layer).values() if isinstance(part, _OF_LAYERS))]
    return parts


def _compiled_parts(model: keras.Model) -> list[Any]:
    # Public names give the loss alone; a subclass with a compile of its own may have none of it.
    arguments = compile_settings(model) or {}
    return keras.tree.flatten([arguments.get(name) for name in ("loss", "metrics", "weighted_metrics")])


def _same(value: Any, other: Any) -> bool:
    if value is None or other is None:
        return value is other
    try:
        return bool(np.allclose(np.asarray(value, dtype=float), np.asarray(other, dtype=float)))
    except (TypeError, ValueError):
        return repr(value) == repr(other)


def require_same_switches(model: keras.Model, rebuilt: keras.Model) -> None:
    """Raises where saving loses what was switched off for single variables."""
    optimizers = [getattr(one, "optimizer", None) for one in (model, rebuilt)]
    for variable, other in zip(model.weights, rebuilt.weights, strict=False):
        for switch, before, after in (
            ("trainable", variable.trainable, other.trainable),
            ("weight decay", decays(optimizers[0], variable), decays(optimizers[1], other)),
        ):
            if bool(before) != bool(after):
                raise ConfigurationError(
                    f"model: expected Keras to keep that {variable.path!r} has {switch}={bool(before)} when it saves "
                    f"the model. It gave back {bool(after)}. Set it on a layer that takes **options, or pass a "
                    "function that builds and compiles the model instead: KerasEstimator(model=build_model)."
                )


def have_equal_weights(model: keras.Model, rebuilt: keras.Model) -> bool:
    """Returns whether both have the same weights, bit by bit."""
    # One at a time: copies of all would be twice the weights.
    return len(model.weights) == len(rebuilt.weights) and all(
        are_equal(read_values([weight]), read_values([other]))
        for weight, other in zip(model.weights, rebuilt.weights, strict=True)
    )


def are_equal(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Returns whether the arrays of two lists are the same, each at its place; NaN is as good as NaN."""
    return len(values) == len(others) and all(
        np.array_equal(value, other, equal_nan="float" in str(value.dtype))
        for value, other in zip(values, others, strict=True)
    )


def require_same_places(model: keras.Model, rebuilt: keras.Model) -> None:
    """Raises ConfigurationError unless each weight of a rebuilt model is for what the given one has in its place."""
    given, made = (
        [(_NUMBER.sub("", weight.name), tuple(weight.shape)) for weight in one.weights] for one in (model, rebuilt)
    )
    if given != made:
        raise ConfigurationError(
            f"model: expected Keras to keep all weights of {model.name!r} when it saves the model, in their order. It "
            f"gave back {len(made)} of {len(given)}, or others. Pass a function that builds and compiles the model "
            "instead: KerasEstimator(model=build_model)."
        )


def require_same_outputs(model: keras.Model, rebuilt: keras.Model) -> None:
    """Raises ConfigurationError where a rebuilt model of the user's classes gives something else than the given one.

    Keras makes layers and losses anew of their configs, which need not have all: what was set after construction, or
    is no argument. Both see two rows of numbers or words. A model that cannot take these, or draws at random, is not
    tried.
    """
    example = _two_rows(model)
    if example is None:
        return
    generators = random_generators(model)
    states = [keras.ops.convert_to_numpy(generator) for generator in generators]
    outputs: list[Any] = []
    try:
        for one in (model, model, rebuilt):
            outputs.append(_numbers_of(one, example))
    except Exception as error:
        if len(outputs) == 2:
            raise ConfigurationError(
                f"model: expected {model.name!r} to work when Keras has made it again of what it saves. Received: "
                f"{type(error).__name__}: {error} Pass a function that builds and compiles the model instead: "
                "KerasEstimator(model=build_model)."
            ) from error
        return
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.assign(state)
    given, again, made = outputs
    if not all(map(_is_close, given, again)):
        return
    if len(given) != len(made) or not all(map(_is_close, given, made)):
        raise ConfigurationError(
            f"model: expected {model.name!r} to give the same outputs and losses when Keras has made it again of what "
            "it saves. Received: others. A layer, loss or function has something that its get_config does not: what "
            "was set after its construction, say. Give it a get_config that has it, or pass a function that builds and "
            "compiles the model: KerasEstimator(model=build_model)."
        )


def _two_rows(model: keras.Model) -> Any:
    """Returns a small batch for a model whose inputs are known numbers or texts; None for others."""
    generator = np.random.default_rng(0)
    try:
        inputs = model.inputs
        if any(getattr(layer, "stateful", False) for layer in flat_layers(model)):
            return None
        # Some take no word but their own.
        vocabularies = (layer.get_vocabulary() for layer in flat_layers(model) if hasattr(layer, "get_vocabulary"))
        words = [str(word) for words in vocabularies for word in words[-1:]] or ["a"]
        rows = []
        for given in inputs:
            shape, dtype = [2, *(size or 3 for size in given.shape[1:])], keras.backend.standardize_dtype(given.dtype)
            values = generator.uniform(0.1, 0.9, shape) if "float" in dtype else np.ones(shape)
            values = np.full(shape, words[0], object) if dtype == "string" else values.astype(dtype)
            rows.append(keras.ops.convert_to_tensor(values, dtype))
    except (AttributeError, TypeError, ValueError):
        return None
    structure = input_structure(model)
    return rows[0] if structure is None else keras.tree.pack_sequence_as(structure, rows)


def _numbers_of(model: keras.Model, example: Any) -> list[np.ndarray]:
    """Returns the outputs of a model for a batch, and the losses of these."""
    outputs = keras.tree.flatten(model(example, training=False))
    numbers = [np.asarray(keras.ops.convert_to_numpy(output), np.float64) for output in outputs]
    losses = [loss for loss in keras.tree.flatten(getattr(model, "loss", None)) if callable(loss)]
    for place, loss in enumerate(losses):
        predicted = outputs[min(place, len(outputs) - 1)]
        labels = np.random.default_rng(place).uniform(0.1, 0.9, predicted.shape).astype("float32")
        # One that takes other labels says nothing.
        with contextlib.suppress(Exception):
            value = loss(keras.ops.convert_to_tensor(labels), predicted)
            numbers.append(np.asarray(keras.ops.convert_to_numpy(value), np.float64))
    return numbers


def _is_close(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True))
