"""A rank's training rows, read in the order in which its passes use them."""

from __future__ import annotations

import numpy as np

from elephant.config import FitConfig
from elephant.data.ragged import Values, Variable, joined, take_rows
from elephant.data.schema import RAGGED
from elephant.data.shard import Shard
from elephant.data.shuffling import POOL_BATCHES, Blocks, HeldRows, PassOrder, blocks_of, left_over, order_by_length

Columns = tuple[Values, ...]


class TrainingRows:
    """Reads pieces of passes; one after the other, since the memory of what comes next is that of what was.

    Few rows are taken from the shard as they come. Of many, one window of the pass at a time is held in memory.

    Args:
        shard: The rank's rows.
        config: Gives seed, shuffling and batch size.
        rank: Whose rows these are.
        taken: Places of the rows that are kept for validation, sorted.
        content: The positions of all rows in the order that places count in; None where that is the shard's own.
    """

    def __init__(
        self, shard: Shard, config: FitConfig, rank: int, taken: np.ndarray, content: np.ndarray | None
    ) -> None:
        self._shard = shard
        self._config = config
        self._rank = rank
        self._taken = taken
        self._content = content
        self.count = shard.num_rows - len(taken)
        # Preprocessing may have made rows of one length of sequences: these are read in runs that no pool holds.
        has_sequences = any(field.kind == RAGGED for field in shard.schema.batch_fields)
        self._has_buckets = config.bucket_by_length and has_sequences
        self._blocks = Blocks(max(self.count, 1), 1)
        if config.cache == "disk" and shard.num_rows:
            self._blocks = blocks_of(self.count, shard.num_bytes * self.count // shard.num_rows)
        self._order: tuple[int, PassOrder | None] = (-1, None)
        self._held: HeldRows | None = None
        self._pool: tuple[tuple[int, int], Columns] = ((-1, -1), ())

    def read(self, number: int, start: int, stop: int) -> Columns:
        """Returns the rows that a pass uses from its ``start``-th up to, but without, its ``stop``-th one.

        Args:
            number: The pass, from zero over the whole fit.
            start: A batch's first row, where batches are made by length.
            stop: The row after the batch's last one.
        """
        size = self._config.batch_size
        whole = self.count // size * size
        if not self._has_buckets or start >= whole:
            return self._rows(number, start, stop)
        pool, place = divmod(start, POOL_BATCHES * size)
        if self._pool[0] != (number, pool):
            first = pool * POOL_BATCHES * size
            rows = self._rows(number, first, min(first + POOL_BATCHES * size, whole))
            self._pool = ((number, pool), self._by_length(rows, number, pool))
        return _rows_of(self._pool[1], np.arange(place, place + stop - start), self._shard)

    def _by_length(self, columns: Columns, number: int, pool: int) -> Columns:
        fields = self._shard.schema.batch_fields
        lengths = [
            np.diff(values.offsets)
            for field, values in zip(fields, columns, strict=True)
            if field.kind == RAGGED and isinstance(values, Variable)
        ]
        key = (self._config.seed, number, self._rank, pool) if self._config.shuffle else None
        return _rows_of(columns, order_by_length(np.sum(lengths, axis=0), self._config.batch_size, key), self._shard)

    def _rows(self, number: int, start: int, stop: int) -> Columns:
        order = self._order_of(number)
        source = self._shard if self._is_whole else self
        parts = [source.take(self._positions(rows)) for rows in order.parts(start, stop)]
        return parts[0] if len(parts) == 1 else tuple(joined(column) for column in zip(*parts, strict=True))

    @property
    def _is_whole(self) -> bool:
        return self._blocks.rows >= self.count

    def take(self, positions: np.ndarray) -> Columns:
        """Returns rows of the window that is held, by their positions in the shard."""
        if self._held is None:
            raise ValueError("expected a window that has begun.")
        return self._held.take(positions)

    def _positions(self, rows: np.ndarray) -> np.ndarray:
        places = left_over(rows, self._taken) if len(self._taken) else rows
        return places if self._content is None else self._content[places]

    def _order_of(self, number: int) -> PassOrder:
        if self._order[0] == number and self._order[1] is not None:
            return self._order[1]

        def entered(window: int, rows: np.ndarray) -> None:
            if not self._is_whole:
                self._begin(order, window, rows)

        key = (self._config.seed, number, self._rank)
        order = PassOrder(*key, self.count, self._blocks, shuffle=self._config.shuffle, entered=entered)
        self._order = (number, order)
        return order

    def _begin(self, order: PassOrder, window: int, rows: np.ndarray) -> None:
        """Reads a window into memory, and has the system read the next one from the disk meanwhile."""
        self._held = self._shard.hold(np.sort(self._positions(rows)), self._held)
        self._shard.forget()
        if self._content is None:
            for first, last in order.blocks_of_window(window + 1):
                start, stop = left_over(np.array([first, last - 1]), self._taken)
                self._shard.expect(int(start), int(stop) + 1)


def _rows_of(columns: Columns, rows: np.ndarray, shard: Shard) -> Columns:
    fields = zip(shard.schema.batch_fields, columns, strict=True)
    return tuple(take_rows(values, rows, shard.items_per_row(field)) for field, values in fields)
