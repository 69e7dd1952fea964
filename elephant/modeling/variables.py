"""Variables of a model: names, values, precision, random state, and one flat vector of the weights.

Keras chooses a layer's policy when the layer is made, and an archive names it for every layer. So the policy is
given to the layers of the built model, to those that compute in float32; another policy is the user's own choice.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import (
    compiled_metrics,
    flat_layers,
    has_schedule,
    make_shared_generator,
    own_states,
    own_weights,
    rate_or_schedule,
    restore_seed_attributes,
    seed_attributes,
)
from elephant.data.schema import RowSpec, TensorSpec, pack
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.layers.sharded_embedding import TableVariable, sharded_embeddings, table_variables
from elephant.parameter_server.layout import Layout
from elephant.tables.stored import shape_of

FLOAT16, BFLOAT16 = "mixed_float16", "mixed_bfloat16"
_ADDED = "_elephant_loss_scale"
_SAME_MODEL = (
    "A function given as model must build the same model every time it is called, and a model's layers must not "
    "depend on settings that change."
)
OF_CHECKPOINT = (
    "These are the checkpoint's: go on with the model that it was made of, or give another checkpointPath to a fit "
    "that begins anew."
)

_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Has the driver's copies of a model computed on the processor, see `elephant.backends.Backend.on_cpu`.

    They are for looking at it, and a GPU beside the driver is for ranks.
    """
    with current().on_cpu():
        yield


def lower_precision(model: keras.Model, policy: str) -> None:
    """Makes a model compute in 16 bits, as if it had been made under another policy.

    With float16 small gradients would vanish: the optimizer is wrapped into one that scales the loss, as
    ``compile`` does it, unless it is one already (Micikevicius et al. 2018, section 3.2).

    Args:
        policy: ``"mixed_float16"`` or ``"mixed_bfloat16"``.
    """
    for layer in flat_layers(model):
        if layer.dtype_policy.name == "float32":
            layer.dtype_policy = policy
    if policy == FLOAT16 and not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        scaling = keras.optimizers.LossScaleOptimizer(model.optimizer)
        if model.optimizer.built:
            scaling.build(model.trainable_variables)
        setattr(scaling, _ADDED, True)
        model.optimizer = scaling


def restored_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer whose state is the model's own: without the scaling that `lower_precision` has added."""
    return optimizer.inner_optimizer if getattr(optimizer, _ADDED, False) else optimizer


def build_variables(model: keras.Model, rows: RowSpec | None) -> None:
    """Creates the variables of a model, and of its optimizer, that wait for their first input.

    Args:
        rows: What one row of its input is; None when the model is known to be built.
    """
    if not model.built or not model.weights:
        _build_weights(model, rows)
    if getattr(model, "optimizer", None) is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def build_metrics(model: keras.Model, batches: Any) -> None:
    """Creates the variables of the metrics of one of Keras' own kinds of model before its first step is traced.

    Keras would create them within the step; TensorFlow then traces a step a second time, which
    takes a third of the time of the first one, and more of large models. Models with several outputs have metrics of
    their losses too, and a class of the user's may make something else of its outputs: both are left to Keras.

    Args:
        batches: What ``fit`` will get its batches from.
    """
    metrics, batch = compiled_metrics(model), getattr(batches, "element_spec", None)
    if metrics is None or metrics.built or batch is None or not type(model).__module__.startswith("keras."):
        return
    _, labels, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if labels is not None and not keras.tree.is_nested(labels) and len(model.outputs) == 1:
        metrics.build(labels, model.outputs[0])


def _build_weights(model: keras.Model, rows: RowSpec | None) -> None:
    if type(model).call is keras.Model.call:
        # A train_step of its own calls the model's parts, which nothing else tells how to build.
        if rows is not None and rows.step is not None and _waiting(model):
            current().build_in_step(model, rows)
        waiting = _waiting(model)
        if waiting:
            raise ConfigurationError(
                f"model: expected the layers of {model.name!r} to be built, because it has no call method that would "
                f"do it. Received: {', '.join(waiting)} without weights. Give these an Input, or build them."
            )
        return
    if rows is None:
        raise ConfigurationError(
            f"model: expected {model.name!r} to be built. Give it an Input layer, or call model.build(input_shape)."
        )
    model(_example(rows))


def _waiting(model: keras.Model) -> list[str]:
    return [layer.name for layer in flat_layers(model, include_self=False) if not layer.built]


def _example(rows: RowSpec) -> Any:
    """Returns one row of zeros, or of empty strings, as the model takes it."""
    return pack(rows.x, [_zeros(tensor) for tensor in rows.tensors])


