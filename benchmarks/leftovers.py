"""Processes and files that a session of Spark leaves behind when its driver has ended."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

import psutil

# Of the environment of all processes of a session, with a value of its own.
MARK = "ELEPHANT_BENCHMARK_SESSION"
_WITHIN_S = 30.0


def leftovers(mark: str, files: set[str], temporary: Path | None = None) -> list[str]:
    """Returns what a session has left whose driver has ended: processes, and files in folders for temporary ones.

    Args:
        mark: In the environment of the session's processes.
        files: That were there before.
        temporary: Its own folder for temporary files, where it has one; else that of all, and that of shared memory.
    """
    deadline = time.monotonic() + _WITHIN_S
    while True:
        left = [f"process {one.pid}: {command[:100]}" for one, command in _marked_processes(mark)]
        left += sorted(kept_files(temporary) - files)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _marked_processes(mark: str) -> list[tuple[psutil.Process, str]]:
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get(MARK) == mark and one.status() != psutil.STATUS_ZOMBIE:
                found.append((one, " ".join(one.cmdline())))
    return found


def kept_files(temporary: Path | None = None) -> set[str]:
    """Returns the files of elephant's in folders for temporary ones."""
    folders = [temporary] if temporary is not None else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return {str(path) for folder in folders if folder.is_dir() for path in folder.glob("*elephant*")}
