"""Parameter servers on executors: one task of a Spark stage each, which lasts as long as the fit.

For models, or numbers of workers, that outgrow the driver's host. Each task takes a
slot, starts its server on its executor and tells the driver where it is; it ends when
the driver says so, or is gone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from elephant.cluster.server_processes import ServerGroup, ServerPart, WatchedServer, came_back, failure_text
from elephant.cluster.spark_job import SparkJob, cancellation
from elephant.cluster.task import RESULT_SCHEMA, SUPERSEDED, RunContext
from elephant.config import Timeouts
from elephant.errors import ClusterError, ElephantError, NetworkError, ServerFailedError, kind_of, user_error
from elephant.monitor.channel import Channel, ChannelClient
from elephant.monitor.events import Event, RankFailure, RankGone, RankSilent, Serving
from elephant.net.addresses import Address, address_towards
from elephant.parameter_server.process import listening_sockets
from elephant.storage.filesystem import local_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.2
_END_GRACE_S = 5.0


def host_server(
    parts: Sequence[ServerPart], run: RunContext, port: int, timeouts: Timeouts, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Hosts one server until the fit has ended; the function that ``mapInArrow`` runs.

    Args:
        port: The first server's port, or zero.
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
                _host(parts[index], index, host, port + index if port else 0, run, client, ended)
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
    part: ServerPart, index: int, host: str, port: int, run: RunContext, client: ChannelClient, ended: threading.Event
) -> None:
    """Runs one server, and tells the driver where it is whenever it has started."""
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(listening_sockets(host, port, 1)[0])
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
        timeouts: Timeouts,
    ) -> None:
        self._serving: dict[int, Serving] = {}
        self._failure: str | None = None
        self._channel = Channel(bind_host=bind, token=run.token, run_id=run.run_id, timeouts=timeouts)
        here = RunContext(run_id=run.run_id, token=run.token, driver=(run.driver[0], self._channel.port))
        host = functools.partial(host_server, parts, here, port, timeouts)
        stage = session.range(0, len(parts), 1, len(parts)).mapInArrow(host, RESULT_SCHEMA)
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

    def check(self) -> list[str]:
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
