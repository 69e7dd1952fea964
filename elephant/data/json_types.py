"""Types of values that were read from JSON, against what is declared: a file may hold anything."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints


def require_type(value: object, wanted: Any, name: str) -> None:
    """Raises TypeError for a value of another type than the declared one.

    Args:
        wanted: A class, ``Any``, or a union, ``list``, ``tuple`` or ``dict`` of such.

    >>> require_type({"loss": [0.5, 1]}, dict[str, list[float]], "history")
    >>> require_type([0.5], dict[str, list[float]], "history")
    Traceback (most recent call last):
    TypeError: history: expected dict[str, list[float]]. Received: [0.5].
    """
    if not _is_of(value, wanted):
        shown = getattr(wanted, "__name__", None) if isinstance(wanted, type) and not get_args(wanted) else str(wanted)
        raise TypeError(f"{name}: expected {shown}. Received: {value!r}.")


def require_types(instance: Any) -> None:
    """Raises TypeError where a field of a dataclass' instance is of another type than the class declares."""
    hints = get_type_hints(type(instance))
    for field in fields(instance):
        require_type(getattr(instance, field.name), hints[field.name], field.name)


def require_parts(form: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises TypeError where a part of a JSON object, if it is there, is of another type than the declared one."""
    require_type(form, dict, "the whole")
    for name, one in wanted.items():
        if name in form:
            require_type(form[name], one, name)


def require_nest(nest: Any, count: int, name: str, *, repeated: bool = False) -> None:
    """Raises TypeError where a nest does not have the places of so many arrays, each once, or more often if repeated.

    >>> require_nest({"image": 0, "words": (1, 2)}, 3, "x")
    """
    found = _leaves(nest)
    if sorted(set(found) if repeated else found, key=str) != sorted(range(count), key=str):
        raise TypeError(f"{name}: expected the places of {count} arrays. Received: {nest!r}.")


def _leaves(nest: Any) -> list[Any]:
    if isinstance(nest, (dict, tuple, list)):
        return [leaf for part in (nest.values() if isinstance(nest, dict) else nest) for leaf in _leaves(part)]
    # True is equal to one, and no place.
    return [str(nest) if isinstance(nest, bool) else nest]


def _is_of(value: object, wanted: Any) -> bool:
    origin, parts = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_is_of(value, part) for part in parts)
    if origin is tuple and parts[1:] == (...,):
        return isinstance(value, tuple) and all(_is_of(part, parts[0]) for part in value)
    if origin is list:
        return isinstance(value, list) and all(_is_of(part, parts[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _is_of(key, parts[0]) and _is_of(part, parts[1]) for key, part in value.items()
        )
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
