"""Facts about a model: inputs, outputs, and the losses it is compiled with."""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np

from elephant.backends.keras_private import (
    compiled_loss,
    compiled_metrics,
    flat_layers,
    given_losses,
    given_metrics,
    has_schedule,
    input_structure,
    output_structure,
)
from elephant.config import FitConfig
from elephant.data.json_types import require_types
from elephant.data.schema import Nest, from_json, num_leaves
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.layers.sharded_embedding import sharded_embeddings
from elephant.modeling.layers.sync_batch_norm import synchronized_layers
from elephant.modeling.variables import parts_of

_REDUCTIONS = {"sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"}

CLASSES, BINARY, VALUE, ARRAY = "classes", "binary", "value", "array"
_CLASS_LOSSES = {
    "categorical_crossentropy",
    "sparse_categorical_crossentropy",
    "categorical_focal_crossentropy",
}
_BINARY_LOSSES = {"binary_crossentropy", "binary_focal_crossentropy"}
# Keras' losses that have one value for a row of any shape, or for a whole batch.
_WHOLE_LOSSES = {"circle", "ctc", "dice", "tversky"}
# Keras' own that compare each number of an output with one of the label, by all of their names.
_ELEMENTWISE_LOSSES = {
    *("mean_squared_error", "mse", "mean_absolute_error", "mae", "mean_absolute_percentage_error", "mape"),
    *("mean_squared_logarithmic_error", "msle", "huber", "log_cosh", "logcosh", "poisson", "cosine_similarity"),
    *("kl_divergence", "kldivergence", "kld", "hinge", "squared_hinge", "categorical_hinge"),
}


def check_reduction(loss: Any) -> None:
    """Raises UnsupportedError unless a batch has one loss, of which ranks know how to make that of all their rows."""
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction not in _REDUCTIONS:
        raise UnsupportedError(
            f"loss: expected one of the reductions {', '.join(sorted(_REDUCTIONS))}. Received: {reduction!r}, "
            "with which a batch has no loss but one of each row. Compile with reduction='sum_over_batch_size'."
        )


def by_output(loss: Any, nest: Nest, names: Sequence[str], given: Sequence[str]) -> list[Any]:
    """Returns the loss of each output, in whichever of Keras' forms they were compiled; None where there is none.

    Args:
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
        given: Keras' own names of them.
    """
    measured = [False] * len(names)
    for metrics in given_metrics(compiled_metrics(model)):
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
    """
    for weight in keras.tree.flatten(given_losses(compiled_loss(model)).weights):
        if weight is not None and not _is_number(weight):
            raise ConfigurationError(
                f"model: expected numbers as loss_weights, the third argument of compile. Received: {weight!r}. "
                "Metrics go by their name: compile(optimizer, loss, metrics=[...]).",
                topic="losses-and-metrics-that-do-not-fit-the-model",
            )
    try:
        _matched(model)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"model: expected losses and metrics that Keras can match with the outputs of {model.name!r}. Received: "
            f"{error.args[0] if error.args else error}",
            topic="losses-and-metrics-that-do-not-fit-the-model",
        ) from error


def _matched(model: keras.Model) -> list[Any]:
    """Returns loss and metrics as they were compiled, matched with the outputs; none where only Keras can do that."""
    if not type(model).__module__.startswith("keras.") or not getattr(model, "outputs", None):
        return []
    loss, metrics = compiled_loss(model), compiled_metrics(model)
    structure = output_structure(model)
    if structure is None:
        structure = model.outputs[0] if len(model.outputs) == 1 else model.outputs
    outputs = keras.tree.map_structure(lambda tensor: keras.KerasTensor(tensor.shape, tensor.dtype), structure)
    tried = []
    if loss is not None:
        tried.append(type(loss)(*given_losses(loss), output_names=loss.output_names))
    if metrics is not None:
        tried.append(type(metrics)(*given_metrics(metrics), output_names=metrics.output_names))
    for compiled in tried:
        compiled.build(outputs, outputs)
    return tried


def _measures_of(model: keras.Model) -> tuple[str, ...] | None:
    """Returns the loss' name and those of the compiled metrics; None where code of the user's may measure more."""
    if has_own_step(model) or computes_own_loss(model):
        return None
    try:
        matched = _matched(model)
    except (KeyError, TypeError, ValueError):
        # That is said where it is checked.
        return None
    named = [str(metric.name) for compiled in matched for metric in compiled.metrics]
    return tuple(dict.fromkeys(["loss", *named])) if matched else None


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
    return _is_of_keras(loss) and not loss_name(loss).startswith("sparse_") and not takes_sequences(loss)


def takes_sequences(loss: Any) -> bool:
    """Returns whether labels are sequences of class numbers, each of its own length, which zeros fill up."""
    return loss is not None and _is_of_keras(loss) and loss_name(loss) == "ctc"


def _is_of_keras(loss: Any) -> bool:
    # By where its code stands: a function that wraps one of Keras' has that one's name and module.
    module = loss.__globals__.get("__name__") if inspect.isfunction(loss) else type(loss).__module__
    return isinstance(loss, str) or str(module).startswith("keras.")


def _classes_of(loss: Any, shape: tuple[int | None, ...] | None) -> tuple[int | None, int | None]:
    """Returns how many classes one of Keras' own cross-entropies tells apart, and the number of the one it ignores.

    Both are None where the loss is another one, or takes labels that are no class numbers, as smoothed ones are.
    """
    if loss is None or not shape or not _is_of_keras(loss):
        return None, None
    config, name = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}, loss_name(loss)
    if config.get("axis", -1) not in (-1, len(shape)) or (name in _BINARY_LOSSES and config.get("label_smoothing")):
        return None, None
    if name in _BINARY_LOSSES:
        return 2, None
    return (shape[-1], config.get("ignore_class")) if name in _CLASS_LOSSES else (None, None)


def _loss_shape(loss: Any, shape: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
    """Returns the shape of one of Keras' own losses of a row, which takes the last axis of the output together."""
    if loss is None or not shape or not _is_of_keras(loss) or loss_name(loss) in _WHOLE_LOSSES:
        return None
    axis = loss.get_config().get("axis", -1) if isinstance(loss, keras.losses.Loss) else -1
    return shape[:-1] if axis in (-1, len(shape)) else None


