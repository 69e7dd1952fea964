"""Files that executors read themselves: the plan of who reads what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

# What one worker reads: pieces of row groups, or shares of files.
Part = tuple[Any, ...]
# Whole files are dealt out while the fullest worker has at most this much more than an equal part.
_BEARABLE = 1.25
_DEAL = 7


class PlannedFiles(ABC):
    """The files of one data set as they were when they were listed. The value travels to the workers."""

    @abstractmethod
    def deal(self, num_workers: int, *, seed: int | None) -> list[Part]:
        """Returns the part of each worker; every row is in one of them.

        Args:
            seed: Where parts can be mixed, they are, by it; None keeps neighbors together.
        """

    def in_order(self, number: int) -> list[Part]:
        """Returns parts of neighboring rows, so many at most, in the order of the files and of the rows in them.

        One part has all rows where a format does not say how to divide them.
        """
        return self.deal(1, seed=None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files as they lie; zero where nothing tells."""
        return 0

    @abstractmethod
    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a part, some megabytes at a time, with the asked columns in that order.

        Raises:
            DataError: A file is not there, has changed since it was listed, or cannot be read.
        """

    def first(self, columns: list[str]) -> pa.RecordBatch | None:
        """Returns some rows, for a look at the first one; None when there is none."""
        for part in self.deal(1, seed=None):
            for batch in self.read(part, columns):
                if batch.num_rows:
                    return batch
        return None


def read_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields batches, each of which a thread has read while the one before was used."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="elephant-reading")
    try:
        following = pool.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = pool.submit(next, batches, None)
            yield batch
    finally:
        # Whoever wants no more is not to wait for a store that is slow to answer.
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, order=True)
class Piece:
    """Neighboring rows of one row group.

    Args:
        file: Position of the file in its list.
        group: Number of the row group in the file.
        start: First row, counted in the group.
        stop: The row after the last one.
    """

    file: int
    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Share:
    """Every ``count``-th record of a file, from the one at ``index`` on.

    Args:
        file: Position of the file in its list.
        index: From zero.
        count: 1 takes all records.
    """

    file: int
    index: int
    count: int


def deal_rows(
    group_rows: Sequence[Sequence[int]], num_workers: int, *, seed: int | None = None
) -> list[tuple[Piece, ...]]:
    """Deals the row groups of files out to workers, so that their numbers of rows differ by one at most.

    The groups are laid out in a row, which is cut into equal parts: a group is divided where a cut
    falls into it, at most one per worker.

    Args:
        seed: The order in which groups are laid out is drawn from it; None keeps that of the files.

    Returns:
        What each worker reads, in the order of files and groups.

    >>> deal_rows([[4], [2]], 2)
    [(Piece(file=0, group=0, start=0, stop=3),), (Piece(file=0, group=0, start=3, stop=4), Piece(file=1, group=0, \
start=0, stop=2))]
    """
    groups = [
        (file, group, rows) for file, counts in enumerate(group_rows) for group, rows in enumerate(counts) if rows
    ]
    if seed is not None:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((_DEAL, seed))))
        groups = [groups[place] for place in generator.permutation(len(groups))]
    total = sum(rows for _, _, rows in groups)
    bounds = [worker * total // num_workers for worker in range(num_workers + 1)]
    dealt: list[list[Piece]] = [[] for _ in range(num_workers)]
    worker, place = 0, 0
    for file, group, rows in groups:
        end = place + rows
        while place < end:
            while bounds[worker + 1] <= place:
                worker += 1
            stop = min(end, bounds[worker + 1])
            dealt[worker].append(Piece(file, group, place - (end - rows), stop - (end - rows)))
            place = stop
    return [tuple(sorted(pieces)) for pieces in dealt]


def files_in_order(file_bytes: Sequence[int], number: int) -> list[tuple[Share, ...]]:
    """Deals neighboring whole files out in parts, each of which ends with the file that fills it; none is empty.

    >>> files_in_order([10, 10, 20], 2)
    [(Share(file=0, index=0, count=1), Share(file=1, index=0, count=1)), (Share(file=2, index=0, count=1),)]
    """
    parts: dict[int, list[Share]] = {}
    total, place = max(sum(file_bytes), 1), 0
    for file, size in enumerate(file_bytes):
        # By the middle of the file; empty files at the end belong to the last part.
        part = min((2 * place + size) * number // (2 * total), number - 1)
        parts.setdefault(part, []).append(Share(file, 0, 1))
        place += size
    return [tuple(shares) for shares in parts.values()]


def deal_files(file_bytes: Sequence[int], num_workers: int) -> list[tuple[Share, ...]]:
    """Deals files out to workers whose records cannot be counted, or found, without reading them.

    The largest file goes first, each to the worker that has the fewest bytes (longest processing
    time first; Graham 1969). Where that leaves a worker with over 1.25 times an equal part, as it mostly does when
    files are fewer than workers, every worker takes every n-th record of each file instead: their
    numbers of records then differ by one per file at most, and each reads all files.

    >>> deal_files([10, 10], 2)
    [(Share(file=0, index=0, count=1),), (Share(file=1, index=0, count=1),)]
    >>> deal_files([10], 2)
    [(Share(file=0, index=0, count=2),), (Share(file=0, index=1, count=2),)]
    """
    whole_share: list[list[Share]] = [[] for _ in range(num_workers)]
    loads = [0] * num_workers
    for file in sorted(range(len(file_bytes)), key=lambda file: (-file_bytes[file], file)):
        worker = loads.index(min(loads))
        whole_share[worker].append(Share(file, 0, 1))
        loads[worker] += file_bytes[file]
    if max(loads) * num_workers <= _BEARABLE * sum(loads):
        return [tuple(sorted(shares, key=lambda share: share.file)) for shares in whole_share]
    return [
        # The first record of each file goes to another worker, and so do the few that are left over.
        tuple(Share(file, (worker + file) % num_workers, num_workers) for file in range(len(file_bytes)))
        for worker in range(num_workers)
    ]
