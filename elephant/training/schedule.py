"""Schedule of a pipeline: the places of ranks, the parts of a batch, and the order of a stage's passes.

Each stage does a forward pass, then a backward pass, in turns (1F1B with a flush: Narayanan et al. 2021,
"Memory-Efficient Pipeline-Parallel DNN Training", section 2.2), so that it keeps at most as many micro-batches as
there are stages after it, and one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StagePlace:
    """Place of a rank in a pipeline: the last stage of the first replica is rank 0.

    Args:
        rank: From zero.
        num_stages: How many stages there are.
        num_replicas: How many ranks each stage has.
    """

    rank: int
    num_stages: int
    num_replicas: int

    @property
    def stage(self) -> int:
        """This rank's stage, from zero, which takes the rows."""
        return self.num_stages - 1 - self.rank // self.num_replicas

    @property
    def replica(self) -> int:
        """This rank's place among those of its stage."""
        return self.rank % self.num_replicas

    @property
    def is_first(self) -> bool:
        """True for ranks that take rows."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True for ranks that compute the loss."""
        return self.stage == self.num_stages - 1

    def rank_of(self, stage: int, replica: int) -> int:
        """Returns the rank of another place.

        Examples:
            >>> StagePlace(rank=3, num_stages=2, num_replicas=2).rank_of(stage=1, replica=1)
            1
        """
        return (self.num_stages - 1 - stage) * self.num_replicas + replica


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[tuple[bool, int]]:
    """Returns the passes of a stage in their order: whether forward, and of which micro-batch.

    Examples:
        >>> one_forward_one_backward(0, 2, 2)
        [(True, 0), (True, 1), (False, 0), (False, 1)]
        >>> one_forward_one_backward(1, 2, 2)
        [(True, 0), (False, 0), (True, 1), (False, 1)]
    """
    ahead = min(num_stages - 1 - stage, num_micro_batches)
    order = [(True, number) for number in range(ahead)]
    for number in range(ahead, num_micro_batches):
        order += [(True, number), (False, number - ahead)]
    return order + [(False, number) for number in range(num_micro_batches - ahead, num_micro_batches)]


def micro_bounds(num_rows: int, count: int) -> list[tuple[int, int]]:
    """Returns first and last row of each micro-batch: as many as asked for, where there are as many rows.

    Examples:
        >>> micro_bounds(7, 3), micro_bounds(1, 3), micro_bounds(0, 3)
        ([(0, 3), (3, 5), (5, 7)], [(0, 1)], [])
    """
    count = min(count, num_rows)
    ends = np.cumsum([num_rows // count + (place < num_rows % count) for place in range(count)]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True)) if count else []
