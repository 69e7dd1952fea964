"""Blocks of bytes between a Spark task and the training process that it started, over the process' standard input."""

from __future__ import annotations

import struct
from typing import BinaryIO

FAILURE_FILE = "failure.json"
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
