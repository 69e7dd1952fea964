"""Tasks of synchronous ranks, in a barrier stage or in an ordinary one, and of asynchronous workers.

Tasks of the barrier stage meet before their ranks begin, and end together. Where the fit may begin again, they are
ordinary ones, so that Spark runs a lost one again alone, while the others stay and keep their rows. When the driver
has heard of a loss, it calls all of them to another meeting: each ends its ranks' processes and forks new ones, which
are the next generation, and go on from the state that the driver has.

The task of a worker is an ordinary one too, and waits for no other. Its partition stays; every attempt has a number
of its own, by which parameter servers tell it from those before.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elephant.backends.process_environment import device_environment
from elephant.cluster.addresses import own_address
from elephant.cluster.spark_job import InputStreamError, ResultRow
from elephant.data.schema import ShardSummary
from elephant.errors import ENDED, ClusterError, ElephantError, PeerLostError, is_retryable
from elephant.monitor.events import RankFailure, TaskStarted
from elephant.monitor.trace import Phases
from elephant.net.addresses import Address, address_towards, listening_socket
from elephant.rank.executor import executor_above, executor_id, memory_is_short
from elephant.rank.process_pipe import SPARE
from elephant.rank.rank_info import RankInfo
from elephant.task.gpu_assignment import AssignedDevice, assign_devices, locked_devices
from elephant.task.gpu_devices import TaskDevices
from elephant.task.process import DISMISSED
from elephant.task.rendezvous import RankReport, agree, agreed_row_shapes, installed_versions, refuse_other_versions
from elephant.task.specs import CoordinatorSpec, RunContext, ServerAddresses, TaskSpec
from elephant.task.task import RankHandle, RankProcessError, RankProcessGroup, Task
from elephant.task.task_link import ChannelLink, StayingLink, TaskLink
from elephant.task.warm_processes import new_work_folder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import BarrierTaskContext, TaskContext

Results = list[tuple[int, bytes]]

# Processes that end before the ranks have met are started anew so often, and nobody else is told.
_EARLY_LOSSES = 3
# What is over before has no spare processes.
_SPARE_AFTER_S = 3.0
_ENDED = RankFailure(rank=0, kind=DISMISSED, message="the driver ended the run")
_LEAVES = RankFailure(rank=0, kind=DISMISSED, message="the Spark task was asked to end (SIGTERM)")
# The driver notices a frozen process too, and names it. Its task has to end it before Spark ends the task.
_DRIVER_FIRST_S = 1.0


def run_partition(spec: TaskSpec, run: RunContext, batches: Iterable[pa.RecordBatch]) -> Iterator[ResultRow]:
    """Runs the ranks of one task on one partition; a task of a barrier stage runs it."""
    from pyspark import BarrierTaskContext

    return RankTask(spec, run, BarrierTaskContext.get()).rows(batches)


def run_coordinator_partition(
    spec: TaskSpec, run: RunContext, coordinator: CoordinatorSpec, batches: Iterable[pa.RecordBatch]
) -> Iterator[ResultRow]:
    """Runs the ranks of one task, and the coordinator beside rank 0; a task of a barrier stage runs it."""
    from pyspark import BarrierTaskContext

    return RankTask(spec, run, BarrierTaskContext.get(), coordinator).rows(batches)


@dataclass(frozen=True)
class RankProcesses:
    """Processes of a task's ranks that were started, and wait for their places among all ranks."""

    group: RankProcessGroup
    listeners: list[socket.socket]  # that they inherit, one of each
    devices: TaskDevices
    error: ElephantError | None  # why the devices are not known


