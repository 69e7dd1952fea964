"""Rows of virtual shards on their way from rank to rank: some megabytes at a time, from shard to shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from elephant.collective.communicator import Communicator
from elephant.data.ragged import RaggedArray, Values
from elephant.data.schema import PIECE
from elephant.data.shard import Shard, ShardWriter
from elephant.data.virtual_shards import ElasticPlan

_CHUNK_BYTES = 4 << 20
_SUFFIX = "-moved"


def moved_shard(shard: Shard, last_plan: ElasticPlan, next_plan: ElasticPlan, communicator: Communicator) -> Shard:
    """Returns a rank's rows after virtual shards have moved; all ranks call it, and each has rows.

    A rank whose rows change writes a shard beside the one that it has, which it keeps. All go in step, a chunk of rows
    each, so that no rank waits long for another one, and none holds more than a chunk of each other one.

    Args:
        last_plan: Who has had which virtual shard.
        next_plan: Who is to have it.

    Raises:
        NetworkError: Another rank is gone.
        ClusterError: The disk is full.
    """
    rank, length = communicator.rank, _chunk_rows(shard, communicator)
    receivers = chunk_receivers(last_plan, next_plan, length)
    steps = max(map(len, receivers))
    if not receivers[rank] or shard.folder is None:
        for _ in range(steps):
            communicator.barrier()
        return shard
    chunks = _chunks(shard.pieces(), next_plan, rank, length)
    # One that has moved before has its files removed.
    folder = shard.folder.with_name(shard.folder.name.removesuffix(_SUFFIX) + _SUFFIX)
    with ShardWriter(folder, shard.schema) as writer:
        for step in range(steps):
            if step < len(receivers[rank]):
                rows, receiver = next(chunks), receivers[rank][step]
                columns = {field.role: shard.column(field, rows) for field in shard.schema}
                shard.forget()
                if receiver == rank:
                    writer.write_values(columns, len(rows))
                else:
                    communicator.send(_flat(columns), receiver)
            for source, theirs in enumerate(receivers):
                if source != rank and step < len(theirs) and theirs[step] == rank:
                    columns = _columns(shard, communicator.recv(source))
                    writer.write_values(columns, len(columns[PIECE]))
            communicator.barrier()
    made = Shard(folder if folder.exists() else None, shard.schema, shard.row_shapes, in_memory=shard.in_memory)
    made.unlink()
    return made


def chunk_receivers(last_plan: ElasticPlan, next_plan: ElasticPlan, length: int) -> list[list[int]]:
    """Returns by rank the receivers of its chunks of rows: those that it keeps are the first ones.

    Ranks whose rows stay as they are have none.

    >>> plan = ElasticPlan((4, 5, 1), (0, 0, 0), 4, piece_rows=(4, 2, 3, 1), piece_validation=(0,) * 4,
    ...                    owners=(0, 1, 1, 2))
    >>> chunk_receivers(plan, plan.with_owners((0, 1, 0, 2)), 2)
    [[0, 0], [1, 0, 0], []]
    """
    sizes = np.array(last_plan.piece_rows) + np.array(last_plan.piece_validation)
    rows = np.zeros((last_plan.world_size, last_plan.world_size), np.int64)
    np.add.at(rows, (list(last_plan.owners), list(next_plan.owners)), sizes)
    going = rows - np.diag(rows.diagonal())
    receivers = []
    for rank in range(last_plan.world_size):
        changes = going[rank].any() or going[:, rank].any()
        parts = [[other] * -(-int(rows[rank, other]) // length) for other in _in_turn(rank, last_plan.world_size)]
        receivers.append([other for part in parts for other in part] if changes else [])
    return receivers


def _in_turn(rank: int, world_size: int) -> list[int]:
    return [rank, *(other for other in range(world_size) if other != rank)]


def _chunks(pieces: np.ndarray, next_plan: ElasticPlan, rank: int, length: int) -> Iterator[np.ndarray]:
    """Yields the positions of the rows of each chunk."""
    targets = np.array(next_plan.owners)[pieces]
    for receiver in _in_turn(rank, next_plan.world_size):
        rows = np.flatnonzero(targets == receiver)
        yield from (rows[start : start + length] for start in range(0, len(rows), length))


def _chunk_rows(shard: Shard, communicator: Communicator) -> int:
    """Returns how many rows ranks take at once: the same number on all."""
    row_bytes = np.array([-(-shard.num_bytes // max(shard.num_rows, 1))], np.int64)
    communicator.allreduce_(row_bytes, op="max")
    return max(_CHUNK_BYTES // max(int(row_bytes[0]), 1), 1)


def _flat(columns: Mapping[str, Values]) -> list[np.ndarray]:
    """Returns the arrays that columns are made of."""
    return [
        array
        for values in columns.values()
        for array in ((values.offsets, *values.buffers) if isinstance(values, RaggedArray) else (values,))
    ]


def _columns(shard: Shard, arrays: Sequence[np.ndarray]) -> dict[str, Values]:
    """Returns the columns of `_flat`, by role."""
    columns: dict[str, Values] = {}
    left = iter(arrays)
    for field in shard.schema:
        form = shard.zeros_of(field)
        if isinstance(form, RaggedArray):
            columns[field.role] = RaggedArray(next(left), tuple(next(left) for _ in form.buffers))
        else:
            columns[field.role] = next(left)
    return columns
