"""State that callbacks share with a model: variables outside of it, and other objects that both reach.

In one process, a callback that sets such a variable sets it for the loss. Here model and callbacks travel to ranks
in one pickle, in which they go on sharing what they share; a callback on the driver has none of that. So
what both reach is looked for in the objects themselves: attributes, closures, and the globals that functions name.
"""

from __future__ import annotations

import functools
import sys
import types
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elephant.backends import BACKENDS
from elephant.collective.communicator import Communicator
from elephant.modeling.model_spec import ModelSpec, given_model
from elephant.rank.callbacks.callback_rules import BATCH_EVENTS, listens

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, set)
# What every callback has of its fit.
_OF_FIT = ("_model", "params", "validation_data")
# Instances of these packages are looked into; of others, a user's variable is not a part.
_OPEN = ("keras", "elephant")
_MOST_NAMED = 3
_WITH_WEIGHTS = (keras.layers.Layer, keras.optimizers.Optimizer)


@dataclass(frozen=True)
class _Binding:
    """A name of a module that functions look up."""

    names: dict[str, Any]
    name: str


def is_variable(thing: object) -> bool:
    """Returns whether something is a variable of Keras or of its backend."""
    return isinstance(thing, keras.Variable) or any(backend.is_variable(thing) for backend in BACKENDS.values())


def reached_from(roots: Iterable[Any], *, closed: tuple[type, ...] = ()) -> dict[Hashable, Any]:
    """Returns all that the user's own code in some objects can reach and change, by identity.

    Args:
        roots: Callbacks, functions, models. A callback's model, which a fit has given it, is none of its own.
        closed: Instances of these are not looked into.
    """
    found: dict[Hashable, Any] = {}
    seen: dict[int, Any] = {}
    left = list(roots)
    while left:
        thing = left.pop()
        if isinstance(thing, _PLAIN) or isinstance(thing, types.ModuleType) or id(thing) in seen:
            continue
        # Kept, so that no other object gets its id.
        seen[id(thing)] = thing
        if isinstance(thing, _Binding):
            found[id(thing.names), thing.name] = thing
            left.append(thing.names.get(thing.name))
            continue
        if _is_changeable(thing):
            found[id(thing)] = thing
        if not isinstance(thing, closed):
            left.extend(_parts(thing))
    return found


def _is_changeable(thing: Any) -> bool:
    if is_variable(thing) or isinstance(thing, (*_CONTAINERS, np.ndarray, types.CellType)):
        return True
    if isinstance(thing, (type, types.FunctionType, types.MethodType, functools.partial, tuple, frozenset)):
        return isinstance(thing, type) and not _is_library(thing.__module__)
    return hasattr(thing, "__dict__") and _is_open(type(thing))


def _parts(thing: Any) -> Iterator[Any]:
    """Yields the things that a thing holds."""
    if is_variable(thing) or isinstance(thing, np.ndarray):
        return
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from thing
    elif isinstance(thing, types.CellType):
        yield from _of_cell(thing)
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, (staticmethod, classmethod)):
        yield thing.__func__
    elif isinstance(thing, property):
        yield from (thing.fget, thing.fset)
    elif isinstance(thing, type):
        if not _is_library(thing.__module__):
            yield from _attributes(thing).values()
            yield from thing.__bases__
    else:
        yield from _of_instance(thing)


def _of_instance(thing: Any) -> Iterator[Any]:
    kind = type(thing)
    yield kind
    if _is_open(kind):
        yield from _attributes(thing).values()
        slots = [name for base in kind.__mro__ for name in _names(getattr(base, "__slots__", ()))]
        yield from (getattr(thing, name) for name in slots if hasattr(thing, name))


def _is_open(kind: type) -> bool:
    return not _is_library(kind.__module__) or any(base.__module__.partition(".")[0] in _OPEN for base in kind.__mro__)


def _names(slots: Any) -> Sequence[str]:
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _of_cell(cell: types.CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:
        # Not filled yet.
        return


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    if _is_library(function.__module__):
        return
    yield from (function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function))
    yield from (
        _Binding(function.__globals__, name)
        for name in sorted(_global_names(function.__code__))
        if name in function.__globals__
    )


def _global_names(code: types.CodeType) -> set[str]:
    """Returns the names that code and the functions in it look up, among which those of globals are."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_global_names, inner))


def _attributes(thing: Any) -> dict[str, Any]:
    hidden = _OF_FIT if isinstance(thing, keras.callbacks.Callback) else ()
    names = getattr(thing, "__dict__", {}).items()
    return {name: value for name, value in names if name not in hidden and not name.startswith(("__", "_abc_"))}


@functools.cache
def _is_library(module: str | None) -> bool:
    """Returns whether a module is installed, and not the user's own."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names or root in _OPEN:
        return True
    known = sys.modules.get(root)
    places = [getattr(known, "__file__", None), *getattr(known, "__path__", ())]
    return any("site-packages" in str(place) or "dist-packages" in str(place) for place in places)


