"""The buffers that pushes are received into: few, so that memory does not grow with the number of clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np

from elephant.parameter_server.encoding import aligned_vector

POOL_BUFFERS = 2
# Of a client that has stopped in the middle of a push while others wait for its buffer.
IMPATIENCE_S = 1.0


class Pool:
    """A bounded number of buffers, made when they are first needed.

    Args:
        num_values: Length of each, float32.
        size: How many there are at most.
        stall_s: Seconds without a byte that a client may hold one while nobody else needs it.
    """

    def __init__(self, num_values: int, *, size: int = POOL_BUFFERS, stall_s: float = 60.0) -> None:
        self._num_values = num_values
        self._stall_s = stall_s
        self._unmade = size
        self._free: list[np.ndarray] = []
        self._waiting = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[np.ndarray]:
        """Waits for a buffer, and takes it back at the end of the ``with`` block."""
        buffer = self._take()
        try:
            yield buffer
        finally:
            with self._changed:
                self._free.append(buffer)
                self._changed.notify()

    def patience(self) -> float:
        """Returns the seconds without a byte that who holds a buffer is allowed at present."""
        return min(IMPATIENCE_S, self._stall_s) if self._waiting else self._stall_s

    def _take(self) -> np.ndarray:
        with self._changed:
            self._waiting += 1
            try:
                # Whoever holds a buffer gives it back: patience() sees to that.
                self._changed.wait_for(lambda: self._free or self._unmade)
            finally:
                self._waiting -= 1
            if self._free:
                return self._free.pop()
            self._unmade -= 1
        try:
            return aligned_vector(self._num_values)
        except BaseException:
            with self._changed:
                self._unmade += 1
                self._changed.notify()
            raise
