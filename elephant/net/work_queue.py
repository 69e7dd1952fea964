"""Work beside its owner: one thread that runs one operation after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_JOIN_S = 5.0


class WorkQueue:
    """Runs operations in the order in which they were submitted, in a thread of its own.

    Operations of a collective are submitted in the same order on all ranks. Between ``submit`` and ``wait`` the
    collective is this thread's: nobody else may use it.
    """

    def __init__(self, name: str) -> None:
        self._operations: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._failures: list[BaseException] = []
        self._thread: threading.Thread | None = None
        self._name = name

    def submit(self, operation: Callable[[], object]) -> None:
        """Queues an operation and returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._operations.put(operation)

    def wait(self) -> None:
        """Returns when all submitted operations are over; raises what the first failed one raised.

        Each operation has a deadline of its own, and so this has.
        """
        self._operations.join()
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Ends the thread. An operation under way goes on until it ends, or its collective is aborted."""
        if self._thread is not None:
            self._operations.put(None)
            self._thread.join(_JOIN_S)
            self._thread = None

    def _work(self) -> None:
        while (operation := self._operations.get()) is not None:
            try:
                operation()
            except BaseException as error:
                self._failures.append(error)
            # It holds buffers: an idle thread may not keep them alive.
            del operation
            self._operations.task_done()
        self._operations.task_done()
