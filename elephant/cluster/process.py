"""Starting and watching the process of a rank, from the rank's Spark task.

A rank runs in a process of its own because Spark reuses its Python workers: an
environment variable, a GPU context or a thread pool would reach the next job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from elephant.cluster.exits import EXITED, exit_text
from elephant.cluster.output import Lines, ProcessInput, ProcessOutput
from elephant.cluster.warm_processes import COLD, UNHEARD, ForkedProcess, WarmWorkers, forked_process
from elephant.config import Timeouts
from elephant.data.scratch import WORK_FOLDER, local_folder
from elephant.training.executor import EXECUTOR_VARIABLE, TASK_VARIABLE, executor_id
from elephant.training.forkserver import ForkRequest
from elephant.training.memory import memory_kills
from elephant.training.steps import last_step, make_step_file
from elephant.training.wire import ABANDONED_EXIT_CODE, FAILURE_FILE, PULSE_FILE, RESULT_FILE, STEP_FILE

_MODULE = "elephant.training"
_POLL_S = 0.5
DISMISSED = "elephant.Dismissed"
ENDED = "elephant.ProcessEnded"
_UNHEARD_TEXT = (
    "its process has ended before its work was done, and nobody knows how: the server that it was forked from had "
    "ended before. Both were killed, often by the kernel or the cluster manager, out of memory. Raise "
    "spark.executor.memoryOverhead, or lower what a worker holds, such as batchSize."
)
FROZEN = "elephant.ProcessFrozen"


@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """Why a rank's process ended: its error's class and text, its traceback, its last lines, the step it was in."""

    kind: str
    message: str
    traceback: str
    log_tail: str
    step: int | None = None


class RankProcess:
    """One rank's process and its work folder; leaving the ``with`` block ends and removes both.

    Args:
        program: What it runs, by its name in `elephant.training.program`.
        environment: What `elephant.cluster.rank_environment.process_environment` returned.
        listener_fd: The listening socket that the process inherits; None where it listens to nobody.
        more_fds: Further sockets that it inherits.
        module: Whose program it is; `elephant.training` has those of ranks.
        lines: Where the lines go that it prints; None sends them to the executor's log alone.
        warm: How many processes may wait on this executor that have imported Keras, from which it is forked.
        prefix: What the name of its work folder begins with.
        grace_s: For how long it waits for this process when this one is stopped, before its work or after it.
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
    ) -> None:
        self.work_folder = Path(tempfile.mkdtemp(prefix=prefix, dir=local_folder()))
        self._memory_kills = memory_kills()
        with contextlib.ExitStack() as undoing:
            undoing.callback(shutil.rmtree, self.work_folder, ignore_errors=True)
            # Made here and only touched there: a process that is abandoned must not make its folder anew.
            (self.work_folder / PULSE_FILE).touch()
            make_step_file(self.work_folder / STEP_FILE)
            self._output = ProcessOutput(lines)
            undoing.callback(self._output.close)
            self._input = ProcessInput()
            undoing.callback(self._input.close)
            inherits = (*(() if listener_fd is None else (listener_fd,)), *more_fds)
            own = {WORK_FOLDER: str(self.work_folder), EXECUTOR_VARIABLE: executor_id()}
            environment = {**environment, **own, TASK_VARIABLE: f"{os.getpid()} {grace_s}"}
            self._process = self._started([module, program, str(self.work_folder)], environment, inherits, warm)
            undoing.pop_all()

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

    def kill(self) -> None:
        """Ends the process at once; one that has ended stays as it is."""
        if self.running:
            self._process.kill()

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    @property
    def _result_file(self) -> Path:
        return self.work_folder / RESULT_FILE

    def result(self) -> bytes:
        """Returns what the program of a process that has ended well returned."""
        return self._result_file.read_bytes()

    def wait(self, *, silence_s: float | None = None) -> ProcessFailure | None:
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
            return self._failure(FROZEN, text)
        if code == 0 and self._result_file.exists():
            return None
        if code == ABANDONED_EXIT_CODE:
            return ProcessFailure(kind=DISMISSED, message="the driver ended the run", traceback="", log_tail="")
        report = self.work_folder / FAILURE_FILE
        if not report.exists() and code == UNHEARD:
            return self._failure(ENDED, _UNHEARD_TEXT)
        if not report.exists():
            return self._failure(ENDED, exit_text(code, memory_kills=self._new_memory_kills()))
        try:
            said = json.loads(report.read_text())
        except ValueError:
            place = self.work_folder.parent
            text = f"{EXITED} {code}, and had no room for its error in {place}. Make some; its last lines say it."
            return self._failure(ENDED, text)
        return self._failure(said["kind"], said["message"], traceback=said["traceback"])

    def _failure(self, kind: str, message: str, *, traceback: str = "") -> ProcessFailure:
        return ProcessFailure(
            kind=kind,
            message=message,
            traceback=traceback,
            log_tail=self._output.tail,
            step=last_step(self.work_folder / STEP_FILE),
        )

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
    """Returns where this process works; nothing where that has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
