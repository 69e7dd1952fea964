"""The collective of two or more ranks: one operation at a time, numbered, checked, with a deadline.

Small arrays are gathered whole on every rank and reduced there in the order of the
ranks; large ones take a route (see `elephant.collective.topology`). Every operation begins
with an exchange between all ranks in which they agree on what they want.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from elephant.collective import ring
from elephant.collective.communicator import Communicator
from elephant.collective.failure_detector import ControlKind, ControlMessage, FailureDetector
from elephant.collective.links import BruckAllgather, RankGroup
from elephant.collective.operation import (
    OPERATIONS,
    AlgorithmThresholds,
    AllreduceAlgorithm,
    Operation,
    ReduceOp,
    check_allgather,
    check_allreduce,
    check_broadcast,
    check_reduce_scatter,
    dimensions,
    is_half,
    name_of,
)
from elephant.collective.shared_memory import SharedMemory, share_memory
from elephant.collective.topology import Topology
from elephant.compression import Codec
from elephant.errors import NetworkError, PeerLostError, ProtocolError
from elephant.net.deadline import Deadline

_MAX_GATHERED_BYTES = 1 << 40

# What allgather exchanges first.
COUNT_BYTES = 8

T = TypeVar("T")


class ProcessGroup(Communicator):
    """A collective of two or more ranks; made by `elephant.collective.bootstrap.form_collective`.

    Args:
        detector: Tells of the other ranks; owned from here on.
        groups: This rank's connections; owned from here on.
        algorithm: Of large arrays; owned from here on.

    Attributes:
        timeout_s: Seconds that an operation may take.
        waited: ``waited_s`` in memory, shape (1,), where a kernel can add to it.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        *,
        detector: FailureDetector,
        groups: Sequence[RankGroup],
        allgather: BruckAllgather,
        algorithm: AllreduceAlgorithm,
        thresholds: AlgorithmThresholds,
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._topology = topology
        self._world_size = len(topology.ring)
        self._detector = detector
        self._groups = groups
        self._allgather = allgather
        self._algorithm = algorithm
        self._thresholds = thresholds
        self.timeout_s = timeout_s
        self._reductions = {op: ReduceOp(op, self._world_size) for op in OPERATIONS}
        self._sequence = 0
        self._network_error: NetworkError | None = None
        self._busy = threading.Lock()
        self._stage: np.ndarray | None = None
        self.waited = np.zeros(1)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def local_rank(self) -> int:
        return self._topology.neighbors(self._rank).index(self._rank)

    @property
    def local_world_size(self) -> int:
        return len(self._topology.neighbors(self._rank))

    @property
    def crosses_hosts(self) -> bool:
        return len(self._topology.hosts) > 1

    @property
    def waited_s(self) -> float:
        return float(self.waited[0])

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        self.waited[0] = seconds

    @property
    def bytes_sent(self) -> int:
        return sum(pair.bytes_sent for group in self._groups for pair in group.pairs.values())

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        check_allreduce(array, op)
        flat, reduction = array.reshape(-1), self._reductions[op]
        encoding = f" by {type(codec).__name__}" if codec is not None else ""

        def reduce(operation: Operation) -> None:
            if self._is_small(flat.nbytes):
                self._reduce_small(flat, reduction, operation)
            elif is_half(flat.dtype):
                self._reduce_staged(flat, reduction, operation)
            else:
                self._agree(operation)
                self._algorithm.allreduce(flat, reduction, codec, operation)

        self._perform(f"allreduce {op} of {dimensions(array)} {name_of(flat.dtype)}{encoding}", reduce)

    def reduce_scatter(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        check_reduce_scatter(array, op)
        reduction = self._reductions[op]
        bounds = ring.segment_bounds(len(array), self._world_size)
        rows = slice(*bounds[self._rank])

        def reduce(operation: Operation) -> np.ndarray:
            values = np.array(array, order="C")
            flat = values.reshape(-1)
            if self._is_small(flat.nbytes):
                self._reduce_small(flat, reduction, operation)
            elif is_half(flat.dtype):
                self._reduce_staged(flat, reduction, operation)
            else:
                self._agree(operation)
                row = flat.size // len(array)
                parts = [(start * row, stop * row) for start, stop in bounds]
                self._algorithm.reduce_scatter(flat, parts, reduction, operation)
            return values[rows].copy()

        return self._perform(f"reduce_scatter {op} of {array.shape} {name_of(array.dtype)}", reduce)

    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        check_allgather(array)
        array = np.ascontiguousarray(array)
        trailing = array.shape[1:]
        row_bytes = array.itemsize * math.prod(trailing)

        def gather(operation: Operation) -> list[np.ndarray]:
            rows = self._gather_counts(len(array), operation)
            if min(rows) < 0 or sum(rows) * row_bytes > _MAX_GATHERED_BYTES:
                raise ProtocolError(f"Expected counts of rows that fit into memory, by rank. Received: {rows}.")
            parts = [np.empty((count, *trailing), array.dtype) for count in rows]
            parts[self._rank][...] = array
            self._fill([_bytes_of(part) for part in parts], operation)
            return parts

        return self._perform(f"allgather of {name_of(array.dtype)} rows of shape {trailing}", gather)

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        check_broadcast(array, root, self._world_size)
        raw = _bytes_of(array)

        def spread(operation: Operation) -> None:
            if self._is_small(len(raw)):
                raw[...] = self._allgather.gather(operation, raw)[root]
            else:
                self._agree(operation)
                self._algorithm.broadcast(raw, root, operation)

        self._perform(f"broadcast of {dimensions(array)} {name_of(array.dtype)} from rank {root}", spread)

    def barrier(self) -> None:
        self._perform("barrier", self._allgather.agree)

    def shared_memory(self, block_bytes: int, turns: int) -> SharedMemory | None:
        """Makes memory that all ranks share, blocks by turn and rank, for what they exchange outside of operations.

        All ranks call it. The memory is the caller's, and may outlive the collective.

        Returns:
            None, on all ranks, where one of them cannot have it.
        """
        memory: SharedMemory | None = None

        def share(operation: Operation) -> None:
            nonlocal memory
            self._allgather.agree(operation)
            memory = share_memory(self._groups[0], block_bytes, operation, turns)
            is_there = self._allgather.gather(operation, np.array([memory is not None], np.uint8))
            if memory is not None and not all(flag[0] for flag in is_there):
                memory.close()
                memory = None

        if self.crosses_hosts:
            return None
        try:
            self._perform(f"memory of {turns} x {block_bytes} bytes for each rank", share)
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        return memory

    @property
    def watch_descriptor(self) -> int:
        """Descriptor that becomes readable when ``look`` has something to see."""
        return self._detector.fileno()

    def look(self, name: str, waited_s: float) -> None:
        """Looks after the other ranks, for one that waits for them outside of operations, but between the same two.

        Args:
            name: What it waits in, for errors.
            waited_s: For how long it has.

        Raises:
            NetworkError: What an operation would raise. The collective is broken on all ranks then.
        """
        if not self._busy.acquire(blocking=False):
            # The thread that is in an operation looks.
            return
        try:
            if self._network_error is not None:
                raise type(self._network_error)(
                    f"The collective is broken since an earlier failure: {self._network_error}"
                )
            deadline = Deadline(self.timeout_s, f"The {name} on rank {self._rank}")
            operation = Operation(self._sequence + 1, name, deadline, waited_s)
            try:
                self._detector.check(operation)
                if waited_s >= self.timeout_s:
                    raise self._detector.absence(operation)
            except NetworkError as error:
                self._fail(error)
                raise
        finally:
            self._busy.release()

    def close(self) -> None:
        with self._busy:
            if self._network_error is None:
                self._network_error = PeerLostError(f"The collective was closed on this rank, rank {self._rank}.")
                self._leave(ControlMessage(ControlKind.CLOSED, self._sequence))

    def abort(self) -> None:
        error = PeerLostError(f"Rank {self._rank} aborted its collective.")
        if self._network_error is None:
            self._detector.interrupt(error, self._sequence)
        # Who is in an operation is woken by the interrupt, and leaves by itself.
        if self._busy.acquire(blocking=False):
            try:
                self._fail(error)
            finally:
                self._busy.release()

    def _perform(self, name: str, body: Callable[[Operation], T]) -> T:
        """Runs an operation, and breaks the collective on all ranks where it fails on this one."""
        deadline, began = Deadline(self.timeout_s, f"The {name} on rank {self._rank}"), time.monotonic()
        if not self._busy.acquire(timeout=deadline.remaining()):
            raise deadline.exceeded("Another thread uses the collective.")
        try:
            if self._network_error is not None:
                raise type(self._network_error)(
                    f"The collective is broken since an earlier failure: {self._network_error}"
                )
            operation = Operation(self._sequence + 1, name, deadline)
            try:
                self._detector.begin(operation)
                with np.errstate(over="ignore", invalid="ignore"):
                    result = body(operation)
            except NetworkError as error:
                self._fail(error)
                raise
            except BaseException as error:
                self._fail(PeerLostError(f"Rank {self._rank} left the {name}: {type(error).__name__}: {error}."))
                raise
            self._sequence += 1
            self.waited_s += time.monotonic() - began
            return result
        finally:
            self._busy.release()

    def _fail(self, error: NetworkError) -> None:
        if self._network_error is None:
            self._network_error = error
            self._leave(ControlMessage.of(error, self._sequence))

    def _leave(self, message: ControlMessage) -> None:
        """Tells the others, and lets go of everything: first the threads, then the connections that they use."""
        self._detector.close(message)
        self._algorithm.close()
        for group in self._groups:
            group.close()

    def _agree(self, operation: Operation) -> None:
        if not self._algorithm.agrees:
            self._allgather.agree(operation)

    def _is_small(self, nbytes: int) -> bool:
        return nbytes * self._world_size <= self._thresholds.small_bytes

    def _reduce_small(self, flat: np.ndarray, op: ReduceOp, operation: Operation) -> None:
        """Reduces a small array in the order of the ranks, on every rank for itself."""
        first, *others = (block.view(flat.dtype) for block in self._allgather.gather(operation, _bytes_of(flat)))
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
        self._agree(operation)
        for start, stop in ring.even_chunks(flat.size, len(self._stage)):
            block = self._stage[: stop - start]
            block[...] = flat[start:stop]
            self._algorithm.allreduce(block, op, None, operation)
            flat[start:stop] = block

    def _gather_counts(self, count: int, operation: Operation) -> list[int]:
        blocks = self._allgather.gather(operation, _bytes_of(np.array([count], np.int64)))
        return [int(block.view(np.int64)[0]) for block in blocks]

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


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8)
