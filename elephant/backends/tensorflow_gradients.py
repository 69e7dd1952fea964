"""Gradients on TensorFlow: of which lookups slices are, and weights that gradients change by one operation.

Gradients of embeddings are slices. What is asked of them is which lookups they are of, and who has named their rows.

Keras writes an optimizer's update as up to twelve operations on arrays as long as the variable. With many weights, each
of them reads and writes memory outside the processor's caches. TensorFlow has some updates as one operation, which
does so once, by the same formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.backends.keras_private import adam_slots, place_in_optimizer
from elephant.backends.lookups import BY_BATCH, UNTOLD, Places

if TYPE_CHECKING:
    import keras

_PASSED_ON = ("Reshape", "Identity", "Cast", "StopGradient")
# For each gradient that is slices: the numbers of its lookups, and how many slices each of them has.
Lookups = Sequence[tuple[tuple[int, ...], Any]]
# What tells dimensions of a batch, of which the first are its rows.
_ABOUT_SHAPES = ("Shape", "ShapeN", "Size")
_REPEATING = ("BroadcastTo", "Tile")
_SAME_EVERYWHERE = ("Rank", "ReadVariableOp")


def lookups_of(indices: Any, places: Places | None = None) -> tuple[tuple[int, ...], Any]:
    """Returns the numbers of the lookups that slices are of, and how many slices each has, an int32 tensor.

    Args:
        indices: Of the slices, shape (slices,): what TensorFlow's gradient of one or several lookups has.
        places: What is known of them where there is no graph, if anything is.
    """
    import tensorflow as tf

    if isinstance(indices, tf.__internal__.EagerTensor):
        known = places or Places((UNTOLD,))
        return known.numbers, tf.constant(known.sizes(int(tf.size(indices))), tf.int32)
    parts = list(_parts(indices))
    numbers = tuple(number if _is_of_step(part) else BY_BATCH for number, part in enumerate(parts))
    return numbers, tf.stack([tf.size(part) for part in parts])


def without_repeated(indices: Any, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the numbers of lookups, without those that may be of places repeated for each row.

    In a graph that is traced for batches of so many rows these are constants, as the model's own places are, but made
    of as many equal parts.
    """
    rows = _rows_of_batch(indices.graph)
    return tuple(
        BY_BATCH if number >= 0 and any(_is_repeated(part, count) for count in rows) else number
        for number, part in zip(numbers, _parts(indices), strict=True)
    )


def _rows_of_batch(graph: Any) -> set[int]:
    """Returns the first dimensions, where they are known, of what a function's graph takes."""
    captured = {id(tensor) for tensor in getattr(graph, "internal_captures", ())}
    given = [tensor.shape for tensor in getattr(graph, "inputs", ()) if id(tensor) not in captured]
    return {shape[0] for shape in given if shape.rank and shape[0] is not None and shape[0] > 1}


def _is_repeated(indices: Any, count: int) -> bool:
    """Returns whether places come from as many equal parts as that, by operations that change each by itself."""
    size = indices.shape.num_elements()
    if size is None or size % count:
        return False
    waiting, seen = [indices.op], set()
    while waiting:
        operation = waiting.pop()
        of_all = [tensor for tensor in operation.outputs if tensor.shape.num_elements() == size]
        if operation in seen or not of_all:
            continue
        seen.add(operation)
        if operation.type in _REPEATING and of_all[0].shape[0] == count:
            return True
        if operation.type == "Const" and _has_equal_parts(of_all[0], count):
            return True
        waiting += [tensor.op for tensor in operation.inputs]
    return False


def _has_equal_parts(constant: Any, count: int) -> bool:
    import tensorflow as tf

    parts = np.reshape(tf.get_static_value(constant), (count, -1))
    return bool((parts == parts[0]).all())


def _parts(indices: Any) -> Iterator[Any]:
    """Yields the indices of each lookup: TensorFlow puts those of one variable behind each other."""
    operation = _origin(indices)
    if operation.type == "ConcatV2":
        for part in operation.inputs[:-1]:
            yield from _parts(part)
    else:
        yield indices


def _origin(indices: Any) -> Any:
    """Returns the operation that makes places, which others pass on in another form."""
    operation = indices.op
    while operation.type in _PASSED_ON:
        operation = operation.inputs[0].op
    return operation


def _is_of_step(indices: Any) -> bool:
    """Returns whether the step itself says which rows are looked up, or has told those of the batch apart.

    It does not where it says so for each row of the batch anew.
    """
    operation = _origin(indices)
    # Sums over sparse features look every row of the batch up once.
    return operation.type == "Unique" or not _depends_on_batch(operation)