class SynchronousTask(Task):
    """One rank, or one of each GPU of the task, which trains together with all others.

    Args:
        address: Where ranks of other tasks reach those of this one.
    """

    def __init__(
        self, spec: TaskSpec, context: TaskContext, host: str, address: str, link_of: Callable[[TaskStarted], TaskLink]
    ) -> None:
        self._address = address
        super().__init__(spec, context, host, link_of)

    @contextlib.contextmanager
    def processes(self, variables: Mapping[str, str] | None = None) -> Iterator[RankProcesses]:
        """Starts the ranks' processes, which prepare what they can before the ranks have met, for a ``with`` block.

        Args:
            variables: More of their environment.
        """
        with contextlib.ExitStack() as closing:
            listeners = [closing.enter_context(self._listener()) for _ in range(self._count)]
            devices, error = self._devices_or_error()
            group = closing.enter_context(self._started(devices, [listener.fileno() for listener in listeners]))
            if not devices.shareable:
                # What is known: they need not wait for it until all ranks have met.
                group.send(_block(dict(variables or {})))
            yield RankProcesses(group, listeners, devices, error)

    def train(
        self,
        started: RankProcesses,
        write: Callable[[RankProcessGroup], Sequence[ShardSummary]],
        on_begun: Callable[[], None] | None = None,
    ) -> Results:
        """Has the ranks' processes meet the other ranks, and waits until they have ended.

        Args:
            started: What `processes` gave.
            write: Writes the rows where they are not there yet; returns what they are.
            on_begun: Called when the ranks begin.
        """
        group, listeners, devices = started.group, started.listeners, started.devices
        self._rank_processes = group
        self._phases.end("starting the process")
        reports = self._own_cards(devices, [listener.getsockname()[1] for listener in listeners])
        if started.error is None:
            reports = self._with_rows(reports, group, write)
        else:
            reports = _with_failure(reports, self._failure_of(started.error))
        self._phases.end("reading rows")
        met = self._link.exchange(reports)
        self._phases.end("meeting other ranks")
        ended = group.ended()
        if ended is not None and ended.failure.kind == ENDED:
            # The others only hear of it. What it has said itself, such as a missing module, is every rank's error.
            raise ended
        self._send_rank_info(met, devices, group, listeners)
        if self._spec.schema is not None:
            # What a fit makes its processes tell. What a function returns is this task's to hand on.
            self._link.hang_up()
        group.await_start()
        for listener in listeners:
            listener.close()
        if on_begun is not None:
            on_begun()
        group.wait(silence_s=self._spec.timeouts.heartbeat_s + _DRIVER_FIRST_S)
        return group.results()

    @property
    def may_have_spares(self) -> bool:
        """True if processes may wait on the executor, and build models there: not on GPUs."""
        devices, error = self._devices_or_error()
        return self._spec.warm.limit > 0 and error is None and not (devices.shareable or devices.assigned)

    def _listener(self) -> socket.socket:
        return listening_socket(self._address, ports=self._spec.ports)

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

    def write(self, batches: Iterable[pa.RecordBatch], rank_processes: RankProcessGroup) -> list[ShardSummary]:
        """Writes the rows to the ranks' shards."""
        return rank_processes.write(self._followed(batches), self._spec.schema)

    def _with_rows(
        self,
        reports: list[RankReport],
        rank_processes: RankProcessGroup,
        write: Callable[[RankProcessGroup], Sequence[ShardSummary]],
    ) -> list[RankReport]:
        """Returns the ranks' cards, with what is to be said of their rows.

        A failure goes into the cards, from which all ranks learn of it; not the loss of a process in a task that stays,
        of which the others need not hear.

        Raises:
            RankProcessError: A process has ended in a task that starts another one.
        """
        try:
            summaries = write(rank_processes)
        except InputStreamError:
            raise
        except Exception as error:
            return _with_failure(reports, self._failure_of(error))
        ended = rank_processes.ended()
        if ended is not None and self._shards is not None and is_retryable(ended.failure.kind):
            raise ended
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
        met = self._link.met
        return self._rank_info(
            rank_handle, assigned_devices, num_rows=[report.num_rows for report in reports],
            num_marked=[report.num_marked for report in reports], row_shapes=row_shapes,
            addresses=[(report.host, report.port) for report in reports], listener_fd=listener_fd,
            **({} if self._shards is None or met is None else {"generation": met.generation, "goes_on": met.goes_on}),
        )  # fmt: skip


class RankTask(SynchronousTask):
    """Ranks of one task of a barrier stage.

    Args:
        coordinator: What runs beside rank 0; None where the coordinator is on the driver.
    """

    def __init__(
        self, spec: TaskSpec, run: RunContext, context: BarrierTaskContext, coordinator: CoordinatorSpec | None = None
    ) -> None:
        hosts = [info.address.rsplit(":", 1)[0].strip("[]") for info in context.getTaskInfos()]
        host = hosts[context.partitionId()]
        address = own_address(host, hosts=hosts, driver=run.driver)

        def link_of(task: TaskStarted) -> TaskLink:
            if coordinator is None:
                return ChannelLink(spec, run, task, num_tasks=len(hosts))
            # What a coordinator needs, the tasks of most fits do not: each would take 0.1 s for it.
            from elephant.task.coordinator_task import RankZeroLink

            return RankZeroLink(coordinator, spec, run, task, context, address)

        super().__init__(spec, context, host, address, link_of)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Results:
        """Writes the rows, and has processes train on them with those of the other ranks."""
        with self.processes() as started:
            return self.train(started, functools.partial(self.write, batches))


