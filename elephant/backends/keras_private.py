"""Private names of Keras: all that this package uses stand here, an entry each.

An entry says the version in which its name was last seen, as what, and why no public name does. A test of each entry
(`tests/backends/test_keras_private.py`) names it where a release of Keras has changed it. Some hold the place of a
function of Keras' for the time of a ``with`` block: who calls them sees to it that one thread does so at a time.

Keras is imported when an entry needs it, not with this module.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import keras

# What a call of a model tells it about its inputs. Seen in Keras 3.15.1 as attributes of `Layer`.
BUILD_ATTRIBUTES = ("_build_shapes_dict", "_input_spec")
# Prefix of what TensorFlow notes in a layer's attributes. Seen in Keras 3.15.1 with TensorFlow 2.21.0.
TRACKING_PREFIX = "_self_"
# Modules of classes that a backend has in the place of Keras' own, in configs too. Seen in Keras 3.15.1.
BACKEND_CLASSES = "keras.src.backend."
TORCH_OPTIMIZERS = "keras.src.backend.torch.optimizers."
# Global values that a seed changes. Seen in Keras 3.15.1 in `keras.src.backend.common.global_state`.
SEED_ATTRIBUTES = ("global_random_seed", "global_seed_generator")
# How many objects have got a name, by name. Seen there too.
NAME_COUNTS = "object_name_uids"
# Functions that draw an array of the shape that is their first argument. Seen in Keras 3.15.1 in `backend.random`.
DRAWS_OF_SHAPE = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")


# Layers and models.


def flat_layers(layer: keras.layers.Layer, *, include_self: bool = True) -> list[keras.layers.Layer]:
    """Returns a layer's, or a model's, layers on all levels.

    Seen in Keras 3.15.1 as `Layer._flatten_layers`; the public `Model.layers` are those of the first level.
    """
    layers: list[keras.layers.Layer] = layer._flatten_layers(include_self=include_self)
    return layers


def own_weights(layer: keras.layers.Layer) -> list[Any]:
    """Returns the variables of a layer's own that can be trained, although the layer may be frozen.

    Seen in Keras 3.15.1 as `Layer._trainable_variables`; the public `trainable_variables` are none of a frozen layer.
    """
    weights: list[Any] = layer._trainable_variables
    return weights


def own_states(layer: keras.layers.Layer) -> list[Any]:
    """Returns the variables of a layer's own that are never trained.

    Seen in Keras 3.15.1 as `Layer._non_trainable_variables`; the public ones have those of inner layers too.
    """
    states: list[Any] = layer._non_trainable_variables
    return states


def own_generators(layer: keras.layers.Layer) -> list[Any]:
    """Returns the random generators of a layer's own.

    Seen in Keras 3.15.1 as `Layer._seed_generators`; the public `variables` tell neither whose nor which they are.
    """
    generators: list[Any] = layer._seed_generators
    return generators


def own_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the layers right inside of a layer, or a model.

    Seen in Keras 3.15.1 as `Layer._layers`; the public `layers` are those of models alone.
    """
    layers: list[keras.layers.Layer] = layer._layers
    return layers


def modules_apart(layer: keras.layers.Layer) -> Mapping[str, Any]:
    """Returns the modules that PyTorch keeps apart from a layer's attributes, by name; of other backends none.

    Seen in Keras 3.15.1 with PyTorch 2.15.0 as `Module._modules`; the public `named_children` leaves out second names.
    """
    modules: Mapping[str, Any] = getattr(layer, "_modules", {})
    return modules


def is_autocast(variable: keras.Variable) -> bool:
    """Returns whether a variable takes part in mixed precision.

    Seen in Keras 3.15.1 as `Variable._autocast`; the constructor takes it, and nothing public returns it.
    """
    return bool(variable._autocast)


def has_value(variable: keras.Variable) -> bool:
    """Returns whether a variable has a value; one that was made in a scope without values has none yet.

    Seen in Keras 3.15.1 as `Variable._value`; the public `value` draws one where there is none.
    """
    # A framework's own variable has none of that name, and a value.
    return getattr(variable, "_value", variable) is not None