def _zeros(tensor: TensorSpec) -> Any:
    shape = (1, *(1 if size is None else size for size in tensor.shape))
    if tensor.dtype == "string":
        return keras.ops.convert_to_tensor(np.full(shape, "").tolist(), dtype="string")
    if tensor.sparse:
        indices = np.zeros((0, len(shape)), np.int64)
        return current().sparse_tensor(indices, np.zeros(0, tensor.dtype), np.array(shape, np.int64))
    return np.zeros(shape, tensor.dtype)


def state_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns all variables that training changes: weights, those of the optimizer it was compiled with, and tables."""
    return [*shared_variables(model), *table_variables(model)]


def shared_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns those of `state_variables` that each rank has: all but tables."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.weights, *(restored_optimizer(optimizer).variables if optimizer is not None else [])]


def read_values(variables: Iterable[keras.Variable]) -> list[np.ndarray]:
    """Returns copies of the values of variables; of tables that ranks have written to a folder references to them."""
    return [
        one.state() if isinstance(one, TableVariable) else np.array(keras.ops.convert_to_numpy(one))
        for one in variables
    ]


def read_variables(model: keras.Model) -> list[np.ndarray]:
    """Returns copies of all variables that training changes."""
    return read_values(state_variables(model))


def write_variables(model: keras.Model, values: Sequence[np.ndarray], *, remedy: str = _SAME_MODEL) -> None:
    """Gives a built model the values that `read_variables` read from its equal.

    Args:
        values: As `read_variables` returned them, or those of the weights alone.
        remedy: What to do where it is no equal.

    Raises:
        ConfigurationError: The model has other variables than the one that was read.
    """
    variables = model.weights if len(values) == len(model.weights) else state_variables(model)
    received = [shape_of(value) for value in values]
    expected = [tuple(variable.shape) for variable in variables]
    if received != expected:
        raise ConfigurationError(
            f"model: expected {len(expected)} variables of shapes {expected[:8]}. Received: {len(received)} of shapes "
            f"{received[:8]}. {remedy}"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def random_generators(model: keras.Model) -> list[keras.Variable]:
    """Returns the state variables of the model's random generators, such as those of its dropout layers."""
    return [variable for variable in model.variables if variable.path.endswith("seed_generator_state")]


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """Returns variables that layers learn without a gradient, such as batch normalization's moving averages.

    What a layer iterates, whatever the rows are, is none: it is equal on all ranks, and advances in every step.
    """
    left_out = {id(variable) for variable in random_generators(model)}
    left_out |= {
        id(variable)
        for layer in flat_layers(model)
        if isinstance(layer, keras.layers.SpectralNormalization)
        for variable in own_states(layer)
    }
    # The weights of a frozen layer are not trainable either, and never change.
    left_out |= {id(variable) for layer in flat_layers(model) for variable in own_weights(layer)}
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) not in left_out and "float" in keras.backend.standardize_dtype(variable.dtype)
    ]


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """Returns weights that no training changes, as those of a frozen base: neither trainable nor `moving_statistics`.

    A layer or a ``train_step`` of the user's may assign to one all the same, as to a count of its calls.
    """
    left_out = {id(variable) for variable in (*model.trainable_variables, *moving_statistics(model))}
    return [variable for variable in model.weights if id(variable) not in left_out]


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the model's optimizers: the one it was compiled with, and those that its class keeps besides.

    A model with a ``train_step`` of its own, such as a GAN, may keep several, as attributes or in
    lists or dictionaries that are attributes.
    """
    found: dict[int, keras.optimizers.Optimizer] = {}
    for value in (getattr(model, "optimizer", None), *_attributes(model)):
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), value)
    inner = {id(part) for optimizer in found.values() for part in parts_of(optimizer) if part is not optimizer}
    return [optimizer for key, optimizer in found.items() if key not in inner]


def parts_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers inside of one that have a learning rate of their own, or itself where it has none inside.

    A `LossScaleOptimizer` has one inside; a `MultiOptimizer` has one for each group of variables, once it is built.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "optimizers", None) or [inner])


def rated_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns whatever has a learning rate among the model's optimizers."""
    return [part for optimizer in optimizers_of(model) for part in parts_of(optimizer)]


def constant_rate(model: keras.Model) -> float | None:
    """Returns the learning rate of a model's optimizer; None where it follows a schedule, or where there are several.

    >>> model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    >>> model.compile(keras.optimizers.SGD(0.5), "mse")
    >>> constant_rate(model)
    0.5
    """
    first, *more = parts_of(model.optimizer)
    if more or has_schedule(first):
        return None
    return float(keras.ops.convert_to_numpy(first.learning_rate))


def optimizer_names(model: keras.Model) -> list[str]:
    """Returns the classes of the model's optimizers; of one that scales losses, that of the one inside."""
    return [type(getattr(one, "inner_optimizer", one)).__name__ for one in optimizers_of(model)]


