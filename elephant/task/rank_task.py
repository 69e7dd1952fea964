"""Tasks of synchronous ranks, in a barrier stage, and of asynchronous workers.

Tasks of the barrier stage meet before their ranks begin, and end together. The task of a
worker is an ordinary one: it waits for no other, and Spark runs it again when it is lost.
Its partition stays; every attempt has a number of its own, by which parameter servers
tell it from those before.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from elephant.backends.process_environment import device_environment
from elephant.cluster.addresses import own_address
from elephant.cluster.spark_job import InputStreamError
from elephant.data.shard import ShardSummary
from elephant.errors import ENDED, ClusterError, ElephantError
from elephant.monitor.events import RankFailure, TaskStarted
from elephant.net.addresses import Address, address_towards
from elephant.rank.executor import executor_id
from elephant.rank.rank_info import RankInfo
from elephant.task.gpu_assignment import AssignedDevice, assign_devices, locked_devices
from elephant.task.gpu_devices import TaskDevices
from elephant.task.rendezvous import RankReport, agree, agreed_row_shapes, installed_versions, refuse_other_versions
from elephant.task.specs import CoordinatorSpec, RunContext, ServerAddresses, TaskSpec
from elephant.task.task import RankHandle, RankProcessGroup, Task
from elephant.task.task_link import ChannelLink, TaskLink

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext, TaskContext

# The driver notices a frozen process too, and names it. Its task has to end it before Spark ends the task.
_DRIVER_FIRST_S = 1.0


def run_partition(spec: TaskSpec, run: RunContext, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs the ranks of one task on one partition; the function that ``mapInArrow(barrier=True)`` runs."""
    from pyspark import BarrierTaskContext

    return RankTask(spec, run, BarrierTaskContext.get()).rows(batches)