def run_restartable_partition(
    spec: TaskSpec, run: RunContext, batches: Iterable[pa.RecordBatch]
) -> Iterator[ResultRow]:
    """Runs the ranks of one task on one partition; the function that ``mapInArrow`` runs."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise ClusterError("run_restartable_partition: expected to run in a Spark task. Received: a call outside.")
    return RestartableTask(spec, run, context).rows(batches)


class RestartableTask(SynchronousTask):
    """One rank, or one of each GPU of the task, whose processes may be several, one after the other."""

    def __init__(self, spec: TaskSpec, run: RunContext, context: TaskContext) -> None:
        self._summaries: list[ShardSummary] | None = None
        self._executor = executor_above(os.getpid())

        def link_of(task: TaskStarted) -> StayingLink:
            number = spec.plan.slots_needed
            self._staying_link = StayingLink(spec, run, task, num_tasks=number, end_processes=self.kill)
            return self._staying_link

        # Of the names that Spark has for hosts, an ordinary task hears nothing; the addresses of several hosts differ.
        address = address_towards(run.driver)
        super().__init__(spec, context, address, address, link_of)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Results:
        """Writes the rows, and has processes train on them until the driver says that it is done.

        Raises:
            RankProcessError: A rank has failed for good, or the driver has ended the run.
            PeerLostError: The driver is gone.
        """
        link, early_losses, spare = self._staying_link, 0, Spare(self)
        with contextlib.ExitStack() as closing:
            closing.callback(spare.close)
            self._shards = [new_work_folder("elephant-rows-") for _ in range(self._count)]
            for folder in self._shards:
                closing.callback(shutil.rmtree, folder, ignore_errors=True)
            while True:
                before = link.generation
                try:
                    with spare.processes() as started:
                        self.train(started, functools.partial(self._write_once, batches), spare.make_soon)
                except RankProcessError as error:
                    if link.generation == before and self._is_leaving:
                        raise RankProcessError(_LEAVES) from None
                    if link.generation == before:
                        early_losses += 1
                        if early_losses > _EARLY_LOSSES or not is_retryable(error.failure.kind):
                            raise
                        if self.has_lost_executor:
                            raise RankProcessError(_ENDED) from None
                        continue
                    link.report(self._failure_of(error))
                    if self._is_leaving:
                        raise RankProcessError(_LEAVES) from None
                except PeerLostError:
                    # The driver knows that this task is gone for it; another attempt comes.
                    if not link.is_released:
                        raise RankProcessError(_LEAVES if self._is_leaving else _ENDED) from None
                early_losses = 0
                if not link.await_word():
                    break
                if self._is_leaving:
                    raise RankProcessError(_LEAVES)
                if self.has_lost_executor:
                    raise RankProcessError(_ENDED)
                self._phases = Phases()
            if not link.is_released:
                raise RankProcessError(_ENDED)
        return []

    @property
    def has_lost_executor(self) -> bool:
        """True if the executor of this task has ended, which ends the task a moment later, with all that it starts."""
        return self._executor is not None and executor_above(os.getpid()) != self._executor

    def _write_once(self, batches: Iterable[pa.RecordBatch], rank_processes: RankProcessGroup) -> list[ShardSummary]:
        if self._summaries is None:
            self._summaries = self.write(batches, rank_processes)
        return self._summaries


class Spare:
    """Processes of a task's ranks that wait for a loss, with the model built and its step traced.

    They are made some seconds after the ranks have begun, beside these: short fits do without. Where models are built
    on GPUs, or memory is short, there are none.
    """

    def __init__(self, task: RestartableTask) -> None:
        self._task = task
        self._changing = threading.Lock()
        self._waiting_processes: tuple[contextlib.ExitStack, RankProcesses] | None = None
        self._timer: threading.Timer | None = None
        self._is_closed = False

    @contextlib.contextmanager
    def processes(self) -> Iterator[RankProcesses]:
        """Gives those that wait, or starts some, for a ``with`` block."""
        with self._changing:
            self._stop_timer()
            waiting, self._waiting_processes = self._waiting_processes, None
        if waiting is not None:
            closing, started = waiting
            with closing:
                if started.group.ended() is None:
                    yield started
                    return
        with self._task.processes() as started:
            yield started

    def make_soon(self) -> None:
        """Has some made in a while."""
        with self._changing:
            self._timer = threading.Timer(_SPARE_AFTER_S, self._make)
            self._timer.daemon = True
            self._timer.start()

    def _make(self) -> None:
        with self._changing, contextlib.ExitStack() as closing:
            if (
                self._is_closed
                or self._waiting_processes is not None
                or memory_is_short()
                or not self._task.may_have_spares
            ):
                return
            started = closing.enter_context(self._task.processes({SPARE: "1"}))
            self._waiting_processes = (closing.pop_all(), started)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """Ends those that wait."""
        with self._changing:
            self._is_closed = True
            self._stop_timer()
            waiting, self._waiting_processes = self._waiting_processes, None
        if waiting is not None:
            waiting[0].close()


def _with_failure(reports: Sequence[RankReport], failure: RankFailure) -> list[RankReport]:
    return [replace(report, failure=failure) for report in reports]


def _block(variables: dict[str, str]) -> bytes:
    """Returns variables of the environment as a process takes them."""
    return json.dumps(variables).encode()


def run_worker(
    spec: TaskSpec, run: RunContext, server_addresses: ServerAddresses, batches: Iterable[pa.RecordBatch]
) -> Iterator[ResultRow]:
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

    def run(self, batches: Iterable[pa.RecordBatch]) -> Results:
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
            self._rank_processes = rank_processes
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
