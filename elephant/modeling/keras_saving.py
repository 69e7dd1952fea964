"""Content of a saved live model: classes and functions behind names, and arguments.

Of a class or function of the user's Keras writes the name alone. The objects behind the names are recorded while it
writes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import itertools
import json
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import keras
import numpy as np

from elephant.backends import BACKENDS, current
from elephant.backends.keras_private import compile_settings, replaced_code_functions, replaced_configs
from elephant.errors import ConfigurationError

# Prefix of lambdas, in the place of a name.
LAMBDA = "lambda:"
PLAIN = (str, int, float, bool, type(None))
_FUNCTIONS_OF_KERAS = ("activations", "losses", "metrics", "initializers", "regularizers")
STATEFUL = (keras.Variable, keras.metrics.Metric, keras.losses.Loss, keras.optimizers.Optimizer)
# Metrics first, whose names are in a history.
_COMPILED = ("metrics", "weighted_metrics", "loss")
# What Keras writes of every layer, loss, metric and schedule, and hands to its constructor again.
_OF_EACH = {
    keras.optimizers.schedules.LearningRateSchedule: (),
    keras.layers.Layer: ("name", "trainable", "dtype", "activity_regularizer"),
    keras.losses.Loss: ("name", "reduction", "dtype"),
    keras.metrics.Metric: ("name", "dtype"),
}
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def recorded_names() -> Iterator[list[tuple[str, Any]]]:
    """Records the classes and functions that this thread has Keras write, with the names it writes.

    Example:
        >>> def half(values):
        ...     return values / 2
        >>> with recorded_names() as written:
        ...     config = keras.saving.serialize_keras_object(half)
        >>> list(custom_objects_of(written))
        ['half']
    """
    written, lambdas, thread = list[tuple[str, Any]](), dict[tuple[str, int], Any](), threading.get_ident()

    def record(name: str, value: Any) -> None:
        if threading.get_ident() == thread:
            written.append((name, value))

    def naming(value: Any) -> str:
        name: str = modules.name_of(value)
        record(name, value)
        return name

    def dumping(function: Any) -> Any:
        if threading.get_ident() != thread:
            return modules.dump(function)
        name = _lambda_name(function)
        # One of a loop is made anew in each round, and is the same one all the same.
        record(name, lambdas.setdefault((name, id(function.__globals__)), function))
        return modules.dump(function)

    with accepted_lambdas(), replaced_code_functions(naming=naming, dumping=dumping) as modules:
        yield written


@contextlib.contextmanager
def accepted_lambdas() -> Iterator[None]:
    """Leaves out Keras' warning of a lambda, which is of files that others load: elephant takes the lambda along."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
        yield


@contextlib.contextmanager
def found_lambdas(custom_objects: Mapping[str, Any]) -> Iterator[None]:
    """Has Keras load lambdas as they were found: with what they need of their module, which no archive has.

    Args:
        custom_objects: What `custom_objects_of` returned.
    """

    def loading(code: Any, defaults: Any = None, closure: Any = None, globs: Any = None) -> Any:
        # Tuples come back from an archive as lists.
        loaded = modules.load(code, tuple(defaults) if isinstance(defaults, list) else defaults, closure, globs)
        return custom_objects.get(_lambda_name(loaded), loaded)

    if not any(name.startswith(LAMBDA) for name in custom_objects):
        yield
        return
    with _one_at_a_time, replaced_code_functions(loading=loading) as modules:
        yield


@contextlib.contextmanager
def named_losses(model: keras.Model) -> Iterator[None]:
    """Has Keras save losses and metrics that are callable objects as functions: partials, methods, a tf.function.

    Raises:
        ConfigurationError: One of them holds layers, or what cannot be copied.
    """
    config = compile_settings(model)
    if config is None:
        yield
        return
    given, made = {name: config[name] for name in _COMPILED if name in config}, dict[int, Callable[..., Any]]()
    try:
        config.update({name: _with_functions(value, made) for name, value in given.items()})
        yield
    finally:
        config.update(given)


