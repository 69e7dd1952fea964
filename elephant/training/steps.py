"""The step that this process is in, kept where it is found even after the process was killed."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

_NUMBER = struct.Struct("!Q")


class _Record:
    """The file that keeps the number; none until `keep_steps` names one."""

    descriptor: int | None = None


def make_step_file(path: Path) -> None:
    """Makes the file of a process that has begun no step."""
    path.write_bytes(_NUMBER.pack(0))


def keep_steps(path: Path) -> None:
    """Has `begin_step` write to a file from now on.

    Args:
        path: A file that `make_step_file` has made: it is never made anew, so that a folder that is removed
            stays removed.
    """
    with contextlib.suppress(FileNotFoundError):
        _Record.descriptor = os.open(path, os.O_WRONLY)


def begin_step(number: int) -> None:
    """Notes that a step begins.

    Args:
        number: Counted from one over all epochs of the fit.
    """
    if _Record.descriptor is not None:
        # A disk that fails takes away a detail of a message, and no more.
        with contextlib.suppress(OSError):
            os.pwrite(_Record.descriptor, _NUMBER.pack(number), 0)


def last_step(path: Path) -> int | None:
    """Returns the last step that a process has begun; None when it has begun none, or the file is gone."""
    try:
        (number,) = _NUMBER.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return int(number) or None
