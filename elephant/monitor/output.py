"""What a rank's process prints, on its way to the driver: best effort, at a limited rate, in nobody's way."""

from __future__ import annotations

import threading
import time

from elephant.config import Timeouts
from elephant.errors import ElephantError
from elephant.monitor.events import Finished, Printed, to_message
from elephant.monitor.lines import is_noise
from elephant.monitor.rate import TokenBucket
from elephant.net.deadline import Deadline
from elephant.net.stream import Stream, connect

LINES_PER_S = 20.0
BURST_LINES = 200
# Lines that come together go together.
_GATHER_S = 0.1
_SEND_S = 5.0
_HEARD_S = 2.0


class OutputStream:
    """Takes lines at any rate, and sends them to the driver's channel at a limited one, in a thread of its own.

    Whatever goes wrong with a line, or with the connection, the lines are lost and nothing else
    happens. Nothing is opened before there is a line.

    Args:
        address: Host and port of the driver's channel.
        token: The secret of the run.
        run_id: The run.
        rank: Whose output it is.
        host: Where that rank runs, for the reader.
        timeouts: How long connecting may take.
        bucket: Limits the lines; `LINES_PER_S` by default.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: bytes,
        run_id: str,
        rank: int,
        host: str,
        timeouts: Timeouts,
        bucket: TokenBucket | None = None,
    ) -> None:
        self._address, self._token, self._run_id = address, token, run_id
        self._rank, self._host = rank, host
        self._connect_s = min(timeouts.connect_s, _SEND_S)
        self._bucket = bucket or TokenBucket(per_second=LINES_PER_S, burst=BURST_LINES)
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._left_out = 0
        self._closing = self._broken = False
        self._thread: threading.Thread | None = None

    def add(self, line: str) -> None:
        """Takes one line, without its end. Never waits, never raises."""
        if not line.strip() or is_noise(line):
            return
        with self._changed:
            if self._broken or self._closing:
                return
            if self._bucket.take():
                self._lines.append(line)
            else:
                self._left_out += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name="elephant-output", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Sends what is left, and waits for a moment until the driver has heard it."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=self._connect_s + _HEARD_S)

    def _send_all(self) -> None:
        try:
            deadline = Deadline(self._connect_s, "connecting to the driver")
            with connect(self._address, token=self._token, context=self._run_id, deadline=deadline) as stream:
                while self._send(stream):
                    time.sleep(_GATHER_S)
        except ElephantError:
            # Said nowhere: who reads these lines would read of it in the executor's log, where they are all the same.
            pass
        finally:
            with self._changed:
                self._broken = True
                self._lines.clear()

    def _send(self, stream: Stream) -> bool:
        """Sends what has come; returns whether more may come."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closing)
            lines, self._lines = self._lines, []
            left_out, self._left_out = self._left_out, 0
            closing = self._closing
        if lines or left_out:
            event = Printed(rank=self._rank, host=self._host, lines=lines, left_out=left_out)
            stream.send(to_message(event), Deadline(_SEND_S, "sending output to the driver"))
        if closing:
            stream.send(to_message(Finished(rank=self._rank)), Deadline(_SEND_S, "ending the output"))
            stream.receive(Deadline(_HEARD_S, "the driver to hear the output"))
        return not closing
