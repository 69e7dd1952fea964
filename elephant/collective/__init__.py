"""Sums, gathers, broadcasts and messages of numpy arrays between the ranks of one run, and groups of them.

The functions act on the collective of this process: inside `elephant.run` the run's,
elsewhere a world of one.
"""

from __future__ import annotations

from elephant.collective.api import (
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    current_collective,
    local_rank,
    local_world_size,
    new_group,
    rank,
    recv,
    reduce_scatter,
    send,
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
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "current_collective",
    "form_collective",
    "local_rank",
    "local_world_size",
    "new_group",
    "rank",
    "recv",
    "reduce_scatter",
    "send",
    "using",
    "world_size",
]
