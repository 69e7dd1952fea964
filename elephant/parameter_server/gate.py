"""Many at a time, or one alone: pushes go through side by side, a snapshot by itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """A lock that many may share; who wants it alone goes before those who come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False
        self._wanted = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Waits until nobody has, or wants, the gate alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._wanted)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Waits until all who are inside have left, and lets nobody else in meanwhile."""
        with self._changed:
            self._wanted += 1
            try:
                self._changed.wait_for(lambda: not self._alone and not self._inside)
                self._alone = True
            finally:
                self._wanted -= 1
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
