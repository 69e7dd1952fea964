"""Program of a training process: its signs of life, and its end with the Spark task that started it.

It is started by the rank's Spark task with the environment (devices, threads)
already set, and gets three blocks through its standard input: the job; variables of the environment
that the task knew only later, its device above all; its own place in the run.
It runs its program (`elephant.rank.program`) and ends when that has ended, or
when the task that started it is gone: its standard input then closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import re
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from elephant.backends import BACKENDS
from elephant.errors import ElephantError, kind_of, text_of, topic_of
from elephant.monitor.events import RankFailure
from elephant.monitor.trace import PROCESS
from elephant.rank.executor import TASK_VARIABLE, is_stopped
from elephant.rank.process_pipe import (
    ABANDONED_EXIT_CODE,
    FAILURE_FILE,
    PULSE_FILE,
    RESULT_FILE,
    STEP_FILE,
    USER_FOLDER,
    keep_steps,
    read_block,
)
from elephant.rank.program import PROGRAMS, Program

_PULSE_INTERVAL_S = 0.5
_GENERATED = "__autograph_generated_file"

_LONGEST_TEXT = 40_000
_LOOK_S = 0.5
_DYING_MS = 1000
# What Keras puts around methods of models and callbacks, to shorten tracebacks.
_FILTER = os.path.join("keras", "src", "utils", "traceback_utils.py")
_GRAPH_ERROR = "Graph execution error:"
_GRAPH_FRAME = re.compile(r'  File "([^"\n]+)", line \d+, in [^\n]+\n(?:    [^\n]+\n)?\n?')
# What users have installed, too, is code of theirs.
_LIBRARIES = "|".join(["keras", *(name for backend in BACKENDS.values() for name in backend.packages)])
_LIBRARY = re.compile(rf"[/\\](?:{_LIBRARIES})[/\\](?:python|src)[/\\]")
_PACKAGE = str(Path(__file__).resolve().parent.parent)


def notice_end_of_parent() -> None:
    """Sees to it that this process hears of the end of the Spark task that started it, and outlives it to clean up.

    It hears of it by its standard input, which closes; it then removes what it has on the disk,
    the rows among it, and ends. One that is stopped hears nothing: where the kernel is Linux, it has
    the process go on when that pipe closes, whichever process this one was forked from. And what ends all
    Python processes of an executor, a hang-up of their group, is not for this one, which would have no time left.
    """
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def keep_pulse(path: Path) -> None:
    """Touches a file twice a second from now on, in a thread of its own, until the file or this process is gone.

    Args:
        path: A file that is there: it is never made, so that a folder that is removed stays removed.
    """
    threading.Thread(target=_beat, args=(path,), name="elephant-pulse", daemon=True).start()


def remove_generated_code() -> None:
    """Removes the files that TensorFlow has written to the temporary folder for the functions it has compiled.

    It would remove them itself at a normal exit, and this process makes none.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_GENERATED) and getattr(module, "__file__", None):
            Path(str(module.__file__)).unlink(missing_ok=True)


def _beat(path: Path) -> None:
    while True:
        try:
            os.utime(path)
        except FileNotFoundError:
            return
        except OSError:
            # A disk that fails for a moment, say: this process is not frozen for that.
            pass
        time.sleep(_PULSE_INTERVAL_S)


class Parent:
    """Reads what the Spark task sends, and ends this process when the task is gone.

    Args:
        folders: What this process has on the disk; behind the first one those that its task keeps for the next process.
        pipe: From the task.
    """

    def __init__(self, folders: Sequence[Path], pipe: BinaryIO) -> None:
        self._folders = folders
        self._pipe = pipe
        task, grace_s = os.environ.get(TASK_VARIABLE, "0 60").split()
        self._task, self._grace_s = int(task), float(grace_s)
        self._is_done = False
        self.job: Future[bytes] = Future()
        self.environment: Future[bytes] = Future()
        self.rank_info: Future[bytes] = Future()
        threading.Thread(target=self._read, name="elephant-parent", daemon=True).start()
        threading.Thread(target=self._watch, name="elephant-parent-watch", daemon=True).start()

    def _read(self) -> None:
        try:
            for future in (self.job, self.environment, self.rank_info):
                block = read_block(self._pipe)
                if block is None:
                    return
                future.set_result(block)
            self._pipe.read()
        finally:
            # However it ended: nobody else would hear of the task, and the program might wait for a block for ever.
            self.abandon()

    def await_task(self) -> None:
        """Waits while the Spark task is stopped: Spark may end it, and it would leave its work folder then."""
        self._is_done = True
        hung_up = select.poll()
        hung_up.register(self._pipe, 0)
        was_stopped = False
        while is_stopped(self._task):
            was_stopped = True
            time.sleep(_LOOK_S)
        # One that is killed is no longer stopped a moment before its end of the pipe is closed.
        if hung_up.poll(_DYING_MS if was_stopped else 0):
            self.abandon()

    def _watch(self) -> None:
        """Ends this process where it waits for a task that stays stopped: nobody else does, and Spark may forget it.

        And where the task is gone while something that it has started still holds the pipe.
        """
        since = time.monotonic()
        try:
            while not self._has_lost_task():
                time.sleep(_LOOK_S)
                works = self.rank_info.done() and not self._is_done
                if works or not is_stopped(self._task):
                    since = time.monotonic()
                elif time.monotonic() - since > self._grace_s:
                    return
        finally:
            self.abandon()

    def _has_lost_task(self) -> bool:
        try:
            os.kill(self._task, 0)
        except ProcessLookupError:
            return True
        except OSError:
            # It is there, and somebody else's: not so in any case that is known.
            return False
        return False

    def abandon(self) -> None:
        """Ends this process at once, and leaves nothing behind."""
        self._end(self._folders)

    def leave(self) -> None:
        """Ends this process at once; its task, which goes on, has the rows."""
        self._end(self._folders[:1])

    def _end(self, folders: Sequence[Path]) -> None:
        try:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            remove_generated_code()
        finally:
            # What cannot be removed must not keep the process, its memory and its GPU.
            os._exit(ABANDONED_EXIT_CODE)


