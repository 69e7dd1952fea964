"""The training processes of one Spark task: one, or one of each of its GPUs, each of which is a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from elephant.cluster.process import DISMISSED, ProcessFailure, RankProcess
from elephant.data.schema import DataSchema
from elephant.data.shard import ShardSummary, ShardWriter
from elephant.errors import PeerLostError, TrainingError, kind_of

_FOLLOWED = (DISMISSED, kind_of(PeerLostError("")))


class RankProcessError(TrainingError):
    """The process of a rank has failed.

    Args:
        failure: How.
        rank: Which one, or None where the task has one rank only.
    """

    def __init__(self, failure: ProcessFailure, rank: int | None = None) -> None:
        self.failure = failure
        self.rank = rank
        super().__init__(f"{failure.kind}: {failure.message}")

    def __reduce__(self) -> tuple[type, tuple[ProcessFailure, int | None]]:
        return (RankProcessError, (self.failure, self.rank))


@dataclass(frozen=True)
class Member:
    """One rank of a task.

    Args:
        rank: Its number among all ranks.
        process: Its process.
    """

    rank: int
    process: RankProcess

    @property
    def shard(self) -> Path:
        """Where its rows are."""
        return self.process.work_folder / "shard"


class Members:
    """The ranks of one task, from ``with`` to the end of the block, which ends their processes.

    Args:
        first_rank: The first one's number; the others follow.
        starts: Functions that start the process of each.
    """

    def __init__(self, first_rank: int, starts: Sequence[Callable[[], RankProcess]]) -> None:
        self._closing = contextlib.ExitStack()
        self.all: list[Member] = []
        with contextlib.ExitStack() as undoing:
            for place, start in enumerate(starts):
                self.all.append(Member(first_rank + place, undoing.enter_context(start())))
            self._closing = undoing.pop_all()

    def __enter__(self) -> Members:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def send(self, block: bytes) -> None:
        """Hands all processes the same block."""
        for member in self.all:
            member.process.send(block)

    def await_start(self) -> None:
        """Waits until all processes are there, and have what they inherit."""
        for member in self.all:
            member.process.await_start()

    def write(self, batches: Iterable[pa.RecordBatch], schema: DataSchema | None) -> list[ShardSummary]:
        """Writes the task's rows to the members' shards, which are dealt out to them in turn.

        Args:
            batches: The rows.
            schema: What they hold; None only reads them to their end, and Spark is done with them.
        """
        if schema is None:
            for _ in batches:
                pass
            return [ShardSummary(num_rows=0, num_validation=0, row_shapes={}) for _ in self.all]
        with contextlib.ExitStack() as closing:
            writers = [closing.enter_context(ShardWriter(member.shard, schema)) for member in self.all]
            begun = 0
            for batch in batches:
                for place, writer in enumerate(writers):
                    writer.write(dealt_rows(batch, place, len(writers), begun))
                begun += batch.num_rows
            return [writer.finish() for writer in writers]

    def ended(self) -> RankProcessError | None:
        """Returns the failure of a process that has ended already; None where all run."""
        for member in self.all:
            failure = None if member.process.running else member.process.wait()
            if failure is not None:
                return RankProcessError(failure, member.rank)
        return None

    def wait(self, *, silence_s: float) -> None:
        """Waits until all processes have ended well.

        Args:
            silence_s: A process that gives no sign of life for so long is frozen, and is killed.

        Raises:
            RankProcessError: One has failed: the first, but for those that failed because others did.
        """
        followed: RankProcessError | None = None
        with ThreadPoolExecutor(len(self.all), thread_name_prefix="elephant-member") as pool:
            waits = {pool.submit(member.process.wait, silence_s=silence_s): member for member in self.all}
            try:
                for done in as_completed(waits):
                    failure = done.result()
                    if failure is None:
                        continue
                    error = RankProcessError(failure, waits[done].rank)
                    if failure.kind not in _FOLLOWED:
                        raise error
                    followed = followed or error
            finally:
                for member in self.all:
                    member.process.kill()
        if followed is not None:
            raise followed

    def results(self) -> list[tuple[int, bytes]]:
        """Returns each rank, and what its program returned."""
        return [(member.rank, member.process.result()) for member in self.all]


def dealt_rows(batch: pa.RecordBatch, place: int, count: int, begun: int) -> pa.RecordBatch:
    """Returns the rows of a batch that one of several members gets, when a task's rows are dealt out in turn.

    Args:
        batch: Some of the task's rows.
        place: Which member, from zero.
        count: Members.
        begun: Rows of the task before this batch.

    >>> dealt_rows(pa.record_batch({"x": [3, 4, 5, 6]}), place=1, count=2, begun=3).to_pydict()
    {'x': [3, 5]}
    """
    if count == 1:
        return batch
    return batch.take(pa.array(np.arange((place - begun) % count, batch.num_rows, count)))
