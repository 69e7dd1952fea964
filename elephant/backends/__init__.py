"""Frameworks that Keras computes with: TensorFlow, JAX, PyTorch.

Everything in which they differ for elephant is an attribute or a method of `Backend`, in a class per framework: its
name, its packages and its environment variables, too. Outside of this package nothing names one (`tests/backends`
sees to that). None of these modules imports its framework before one of its methods needs it.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from elephant.backends.base import Backend
from elephant.backends.jax import JaxBackend
from elephant.backends.tensorflow import TensorFlowBackend
from elephant.backends.torch import TorchBackend
from elephant.errors import UnsupportedError, pass_over

DEFAULT = "tensorflow"
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (TensorFlowBackend(), JaxBackend(), TorchBackend())
}
# Where Keras looks first for the name of its backend.
VARIABLE = "KERAS_BACKEND"
# The environment in which none of them takes all memory of a GPU at once, and leaves none for what else runs on it.
GROWTH = {name: value for backend in BACKENDS.values() for name, value in backend.growth.items()}
# Their frames say nothing to users where elephant raises on purpose.
pass_over(BACKENDS)


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
            "these for driver and executors.",
            topic="another-keras-backend",
        )
    return BACKENDS[name]


def current() -> Backend:
    """Returns the backend that Keras computes with in this process."""
    return backend_named(importlib.import_module("keras").config.backend())


def asked_for(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the name of the backend that Keras takes where it is imported with an environment, as it looks for it."""
    named = environment.get(VARIABLE)
    if named:
        return named
    try:
        return str(json.loads(keras_file(environment).read_text(encoding="utf-8")).get("backend") or DEFAULT)
    except (OSError, ValueError, AttributeError):
        return DEFAULT


def keras_file(environment: Mapping[str, str]) -> Path:
    """Returns the path of the user's settings of Keras, which its import reads."""
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path(environment.get("KERAS_HOME") or os.path.join(home, ".keras"), "keras.json")


def log_levels(lowest: str) -> dict[str, str]:
    """Returns the environment in which no framework logs what is below a level: "2" leaves warnings out."""
    return {backend.log_level: lowest for backend in BACKENDS.values() if backend.log_level}
