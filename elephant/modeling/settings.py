"""Keras' process-wide settings, which a model depends on and its archive does not hold."""

from __future__ import annotations

from dataclasses import dataclass

import keras


@dataclass(frozen=True, kw_only=True)
class KerasSettings:
    """The settings of one process.

    Args:
        backend: Fixed when Keras is imported; a training process gets it as ``KERAS_BACKEND``.
        floatx: Default floating-point type, such as ``"float32"``.
        dtype_policy: Default policy of new layers, such as ``"mixed_bfloat16"``.
        image_data_format: ``"channels_last"`` or ``"channels_first"``.
        epsilon: The fuzz factor.
    """

    backend: str
    floatx: str
    dtype_policy: str
    image_data_format: str
    epsilon: float

    @classmethod
    def current(cls) -> KerasSettings:
        """Returns the settings of this process."""
        return cls(
            backend=keras.config.backend(),
            floatx=keras.config.floatx(),
            dtype_policy=keras.config.dtype_policy().name,
            image_data_format=keras.config.image_data_format(),
            epsilon=keras.config.epsilon(),
        )

    def apply(self) -> None:
        """Makes them the settings of this process, all but the backend."""
        keras.config.set_floatx(self.floatx)
        keras.config.set_dtype_policy(self.dtype_policy)
        keras.config.set_image_data_format(self.image_data_format)
        keras.config.set_epsilon(self.epsilon)
