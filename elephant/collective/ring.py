"""A ring of TCP connections: each rank sends to its right neighbour and receives from its left one.

Large arrays are reduced by reduce-scatter and allgather round the ring (see
`elephant.collective.schedule`), in pieces that go on to the next rank as soon as they
are added. Small ones are gathered whole and added on every rank, which takes half the
rounds. Both ways give the same bits on every rank: a segment is either added on one
rank and copied, or added everywhere in the order of the ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np

from elephant.collective import schedule
from elephant.collective.base import (
    Collective,
    check_allgather,
    check_allreduce,
    check_broadcast,
    check_reduce_scatter,
)
from elephant.collective.flow import Flow
from elephant.collective.links import Links
from elephant.collective.reduction import Reduction, is_half
from elephant.collective.wire import REQUEST_BYTES, Notice, Request
from elephant.compression import Codec
from elephant.errors import NetworkError, PeerLostError, ProtocolError
from elephant.net.deadline import Deadline
from elephant.net.frames import raw_view

_BLOCK_BYTES = 8
_MAX_GATHERED_BYTES = 1 << 40


class Ring(Collective):
    """A collective of two or more ranks; made by `elephant.collective.connect.form_collective`.

    Args:
        links: This rank's connections; owned from here on.
        rank: This rank.
        world_size: How many ranks there are.
        timeout_s: Seconds that one operation may take.
        small_bytes: Arrays that make no more than this over all ranks are gathered whole; the same on all ranks.
        piece_bytes: Length of the pieces of larger ones; a multiple of eight.
    """

    def __init__(
        self,
        links: Links,
        *,
        rank: int,
        world_size: int,
        timeout_s: float = 600.0,
        small_bytes: int = 1 << 17,
        piece_bytes: int = 1 << 19,
    ) -> None:
        self._links = links
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._small_bytes = small_bytes
        self._piece_bytes = piece_bytes
        self._sequence = 0
        self._failure: NetworkError | None = None
        self._busy = threading.Lock()
        longest_block = max(small_bytes // world_size, _BLOCK_BYTES)
        self._scratch = np.empty(piece_bytes, np.uint8)
        self._blocks = np.empty(world_size * longest_block, np.uint8)
        self._openings = np.empty((2, REQUEST_BYTES + longest_block), np.uint8)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def local_rank(self) -> int:
        return self._rank

    @property
    def local_world_size(self) -> int:
        return self._world_size

    @property
    def crosses_hosts(self) -> bool:
        return False

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        check_allreduce(array, op)
        flat, reduction = array.reshape(-1), Reduction(op, self._world_size)
        values = flat.astype(np.float32) if is_half(flat.dtype) else flat
        with self._operation(f"allreduce {op} of {flat.size} {flat.dtype.name}") as (request, deadline):
            if values.nbytes * self._world_size <= self._small_bytes:
                blocks = self._exchange(request, raw_view(values), deadline).view(values.dtype)
                values[...] = blocks[0]
                for block in blocks[1:]:
                    reduction.combine(values, block, values)
            else:
                self._links.run(self._reducing_flow(request, values, reduction), request.sequence, deadline)
            reduction.finish(values)
            if values is not flat:
                flat[...] = values

    def reduce_scatter(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        check_reduce_scatter(array, op)
        return np.array_split(self.allreduce(array, op), self._world_size)[self._rank].copy()

    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        check_allgather(array)
        array = np.ascontiguousarray(array)
        trailing = array.shape[1:]
        name = f"allgather of {array.dtype.name} rows of shape {trailing}"
        with self._operation(name) as (request, deadline):
            rows = self._exchange(request, raw_view(np.array([len(array)], np.int64)), deadline).view(np.int64)[:, 0]
            row_bytes = array.nbytes // max(len(array), 1)
            if rows.min() < 0 or int(rows.max()) * row_bytes > _MAX_GATHERED_BYTES:
                raise ProtocolError(f"Expected counts of rows by rank. Received: {rows.tolist()}.")
            parts = [np.empty((int(count), *trailing), array.dtype) for count in rows]
            parts[self._rank][...] = array
            self._links.run(self._gathering_flow([raw_view(part) for part in parts]), request.sequence, deadline)
        return parts

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        check_broadcast(array, root, self._world_size)
        name = f"broadcast of {array.size} {array.dtype.name} from rank {root}"
        with self._operation(name) as (request, deadline):
            self._links.run(self._spreading_flow(request, raw_view(array), root), request.sequence, deadline)

    def barrier(self) -> None:
        with self._operation("barrier") as (request, deadline):
            self._exchange(request, memoryview(bytes(_BLOCK_BYTES)), deadline)

    def close(self) -> None:
        with self._busy:
            if self._failure is None:
                self._failure = PeerLostError(f"The collective was closed on this rank, rank {self._rank}.")
                self._links.leave(Notice(None, self._sequence))

    def abort(self) -> None:
        error = PeerLostError(f"Rank {self._rank} aborted its collective.")
        if self._failure is None:
            self._links.interrupt(Notice(error, self._sequence))
        if self._busy.acquire(blocking=False):
            with contextlib.ExitStack() as stack:
                stack.callback(self._busy.release)
                self._fail(error)

    @contextlib.contextmanager
    def _operation(self, name: str) -> Iterator[tuple[Request, Deadline]]:
        """Numbers an operation, and breaks the collective on all ranks where it fails on this one."""
        deadline = Deadline(self._timeout_s, f"The {name} on rank {self._rank}")
        if not self._busy.acquire(timeout=deadline.remaining()):
            raise deadline.exceeded("Another thread uses the collective.")
        with contextlib.ExitStack() as stack:
            stack.callback(self._busy.release)
            if self._failure is not None:
                raise type(self._failure)(f"The collective is broken since an earlier failure: {self._failure}")
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    yield Request(self._sequence + 1, name, self._rank), deadline
            except NetworkError as error:
                self._fail(error)
                raise
            except BaseException as error:
                self._fail(PeerLostError(f"Rank {self._rank} left the {name}: {type(error).__name__}: {error}."))
                raise
            self._sequence += 1

    def _fail(self, error: NetworkError) -> None:
        self._failure = self._failure or error
        self._links.leave(Notice(error, self._sequence))

    def _exchange(self, request: Request, block: memoryview, deadline: Deadline) -> np.ndarray:
        """Returns every rank's block, by rank, as a (world_size, bytes) view of memory that the next call overwrites.

        The first block travels with the request, in one packet where it is small enough.
        """
        size = len(block)
        blocks = self._blocks[: self._world_size * size].reshape(self._world_size, size)
        blocks[self._rank] = block
        opening_out, opening_in = (buffer[: REQUEST_BYTES + size].data for buffer in self._openings)
        opening_out[:REQUEST_BYTES] = request.to_bytes()
        opening_out[REQUEST_BYTES:] = block
        first, *others = schedule.gathered_blocks(self._rank, self._world_size)

        def on_piece(index: int) -> None:
            if index == 0:
                request.check(opening_in[:REQUEST_BYTES], self._links.left_rank)
                blocks[first] = opening_in[REQUEST_BYTES:]

        forwarded = [first, *others][:-1] if size else []
        outgoing = [opening_out, *(blocks[owner].data for owner in forwarded)]
        incoming = [opening_in, *(blocks[owner].data for owner in others if size)]
        self._links.run(Flow(outgoing, incoming, free=1, lag=1, on_piece=on_piece), request.sequence, deadline)
        return blocks

    def _reducing_flow(self, request: Request, flat: np.ndarray, reduction: Reduction) -> Flow:
        """Reduce-scatter and allgather as one stream, in place."""
        raw, size = raw_view(flat), flat.itemsize
        scratch = self._scratch.view(flat.dtype)
        bounds = schedule.segment_bounds(flat.size, self._world_size)
        added, copied = schedule.allreduce_segments(self._rank, self._world_size)
        own, to_add, to_copy, to_keep = (
            [piece for segment in segments for piece in schedule.chunks(*bounds[segment], len(scratch))]
            for segments in ([self._rank], added, copied, copied[-1:])
        )
        to_send = (own + to_add + to_copy)[: len(own + to_add + to_copy) - len(to_keep)]
        opening = memoryview(bytearray(REQUEST_BYTES))

        def on_piece(index: int) -> None:
            if index == 0:
                request.check(opening, self._links.left_rank)
            elif index <= len(to_add):
                start, stop = to_add[index - 1]
                reduction.combine(flat[start:stop], scratch[: stop - start], flat[start:stop])

        incoming = [opening]
        incoming += [self._scratch[: (stop - start) * size].data for start, stop in to_add]
        incoming += [raw[start * size : stop * size] for start, stop in to_copy]
        outgoing = [memoryview(request.to_bytes()), *(raw[start * size : stop * size] for start, stop in to_send)]
        return Flow(outgoing, incoming, free=1 + len(own), lag=len(own), on_piece=on_piece)

    def _gathering_flow(self, blocks: list[memoryview]) -> Flow:
        """Every rank's block to every rank; follows an exchange, and so needs no request."""
        order = schedule.gathered_blocks(self._rank, self._world_size)
        own, forwarded, last = (
            [piece for owner in owners for piece in self._pieces(blocks[owner])]
            for owners in ([self._rank], order[:-1], order[-1:])
        )
        return Flow(own + forwarded, forwarded + last, free=len(own), lag=len(own), on_piece=lambda index: None)

    def _spreading_flow(self, request: Request, raw: memoryview, root: int) -> Flow:
        """The root's pieces go once round the ring, and end at the root's left neighbour."""
        opening = memoryview(bytearray(REQUEST_BYTES))
        pieces = self._pieces(raw)

        def on_piece(index: int) -> None:
            if index == 0:
                request.check(opening, self._links.left_rank)

        outgoing = [memoryview(request.to_bytes()), *(pieces if self._links.right_rank != root else [])]
        incoming = [opening, *(pieces if self._rank != root else [])]
        free = len(outgoing) if self._rank == root else 1
        return Flow(outgoing, incoming, free=free, lag=0, on_piece=on_piece)

    def _pieces(self, raw: memoryview) -> list[memoryview]:
        return [raw[start:stop] for start, stop in schedule.chunks(0, len(raw), self._piece_bytes)]