def _with_functions(value: Any, made: dict[int, Callable[..., Any]]) -> Any:
    """Returns compiled losses or metrics, with a function in the place of each callable object, by whose id it is."""
    if isinstance(value, Mapping):
        return {name: _with_functions(part, made) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        # Keras has made something else of some lists.
        return (list if isinstance(value, list) else tuple)(_with_functions(part, made) for part in value)
    if id(value) in made:
        return made[id(value)]
    known = (type, types.FunctionType, types.BuiltinFunctionType, *STATEFUL)
    if not callable(value) or isinstance(value, known) or hasattr(value, "get_config"):
        return value
    # What it has traced does not travel.
    traced = current().python_function(value)
    try:
        stateless_copy(traced or value)
    except TypeError as error:
        raise ConfigurationError(
            f"model: expected losses and metrics that hold numbers alone. Received: {value!r}: {error} Make it a "
            "subclass of keras.losses.Loss or keras.metrics.Metric, or pass a function that builds and compiles the "
            "model: KerasEstimator(model=build_model)."
        ) from error
    called = _traced_call(traced) if traced is not None else _call(value)
    # As Keras calls it in a history: the second of a name is numbered.
    name, names = getattr(value, "__name__", type(value).__name__), {one.__name__ for one in made.values()}
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    called.__name__ = called.__qualname__ = next(one for one in itertools.chain([name], numbered) if one not in names)
    made[id(value)] = called
    return called


def _call(value: Callable[..., Any]) -> Callable[..., Any]:
    def called(*labels_and_outputs: Any, **options: Any) -> Any:
        return value(*labels_and_outputs, **options)

    return called


def _traced_call(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*labels_and_outputs: Any, **options: Any) -> Any:
        return current().compiled(function)(*labels_and_outputs, **options)

    return called


@contextlib.contextmanager
def accepted_configs(whole: keras.Model | None = None) -> Iterator[None]:
    """Has Keras write what constructors of the user's layers, losses, metrics and schedules take, in this thread.

    Many published ones have no ``**options``: they train, and Keras saves them, but it cannot load them. Others have no
    ``get_config``: of layers Keras notes the arguments, of the others attributes of the same names tell them.

    Args:
        whole: The model that is saved; those of the user's inside of it are treated alike.
    """
    thread = threading.get_ident()

    def accepting(written: Any, options: tuple[str, ...]) -> Any:
        @functools.wraps(written)
        def get_config(part: Any) -> dict[str, Any]:
            if threading.get_ident() != thread or is_of_keras(type(part)):
                return cast(dict[str, Any], written(part))
            is_inside = whole is not None and part is not whole and isinstance(part, keras.Model)
            given = _given_arguments(part, options) if is_inside or not isinstance(part, keras.layers.Layer) else {}
            # What the base classes of schedules and models would write raises.
            config = {"name": part.name} if given and is_inside else {} if given and not options else written(part)
            refused = _refused_options(type(part), options)
            return {**{name: value for name, value in config.items() if name not in refused}, **given}

        return get_config

    accepted = {base: functools.partial(accepting, options=options) for base, options in _OF_EACH.items()}
    with _one_at_a_time, replaced_configs(accepted):
        yield


def _given_arguments(part: Any, options: tuple[str, ...]) -> dict[str, Any]:
    """Returns the arguments that a part without a ``get_config`` keeps as attributes of the same names; all or none."""
    owner = next(base for base in type(part).__mro__ if "get_config" in vars(base))
    if not is_of_keras(owner):
        return {}
    given = {}
    for name, parameter in list(inspect.signature(type(part).__init__).parameters.items())[1:]:
        if name not in options and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            if not isinstance(getattr(part, name, part), PLAIN):
                return {}
            given[name] = getattr(part, name)
    return given


def _refused_options(kind: Any, options: tuple[str, ...]) -> list[str]:
    """Returns which options a class of the user's does not take; one that reads configs itself knows."""
    if not is_of_keras(kind.from_config.__func__):
        return []
    parameters = inspect.signature(kind.__init__).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return [] if takes_all else [name for name in options if name not in parameters]


def _lambda_name(function: Any) -> str:
    """Returns a name that a lambda has wherever it is loaded."""
    code = function.__code__
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    content = [_content_of(code), code.co_filename, code.co_firstlineno, function.__defaults__, values]
    return f"{LAMBDA}{hashlib.sha256(json.dumps(content, default=repr).encode()).hexdigest()[:16]}"


def _content_of(code: types.CodeType) -> list[Any]:
    """Returns the code of a function, the functions inside of it included, in a form that all processes have alike."""
    return [code.co_code.hex(), code.co_names, [_constant(value) for value in code.co_consts]]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _content_of(value)
    # The order of a set is each process' own.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def custom_objects_of(written: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns those of recorded classes and functions that are neither Keras' own nor registered with it.

    Raises:
        ConfigurationError: Two of them have one name.
    """
    found: dict[str, Any] = {}
    for name, value in written:
        if _is_custom(name, value) and found.setdefault(name, value) is not value:
            both = " and ".join(f"{one.__module__}.{one.__qualname__}" for one in (found[name], value))
            raise ConfigurationError(
                f"model: expected one class or function of each name, because Keras saves the name alone. Received: "
                f"two of the name {name!r}, {both}. Rename one, or register both with "
                "@keras.saving.register_keras_serializable(package='...'), each in a package of its own.",
                topic="a-model-that-keras-cannot-save",
            )
    return found


def require_same_objects(
    written: list[tuple[str, Any]], again: list[tuple[str, Any]], given: Mapping[str, Any]
) -> None:
    """Raises ConfigurationError where a rebuilt model holds other classes or functions than the one it was made of.

    Keras takes a name for its own ``relu``, say, although a function of the user's has it.

    Args:
        written: What was recorded of the model.
        again: What was recorded of the rebuilt one.
        given: What the user has named; that may be another class.
    """
    counts = [
        Counter((name, id(value)) for name, value in names if _is_custom(name, value) and name not in given)
        for names in (written, again)
    ]
    for name, _ in {**counts[0], **counts[1]}:
        if any(counts[0][key] != counts[1][key] for key in (*counts[0], *counts[1]) if key[0] == name):
            raise ConfigurationError(
                f"model: expected Keras to find the class or function {name!r} again by the name it saves. It found "
                f"something else, or it elsewhere, because others go by that name too. Rename it, or register it with "
                "@keras.saving.register_keras_serializable()."
            )


def is_of_keras(kind: Any) -> bool:
    """Returns whether a class or function is one of Keras' own.

    A function that wraps one of Keras' has its name and module, and is the user's all the same.
    """
    module = kind.__globals__.get("__name__") if isinstance(kind, types.FunctionType) else None
    return str(module or getattr(kind, "__module__", "")).split(".")[0] in ("keras", "builtins")


def _is_custom(name: str, value: Any) -> bool:
    if not isinstance(value, (type, types.FunctionType)) or is_of_keras(value):
        return False
    if name in keras.saving.get_custom_objects():
        return False
    # Functions of these go by the name of Keras' own, where there is one.
    is_of_backend = str(value.__module__).split(".")[0] in BACKENDS
    return not (is_of_backend and any(hasattr(getattr(keras, kind), name) for kind in _FUNCTIONS_OF_KERAS))


def forgotten_attribute(given: Any, rebuilt: Any) -> tuple[str, Any, Any] | None:
    """Returns an attribute of a user's loss, metric or such that another made of its config has not, and both values.

    Only of classes without a ``get_config``: the one of Keras' base class does not know what they add.
    """
    kind = type(given)
    if is_of_keras(kind) or not isinstance(rebuilt, kind):
        return None
    owner = next((base for base in kind.__mro__ if "get_config" in vars(base)), kind)
    # The arguments of layers without any get_config Keras records, or says that it cannot. A model may be given more.
    is_recorded = owner.__name__ in ("Operation", "Layer", "Model") and not isinstance(given, keras.Model)
    if is_recorded or not is_of_keras(owner):
        return None
    arguments = {
        name
        for base in kind.__mro__
        if not is_of_keras(base) and isinstance(vars(base).get("__init__"), types.FunctionType)
        for name in inspect.signature(vars(base)["__init__"]).parameters
    }
    for name, value in vars(given).items():
        if isinstance(given, keras.Model):
            is_kept = not name.startswith(("_", "built", "name", "stop_")) and isinstance(value, PLAIN)
        else:
            # What is no argument may have changed since, such as a count of calls.
            is_kept = name.lstrip("_") in arguments
        if is_kept and not _is_alike(value, vars(rebuilt).get(name)):
            return name, value, vars(rebuilt).get(name)
    return None


def _is_alike(value: Any, other: Any) -> bool:
    """Returns whether two values are equal, as far as that can be told; layers and the like are compared elsewhere."""
    if isinstance(value, types.FunctionType):
        return getattr(other, "__code__", None) == value.__code__
    if not isinstance(value, (*PLAIN, list, tuple, dict, np.ndarray)):
        return True
    if isinstance(value, str | bool | None | dict) or other is None:
        return bool(value == other)
    try:
        return bool(np.allclose(np.asarray(value, float), np.asarray(other, float), atol=0, equal_nan=True))
    except (TypeError, ValueError):
        return str(value) == str(other)


def stateless_copy(value: Any) -> Any:
    """Returns a deep copy; raises TypeError for what holds state of the model, of which there would then be two."""
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(value, memo)
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    of_backend = str(type(value).__module__).split(".")[0] in BACKENDS and not keras.ops.is_tensor(value)
    if of_backend or any(isinstance(part, (keras.layers.Layer, *STATEFUL)) for part in (*memo.values(), *cells)):
        raise TypeError(f"an attribute of {type(value).__qualname__} holds layers, or state of the backend.")
    return copied