@dataclass(frozen=True)
class InputInfo:
    """One input of a model.

    Args:
        name: Keras' name of it.
        shape: Shape of one row, None where a dimension is free.
        dtype: Type of its elements; ``"string"`` for strings.
        sparse: Whether it takes sparse tensors.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    sparse: bool = False


@dataclass(frozen=True)
class OutputInfo:
    """One output of a model, and what its loss makes of it.

    Args:
        name: Keras' name of it.
        shape: Shape of one row; None when unknown.
        kind: ``"classes"`` (one probability per class), ``"binary"`` (the probability of class 1),
            ``"value"`` (one number) or ``"array"``.
        from_logits: Whether a classifier's output still needs its softmax or sigmoid.
        label_shape: Shape of one row's label where the output tells it, and None elsewhere.
        has_loss: Whether a loss compares it with labels.
        is_measured: Whether a metric of its own does so.
        num_classes: Classes that the loss tells apart, 2 for each number of a binary one; None where it is none of
            Keras' own cross-entropies, or code of the user's computes it.
        ignored_class: Number of the class whose rows the loss ignores, or None.
        loss_shape: Shape of the loss of one row, before it is reduced, which sample weights have too; None where it is
            none of Keras' own losses, or code of the user's computes it.
        takes_sequences: Whether labels are sequences of class numbers, of any length, as of CTC.
        is_elementwise: Whether one of Keras' own losses compares each number of it with one of the label.
    """

    name: str
    shape: tuple[int | None, ...] | None
    kind: str
    from_logits: bool
    label_shape: tuple[int | None, ...] | None
    has_loss: bool = True
    is_measured: bool = False
    num_classes: int | None = None
    ignored_class: int | None = None
    loss_shape: tuple[int | None, ...] | None = None
    takes_sequences: bool = False
    is_elementwise: bool = False

    @property
    def needs_label(self) -> bool:
        """True if the model cannot be trained without labels for it."""
        return self.has_loss or self.is_measured


@dataclass(frozen=True)
class LayerInfo:
    """One layer of a model, as people read of it.

    Args:
        name: Keras' name of it.
        kind: Its class.
        shape: Shape of its output, as text; empty where it is unknown.
        params: Its parameters, those of layers inside of it with them; None before it is built.
        trained: How many of them training changes.
    """

    name: str
    kind: str
    shape: str
    params: int | None
    trained: int | None


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model for the rest of elephant.

    Args:
        inputs: Its inputs; none when they are unknown, as those of a subclass that was not built from `keras.Input`.
        outputs: Its outputs; one without a shape when they are unknown.
        x: How the inputs are nested.
        y: How the outputs are.
        dtype: The model's floating-point type, for labels and weights.
        scheduled_rate: Whether the optimizer's learning rate follows a schedule.
        own_step: Whether code of the user's computes the loss: a ``train_step``, or what there is in place of a
            compiled loss. It alone knows what labels are compared with.
        several_rates: Whether the optimizer has no learning rate but those of the ones inside, as a `MultiOptimizer`.
        has_call: Whether its class has a ``call``; one with a ``train_step`` of its own trains without.
        synchronized: Whether it has a ``BatchNormalization(synchronized=True)``.
        sharded: Names of its ShardedEmbedding layers.
        is_compiled: Whether it has an optimizer and what that minimizes.
        is_stateful: Whether each of its batches goes on where the batch before has ended, as ``LSTM(stateful=True)``.
        title: What it is in words: class, name, layers and parameters.
        layers: Its layers, those inside of one not apart, in their order.
        measures: Names of its loss and its metrics, without those of the outputs that Keras writes before them; None
            where they are known after an epoch alone.
    """

    inputs: tuple[InputInfo, ...]
    outputs: tuple[OutputInfo, ...]
    x: Nest
    y: Nest
    dtype: str
    scheduled_rate: bool
    own_step: bool
    several_rates: bool = False
    has_call: bool = True
    synchronized: bool = False
    sharded: tuple[str, ...] = ()
    is_compiled: bool = True
    is_stateful: bool = False
    title: str = "Keras model"
    layers: tuple[LayerInfo, ...] = ()
    measures: tuple[str, ...] | None = None

    @classmethod
    def of(cls, model: keras.Model) -> ModelInfo:
        """Reads the facts off a compiled model; raises when it is of a form that cannot be trained here."""
        inputs = list(getattr(model, "inputs", None) or [])
        structure = input_structure(model)
        nest = _nest_like(structure, inputs)
        names = _names(nest, [str(tensor.name) for tensor in inputs])
        outputs, y = _outputs_of(model)
        optimizer = getattr(model, "optimizer", None)
        floatx = keras.backend.floatx()
        return cls(
            inputs=tuple(_input_facts(name, tensor) for name, tensor in zip(names, inputs, strict=True)),
            outputs=outputs,
            x=nest,
            y=y,
            dtype="float64" if floatx == "float64" else "float32",
            scheduled_rate=_is_scheduled(optimizer),
            own_step=has_own_step(model) or getattr(model, "loss", None) is None,
            several_rates=hasattr(getattr(optimizer, "inner_optimizer", optimizer), "optimizers"),
            has_call=type(model).call is not keras.Model.call,
            synchronized=bool(synchronized_layers(model, every=False)),
            sharded=tuple(layer.name for layer in sharded_embeddings(model)),
            is_compiled=bool(model.compiled),
            is_stateful=any(getattr(layer, "stateful", False) for layer in flat_layers(model)),
            title=_title_of(model),
            layers=tuple(map(_layer_facts, _layers_of(model))),
            measures=_measures_of(model),
        )

    def check_rates(self, config: FitConfig, *, replacing: str, scaling: str) -> None:
        """Raises for options that do not go with the learning rates of the model's optimizer.

        Args:
            replacing: What the user calls ``learning_rate``.
            scaling: What the user calls ``scale_learning_rate``.
        """
        replaces = config.learning_rate is not None
        for name, given in ((replacing, replaces), (scaling, config.scale_learning_rate)):
            if given and self.scheduled_rate:
                raise ConfigurationError(
                    f"{name}: expected a model compiled with a constant learning rate. "
                    f"Received: one with a LearningRateSchedule. Leave {name} out, or compile with a number."
                )
        if replaces and self.several_rates:
            raise ConfigurationError(
                f"{replacing}: expected a model compiled with an optimizer of one learning rate. Received: a "
                f"MultiOptimizer, whose optimizers have one each. Leave {replacing} out, and compile with those rates."
            )
        if self.several_rates and not config.is_synchronous:
            raise UnsupportedError(
                f"{config.way}: expected an optimizer with one learning rate, which the driver tells servers "
                f"and workers. Received: a MultiOptimizer. Use {config.way_of_ranks}, or compile with one optimizer."
            )

    def check_normalization(self, config: FitConfig) -> None:
        """Raises for options with which ranks do not take every step together, as the model's layers are told to."""
        together = config.is_synchronous and config.averages_gradients
        if self.synchronized and config.num_ranks > 1 and not together:
            raise ConfigurationError(
                f"model: expected {config.way_of_ranks} and frequency='batch' with "
                "BatchNormalization(synchronized=True), "
                f"in which the rows of all workers meet in every step. Received: {config.way} and frequency="
                f"{config.frequency!r}. Change them, or build the layers with synchronized=False."
            )

    def check_tables(self, config: FitConfig) -> None:
        """Raises UnsupportedError for a way of training that does not know how to divide the model's tables."""
        together = config.averages_gradients if config.is_synchronous else config.pushes_gradients
        ways = {
            f"{config.way}, frequency={config.frequency!r} and algorithm={config.asynchronous.algorithm!r}": (
                not together or config.trains_in_rounds
            ),
            "pipelineStages": config.pipeline_stages is not None,
            "distribution": config.distribution is not None,
        }
        received = [way for way, is_taken in ways.items() if is_taken]
        if self.sharded and received:
            raise UnsupportedError(
                "model: expected gradients that are exchanged in every step, as with mode='synchronous' and "
                "frequency='batch', or mode='asynchronous' and algorithm='downpour', for the table of the "
                f"ShardedEmbedding {self.sharded[0]!r}. Received: {', '.join(received)}. Change that, or build the "
                "model with keras.layers.Embedding."
            )

    @property
    def knows_outputs(self) -> bool:
        """True if the outputs are known by their names: a subclass that is not built may have any."""
        return len(self.outputs) > 1 or any(output.shape is not None for output in self.outputs)

    def to_json(self) -> dict[str, Any]:
        """Returns a form that JSON holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, form: dict[str, Any]) -> ModelInfo:
        """Reads the form of `to_json`; raises KeyError, TypeError or ValueError for any other."""
        inputs = (InputInfo(**{name: _tuple(value) for name, value in part.items()}) for part in form["inputs"])
        outputs = (OutputInfo(**{name: _tuple(value) for name, value in part.items()}) for part in form["outputs"])
        nests = {name: from_json(form[name]) for name in ("x", "y")}
        sharded, layers = tuple(form.get("sharded", ())), tuple(LayerInfo(**part) for part in form.get("layers", ()))
        parts = {"inputs": tuple(inputs), "outputs": tuple(outputs), "sharded": sharded, "layers": layers}
        parts["measures"] = _tuple(form.get("measures"))
        read = cls(**{**form, **nests, **parts})
        for part in (read, *read.inputs, *read.outputs, *read.layers):
            require_types(part)
        for dtype in (read.dtype, *(one.dtype for one in read.inputs)):
            keras.backend.standardize_dtype(dtype)
        return read


def has_own_step(model: keras.Model) -> bool:
    """Returns whether the model's class has a ``train_step`` of its own, as a GAN or a VAE has."""
    return type(model).train_step is not keras.Model.train_step


