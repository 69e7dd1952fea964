"""The world of one rank, in which every operation is over before it begins."""

from __future__ import annotations

import numpy as np

from elephant.collective.base import (
    Collective,
    check_allgather,
    check_allreduce,
    check_broadcast,
    check_reduce_scatter,
)
from elephant.compression import Codec


class Solo(Collective):
    """A collective of one: it checks arguments as the others do, and has nobody to talk to."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def local_world_size(self) -> int:
        return 1

    @property
    def crosses_hosts(self) -> bool:
        return False

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        check_allreduce(array, op)

    def reduce_scatter(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        check_reduce_scatter(array, op)
        return array.copy(order="C")

    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        check_allgather(array)
        return [array.copy(order="C")]

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        check_broadcast(array, root, 1)

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass
