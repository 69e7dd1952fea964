"""Notice that a process is to end: SIGTERM, which cluster managers send before they take a machine or a container."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class EndNotice:
    """Takes the first SIGTERM of a process as a notice, so that what it does may come to an end of its own.

    A second one ends the process, as the first one would have without this. Python hears of a signal between two of its
    own instructions, and not within native code.

    Attributes:
        is_given: Whether the notice was given.
    """

    def __init__(self, on_given: Callable[[], object] | None = None) -> None:
        self.is_given = False
        self._on_given = on_given

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Takes it so for a ``with`` block; does nothing but in the main thread, where Python hears of signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.is_given = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._on_given is not None:
            # In a thread: whatever this one was doing, it may hold locks.
            threading.Thread(target=self._on_given, name="elephant-notice", daemon=True).start()