def computes_own_loss(model: keras.Model) -> bool:
    """Returns whether there may be more to the loss than what is compiled and regularizers.

    It may be in a ``compute_loss`` of the model's class, or what a layer of the user's adds.
    """
    if type(model).compute_loss is not keras.Model.compute_loss:
        return True
    return any(not type(layer).__module__.startswith(("keras.", "elephant.")) for layer in flat_layers(model))


def adds_loss(model: keras.Model) -> bool:
    """Returns whether there is a loss without a compiled one: of the user's code, or of a regularizer."""
    return (
        has_own_step(model)
        or computes_own_loss(model)
        or any(
            value is not None
            for layer in flat_layers(model)
            for name, value in vars(layer).items()
            if name.endswith("regularizer")
        )
    )


def _input_facts(name: str, tensor: Any) -> InputInfo:
    return InputInfo(
        name=name,
        shape=tuple(tensor.shape[1:]),
        dtype=str(keras.backend.standardize_dtype(tensor.dtype)),
        sparse=bool(getattr(tensor, "sparse", False)),
    )


def _outputs_of(model: keras.Model) -> tuple[tuple[OutputInfo, ...], Nest]:
    """Returns the outputs and how they are nested; those of a model that is not built as its losses tell them."""
    tensors = list(getattr(model, "outputs", None) or [])
    if not tensors:
        names, nest = outputs_of_losses(model.loss)
        losses, measured = by_output(model.loss, nest, names, names), measured_outputs(model, names, names)
        shapes: list[tuple[int | None, ...] | None] = [None] * len(names)
    else:
        structure = output_structure(model)
        given = [str(name) for name in getattr(model, "output_names", None) or ["output"] * len(tensors)]
        nest = _nest_like(structure, tensors)
        names = _names(nest, given)
        # A train_step of the user's own computes its losses itself.
        losses, measured = by_output(model.loss, nest, names, given), measured_outputs(model, names, given)
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
    own = has_own_step(model) or type(model).compute_loss is not keras.Model.compute_loss
    parts = zip(names, shapes, losses, measured, strict=True)
    return tuple(_output_facts(*part, own) for part in parts), nest


