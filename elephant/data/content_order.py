"""A partition's rows in an order that their values alone decide: Spark may deliver them to a retried task in another.

Each row gets a 64-bit hash of its bytes, block by block, and rows are ordered by
it. Equal rows have equal hashes, and it does not matter which comes first.
"""

from __future__ import annotations

import numpy as np

from elephant.data.shard import Shard

_BLOCK_BYTES = 16 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def content_order(shard: Shard) -> np.ndarray:
    """Returns the positions of a shard's rows, ordered by a hash of what they hold.

    Args:
        shard: The rows. They are read once, some megabytes at a time.
    """
    if shard.num_rows == 0:
        return np.empty(0, np.int64)
    row_bytes = sum(array.nbytes for array in shard.take(np.zeros(1, np.int64)).as_tuple())
    length = max(_BLOCK_BYTES // max(row_bytes, 1), 1)
    hashes = np.empty(shard.num_rows, np.uint64)
    for start in range(0, shard.num_rows, length):
        stop = min(start + length, shard.num_rows)
        arrays = shard.take(np.arange(start, stop)).as_tuple()
        hashes[start:stop] = row_hashes([array.reshape(stop - start, -1) for array in arrays])
    return np.argsort(hashes, kind="stable")


def row_hashes(columns: list[np.ndarray]) -> np.ndarray:
    """Returns one uint64 per row.

    Each row is read as 64-bit words; every word is mixed with its place by the finaliser of SplitMix64
    (Steele, Lea & Flood 2014, section 4), which maps no two words to one, and the words are added up.

    Args:
        columns: Matrices of any dtype, of shape (rows, ...), with equally many rows.

    >>> hashes = row_hashes([np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])])
    >>> bool(hashes[0] == hashes[2]), bool(hashes[0] == hashes[1])
    (True, False)
    """
    words = np.concatenate([_words(column) for column in columns], axis=1)
    words += np.arange(1, words.shape[1] + 1, dtype=np.uint64) * _GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words.sum(axis=1, dtype=np.uint64)


def _words(column: np.ndarray) -> np.ndarray:
    """Returns a matrix's rows as uint64 words, the last one filled up with zeros."""
    flat = np.ascontiguousarray(column.reshape(len(column), -1))
    data = flat.view(np.uint8).reshape(len(flat), -1)
    width = -(-data.shape[1] // 8) * 8
    padded = np.zeros((len(data), width), np.uint8)
    padded[:, : data.shape[1]] = data
    return padded.view(np.uint64)
