"""Memory that the ranks of one host share: one file without a name, which all map.

The first of them makes it and passes its descriptor on over their Unix sockets. Without
a name nothing can be left behind, however the processes end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket

import numpy as np

from elephant.collective.group import Group
from elephant.collective.operation import Operation

# A rank may still read block k-2 while another one writes block k.
TURNS = 3


class SharedMemory:
    """Blocks of memory, by turn and by place of the rank that writes them.

    Args:
        descriptor: The file, of ``length`` bytes; closed here.
        size: How many ranks share it.
        block_bytes: Length of a block.
    """

    def __init__(self, descriptor: int, size: int, block_bytes: int) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            length = memory_bytes(size, block_bytes)
            # A mapping beyond the file's end would kill the process that reads it.
            if os.fstat(descriptor).st_size != length:
                raise OSError(f"expected shared memory of {length} bytes, received {os.fstat(descriptor).st_size}")
            self._mapping = mmap.mmap(descriptor, length)
        blocks = np.frombuffer(self._mapping, np.uint8).reshape(TURNS, size, block_bytes)
        self._blocks = [[blocks[turn, place] for place in range(size)] for turn in range(TURNS)]

    def blocks(self, turn: int) -> list[np.ndarray]:
        """Returns the blocks of one turn, by place; uint8."""
        return self._blocks[turn % TURNS]

    def close(self) -> None:
        """Lets the memory go."""
        self._blocks.clear()
        # A traceback may still hold a view: then the mapping goes with it.
        with contextlib.suppress(BufferError):
            self._mapping.close()


def memory_bytes(size: int, block_bytes: int) -> int:
    """Returns how many bytes ``size`` ranks share."""
    return TURNS * size * block_bytes


def share_memory(group: Group, block_bytes: int, operation: Operation) -> SharedMemory | None:
    """Makes memory that all members of a group on one host share; None where this member cannot have it.

    Args:
        group: The members, connected by Unix sockets.
        block_bytes: Length of a block.
        operation: Whose deadline it is.

    Raises:
        NetworkError: A rank failed, is gone, or did not arrive in time.
    """
    if group.position == 0:
        descriptor = _new_file(memory_bytes(group.size, block_bytes))
    else:
        descriptor = _receive(group, operation)
    try:
        if group.position + 1 < group.size:
            _pass_on(group, descriptor)
        return None if descriptor is None else SharedMemory(os.dup(descriptor), group.size, block_bytes)
    except (OSError, ValueError):
        return None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _new_file(length: int) -> int | None:
    """Returns the descriptor of a file whose memory is taken already, or None where it cannot be had."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("elephant")
    try:
        os.posix_fallocate(descriptor, 0, length)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _pass_on(group: Group, descriptor: int | None) -> None:
    """Sends a descriptor, or word that there is none, which a new connection always has room for."""
    target = group.pairs[1].target
    if descriptor is None:
        target.send(b"0")
    else:
        socket.send_fds(target, [b"1"], [descriptor])


def _receive(group: Group, operation: Operation) -> int | None:
    pair = group.pairs[1]
    while True:
        pair.wait(operation, reading=True, writing=False)
        try:
            word, descriptors, _, _ = socket.recv_fds(pair.source, 1, 1)
        except (BlockingIOError, InterruptedError):
            continue
        except OSError:
            word, descriptors = b"", []
        if not word:
            pair.watch.reason(pair.source_rank, operation)
        return descriptors[0] if descriptors else None
