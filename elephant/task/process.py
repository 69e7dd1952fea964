"""Training processes of a Spark task: their output, and end.

Blocks go in as the process takes them. What it prints is read as long as it lives: kept at its end, and passed on
line by line.

A rank runs in a process of its own because Spark reuses its Python workers: an
environment variable, a GPU context or a thread pool would reach the next job.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from elephant.cluster.compiled_files import compiled_files
from elephant.cluster.warm_workers import COLD, WarmWorkers
from elephant.config import Timeouts
from elephant.errors import ENDED, FROZEN, KILLED
from elephant.monitor.events import RankFailure
from elephant.monitor.log_stream import LineCutter, is_noise
from elephant.rank.executor import DRIVER, EXECUTOR_VARIABLE, TASK_VARIABLE, executor_id, memory_kills
from elephant.rank.process_pipe import (
    ABANDONED_EXIT_CODE,
    FAILURE_FILE,
    PULSE_FILE,
    RESULT_FILE,
    STEP_FILE,
    USER_FOLDER,
    framed,
    last_step,
    make_step_file,
)
from elephant.storage.filesystem import WORK_FOLDER
from elephant.storage.user_files import make_folder
from elephant.task.forkserver import ForkRequest
from elephant.task.warm_processes import UNHEARD, ForkedProcess, forked_process, new_work_folder

EXITED = "its process exited with"
_NATIVE = (
    "native code has failed, of TensorFlow, of a custom operation or of a library that a callback uses. The last "
    "lines have the Python frames. Try the same step in one process, and without that library."
)
_USUALLY = {
    "SIGKILL": (
        "SIGKILL, often from the kernel or the cluster manager, out of memory. Raise spark.executor.memoryOverhead, or "
        "lower {holds}."
    ),
    "SIGSEGV": f"it touched memory that is not its own: {_NATIVE}",
    "SIGABRT": (
        "it gave itself up: native code found something that cannot be, or could not get memory. The last lines say "
        "what."
    ),
    "SIGBUS": (
        "it read a file that is shorter than it was, or memory that cannot be had: often a full disk or a full "
        "/dev/shm. Make room where Spark keeps local data (spark.local.dir)."
    ),
    "SIGILL": (
        "the processor does not know an instruction: a package that was built for another one. Install packages "
        "built for the executors' processors, or their portable builds."
    ),
    "SIGFPE": f"it divided integers by zero: {_NATIVE}",
    "SIGTERM": (
        "somebody asked it to end: a cluster manager that takes the node or the container away, or an administrator. "
        "Its log says why."
    ),
    "SIGINT": "somebody interrupted it at its terminal.",
    "SIGHUP": "its terminal, or the session that it belonged to, was closed.",
    "SIGXCPU": "it used up the processor time that its host allows (ulimit -t).",
    "SIGXFSZ": "it wrote a file larger than its host allows (ulimit -f).",
}
_OF_MEMORY = (
    "by the kernel, out of memory: its container, or its host, had no more. Raise spark.executor.memoryOverhead, "
    "or lower {holds}."
)
HOLDS = "what a worker holds: batchSize, or the cache in memory"

TAIL_LINES = 30
_CHUNK_BYTES = 1 << 16
_LOOK_S = 0.1
# For what is in the pipe when the process has ended: something that it has started may hold the pipe for longer.
_LAST_S = 1.0

_MODULE = "elephant.rank"
_POLL_S = 0.5
DISMISSED = "elephant.Dismissed"
_UNHEARD_TEXT = (
    "its process has ended before its work was done, and nobody knows how: the server that it was forked from had "
    "ended before. Both were killed, often by the kernel or the cluster manager, out of memory. Raise "
    "spark.executor.memoryOverhead, or lower what a worker holds, such as batchSize."
)


def exit_text(code: int, *, memory_kills: int = 0, holds: str = HOLDS) -> str:
    """Describes the end of a process that reported nothing itself.

    Args:
        code: What `subprocess.Popen.returncode` holds: minus the signal's number for one that a signal ended.
        holds: What it has in memory.

    >>> exit_text(-11).partition(":")[0]
    'its process was ended by signal 11 (SIGSEGV)'
    >>> exit_text(-9, memory_kills=1).partition(":")[0]
    'its process was killed (signal 9) by the kernel, out of memory'
    >>> exit_text(3)
    'its process exited with 3: something called os._exit, or a library ended the process.'
    """
    if code == 0:
        return f"{EXITED} 0 before its work was done: something called os._exit."
    if code > 0:
        return f"{EXITED} {code}: something called os._exit, or a library ended the process."
    name = _name_of(-code)
    if name == "SIGKILL":
        how = f"its process {KILLED}"
        text = f"{how} {_OF_MEMORY}" if memory_kills > 0 else f"{how}: {_USUALLY[name]}"
        return text.format(holds=holds)
    usually = _USUALLY.get(name)
    how = f"its process was ended by signal {-code} ({name})"
    return f"{how}: {usually}" if usually else f"{how}."


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a signal without a name"


class Lines(Protocol):
    """Receiver of lines; see `elephant.monitor.log_stream.OutputStream`."""

    def add(self, line: str) -> None:
        """Takes one line."""

    def close(self) -> None:
        """Takes no more."""


class ProcessOutput:
    """The reading end of a process' standard output and error.

    All of it goes to this process' standard error, which is the executor's log: there users of
    Spark look. With a local master that is the driver's console, and lines that the driver shows are
    not repeated there. Whatever is printed, and wherever it cannot be written to, reading goes on: a process whose
    pipe is full would wait for ever.

    Args:
        lines: Where its lines go besides; None sends them nowhere. Closed with this.

    Attributes:
        descriptor: The writing end, for the process.
    """

    def __init__(self, lines: Lines | None) -> None:
        self._lines = lines
        self._is_logged = lines is None or executor_id() != DRIVER
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
                if self._is_logged:
                    _log(decoder.decode(chunk))
                self._take(cutter.feed(chunk))
            self._take(cutter.rest())
        finally:
            os.close(self._reading)

    def _chunk(self) -> bytes:
        """Returns the bytes that have come; nothing at the end, or when the process has ended and left no more."""
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

    def _write(self) -> None:
        try:
            for block in iter(self._blocks.get, None):
                rest = memoryview(block)
                while rest and not self._closing.is_set():
                    written = self._written(rest)
                    if written < 0:
                        return
                    rest = rest[written:]
        finally:
            # Whatever kept it from writing: the process must not wait for the rest of a block.
            os.close(self._writing)

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


class RankProcess:
    """One rank's process and its work folder; leaving the ``with`` block ends and removes both.

    Args:
        program: What it runs, by its name in `elephant.rank.program`.
        environment: What `elephant.backends.process_environment.process_environment` returned.
        listener_fd: The listening socket that the process inherits; None where it listens to nobody.
        module: Whose program it is; `elephant.rank` has those of ranks.
        lines: Where the lines go that it prints; None sends them to the executor's log alone.
        keeps_files: Whether it stands in a folder of its own, for what the user's code writes; else where this one is.
        holds: What it has in memory, for the error where it is killed for that.
        rows_folder: Where its task keeps the rows, and files of the user's code, for the process after this one, which
            the process removes with its own folder where the task is gone; None where they are in that.
    """

    def __init__(
        self,
        program: str,
        environment: Mapping[str, str],
        *,
        listener_fd: int | None = None,
        more_fds: Sequence[int] = (),
        module: str = _MODULE,
        lines: Lines | None = None,
        warm: WarmWorkers = COLD,
        prefix: str = "elephant-",
        grace_s: float = Timeouts.heartbeat_s,
        keeps_files: bool = False,
        holds: str = HOLDS,
        rows_folder: Path | None = None,
    ) -> None:
        self._holds = holds
        self.work_folder = new_work_folder(prefix)
        self._memory_kills = memory_kills()
        with contextlib.ExitStack() as undoing:
            undoing.callback(shutil.rmtree, self.work_folder, ignore_errors=True)
            # Made here and only touched there: a process that is abandoned must not make its folder anew.
            (self.work_folder / PULSE_FILE).touch()
            make_step_file(self.work_folder / STEP_FILE)
            if keeps_files:
                self._make_user_folder(rows_folder)
            self._output = ProcessOutput(lines)
            undoing.callback(self._output.close)
            self._input = ProcessInput()
            undoing.callback(self._input.close)
            inherits = (*(() if listener_fd is None else (listener_fd,)), *more_fds)
            own = {WORK_FOLDER: str(self.work_folder), EXECUTOR_VARIABLE: executor_id()}
            environment = {
                **environment,
                **compiled_files(environment),
                **own,
                TASK_VARIABLE: f"{os.getpid()} {grace_s}",
            }
            folders = map(str, filter(None, (self.work_folder, rows_folder)))
            self._process = self._started([module, program, *folders], environment, inherits, warm)
            undoing.pop_all()

    def _make_user_folder(self, rows_folder: Path | None) -> None:
        folder = (rows_folder or self.work_folder) / USER_FOLDER
        if not folder.exists():
            make_folder(folder)
        if rows_folder is not None:
            (self.work_folder / USER_FOLDER).symlink_to(folder)

    def _started(
        self, command: Sequence[str], environment: Mapping[str, str], inherits: Sequence[int], warm: WarmWorkers
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        """Has the process forked where it can be had warm; starts a fresh one else."""

        def fresh() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                env=environment,
                stdin=self._input.descriptor,
                stdout=self._output.descriptor,
                stderr=subprocess.STDOUT,
                pass_fds=inherits,
            )

        folder = _working_folder()
        if command[0] == _MODULE and folder:
            request = ForkRequest(
                arguments=list(command[1:]),
                environment=dict(environment),
                folder=folder,
                descriptors=list(inherits),
                idle_s=warm.idle_s,
                limit=warm.limit,
            )
            descriptors = [self._input.descriptor, self._output.descriptor, *inherits]
            forked = forked_process(request, descriptors, warm, start_fresh=fresh, on_started=self._begin)
            if forked is not None:
                return forked
        process = fresh()
        self._begin()
        return process

    def _begin(self) -> None:
        """Lets go of the ends of the pipes that are the process' own, which it has now."""
        self._input.begin()
        self._output.begin()

    def await_start(self) -> None:
        """Waits until the process is there, and has all that it inherits."""
        if isinstance(self._process, ForkedProcess):
            self._process.await_start()

    def send(self, block: bytes) -> None:
        """Hands the process one block. A process that has ended is noticed by `wait`, which knows why."""
        self._input.send(block)

    def terminate(self) -> None:
        """Asks the process to end, by SIGTERM; one that has ended stays as it is."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process at once; one that has ended stays as it is."""
        if self.running:
            self._process.kill()

    @property
    def running(self) -> bool:
        """True if the process has not ended yet."""
        return self._process.poll() is None

    @property
    def silent_s(self) -> float:
        """Seconds since its last sign of life, or since it was asked for; of a process that is well less than one."""
        return max(time.time() - self._pulse() / 1e9, 0.0)

    @property
    def _result_file(self) -> Path:
        return self.work_folder / RESULT_FILE

    def result(self) -> bytes:
        """Returns the result of the program of a process that has ended well."""
        return self._result_file.read_bytes()

    def wait(self, *, silence_s: float | None = None) -> RankFailure | None:
        """Waits until the process ends; returns None when it ended well.

        Args:
            silence_s: A process that gives no sign of life for so long is frozen, and is killed; None lets it be.
        """
        frozen = silence_s is not None and self._freezes(silence_s)
        code = self._process.wait()
        self._output.end()
        if code == UNHEARD and self._result_file.exists():
            code = 0
        if frozen:
            text = f"its process was frozen: it gave no sign of life for {silence_s:g} s, and was killed"
            return self._with_output(RankFailure(kind=FROZEN, message=text))
        if code == 0 and self._result_file.exists():
            return None
        if code == ABANDONED_EXIT_CODE:
            return RankFailure(kind=DISMISSED, message="the driver ended the run")
        report = self.work_folder / FAILURE_FILE
        if not report.exists() and code == UNHEARD:
            return self._with_output(RankFailure(kind=ENDED, message=_UNHEARD_TEXT))
        if not report.exists():
            text = exit_text(code, memory_kills=self._new_memory_kills(), holds=self._holds)
            return self._with_output(RankFailure(kind=ENDED, message=text))
        try:
            return self._with_output(RankFailure(**json.loads(report.read_text())))
        except ValueError:
            place = self.work_folder.parent
            text = f"{EXITED} {code}, and had no room for its error in {place}. Make some; its last lines say it."
            return self._with_output(RankFailure(kind=ENDED, message=text))

    def _with_output(self, failure: RankFailure) -> RankFailure:
        """Returns a failure with the last lines of the process, and the step that it was in."""
        return replace(failure, log_tail=self._output.tail, step=last_step(self.work_folder / STEP_FILE))

    def _new_memory_kills(self) -> int:
        """Returns how many processes of this container the kernel has killed since this one was started."""
        now = memory_kills()
        return 0 if now is None or self._memory_kills is None else now - self._memory_kills

    def _freezes(self, silence_s: float) -> bool:
        """Waits until the process ends; kills it and returns True when its pulse stops before."""
        pulse, changed_at = self._pulse(), time.monotonic()
        while self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_POLL_S)
            latest, now = self._pulse(), time.monotonic()
            if latest != pulse:
                pulse, changed_at = latest, now
            elif self.running and now - changed_at > silence_s:
                self._process.kill()
                return True
        return False

    def _pulse(self) -> int:
        try:
            return (self.work_folder / PULSE_FILE).stat().st_mtime_ns
        except OSError:
            # A process that abandons its work removes its folder first.
            return 0

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._process.wait()
        self._output.close()
        self._input.close()
        shutil.rmtree(self.work_folder, ignore_errors=True)
        if isinstance(self._process, ForkedProcess):
            # The server removes what a task has left that hangs up, as one that is killed.
            self._process.close()


def _working_folder() -> str:
    """Returns the working folder of this process; nothing where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
