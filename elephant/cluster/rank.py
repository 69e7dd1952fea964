"""What one Spark task of a barrier stage does: write its rows, meet the other ranks, run the process of its rank."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from elephant.cluster.addresses import own_address
from elephant.cluster.process import RankProcess
from elephant.cluster.rendezvous import RankCard, agree, agreed_row_shapes, installed_versions
from elephant.cluster.task import RankProcessError, Run, Task, TaskSpec
from elephant.errors import ElephantError, PeerLostError, kind_of
from elephant.training.assignment import Assignment
from elephant.training.gang import Gang

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

# The driver notices a frozen process too, and names it. Its task has to end it before Spark ends the task.
_DRIVER_FIRST_S = 1.0


def run_partition(spec: TaskSpec, run: Run, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs one rank on one partition; the function that ``mapInArrow(barrier=True)`` runs."""
    from pyspark import BarrierTaskContext

    return RankTask(spec, run, BarrierTaskContext.get()).rows(batches)


class RankTask(Task):
    """One rank, which trains together with all others.

    Args:
        spec: What the run asks for.
        run: Which attempt this is.
        context: Spark's context of the task.
    """

    def __init__(self, spec: TaskSpec, run: Run, context: BarrierTaskContext) -> None:
        hosts = [info.address.rsplit(":", 1)[0].strip("[]") for info in context.getTaskInfos()]
        host = hosts[context.partitionId()]
        super().__init__(spec, run, context, host)
        self._context = context
        self._address = own_address(host, hosts=hosts, driver=run.driver)

    def run(self, batches: Iterable[pa.RecordBatch]) -> bytes:
        """Writes the rows, meets the other ranks, and waits until the rank's process has ended; returns its result."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        spec = self._spec
        with (
            socket.create_server((self._address, 0), family=family) as listening,
            RankProcess(
                spec.program, self._environment, listener_fd=listening.fileno(), lines=self._output(self.rank)
            ) as process,
        ):
            process.send(spec.job)
            shard = process.work_folder / "shard"
            cards = self._exchange(self._own_card(listening.getsockname()[1], shard, batches, process))
            agree(cards, driver_versions=spec.driver_versions)
            row_shapes = {} if spec.schema is None else agreed_row_shapes(cards)
            process.send(self._gang(cards, row_shapes, listening.fileno(), shard).to_bytes())
            listening.close()
            failure = process.wait(silence_s=spec.timeouts.heartbeat_s + _DRIVER_FIRST_S)
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
            summary = self._write_shard(shard, batches)
        except Exception as error:
            text = str(error) if isinstance(error, ElephantError) else traceback.format_exc()
            return replace(card, error_kind=kind_of(error), error=text)
        failure = None if process.running else process.wait()
        if failure is not None:
            return replace(card, error_kind=failure.kind, error=failure.traceback or failure.message)
        return replace(
            card, num_rows=summary.num_rows, num_marked=summary.num_validation, row_shapes=summary.row_shapes
        )

    def _exchange(self, card: RankCard) -> list[RankCard]:
        try:
            return [RankCard.from_text(text) for text in self._context.allGather(card.to_text())]
        except Exception as error:
            raise PeerLostError(f"another rank's Spark task failed before the ranks had met: {error}") from error

    def _gang(
        self, cards: Sequence[RankCard], row_shapes: dict[str, tuple[int, ...]], listener_fd: int, shard: Path
    ) -> Gang | Assignment:
        return Gang(
            rank=self.rank,
            addresses=[(card.host, card.port) for card in cards],
            num_rows=[card.num_rows for card in cards],
            num_marked=[card.num_marked for card in cards],
            row_shapes=row_shapes,
            listener_fd=listener_fd,
            shard=str(shard) if cards[self.rank].num_rows else None,
            driver=self._run.driver,
            run_id=self._run.run_id,
            token=self._run.token.hex(),
            host=self.host,
            device=self._device,
            threads=self._threads,
            timeouts=self._spec.timeouts,
        )
