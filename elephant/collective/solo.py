"""The world of one rank, in which every operation is over before it begins."""

from __future__ import annotations

import numpy as np

from elephant.collective.base import Collective, check_broadcast, check_gather, check_reduction


class Solo(Collective):
    """A collective of one: it checks arguments as the others do, and has nobody to talk to."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def allreduce_(self, array: np.ndarray, op: str = "sum") -> None:
        check_reduction(array, op)

    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        check_gather(array)
        return [array.copy()]

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        check_broadcast(array, root, 1)

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass
