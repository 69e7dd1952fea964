"""Which slices of an embedding's gradient are of rows that a step looks up once, whatever its batch is.

One process adds what all rows of the batch contribute to such a row before its optimizer squares it. Several ranks
have a slice each, to be added. Rows that the batch itself names have several slices in one process too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Numbers of lookups, one for each slice: those from zero on are of rows that the batch does not name.
BY_BATCH = -1
# A step that is not a graph does not tell.
UNTOLD = -2

_PASSED_ON = ("Reshape", "Identity", "Cast", "StopGradient")
# Known of a batch before it is read.
_ABOUT_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


def lookups_of(indices: Any) -> Any:
    """Returns the number of the lookup of each slice, an int32 tensor as long as the indices.

    Args:
        indices: Of the slices, shape (slices,): what TensorFlow's gradient of one or several lookups has.
    """
    import tensorflow as tf

    if isinstance(indices, tf.__internal__.EagerTensor):
        return tf.fill(tf.shape(indices), tf.constant(UNTOLD, tf.int32))
    numbers = [
        tf.fill([tf.size(part)], tf.constant(number if _is_of_step(part) else BY_BATCH, tf.int32))
        for number, part in enumerate(_parts(indices))
    ]
    return tf.concat(numbers, 0)


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
    indices: Sequence[np.ndarray], values: Sequence[np.ndarray], lookups: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slices of all ranks, (indices, values), with those added that one process has once.

    All ranks find the same, because each has what all have sent.

    Args:
        indices: Of each rank, shape (slices,).
        values: Of each rank, shape (slices, ...).
        lookups: Of each rank, shape (slices,).
    """
    known = sorted(set(np.concatenate(lookups).tolist()))
    found = [_of_lookup(number, [own == number for own in lookups], indices, values) for number in known]
    if not found:
        return np.concatenate(indices), np.concatenate(values)
    return np.concatenate([rows for rows, _ in found]), np.concatenate([sums for _, sums in found])


def _of_lookup(
    number: int, chosen: Sequence[np.ndarray], indices: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    rows = [own[mask] for own, mask in zip(indices, chosen, strict=True)]
    parts = [own[mask] for own, mask in zip(values, chosen, strict=True)]
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
