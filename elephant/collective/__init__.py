"""Sums, gathers and broadcasts of numpy arrays between the ranks of one run.

The functions act on the collective of this process: inside `elephant.run` the run's,
elsewhere a world of one.
"""

from __future__ import annotations

from elephant.collective.api import (
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
from elephant.collective.bootstrap import form_collective
from elephant.collective.communicator import Communicator, LocalCommunicator
from elephant.collective.fusion import FusedBuffer

__all__ = [
    "Communicator",
    "FusedBuffer",
    "LocalCommunicator",
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
