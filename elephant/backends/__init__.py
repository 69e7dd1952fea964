"""Frameworks that Keras computes with: TensorFlow, JAX, PyTorch.

Everything in which they differ for elephant is a method of `Backend`, in a module per framework.
None of these modules imports its framework before one of its methods needs it.
"""

from __future__ import annotations

import importlib

from elephant.backends.base import Backend
from elephant.backends.jax import JaxBackend
from elephant.backends.tensorflow import TensorFlowBackend
from elephant.backends.torch import TorchBackend
from elephant.errors import UnsupportedError

DEFAULT = "tensorflow"
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (TensorFlowBackend(), JaxBackend(), TorchBackend())
}


def backend_named(name: str) -> Backend:
    """Returns a backend, without an import of its framework.

    Raises:
        UnsupportedError: There is none of this name.

    >>> backend_named("torch").name
    'torch'
    """
    if name not in BACKENDS:
        raise UnsupportedError(
            f"Keras backend: expected one of {', '.join(BACKENDS)}. Received: {name!r}. Set KERAS_BACKEND to one of "
            "these for driver and executors."
        )
    return BACKENDS[name]


def current() -> Backend:
    """Returns the backend that Keras computes with in this process."""
    return backend_named(importlib.import_module("keras").config.backend())
