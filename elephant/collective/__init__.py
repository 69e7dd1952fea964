"""Sums, gathers and broadcasts of numpy arrays between the ranks of one run.

The functions act on the collective of this process: inside `elephant.run` the run's,
elsewhere a world of one.
"""

from __future__ import annotations

from elephant.collective.base import Collective
from elephant.collective.connect import form_collective
from elephant.collective.current import (
    allgather,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    current_collective,
    local_rank,
    local_world_size,
    rank,
    reduce_scatter,
    using,
    world_size,
)
from elephant.collective.fusion import FusedBuffer
from elephant.collective.solo import Solo

__all__ = [
    "Collective",
    "FusedBuffer",
    "Solo",
    "allgather",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "current_collective",
    "form_collective",
    "local_rank",
    "local_world_size",
    "rank",
    "reduce_scatter",
    "using",
    "world_size",
]
