"""Starting and watching the process of a rank, from the rank's Spark task.

A rank runs in a process of its own because Spark reuses its Python workers: an
environment variable, a GPU context or a thread pool would reach the next job.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from elephant.cluster.exits import exit_text
from elephant.cluster.memory_kills import memory_kills
from elephant.cluster.output import Lines, ProcessOutput
from elephant.training.steps import last_step, make_step_file
from elephant.training.wire import ABANDONED_EXIT_CODE, FAILURE_FILE, PULSE_FILE, RESULT_FILE, STEP_FILE, write_block

_POLL_S = 0.5
# Spark's archive of what PySpark talks to Java with, and its version.
_PY4J = re.compile(r"py4j-(.+)-src\.zip")
DISMISSED = "elephant.Dismissed"
ENDED = "elephant.ProcessEnded"
FROZEN = "elephant.ProcessFrozen"


@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """Why a rank's process ended: its error's class and text, its traceback, its last lines, the step it was in."""

    kind: str
    message: str
    traceback: str
    log_tail: str
    step: int | None = None


def local_folder() -> str:
    """Returns where this executor keeps temporary data: Spark's local folder, which Spark cleans, or the system's."""
    for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if folder and os.access(folder, os.W_OK):
            return folder
    return tempfile.gettempdir()


def process_environment(
    *, threads: int, devices: Sequence[str], backend: str | None, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the environment of a rank's process, set before anything imports Keras.

    Args:
        threads: Threads to compute with.
        devices: GPU addresses that Spark gave to the task; none hides all GPUs.
        backend: The Keras backend; None leaves it to Keras.
        more: Variables of the user's; they win.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(_import_path()),
        "PYTHONUNBUFFERED": "1",
        **({} if backend is None else {"KERAS_BACKEND": backend}),
        "CUDA_VISIBLE_DEVICES": ",".join(devices) if devices else "-1",
        "OMP_NUM_THREADS": str(threads),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        # On one core, a second thread only takes turns with the first.
        "TF_NUM_INTEROP_THREADS": str(min(threads, 2)),
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        **(more or {}),
    }


def _import_path() -> list[str]:
    """Returns where a rank's process looks for modules: where this one does, but not in archives that it can spare.

    Spark puts PySpark as an archive before what is installed. Imported from there all of it is compiled, which
    takes every process half a second as soon as its job has a function or a class of the user's main script.
    """
    return [place for place in sys.path if place and not _is_spare(place)]


def _is_spare(place: str) -> bool:
    """Returns whether a place is one of Spark's archives, and the very same version is installed."""
    name, pyspark = Path(place).name, sys.modules.get("pyspark")
    py4j = _PY4J.fullmatch(name)
    if py4j is not None:
        return _is_installed("py4j", py4j[1])
    in_use = name == "pyspark.zip" and pyspark is not None and str(pyspark.__file__).startswith(place)
    return in_use and _is_installed("pyspark", getattr(pyspark, "__version__", ""))


def _is_installed(distribution: str, version: str) -> bool:
    """Returns whether a package is installed in this version."""
    try:
        return importlib.metadata.version(distribution) == version
    except importlib.metadata.PackageNotFoundError:
        return False


class RankProcess:
    """One rank's process and its work folder; leaving the ``with`` block ends and removes both.

    Args:
        program: What it runs, by its name in `elephant.training.program`.
        environment: What `process_environment` returned.
        listener_fd: The listening socket that the process inherits; None where it listens to nobody.
        more_fds: Further sockets that it inherits.
        module: Whose program it is; `elephant.training` has those of ranks.
        lines: Where the lines go that it prints; None sends them to the executor's log alone.
    """

    def __init__(
        self,
        program: str,
        environment: Mapping[str, str],
        *,
        listener_fd: int | None = None,
        more_fds: Sequence[int] = (),
        module: str = "elephant.training",
        lines: Lines | None = None,
    ) -> None:
        self.work_folder = Path(tempfile.mkdtemp(prefix="elephant-", dir=local_folder()))
        # Made here and only touched there: a process that is abandoned must not make its folder anew.
        (self.work_folder / PULSE_FILE).touch()
        make_step_file(self.work_folder / STEP_FILE)
        self._memory_kills = memory_kills()
        self._output = ProcessOutput(lines)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, program, str(self.work_folder)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=self._output.descriptor,
                stderr=subprocess.STDOUT,
                pass_fds=(*(() if listener_fd is None else (listener_fd,)), *more_fds),
            )
        except OSError:
            self._output.close()
            shutil.rmtree(self.work_folder, ignore_errors=True)
            raise
        self._output.begin()

    def send(self, block: bytes) -> None:
        """Hands the process one block. A process that has ended is noticed by `wait`, which knows why."""
        try:
            write_block(cast(BinaryIO, self._process.stdin), block)
        except BrokenPipeError:
            return

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
        if frozen:
            text = f"its process was frozen: it gave no sign of life for {silence_s:g} s, and was killed"
            return self._failure(FROZEN, text)
        if code == 0 and self._result_file.exists():
            return None
        if code == ABANDONED_EXIT_CODE:
            return ProcessFailure(kind=DISMISSED, message="the driver ended the run", traceback="", log_tail="")
        report = self.work_folder / FAILURE_FILE
        if report.exists():
            said = json.loads(report.read_text())
            return self._failure(said["kind"], said["message"], traceback=said["traceback"])
        return self._failure(ENDED, exit_text(code, memory_kills=self._new_memory_kills()))

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
        if self.running:
            self._process.kill()
        self._process.wait()
        self._output.close()
        if self._process.stdin is not None:
            _close_quietly(cast(BinaryIO, self._process.stdin))
        shutil.rmtree(self.work_folder, ignore_errors=True)


def _close_quietly(pipe: BinaryIO) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return
