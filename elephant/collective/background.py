"""Sums over ranks that go on while their owner computes: one thread that works off one operation after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_JOIN_S = 5.0


class WorkQueue:
    """Runs operations of a collective in the order in which they were submitted, in a thread of its own.

    All ranks submit the same operations in the same order. Between ``submit`` and
    ``wait`` the collective is this thread's: nobody else may use it.
    """

    def __init__(self, name: str) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._pending = 0
        self._thread: threading.Thread | None = None
        self._name = name

    def submit(self, operation: Callable[[], None]) -> None:
        """Queues an operation and returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._pending += 1
        self._orders.put(operation)

    def wait(self) -> None:
        """Returns when all submitted operations are over; raises what the first failed one raised.

        Each operation has a deadline of its own, and so this has.
        """
        failure = None
        while self._pending:
            outcome = self._outcomes.get()
            self._pending -= 1
            failure = failure or outcome
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Ends the thread. An operation under way goes on until its collective ends or is aborted."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(_JOIN_S)
            self._thread = None

    def _work(self) -> None:
        while (operation := self._orders.get()) is not None:
            try:
                operation()
                self._outcomes.put(None)
            except Exception as error:
                self._outcomes.put(error)
            # It holds buffers: an idle thread may not keep them alive.
            del operation
