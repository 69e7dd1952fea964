"""Rows of virtual shards: how many each rank has, the plan that follows, and the batches of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elephant.collective.communicator import Communicator
from elephant.config import FitConfig
from elephant.data.epoch_plan import EpochPlan
from elephant.data.ragged import Values
from elephant.data.shard import Shard
from elephant.data.shuffling import are_few, left_over
from elephant.data.virtual_shards import ElasticPlan, PieceOrder, elastic_plan, number_of_pieces, piece_counts
from elephant.errors import ConfigurationError
from elephant.rank.job import TrainingJob, epoch_plan
from elephant.rank.rank_info import RankInfo


def plan_of_ranks(job: TrainingJob, rank_info: RankInfo, shard: Shard, communicator: Communicator) -> EpochPlan:
    """Returns the plan of a fit; where rows are in virtual shards, ranks tell each other the sizes of theirs.

    Raises:
        ConfigurationError: The fit is elastic, and its rows are not in virtual shards.
        TrainingError: Several ranks have rows of one virtual shard.
    """
    config = job.config
    if config.elastic is None:
        return epoch_plan(job, rank_info.num_rows, rank_info.num_marked)
    if job.schema.piece is None:
        raise ConfigurationError(
            f"num_workers: expected one number where no Spark deals the rows. Received: {config.elastic}."
        )
    number = number_of_pieces(config.elastic[1])
    own = piece_counts(shard.pieces(), shard.validation_rows(), number)
    told = communicator.allgather(own.reshape(-1))
    return elastic_plan(
        [part.reshape(number, 2) for part in told],
        batch_size=config.rank_batch_size,
        global_rows=config.batch_size * config.batches_per_step,
        validation_fraction=config.validation_fraction,
        is_marked=job.schema.validation is not None,
        steps_per_epoch=config.steps_per_epoch,
        most_steps=job.most_steps,
    )


def with_stand_ins(
    arrays: Sequence[np.ndarray], lengths: np.ndarray, stand_in: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns the arrays of several batches, and their lengths, with a stand-in for each batch that has no rows.

    >>> rows, lengths = with_stand_ins([np.array([1, 2, 3])], np.array([2, 0, 1]), [np.array([9])])
    >>> rows.tolist(), lengths.tolist()
    ([1, 2, 9, 3], [2, 1, 1])
    """
    idle = np.flatnonzero(lengths == 0)
    if not len(idle):
        return [*arrays, lengths]
    count = len(stand_in[0])
    places = np.repeat(np.cumsum(lengths)[idle], count)
    filled = [
        np.insert(array, places, np.concatenate([one] * len(idle)), axis=0)
        for array, one in zip(arrays, stand_in, strict=True)
    ]
    return [*filled, np.where(lengths == 0, count, lengths)]


class PieceReader:
    """Reads what steps use of a rank's virtual shards, as `elephant.rank.input.feed.TrainingRows` reads a whole shard.

    Args:
        content: Positions of all rows, by virtual shard and then by what they hold.
        taken: Places of the validation rows among these, sorted.

    Attributes:
        count: Rows of a pass.
        lengths: Rows before each step of a pass, and in the end; and in each step.
    """

    def __init__(
        self, shard: Shard, plan: ElasticPlan, config: FitConfig, rank: int, content: np.ndarray, taken: np.ndarray
    ) -> None:
        self.count = len(content) - len(taken)
        self.lengths = plan.lengths_of_pass(rank)
        self._shard = shard
        self._is_few = config.cache == "memory" or are_few(shard.num_bytes)
        places = np.arange(self.count)
        positions = content[left_over(places, taken)] if len(taken) else content
        pieces = shard.pieces()[positions]
        bounds = np.searchsorted(pieces, np.arange(len(plan.owners) + 1))
        rows = {piece: positions[bounds[piece] : bounds[piece + 1]] for piece in plan.pieces_of(rank)}
        self._order = PieceOrder(rows, plan, rank, seed=config.seed, shuffle=config.shuffle)
        self._of_pass: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def read(self, number: int, start: int, stop: int) -> tuple[Values, ...]:
        """Returns the rows that a pass uses from its ``start``-th up to, but without, its ``stop``-th one.

        Args:
            number: The pass, from zero over the whole fit.
        """
        if self._of_pass[0] != number:
            self._of_pass = (number, self._order.of_pass(number))
        positions = self._of_pass[1][start:stop]
        if self._is_few:
            return self._shard.take(positions)
        return self._shard.hold(np.sort(positions)).take(positions)