def _depends_on_batch(operation: Any) -> bool:
    """Returns whether what is computed reads the batch or its number of rows, or draws random numbers."""
    waiting, seen = [operation], set()
    while waiting:
        operation = waiting.pop()
        if operation in seen or operation.type in _SAME_EVERYWHERE or _is_of_later_dimensions(operation):
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
        elif operation.type in _ABOUT_SHAPES:
            if not all(_has_known_rows(tensor) for tensor in operation.inputs):
                return True
        else:
            waiting += [tensor.op for tensor in operation.inputs]
    return False


def _has_known_rows(tensor: Any) -> bool:
    return tensor.shape.rank == 0 or (tensor.shape.rank is not None and tensor.shape[0] is not None)


def _is_of_later_dimensions(operation: Any) -> bool:
    """Returns whether an operation takes dimensions of a batch other than its rows, such as its length."""
    import tensorflow as tf

    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    begin, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape[0]
    # A slice without a beginning begins with the rows.
    if begin is None or rank is None or operation.get_attr("begin_mask") & 1:
        return False
    return int(begin[0]) % rank > 0


def _captured(placeholder: Any) -> Any:
    """Returns the tensor of outside that a function's graph reads in this place; None for an argument."""
    captures = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is placeholder), None)


def fuse_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Has Adam, AdamW, and SGD with momentum change each variable by one operation; leaves other optimizers alone.

    Variables that are not float32 or float64 keep Keras' operations, which round in between, and so do slices of
    embeddings, of which Keras adds the squares of a row that was looked up twice.
    """
    import keras
    import tensorflow as tf

    rules = {keras.optimizers.Adam.update_step: _adam, keras.optimizers.SGD.update_step: _momentum}
    rule = rules.get(type(optimizer).update_step)
    if rule is None or getattr(optimizer, "amsgrad", False) or not all(map(_is_part, _numbers_of(optimizer))):
        return
    by_operations = optimizer.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices) or variable.dtype not in (tf.float32, tf.float64):
            by_operations(gradient, variable, learning_rate)
        else:
            rule(optimizer, tf.cast(gradient, variable.dtype), variable, tf.cast(learning_rate, variable.dtype))

    optimizer.update_step = update_step


def _adam(optimizer: keras.optimizers.Adam, gradient: Any, variable: Any, learning_rate: Any) -> None:
    import keras
    import tensorflow as tf

    dtype, place = variable.dtype, place_in_optimizer(optimizer, variable)
    means, squares = adam_slots(optimizer)
    step = keras.ops.cast(optimizer.iterations + 1, dtype)
    first, second = (1 / _excess(dtype, optimizer.beta_1), _excess(dtype, optimizer.beta_2) ** 0.5)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=means[place].value.handle,
        v=squares[place].value.handle,
        beta1_power=keras.ops.power(keras.ops.cast(optimizer.beta_1, dtype), step),
        beta2_power=keras.ops.power(keras.ops.cast(optimizer.beta_2, dtype), step),
        lr=learning_rate * tf.constant(first * second, dtype),
        beta1=tf.constant(optimizer.beta_1, dtype),
        beta2=tf.constant(optimizer.beta_2, dtype),
        epsilon=tf.constant(optimizer.epsilon * second, dtype),
        grad=gradient,
    )


def _numbers_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    return [vars(optimizer)[name] for name in ("beta_1", "beta_2", "epsilon", "momentum") if name in vars(optimizer)]


def _is_part(number: Any) -> bool:
    # Not the momentum of plain SGD, which is zero, and not a variable, which may change from step to step.
    return isinstance(number, float) and 0 < number < 1


def _excess(dtype: Any, beta: float) -> float:
    """Returns TensorFlow's 1 - beta, of a rounded beta, over Keras' own: 0.99999 for 0.999.

    Momentums and velocities of TensorFlow are so much larger; the update makes up for it.
    """
    return float(1 - dtype.as_numpy_dtype(beta)) / (1 - beta)


def _momentum(optimizer: keras.optimizers.SGD, gradient: Any, variable: Any, learning_rate: Any) -> None:
    import tensorflow as tf

    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=optimizer.momentums[place_in_optimizer(optimizer, variable)].value.handle,
        lr=learning_rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, variable.dtype),
        use_nesterov=optimizer.nesterov,
    )
