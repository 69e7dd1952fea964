"""What one Spark task of a fit does: write its rows, meet the other ranks, run the training process."""

from __future__ import annotations

import logging
import socket
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from elephant.cluster.process import DISMISSED, ProcessFailure, TrainingProcess, process_environment
from elephant.cluster.rendezvous import RankCard, agree, installed_versions
from elephant.config import Timeouts
from elephant.data.schema import DataSchema
from elephant.data.shard import ShardSummary, ShardWriter
from elephant.errors import ElephantError, NetworkError, PeerLostError, TrainingError
from elephant.monitor.channel import ChannelClient, usable_address
from elephant.monitor.events import Failed
from elephant.training.gang import Gang

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

logger = logging.getLogger(__name__)

RESULT_SCHEMA = "rank int, num_rows bigint"


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What the driver sends to every task of a fit.

    Args:
        run_id: The fit.
        token: Its secret.
        driver: Host and port of the driver's channel.
        driver_versions: What `installed_versions` said on the driver.
        job: The pickled `elephant.training.job.TrainingJob`; tasks only pass it on.
        schema: What the rows hold.
        timeouts: How long waits may last.
    """

    run_id: str
    token: bytes
    driver: tuple[str, int]
    driver_versions: dict[str, str]
    job: bytes
    schema: DataSchema
    timeouts: Timeouts


def train_partition(spec: TaskSpec, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Trains one rank on one partition; the function that ``mapInArrow(barrier=True)`` runs.

    Yields:
        One row: the rank and its number of rows.

    Raises:
        TrainingError: The rank failed. The driver has been told why.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    host = context.getTaskInfos()[rank].address.rsplit(":", 1)[0].strip("[]")
    try:
        num_rows = _train(spec, context, rank, host, batches)
    except Exception as error:
        failed = _as_event(rank, host, error)
        if failed.kind != DISMISSED:
            _tell_driver(spec, failed)
        # One line: the driver has the rest, and Spark prints this one several times.
        raise TrainingError(f"rank {rank} on {host}: {failed.kind}: {failed.message.splitlines()[0]}") from None
    yield pa.RecordBatch.from_arrays(
        [pa.array([rank], pa.int32()), pa.array([num_rows], pa.int64())], ["rank", "num_rows"]
    )


class TrainingProcessError(TrainingError):
    """The training process of this rank has failed."""

    def __init__(self, failure: ProcessFailure) -> None:
        self.failure = failure
        super().__init__(f"{failure.kind}: {failure.message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (TrainingProcessError, (self.failure,))


def _train(spec: TaskSpec, context: BarrierTaskContext, rank: int, host: str, batches: Iterable[pa.RecordBatch]) -> int:
    devices = _devices(context)
    threads = max(int(context.cpus()), 1)
    with socket.create_server((usable_address(host), 0), family=_family(host)) as listening:
        environment = process_environment(threads=threads, devices=devices)
        with TrainingProcess(environment, listener_fd=listening.fileno()) as process:
            process.send(spec.job)
            shard = process.work_folder / "shard.arrow"
            card = _own_card(spec, rank, host, listening.getsockname()[1], shard, batches, process)
            cards = _exchange(context, card)
            widths = agree(cards, driver_versions=spec.driver_versions)
            gang = Gang(
                rank=rank,
                addresses=[(peer.host, peer.port) for peer in cards],
                num_rows=[peer.num_rows for peer in cards],
                num_marked=[peer.num_marked for peer in cards],
                widths=widths,
                listener_fd=listening.fileno(),
                shard=str(shard) if card.num_rows else None,
                driver=spec.driver,
                run_id=spec.run_id,
                token=spec.token.hex(),
                host=host,
                device=f"GPU {','.join(devices)}" if devices else "CPU",
                threads=threads,
            )
            process.send(gang.to_bytes())
            listening.close()
            failure = process.wait()
            if failure is not None:
                raise TrainingProcessError(failure)
            return card.num_rows


def _exchange(context: BarrierTaskContext, card: RankCard) -> list[RankCard]:
    try:
        return [RankCard.from_text(text) for text in context.allGather(card.to_text())]
    except Exception as error:
        raise PeerLostError(f"another rank's Spark task failed before the ranks had met: {error}") from error


def _own_card(
    spec: TaskSpec,
    rank: int,
    host: str,
    port: int,
    shard: Path,
    batches: Iterable[pa.RecordBatch],
    process: TrainingProcess,
) -> RankCard:
    """Writes the shard and returns this rank's card: a failure goes into it, because raising here kills peers' JVMs."""
    card = RankCard(
        rank=rank,
        run_id=spec.run_id,
        name=host,
        host=usable_address(host),
        port=port,
        versions=installed_versions(),
    )
    try:
        summary = _write_shard(shard, spec.schema, batches)
    except Exception as error:
        text = str(error) if isinstance(error, ElephantError) else traceback.format_exc()
        return replace(card, error_kind=type(error).__name__, error=text)
    failure = None if process.running else process.wait()
    if failure is not None:
        return replace(card, error_kind=failure.kind, error=failure.traceback or failure.message)
    return replace(card, num_rows=summary.num_rows, num_marked=summary.num_validation, widths=summary.widths)


def _write_shard(path: Path, schema: DataSchema, batches: Iterable[pa.RecordBatch]) -> ShardSummary:
    with ShardWriter(path, schema) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.finish()


def _devices(context: BarrierTaskContext) -> Sequence[str]:
    gpu = context.resources().get("gpu")
    return [] if gpu is None else list(gpu.addresses)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in usable_address(host) else socket.AF_INET


def _as_event(rank: int, host: str, error: Exception) -> Failed:
    if isinstance(error, TrainingProcessError):
        return Failed(rank=rank, host=host, **asdict(error.failure))
    trace = "" if isinstance(error, ElephantError) else traceback.format_exc()
    return Failed(rank=rank, host=host, kind=type(error).__name__, message=str(error) or "no message", traceback=trace)


def _tell_driver(spec: TaskSpec, failed: Failed) -> None:
    timeouts = replace(spec.timeouts, connect_s=5.0)
    try:
        with ChannelClient(
            spec.driver, token=spec.token, run_id=spec.run_id, rank=failed.rank, timeouts=timeouts
        ) as client:
            client.tell(failed)
    except NetworkError:
        # The driver is gone, or cannot be reached: Spark's own report of the exception is what remains.
        logger.warning("could not tell the driver: %s\n%s", failed.message, failed.traceback)
