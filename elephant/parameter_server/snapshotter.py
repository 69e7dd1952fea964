"""The thread that takes a server's snapshots: at its start, every so often, and when a worker has finished."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from elephant.parameter_server import snapshot
from elephant.parameter_server.server import ParameterServer

logger = logging.getLogger(__name__)

# A lock cannot wait for any number of seconds, such as infinitely many.
_LONGEST_PAUSE_S = 3600.0


class Snapshotter:
    """Takes snapshots by time, by the number of pushes, and on request, as long as the process lives.

    The arrays are written while no push is in the middle; pulls go on. What is slow (the
    checksum, and waiting for the disk) comes after. A snapshot that fails is counted and
    tried again when the next is due, and the fit goes on.
    """

    def __init__(self, engine: ParameterServer, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._number = 0
        self._warned = False
        # Pushes that the last snapshot has, and that there were when one was last tried.
        self._saved, self._tried = 0, 0
        self._due_s = time.monotonic() + engine.spec.snapshot_seconds
        self._wanted, self._begun, self._done = 0, 0, 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="elephant-snapshots", daemon=True)
        engine.on_update(self._look)

    def start(self, *, initial: bool) -> None:
        """Starts the thread; where ``initial``, once what the server begins with is kept, to which it can go back."""
        if initial:
            self._take(snapshot.INITIAL)
        self._saved = self._tried = self._engine.updates
        self._thread.start()

    def request(self, timeout_s: float) -> bool:
        """Waits for a snapshot that is begun from now on; returns whether there was one in time."""
        with self._changed:
            self._wanted = number = self._begun + 1
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= number, timeout_s)

    def _look(self) -> None:
        if self._is_due():
            with self._changed:
                self._changed.notify_all()

    def _is_due(self) -> bool:
        spec, updates = self._engine.spec, self._engine.updates
        if updates == self._saved:
            return False
        by_count = spec.snapshot_updates > 0 and updates - self._tried >= spec.snapshot_updates
        return by_count or (spec.snapshot_seconds > 0 and time.monotonic() >= self._due_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._begun >= self._wanted and not self._is_due():
                    self._changed.wait(self._pause_s())
                self._begun += 1
                number = self._begun
            self._take(snapshot.LATEST)
            with self._changed:
                self._done = number
                self._changed.notify_all()

    def _pause_s(self) -> float | None:
        seconds = self._engine.spec.snapshot_seconds
        if seconds <= 0:
            return None
        left = self._due_s - time.monotonic()
        return min(left if left > 0 else seconds, _LONGEST_PAUSE_S)

    def _take(self, name: str) -> None:
        engine = self._engine
        self._number += 1
        self._tried = engine.updates
        arrays = self._folder / f"{name}-{engine.incarnation}-{self._number}.arrays"
        try:
            with engine.shared_lock.exclusive():
                image = engine.image()
                facts, updates = image.facts(), image.updates
                self._tried = updates
                snapshot.write_arrays(arrays, image)
            snapshot.seal(self._folder, name, arrays, facts, engine.spec.run_id)
        except Exception as error:
            # Whatever it was: the thread has to live, because workers that finish wait for it.
            arrays.unlink(missing_ok=True)
            self._failed(error)
        else:
            self._saved = updates
            engine.counters.add("snapshots")
        self._due_s = time.monotonic() + engine.spec.snapshot_seconds

    def _failed(self, error: Exception) -> None:
        self._engine.counters.add("snapshot_failures")
        if not self._warned:
            self._warned = True
            logger.warning(
                "A snapshot of the parameter server could not be written to %s: %s. Training goes on; should the "
                "server be lost, it goes back to the snapshot before, or to the beginning.",
                self._folder,
                error,
            )
