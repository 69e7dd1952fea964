"""Models of a class that Keras cannot save: taken apart into attributes, and put together on a new instance."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from elephant.backends.keras_private import (
    BUILD_ATTRIBUTES,
    TRACKING_PREFIX,
    compile_settings,
    flat_layers,
    is_autocast,
    modules_apart,
)
from elephant.errors import ConfigurationError
from elephant.modeling.keras_saving import (
    PLAIN,
    STATEFUL,
    accepted_configs,
    custom_objects_of,
    forgotten_attribute,
    found_lambdas,
    is_of_keras,
    recorded_names,
    require_same_objects,
    stateless_copy,
)


@dataclass(frozen=True, repr=False, eq=False)
class TakenModel:
    """A model of a class that Keras cannot save, as the values of its attributes; a call makes a new one of them.

    Keras' own parts are kept as Keras saves them, parts that it cannot save as this value is.

    Args:
        kind: The class, of which no ``__init__`` runs.
        parts: The model, taken apart.
        custom_objects: Classes and functions that parts name.
    """

    kind: type[keras.Model]
    parts: Any
    custom_objects: Mapping[str, Any]

    def __call__(self) -> keras.Model:
        """Returns a new compiled model."""
        objects = dict(self.custom_objects)
        with keras.saving.custom_object_scope(objects), found_lambdas(objects), warnings.catch_warnings():
            # The state of the optimizer comes with the variables.
            warnings.filterwarnings("ignore", r"Skipping variable loading for optimizer")
            model: keras.Model = _joined(self.parts, {})
        return model

    def __repr__(self) -> str:
        return f"<the given {self.kind.__qualname__}>"


def take_apart(model: keras.Model, custom_objects: Mapping[str, Any]) -> TakenModel:
    """Returns a model of a user's class as a value that travels where its attributes do.

    Raises:
        ConfigurationError: The class is one of Keras' ways to build models, or an attribute cannot be copied.
    """
    if any(base.__name__ in ("Functional", "Sequential") for base in type(model).__mro__ if is_of_keras(base)):
        raise ConfigurationError(f"{type(model).__qualname__} is made of an Input and layers, not of attributes.")
    try:
        with recorded_names() as written, accepted_configs():
            parts = _parts_of(model, {})
        taken = TakenModel(type(model), parts, {**custom_objects_of(written), **custom_objects})
        rebuilt = taken()
        with recorded_names() as again:
            _parts_of(rebuilt, {})
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{type(error).__name__}: {error}") from error
    require_same_objects(written, again, custom_objects)
    _require_same_layers(model, rebuilt)
    return taken


def _require_same_layers(model: keras.Model, rebuilt: keras.Model) -> None:
    # Not their names, which Keras leaves out where a constructor takes none.
    layers = [[type(layer) for layer in flat_layers(one)] for one in (model, rebuilt)]
    shapes = [[(tuple(v.shape), v.trainable) for v in (*one.weights, *one.variables)] for one in (model, rebuilt)]
    if layers[0] != layers[1] or shapes[0] != shapes[1]:
        raise ConfigurationError(
            f"its attributes make {len(layers[1])} layers and {len(rebuilt.variables)} variables of {len(layers[0])} "
            f"and {len(model.variables)}: some are shared by layers, or are no attributes."
        )


@dataclass(frozen=True, eq=False)
class _Reduced:
    """A layer, metric or optimizer, which Keras itself pickles."""

    restore: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _VariableParts:
    """A variable."""

    value: np.ndarray
    options: dict[str, Any]
    rest: dict[str, Any]


@dataclass(frozen=True, eq=False)
class _SeedParts:
    """A generator of random numbers, with its state."""

    config: dict[str, Any]
    state: np.ndarray


@dataclass(frozen=True, eq=False)
class _LossParts:
    """A loss, of which Keras pickles only what its config has."""

    kind: Any
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _LayerParts:
    """A layer or model that Keras cannot save.

    Args:
        kind: Its class.
        options: Arguments of Keras' own constructor.
        plain: Attributes that are numbers, strings and such, Keras' own included.
        attributes: Other attributes that its class has added, in their order.
        trainable: Whether it and each layer inside is trained, which Keras keeps of some.
        compiled: Arguments of Keras' own ``compile``; none for what was not compiled.
    """

    kind: type[keras.layers.Layer]
    options: dict[str, Any]
    plain: dict[str, Any]
    trainable: list[bool]
    attributes: dict[str, Any] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)


def _apart(value: Any, done: dict[int, Any]) -> Any:
    """Returns a value in a form that pickles; the same for the same object, wherever it is met."""
    if isinstance(value, PLAIN):
        return value
    kind = type(value)
    # Keras has wrapped those that are attributes.
    if kind is dict or kind.__name__ in ("TrackedDict", "TrackedOrderedDict"):
        return {key: _apart(part, done) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_apart(part, done) for part in value))
    for plain, wrapped in ((list, "TrackedList"), (tuple, ""), (set, "TrackedSet")):
        if kind is plain or kind.__name__ == wrapped:
            return plain(_apart(part, done) for part in value)
    if id(value) not in done:
        if isinstance(value, keras.Variable):
            done[id(value)] = _variable_apart(value)
        elif isinstance(value, keras.random.SeedGenerator):
            done[id(value)] = _SeedParts(value.get_config(), keras.ops.convert_to_numpy(value.state))
        elif isinstance(value, keras.layers.Layer):
            _layer_apart(value, done)
        elif isinstance(value, keras.losses.Loss):
            parts = done[id(value)] = _LossParts(type(value))
            parts.attributes.update(_apart(vars(value), done))
        elif isinstance(value, STATEFUL):
            _require_config(value)
            done[id(value)] = _Reduced(*value.__reduce__())
        else:
            done[id(value)] = stateless_copy(value)
    return done[id(value)]


def _require_config(value: Any) -> None:
    """Raises TypeError for a metric or optimizer of the user's that Keras would not make again as it is."""
    forgotten = None if is_of_keras(type(value)) else forgotten_attribute(value, value.from_config(value.get_config()))
    if forgotten is not None:
        raise TypeError("Keras keeps no {}={!r} of {}.".format(*forgotten[:2], type(value).__qualname__))


