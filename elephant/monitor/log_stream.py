"""Lines that workers print: split, limited in rate, and sent to the driver; those of frameworks' starts left out."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from elephant.backends import BACKENDS, log_levels
from elephant.config import Timeouts
from elephant.errors import ElephantError
from elephant.monitor.events import Finished, Printed, to_message
from elephant.net.deadline import Deadline
from elephant.net.stream import Stream, connect

LONGEST = 2000
_CUT = " ... (cut)"
# Colours and movements of the cursor (ECMA-48).
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])?")
_NOISY = [backend for backend in BACKENDS.values() if backend.noise]
_NOISE = re.compile("|".join(backend.noise for backend in _NOISY))
_ERRORS_ALONE = "3"
_FILTERED_WITHIN_S = 1.0

LINES_PER_S = 20.0
BURST_LINES = 200
# Lines that come together go together.
_GATHER_S = 0.1
_SEND_S = 5.0
_HEARD_S = 2.0


class TokenBucket:
    """Holds tokens that come at a rate; what happens takes one, and without one it may not.

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


class LineCutter:
    """Cuts bytes into lines of text; bytes that are no UTF-8, and lines without an end, are no trouble.

    A line that is written over (``\\r``, as progress bars do) is as it was left. One that is longer than
    `LONGEST` characters is cut there.

    >>> cutter = LineCutter()
    >>> cutter.feed(b"one\\nt"), cutter.feed(b"wo\\r\\n10 %\\r20 %\\nrest"), cutter.rest()
    (['one'], ['two', '20 %'], ['rest'])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""
        self._is_cut = False

    def feed(self, chunk: bytes) -> list[str]:
        """Returns the lines that end with these bytes."""
        *ended, rest = (self._begun + self._decoder.decode(chunk)).split("\n")
        lines = []
        for text in ended:
            lines += self._line(text)
            self._is_cut = False
        if "\r" in rest:
            rest = _overwritten(rest)
        if len(rest) > LONGEST:
            lines += self._line(rest)
            # What more there is of it goes, up to its end.
            self._is_cut, rest = True, ""
        self._begun = rest
        return lines

    def rest(self) -> list[str]:
        """Returns the last line, when it has no end."""
        return self._line(self._begun) if self._begun else []

    def _line(self, text: str) -> list[str]:
        return [] if self._is_cut else [shown(text)]


def shown(text: str) -> str:
    """Returns a line as it may be shown: without what would move a cursor, and not too long.

    >>> shown("\\x1b[31mred\\x1b[0m\\ttext\\x00")
    'red    text\\ufffd'
    """
    plain = _ESCAPES.sub("", _overwritten(text).rstrip("\r")[: 2 * LONGEST]).replace("\t", "    ")
    plain = "".join(letter if letter.isprintable() else "\ufffd" for letter in plain)
    return plain if len(plain) <= LONGEST else plain[:LONGEST] + _CUT


def _overwritten(text: str) -> str:
    """Returns the visible rest of a line that may not have ended."""
    body = text.rstrip("\r")
    # The last one may belong to the end of the line.
    return body.rpartition("\r")[2] + text[len(body) : len(body) + 1]


def is_noise(line: str) -> bool:
    """Returns whether a line is one that TensorFlow prints in every process, whatever it does.

    >>> is_noise("2026-11-22 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.")
    True
    >>> is_noise("loss is NaN")
    False
    """
    return _NOISE.match(line) is not None


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Leaves out what a framework prints when the block imports it, unless the user wants to see all of its logs.

    A level from 1 on, which TensorFlow does not keep to before it has started, is the user's for what comes later.

    Most of TensorFlow's comes before it knows its level, and from C++. So standard error goes through grep meanwhile: a
    process of its own, by which the last words of a crash come out too.
    """
    grep = shutil.which("grep")
    levels = {name: level for name, level in log_levels(_ERRORS_ALONE).items() if name not in os.environ}
    wants_all = any(os.environ.get(name) in ("", "0") for name in log_levels(_ERRORS_ALONE))
    if grep is None or wants_all or any(backend.name in sys.modules for backend in _NOISY):
        yield
        return
    with contextlib.ExitStack() as undoing:
        # A process without standard error has nothing to leave out.
        with contextlib.suppress(OSError):
            _pass_through([grep, "--line-buffered", "-vE", f"^({_NOISE.pattern})"], undoing)
        os.environ.update(levels)
        for name in levels:
            undoing.callback(os.environ.pop, name, None)
        yield


def _pass_through(command: list[str], undoing: contextlib.ExitStack) -> None:
    """Has standard error go through a program until what is given to the stack is undone."""
    own = os.dup(2)
    undoing.callback(os.close, own)
    reading, writing = os.pipe()
    try:
        program = subprocess.Popen(command, stdin=reading, stdout=own)
        undoing.callback(_await_end, program)
        os.dup2(writing, 2)
        undoing.callback(os.dup2, own, 2)
    finally:
        os.close(reading)
        os.close(writing)


def _await_end(program: subprocess.Popen[bytes]) -> None:
    # It ends when nobody writes to it any more; what was started meanwhile may do so for long.
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(_FILTERED_WITHIN_S)


class OutputStream:
    """Takes lines at any rate, and sends them to the driver's channel at a limited one, in a thread of its own.

    Whatever goes wrong with a line, or with the connection, the lines are lost and nothing else
    happens. Nothing is opened before there is a line.
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
