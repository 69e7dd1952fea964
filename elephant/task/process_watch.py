"""Watch over a process that nobody waits for: it is ended when it freezes, and how it has ended is kept."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

from elephant.monitor.events import RankFailure
from elephant.task.process import RankProcess


class ProcessWatch:
    """Waits for the end of a process in a thread of its own.

    Args:
        silence_s: A process that gives no sign of life for so long is frozen, and is killed.

    Attributes:
        failure: What `RankProcess.wait` returns, once the process has ended.
    """

    def __init__(self, process: RankProcess, *, silence_s: float) -> None:
        self._process, self._silence_s = process, silence_s
        self.failure: Future[RankFailure | None] = Future()
        self._thread = threading.Thread(target=self._wait, name="elephant-process-watch", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self.failure.set_result(self._process.wait(silence_s=self._silence_s))
        except BaseException as error:
            self.failure.set_exception(error)

    def ends_within(self, timeout_s: float) -> bool:
        """Waits until the process has ended, or for so long; returns whether it has."""
        return bool(wait([self.failure], timeout_s).done)

    def close(self) -> None:
        """Ends the process, and joins the thread."""
        self._process.kill()
        self._thread.join()
