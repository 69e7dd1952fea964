"""What one Spark task of an asynchronous fit does: write its rows, and run the processes of its workers beside them.

The task is an ordinary one: it waits for no other, and Spark runs it again when it
is lost. Its partition is what stays; every attempt has a number of its own, by
which parameter servers tell it from those before.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from elephant.cluster.claims import claimed_devices
from elephant.cluster.rendezvous import installed_versions, refuse_other_versions
from elephant.cluster.task import Run, ServedFit, Task, TaskSpec
from elephant.errors import ClusterError
from elephant.net.addresses import Address, address_towards

if TYPE_CHECKING:
    from pyspark import TaskContext


def run_worker(
    spec: TaskSpec, run: Run, served: ServedFit, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs one worker on one partition; the function that ``mapInArrow`` runs."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise ClusterError("run_worker: expected to run in a Spark task. Received: a call outside of one.")
    return WorkerTask(spec, run, served, context).rows(batches)


class WorkerTask(Task):
    """One worker, which trains at its own pace.

    Args:
        spec: What the fit asks for.
        run: How to reach the driver.
        served: How to reach the servers.
        context: Spark's context of the task.
    """

    def __init__(self, spec: TaskSpec, run: Run, served: ServedFit, context: TaskContext) -> None:
        super().__init__(spec, run, context, own_host(run.driver))
        self._served = served

    def run(self, batches: Iterable[pa.RecordBatch]) -> list[tuple[int, bytes]]:
        """Writes the rows, and waits until the processes of the workers have ended."""
        spec = self._spec
        refuse_other_versions(
            installed_versions(), driver_versions=spec.driver_versions, host=self.host, rank=self.rank
        )
        with contextlib.ExitStack() as closing:
            claimed = closing.enter_context(
                claimed_devices(self._devices(), spec.plan, run_id=self._run.run_id, host=self.host)
            )
            members = closing.enter_context(self._started(claimed.of_task, [None] * self._count))
            members.send(b"{}")
            summaries = members.write(batches, spec.schema)
            for member, placed, summary in zip(members.all, claimed.placed, summaries, strict=True):
                member.process.send(self._assignment(member, placed, summary, self._served).to_bytes())
            self._hang_up()
            members.wait(silence_s=spec.timeouts.heartbeat_s)
            return members.results()


def own_host(driver: Address) -> str:
    """Returns what to call this host in messages: its name, or its address where only the driver's host is meant."""
    address = address_towards(driver)
    return address if ipaddress.ip_address(address).is_loopback else socket.gethostname()
