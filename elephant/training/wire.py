"""What passes between a Spark task and the process that it started: blocks over its standard input, files back."""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

# What the process leaves in its work folder, one of the two: why it failed, or what it returns.
FAILURE_FILE = "failure.json"
RESULT_FILE = "result"
# What it touches as long as it is not frozen.
PULSE_FILE = "pulse"
# What it writes the step to that it is in.
STEP_FILE = "step"
ABANDONED_EXIT_CODE = 113
# Set in the environment of a process that was forked.
FORKED = "ELEPHANT_FORKED"

# This process' own inherited descriptors, by what the Spark task calls them. Only a forked process has others.
DESCRIPTORS: dict[int, int] = {}

_LENGTH = struct.Struct("!Q")


def is_forked() -> bool:
    """Returns whether this process was forked from a server that had imported Keras."""
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
