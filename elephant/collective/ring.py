"""Ring allreduce: the schedule of chunks, their encoding, and the ring that carries them.

A piece is a range of indices of the flat array. It leaves as a partial result, to be
added to by the next rank, or as a final one, to be copied by all others.

Every operation is one stream of pieces to the right and one from the left, in which
most outgoing pieces are incoming ones that were taken in before. So one number tells
when a piece may go: how many pieces must have come in.

The allreduce is that of Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations" (2009): a ring reduce-scatter and a ring allgather, here without
a barrier between the two, so that they are one stream of ``2 * (world_size - 1)`` segments.

A piece goes on to the next rank as soon as it is added. It is completed on one rank and
copied by the others, so that all hold the same bits. Nothing in here asks whether the
ranks want the same: `elephant.collective.process_group` has them agree before.

Of an array that is not long, the ``2 * (world_size - 1)`` latencies outweigh the bytes. It is reduced in rounds of
distances ..., 4, 2, 1: Bruck's allgather (see `elephant.collective.links`) run backwards, with sums in the place of
copies, and then forwards. The bytes are those of the ring, the latencies ``2 * ceil(log2(world_size))``.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from elephant.collective.link_cost import ROUNDS_BYTES, LinkCost, rounds_limit
from elephant.collective.links import ChunkSchedule, Pipeline, RankGroup, rounds
from elephant.collective.operation import AlgorithmThresholds, AllreduceAlgorithm, Operation, ReduceOp
from elephant.compression import Codec
from elephant.net.frames import raw_view

Piece = tuple[int, int]

_FLOAT32 = np.dtype(np.float32)
# Groups of so many members know their limit without measuring.
_FEW = 8
_PROBE_BYTES = 1 << 20
_PROBES = 3


class ChunkCodec(ABC):
    """Packs and unpacks pieces of one array."""

    @abstractmethod
    def box(self, piece: Piece) -> memoryview:
        """Returns the bytes of a piece that leaves, or that comes in as a final result."""

    @abstractmethod
    def inbox(self, piece: Piece) -> memoryview:
        """Returns the buffer for an incoming partial result; the next one comes to the same place."""

    @abstractmethod
    def pack(self, piece: Piece, *, final: bool) -> None:
        """Makes the bytes of a piece that this rank has reduced."""

    @abstractmethod
    def add(self, piece: Piece, *, final: bool) -> None:
        """Reduces what came into the inbox with this rank's values; ``final`` when all ranks' are in it then."""

    @abstractmethod
    def unpack(self, piece: Piece) -> None:
        """Takes over the final result that came into the box."""


class PlainChunks(ChunkCodec):
    """Pieces as they are: they leave from the array, and come into it.

    Args:
        scratch: Uint8, as long as the longest piece.
    """

    def __init__(self, flat: np.ndarray, op: ReduceOp, scratch: np.ndarray) -> None:
        self._flat = flat
        self._raw = raw_view(flat)
        self._op = op
        self._inbox = scratch.view(flat.dtype)

    def box(self, piece: Piece) -> memoryview:
        size = self._flat.itemsize
        return self._raw[piece[0] * size : piece[1] * size]

    def inbox(self, piece: Piece) -> memoryview:
        return raw_view(self._inbox[: piece[1] - piece[0]])

    def pack(self, piece: Piece, *, final: bool) -> None:
        pass

    def add(self, piece: Piece, *, final: bool) -> None:
        values = self._flat[piece[0] : piece[1]]
        self._op.combine(values, self._inbox[: len(values)], values)
        if final:
            self._op.finish(values)

    def unpack(self, piece: Piece) -> None:
        pass


class EncodedChunks(ChunkCodec):
    """Pieces as a codec makes them.

    The rank that completes a piece encodes it once and takes over its own encoding; the others
    pass the bytes on unchanged. So all ranks hold the same bits.

    Args:
        flat: Float32, of one dimension; reduced in place.
    """

    def __init__(
        self,
        flat: np.ndarray,
        op: ReduceOp,
        codec: Codec,
        pieces: Iterable[Piece],
        scratch: EncodedScratch,
    ) -> None:
        self._flat = flat
        self._op = op
        self._codec = codec
        self._bytes = {piece: codec.encoded_bytes(piece[1] - piece[0]) for piece in pieces}
        self._starts: dict[Piece, int] = {}
        total = 0
        for piece, length in self._bytes.items():
            self._starts[piece] = total
            total += length
        self._boxes = scratch.boxes(total)
        self._inbox = scratch.inbox(max(self._bytes.values(), default=0))
        self._decoded = scratch.decoded(max((stop - start for start, stop in self._bytes), default=0))
        # The thread that packs decodes too, where it takes over its own encoding.
        self._decoding = threading.Lock()

    def box(self, piece: Piece) -> memoryview:
        return self._boxed(piece).data

    def inbox(self, piece: Piece) -> memoryview:
        return self._inbox[: self._bytes[piece]].data

    def pack(self, piece: Piece, *, final: bool) -> None:
        start, stop = piece
        self._codec.encode(self._flat[start:stop], self._boxed(piece), offset=start)
        if final:
            self.unpack(piece)

    def add(self, piece: Piece, *, final: bool) -> None:
        values = self._flat[piece[0] : piece[1]]
        arrived = self._decoded[: len(values)]
        with self._decoding:
            self._codec.decode(self._inbox[: self._bytes[piece]], arrived)
        self._op.combine(values, arrived, values)
        if final:
            self._op.finish(values)

    def unpack(self, piece: Piece) -> None:
        with self._decoding:
            self._codec.decode(self._boxed(piece), self._flat[piece[0] : piece[1]])

    def _boxed(self, piece: Piece) -> np.ndarray:
        start = self._starts[piece]
        return self._boxes[start : start + self._bytes[piece]]


class EncodedScratch:
    """Memory for encoded pieces, which grows to what the largest array takes and is then kept."""

    def __init__(self) -> None:
        self._boxes = np.empty(0, np.uint8)
        self._inbox = np.empty(0, np.uint8)
        self._decoded = np.empty(0, np.float32)

    def boxes(self, length: int) -> np.ndarray:
        """Returns uint8 of at least this length, for all pieces of an array."""
        if len(self._boxes) < length:
            self._boxes = np.empty(length, np.uint8)
        return self._boxes

    def inbox(self, length: int) -> np.ndarray:
        """Returns uint8 of at least this length, for one piece."""
        if len(self._inbox) < length:
            self._inbox = np.empty(length, np.uint8)
        return self._inbox

    def decoded(self, count: int) -> np.ndarray:
        """Returns float32 of at least this many values, for one piece."""
        if len(self._decoded) < count:
            self._decoded = np.empty(count, np.float32)
        return self._decoded


def segment_bounds(count: int, world_size: int) -> list[tuple[int, int]]:
    """Returns begin and end of each rank's segment of ``count`` elements; sizes differ by one at most.

    >>> segment_bounds(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    base, extra = divmod(count, world_size)
    starts = [rank * base + min(rank, extra) for rank in range(world_size + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))


def chunks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Returns the range cut in pieces of ``size``, the last one shorter; none for an empty range.

    >>> chunks(10, 15, 2)
    [(10, 12), (12, 14), (14, 15)]
    """
    return [(begin, min(begin + size, stop)) for begin in range(start, stop, size)]


def even_chunks(count: int, size: int) -> list[tuple[int, int]]:
    """Returns the range from zero cut in as few pieces of at most ``size`` as there can be, about equally long.

    >>> even_chunks(10, 4)
    [(0, 4), (4, 7), (7, 10)]
    """
    return segment_bounds(count, -(-count // size))


def allreduce_segments(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Returns the segments that come in to be added, and then those that come in complete, both in order.

    A rank begins by sending its own segment, and then sends all of these but the last.

    >>> allreduce_segments(0, 4)
    ([3, 2, 1], [0, 3, 2])
    """
    added = gathered_blocks(rank, world_size)
    return added, gathered_blocks(added[-1], world_size)


def reduce_scatter_segments(rank: int, world_size: int) -> list[int]:
    """Returns the segment that a rank sends first, and then those that come in to be added, in order.

    It sends all of these on but the last, which is its own.

    >>> reduce_scatter_segments(0, 4)
    [3, 2, 1, 0]
    """
    first = (rank - 1) % world_size
    return [first, *gathered_blocks(first, world_size)]


def gathered_blocks(owner: int, world_size: int) -> list[int]:
    """Returns the blocks that come in complete, in order, at a rank that begins by sending block ``owner``.

    >>> gathered_blocks(1, 4)
    [0, 3, 2]
    """
    return [(owner - step - 1) % world_size for step in range(world_size - 1)]


class Ring(AllreduceAlgorithm):
    """Operations round the ring of a group, in its order, or in rounds; reductions apart, of all ranks.

    Args:
        group: Its connections are the caller's to close.
    """

    agrees = False

    def __init__(self, group: RankGroup, thresholds: AlgorithmThresholds) -> None:
        self._ranks = group.ranks
        self._position = group.position
        self._size = group.size
        self._thresholds = thresholds
        rank = group.ranks[group.position]
        self._carriers = {
            distance: Pipeline(pair, f"elephant-ring-send-{rank}") for distance, pair in group.pairs.items()
        }
        self._rounds = rounds(group.size)
        self._rounds_bytes = ROUNDS_BYTES if thresholds.rounds_bytes is None else thresholds.rounds_bytes
        self._scratch = np.empty(thresholds.piece_bytes, np.uint8)
        self._incoming = np.empty(0, np.uint8)
        self._encoded_scratch = EncodedScratch()

    def choose_rounds(self, operation: Operation) -> None:
        """Has the links of a large group say up to which length arrays are reduced in rounds; all members call it."""
        if self._thresholds.rounds_bytes is None and self._size > _FEW:
            self._rounds_bytes = rounds_limit(self._size, self._measure(operation))

    def _measure(self, operation: Operation) -> LinkCost:
        """Times exchanges with the members next to this one, and sums; returns what the slowest member found."""
        values = np.zeros(_PROBE_BYTES // 4, np.float32)
        outgoing, incoming = raw_view(values), raw_view(np.empty_like(values))
        total = np.zeros_like(values)
        actions: list[Callable[[], object]] = [
            lambda: self._swap(1, [outgoing[:1]], [incoming[:1]], operation),
            lambda: self._swap(1, [outgoing], [incoming], operation),
            lambda: np.add(total, values, out=total),
        ]
        seconds = np.array([min(_seconds(action) for _ in range(_PROBES + 1)) for action in actions])
        self.allreduce(seconds, ReduceOp("max", self._size), None, operation)
        latency_s, long_s, sum_s = map(float, seconds)
        # Noise can let many bytes seem quicker than one.
        return LinkCost(latency_s, max(long_s - latency_s, sum_s) / _PROBE_BYTES, sum_s / _PROBE_BYTES)

    def allreduce(self, flat: np.ndarray, op: ReduceOp, codec: Codec | None, operation: Operation) -> None:
        if codec is None and self._takes_rounds(flat.nbytes):
            bounds = segment_bounds(flat.size, self._size)
            self._reduce_in_rounds(flat, bounds, op, operation)
            self._gather_in_rounds([raw_view(flat[start:stop]) for start, stop in bounds], operation)
            return
        segments = self._segments(segment_bounds(flat.size, self._size), flat.itemsize)
        chunk_codec = self._chunk_codec(flat, op, codec, segments)
        added, copied = allreduce_segments(self._position, self._size)
        own, to_add, to_copy = (
            [piece for index in indices for piece in segments[index]] for indices in ([self._position], added, copied)
        )
        final_from = len(to_add) - len(segments[added[-1]])
        leaving = (own + to_add + to_copy)[: len(own + to_add + to_copy) - len(segments[copied[-1]])]

        def on_leaving(index: int) -> None:
            if index < len(own) + len(to_add):
                chunk_codec.pack(leaving[index], final=index >= len(own) + final_from)

        def on_arrived(index: int) -> None:
            if index < len(to_add):
                chunk_codec.add(to_add[index], final=index >= final_from)
            else:
                chunk_codec.unpack(to_copy[index - len(to_add)])

        schedule = ChunkSchedule(
            [chunk_codec.box(piece) for piece in leaving],
            [*map(chunk_codec.inbox, to_add), *map(chunk_codec.box, to_copy)],
            free=len(own),
            lag=len(own),
            on_leaving=on_leaving,
            on_arrived=on_arrived,
        )
        # Encoding takes the processor, at any size: it is to go on beside decoding.
        self._run(schedule, flat.nbytes, operation, threaded=isinstance(chunk_codec, EncodedChunks))

    def reduce_scatter(self, flat: np.ndarray, bounds: Sequence[Piece], op: ReduceOp, operation: Operation) -> None:
        if self._takes_rounds(flat.nbytes):
            self._reduce_in_rounds(flat, [bounds[rank] for rank in self._ranks], op, operation)
            return
        segments = self._segments([bounds[rank] for rank in self._ranks], flat.itemsize)
        chunk_codec = PlainChunks(flat, op, self._scratch)
        first, *added = reduce_scatter_segments(self._position, self._size)
        own, to_add = segments[first], [piece for index in added for piece in segments[index]]
        final_from = len(to_add) - len(segments[self._position])

        def on_arrived(index: int) -> None:
            chunk_codec.add(to_add[index], final=index >= final_from)

        leaving = own + to_add[:final_from]
        schedule = ChunkSchedule(
            [chunk_codec.box(piece) for piece in leaving],
            [chunk_codec.inbox(piece) for piece in to_add],
            free=len(own),
            lag=len(own),
            on_arrived=on_arrived,
        )
        self._run(schedule, flat.nbytes, operation)

    def allgather(self, blocks: Sequence[np.ndarray], operation: Operation) -> None:
        blocks = [blocks[rank] for rank in self._ranks]
        if self._takes_rounds(sum(map(len, blocks))):
            self._gather_in_rounds([block.data for block in blocks], operation)
            return
        order = gathered_blocks(self._position, self._size)
        own, forwarded, last = (
            [piece for owner in owners for piece in self._cut(blocks[owner])]
            for owners in ([self._position], order[:-1], order[-1:])
        )
        schedule = ChunkSchedule(own + forwarded, forwarded + last, free=len(own), lag=len(own))
        self._run(schedule, sum(map(len, blocks)), operation)

    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        # Once round the ring, from the root up to the one before it.
        pieces, first = self._cut(raw), self._ranks.index(root)
        is_root, is_last = self._position == first, (self._position + 1) % self._size == first
        outgoing, incoming = [] if is_last else pieces, [] if is_root else pieces
        schedule = ChunkSchedule(outgoing, incoming, free=len(pieces) if is_root else 0, lag=0)
        self._run(schedule, len(raw), operation)

    def close(self) -> None:
        # Joins the sending threads, which ends the connections.
        for carrier in self._carriers.values():
            carrier.close()

    def _takes_rounds(self, nbytes: int) -> bool:
        # Two ranks have one round either way, and the pieces of a ring are added while the next ones come.
        return self._size > 2 and nbytes <= self._rounds_bytes

    def _reduce_in_rounds(self, flat: np.ndarray, bounds: Sequence[Piece], op: ReduceOp, operation: Operation) -> None:
        """Reduces a flat array so that the part of this member is complete; ``bounds`` has the parts by position.

        In the round of distance d, a member hands over what it has of the parts of the members d to 2 d - 1 places
        after it, to the member d places after it, which adds that to its own. So each part is sent on by every other
        member once, and by its owner never.
        """
        for distance, count in reversed(self._rounds):
            leaving, added = (self._parts(bounds, first, count) for first in (distance, 0))
            size = sum(stop - start for start, stop in added) * flat.itemsize
            if len(self._incoming) < size:
                self._incoming = np.empty(size, np.uint8)
            self._swap(
                distance, [raw_view(flat[slice(*part)]) for part in leaving], [self._incoming[:size].data], operation
            )
            arrived = self._incoming[:size].view(flat.dtype)
            for start, stop in added:
                op.combine(flat[start:stop], arrived[: stop - start], flat[start:stop])
                arrived = arrived[stop - start :]
        op.finish(flat[slice(*bounds[self._position])])

    def _gather_in_rounds(self, blocks: Sequence[memoryview], operation: Operation) -> None:
        """Fills the blocks of all members, by position; in a round, each sends what it has to the one after it."""
        for distance, count in self._rounds:
            sent, received = (
                [blocks[(self._position - first - place) % self._size] for place in range(count)]
                for first in (0, distance)
            )
            self._swap(distance, sent, received, operation)

    def _parts(self, bounds: Sequence[Piece], first: int, count: int) -> list[Piece]:
        """Returns the parts of so many members, from the one ``first`` places after this one on."""
        return [bounds[(self._position + first + place) % self._size] for place in range(count)]

    def _swap(
        self, distance: int, outgoing: Sequence[memoryview], incoming: Sequence[memoryview], operation: Operation
    ) -> None:
        """Sends to the member at a distance, and receives from the one as far before."""
        outgoing, incoming = ([piece for piece in pieces if len(piece)] for pieces in (outgoing, incoming))
        schedule = ChunkSchedule(outgoing, incoming, free=len(outgoing), lag=0)
        threaded = sum(map(len, outgoing)) >= self._thresholds.threaded_bytes
        self._carriers[distance].run(schedule, operation, threaded=threaded)

    def _run(self, schedule: ChunkSchedule, nbytes: int, operation: Operation, *, threaded: bool = False) -> None:
        self._carriers[1].run(schedule, operation, threaded=threaded or nbytes >= self._thresholds.threaded_bytes)

    def _segments(self, bounds: Sequence[Piece], itemsize: int) -> list[list[Piece]]:
        return [chunks(start, stop, self._thresholds.piece_bytes // itemsize) for start, stop in bounds]

    def _chunk_codec(
        self, flat: np.ndarray, op: ReduceOp, codec: Codec | None, segments: list[list[Piece]]
    ) -> ChunkCodec:
        if codec is None or flat.dtype != _FLOAT32 or not op.is_linear:
            return PlainChunks(flat, op, self._scratch)
        pieces = [piece for segment in segments for piece in segment]
        return EncodedChunks(flat, op, codec, pieces, self._encoded_scratch)

    def _cut(self, raw: np.ndarray) -> list[memoryview]:
        return [raw[start:stop].data for start, stop in chunks(0, len(raw), self._thresholds.piece_bytes)]


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
