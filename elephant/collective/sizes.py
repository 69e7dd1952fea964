"""From which size on an array goes another way; the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The limits between the ways that an array can go, in bytes, as measured.

    Args:
        small_bytes: Arrays that make no more than this over all ranks are gathered whole on every rank.
        piece_bytes: Length of the pieces in which larger ones go round a ring; a multiple of eight.
        threaded_bytes: Of arrays of this length, a second thread sends the pieces.
        block_bytes: Length of each rank's blocks in shared memory; a multiple of eight.
        staged_bytes: Length of the float32 blocks in which 16-bit floats are reduced; a multiple of eight.
    """

    small_bytes: int = 1 << 18
    piece_bytes: int = 1 << 19
    threaded_bytes: int = 1 << 23
    block_bytes: int = 1 << 20
    staged_bytes: int = 1 << 22
