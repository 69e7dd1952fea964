"""What every Spark task with a process of its own does alike: the rows' shard, the process' environment, failures.

A rank of a barrier stage (`elephant.cluster.rank`) and a worker of asynchronous
training (`elephant.cluster.worker`) are two such tasks.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from elephant.cluster.output import Lines
from elephant.cluster.process import DISMISSED, ProcessFailure, process_environment
from elephant.config import Timeouts
from elephant.data.schema import DataSchema
from elephant.data.shard import ShardSummary, ShardWriter
from elephant.errors import ElephantError, NetworkError, SupersededError, TrainingError, kind_of
from elephant.monitor.channel import ChannelClient
from elephant.monitor.events import Failed
from elephant.monitor.output import OutputStream
from elephant.training.executor import executor_id

if TYPE_CHECKING:
    from pyspark import TaskContext

logger = logging.getLogger(__name__)

RESULT_SCHEMA = "rank int, result binary"
PIECE_BYTES = 2**20
SUPERSEDED = kind_of(SupersededError(""))
_ENDED_WITHIN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What a run asks of every task.

    Args:
        program: What the ranks run, by its name in `elephant.training.program`.
        driver_versions: What of `installed_versions` all ranks must share with the driver.
        job: The pickled job of the program; tasks only pass it on.
        backend: The Keras backend to compute with; None leaves it to Keras.
        schema: What the rows hold; None when they are not looked at.
        timeouts: How long waits may last.
        environment: Variables of the user's for the ranks' processes.
        shows_output: Whether the driver shows what the ranks' processes print.
    """

    program: str
    driver_versions: dict[str, str]
    job: bytes
    backend: str | None
    schema: DataSchema | None
    timeouts: Timeouts
    environment: dict[str, str] = field(default_factory=dict)
    shows_output: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One attempt at a run, and how to reach the driver in it.

    Args:
        run_id: The attempt.
        token: Its secret.
        driver: Host and port of the driver's channel.
    """

    run_id: str
    token: bytes = field(repr=False)
    driver: tuple[str, int]


class RankProcessError(TrainingError):
    """The process of this rank has failed."""

    def __init__(self, failure: ProcessFailure) -> None:
        self.failure = failure
        super().__init__(f"{failure.kind}: {failure.message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (RankProcessError, (self.failure,))


class Task(ABC):
    """One rank, as its Spark task sees it.

    Args:
        spec: What the run asks for.
        run: Which attempt this is.
        context: Spark's context of the task.
        host: Where it runs, for messages.
    """

    def __init__(self, spec: TaskSpec, run: Run, context: TaskContext, host: str) -> None:
        self._spec = spec
        self._run = run
        self.rank = int(context.partitionId())
        self.host = host
        self._attempt = int(context.taskAttemptId())
        self._threads = max(int(context.cpus()), 1)
        gpu = context.resources().get("gpu")
        self._devices: list[str] = [] if gpu is None else list(gpu.addresses)

    @abstractmethod
    def run(self, batches: Iterable[pa.RecordBatch]) -> bytes:
        """Uses the rows, and waits until the rank's process has ended; returns its result."""

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs the rank, as the function of ``mapInArrow`` does it.

        Yields:
            The rank and what its program returned, see `result_rows`.

        Raises:
            TrainingError: The rank failed. The driver has been told why.
        """
        try:
            result = self.run(batches)
        except Exception as error:
            yield from self._failed(self._as_event(error))
        else:
            yield from result_rows(self.rank, result)

    def _failed(self, failed: Failed) -> Iterator[pa.RecordBatch]:
        """Tells the driver why this rank has failed, and fails the task."""
        if failed.kind != DISMISSED:
            self._tell(failed)
        if failed.kind == SUPERSEDED:
            # To be ended by the driver, which Spark does not count as a failure of the task; it does count errors.
            time.sleep(_ENDED_WITHIN_S)
        # One line: the driver has the rest, and Spark prints this one several times.
        summary = f"rank {self.rank} on {self.host}: {failed.kind}: {failed.message.splitlines()[0]}"
        raise TrainingError(summary) from None

    def _tell(self, failed: Failed) -> None:
        """Tells whoever hosts the run's channel of a failure."""
        _tell_driver(self._run, self._spec.timeouts, failed)
        # The executor's own log is where users of Spark look.
        sys.stderr.write(f"{failed.traceback or failed.message}\n")

    @property
    def _environment(self) -> dict[str, str]:
        spec = self._spec
        return process_environment(
            threads=self._threads, devices=self._devices, backend=spec.backend, more=spec.environment
        )

    def _output(self, rank: int) -> Lines | None:
        """Returns where the lines go that a rank's process prints; None where the driver does not show them."""
        if not self._spec.shows_output:
            return None
        run, timeouts = self._run, self._spec.timeouts
        return OutputStream(
            run.driver, token=run.token, run_id=run.run_id, rank=rank, host=self.host, timeouts=timeouts
        )

    @property
    def _device(self) -> str:
        return f"GPU {','.join(self._devices)}" if self._devices else "CPU"

    def _write_shard(self, path: Path, batches: Iterable[pa.RecordBatch]) -> ShardSummary:
        """Writes the rows to a file of this host, or reads them to their end when nobody asked for them."""
        if self._spec.schema is None:
            return _drained(batches)
        with ShardWriter(path, self._spec.schema) as writer:
            for batch in batches:
                writer.write(batch)
            return writer.finish()

    def _as_event(self, error: Exception) -> Failed:
        """Returns what to tell the driver about an error that ended this rank."""
        if isinstance(error, RankProcessError):
            about = asdict(error.failure)
            return Failed(rank=self.rank, host=self.host, attempt=self._attempt, executor=executor_id(), **about)
        trace = "" if isinstance(error, ElephantError) else traceback.format_exc()
        message = str(error).strip() or "(no message)"
        return Failed(
            rank=self.rank,
            host=self.host,
            kind=kind_of(error),
            message=message,
            traceback=trace,
            attempt=self._attempt,
            executor=executor_id(),
        )


