"""Standard input and output of a training process.

Blocks go in as the process takes them. What it prints is read as long as it lives: kept at its end, and passed on
line by line.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import os
import queue
import select
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

from elephant.monitor.log_stream import LineCutter, is_noise
from elephant.training.wire import framed

TAIL_LINES = 30
_CHUNK_BYTES = 1 << 16
_LOOK_S = 0.1
# For what is in the pipe when the process has ended: something that it has started may hold the pipe for longer.
_LAST_S = 1.0


class Lines(Protocol):
    """Where lines go; see `elephant.monitor.log_stream.OutputStream`."""

    def add(self, line: str) -> None:
        """Takes one line."""

    def close(self) -> None:
        """Takes no more."""


class ProcessOutput:
    """The reading end of a process' standard output and error.

    All of it goes to this process' standard error, which is the executor's log: there users of
    Spark look. Whatever is printed, and wherever it cannot be written to, reading goes on: a process
    whose pipe is full would wait for ever.

    Args:
        lines: Where its lines go besides; None sends them nowhere. Closed with this.

    Attributes:
        descriptor: The writing end, for the process.
    """

    def __init__(self, lines: Lines | None) -> None:
        self._lines = lines
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._reading, self.descriptor = os.pipe()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="elephant-rank-log", daemon=True)

    def begin(self) -> None:
        """Reads from now on; the process has its own copy of the writing end."""
        os.close(self.descriptor)
        self.descriptor = -1
        self._thread.start()

    @property
    def tail(self) -> str:
        """The last lines, without what TensorFlow always prints."""
        return "".join(f"{line}\n" for line in self._tail)

    def end(self) -> None:
        """Reads what the process, which has ended, has left."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_LAST_S)

    def close(self) -> None:
        """Ends the reading, and lets go of the pipe."""
        self.end()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        if self._thread.ident is None:
            os.close(self._reading)
        if self._lines is not None:
            self._lines.close()

    def _read(self) -> None:
        cutter, decoder = LineCutter(), codecs.getincrementaldecoder("utf-8")("replace")
        try:
            for chunk in iter(self._chunk, b""):
                _log(decoder.decode(chunk))
                self._take(cutter.feed(chunk))
            self._take(cutter.rest())
        finally:
            os.close(self._reading)

    def _chunk(self) -> bytes:
        """Returns what has come; nothing at the end, or when the process has ended and has nothing left there."""
        poller = select.poll()
        poller.register(self._reading, select.POLLIN)
        while not poller.poll(1000 * _LOOK_S):
            if self._ended.is_set():
                return b""
        return os.read(self._reading, _CHUNK_BYTES)

    def _take(self, lines: Sequence[str]) -> None:
        for line in lines:
            if not is_noise(line):
                self._tail.append(line)
            if self._lines is not None:
                self._lines.add(line)


class ProcessInput:
    """The writing end of a process' standard input, fed by a thread: the process may be there later than the blocks.

    Attributes:
        descriptor: The reading end, for the process.
    """

    def __init__(self) -> None:
        self.descriptor, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._blocks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="elephant-rank-input", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Lets go of the reading end, of which the process has its own copy."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def send(self, block: bytes) -> None:
        """Has one block written, after those before."""
        self._blocks.put(framed(block))

    def close(self) -> None:
        """Ends the writing, and closes the pipe, by which the process sees that nobody waits for it any more."""
        self._closing.set()
        self._blocks.put(None)
        self._thread.join()
        self.begin()
        os.close(self._writing)

    def _write(self) -> None:
        for block in iter(self._blocks.get, None):
            rest = memoryview(block)
            while rest and not self._closing.is_set():
                written = self._written(rest)
                if written < 0:
                    return
                rest = rest[written:]

    def _written(self, rest: memoryview) -> int:
        """Writes what the pipe takes; returns how much, or -1 where nobody reads any more."""
        poller = select.poll()
        poller.register(self._writing, select.POLLOUT)
        if not poller.poll(1000 * _LOOK_S):
            return 0
        try:
            return os.write(self._writing, rest)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            return -1


def _log(text: str) -> None:
    # A full disk, or a log that is closed or not there, must not stop the reading.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