class SharedState:
    """State that callbacks and a model, as it travels or as it was given, or functions on batches both reach.

    Args:
        callbacks: All of a fit.
        spec: The model that travels.
        functions: The user's functions on batches, which travel too.
    """

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], spec: ModelSpec, functions: Sequence[Any]
    ) -> None:
        self._travels = reached_from([spec.custom_objects, spec.builder, *functions])
        given = given_model(spec)
        of_model = reached_from([] if given is None else [given])
        # Use changes much of what Keras keeps in a model, so only its variables count.
        own = {key: thing for key, thing in of_model.items() if is_variable(thing)}
        self._given = {key: thing for key, thing in own.items() if key not in self._travels}
        self._callbacks = callbacks
        self._reached = [reached_from([callback]) for callback in callbacks]
        # A loss and a callback may use the same model, as one that finds features, and not change it.
        self._direct = [reached_from([callback], closed=_WITH_WEIGHTS) for callback in callbacks]

    def is_shared(self, place: int) -> bool:
        """Returns whether what a callback sets is seen by what travels: a variable of both, or the callback itself."""
        return bool(self.outside(place)) or id(self._callbacks[place]) in self._travels

    @property
    def sharing(self) -> set[int]:
        """Indices of the callbacks whose changes are seen by what travels."""
        return {index for index in range(len(self._callbacks)) if self.is_shared(index)}

    def outside(self, place: int) -> list[Any]:
        """Returns the variables that a callback and what travels both reach; they travel together, and stay one."""
        return [thing for key, thing in self._direct[place].items() if key in self._travels and is_variable(thing)]

    def of_model(self, place: int) -> list[Any]:
        """Returns the variables of the given model that a callback reaches by a way of its own: no rank has these."""
        return [thing for key, thing in self._reached[place].items() if key in self._given]

    def changeable(self, place: int) -> dict[Hashable, Any]:
        """Returns all that the callback and the model both reach, of which a change on the driver stays there."""
        both = {**self._travels, **self._given}
        return {key: thing for key, thing in self._reached[place].items() if key in both}


def outside_here(
    travelled: Sequence[Any], callbacks: Sequence[keras.callbacks.Callback], spec: ModelSpec, functions: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns, on a rank, the variables that callbacks share with the model there, in the order of the driver's.

    What functions of the main script reach has come with them. What those of a module reach is in the module, which
    was imported here, and the variable that has come is a copy beside it.

    Args:
        travelled: The variables as they have come.
    """
    if not travelled:
        return ()
    shared = SharedState(callbacks, spec, functions)
    found = {id(one): one for place in range(len(callbacks)) for one in shared.outside(place)}
    come = {id(one) for one in travelled}
    of_modules = [one for key, one in found.items() if key not in come]
    missing = [one for one in travelled if id(one) not in found]
    if list(map(_form, missing)) != list(map(_form, of_modules)):
        return tuple(travelled)
    replaced = dict(zip(map(id, missing), of_modules, strict=True))
    return tuple(replaced.get(id(one), one) for one in travelled)


def _form(variable: Any) -> tuple[Any, ...]:
    value = read(variable)
    return value.shape, value.dtype.str


def read(variable: Any) -> np.ndarray:
    """Returns a copy of a variable's value."""
    return np.array(keras.ops.convert_to_numpy(variable), order="C")


def assign(variable: Any, value: np.ndarray) -> None:
    """Gives a variable of Keras or of its backend a value."""
    if isinstance(variable, keras.Variable):
        variable.assign(value)
    else:
        next(backend for backend in BACKENDS.values() if backend.is_variable(variable)).assign(variable, value)


class OutsideVariables(keras.callbacks.Callback):
    """Gives all ranks what callbacks on rank 0 have set variables outside of the model to; it comes after them.

    A callback may draw at random, or look at a batch of its own rank.
    """

    def __init__(
        self, variables: Sequence[Any], communicator: Communicator, callbacks: Sequence[keras.callbacks.Callback]
    ) -> None:
        super().__init__()
        self._variables = variables
        self._communicator = communicator
        self._events = {event for event in BATCH_EVENTS for one in callbacks if listens(one, event)}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._share()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._share()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._share()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._events & {"on_train_batch_begin", "on_batch_begin"}:
            self._share()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._events & {"on_train_batch_end", "on_batch_end"}:
            self._share()

    def _share(self) -> None:
        for variable in self._variables:
            value = read(variable)
            self._communicator.broadcast_(value)
            if self._communicator.rank:
                assign(variable, value)


def contents_of(things: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """Returns the contents of things, so that two such answers tell of changes between them."""
    return {key: _content(thing) for key, thing in things.items()}


def _content(thing: Any) -> Any:
    if is_variable(thing):
        return zlib.crc32(read(thing).tobytes())
    if isinstance(thing, np.ndarray):
        return thing.shape, thing.dtype.str, thing.dtype.hasobject or zlib.crc32(np.ascontiguousarray(thing).data)
    if isinstance(thing, _Binding):
        return _mark(thing.names.get(thing.name))
    if isinstance(thing, dict):
        return [(_mark(key), _mark(value)) for key, value in thing.items()]
    if isinstance(thing, (list, set)):
        return sorted(map(_mark, thing), key=repr) if isinstance(thing, set) else list(map(_mark, thing))
    if isinstance(thing, types.CellType):
        return list(map(_mark, _of_cell(thing)))
    return {name: _mark(value) for name, value in _attributes(thing).items()}


def _mark(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else id(value)


def names_of(things: Iterable[Any]) -> str:
    """Returns words for things that both reach, for errors: a few of them."""
    names = sorted({_name(thing) for thing in things})
    return ", ".join([*names[:_MOST_NAMED], *(["others"] if len(names) > _MOST_NAMED else [])])


def _name(thing: Any) -> str:
    if isinstance(thing, _Binding):
        return f"the global {thing.name!r}"
    if is_variable(thing):
        return f"the variable {getattr(thing, 'name', 'of the backend')!r}"
    return f"the class {thing.__qualname__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