def _attributes(model: keras.Model) -> Iterator[Any]:
    for value in list(vars(model).values()):
        if isinstance(value, dict):
            yield from list(value.values())
        elif isinstance(value, (list, tuple)):
            yield from list(value)
        else:
            yield value


def optimizer_slots(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the model's optimizers besides their learning rates and counts of steps."""
    optimizers = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers_of(model)]
    counting = [*optimizers, *rated_optimizers(model)]
    left_out = {id(variable) for one in counting for variable in (one.iterations, rate_or_schedule(one))}
    return [variable for optimizer in optimizers for variable in optimizer.variables if id(variable) not in left_out]


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the accumulators of the model's loss and metrics."""
    return [variable for metric in model.metrics for variable in metric.variables]


def flatten(variables: Iterable[keras.Variable]) -> np.ndarray:
    """Returns all elements of the variables in one float64 array."""
    parts = [np.ravel(keras.ops.convert_to_numpy(variable)).astype(np.float64) for variable in variables]
    return np.concatenate([np.empty(0), *parts])


def assign_flat(variables: Iterable[keras.Variable], flat: np.ndarray) -> None:
    """Writes back what `flatten` returned, cast to each variable's type."""
    start = 0
    for variable in variables:
        count = int(np.prod(variable.shape))
        variable.assign(flat[start : start + count].reshape(tuple(variable.shape)).astype(variable.dtype))
        start += count


def layout_of(model: keras.Model) -> Layout:
    """Returns the places of a built model's trainable variables, in their order, and the forms of its tables.

    Raises:
        UnsupportedError: A trainable variable is not float32.
        ConfigurationError: The model has none.

    Example:
        >>> model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, name="head")])
        >>> [segment.shape for segment in layout_of(model).segments]
        [(3, 2), (2,)]
    """
    variables = model.trainable_variables
    if not variables:
        raise ConfigurationError(f"model: expected trainable variables. Received: {model.name!r} without any.")
    for variable in variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype != "float32":
            raise UnsupportedError(
                f"model: a parameter server keeps trainable variables in float32. Received: {variable.path!r} in "
                f"{dtype}. Use the policy float32 or a mixed one, which keeps them in float32, or mode='synchronous'."
            )
    table_specs = [layer.table_spec for layer in sharded_embeddings(model)]
    return Layout([(variable.path, tuple(variable.shape)) for variable in variables], table_specs)


def read_weights(model: keras.Model, layout: Layout, out: np.ndarray | None = None) -> np.ndarray:
    """Returns a copy of a model's trainable variables as one flat vector.

    Args:
        out: A float32 vector to write to; a new one when None.
    """
    return layout.pack([keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables], out)


def write_weights(model: keras.Model, layout: Layout, flat: np.ndarray) -> None:
    """Gives a model's trainable variables the values of a flat vector, which they copy.

    Args:
        flat: float32, of the layout's length.

    Raises:
        ConfigurationError: The model has other variables than the layout.
    """
    variables = model.trainable_variables
    shapes, expected = [tuple(v.shape) for v in variables], [segment.shape for segment in layout.segments]
    if shapes != expected:
        raise ConfigurationError(
            f"model: expected trainable variables of shapes {expected[:8]}. Received: {shapes[:8]}. A function given "
            "as model must build the same model every time it is called."
        )
    for variable, values in zip(variables, layout.views(flat), strict=True):
        # A copy: a framework may go on using an array that it was given.
        variable.assign(values.copy())


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds Python, numpy, Keras and its backend for the time of a ``with`` block; what the user had seeded goes on.

    Args:
        seed: What `keras.utils.set_random_seed` gets, modulo 2**32.

    Example:
        >>> random.seed(1)
        >>> with seeded(7):
        ...     inner = random.random()
        >>> with seeded(7):
        ...     inner == random.random()
        True
        >>> drawn = random.random()
        >>> random.seed(1)
        >>> drawn == random.random()
        True
    """
    with _one_at_a_time:
        of_python, of_numpy = random.getstate(), np.random.get_state()
        attributes = seed_attributes()
        with current().random_state():
            keras.utils.set_random_seed(seed % 2**32)
            try:
                yield
            finally:
                random.setstate(of_python)
                np.random.set_state(of_numpy)
                restore_seed_attributes(attributes)


def shared_generator(*, made: bool = False) -> keras.Variable | None:
    """Returns the state of the generator that layers without one of their own draw from.

    Args:
        made: Whether to make it where nothing has drawn from it yet; otherwise there is none then.
    """
    found = make_shared_generator() if made else seed_attributes()["global_seed_generator"]
    return None if found is None else found.state
