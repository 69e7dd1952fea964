"""Models that take batches of one size alone, as with ``Input(batch_shape=(10, 4))``, where rows are fewer."""

from __future__ import annotations

from typing import Any

import keras

from elephant.backends.keras_private import input_structure


def take_fewer_rows(model: keras.Model) -> None:
    """Has a model that takes batches of one size take smaller ones too: the last row fills them up, and is cut off."""
    shapes = [tensor.shape for tensor in getattr(model, "inputs", None) or []]
    num_rows = next((shape[0] for shape in shapes if shape and shape[0] is not None), None)
    # The first call of a Sequential says a number too, which is none that it needs.
    if num_rows is None or _takes(model, num_rows + 1):
        return
    call = model.call

    def padded_call(inputs: Any, *arguments: Any, **options: Any) -> Any:
        given = keras.ops.shape(keras.tree.flatten(inputs)[0])[0]
        places = keras.ops.minimum(keras.ops.arange(num_rows), given - 1)
        filled = keras.tree.map_structure(lambda part: keras.ops.take(part, places, axis=0), inputs)
        outputs = call(filled, *arguments, **options)
        return keras.tree.map_structure(lambda part: part[:given], outputs)

    padded_call.num_rows = num_rows  # type: ignore[attr-defined]  # as functions have attributes
    model.call = padded_call


def most_rows(model: keras.Model) -> int | None:
    """Returns how many rows a model takes at a time after `take_fewer_rows`; None where it takes any."""
    return getattr(model.call, "num_rows", None)


def _takes(model: keras.Model, num_rows: int) -> bool:
    """Returns whether a model takes so many rows, of zeros; sparse ones are not tried."""
    if any(tensor.sparse for tensor in model.inputs):
        return True
    sizes = [(num_rows, *(size or 1 for size in tensor.shape[1:])) for tensor in model.inputs]
    rows = [keras.ops.zeros(size, tensor.dtype) for size, tensor in zip(sizes, model.inputs, strict=True)]
    structure = input_structure(model)
    nested = rows[0] if structure is None else keras.tree.pack_sequence_as(structure, rows)
    try:
        model(nested, training=False)
    except Exception:
        return False
    return True
