"""Gradients of embeddings on TensorFlow, which are slices: of which lookups they are, and who has named their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from elephant.backends.gradient_averager import BY_BATCH, UNTOLD

_PASSED_ON = ("Reshape", "Identity", "Cast", "StopGradient")
# Of each gradient that is slices: the numbers of its lookups, and how many slices each of them has.
Lookups = Sequence[tuple[tuple[int, ...], Any]]
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
