"""Keras' process-wide settings, which a model depends on and its archive does not hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

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

    def suiting(self, model: keras.Model) -> KerasSettings:
        """Returns these settings with the policy that a model with loss scaling was compiled under."""
        scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        return replace(self, dtype_policy="mixed_float16") if scaled else self

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Applies them for the time of a ``with`` block."""
        before = KerasSettings.current()
        self.apply()
        try:
            yield
        finally:
            before.apply()

    def apply(self) -> None:
        """Makes them the settings of this process, all but the backend."""
        keras.config.set_floatx(self.floatx)
        keras.config.set_dtype_policy(self.dtype_policy)
        keras.config.set_image_data_format(self.image_data_format)
        keras.config.set_epsilon(self.epsilon)
