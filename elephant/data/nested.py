"""How the arrays of a batch are nested for Keras: one alone, a tuple of several, or a dictionary by name.

A nest is the shape of such a structure, with the position of an array in place of
each: ``0``, ``(0, 1)`` or ``{"image": 0, "words": (1, 2)}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Nest = Any


def pack(nest: Nest, leaves: Sequence[Any]) -> Any:
    """Returns the leaves in the structure of a nest.

    >>> pack({"image": 0, "words": (2, 1)}, ["i", "v", "w"])
    {'image': 'i', 'words': ('w', 'v')}
    """
    if isinstance(nest, dict):
        return {name: pack(part, leaves) for name, part in nest.items()}
    if isinstance(nest, (tuple, list)):
        return tuple(pack(part, leaves) for part in nest)
    return leaves[nest]


def unpack(nest: Nest, value: Any) -> list[Any]:
    """Returns the leaves of a value that has the structure of a nest, by their positions.

    Raises:
        ValueError: The value has another structure.

    >>> unpack({"image": 0, "words": (2, 1)}, {"words": ("w", "v"), "image": "i"})
    ['i', 'v', 'w']
    """
    found: dict[int, Any] = {}
    _collect(nest, value, found)
    return [found[position] for position in range(len(found))]


def _collect(nest: Nest, value: Any, found: dict[int, Any]) -> None:
    if isinstance(nest, dict):
        if not isinstance(value, dict) or value.keys() != nest.keys():
            received = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"expected a dictionary with the keys {sorted(nest)}. Received: {received}.")
        for name, part in nest.items():
            _collect(part, value[name], found)
    elif isinstance(nest, (tuple, list)):
        if not isinstance(value, (tuple, list)) or len(value) != len(nest):
            received = f"{len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
            raise ValueError(f"expected {len(nest)} parts. Received: {received}.")
        for part, item in zip(nest, value, strict=True):
            _collect(part, item, found)
    else:
        found[nest] = value


def nest_of(value: Any) -> tuple[Nest, list[Any]]:
    """Returns the nest of a structure of dictionaries, tuples and lists, and its leaves by their positions.

    Lists of numbers are leaves, as users write rows; lists of anything else are nested.

    >>> nest_of(({"a": [1, 2], "b": 3.0}, [4]))
    (({'a': 0, 'b': 1}, 2), [[1, 2], 3.0, [4]])
    """
    leaves: list[Any] = []
    return _numbered(value, leaves), leaves


def _numbered(value: Any, leaves: list[Any]) -> Nest:
    if isinstance(value, dict):
        return {str(name): _numbered(part, leaves) for name, part in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and any(_has_parts(part) for part in value)):
        return tuple(_numbered(part, leaves) for part in value)
    leaves.append(value)
    return len(leaves) - 1


def _has_parts(value: Any) -> bool:
    return isinstance(value, (dict, tuple)) or hasattr(value, "__array__")


def shifted(nest: Nest, by: int) -> Nest:
    """Returns the nest with every position moved up.

    >>> shifted((0, 1), 3)
    (3, 4)
    """
    return pack(nest, range(by, by + num_leaves(nest)))


def num_leaves(nest: Nest) -> int:
    """Returns the number of leaves.

    >>> num_leaves({"image": 0, "words": (1, 2)})
    3
    """
    if isinstance(nest, dict):
        return sum(num_leaves(part) for part in nest.values())
    if isinstance(nest, (tuple, list)):
        return sum(num_leaves(part) for part in nest)
    return 1


def from_json(nest: Nest) -> Nest:
    """Returns a nest that has been through JSON, which knows no tuples.

    >>> from_json({"words": [0, 1]})
    {'words': (0, 1)}
    """
    if isinstance(nest, dict):
        return {name: from_json(part) for name, part in nest.items()}
    if isinstance(nest, (tuple, list)):
        return tuple(from_json(part) for part in nest)
    return nest