def initialize_variable(variable: keras.Variable) -> None:
    """Gives a variable the value that its initializer makes, where it waits for one.

    Seen in Keras 3.15.1 as `Variable._deferred_initialize`; public scopes do it for all variables at once.
    """
    variable._deferred_initialize()


def forget_waiting_variables() -> None:
    """Makes Keras forget which variables wait for a value, which it would give them at the end of its next scope.

    Seen in Keras 3.15.1 as "uninitialized_variables" in `keras.src.backend.common.global_state`; no public name has it.
    """
    from keras.src.backend.common import global_state

    global_state.set_global_attribute("uninitialized_variables", [])


@contextlib.contextmanager
def compiled_with_values() -> Iterator[None]:
    """Has optimizers and metrics that are made in a scope without values get theirs: rates, counts and sums.

    Seen in Keras 3.15.1 as "stateless_scope" in `keras.src.backend.common.global_state`; no public name leaves a scope
    for a while, in which an optimizer raises ValueError.
    """
    import keras
    from keras.src.backend.common import global_state

    def making(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def outside(*args: Any, **options: Any) -> Any:
            scope = global_state.get_global_attribute("stateless_scope")
            global_state.set_global_attribute("stateless_scope", None)
            try:
                return function(*args, **options)
            finally:
                global_state.set_global_attribute("stateless_scope", scope)

        return outside

    with _replaced((keras.optimizers.Optimizer, "__init__", making), (keras.metrics.Metric, "add_variable", making)):
        yield


def give_layout(variable: keras.Variable, layout: Any) -> None:
    """Says how a variable is divided among devices from its next value on; None has its values on one device.

    Seen in Keras 3.15.1 on JAX as `Variable._layout`; publicly it is said when the variable is made, for good.
    """
    variable._layout = layout


def layout_map_of(distribution: keras.distribution.ModelParallel) -> keras.distribution.LayoutMap:
    """Returns the rules by which a distribution divides variables.

    Seen in Keras 3.15.1 as `ModelParallel._layout_map`; publicly it tells the layout of one variable at a time.
    """
    return distribution._layout_map


def inbound_nodes(operation: Any) -> list[Any]:
    """Returns the calls of a layer or operation in a graph, with their input and output tensors.

    Seen in Keras 3.15.1 as `Operation._inbound_nodes`; a public way is there for an operation of one call alone.
    """
    nodes: list[Any] = operation._inbound_nodes
    return nodes


def input_structure(model: keras.Model) -> Any:
    """Returns the nest of a functional model's inputs; None of other models.

    Seen in Keras 3.15.1 as `Functional._inputs_struct`; the public `inputs` are a flat list.
    """
    return getattr(model, "_inputs_struct", None)


def output_structure(model: keras.Model) -> Any:
    """Returns the nest of a functional model's outputs; None of other models.

    Seen in Keras 3.15.1 as `Functional._outputs_struct`; the public `outputs` are a flat list.
    """
    return getattr(model, "_outputs_struct", None)


def functional_graph(model: Any) -> Any:
    """Returns the functional model that a model, or a layer, is or has inside; None where its call is of its own.

    Seen in Keras 3.15.1 as `keras.src.models.functional.Functional` and `Sequential._functional`; the public
    `keras.Model` makes the first, and tells it from no other model.
    """
    from keras.src.models.functional import Functional
    from keras.src.models.sequential import Sequential

    if isinstance(model, Sequential):
        return model._functional if type(model).call is Sequential.call else None
    is_graph = isinstance(model, Functional) and type(model).call is Functional.call
    return model if is_graph else None


def calls_in_order(functional: Any) -> list[Any]:
    """Returns the calls of a functional model, in the order in which it makes them; see `inbound_nodes`.

    Seen in Keras 3.15.1 as `Functional._nodes_by_depth`; the public `operations` have one of several calls.
    """
    by_depth = functional._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def standardized_inputs(functional: Any, tensors: list[Any]) -> list[Any]:
    """Returns tensors with the dtypes and numbers of dimensions of a functional model's flat inputs.

    Seen in Keras 3.15.1 as `Functional._convert_inputs_to_tensors` and `_adjust_input_rank`; the public `call` does
    everything at once.
    """
    converted: list[Any] = functional._adjust_input_rank(functional._convert_inputs_to_tensors(tensors))
    return converted


def with_training(operation: Any, training: bool) -> Callable[..., Any]:
    """Returns an operation of a graph as a functional model calls it, in training or not.

    Seen in Keras 3.15.1 as `keras.src.models.functional.operation_fn`; the public `call` runs the whole graph.
    """
    from keras.src.models.functional import operation_fn

    function: Callable[..., Any] = operation_fn(operation, training=training)
    return function


def built_shape(layer: keras.layers.Layer) -> tuple[int | None, ...]:
    """Returns the shape that a `Normalization` was built for.

    Seen in Keras 3.15.1 as `Normalization._build_input_shape`; public is the shape along its axes alone.
    """
    shape: tuple[int | None, ...] = layer._build_input_shape
    return shape


def has_given_vocabulary(layer: keras.layers.Layer) -> bool:
    """Returns whether a lookup or text layer was made with a vocabulary.

    Seen in Keras 3.15.1 as `IndexLookup._has_input_vocabulary`; the public vocabulary may be a learned one.
    """
    return bool(layer._has_input_vocabulary)


def lookup_of(layer: keras.layers.TextVectorization) -> Any:
    """Returns the lookup layer in which a `TextVectorization` counts its tokens.

    Seen in Keras 3.15.1 as `TextVectorization._lookup_layer`; public methods neither return counts nor take them.
    """
    return layer._lookup_layer


# Batch normalization.


def has_moments(layer: keras.layers.BatchNormalization) -> bool:
    """Returns whether a layer computes its statistics in the method that `replace_moments` replaces.

    Seen in Keras 3.15.1 as `BatchNormalization._moments`; without it, no layer can use the rows of other ranks.
    """
    return hasattr(layer, "_moments")


def moments_of(layer: keras.layers.BatchNormalization) -> Callable[..., Any]:
    """Returns the function ``(inputs, mask) -> (mean, variance)`` with which a layer normalizes in training.

    Seen in Keras 3.15.1 as `BatchNormalization._moments`; the public `call` does everything at once.
    """
    moments: Callable[..., Any] = layer._moments
    return moments


def replace_moments(layer: keras.layers.BatchNormalization, moments: Callable[..., Any] | None) -> None:
    """Has a layer normalize with a mean and a variance of another function; with its own again for None.

    Seen in Keras 3.15.1 as `BatchNormalization._moments`; the public `call` does everything at once.
    """
    if moments is None:
        del layer._moments
    else:
        layer._moments = moments


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """Returns the axes over which a layer takes its statistics.

    Seen in Keras 3.15.1 as `BatchNormalization._reduction_axes`; the public `axis` is the other ones, unchecked.
    """
    axes: list[int] = layer._reduction_axes
    return axes


# Compiled losses and metrics.


class GivenMetrics(NamedTuple):
    """Metrics as ``compile`` was given them.

    Attributes:
        metrics: Without weights of rows.
        weighted: With them.
    """

    metrics: Any
    weighted: Any


class GivenLosses(NamedTuple):
    """Losses as ``compile`` was given them, and their weights."""

    losses: Any
    weights: Any


def compile_settings(model: keras.Model) -> dict[str, Any] | None:
    """Returns the arguments of ``compile``, which may be changed; None where there are none.

    Seen in Keras 3.15.1 as `Model._compile_config.config`; the public `get_compile_config` returns text of them.
    """
    settings: dict[str, Any] | None = getattr(getattr(model, "_compile_config", None), "config", None)
    return settings


def compiled_loss(model: keras.Model) -> Any:
    """Returns the object that computes the compiled losses, or None.

    Seen in Keras 3.15.1 as `Model._compile_loss`; the public `loss` is what ``compile`` was given.
    """
    return getattr(model, "_compile_loss", None)


def compiled_metrics(model: keras.Model) -> Any:
    """Returns the object that keeps the compiled metrics, or None.

    Seen in Keras 3.15.1 as `Model._compile_metrics`; the public `metrics` do not say what waits for a first batch.
    """
    return getattr(model, "_compile_metrics", None)


def given_losses(compiled: Any) -> GivenLosses:
    """Returns the arguments of ``compile`` that `compiled_loss` was made of; Nones of None.

    Seen in Keras 3.15.1 as `CompileLoss._user_loss` and `_user_loss_weights`; no public name has the weights.
    """
    return GivenLosses(getattr(compiled, "_user_loss", None), getattr(compiled, "_user_loss_weights", None))


def given_metrics(compiled: Any) -> GivenMetrics:
    """Returns the arguments of ``compile`` that `compiled_metrics` was made of; Nones of None.

    Seen in Keras 3.15.1 as `CompileMetrics._user_metrics` and `_user_weighted_metrics`; no public name has them.
    """
    return GivenMetrics(getattr(compiled, "_user_metrics", None), getattr(compiled, "_user_weighted_metrics", None))


def replace_losses(compiled: Any, replacement: Callable[[Any], Any]) -> list[Any]:
    """Puts others in the place of a built `compiled_loss`'s single losses, and returns them.

    Seen in Keras 3.15.1 as `CompileLoss._flat_losses`, named tuples with a `loss`; public is their sum alone.
    """
    entries = compiled._flat_losses
    losses = [replacement(entry.loss) for entry in entries]
    compiled._flat_losses = [entry._replace(loss=loss) for entry, loss in zip(entries, losses, strict=True)]
    return losses


def loss_function(model: keras.Model) -> Callable[..., Any]:
    """Returns the function with which a step computes the loss: it calls ``compute_loss``, with or without `training`.

    Seen in Keras 3.15.1 as `Trainer._compute_loss`; the public `compute_loss` may be the user's, without `training`.
    """
    function: Callable[..., Any] = getattr(model, "_compute_loss", model.compute_loss)
    return function


def added_losses(layer: keras.layers.Layer) -> list[Any]:
    """Returns the losses that a layer itself has added in its last call.

    Seen in Keras 3.15.1 as `Layer._losses`; the public `losses` have regularizers and inner layers too.
    """
    losses: list[Any] = layer._losses
    return losses


def clear_losses(model: keras.Model) -> None:
    """Forgets what layers have added to the loss.

    Seen in Keras 3.15.1 as `Layer._clear_losses`; no public method does it.
    """
    model._clear_losses()


def metrics_in_order(model: keras.Model, results: Mapping[str, float]) -> Any:
    """Returns results as Keras' ``evaluate`` does without ``return_dict``.

    Seen in Keras 3.15.1 as `Trainer._flatten_metrics_in_order`; the order is in no public name.
    """
    return model._flatten_metrics_in_order(results)


def loss_options(loss: Any) -> dict[str, Any]:
    """Returns the options that a loss, or a metric of a function, passes to its function.

    Seen in Keras 3.15.1 as `LossFunctionWrapper._fn_kwargs`; `get_config` does not have all of them.
    """
    return getattr(loss, "_fn_kwargs", None) or {}


def function_of_metric(metric: Any) -> Any:
    """Returns the function that a metric takes the mean of; any other one as it is.

    Seen in Keras 3.15.1 as `MeanMetricWrapper._fn`; no public name has it.
    """
    return getattr(metric, "_fn", metric)


@contextlib.contextmanager
def replaced_mean_update(replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Puts a method of one's own in the place of the one by which all means count a number, for a ``with`` block.

    Seen in Keras 3.15.1 as `keras.metrics.Mean.update_state`, which trackers of losses and metrics of functions call
    too; Keras has no way to weight those from outside.

    Args:
        replacement: Of Keras' method.
    """
    import keras

    with _replaced((keras.metrics.Mean, "update_state", replacement)):
        yield


# Optimizers, training and callbacks.


def optimized_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer was built for, in its order; none of one that is not built.

    Seen in Keras 3.15.1 as `Optimizer._trainable_variables`; the public `variables` are its own.
    """
    variables: list[Any] = getattr(optimizer, "_trainable_variables", [])
    return variables


def place_in_optimizer(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Returns at which place an optimizer has its slots of a variable.

    Seen in Keras 3.15.1 as `Optimizer._get_variable_index`; no public method has it.
    """
    place: int = optimizer._get_variable_index(variable)
    return place


def rate_or_schedule(optimizer: keras.optimizers.Optimizer | None) -> Any:
    """Returns the variable of a constant learning rate, or the schedule; None of no optimizer.

    Seen in Keras 3.15.1 as `Optimizer._learning_rate`; the public `learning_rate` is a schedule's present value.
    """
    return getattr(optimizer, "_learning_rate", None)


def has_schedule(optimizer: keras.optimizers.Optimizer | None) -> bool:
    """Returns whether an optimizer's learning rate follows a schedule.

    Seen in Keras 3.15.1 as `Optimizer._learning_rate`; the public `learning_rate` is a schedule's present value.
    """
    import keras

    return isinstance(rate_or_schedule(optimizer), keras.optimizers.schedules.LearningRateSchedule)


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the variable that counts an optimizer's calls.

    Seen in Keras 3.15.1 as `Optimizer._iterations`; the public `iterations` is a quotient where gradients accumulate.
    """
    counter: keras.Variable = optimizer._iterations
    return counter


def rebuild_optimizer(optimizer: keras.optimizers.Optimizer, variables: Collection[Any]) -> None:
    """Has an optimizer make its slots anew, for some variables alone; its step count and its learning rate stay.

    Seen in Keras 3.15.1 as `Optimizer._untrack_variable`, `_tracker`, `_variables` and `_trainable_variables_indices`;
    the public `build` leaves one that is built as it is.
    """
    from keras.src.utils.tracking import DotNotTrackScope

    kept = {id(step_counter(optimizer)), id(rate_or_schedule(optimizer))}
    for variable in optimizer.variables:
        if id(variable) not in kept:
            optimizer._untrack_variable(variable)
    # What TensorFlow wraps a list into keeps a copy of it, with all variables that were in it.
    with DotNotTrackScope():
        optimizer._variables = optimizer.variables
    is_variable, _ = optimizer._tracker.config["variables"]
    optimizer._tracker.config["variables"] = (is_variable, optimizer._variables)
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    optimizer.build(list(variables))


def clipping_of(optimizer: keras.optimizers.Optimizer) -> Callable[..., Any]:
    """Returns the function with which an optimizer clips the gradients that it applies.

    Seen in Keras 3.15.1 as `Optimizer._clip_gradients`; the public `apply` does everything at once.
    """
    function: Callable[..., Any] = optimizer._clip_gradients
    return function


def replace_clipping(optimizer: keras.optimizers.Optimizer, clip: Callable[..., Any]) -> None:
    """Has an optimizer clip gradients by another function.

    Seen in Keras 3.15.1 as `Optimizer._clip_gradients`; the public `apply` does everything at once.
    """
    optimizer._clip_gradients = clip


def decays(optimizer: Any, variable: Any) -> bool:
    """Returns whether an optimizer's weight decay is for a variable; True of what is no optimizer.

    And of a variable without a value, which nobody has excluded yet.

    Seen in Keras 3.15.1 as `Optimizer._use_weight_decay`; what was excluded is in no public name.
    """
    decide = getattr(optimizer, "_use_weight_decay", None)
    return decide is None or not has_value(variable) or bool(decide(variable))


def adam_slots(optimizer: keras.optimizers.Adam) -> tuple[list[Any], list[Any]]:
    """Returns Adam's means of gradients and of their squares.

    Seen in Keras 3.15.1 as `Adam._momentums` and `Adam._velocities`; the public `variables` are a flat list.
    """
    return optimizer._momentums, optimizer._velocities


def train_function(model: keras.Model, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that ``fit`` calls for the next batches, on JAX.

    Seen in Keras 3.15.1 as `JAXTrainer._make_function`; the public `make_train_function` compiles the step itself.
    """
    function: Callable[..., Any] = model._make_function(step)
    return function


def can_be_compiled(model: keras.Model) -> bool:
    """Returns whether Keras would compile a model's steps with XLA where nobody chooses.

    Seen in Keras 3.15.1 as `Trainer._resolve_auto_jit_compile`; the public `jit_compile` is what was chosen.
    """
    return bool(model._resolve_auto_jit_compile())


def traces_batches(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback is a `TensorBoard` that writes profiles.

    Seen in Keras 3.15.1 as `TensorBoard._should_trace`; no public name has it.
    """
    return bool(getattr(callback, "_should_trace", False))


def forget_model(callback: keras.callbacks.Callback) -> None:
    """Takes a callback's model away.

    Seen in Keras 3.15.1 as `Callback._model`; the public `set_model` may be the user's, who does not expect None.
    """
    callback._model = None


# Tensors, random numbers, saved models.


def mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras has given to a tensor; not every backend's tensors carry it themselves.

    Seen in Keras 3.15.1 as `keras.src.backend.get_keras_mask`, before as `_keras_mask`; nothing public returns it.
    """
    from keras.src import backend

    ask = getattr(backend, "get_keras_mask", None)
    return getattr(tensor, "_keras_mask", None) if ask is None else ask(tensor)


def give_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask, as a `Masking` layer does.

    Seen in Keras 3.15.1 as `keras.src.backend.set_keras_mask`, before as `_keras_mask`; nothing public does it.
    """
    from keras.src import backend

    give = getattr(backend, "set_keras_mask", None)
    if give is None:
        tensor._keras_mask = mask
    else:
        give(tensor, mask)


def seed_attributes() -> dict[str, Any]:
    """Returns Keras' global seed, and the generator of what draws without one of its own; None for what is not there.

    Seen in Keras 3.15.1 as `keras.src.backend.common.global_state`; a seed can be set publicly, and not asked for.
    """
    from keras.src.backend.common import global_state

    return {name: global_state.get_global_attribute(name) for name in SEED_ATTRIBUTES}


def restore_seed_attributes(before: Mapping[str, Any]) -> None:
    """Takes back what has seeded Keras since `seed_attributes`.

    Seen in Keras 3.15.1 as `keras.src.backend.common.global_state`; a seed can be set publicly, and not taken back.
    """
    from keras.src.backend.common import global_state

    for name, value in before.items():
        global_state.set_global_attribute(name, value)


@contextlib.contextmanager
def names_free_again() -> Iterator[None]:
    """Has the names that Keras gives inside, such as ``dense_7``, be given once more to what is made after it.

    Seen in Keras 3.15.1 as `keras.src.backend.common.global_state`; `clear_session` forgets more than these names.
    """
    from keras.src.backend.common import global_state

    counts = copy.copy(global_state.get_global_attribute(NAME_COUNTS))
    try:
        yield
    finally:
        global_state.set_global_attribute(NAME_COUNTS, counts)


def make_shared_generator() -> Any:
    """Returns the generator of what draws without one of its own, made where there is none yet.

    Seen in Keras 3.15.1 as `keras.src.random.seed_generator.global_seed_generator`; public functions draw from it.
    """
    from keras.src.random.seed_generator import global_seed_generator

    return global_seed_generator()


@contextlib.contextmanager
def replaced_draws(replacement: Callable[[Callable[..., Any]], Callable[..., Any]], dropout: Any) -> Iterator[None]:
    """Puts functions of one's own in the place of those by which layers draw, for a ``with`` block.

    Seen in Keras 3.15.1 as the functions of `keras.src.backend.random`; layers call these, and not `keras.random`.

    Args:
        replacement: Of each function of `DRAWS_OF_SHAPE`.
        dropout: In the place of ``dropout(inputs, rate, ...)``.
    """
    from keras.src import backend

    draws = [(backend.random, name, replacement) for name in DRAWS_OF_SHAPE]
    with _replaced(*draws, (backend.random, "dropout", lambda _: dropout)):
        yield


@contextlib.contextmanager
def replaced_normalization(
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Puts a method of one's own in the place of the ``call`` of all batch normalization layers, for a ``with`` block.

    Seen in Keras 3.15.1 as `keras.layers.BatchNormalization.call`; a layer that is called inside of a step gets its
    ``training`` from there.
    """
    import keras

    with _replaced((keras.layers.BatchNormalization, "call", replacement)):
        yield


class CodeFunctions(NamedTuple):
    """Functions of Keras' that write and read code.

    Attributes:
        name_of: The name under which a class or function is written.
        dump: The bytecode of a lambda, as text.
        load: The lambda of it.
    """

    name_of: Callable[..., Any]
    dump: Callable[..., Any]
    load: Callable[..., Any]


@contextlib.contextmanager
def replaced_code_functions(naming: Any = None, dumping: Any = None, loading: Any = None) -> Iterator[CodeFunctions]:
    """Puts functions of one's own in the place of those that write and read code, for a block, and yields Keras' own.

    Seen in Keras 3.15.1 as `object_registration.get_registered_name`, `python_utils.func_dump` and `func_load`; Keras
    has no public way to ask for more than a name, nor for a lambda with the globals it uses.
    """
    from keras.src.saving import object_registration
    from keras.src.utils import python_utils

    own = CodeFunctions(object_registration.get_registered_name, python_utils.func_dump, python_utils.func_load)
    with _replaced(
        (object_registration, "get_registered_name", lambda before: naming or before),
        (python_utils, "func_dump", lambda before: dumping or before),
        (python_utils, "func_load", lambda before: loading or before),
    ):
        yield own


@contextlib.contextmanager
def replaced_configs(replacements: Mapping[type, Callable[[Any], Any]]) -> Iterator[None]:
    """Puts methods of one's own in the place of the ``get_config`` of Keras' base classes, for a ``with`` block.

    Seen in Keras 3.15.1 as `get_config` of `Layer`, `Loss`, `Metric` and `LearningRateSchedule`; a class of the user's
    that does not define it has no other place where it could be told what to write.

    Args:
        replacements: By class, of Keras' method.
    """
    with _replaced(*((base, "get_config", replacement) for base, replacement in replacements.items())):
        yield


def model_of_config(config: Any, custom_objects: Mapping[str, Any], safe_mode: bool) -> Any:
    """Returns the model of a saved config, in which a layer that is named in several places is one layer.

    Seen in Keras 3.15.1 as `ObjectSharingScope` of `keras.src.saving.object_registration` or `serialization_lib`; the
    public `deserialize_keras_object` takes layers that are shared for several, and `load_model` reads the weights too.
    """
    import keras
    from keras.src.saving import serialization_lib

    with serialization_lib.ObjectSharingScope():
        return keras.saving.deserialize_keras_object(config, custom_objects=dict(custom_objects), safe_mode=safe_mode)


def load_some_layers(model: keras.Model, file: str | os.PathLike[str], skipped: Collection[Any]) -> None:
    """Gives a model's layers the weights in a file of Keras', all but some, which are not read.

    Seen in Keras 3.15.1 as `objects_to_skip` of `Model.load_weights`, which it takes and does not document.

    Args:
        file: ``*.weights.h5``.
        skipped: Layers and others, with all that is inside of them.
    """
    model.load_weights(file, objects_to_skip=list(skipped))


def load_assets(model: keras.Model, folder: str | os.PathLike[str]) -> None:
    """Gives a model's layers what an archive has of them besides weights, such as vocabularies.

    Seen in Keras 3.15.1 as `keras.src.saving.saving_lib._load_state` and `DiskIOStore`; publicly weights come with it.

    Args:
        folder: The archive's folder of that name.
    """
    from keras.src.saving import saving_lib

    store = saving_lib.DiskIOStore(os.fspath(folder), mode="r")
    saving_lib._load_state(
        model,
        weights_store=None,
        assets_store=store,
        inner_path="",
        visited_saveables=set(),
        failed_saveables=None,
        error_msgs=None,
    )


def saveable() -> type:
    """Returns the base class of layers, models, operations, losses, metrics and optimizers.

    Seen in Keras 3.15.1 as `keras.src.saving.keras_saveable.KerasSaveable`; it has no public name.
    """
    from keras.src.saving.keras_saveable import KerasSaveable

    return KerasSaveable


def legacy_places() -> tuple[Any, Any]:
    """Returns the modules in which Keras looks for the layers and models of HDF5 files and of Keras 2.

    Seen in Keras 3.15.1 as `keras.src.layers` and `keras.src.models`; the public modules have fewer names.
    """
    from keras.src import layers, models

    return layers, models


def named_publicly(name: str) -> Any:
    """Returns the object that Keras loads by a full public name, such as ``keras.layers.Dense``, or None.

    Seen in Keras 3.15.1 as `keras.src.api_export.get_symbol_from_name`; names of older versions are in it too.
    """
    from keras.src import api_export

    return api_export.get_symbol_from_name(name)


@contextlib.contextmanager
def _replaced(*changes: tuple[Any, str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replaces attributes by what functions make of them, for a ``with`` block."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for (owner, name, replacement), (_, _, value) in zip(changes, before, strict=True):
            setattr(owner, name, replacement(value))
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