def run_coordinator_partition(
    spec: TaskSpec, run: RunContext, coordinator: CoordinatorSpec, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs the ranks of one task, and the coordinator beside rank 0; the function of ``mapInArrow(barrier=True)``."""
    from pyspark import BarrierTaskContext

    return RankTask(spec, run, BarrierTaskContext.get(), coordinator).rows(batches)


class RankTask(Task):
    """One rank, or one of each GPU of the task, which trains together with all others.

    Args:
        coordinator: What runs beside rank 0; None where the coordinator is on the driver.
    """

    def __init__(
        self, spec: TaskSpec, run: RunContext, context: BarrierTaskContext, coordinator: CoordinatorSpec | None = None
    ) -> None:
        hosts = [info.address.rsplit(":", 1)[0].strip("[]") for info in context.getTaskInfos()]
        host = hosts[context.partitionId()]
        self._address = own_address(host, hosts=hosts, driver=run.driver)

        def link_of(task: TaskStarted) -> TaskLink:
            if coordinator is None:
                return ChannelLink(spec, run, task, num_tasks=len(hosts))
            # What a coordinator needs, the tasks of most fits do not: each would take 0.1 s for it.
            from elephant.task.coordinator_task import RankZeroLink

            return RankZeroLink(coordinator, spec, run, task, context, self._address)

        super().__init__(spec, context, host, link_of)

    def run(self, batches: Iterable[pa.RecordBatch]) -> list[tuple[int, bytes]]:
        """Writes the rows, meets the other ranks, and waits until the ranks' processes have ended."""
        with contextlib.ExitStack() as closing:
            listeners = [closing.enter_context(self._listener()) for _ in range(self._count)]
            devices, error = self._devices_or_error()
            rank_processes = closing.enter_context(
                self._started(devices, [listener.fileno() for listener in listeners])
            )
            self._phases.end("starting the process")
            if not devices.shareable:
                # What is known: they need not wait for it until all ranks have met.
                rank_processes.send(_block({}))
            reports = self._own_cards(devices, [listener.getsockname()[1] for listener in listeners])
            if error is None:
                reports = self._with_rows(reports, rank_processes, batches)
            else:
                reports = _with_failure(reports, self._failure_of(error))
            self._phases.end("reading rows")
            met = self._link.exchange(reports)
            self._phases.end("meeting other ranks")
            ended = rank_processes.ended()
            if ended is not None and ended.failure.kind == ENDED:
                # The others only hear of it. What it has said itself, such as a missing module, is every rank's error.
                raise ended
            self._send_rank_info(met, devices, rank_processes, listeners)
            if self._spec.schema is not None:
                # What a fit makes its processes tell. What a function returns is this task's to hand on.
                self._link.hang_up()
            rank_processes.await_start()
            for listener in listeners:
                listener.close()
            rank_processes.wait(silence_s=self._spec.timeouts.heartbeat_s + _DRIVER_FIRST_S)
            return rank_processes.results()

    def _listener(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        return socket.create_server((self._address, 0), family=family)

    def _devices_or_error(self) -> tuple[TaskDevices, ElephantError | None]:
        try:
            return self._devices(), None
        except ElephantError as error:
            return TaskDevices(), error

    def _own_cards(self, devices: TaskDevices, ports: Sequence[int]) -> list[RankReport]:
        return [
            RankReport(
                rank=self.rank + place,
                run_id=self._link.run.run_id,
                name=self.host,
                host=self._address,
                port=port,
                versions=installed_versions(),
                executor=executor_id(),
                assigned=devices.assigned[place] if devices.assigned else None,
                shareable=devices.shareable,
            )
            for place, port in enumerate(ports)
        ]

    def _with_rows(
        self, reports: list[RankReport], rank_processes: RankProcessGroup, batches: Iterable[pa.RecordBatch]
    ) -> list[RankReport]:
        """Writes the shards and returns the ranks' cards, with what is to be said of their rows.

        A failure goes into the cards, from which all ranks learn of it.
        """
        try:
            summaries = rank_processes.write(self._followed(batches), self._spec.schema)
        except InputStreamError:
            raise
        except Exception as error:
            return _with_failure(reports, self._failure_of(error))
        ended = rank_processes.ended()
        if ended is not None:
            return _with_failure(reports, self._failure_of(ended))
        return [
            replace(report, num_rows=summary.num_rows, num_marked=summary.num_validation, row_shapes=summary.row_shapes)
            for report, summary in zip(reports, summaries, strict=True)
        ]

    def _send_rank_info(
        self,
        reports: Sequence[RankReport],
        devices: TaskDevices,
        rank_processes: RankProcessGroup,
        listeners: Sequence[socket.socket],
    ) -> None:
        """Tells the task's processes their places among all ranks, and their devices where only now these are known."""
        agree(reports, driver_versions=self._spec.driver_versions)
        assigned_devices = assign_devices(reports, self._spec.plan)
        row_shapes = {} if self._spec.schema is None else agreed_row_shapes(reports)
        for rank_handle, listener in zip(rank_processes.all, listeners, strict=True):
            own = assigned_devices[rank_handle.rank]
            if devices.shareable:
                rank_handle.process.send(_block(self._late_environment(own)))
            own = own if own.note else replace(own, note=devices.note)
            rank_handle.process.send(self._info_of(reports, rank_handle, own, row_shapes, listener.fileno()).to_bytes())

    def _late_environment(self, assigned_devices: AssignedDevice) -> dict[str, str]:
        """Returns the variables of a device, but for those that the user has set."""
        variables = device_environment(assigned_devices.visible)
        return {name: value for name, value in variables.items() if name not in self._spec.environment}

    def _info_of(
        self,
        reports: Sequence[RankReport],
        rank_handle: RankHandle,
        assigned_devices: AssignedDevice,
        row_shapes: dict[str, tuple[int, ...]],
        listener_fd: int,
    ) -> RankInfo:
        if self._link.servers is not None:
            report = reports[rank_handle.rank]
            summary = ShardSummary(
                num_rows=report.num_rows, num_validation=report.num_marked, row_shapes=report.row_shapes
            )
            return self._served_rank_info(rank_handle, assigned_devices, summary, self._link.servers)
        return self._rank_info(
            rank_handle, assigned_devices, num_rows=[report.num_rows for report in reports],
            num_marked=[report.num_marked for report in reports], row_shapes=row_shapes,
            addresses=[(report.host, report.port) for report in reports], listener_fd=listener_fd,
        )  # fmt: skip


def _with_failure(reports: Sequence[RankReport], failure: RankFailure) -> list[RankReport]:
    return [replace(report, failure=failure) for report in reports]


def _block(variables: dict[str, str]) -> bytes:
    """Returns variables of the environment as a process takes them."""
    return json.dumps(variables).encode()


def run_worker(
    spec: TaskSpec, run: RunContext, server_addresses: ServerAddresses, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs one worker on one partition; the function that ``mapInArrow`` runs."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise ClusterError("run_worker: expected to run in a Spark task. Received: a call outside of one.")
    return WorkerTask(spec, run, server_addresses, context).rows(batches)


class WorkerTask(Task):
    """One worker, which trains at its own pace."""

    def __init__(
        self, spec: TaskSpec, run: RunContext, server_addresses: ServerAddresses, context: TaskContext
    ) -> None:
        super().__init__(spec, context, own_host(run.driver), functools.partial(ChannelLink, spec, run))
        self._server_addresses = server_addresses

    def run(self, batches: Iterable[pa.RecordBatch]) -> list[tuple[int, bytes]]:
        """Writes the rows, and waits until the processes of the workers have ended."""
        spec = self._spec
        refuse_other_versions(
            installed_versions(), driver_versions=spec.driver_versions, host=self.host, rank=self.rank
        )
        with contextlib.ExitStack() as closing:
            locked = closing.enter_context(
                locked_devices(self._devices(), spec.plan, run_id=self._link.run.run_id, host=self.host)
            )
            rank_processes = closing.enter_context(self._started(locked.of_task, [None] * self._count))
            rank_processes.send(b"{}")
            self._phases.end("starting the process")
            summaries = rank_processes.write(self._followed(batches), spec.schema)
            self._phases.end("reading rows")
            for rank_handle, assigned_devices, summary in zip(
                rank_processes.all, locked.assigned_devices, summaries, strict=True
            ):
                rank_handle.process.send(
                    self._served_rank_info(rank_handle, assigned_devices, summary, self._server_addresses).to_bytes()
                )
            self._link.hang_up()
            rank_processes.wait(silence_s=spec.timeouts.heartbeat_s)
            return rank_processes.results()


def own_host(driver: Address) -> str:
    """Returns this host's name in messages: its address where only the driver's host is meant."""
    address = address_towards(driver)
    return address if ipaddress.ip_address(address).is_loopback else socket.gethostname()
