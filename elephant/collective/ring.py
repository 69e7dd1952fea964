"""A ring: each rank sends to the next one and receives from the one before it.

Large arrays are reduced by reduce-scatter and allgather round the ring (see
`elephant.collective.schedule`), in pieces that go on to the next rank as soon as they
are added. A piece is completed on one rank and copied by the others, so that all hold
the same bits.

Nothing in here asks whether the ranks want the same: they have agreed before (see
`elephant.collective.dissemination`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elephant.collective import schedule
from elephant.collective.cargo import Cargo, EncodedCargo, EncodedScratch, Piece, PlainCargo
from elephant.collective.carrier import Carrier
from elephant.collective.flow import Flow
from elephant.collective.group import Group
from elephant.collective.operation import Operation
from elephant.collective.reduction import Reduction
from elephant.collective.sizes import Sizes
from elephant.compression import Codec

_FLOAT32 = np.dtype(np.float32)


class Ring:
    """Operations round the ring of a group.

    Args:
        group: Who takes part, in the order of the ring.
        sizes: Length of the pieces, and from when on a thread sends them.
    """

    def __init__(self, group: Group, sizes: Sizes) -> None:
        self._position = group.position
        self._size = group.size
        self._sizes = sizes
        rank = group.members[group.position]
        self._carrier = Carrier(group.pairs[1], f"elephant-ring-send-{rank}")
        self._scratch = np.empty(sizes.piece_bytes, np.uint8)
        self._encoded_scratch = EncodedScratch()

    def allreduce(self, flat: np.ndarray, reduction: Reduction, codec: Codec | None, operation: Operation) -> None:
        """Reduces a flat array of all members, in place; a codec needs float32."""
        segments = self._segments(schedule.segment_bounds(flat.size, self._size), flat.itemsize)
        cargo = self._cargo(flat, reduction, codec, segments)
        added, copied = schedule.allreduce_segments(self._position, self._size)
        own, to_add, to_copy = (
            [piece for index in indices for piece in segments[index]] for indices in ([self._position], added, copied)
        )
        final_from = len(to_add) - len(segments[added[-1]])
        leaving = (own + to_add + to_copy)[: len(own + to_add + to_copy) - len(segments[copied[-1]])]

        def on_leaving(index: int) -> None:
            if index < len(own) + len(to_add):
                cargo.pack(leaving[index], final=index >= len(own) + final_from)

        def on_arrived(index: int) -> None:
            if index < len(to_add):
                cargo.add(to_add[index], final=index >= final_from)
            else:
                cargo.unpack(to_copy[index - len(to_add)])

        flow = Flow(
            [cargo.box(piece) for piece in leaving],
            [*map(cargo.inbox, to_add), *map(cargo.box, to_copy)],
            free=len(own),
            lag=len(own),
            on_leaving=on_leaving,
            on_arrived=on_arrived,
        )
        # Encoding takes the processor, at any size: it is to go on beside decoding.
        self._run(flow, flat.nbytes, operation, threaded=isinstance(cargo, EncodedCargo))

    def reduce_scatter(
        self, flat: np.ndarray, bounds: Sequence[Piece], reduction: Reduction, operation: Operation
    ) -> None:
        """Reduces a flat array of all members so that this one's part is complete; the other parts are undefined.

        Args:
            flat: The array, of one dimension.
            bounds: Where each member's part begins and ends, by its place in the group.
            reduction: How.
            operation: What this rank is in.
        """
        segments = self._segments(bounds, flat.itemsize)
        cargo = PlainCargo(flat, reduction, self._scratch)
        first, *added = schedule.reduce_scatter_segments(self._position, self._size)
        own, to_add = segments[first], [piece for index in added for piece in segments[index]]
        final_from = len(to_add) - len(segments[self._position])

        def on_arrived(index: int) -> None:
            cargo.add(to_add[index], final=index >= final_from)

        leaving = own + to_add[:final_from]
        flow = Flow(
            [cargo.box(piece) for piece in leaving],
            [cargo.inbox(piece) for piece in to_add],
            free=len(own),
            lag=len(own),
            on_arrived=on_arrived,
        )
        self._run(flow, flat.nbytes, operation)

    def allgather(self, blocks: Sequence[np.ndarray], operation: Operation) -> None:
        """Fills every member's block, uint8 of any length; this one's is there. They are ordered by place."""
        order = schedule.gathered_blocks(self._position, self._size)
        own, forwarded, last = (
            [piece for owner in owners for piece in self._cut(blocks[owner])]
            for owners in ([self._position], order[:-1], order[-1:])
        )
        flow = Flow(own + forwarded, forwarded + last, free=len(own), lag=len(own))
        self._run(flow, sum(map(len, blocks)), operation)

    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        """Passes the bytes, uint8, of the member at place ``root`` once round the ring, up to the one before it."""
        pieces = self._cut(raw)
        is_root, is_last = self._position == root, (self._position + 1) % self._size == root
        outgoing, incoming = [] if is_last else pieces, [] if is_root else pieces
        flow = Flow(outgoing, incoming, free=len(pieces) if is_root else 0, lag=0)
        self._run(flow, len(raw), operation)

    def close(self) -> None:
        """Joins the sending thread, which ends the ring's connections."""
        self._carrier.close()

    def _run(self, flow: Flow, nbytes: int, operation: Operation, *, threaded: bool = False) -> None:
        self._carrier.run(flow, operation, threaded=threaded or nbytes >= self._sizes.threaded_bytes)

    def _segments(self, bounds: Sequence[Piece], itemsize: int) -> list[list[Piece]]:
        return [schedule.chunks(start, stop, self._sizes.piece_bytes // itemsize) for start, stop in bounds]

    def _cargo(self, flat: np.ndarray, reduction: Reduction, codec: Codec | None, segments: list[list[Piece]]) -> Cargo:
        if codec is None or flat.dtype != _FLOAT32 or not reduction.is_linear:
            return PlainCargo(flat, reduction, self._scratch)
        pieces = [piece for segment in segments for piece in segment]
        return EncodedCargo(flat, reduction, codec, pieces, self._encoded_scratch)

    def _cut(self, raw: np.ndarray) -> list[memoryview]:
        return [raw[start:stop].data for start, stop in schedule.chunks(0, len(raw), self._sizes.piece_bytes)]
