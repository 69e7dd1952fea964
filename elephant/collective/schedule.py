"""In which order the pieces of an array go round the ring: arithmetic without I/O.

Every operation is one stream of pieces to the right and one from the left, in which
most outgoing pieces are incoming ones that were taken in before. So one number tells
when a piece may go: how many pieces must have come in.

The allreduce is that of Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations" (2009): a ring reduce-scatter and a ring allgather, here without
a barrier between the two, so that they are one stream of ``2 * (world_size - 1)`` segments.
"""

from __future__ import annotations


def segment_bounds(count: int, world_size: int) -> list[tuple[int, int]]:
    """Returns where each rank's segment of ``count`` elements begins and ends; sizes differ by one at most.

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
