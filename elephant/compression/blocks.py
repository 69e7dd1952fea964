"""Cutting long arrays into blocks that stay in a core's cache while several passes go over them."""

from __future__ import annotations

from collections.abc import Iterator

# 256 KiB of float32: a block and its scratch fit in the second-level cache. Half of that was up to a quarter
# slower, because of the fixed cost of each numpy call; the double of it was no faster.
BLOCK_VALUES = 1 << 16


def blocks(count: int, length: int = BLOCK_VALUES) -> Iterator[slice]:
    """Yields the slices, in order, that together cover ``count`` values.

    >>> list(blocks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))
