"""Objects of Python between ranks: pickled, and unpickled where it is proven that a rank of the run has sent them.

What unpickles runs code of whoever has made the bytes. Ranks of one run trust each other: they run the same program,
and share the run's token. But a connection proves only once, when it begins, that its other side knows the token.
Bytes that somebody puts into it later are refused, because each object carries the proof itself: a keyed hash (RFC
2104) of it, its sender, and its operation, so that it counts once.
"""

from __future__ import annotations

import hmac
import pickle  # noqa: S403  (what comes from other ranks, after the proof)
from collections.abc import Callable
from typing import Any

import numpy as np

from elephant.errors import AuthenticationError, ConfigurationError

# Makes the proof that a rank, by its number in the run, has sent some bytes.
Seal = Callable[[int, bytes], bytes]
Dumps = Callable[[Any], bytes]
_SEAL_BYTES = 32


def pickled(value: Any, dumps: Dumps) -> bytes:
    """Returns an object's bytes.

    Raises:
        ConfigurationError: It cannot be pickled.
    """
    try:
        return dumps(value)
    except Exception as error:
        raise ConfigurationError(
            f"value: expected an object that can be pickled. Received: {type(value).__name__}: "
            f"{type(error).__name__}: {error}."
        ) from error


def sealed(data: bytes, seal: Seal, sender: int) -> np.ndarray:
    """Returns an object's bytes with the proof before them, as an array, uint8."""
    return np.frombuffer(seal(sender, data) + data, np.uint8)


def opened(array: np.ndarray, seal: Seal, sender: int) -> Any:
    """Returns the object of what `sealed` has returned on another rank.

    Raises:
        AuthenticationError: No process that knows the run's token has made it for this operation.
    """
    data = array.tobytes()
    proof, data = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
    if not hmac.compare_digest(proof, seal(sender, data)):
        raise AuthenticationError(
            "Expected an object with the proof of a rank of this run. Received: a proof that does not hold. Something "
            "between two ranks has changed what was sent."
        )
    return pickle.loads(data)  # noqa: S301  (a rank of this run has sent it)


def copied(value: Any, dumps: Dumps) -> Any:
    """Returns an object as another rank would have it."""
    return pickle.loads(pickled(value, dumps))  # noqa: S301  (made here)
