"""What passes between a Spark task and the process that it started: blocks over its standard input, files back."""

from __future__ import annotations

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

_LENGTH = struct.Struct("!Q")


def write_block(pipe: BinaryIO, block: bytes) -> None:
    """Writes one block; raises BrokenPipeError when the reader is gone."""
    pipe.write(_LENGTH.pack(len(block)))
    pipe.write(block)
    pipe.flush()


def read_block(pipe: BinaryIO) -> bytes | None:
    """Returns the next block, or None when the writer is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    block = pipe.read(size)
    return block if len(block) == size else None
