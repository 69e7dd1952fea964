"""Spark tasks that have ranks, and the processes of these.

A rank of a barrier stage and a worker of asynchronous training are two such tasks: `elephant.task.rank_task`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from elephant.backends.process_environment import process_environment
from elephant.cluster.broadcast import in_task
from elephant.cluster.spark_job import InputStreamError, ResultRow
from elephant.data.schema import DataSchema, ShardSummary
from elephant.errors import ElephantError, PeerLostError, TrainingError, kind_of, text_of, topic_of
from elephant.monitor.events import RankFailure, TaskStarted
from elephant.monitor.trace import Phases
from elephant.rank.callbacks.end_notice import EndNotice
from elephant.rank.executor import executor_id
from elephant.rank.rank_info import RankInfo
from elephant.task.gpu_assignment import AssignedDevice
from elephant.task.gpu_devices import TaskDevices, devices_of_task
from elephant.task.process import DISMISSED, RankProcess
from elephant.task.specs import ServerAddresses, TaskSpec
from elephant.task.task_link import TaskLink

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import TaskContext

_FOLLOWED = (DISMISSED, kind_of(PeerLostError("")))

PIECE_BYTES = 2**20
_SHARD = "shard"


class RankProcessError(TrainingError):
    """The process of a rank has failed."""

    def __init__(self, failure: RankFailure) -> None:
        self.failure = failure
        super().__init__(f"{failure.kind}: {failure.message}")

    def __reduce__(self) -> tuple[type, tuple[RankFailure]]:
        return (RankProcessError, (self.failure,))


@dataclass(frozen=True)
class RankHandle:
    """One rank of a task.

    Args:
        rank: Its number among all ranks.
        process: Its process.
        shard: Folder of its rows.
    """

    rank: int
    process: RankProcess
    shard: Path


class RankProcessGroup:
    """The ranks of one task, from ``with`` to the end of the block, which ends their processes.

    Args:
        first_rank: The number of the first one.
        starts: Start their processes.
        shards: Folders of their rows, which outlive the processes; None has each process own its rows.
    """

    def __init__(
        self, first_rank: int, starts: Sequence[Callable[[], RankProcess]], shards: Sequence[Path] | None = None
    ) -> None:
        self._closing = contextlib.ExitStack()
        self.all: list[RankHandle] = []
        with contextlib.ExitStack() as undoing:
            for place, start in enumerate(starts):
                process = undoing.enter_context(start())
                shard = process.work_folder / _SHARD if shards is None else shards[place] / _SHARD
                self.all.append(RankHandle(first_rank + place, process, shard))
            self._closing = undoing.pop_all()

    def __enter__(self) -> RankProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def send(self, block: bytes) -> None:
        """Hands all processes the same block."""
        for rank_handle in self.all:
            rank_handle.process.send(block)

    def await_start(self) -> None:
        """Waits until all processes are there, and have what they inherit."""
        for rank_handle in self.all:
            rank_handle.process.await_start()

    def write(self, batches: Iterable[pa.RecordBatch], schema: DataSchema | None) -> list[ShardSummary]:
        """Writes the task's rows to the members' shards, which are dealt out to them in turn.

        Args:
            schema: What they hold; None only reads them to their end, and Spark is done with them.
        """
        if schema is None:
            for _ in batches:
                pass
            return [ShardSummary(num_rows=0, num_validation=0, row_shapes={}) for _ in self.all]
        # Only here: ranks without rows begin sooner without Arrow.
        from elephant.data.shard import ShardWriter

        with contextlib.ExitStack() as closing:
            writers = [closing.enter_context(ShardWriter(rank_handle.shard, schema)) for rank_handle in self.all]
            begun = 0
            for batch in batches:
                for place, writer in enumerate(writers):
                    writer.write(dealt_rows(batch, place, len(writers), begun))
                begun += batch.num_rows
            return [writer.finish() for writer in writers]

    def ended(self) -> RankProcessError | None:
        """Returns the failure of a process that has ended already; None where all run."""
        for rank_handle in self.all:
            failure = None if rank_handle.process.running else rank_handle.process.wait()
            if failure is not None:
                return RankProcessError(replace(failure, rank=rank_handle.rank))
        return None

    def wait(self, *, silence_s: float) -> None:
        """Waits until all processes have ended well.

        Raises:
            RankProcessError: One has failed: the first, but for those that failed because others did.
        """
        followed: RankProcessError | None = None
        with ThreadPoolExecutor(len(self.all), thread_name_prefix="elephant-member") as pool:
            waits = {
                pool.submit(rank_handle.process.wait, silence_s=silence_s): rank_handle for rank_handle in self.all
            }
            try:
                for done in as_completed(waits):
                    failure = done.result()
                    if failure is None:
                        continue
                    error = RankProcessError(replace(failure, rank=waits[done].rank))
                    if failure.kind not in _FOLLOWED:
                        raise error
                    followed = followed or error
            finally:
                self.kill()
        if followed is not None:
            raise followed

    def terminate(self) -> None:
        """Asks all processes to end."""
        for rank_handle in self.all:
            rank_handle.process.terminate()

    def kill(self) -> None:
        """Ends all processes at once."""
        for rank_handle in self.all:
            rank_handle.process.kill()

    def results(self) -> list[tuple[int, bytes]]:
        """Returns each rank, and what its program returned."""
        return [(rank_handle.rank, rank_handle.process.result()) for rank_handle in self.all]


def dealt_rows(batch: pa.RecordBatch, place: int, count: int, begun: int) -> pa.RecordBatch:
    """Returns the rows of a batch that one of several members gets, when a task's rows are dealt out in turn.

    Args:
        place: Which member, from zero.

    >>> import pyarrow as pa
    >>> dealt_rows(pa.record_batch({"x": [3, 4, 5, 6]}), place=1, count=2, begun=3).to_pydict()
    {'x': [3, 5]}
    """
    if count == 1:
        return batch
    import numpy as np

    from elephant.data.to_arrow import to_arrow

    return batch.take(to_arrow(np.arange((place - begun) % count, batch.num_rows, count)))


class Task(ABC):
    """A Spark task that has ranks: one, or one of each of its GPUs."""

    def __init__(
        self, spec: TaskSpec, context: TaskContext, host: str, link_of: Callable[[TaskStarted], TaskLink]
    ) -> None:
        self._spec = spec
        self._count = spec.plan.gpus_per_worker
        # The first of the task's; the others follow.
        self.rank = int(context.partitionId()) * self._count
        self.host = host
        self._place = TaskStarted(
            rank=self.rank,
            host=host,
            executor=executor_id(),
            attempt=int(context.taskAttemptId()),
            is_retry=int(context.attemptNumber()) > 0,
        )
        self._link = link_of(self._place)
        self._threads = max(int(context.cpus()) // self._count, 1)
        given = context.resources().get(spec.plan.resource)
        self._addresses: list[str] = [] if given is None else list(given.addresses)
        self._rank_processes: RankProcessGroup | None = None
        # Folders of the ranks' rows, where they outlive their processes.
        self._shards: list[Path] | None = None
        self._is_leaving = False
        self._phases = Phases()

    @abstractmethod
    def run(self, batches: Iterable[pa.RecordBatch]) -> list[tuple[int, bytes]]:
        """Uses the rows, and waits until the ranks' processes have ended; returns each rank and its result."""

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[ResultRow]:
        """Runs the ranks, as the task of a `RowSource` does it.

        Yields:
            Each rank and what its program returned, see `result_rows`.

        Raises:
            TrainingError: The rank failed. The driver has been told why.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._link.close)
            # Ranks are in process groups of their own: who asks this process to end means them.
            closing.enter_context(EndNotice(self._terminate).heeded())
            try:
                self._link.open()
                results = self.run(batches)
            except InputStreamError:
                # The driver is told nothing: an error of this process would hide that of Spark.
                raise
            except Exception as error:
                yield from self._link.fail(self._failure_of(error))
            else:
                for rank, result in results:
                    yield from result_rows(rank, result)
                yield from self._link.end()

    def _followed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the batches as long as the run goes on: Spark does not end all tasks of a job that is cancelled."""
        for batch in batches:
            self._link.check()
            yield batch
        self._link.check()

    def _devices(self) -> TaskDevices:
        """Returns the task's devices; raises ClusterError where there should be some."""
        return devices_of_task(self._spec.plan, self._addresses, os.environ)

    def _started(self, devices: TaskDevices, listeners: Sequence[int | None]) -> RankProcessGroup:
        """Starts the processes of the task's ranks.

        Args:
            listeners: Descriptors of the listening socket of each, or None.
        """
        visible: list[list[str]] = [[device.visible] for device in devices.assigned] or [[]] * self._count
        starts = [
            functools.partial(self._process, place, visible[place], listener)
            for place, listener in enumerate(listeners)
        ]
        # It may have to come from the driver: before there are processes that would be left.
        job = in_task(self._spec.job)
        rank_processes = RankProcessGroup(self.rank, starts, self._shards)
        rank_processes.send(job)
        return rank_processes

    def _terminate(self) -> None:
        self._is_leaving = True
        if self._rank_processes is None:
            # There is nothing to wait for, and the signal has its own effect again.
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._link.leave()
            self._rank_processes.terminate()

    def kill(self) -> None:
        """Ends the ranks' processes at once; may be called from another thread."""
        if self._rank_processes is not None:
            self._rank_processes.kill()

    def _process(self, place: int, devices: Sequence[str], listener_fd: int | None) -> RankProcess:
        spec = self._spec
        environment = process_environment(
            threads=self._threads, devices=devices, backend=spec.backend, more=spec.environment
        )
        return RankProcess(
            spec.program,
            environment,
            listener_fd=listener_fd,
            lines=self._link.output(self.rank + place),
            warm=spec.warm,
            grace_s=spec.timeouts.heartbeat_s,
            keeps_files=spec.brings_files,
            rows_folder=None if self._shards is None else self._shards[place],
        )

    def _rank_info(
        self,
        rank_handle: RankHandle,
        assigned_devices: AssignedDevice,
        *,
        num_rows: list[int],
        num_marked: list[int],
        row_shapes: dict[str, tuple[int, ...]],
        **peers: Any,
    ) -> RankInfo:
        """Returns the info for the process of a rank; ``peers`` are the fields of those that it connects to."""
        return RankInfo(
            rank=rank_handle.rank,
            attempt=self._place.attempt,
            num_rows=num_rows,
            num_marked=num_marked,
            row_shapes=row_shapes,
            shard=str(rank_handle.shard) if num_rows[rank_handle.rank] else None,
            driver=self._link.run.driver,
            run_id=self._link.run.run_id,
            token=self._link.run.token.hex(),
            host=self.host,
            device=assigned_devices.text,
            devices=assigned_devices.visible,
            note=assigned_devices.note,
            threads=self._threads,
            timeouts=self._spec.timeouts,
            ports=self._spec.ports,
            phases=list(self._phases.ended),
            **peers,
        )

    def _served_rank_info(
        self,
        rank_handle: RankHandle,
        assigned_devices: AssignedDevice,
        summary: ShardSummary,
        server_addresses: ServerAddresses,
    ) -> RankInfo:
        """Returns the info for the process of a worker that trains at its own pace."""

        def own(count: int) -> list[int]:
            return [count if rank == rank_handle.rank else 0 for rank in range(server_addresses.num_workers)]

        return self._rank_info(
            rank_handle, assigned_devices, num_rows=own(summary.num_rows), num_marked=own(summary.num_validation),
            row_shapes=summary.row_shapes, servers=list(server_addresses.servers), layout=server_addresses.layout,
        )  # fmt: skip

    def _failure_of(self, error: Exception) -> RankFailure:
        """Returns the failure of this rank, or of one of its task, that an error is."""
        if isinstance(error, RankProcessError):
            return error.failure.at(self._place)
        trace = "" if isinstance(error, ElephantError) else traceback.format_exc()
        message = text_of(error).strip() or "(no message)"
        failure = RankFailure(kind=kind_of(error), message=message, traceback=trace, topic=topic_of(error))
        return failure.at(self._place)


def result_rows(rank: int, result: bytes) -> Iterator[ResultRow]:
    """Yields a result as rows of pieces, none of which is too large for a message; `results_by_rank` joins them."""
    for start in range(0, max(len(result), 1), PIECE_BYTES):
        yield rank, result[start : start + PIECE_BYTES]


def results_by_rank(rows: Iterable[Any]) -> dict[int, bytes]:
    """Reads rows of `result_rows`, by rank; those of one rank are in their order.

    >>> results_by_rank([{"rank": 1, "result": b"a"}, {"rank": 0, "result": b"b"}, {"rank": 1, "result": b"c"}])
    {1: b'ac', 0: b'b'}
    """
    pieces: dict[int, list[bytes]] = {}
    for row in rows:
        pieces.setdefault(int(row["rank"]), []).append(bytes(row["result"]))
    return {rank: b"".join(parts) for rank, parts in pieces.items()}
