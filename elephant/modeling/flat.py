"""A model's trainable weights as the one flat vector that parameter servers keep."""

from __future__ import annotations

import keras
import numpy as np

from elephant.errors import ConfigurationError, UnsupportedError
from elephant.parameter_server.layout import Layout


def layout_of(model: keras.Model) -> Layout:
    """Returns the places of a built model's trainable variables, in their order.

    Args:
        model: A built model.

    Raises:
        UnsupportedError: A trainable variable is not float32.
        ConfigurationError: The model has none.

    Example:
        >>> model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, name="head")])
        >>> [segment.shape for segment in layout_of(model).segments]
        [(3, 2), (2,)]
    """
    variables = model.trainable_variables
    if not variables:
        raise ConfigurationError(f"model: expected trainable variables. Received: {model.name!r} without any.")
    for variable in variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype != "float32":
            raise UnsupportedError(
                f"model: a parameter server keeps trainable variables in float32. Received: {variable.path!r} in "
                f"{dtype}. Use the policy float32 or a mixed one, which keeps them in float32, or mode='synchronous'."
            )
    return Layout([(variable.path, tuple(variable.shape)) for variable in variables])


def read_weights(model: keras.Model, layout: Layout, out: np.ndarray | None = None) -> np.ndarray:
    """Returns a copy of a model's trainable variables as one flat vector.

    Args:
        model: A built model.
        layout: Its layout.
        out: A float32 vector to write to; a new one when None.
    """
    return layout.pack([keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables], out)


def write_weights(model: keras.Model, layout: Layout, flat: np.ndarray) -> None:
    """Gives a model's trainable variables the values of a flat vector, which they copy.

    Args:
        model: A built model.
        layout: Its layout.
        flat: float32, of the layout's length.

    Raises:
        ConfigurationError: The model has other variables than the layout.
    """
    variables = model.trainable_variables
    shapes, expected = [tuple(v.shape) for v in variables], [segment.shape for segment in layout.segments]
    if shapes != expected:
        raise ConfigurationError(
            f"model: expected trainable variables of shapes {expected[:8]}. Received: {shapes[:8]}. A function given "
            "as model must build the same model every time it is called."
        )
    for variable, values in zip(variables, layout.views(flat), strict=True):
        # A copy: TensorFlow may go on using an array that it was given.
        variable.assign(values.copy())
