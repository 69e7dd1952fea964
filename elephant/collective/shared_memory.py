"""Shared memory: segments that the ranks of one host map, and the allreduce over them.

The first of them makes it and passes its descriptor on over their Unix sockets. Without
a name nothing can be left behind, however the processes end.

In each block, every rank writes its values where the others can read them, reduces the
segment that is its own from everybody's memory, in the order of the ranks, and copies
the segments of the others out. While block k is reduced, block k+1 is written and the
result of block k-1 copied; so one synchronization per block is enough. The ranks
synchronize by messages, and never spin: on a busy machine a rank that waits must leave
the core to one that works.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from elephant.collective import ring
from elephant.collective.links import BruckAllgather, RankGroup
from elephant.collective.operation import AllreduceAlgorithm, Bounds, Operation, ReduceOp
from elephant.compression import Codec

# A rank may still read block k-2 while another one writes block k.
TURNS = 3

# What a rank does with one block: its number in the operation, and the memory of all ranks for it.
Step = Callable[[int, list[np.ndarray]], None]


class SharedMemory:
    """Blocks of memory, by turn and by place of the rank that writes them.

    Args:
        descriptor: The file, of `memory_bytes`; closed here.
    """

    def __init__(self, descriptor: int, size: int, block_bytes: int, turns: int = TURNS) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            length = memory_bytes(size, block_bytes, turns)
            # A mapping beyond the file's end would kill the process that reads it.
            if os.fstat(descriptor).st_size != length:
                raise OSError(f"expected shared memory of {length} bytes, received {os.fstat(descriptor).st_size}")
            self._mapping = mmap.mmap(descriptor, length)
        blocks = np.frombuffer(self._mapping, np.uint8).reshape(turns, size, block_bytes)
        self._blocks = [[blocks[turn, place] for place in range(size)] for turn in range(turns)]

    def blocks(self, turn: int) -> list[np.ndarray]:
        """Returns the blocks of one turn, by place; uint8."""
        return self._blocks[turn % len(self._blocks)]

    def close(self) -> None:
        """Lets the memory go."""
        self._blocks.clear()
        # A traceback may still hold a view: then the mapping goes with it.
        with contextlib.suppress(BufferError):
            self._mapping.close()


def memory_bytes(size: int, block_bytes: int, turns: int = TURNS) -> int:
    """Returns how many bytes ``size`` ranks share."""
    return turns * size * block_bytes


def share_memory(group: RankGroup, block_bytes: int, operation: Operation, turns: int = TURNS) -> SharedMemory | None:
    """Makes memory that all members of a group on one host share; None where this member cannot have it.

    Raises:
        NetworkError: A rank failed, is gone, or did not arrive in time.
    """
    if group.position == 0:
        descriptor = _new_file(memory_bytes(group.size, block_bytes, turns))
    else:
        descriptor = _receive(group, operation)
    try:
        if group.position + 1 < group.size:
            _pass_on(group, descriptor)
        return None if descriptor is None else SharedMemory(os.dup(descriptor), group.size, block_bytes, turns)
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


def _pass_on(group: RankGroup, descriptor: int | None) -> None:
    """Sends a descriptor, or word that there is none, which a connection that nothing travels on has room for."""
    target = group.pairs[1].target
    if descriptor is None:
        target.send(b"0")
    else:
        # Ranks of a host meet over Unix sockets.
        socket.send_fds(cast(socket.socket, target), [b"1"], [descriptor])


def _receive(group: RankGroup, operation: Operation) -> int | None:
    pair = group.pairs[1]
    while True:
        pair.wait(operation, reading=True, writing=False)
        try:
            word, descriptors, _, _ = socket.recv_fds(cast(socket.socket, pair.source), 1, 1)
        except (BlockingIOError, InterruptedError):
            continue
        except OSError:
            word, descriptors = b"", []
        if not word:
            pair.detector.reason(pair.source_rank, operation)
        return descriptors[0] if descriptors else None


class HostGroup(AllreduceAlgorithm):
    """Operations of the ranks of one host, by their places on it, where codecs have nothing to encode.

    Each begins with an agreement of these ranks.

    Args:
        memory: What they share; owned from here on.
    """

    agrees = True

    def __init__(
        self, memory: SharedMemory, allgather: BruckAllgather, *, position: int, size: int, block_bytes: int
    ) -> None:
        self._memory = memory
        self._allgather = allgather
        self._position = position
        self._size = size
        self._block_bytes = block_bytes
        # Blocks since the beginning, the same on every rank: an operation may begin while a rank still
        # copies the last block of the one before.
        self._turn = 0

    def allreduce(
        self,
        flat: np.ndarray,
        op: ReduceOp,
        codec: Codec | None,
        operation: Operation,
        *,
        wanted: Bounds | None = None,
        final: bool = True,
    ) -> None:
        """Reduces a flat array of all ranks, in place.

        Args:
            wanted: The indices that this rank needs; the others are undefined then. All when None.
            final: Whether these are all ranks of the run.
        """
        first, last = (0, flat.size) if wanted is None else wanted
        blocks = ring.even_chunks(flat.size, self._block_bytes // flat.itemsize)
        bounds = [ring.segment_bounds(stop - start, self._size) for start, stop in blocks]

        def write(index: int, memory: list[np.ndarray]) -> None:
            values, target = flat[slice(*blocks[index])], memory[self._position].view(flat.dtype)
            start, stop = bounds[index][self._position]
            target[:start] = values[:start]
            target[stop : len(values)] = values[stop:]

        def reduce(index: int, memory: list[np.ndarray]) -> None:
            own = slice(*bounds[index][self._position])
            parts = [block.view(flat.dtype)[own] for block in memory]
            result, parts[self._position] = parts[self._position], flat[slice(*blocks[index])][own]
            op.combine(parts[0], parts[1], result)
            for part in parts[2:]:
                op.combine(result, part, result)
            if final:
                op.finish(result)

        def copy(index: int, memory: list[np.ndarray]) -> None:
            begin = blocks[index][0]
            for (start, stop), block in zip(bounds[index], memory, strict=True):
                start, stop = max(start, first - begin), min(stop, last - begin)
                if start < stop:
                    flat[begin + start : begin + stop] = block.view(flat.dtype)[start:stop]

        self._run(len(blocks), write, reduce, copy, operation)

    def reduce_scatter(self, flat: np.ndarray, bounds: Sequence[Bounds], op: ReduceOp, operation: Operation) -> None:
        self.allreduce(flat, op, None, operation, wanted=bounds[self._position])

    def allgather(self, blocks: Sequence[np.ndarray], operation: Operation) -> None:
        count = max(-(-len(block) // self._block_bytes) for block in blocks)

        def part(place: int, index: int) -> np.ndarray:
            return blocks[place][index * self._block_bytes : (index + 1) * self._block_bytes]

        def write(index: int, memory: list[np.ndarray]) -> None:
            own = part(self._position, index)
            memory[self._position][: len(own)] = own

        def copy(index: int, memory: list[np.ndarray]) -> None:
            for place, block in enumerate(memory):
                if place != self._position:
                    target = part(place, index)
                    target[...] = block[: len(target)]

        self._run(count, write, None, copy, operation)

    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        parts = [raw[start:stop] for start, stop in ring.chunks(0, len(raw), self._block_bytes)]

        def write(index: int, memory: list[np.ndarray]) -> None:
            if self._position == root:
                memory[root][: len(parts[index])] = parts[index]

        def copy(index: int, memory: list[np.ndarray]) -> None:
            if self._position != root:
                parts[index][...] = memory[root][: len(parts[index])]

        self._run(len(parts), write, None, copy, operation)

    def close(self) -> None:
        self._memory.close()

    def _run(self, count: int, write: Step, reduce: Step | None, copy: Step, operation: Operation) -> None:
        """Takes all ranks through the blocks, in step.

        Between two synchronizations, a rank writes block k+1, reduces block k and copies block k-1 (block k where
        there is nothing to reduce). So what is written over is block k-2, which all had copied before the last one.
        """
        turn, self._turn = self._turn, self._turn + count
        behind = 0 if reduce is None else 1
        # No block is kept in a variable: the traceback of an error would keep the memory from being let go.
        write(0, self._memory.blocks(turn))
        self._allgather.agree(operation)
        for index in range(count):
            if index + 1 < count:
                write(index + 1, self._memory.blocks(turn + index + 1))
            if reduce is not None:
                reduce(index, self._memory.blocks(turn + index))
            if index >= behind:
                copy(index - behind, self._memory.blocks(turn + index - behind))
            if behind or index + 1 < count:
                self._allgather.agree(operation)
        if behind:
            copy(count - 1, self._memory.blocks(turn + count - 1))
