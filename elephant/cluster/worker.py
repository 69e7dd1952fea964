"""What one Spark task of an asynchronous fit does: write its rows, and run the process of its worker beside them.

The task is an ordinary one: it waits for no other, and Spark runs it again when it
is lost. Its partition is what stays; every attempt has a number of its own, by
which parameter servers tell it from those before.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from elephant.cluster.process import RankProcess
from elephant.cluster.rendezvous import installed_versions, refuse_other_versions
from elephant.cluster.task import RankProcessError, Run, Task, TaskSpec
from elephant.data.shard import ShardSummary
from elephant.errors import ClusterError
from elephant.net.addresses import Address, address_towards
from elephant.training.assignment import Assignment

if TYPE_CHECKING:
    from pyspark import TaskContext


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the workers of one fit meet, without waiting for each other: its parameter servers.

    Args:
        servers: Their addresses, in the order of their parts of the weights.
        layout: `Layout.to_json` of the weights.
        num_workers: Partitions of the fit.
    """

    servers: tuple[Address, ...]
    layout: list[Any]
    num_workers: int


def run_worker(
    spec: TaskSpec, run: Run, meeting: Meeting, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs one worker on one partition; the function that ``mapInArrow`` runs."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise ClusterError("run_worker: expected to run in a Spark task. Received: a call outside of one.")
    return WorkerTask(spec, run, meeting, context).rows(batches)


class WorkerTask(Task):
    """One worker, which trains at its own pace.

    Args:
        spec: What the fit asks for.
        run: How to reach the driver.
        meeting: How to reach the servers.
        context: Spark's context of the task.
    """

    def __init__(self, spec: TaskSpec, run: Run, meeting: Meeting, context: TaskContext) -> None:
        super().__init__(spec, run, context, own_host(run.driver))
        self._meeting = meeting

    def run(self, batches: Iterable[pa.RecordBatch]) -> bytes:
        """Writes the rows, and waits until the worker's process has ended; returns its result."""
        spec = self._spec
        refuse_other_versions(
            installed_versions(), driver_versions=spec.driver_versions, host=self.host, rank=self.rank
        )
        with RankProcess(spec.program, self._environment, lines=self._output(self.rank)) as process:
            process.send(spec.job)
            shard = process.work_folder / "shard"
            summary = self._write_shard(shard, batches)
            process.send(self._assignment(summary, shard).to_bytes())
            failure = process.wait(silence_s=spec.timeouts.heartbeat_s)
            if failure is not None:
                raise RankProcessError(failure)
            return process.result()

    def _assignment(self, summary: ShardSummary, shard: Path) -> Assignment:
        return Assignment(
            partition=self.rank,
            attempt=self._attempt,
            num_workers=self._meeting.num_workers,
            num_rows=summary.num_rows,
            num_marked=summary.num_validation,
            row_shapes=summary.row_shapes,
            shard=str(shard) if summary.num_rows else None,
            driver=self._run.driver,
            run_id=self._run.run_id,
            token=self._run.token.hex(),
            servers=list(self._meeting.servers),
            layout=self._meeting.layout,
            host=self.host,
            device=self._device,
            threads=self._threads,
            timeouts=self._spec.timeouts,
        )


def own_host(driver: Address) -> str:
    """Returns what to call this host in messages: its name, or its address where only the driver's host is meant."""
    address = address_towards(driver)
    return address if ipaddress.ip_address(address).is_loopback else socket.gethostname()