def _output_facts(
    name: str, shape: tuple[int | None, ...] | None, loss: Any, measured: bool, own_loss: bool
) -> OutputInfo:
    check_reduction(loss)
    num_classes, ignored_class = (None, None) if own_loss else _classes_of(loss, shape)
    return OutputInfo(
        name=name,
        shape=shape,
        kind=_output_kind("" if loss is None else loss_name(loss), shape),
        from_logits=from_logits(loss),
        label_shape=None if loss is None or not takes_labels_like_outputs(loss) else shape,
        has_loss=loss is not None,
        is_measured=measured,
        num_classes=num_classes,
        ignored_class=ignored_class,
        loss_shape=None if own_loss else _loss_shape(loss, shape),
        takes_sequences=takes_sequences(loss),
        is_elementwise=not own_loss
        and loss is not None
        and _is_of_keras(loss)
        and loss_name(loss) in _ELEMENTWISE_LOSSES,
    )


def _names(nest: Nest, given: list[str]) -> list[str]:
    """Returns the keys of a model's dictionary of tensors, and the tensors' own names of what is nested otherwise.

    >>> _names({"image": 0, "words": (1, 2)}, ["a", "b", "c"])
    ['image', 'b', 'c']
    """
    names = list(given)
    _name_leaves(nest, names)
    return names if len(set(names)) == len(names) else given


