"""Everything random in a process, seeded for a while and put back as it was."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

_OF_KERAS = ("global_random_seed", "global_seed_generator")
_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds Python, numpy, Keras and its backend for the time of a ``with`` block; what the user had seeded goes on.

    Args:
        seed: What `keras.utils.set_random_seed` gets, modulo 2**32.

    Example:
        >>> random.seed(1)
        >>> with seeded(7):
        ...     inner = random.random()
        >>> with seeded(7):
        ...     inner == random.random()
        True
        >>> drawn = random.random()
        >>> random.seed(1)
        >>> drawn == random.random()
        True
    """
    with _one_at_a_time:
        of_python, of_numpy = random.getstate(), np.random.get_state()
        attributes = {name: _global_state().get_global_attribute(name) for name in _OF_KERAS}
        of_tensorflow = _tensorflow_seeds()
        keras.utils.set_random_seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            for name, value in attributes.items():
                _global_state().set_global_attribute(name, value)
            _tensorflow_seeds(of_tensorflow)


def shared_generator(*, made: bool = False) -> keras.Variable | None:
    """Returns the state of the generator that layers without one of their own draw from.

    Args:
        made: Whether to make it where nothing has drawn from it yet; otherwise there is none then.
    """
    found = _global_state().get_global_attribute("global_seed_generator")
    if found is None and made:
        from keras.src.random.seed_generator import global_seed_generator

        found = global_seed_generator()
    return None if found is None else found.state


def _global_state() -> Any:
    # Keras has no public way to ask for its seed, or to take it back.
    from keras.src.backend.common import global_state

    return global_state


def _tensorflow_seeds(restored: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns what TensorFlow draws from, after putting back what was given; nothing with another backend."""
    if keras.backend.backend() != "tensorflow":
        return {}
    from tensorflow.python.eager import context

    seeds = vars(context.context())
    if restored is not None:
        # One that nobody has seeded yet has no generator.
        seeds.pop("_rng", None)
        seeds.update(restored)
    return {name: seeds[name] for name in ("_seed", "_rng") if name in seeds}