def result_rows(rank: int, result: bytes) -> Iterator[pa.RecordBatch]:
    """Yields a result as rows of pieces, none of which is too large for a message; `results_by_rank` joins them.

    Args:
        rank: Whose it is.
        result: All of it.
    """
    for start in range(0, max(len(result), 1), PIECE_BYTES):
        piece = pa.array([result[start : start + PIECE_BYTES]], pa.binary())
        yield pa.RecordBatch.from_arrays([pa.array([rank], pa.int32()), piece], ["rank", "result"])


def results_by_rank(rows: Iterable[Any]) -> dict[int, bytes]:
    """Returns what rows of `result_rows` hold, by rank; those of one rank are in their order.

    >>> results_by_rank([{"rank": 1, "result": b"a"}, {"rank": 0, "result": b"b"}, {"rank": 1, "result": b"c"}])
    {1: b'ac', 0: b'b'}
    """
    pieces: dict[int, list[bytes]] = {}
    for row in rows:
        pieces.setdefault(int(row["rank"]), []).append(bytes(row["result"]))
    return {rank: b"".join(parts) for rank, parts in pieces.items()}


def _drained(batches: Iterable[pa.RecordBatch]) -> ShardSummary:
    """Reads rows that nobody asked for, so that Spark's end of the pipe is done with them."""
    for _ in batches:
        pass
    return ShardSummary(num_rows=0, num_validation=0, row_shapes={})


def _tell_driver(run: Run, timeouts: Timeouts, failed: Failed) -> None:
    # Who only follows others into failure has nothing to tell that is worth waiting for.
    timeouts = replace(timeouts, connect_s=1.0 if failed.is_echo else 5.0)
    try:
        with ChannelClient(
            run.driver, token=run.token, run_id=run.run_id, rank=failed.rank, timeouts=timeouts
        ) as client:
            client.tell(failed)
    except NetworkError:
        # The driver is gone, or cannot be reached: Spark's own report of the exception is what remains.
        logger.warning("could not tell the driver: %s\n%s", failed.message, failed.traceback)