def _name_leaves(nest: Nest, names: list[str]) -> None:
    if isinstance(nest, dict):
        for key, part in nest.items():
            if isinstance(part, int):
                names[part] = str(key)
            _name_leaves(part, names)
    elif isinstance(nest, tuple):
        for part in nest:
            _name_leaves(part, names)


def _nest_like(structure: Any, tensors: Sequence[Any]) -> Nest:
    if structure is None or not isinstance(structure, (dict, list, tuple)):
        return 0 if len(tensors) <= 1 else tuple(range(len(tensors)))
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    return from_json(keras.tree.map_structure(lambda tensor: places[id(tensor)], structure))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _output_kind(name: str, output_shape: tuple[int | None, ...] | None) -> str:
    units = output_shape[0] if output_shape is not None and len(output_shape) == 1 else None
    if name in _CLASS_LOSSES and (output_shape is None or (units or 0) > 1):
        return CLASSES
    if name in _BINARY_LOSSES and units == 1:
        return BINARY
    return VALUE if units == 1 else ARRAY


def _title_of(model: keras.Model) -> str:
    """Returns a model in words, such as ``Sequential 'digits', 2 layers, 9,610 parameters``."""
    count = len(_layers_of(model))
    layers = f"{count:,} layer{'' if count == 1 else 's'}"
    size = f"{model.count_params():,} parameters" if model.built else "not built yet"
    return f"{type(model).__name__} {model.name!r}, {layers}, {size}"


def _layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    return [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]


def _layer_facts(layer: keras.layers.Layer) -> LayerInfo:
    try:
        shapes = [str(tuple(tensor.shape)) for tensor in keras.tree.flatten(layer.output)]
    except (AttributeError, ValueError):
        # Keras knows outputs of layers that were called with symbols: not those of a subclass.
        shapes = []
    return LayerInfo(
        name=layer.name,
        kind=type(layer).__name__,
        shape=", ".join(shapes),
        params=layer.count_params() if layer.built else None,
        trained=sum(math.prod(weight.shape) for weight in layer.trainable_weights) if layer.built else None,
    )


def _is_scheduled(optimizer: keras.optimizers.Optimizer | None) -> bool:
    return any(map(has_schedule, parts_of(optimizer)))
