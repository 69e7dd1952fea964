"""A partition's rows in an order that their values alone decide: Spark may deliver them to a retried task in another.

Each row gets a 64-bit hash of its bytes, block by block, and rows are ordered by
it. Equal rows have equal hashes, and it does not matter which comes first.
"""

from __future__ import annotations

import numpy as np

from elephant.data.ragged import RaggedArray, Values
from elephant.data.shard import Shard

# A byte of text is hashed as a word of eight, and numpy holds a few of these at a time.
_BLOCK_BYTES = 4 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NO_PLACE = np.uint64(0)


def content_order(shard: Shard) -> np.ndarray:
    """Returns the positions of a shard's rows, ordered by a hash of what they hold.

    Args:
        shard: The rows. They are read once, some megabytes at a time.
    """
    if shard.num_rows == 0:
        return np.empty(0, np.int64)
    length = max(_BLOCK_BYTES * shard.num_rows // max(shard.num_bytes, 1), 1)
    hashes = np.empty(shard.num_rows, np.uint64)
    for start in range(0, shard.num_rows, length):
        stop = min(start + length, shard.num_rows)
        hashes[start:stop] = row_hashes(list(shard.take(np.arange(start, stop))), stop - start)
        shard.forget()
    return np.argsort(hashes, kind="stable")


def row_hashes(columns: list[Values], num_rows: int) -> np.ndarray:
    """Returns one uint64 per row.

    Each row is read as 64-bit words; every word is mixed with its place by the finalizer of SplitMix64
    (Steele, Lea & Flood 2014, section 4), which maps no two words to one, and the words are added up.

    Args:
        columns: Arrays of any dtype, of shape (rows, ...), with equally many rows; or rows of different lengths.

    >>> hashes = row_hashes([np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])], 3)
    >>> bool(hashes[0] == hashes[2]), bool(hashes[0] == hashes[1])
    (True, False)
    """
    fixed = [_words(column) for column in columns if isinstance(column, np.ndarray)]
    sums = np.zeros(num_rows, np.uint64)
    if fixed:
        sums = _mixed_sums(np.concatenate(fixed, axis=1))
    variable = [column for column in columns if isinstance(column, RaggedArray)]
    for number, column in enumerate(variable):
        items = _sums_of_items(column, number).reshape(num_rows, -1)
        # Odd factors: rows of the same strings in another order differ.
        sums += (items * (2 * np.arange(items.shape[1], dtype=np.uint64) + np.uint64(1))).sum(axis=1)
    return sums


def _sums_of_items(items: RaggedArray, column: int) -> np.ndarray:
    """Returns one sum per item, in which its length counts too.

    Every word has a place of its own, by column, buffer, element and word, so that none can stand for another.
    """
    lengths = np.diff(items.offsets)
    sums = _mixed_sums(lengths.astype(np.uint64)[:, np.newaxis], _first_place(column, 0))
    elements = (np.arange(items.offsets[-1]) - np.repeat(items.offsets[:-1], lengths)).astype(np.uint64)
    for number, buffer in enumerate(items.buffers):
        if not len(buffer):
            continue
        words = _words(buffer.reshape(len(buffer), -1))
        places = elements * np.uint64(words.shape[1]) + _first_place(column, number + 1)
        mixed = _mixed_sums(words, places[:, np.newaxis])
        totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        sums += totals[items.offsets[1:]] - totals[items.offsets[:-1]]
    return sums


def _first_place(column: int, part: int) -> np.uint64:
    # Room for 2 ** 40 words in each of up to four parts of 2 ** 21 columns; fixed columns have the places before.
    return np.uint64(((column + 1) * 4 + part) << 40)


def _mixed_sums(words: np.ndarray, places: np.ndarray | np.uint64 = _NO_PLACE) -> np.ndarray:
    """Returns for each row the sum of its words, each mixed with its place; a row's places follow ``places``."""
    words = words + (places + np.arange(1, words.shape[1] + 1, dtype=np.uint64)) * _GOLDEN
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