def taken_input() -> BinaryIO:
    """Returns the input from the Spark task, and leaves nothing to read in its place.

    The user's code, and programs that it starts, would wait for it for ever, or take away what is not theirs.
    """
    pipe = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return pipe


def run_rank(program: Program, parent: Parent) -> bytes:
    """Runs this rank from the first block to the last event; returns what its program returns."""
    PROCESS.begin()
    # Before anything imports TensorFlow, which the job may do as well.
    os.environ.update(json.loads(parent.environment.result()))
    program.prepare()
    PROCESS.end("importing Keras")
    job = program.load(parent.job.result())
    # The bytes of a model are in it.
    parent.job = Future()
    PROCESS.end("building the model")
    rank_info = parent.rank_info.result()
    PROCESS.end("waiting for rows and ranks")
    return program.start(job, rank_info, parent.leave)


def failure_of(error: BaseException) -> RankFailure:
    """Returns the failure, for the Spark task, that an error of this process is."""
    trace = "".join(traceback.format_exception(type(error), error, _own_frames(error)))
    message, trace = (_printable(_without_graph_frames(text)) for text in (_message(error), trace))
    return RankFailure(kind=kind_of(error), message=message, traceback=trace, topic=topic_of(error))


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called. Return instead, or raise an error that says why."
    try:
        return text_of(error).strip() or "(no message)"
    except Exception as failed:
        return f"(its text cannot be had: {type(failed).__name__})"


def _printable(text: str) -> str:
    """Returns a text as it can be printed everywhere: in Unicode, and of a long one both ends."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n ... ({len(text) - 2 * half:,} characters) ...\n{text[-half:]}"


def _without_graph_frames(text: str) -> str:
    """Returns a text without the frames of libraries in which TensorFlow says where a node was made: a page of them."""
    begin, mark, rest = text.partition(_GRAPH_ERROR)
    if not mark:
        return text
    return begin + mark + re.sub(r"\n{3,}", "\n\n", _GRAPH_FRAME.sub(_if_own, rest))


def _if_own(frame: re.Match[str]) -> str:
    is_library = frame[1].startswith((_PACKAGE, "<frozen")) or _LIBRARY.search(frame[1])
    return "" if is_library else frame[0]


def _own_frames(error: BaseException) -> TracebackType | None:
    """Returns an error's traceback without elephant's frames; with those around its last one where that is a fault."""
    trace, entries = error.__traceback__, list[TracebackType]()
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    others = [entry for entry in entries if not entry.tb_frame.f_code.co_filename.startswith(_PACKAGE)]
    if not others:
        return entries[0] if entries else None
    # The text of elephant's errors says all.
    is_told = others[-1] is entries[-1] or isinstance(error, ElephantError)
    own = others if is_told else entries[entries.index(others[0]) :]
    for entry in reversed(own):
        if not entry.tb_frame.f_code.co_filename.endswith(_FILTER):
            trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def main(programs: Mapping[str, Program] = PROGRAMS) -> int:
    """Runs the process and returns its exit code."""
    notice_end_of_parent()
    faulthandler.enable()
    program, folders = programs[sys.argv[1]], [Path(folder) for folder in sys.argv[2:]]
    work_folder = folders[0]
    keep_pulse(work_folder / PULSE_FILE)
    keep_steps(work_folder / STEP_FILE)
    with contextlib.suppress(FileNotFoundError):
        # Only now: what is imported by a relative path is, from where the task stands.
        os.chdir(work_folder / USER_FOLDER)
    parent, code = Parent(folders, taken_input()), 0
    try:
        result = run_rank(program, parent)
        (work_folder / RESULT_FILE).write_bytes(result)
    except BaseException as error:
        # Anything at all that ends the program is told to the task, which tells the driver.
        _leave(work_folder / FAILURE_FILE, failure_of(error))
        code = 1
    parent.await_task()
    return code


def _leave(file: Path, failure: RankFailure) -> None:
    """Writes a failure down for the task; where there is no room for it, as the last that this process prints."""
    try:
        file.write_text(json.dumps(asdict(failure)))
    except OSError as error:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{failure.traceback}\n(could not be written to {file}: {error})\n")


def end(code: int) -> None:
    """Ends the process, at once."""
    for stream in (sys.stdout, sys.stderr):
        # The user's code may have closed it, or put something else, or nothing, in its place.
        with contextlib.suppress(Exception):
            stream.flush()
    remove_generated_code()
    # Not sys.exit: threads of TensorFlow or of a callback must not keep a finished rank, and its GPU, alive.
    os._exit(code)


if __name__ == "__main__":
    end(main())
