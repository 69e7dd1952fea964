"""The process of one rank: ``python -m elephant.training PROGRAM WORK_FOLDER``.

It is started by the rank's Spark task with the environment (devices, threads)
already set, and gets three blocks through its standard input: the job; variables of the environment
that the task knew only later, its device above all; its own place in the run (a `Gang` or an `Assignment`).
It runs its program (`elephant.training.program`) and ends when that has ended, or
when the task that started it is gone: its standard input then closes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from elephant.errors import kind_of
from elephant.training.life import keep_pulse, notice_end_of_parent, remove_generated_code
from elephant.training.program import PROGRAMS, Program
from elephant.training.steps import keep_steps
from elephant.training.wire import ABANDONED_EXIT_CODE, FAILURE_FILE, PULSE_FILE, RESULT_FILE, STEP_FILE, read_block

_PACKAGE = str(Path(__file__).resolve().parent.parent)


class Parent:
    """Reads what the Spark task sends, and ends this process when the task is gone.

    Args:
        work_folder: What to remove then: nobody else would.
    """

    def __init__(self, work_folder: Path) -> None:
        self._work_folder = work_folder
        self.job: Future[bytes] = Future()
        self.environment: Future[bytes] = Future()
        self.place: Future[bytes] = Future()
        threading.Thread(target=self._read, name="elephant-parent", daemon=True).start()

    def _read(self) -> None:
        pipe = sys.stdin.buffer
        for future in (self.job, self.environment, self.place):
            block = read_block(pipe)
            if block is None:
                self.abandon()
            else:
                future.set_result(block)
        pipe.read()
        self.abandon()

    def abandon(self) -> None:
        """Ends this process at once, and leaves nothing behind."""
        shutil.rmtree(self._work_folder, ignore_errors=True)
        remove_generated_code()
        os._exit(ABANDONED_EXIT_CODE)


def run_rank(program: Program, parent: Parent) -> bytes:
    """Runs this rank from the first block to the last event; returns what its program returns."""
    # Before anything imports TensorFlow, which the job may do as well.
    os.environ.update(json.loads(parent.environment.result()))
    program.prepare()
    job = program.load(parent.job.result())
    return program.start(job, parent.place.result(), parent.abandon)


def describe(error: BaseException) -> dict[str, str]:
    """Returns a failure as the Spark task reads it."""
    return {
        "kind": kind_of(error),
        "message": _message(error),
        "traceback": "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__))),
    }


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called. Return from the function instead."
    return str(error).strip() or "(no message)"


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from its first frame outside of elephant on: the user's code, where there is any."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        own = own.tb_next
    return own or trace


def main(programs: Mapping[str, Program] = PROGRAMS) -> int:
    """Runs the process and returns its exit code.

    Args:
        programs: What it may be asked for, by name.
    """
    notice_end_of_parent()
    faulthandler.enable()
    program, work_folder = programs[sys.argv[1]], Path(sys.argv[2])
    keep_pulse(work_folder / PULSE_FILE)
    keep_steps(work_folder / STEP_FILE)
    parent = Parent(work_folder)
    try:
        result = run_rank(program, parent)
        (work_folder / RESULT_FILE).write_bytes(result)
    except BaseException as error:
        # Anything at all that ends the program is told to the task, which tells the driver.
        (work_folder / FAILURE_FILE).write_text(json.dumps(describe(error)))
        return 1
    return 0


def end(code: int) -> None:
    """Ends the process, at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    remove_generated_code()
    # Not sys.exit: threads of TensorFlow or of a callback must not keep a finished rank, and its GPU, alive.
    os._exit(code)


if __name__ == "__main__":
    end(main())
