"""What one Spark task of a run does: write its rows, meet the other ranks, run the process of its rank."""

from __future__ import annotations

import logging
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from elephant.cluster.process import DISMISSED, ProcessFailure, RankProcess, process_environment
from elephant.cluster.rendezvous import RankCard, agree, agreed_widths, installed_versions
from elephant.config import Timeouts
from elephant.data.schema import DataSchema
from elephant.data.shard import ShardSummary, ShardWriter
from elephant.errors import ElephantError, NetworkError, PeerLostError, TrainingError, kind_of
from elephant.monitor.channel import ChannelClient, usable_address
from elephant.monitor.events import Failed
from elephant.training.gang import Gang

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

logger = logging.getLogger(__name__)

RESULT_SCHEMA = "rank int, result binary"


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
    """

    program: str
    driver_versions: dict[str, str]
    job: bytes
    backend: str | None
    schema: DataSchema | None
    timeouts: Timeouts
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One attempt at a run, and how to reach the driver in it.

    Args:
        run_id: The attempt.
        token: Its secret.
        driver: Host and port of the driver's channel.
    """

    run_id: str
    token: bytes
    driver: tuple[str, int]


def run_partition(spec: TaskSpec, run: Run, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs one rank on one partition; the function that ``mapInArrow(barrier=True)`` runs.

    Yields:
        One row: the rank and what its program returned.

    Raises:
        TrainingError: The rank failed. The driver has been told why.
    """
    from pyspark import BarrierTaskContext

    task = RankTask(spec, run, BarrierTaskContext.get())
    try:
        result = task.run(batches)
    except Exception as error:
        failed = task.as_event(error)
        if failed.kind != DISMISSED:
            _tell_driver(run, spec.timeouts, failed)
            # The executor's own log is where users of Spark look.
            sys.stderr.write(f"{failed.traceback or failed.message}\n")
        # One line: the driver has the rest, and Spark prints this one several times.
        summary = f"rank {task.rank} on {task.host}: {failed.kind}: {failed.message.splitlines()[0]}"
        raise TrainingError(summary) from None
    row = [pa.array([task.rank], pa.int32()), pa.array([result], pa.binary())]
    yield pa.RecordBatch.from_arrays(row, ["rank", "result"])


class RankProcessError(TrainingError):
    """The process of this rank has failed."""

    def __init__(self, failure: ProcessFailure) -> None:
        self.failure = failure
        super().__init__(f"{failure.kind}: {failure.message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (RankProcessError, (self.failure,))


class RankTask:
    """One rank, as its Spark task sees it.

    Args:
        spec: What the run asks for.
        run: Which attempt this is.
        context: Spark's context of the task.
    """

    def __init__(self, spec: TaskSpec, run: Run, context: BarrierTaskContext) -> None:
        self._spec = spec
        self._run = run
        self._context = context
        self.rank = int(context.partitionId())
        self.host = context.getTaskInfos()[self.rank].address.rsplit(":", 1)[0].strip("[]")
        self._address = usable_address(self.host)
        self._threads = max(int(context.cpus()), 1)
        gpu = context.resources().get("gpu")
        self._devices: list[str] = [] if gpu is None else list(gpu.addresses)

    def run(self, batches: Iterable[pa.RecordBatch]) -> bytes:
        """Writes the rows, meets the other ranks, and waits until the rank's process has ended; returns its result."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        spec = self._spec
        environment = process_environment(
            threads=self._threads, devices=self._devices, backend=spec.backend, more=spec.environment
        )
        with (
            socket.create_server((self._address, 0), family=family) as listening,
            RankProcess(spec.program, environment, listener_fd=listening.fileno()) as process,
        ):
            process.send(spec.job)
            shard = process.work_folder / "shard.arrow"
            cards = self._exchange(self._own_card(listening.getsockname()[1], shard, batches, process))
            agree(cards, driver_versions=spec.driver_versions)
            widths = {} if spec.schema is None else agreed_widths(cards)
            process.send(self._gang(cards, widths, listening.fileno(), shard).to_bytes())
            listening.close()
            failure = process.wait()
            if failure is not None:
                raise RankProcessError(failure)
            return process.result()

    def _own_card(self, port: int, shard: Path, batches: Iterable[pa.RecordBatch], process: RankProcess) -> RankCard:
        """Writes the shard and returns this rank's card.

        A failure goes into the card: to raise it would take down the executors of the ranks that already wait.
        """
        card = RankCard(
            rank=self.rank,
            run_id=self._run.run_id,
            name=self.host,
            host=self._address,
            port=port,
            versions=installed_versions(),
        )
        try:
            summary = _write_shard(shard, self._spec.schema, batches) if self._spec.schema else _drained(batches)
        except Exception as error:
            text = str(error) if isinstance(error, ElephantError) else traceback.format_exc()
            return replace(card, error_kind=kind_of(error), error=text)
        failure = None if process.running else process.wait()
        if failure is not None:
            return replace(card, error_kind=failure.kind, error=failure.traceback or failure.message)
        return replace(card, num_rows=summary.num_rows, num_marked=summary.num_validation, widths=summary.widths)

    def _exchange(self, card: RankCard) -> list[RankCard]:
        try:
            return [RankCard.from_text(text) for text in self._context.allGather(card.to_text())]
        except Exception as error:
            raise PeerLostError(f"another rank's Spark task failed before the ranks had met: {error}") from error

    def _gang(self, cards: Sequence[RankCard], widths: dict[str, int], listener_fd: int, shard: Path) -> Gang:
        return Gang(
            rank=self.rank,
            addresses=[(card.host, card.port) for card in cards],
            num_rows=[card.num_rows for card in cards],
            num_marked=[card.num_marked for card in cards],
            widths=widths,
            listener_fd=listener_fd,
            shard=str(shard) if cards[self.rank].num_rows else None,
            driver=self._run.driver,
            run_id=self._run.run_id,
            token=self._run.token.hex(),
            host=self.host,
            device=f"GPU {','.join(self._devices)}" if self._devices else "CPU",
            threads=self._threads,
            timeouts=self._spec.timeouts,
        )

    def as_event(self, error: Exception) -> Failed:
        """Returns what to tell the driver about an error that ended this rank."""
        if isinstance(error, RankProcessError):
            return Failed(rank=self.rank, host=self.host, **asdict(error.failure))
        trace = "" if isinstance(error, ElephantError) else traceback.format_exc()
        message = str(error).strip() or "(no message)"
        return Failed(rank=self.rank, host=self.host, kind=kind_of(error), message=message, traceback=trace)


def _write_shard(path: Path, schema: DataSchema, batches: Iterable[pa.RecordBatch]) -> ShardSummary:
    with ShardWriter(path, schema) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.finish()


def _drained(batches: Iterable[pa.RecordBatch]) -> ShardSummary:
    """Reads rows that nobody asked for, so that Spark's end of the pipe is done with them."""
    for _ in batches:
        pass
    return ShardSummary(num_rows=0, num_validation=0, widths={})


def _tell_driver(run: Run, timeouts: Timeouts, failed: Failed) -> None:
    timeouts = replace(timeouts, connect_s=5.0)
    try:
        with ChannelClient(
            run.driver, token=run.token, run_id=run.run_id, rank=failed.rank, timeouts=timeouts
        ) as client:
            client.tell(failed)
    except NetworkError:
        # The driver is gone, or cannot be reached: Spark's own report of the exception is what remains.
        logger.warning("could not tell the driver: %s\n%s", failed.message, failed.traceback)
