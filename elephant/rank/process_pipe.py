"""Pipe between a Spark task and its training process: blocks over standard input, files back."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import BinaryIO

_NUMBER = struct.Struct("!Q")

# What the process leaves in its work folder, one of the two: why it failed, or what it returns.
FAILURE_FILE = "failure.json"
RESULT_FILE = "result"
# What it touches as long as it is not frozen.
PULSE_FILE = "pulse"
# What it writes the step to that it is in.
STEP_FILE = "step"
# Where it stands, for what the user's code writes to relative paths; it is not there where the driver's folder is.
USER_FOLDER = "files"
ABANDONED_EXIT_CODE = 113
# Set in the environment of a process that was forked.
FORKED = "ELEPHANT_FORKED"
# Set for a process that waits for a loss, and has the time to prepare all that it can.
SPARE = "ELEPHANT_SPARE"
# This process' own inherited descriptors, by what the Spark task calls them. Only a forked process has others.
DESCRIPTORS: dict[int, int] = {}
_LENGTH = struct.Struct("!Q")


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
    """Notes that a step begins."""
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


def is_forked() -> bool:
    """Returns whether this process was forked from a server, which had imported what such processes need."""
    return FORKED in os.environ


def inherited(descriptor: int) -> int:
    """Returns this process' own descriptor, by what the Spark task calls it."""
    return DESCRIPTORS.get(descriptor, descriptor)


def framed(block: bytes) -> bytes:
    """Returns one block as it crosses the pipe."""
    return _LENGTH.pack(len(block)) + block


def read_block(pipe: BinaryIO) -> bytes | None:
    """Returns the next block, or None when the writer is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    block = pipe.read(size)
    return block if len(block) == size else None
