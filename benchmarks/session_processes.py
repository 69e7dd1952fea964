"""All processes of a session of Spark on this machine, those included that nobody's child is: kinds, time, memory.

An executor's fork server and what it forks are no descendants of the driver. They name the executor's process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator

import psutil

_SERVER = "elephant.task.forkserver"
# Of the server's command line, behind the name of its module.
_EXECUTOR = 5
_SAMPLE_S = 0.1
KINDS = ("training", "fork_servers", "python_workers", "executor_jvms", "driver_jvm", "driver")


def session_processes() -> Iterator[psutil.Process]:
    """Yields this process, all that descend from it, their executors' fork servers and the processes of these."""
    me = psutil.Process()
    below = [me, *me.children(recursive=True)]
    yield from below
    for server in fork_servers({process.pid for process in below}):
        yield server
        with contextlib.suppress(psutil.NoSuchProcess):
            yield from server.children(recursive=True)


def fork_servers(executors: set[int]) -> list[psutil.Process]:
    """Returns the fork servers that belong to one of these processes."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ValueError, IndexError):
            command = process.cmdline()
            # What a server has forked has the server's command line.
            is_server = _SERVER in command and _SERVER not in process.parent().cmdline()
            if is_server and int(command[command.index(_SERVER) + _EXECUTOR]) in executors:
                found.append(process)
    return found


def executor_of(process: psutil.Process) -> int | None:
    """Returns the id of the executor's process that a training process works for; None where none is known."""
    with contextlib.suppress(psutil.Error, ValueError, IndexError):
        command = process.cmdline()
        if _SERVER in command:
            return int(command[command.index(_SERVER) + _EXECUTOR])
        return next((one.pid for one in process.parents() if is_of(one, "executor_jvms")), None)
    return None


def cpu_by_part() -> Counter[str]:
    """Returns the processor seconds of a session so far, by the part of a fit; processes that have ended included."""
    seconds: Counter[str] = Counter()
    for process in session_processes():
        try:
            part, times = part_of(process), process.cpu_times()
        except psutil.NoSuchProcess:
            # It has ended since it was listed; its parent, read before, counts it from the next reading on.
            continue
        seconds[part] += times.user + times.system
        # What has ended below Spark's Python workers are training processes.
        seconds["training" if part == "python_workers" else part] += times.children_user + times.children_system
    return seconds


def part_of(process: psutil.Process) -> str:
    """Returns which part of a fit a process is."""
    command = " ".join(process.cmdline())
    if "elephant.rank" in command:
        return "training"
    if "pyspark.daemon" in command or "pyspark.worker" in command:
        return "python_workers"
    if "CoarseGrainedExecutorBackend" in command:
        return "executor_jvms"
    return "driver" if process.pid == os.getpid() else "driver_jvm"


def is_of(process: psutil.Process, kind: str) -> bool:
    """Returns whether a process of the session is of a kind."""
    try:
        if _SERVER not in process.cmdline():
            return part_of(process) == kind
        # What a server has forked has the server's command line.
        parent = process.parent()
        is_forked = parent is not None and _SERVER in parent.cmdline()
        return kind == ("training" if is_forked else "fork_servers")
    except psutil.Error:
        return False


class MemoryWatch:
    """Memory of a session's processes while the block runs.

    Attributes:
        mib: The most that any one process of a kind has had resident, without shared pages, in MiB by kind.
    """

    def __init__(self) -> None:
        self.mib: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memory-watch")

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while True:
            for process in session_processes():
                with contextlib.suppress(psutil.Error):
                    memory, kind = process.memory_info(), next((one for one in KINDS if is_of(process, one)), None)
                    if kind is None:
                        # It has ended meanwhile.
                        continue
                    self.mib[kind] = max(self.mib[kind], (memory.rss - memory.shared) / 2**20)
            if self._ended.wait(_SAMPLE_S):
                return
