"""Parameter servers of a fit: processes beside the driver, or in tasks on executors.

Each is a process of its own (`elephant.parameter_server.process.ServerProcess`), which
keeps one contiguous part of the weights.

Servers on executors are for models, or numbers of workers, that outgrow the driver's host.
Each has a Spark task, which takes a slot, starts the server and tells the driver where it is.
It ends when the driver says so, or is gone.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from elephant.cluster.broadcast import for_tasks, in_task
from elephant.cluster.spark_job import RESULT_SCHEMA, SparkJob, cancellation, described
from elephant.config import FitConfig, Timeouts
from elephant.errors import (
    SUPERSEDED,
    ClusterError,
    ElephantError,
    NetworkError,
    ServerFailedError,
    kind_of,
    user_error,
)
from elephant.monitor.channel import Channel, ChannelClient
from elephant.monitor.events import Event, RankFailure, RankGone, RankSilent, Serving
from elephant.net.addresses import Address, Ports, address_towards
from elephant.parameter_server.layout import ALIGNED_VALUES, Layout, ServerSpec
from elephant.parameter_server.optimizers import without_clipping
from elephant.parameter_server.process import ServerProcess, listening_sockets, shard_specs
from elephant.storage.filesystem import local_folder
from elephant.task.specs import RunContext

if TYPE_CHECKING:
    from socket import socket

    from pyspark import Broadcast
    from pyspark.sql import SparkSession

    from elephant.driver.server_model import ServerModel

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_END_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerPart:
    """Part of the weights that one server keeps, and its first values.

    Args:
        spec: What it keeps, and how.
        values: Its weights, float32 of shape (num_values,).
        slots: The vectors of its rule, of the same shape.
        iterations: Updates that the rule has applied before the fit.
        state: The moving statistics, float64; those of the first server alone.
        push_log: What was pushed to it already, of a fit that goes on.
        tables: Rows of each whole table, and what its rule remembers, by name, or references to them.
    """

    spec: ServerSpec
    values: np.ndarray
    slots: Sequence[np.ndarray]
    iterations: int
    state: np.ndarray
    push_log: Mapping[int, Sequence[int]] = field(default_factory=dict)
    tables: Sequence[Mapping[str, np.ndarray]] = ()

    def served(self, listener: socket, token: bytes, folder: str | None = None) -> ServerProcess:
        """Starts the server's process.

        Args:
            folder: Where it keeps its snapshots; None leaves that to the system.
        """
        return ServerProcess(
            replace(self.spec, snapshot_folder=folder),
            listener,
            token,
            self.values,
            slots=self.slots,
            iterations=self.iterations,
            state=self.state,
            push_log=self.push_log,
            tables=self.tables,
            note=logger.info,
        )


def parts_of(model: ServerModel, config: FitConfig, run_id: str) -> list[ServerPart]:
    """Divides a model's weights over as many servers as were asked for, and as there are weights for."""
    options, layout = config.asynchronous, model.layout
    values, (slots, iterations), state, tables = model.weights(), model.slots(), model.state(), model.tables()
    count = number_of_parts(layout, config)
    whole = ServerSpec(
        run_id=run_id,
        layout=layout,
        first_value=0,
        num_values=layout.num_values,
        # Several servers see a part of a gradient each: the workers clip its norms.
        rule=model.rule if count == 1 else without_clipping(model.rule)[0],
        divide_by_staleness=config.new_algorithm().divides_by_staleness,
        locked=config.mode != "hogwild",
        max_staleness=options.max_staleness,
        rounds_from=model.first_epoch if config.trains_in_rounds else None,
        num_partitions=config.num_ranks,
        num_state_values=len(state),
        snapshot_seconds=options.snapshot_seconds,
        heartbeat_s=config.timeouts.heartbeat_s,
    )
    specs = shard_specs(whole, count)
    return [
        ServerPart(
            spec=spec,
            values=values[spec.first_value : spec.first_value + spec.num_values],
            slots=[slot[spec.first_value : spec.first_value + spec.num_values] for slot in slots],
            iterations=iterations,
            state=state if spec.num_state_values else np.empty(0),
            push_log=ledger,
            tables=tables,
        )
        for spec, ledger in zip(specs, model.ledgers(len(specs)), strict=True)
    ]


