"""Data plane of a group: the ways that arrays go between its members, once an operation has its number and deadline.

Small arrays are gathered whole on every rank and reduced there in the order of the ranks; large ones take a route
(see `elephant.collective.topology`). Either way, an operation begins with an exchange between all members in which they
agree on what they want.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from elephant.collective import ring
from elephant.collective.generation import GroupBuilder
from elephant.collective.links import BruckAllgather, RankGroup, swap
from elephant.collective.operation import (
    OPERATIONS,
    AlgorithmThresholds,
    AllreduceAlgorithm,
    Operation,
    ReduceOp,
    is_half,
)
from elephant.collective.shared_memory import SharedMemory, share_memory
from elephant.compression import Codec
from elephant.errors import ProtocolError
from elephant.net.frames import raw_view

_MAX_GATHERED_BYTES = 1 << 40

# What allgather exchanges first.
COUNT_BYTES = 8


class DataPlane:
    """Connections of a group, and what goes over them.

    Args:
        rank: This rank in the group.
        ranks: The members' numbers in the run, by rank.
        number: The group's.
        builder: Adds connections where an operation needs more.
        groups: This rank's connections, by the names of their groups; owned from here on. "world" has all ranks.
        algorithm: Of large arrays; owned from here on.
    """

    def __init__(
        self,
        rank: int,
        *,
        ranks: tuple[int, ...],
        number: int,
        builder: GroupBuilder,
        groups: Mapping[str, RankGroup],
        allgather: BruckAllgather,
        algorithm: AllreduceAlgorithm,
        thresholds: AlgorithmThresholds,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._number = number
        self._builder = builder
        self._groups = groups
        self._allgather = allgather
        self._algorithm = algorithm
        self._thresholds = thresholds
        self._world_size = len(ranks)
        self._reductions = {op: ReduceOp(op, self._world_size) for op in OPERATIONS}
        self._stage: np.ndarray | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that were handed to its connections so far."""
        return sum(pair.bytes_sent for group in self._groups.values() for pair in list(group.pairs.values()))

    def close(self) -> None:
        """Lets go of everything: first the threads, then the connections that they use."""
        self._algorithm.close()
        for group in self._groups.values():
            group.close()

    def renew(self, operation: Operation) -> None:
        """Makes connections again that have carried what their keys are good for; before each operation."""
        for name, group in self._groups.items():
            for distance, pair in group.pairs.items():
                if pair.target_is_worn or pair.source_is_worn:
                    self._builder.renew(group, distance, f"{self._number}/{name}", self._ranks, operation)

    def agree(self, operation: Operation) -> None:
        """Returns when all members have asked for this operation."""
        self._allgather.agree(operation)

    def allreduce(self, flat: np.ndarray, op: str, codec: Codec | None, operation: Operation) -> None:
        """Reduces a flat array of all members in place."""
        if not self._reduce_short(flat, self._reductions[op], operation):
            self._begin(operation)
            self._algorithm.allreduce(flat, self._reductions[op], codec, operation)

    def reduce_scatter(
        self, flat: np.ndarray, bounds: Sequence[tuple[int, int]], op: str, operation: Operation
    ) -> None:
        """Reduces a flat array of all members so that this rank's part of it is complete in place."""
        if not self._reduce_short(flat, self._reductions[op], operation):
            self._begin(operation)
            self._algorithm.reduce_scatter(flat, bounds, self._reductions[op], operation)

    def allgather(self, array: np.ndarray, operation: Operation) -> list[np.ndarray]:
        """Returns every member's rows, of which each may have another number."""
        blocks = self._allgather.gather(operation, bytes_of(np.array([len(array)], np.int64)))
        rows = [int(block.view(np.int64)[0]) for block in blocks]
        _require_fitting(rows, array.itemsize * math.prod(array.shape[1:]))
        parts = [np.empty((count, *array.shape[1:]), array.dtype) for count in rows]
        parts[self._rank][...] = array
        self._fill([bytes_of(part) for part in parts], operation)
        return parts

    def gather_alike(self, values: np.ndarray, operation: Operation) -> list[np.ndarray]:
        """Returns every member's values, of the same length on all."""
        if self._is_small(values.nbytes):
            blocks = self._allgather.gather(operation, bytes_of(values))
            return [block.copy().view(values.dtype) for block in blocks]
        self._begin(operation)
        parts = [values.copy() if rank == self._rank else np.empty_like(values) for rank in range(self._world_size)]
        self._algorithm.allgather([bytes_of(part) for part in parts], operation)
        return parts

    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        """Copies the root's bytes to all members."""
        if self._is_small(len(raw)):
            raw[...] = self._allgather.gather(operation, raw)[root]
        else:
            self._begin(operation)
            self._algorithm.broadcast(raw, root, operation)

    def alltoall(self, outgoing: Sequence[np.ndarray], operation: Operation) -> list[np.ndarray]:
        """Sends each member the rows for it, and returns those that came, by rank."""
        own, trailing = np.array([len(part) for part in outgoing], np.int64), outgoing[0].shape[1:]
        rows = [int(counts[self._rank]) for counts in self.gather_alike(own, operation)]
        _require_fitting(rows, outgoing[0].itemsize * math.prod(trailing))
        incoming = [np.empty((count, *trailing), outgoing[0].dtype) for count in rows]
        incoming[self._rank][...] = outgoing[self._rank]
        world = self._groups["world"]
        for distance in range(1, world.size):
            if distance not in world.pairs:
                self._builder.connect(world, distance, f"{self._number}/world", self._ranks, operation)
            before, after = world.neighbors(distance)
            swap(world.pairs[distance], raw_view(outgoing[after]), raw_view(incoming[before]), operation)
        return incoming

    def share_memory(self, block_bytes: int, turns: int, operation: Operation) -> SharedMemory | None:
        """Makes memory that all members, on one host, share; None on all where one of them cannot have it."""
        self._allgather.agree(operation)
        memory = share_memory(self._groups["world"], block_bytes, operation, turns)
        try:
            is_there = self._allgather.gather(operation, np.array([memory is not None], np.uint8))
            are_all_there = all(flag[0] for flag in is_there)
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        if memory is not None and not are_all_there:
            memory.close()
            return None
        return memory

    def _begin(self, operation: Operation) -> None:
        if not self._algorithm.agrees:
            self._allgather.agree(operation)

    def _is_small(self, nbytes: int) -> bool:
        return nbytes * self._world_size <= self._thresholds.small_bytes

    def _reduce_short(self, flat: np.ndarray, op: ReduceOp, operation: Operation) -> bool:
        """Reduces a small array, or one of 16-bit floats; returns whether it was one."""
        if self._is_small(flat.nbytes):
            self._reduce_small(flat, op, operation)
        elif is_half(flat.dtype):
            self._reduce_staged(flat, op, operation)
        else:
            return False
        return True

    def _reduce_small(self, flat: np.ndarray, op: ReduceOp, operation: Operation) -> None:
        """Reduces a small array in the order of the ranks, on every rank for itself."""
        first, *others = (block.view(flat.dtype) for block in self._allgather.gather(operation, bytes_of(flat)))
        total = np.empty(flat.size, np.float32) if is_half(flat.dtype) else flat
        if total is not flat:
            first, *others = (block.astype(np.float32) for block in (first, *others))
        op.combine(first, others[0], total)
        for block in others[1:]:
            op.combine(total, block, total)
        op.finish(total)
        if total is not flat:
            flat[...] = total

    def _reduce_staged(self, flat: np.ndarray, op: ReduceOp, operation: Operation) -> None:
        """Reduces 16-bit floats in float32, block by block, and rounds once."""
        if self._stage is None:
            self._stage = np.empty(self._thresholds.staged_bytes // 4, np.float32)
        self._begin(operation)
        for start, stop in ring.even_chunks(flat.size, len(self._stage)):
            block = self._stage[: stop - start]
            block[...] = flat[start:stop]
            self._algorithm.allreduce(block, op, None, operation)
            flat[start:stop] = block

    def _fill(self, parts: Sequence[np.ndarray], operation: Operation) -> None:
        """Brings every rank's bytes to every rank; all know their lengths."""
        longest = max(map(len, parts))
        if self._is_small(longest):
            block = np.zeros(longest, np.uint8)
            block[: len(parts[self._rank])] = parts[self._rank]
            for part, gathered in zip(parts, self._allgather.gather(operation, block), strict=True):
                part[...] = gathered[: len(part)]
        else:
            self._algorithm.allgather(parts, operation)


def bytes_of(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8)


def _require_fitting(rows: Sequence[int], row_bytes: int) -> None:
    """Raises ProtocolError where ranks have told of more rows than there can be."""
    if min(rows) < 0 or sum(rows) * row_bytes > _MAX_GATHERED_BYTES:
        raise ProtocolError(f"Expected counts of rows that fit into memory, by rank. Received: {rows}.")
