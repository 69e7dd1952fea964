"""The batches that a rank puts into ``model.fit`` and into validation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from elephant.config import FitConfig
from elephant.data.epoch_plan import EpochPlan, random_rows, row_order
from elephant.data.shard import Batch, Shard


class Feed:
    """Draws a rank's batches from its shard as the plan says.

    Args:
        shard: The rank's rows.
        plan: The steps of an epoch.
        config: Gives seed, shuffling and batch size.
        rank: Whose batches these are.
    """

    def __init__(self, shard: Shard, plan: EpochPlan, config: FitConfig, rank: int) -> None:
        self._shard = shard
        self._plan = plan
        self._config = config
        self._rank = rank
        kept = shard.validation_rows()
        if not len(kept):
            kept = random_rows(config.seed, rank, shard.num_rows, plan.validation_rows[rank])
        self._validation_rows = kept
        self._training_rows = np.setdiff1d(np.arange(shard.num_rows), kept, assume_unique=True)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one input row."""
        return tuple(self._shard.zeros(1).features.shape[1:])

    def training_batches(self, first_epoch: int = 0) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields the batches of all epochs in turn, without end.

        Every epoch has the plan's number of steps. In steps to which this rank brings
        no row it yields a stand-in row, whose gradient gets the weight zero.
        """
        stand_in = self._stand_in().as_tuple()
        epoch = first_epoch
        while True:
            order = self._training_rows[self._order(epoch)]
            for step in range(self._plan.steps):
                start = step * self._config.batch_size
                rows = order[start : start + self._config.batch_size]
                yield self._shard.take(rows).as_tuple() if len(rows) else stand_in
            epoch += 1

    def validation_batches(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields the validation rows once, in order."""
        for start in range(0, len(self._validation_rows), self._config.batch_size):
            yield self._shard.take(self._validation_rows[start : start + self._config.batch_size]).as_tuple()

    def _order(self, epoch: int) -> np.ndarray:
        config = self._config
        return row_order(config.seed, epoch, self._rank, len(self._training_rows), shuffle=config.shuffle)

    def _stand_in(self) -> Batch:
        if self._shard.num_rows:
            return self._shard.take(np.zeros(1, dtype=np.int64))
        return self._shard.zeros(1)
