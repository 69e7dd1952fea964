"""Which slices of an embedding's gradient are of rows that a step looks up once, whatever its batch is.

One process adds what all rows of the batch contribute to such a row before its optimizer squares it. Several ranks
have a slice each, to be added. Rows that the batch itself names have several slices in one process too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Numbers of lookups: those from zero on are of rows that the batch does not name.
BY_BATCH = -1
# A step that is not a graph does not tell.
UNTOLD = -2

_PASSED_ON = ("Reshape", "Identity", "Cast", "StopGradient")
# Known of a batch before it is read.
_ABOUT_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


def lookups_of(indices: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the numbers of the lookups that slices are of, and how many slices each has, an int32 tensor.

    Args:
        indices: Of the slices, shape (slices,): what TensorFlow's gradient of one or several lookups has.
    """
    import tensorflow as tf

    if isinstance(indices, tf.__internal__.EagerTensor):
        return (UNTOLD,), tf.shape(indices)
    parts = list(_parts(indices))
    numbers = tuple(number if _is_of_step(part) else BY_BATCH for number, part in enumerate(parts))
    return numbers, tf.stack([tf.size(part) for part in parts])


def _parts(indices: Any) -> Iterator[Any]:
    """Yields the indices of each lookup: TensorFlow puts those of one variable behind each other."""
    operation = indices.op
    while operation.type in _PASSED_ON:
        operation = operation.inputs[0].op
    if operation.type == "ConcatV2":
        for part in operation.inputs[:-1]:
            yield from _parts(part)
    else:
        yield indices


def _is_of_step(indices: Any) -> bool:
    """Returns whether the step itself says which rows are looked up, or has told those of the batch apart."""
    operation = indices.op
    while operation.type in _PASSED_ON:
        operation = operation.inputs[0].op
    # Sums over sparse features look every row of the batch up once.
    return operation.type == "Unique" or not _depends_on_batch(operation)


def _depends_on_batch(operation: Any) -> bool:
    """Returns whether what is computed reads the batch, or draws random numbers, and not its shape alone."""
    waiting, seen = [operation], set()
    while waiting:
        operation = waiting.pop()
        if operation in seen or operation.type in (*_ABOUT_SHAPES, "ReadVariableOp"):
            continue
        seen.add(operation)
        if operation.type == "Placeholder":
            outer = _captured(operation.outputs[0])
            if outer is None:
                return True
            if hasattr(outer, "graph"):
                waiting.append(outer.op)
        elif operation.op_def.is_stateful:
            return True
        else:
            waiting += [tensor.op for tensor in operation.inputs]
    return False


def _captured(placeholder: Any) -> Any:
    """Returns the tensor of outside that a function's graph reads in this place; None for an argument."""
    captures = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is placeholder), None)


def added_up(
    numbers: Sequence[int],
    indices: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    sizes: Sequence[np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slices of all ranks, (indices, values), with those added that one process has once.

    All ranks find the same, because each has what all have sent.

    Args:
        numbers: Of the lookups, which the slices of a rank follow one after the other.
        indices: Of each rank, shape (slices,).
        values: Of each rank, shape (slices, ...).
        sizes: Of each rank, shape (lookups,): slices of each lookup.
    """
    ends = [np.cumsum(own)[:-1] for own in sizes]
    rows = zip(*map(np.split, indices, ends), strict=True)
    parts = zip(*map(np.split, values, ends), strict=True)
    found = [_of_lookup(*one) for one in zip(numbers, rows, parts, strict=True)]
    return np.concatenate([own for own, _ in found]), np.concatenate([sums for _, sums in found])


def _of_lookup(number: int, rows: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    if not _is_named_once(number, rows):
        return np.concatenate(rows), np.concatenate(parts)
    together = np.unique(np.concatenate(rows))
    sums = np.zeros((len(together), *parts[0].shape[1:]), parts[0].dtype)
    for own, part in zip(rows, parts, strict=True):
        sums[np.searchsorted(together, own)] += part
    return together, sums


def _is_named_once(number: int, rows: Sequence[np.ndarray]) -> bool:
    named = [own for own in rows if len(own)]
    if number == BY_BATCH or any(len(np.unique(own)) < len(own) for own in named):
        return False
    return number != UNTOLD or all(np.array_equal(own, named[0]) for own in named)