def number_of_parts(layout: Layout, config: FitConfig) -> int:
    """Returns how many servers a model's weights are divided over."""
    return min(config.asynchronous.parameter_servers, layout.num_values // ALIGNED_VALUES)


def require_ports(bind: str, port: int, count: int) -> None:
    """Raises ClusterError when one of the ports that servers are to have on this host is taken."""
    if port:
        for listener in listening_sockets(bind, port, count):
            listener.close()


class ServerGroup(ABC):
    """The servers of one fit; leaving its ``with`` block ends them."""

    @property
    @abstractmethod
    def addresses(self) -> tuple[Address, ...]:
        """Addresses for workers, in the order of the parts."""

    @property
    @abstractmethod
    def control_addresses(self) -> tuple[Address, ...]:
        """Addresses for the driver."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    def check(self) -> list[str]:
        """Returns lines for the user about changes, such as a server that has come back.

        Raises:
            TrainingError: One is lost for good.
        """
        self.require_alive()
        notes, self._notes = self._notes, []
        return notes

    @abstractmethod
    def _news(self) -> list[str]:
        """Returns lines for the user about what has changed since the last time; raises as `check` does."""

    def require_alive(self) -> None:
        """Raises what `check` raises where a server is lost for good; other news wait for that."""
        try:
            self._notes += self._news()
        except ServerFailedError as error:
            # Lost for good, as far as this run can tell.
            error.retryable = cancellation(error) is None
            raise

    @property
    @abstractmethod
    def restarts(self) -> int:
        """Number of restarts of servers."""

    @property
    def turned_away(self) -> Mapping[str, int]:
        """Connections to what listens here for their sake, by host, which were refused; they count their own."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Ends them, and removes what they kept on disks."""

    def __enter__(self) -> ServerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DriverServers(ServerGroup):
    """Servers beside this process: on the driver's host, or on that of rank 0, where the coordinator is beside it.

    Args:
        advertised: The address that executors reach them at; None means the one that they listen on.
        folder: Where they keep snapshots; None leaves that to the system.

    Raises:
        ClusterError: A server does not start.
    """

    def __init__(
        self,
        parts: Sequence[ServerPart],
        listeners: Sequence[socket],
        *,
        token: bytes,
        advertised: str | None = None,
        folder: str | None = None,
    ) -> None:
        super().__init__()
        self._closing = contextlib.ExitStack()
        self._watched: list[WatchedServer] = []
        bound = [(str(name[0]), int(name[1])) for name in (listener.getsockname() for listener in listeners)]
        for listener in listeners:
            self._closing.callback(listener.close)
        try:
            for index, (part, listener) in enumerate(zip(parts, listeners, strict=True)):
                server = part.served(listener, token, folder)
                self._closing.callback(server.close)
                self._watched.append(WatchedServer(server, index))
        except BaseException:
            self.close()
            raise
        self._addresses = tuple((advertised or host, port) for host, port in bound)
        # A driver behind a port that is mapped, as in a container, may not reach the address it gives to others.
        self._control_addresses = tuple(
            (advertised if advertised and is_wildcard(host) else host, port) for host, port in bound
        )

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self._addresses

    @property
    def control_addresses(self) -> tuple[Address, ...]:
        return self._control_addresses

    @property
    def restarts(self) -> int:
        return sum(watched.restarts for watched in self._watched)

    def _news(self) -> list[str]:
        return [note for watched in self._watched for note in watched.check()]

    def close(self) -> None:
        self._closing.close()


class WatchedServer:
    """A server's process, and what was told of it already."""

    def __init__(self, server: ServerProcess, index: int) -> None:
        self._server = server
        self._index = index
        self.restarts = 0

    def check(self) -> list[str]:
        """Returns a line when the process has come back since the last time; raises TrainingError when it will not."""
        if self._server.failure is not None:
            raise ServerFailedError(failure_text(self._index, self._server.failure))
        if self._server.restarts == self.restarts:
            return []
        self.restarts = self._server.restarts
        return [came_back(self._index)]


def failure_text(index: int, reason: str) -> str:
    """Returns the error text for a server that is lost for good."""
    return f"parameter server {index} failed: {reason}"


def came_back(index: int) -> str:
    """Returns the line about a server that has come back."""
    return f"parameter server {index} was lost: it has been started again from its last snapshot"


def is_wildcard(host: str) -> bool:
    """Returns whether an address to listen on means all addresses of the machine.

    >>> is_wildcard("0.0.0.0"), is_wildcard("::"), is_wildcard("127.0.0.1")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def host_server(
    parts: Sequence[ServerPart] | Broadcast[Sequence[ServerPart]],
    run: RunContext,
    port: int,
    ports: Ports,
    timeouts: Timeouts,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Hosts one server until the fit has ended; the function that ``mapInArrow`` runs.

    Args:
        port: The first server's port, or zero.
        ports: Among which it is free then.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    for _ in batches:
        pass
    index = 0 if context is None else context.partitionId()
    ended = threading.Event()
    # Leaving it waits for the driver to have heard everything, which one that is gone does not do.
    with (
        contextlib.suppress(NetworkError),
        ChannelClient(
            run.driver,
            token=run.token,
            run_id=run.run_id,
            rank=index,
            timeouts=timeouts,
            on_dismissed=ended.set,
        ) as client,
    ):
        host = address_towards(run.driver)
        try:
            if context is not None and context.attemptNumber() > 0:
                _stand_by(index, host, client, ended)
            else:
                with listening_sockets(host, port + index if port else 0, 1, ports)[0] as listener:
                    _host(in_task(parts)[index], index, listener, run, client, ended)
        except ElephantError as error:
            client.send(RankFailure(rank=index, host=host, kind=kind_of(error), message=str(error)))
    yield from ()


def _stand_by(index: int, host: str, client: ChannelClient, ended: threading.Event) -> None:
    """Does nothing until the fit ends: the weights are with the first attempt at this task, or are lost with it.

    Spark makes a second one when it is lost, which ends the fit; but with speculation on also because
    the first lasts so long. The driver knows which it was.
    """
    text = failure_text(index, "its executor was lost, and its part of the weights with it")
    client.send(RankFailure(rank=index, host=host, kind=SUPERSEDED, message=text))
    ended.wait()


def _host(
    part: ServerPart, index: int, listener: socket, run: RunContext, client: ChannelClient, ended: threading.Event
) -> None:
    """Runs one server, and tells the driver where it is whenever it has started."""
    with contextlib.ExitStack() as closing:
        server = part.served(listener, run.token, local_folder())
        closing.callback(server.close)
        watched, address = WatchedServer(server, index), listener.getsockname()
        client.send(Serving(rank=index, host=str(address[0]), port=int(address[1]), restarts=0))
        while not ended.wait(_POLL_S):
            if watched.check():
                client.send(Serving(rank=index, host=str(address[0]), port=int(address[1]), restarts=watched.restarts))


class ExecutorServers(ServerGroup):
    """Servers as tasks of a Spark stage of their own.

    Args:
        run: The fit; its driver's address is this object's own channel's.
        port: The first server's port; zero lets the system choose.
        ports: Among which.

    Raises:
        ClusterError: They have not all started in time, or a port is taken.
    """

    def __init__(
        self,
        session: SparkSession,
        parts: Sequence[ServerPart],
        *,
        run: RunContext,
        bind: str,
        port: int,
        ports: Ports,
        timeouts: Timeouts,
    ) -> None:
        super().__init__()
        self._serving: dict[int, Serving] = {}
        self._failure: str | None = None
        self._channel = Channel(bind_host=bind, token=run.token, run_id=run.run_id, timeouts=timeouts, ports=ports)
        here = RunContext(run_id=run.run_id, token=run.token, driver=(run.driver[0], self._channel.port))
        num_bytes = sum(vector.nbytes for part in parts for vector in (part.values, part.state, *part.slots))
        # All have the same.
        num_bytes += sum(array.nbytes for table in parts[0].tables for array in table.values())
        host = functools.partial(host_server, for_tasks(session, parts, num_bytes), here, port, ports, timeouts)
        stage = session.range(0, len(parts), 1, len(parts)).mapInArrow(host, RESULT_SCHEMA)
        with described(session, "parameter servers"):
            self._job = SparkJob(session, f"elephant-servers-{run.run_id}", stage.collect)
        try:
            self._await_all(len(parts), timeouts)
        except BaseException:
            self.close()
            raise

    def _await_all(self, count: int, timeouts: Timeouts) -> None:
        deadline = time.monotonic() + timeouts.connect_s
        while len(self._serving) < count:
            self._answers(_POLL_S)
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"serverPlacement='executors': expected {count} parameter servers in {timeouts.connect_s:.0f} s. "
                    f"Received: {len(self._serving)}. Each needs a task slot of its own, besides those of workers: "
                    "give the application more executors or cores, or lower parameterServers."
                )

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple((self._serving[index].host, self._serving[index].port) for index in sorted(self._serving))

    @property
    def control_addresses(self) -> tuple[Address, ...]:
        return self.addresses

    @property
    def restarts(self) -> int:
        return sum(serving.restarts for serving in self._serving.values())

    @property
    def turned_away(self) -> Mapping[str, int]:
        return self._channel.turned_away

    def _news(self) -> list[str]:
        return self._answers(0.0)

    def _answers(self, timeout_s: float) -> list[str]:
        notes = []
        cancelled = None if self._job.running else cancellation(self._job.error)
        if cancelled is not None:
            # Its servers say that they are lost, too: that comes of it.
            raise cancelled
        event = self._channel.next_event(timeout_s)
        while event is not None:
            notes += self._keep(event)
            event = self._channel.next_event(0.0)
        if self._failure is not None:
            raise ServerFailedError(self._failure)
        if not self._job.running:
            raise ServerFailedError(f"the Spark stage of the parameter servers has ended: {self._job.error}")
        return notes

    def _keep(self, event: Event) -> list[str]:
        if isinstance(event, Serving):
            before = self._serving.get(event.rank)
            self._serving[event.rank] = event
            return [came_back(event.rank)] if before is not None and before.restarts < event.restarts else []
        if isinstance(event, RankFailure):
            if event.kind == SUPERSEDED and event.rank in self._serving:
                # Spark speculates. If the one that serves were lost, its connection would say so.
                return []
            about_user = user_error(event.kind, event.message)
            if about_user is not None:
                raise about_user
            self._failure = self._failure or f"{event.message} (on {event.host})"
        elif isinstance(event, RankGone | RankSilent):
            self._failure = self._failure or failure_text(event.rank, "its task, or the executor, is lost")
        return []

    def close(self) -> None:
        self._channel.dismiss()
        deadline = time.monotonic() + _END_GRACE_S
        while self._job.running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._job.cancel()
        self._channel.close()
