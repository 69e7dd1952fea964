"""A limit on how often something may happen, which lets short bursts pass: the token bucket (Turner 1986)."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Holds tokens that come at a rate; what happens takes one, and without one it may not.

    Args:
        per_second: Tokens that come in a second.
        burst: Tokens that the bucket holds at most, and at first.
        clock: Tells the time in seconds.

    >>> now = 0.0
    >>> bucket = TokenBucket(per_second=2, burst=3, clock=lambda: now)
    >>> [bucket.take() for _ in range(4)]
    [True, True, True, False]
    >>> now = 0.5
    >>> bucket.take(), bucket.take()
    (True, False)
    """

    def __init__(self, *, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._filled_at = clock()

    def take(self) -> bool:
        """Takes a token; returns whether there was one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
