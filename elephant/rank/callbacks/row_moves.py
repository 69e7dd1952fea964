"""Rows that move from slow ranks to fast ones between epochs, in an elastic fit."""

from __future__ import annotations

import shutil
import time
from typing import Any

import keras
import numpy as np

from elephant.collective.communicator import Communicator
from elephant.data.piece_balance import PieceBalance
from elephant.data.virtual_shards import ElasticPlan
from elephant.monitor.events import ShardsMoved
from elephant.rank.callbacks.rank_callbacks import StepProgress
from elephant.rank.input.feed import BatchFeed
from elephant.rank.input.moved_rows import moved_shard
from elephant.rank.job import StepReporter
from elephant.rank.rank_progress import RankWeight

# Of the free bytes of a disk, and a part for what else is written.
_USABLE = 0.8


class RowMoves(keras.callbacks.Callback):
    """Finds out at the end of each epoch whether virtual shards are to move, and has them moved when Keras is left.

    Rank 0 decides, by the seconds that all ranks tell it.

    Args:
        weight: Of this rank in the steps; it has the plan.
        feed: Where the rows come from.
        progress: Knows what the epoch's seconds went into.
        reporter: Told of each move by rank 0.
        epochs: Of the fit.
    """

    def __init__(
        self,
        communicator: Communicator,
        weight: RankWeight,
        plan: ElasticPlan,
        feed: BatchFeed,
        progress: StepProgress,
        reporter: StepReporter,
        *,
        epochs: int,
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._weight = weight
        self._plan = plan
        self._feed = feed
        self._progress = progress
        self._reporter = reporter
        self._epochs = epochs
        self._balance: PieceBalance | None = None
        self._owners: tuple[int, ...] | None = None
        self._busy_s = np.zeros(plan.world_size)

    @property
    def is_due(self) -> bool:
        """True if virtual shards are to move before the next epoch; the same on all ranks."""
        return self._owners is not None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        ended, left = self._progress.ended_epoch, self._epochs - epoch - 1
        if left < 1 or self.model.stop_training or ended is None:
            return
        busy_s = ended.training_s - (ended.training_wait_s or 0.0)
        own = np.array([busy_s, ended.training_s, self._room(), self._row_bytes()], np.float64)
        self._busy_s, steps_s, room, row_bytes = np.stack(self._communicator.allgather(own), axis=1)
        owners = np.array(self._plan.owners, np.int64)
        if self._communicator.rank == 0:
            self._balance = self._balance or PieceBalance(self._plan, float(row_bytes.max()))
            found = self._balance.epoch_ended(self._busy_s.tolist(), float(steps_s.max()), room.tolist(), left)
            owners = owners if found is None else np.array(found, np.int64)
        self._communicator.broadcast_(owners)
        chosen = tuple(owners.tolist())
        self._owners = None if chosen == self._plan.owners else chosen

    def _row_bytes(self) -> float:
        return self._feed.shard.num_bytes / max(self._feed.shard.num_rows, 1)

    def _room(self) -> float:
        """Returns how many rows a new shard may have on this rank's disk."""
        folder = self._feed.shard.folder
        if folder is None:
            return 0.0
        return _USABLE * shutil.disk_usage(folder.parent).free / max(self._row_bytes(), 1.0)

    def move(self) -> None:
        """Moves the virtual shards that are to move; all ranks call it.

        Raises:
            NetworkError: Another rank is gone.
            ClusterError: The disk is full.
        """
        if self._owners is None:
            return
        began, before = time.monotonic(), self._plan
        self._plan, self._owners = before.with_owners(self._owners), None
        shard = moved_shard(self._feed.shard, before, self._plan, self._communicator)
        self._feed.draw_from(shard, self._plan)
        self._weight.plan = self._plan
        # The slowest has read all of its rows by then.
        self._communicator.barrier()
        if self._balance is not None:
            took_s = time.monotonic() - began
            self._balance.moved(self._plan, took_s)
            epoch = self._weight.epoch
            self._reporter.send(
                ShardsMoved.between(before, self._plan, epoch=epoch, busy_s=self._busy_s, took_s=took_s)
            )