def _variable_apart(value: keras.Variable) -> _VariableParts:
    names = ("dtype", "trainable", "aggregation", "name")
    return _VariableParts(
        keras.ops.convert_to_numpy(value),
        {**{name: getattr(value, name) for name in names}, "autocast": is_autocast(value)},
        {name: getattr(value, name) for name in ("regularizer", "constraint", "overwrite_with_gradient")},
    )


def _layer_apart(layer: keras.layers.Layer, done: dict[int, Any]) -> None:
    try:
        done[id(layer)] = _Reduced(*layer.__reduce__())
    except (NotImplementedError, TypeError, ValueError):
        if is_of_keras(type(layer)):
            raise
        _parts_of(layer, done)


def _parts_of(layer: keras.layers.Layer, done: dict[int, Any]) -> _LayerParts:
    # PyTorch keeps layers that are attributes apart from the others.
    inner = {name: part for name, part in modules_apart(layer).items() if isinstance(part, keras.layers.Layer)}
    values = {**vars(layer), **inner}
    options = {"name": layer.name, "dtype": layer.dtype_policy, "activity_regularizer": layer.activity_regularizer}
    own = {name: value for name, value in values.items() if not name.startswith(TRACKING_PREFIX)}
    plain = {name: value for name, value in own.items() if isinstance(value, PLAIN)}
    trainable = [inner.trainable for inner in flat_layers(layer)]
    parts = done[id(layer)] = _LayerParts(type(layer), copy.deepcopy(options), plain, trainable)
    of_keras = vars(_bare(type(layer), {"name": "bare"}, compiled=True))
    for name, value in own.items():
        is_own = name not in of_keras and not isinstance(value, PLAIN)
        if name in BUILD_ATTRIBUTES or (is_own and not isinstance(value, keras.callbacks.Callback)):
            parts.attributes[name] = _apart(value, done)
    if isinstance(layer, keras.Model) and layer.compiled:
        arguments = {**(compile_settings(layer) or {}), "optimizer": layer.optimizer, "auto_scale_loss": False}
        parts.compiled.update(_apart(arguments, done))
    return parts


def _bare(kind: Any, options: dict[str, Any], *, compiled: bool = False) -> keras.layers.Layer:
    """Returns an instance of which only Keras' own constructor has run."""
    layer: keras.layers.Layer = kind.__new__(kind)
    base = keras.Model if issubclass(kind, keras.Model) else keras.layers.Layer
    base.__init__(layer, **options)
    if compiled and base is keras.Model:
        keras.Model.compile(layer, "sgd", "mse")
    return layer


def _joined(value: Any, done: dict[int, Any]) -> Any:
    """Returns the object that `_apart` was given, made again."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return {key: _joined(part, done) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_joined(part, done) for part in value))
    if isinstance(value, (list, tuple, set)):
        return type(value)(_joined(part, done) for part in value)
    if id(value) not in done:
        if isinstance(value, _LayerParts):
            _join_layer(value, done)
        elif isinstance(value, _LossParts):
            loss = done[id(value)] = value.kind.__new__(value.kind)
            vars(loss).update(_joined(value.attributes, done))
        elif isinstance(value, _Reduced):
            done[id(value)] = value.restore(*value.arguments)
        elif isinstance(value, _VariableParts):
            variable = done[id(value)] = keras.Variable(value.value, **value.options)
            for name, part in value.rest.items():
                setattr(variable, name, part)
        elif isinstance(value, _SeedParts):
            generator = done[id(value)] = keras.random.SeedGenerator(**value.config)
            generator.state.assign(value.state)
        else:
            done[id(value)] = copy.deepcopy(value)
    return done[id(value)]


def _join_layer(parts: _LayerParts, done: dict[int, Any]) -> None:
    layer = done[id(parts)] = _bare(parts.kind, copy.deepcopy(parts.options))
    for name, part in parts.attributes.items():
        setattr(layer, name, _joined(part, done))
    # A layer's own flag comes after that of the one around it, which sets it too.
    for inner, trainable in zip(flat_layers(layer), parts.trainable, strict=False):
        inner.trainable = trainable
    if parts.compiled:
        keras.Model.compile(layer, **_joined(parts.compiled, done))
    # Not by setattr: some are properties' own.
    vars(layer).update(parts.plain)
