"""Types and ranges of the JSON fields of a frame, as annotations say them."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence, Set
from typing import Any

from elephant.errors import ProtocolError

_MOST = 2**63
_SHOWN = 120


def require(
    values: Mapping[str, Any], expected: Mapping[str, Any], what: str, *, optional: Set[str] = frozenset()
) -> None:
    """Raises ProtocolError unless there are the expected fields and no others, each of which fits its annotation.

    Args:
        values: What came, by name.
        expected: Annotations by name, see `fits`.
        what: What they are the fields of, for the error.
        optional: Names that may be missing.

    >>> require({"step": -1}, {"step": int}, "StepEnded")
    Traceback (most recent call last):
    elephant.errors.ProtocolError: expected StepEnded with step as int of zero or more. Received: -1.
    """
    if not expected.keys() - optional <= values.keys() <= expected.keys():
        raise ProtocolError(f"expected the fields of {what}. Received: {sorted(values)}.")
    for name, value in values.items():
        if not fits(value, expected[name]):
            annotation, received = expected[name], repr(value)
            shown = annotation.__name__ if type(annotation) is type else annotation
            limits = " of zero or more" if annotation is int else ""
            cut = received if len(received) <= _SHOWN else f"{received[:_SHOWN]}..."
            raise ProtocolError(f"expected {what} with {name} as {shown}{limits}. Received: {cut}.")


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a JSON value is what an annotation says.

    Whole numbers count something: they are neither negative nor bools, and an int64 holds them.

    >>> fits({"loss": 1}, dict[str, float]), fits({"loss": "1"}, dict[str, float]), fits(True, int)
    (True, False, False)
    >>> fits(None, int | None), fits([1, 2], list[int]), fits([1, -2], list[int]), fits("ab", list[str])
    (True, True, False, False)
    """
    if annotation is Any:
        return True
    if annotation is int:
        return type(value) is int and 0 <= value < _MOST
    if annotation is float:
        return type(value) in (int, float)
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, part) for part in parts)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(isinstance(key, str) and fits(value[key], parts[1]) for key in value)
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(fits(item, parts[0]) for item in value)
    return isinstance(value, annotation)
