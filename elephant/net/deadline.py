"""A point in time that several blocking steps share."""

from __future__ import annotations

import math
import time

from elephant.errors import ConfigurationError, DeadlineExceededError

_LONGEST_WAIT_S = 3600.0


class Deadline:
    """The end of the time that an operation of several blocking steps may take.

    Args:
        seconds: Time from now on; zero has passed already, infinity never passes.
        what: What it covers, as the subject of a sentence: ``"Connecting to the driver"``.

    Raises:
        ConfigurationError: ``seconds`` is negative or not a number.

    Example:
        >>> Deadline(0, "Waiting for rank 3").remaining()
        Traceback (most recent call last):
        ...
        elephant.errors.DeadlineExceededError: Waiting for rank 3 did not end within 0 s.
    """

    def __init__(self, seconds: float, what: str) -> None:
        if math.isnan(seconds) or seconds < 0:
            raise ConfigurationError(f"{what}: expected a timeout of zero or more seconds. Received: {seconds!r}.")
        self.seconds = seconds
        self.what = what
        self._end = time.monotonic() + seconds

    @property
    def expired(self) -> bool:
        """True if the time is over."""
        return time.monotonic() >= self._end

    def remaining(self) -> float:
        """Returns the seconds that are left: more than zero, and at most an hour, which every system call takes.

        Raises:
            DeadlineExceededError: None are left.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.exceeded()
        return min(left, _LONGEST_WAIT_S)

    def remaining_ms(self) -> int:
        """Returns the milliseconds that are left, rounded up, as ``poll`` takes them.

        Raises:
            DeadlineExceededError: None are left.
        """
        return math.ceil(self.remaining() * 1000)

    def shortened(self, seconds: float, what: str) -> Deadline:
        """Returns a deadline for one of the steps: ``seconds`` from now, or this one's end where that is sooner."""
        return Deadline(min(seconds, max(self._end - time.monotonic(), 0.0)), what)

    def exceeded(self, detail: str = "", topic: str = "") -> DeadlineExceededError:
        """Returns the error to raise when the time is over; ``detail`` is a sentence on what was seen."""
        message = f"{self.what} did not end within {self.seconds:g} s."
        return DeadlineExceededError(f"{message} {detail}".rstrip(), topic=topic)
