"""What a Spark task does in a run whose driver it cannot reach: as others do, with rank 0 in the driver's place.

Rank 0 starts the host's process beside its own, and says in the ranks' one exchange
where it listens. A rank that fails does not fail its task, with which all that was told would be
lost: what was heard, and what went wrong, are rows of the job as its results are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from elephant.cluster.coordinator_spec import HEARD_FILE, CoordinatorInfo, CoordinatorSpec
from elephant.cluster.gpu.assignment import AssignedDevice
from elephant.cluster.process import DISMISSED, Lines, RankProcess, process_environment
from elephant.cluster.rank_task import RankTask
from elephant.cluster.rendezvous import RankReport
from elephant.cluster.task import RankHandle, RankProcessError, RunContext, ServerAddresses, TaskSpec, result_rows
from elephant.data.shard import ShardSummary
from elephant.errors import ElephantError, kind_of
from elephant.monitor.channel import ChannelClient
from elephant.monitor.event_log import packed
from elephant.monitor.events import Event, Printed, RankFailure
from elephant.monitor.log_stream import is_noise
from elephant.net.addresses import Address
from elephant.parameter_server.process import listening_sockets
from elephant.training.rank_info import RankInfo, WorkerInfo

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

# In the place of a rank, of rows that hold events and no rank's result.
EVENTS = -1
_MAX_EARLY_LINES = 200
# For the host to end after a rank has failed, which it hears of, or of a loss that it waits to be explained.
_AFTER_FAILURE_S = 20.0
_POLL_S = 0.05


def run_coordinator_partition(
    spec: TaskSpec, run: RunContext, host: CoordinatorSpec, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs one rank on one partition; the function that ``mapInArrow(barrier=True)`` runs."""
    from pyspark import BarrierTaskContext

    return CoordinatorTask(spec, run, host, BarrierTaskContext.get()).rows(batches)


class CoordinatorTask(RankTask):
    """One rank of a run that rank 0 hosts.

    Args:
        spec: What the run asks for.
        run: Which attempt this is; its driver is not reached, and only tells a direction.
        host: What rank 0 hosts.
        context: Spark's context of the task.
    """

    def __init__(self, spec: TaskSpec, run: RunContext, host: CoordinatorSpec, context: BarrierTaskContext) -> None:
        super().__init__(spec, run, context)
        self._host_spec = host
        self._host: CoordinatorHandle | None = None
        self._host_failure: RankFailure | None = None
        self._servers: list[Address] = []
        self._met = False
        self._early_lines: list[tuple[int, EarlyOutput]] = []

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs the rank, and the host beside rank 0.

        Yields:
            The rank's result, and the events that were heard here, see `elephant.cluster.task.result_rows`.
        """
        with contextlib.ExitStack() as closing:
            if self.rank == 0:
                try:
                    self._host = closing.enter_context(CoordinatorHandle(self._host_spec, self._spec, self._address))
                except (ElephantError, OSError) as error:
                    self._host_failure = RankFailure(kind=kind_of(error), message=str(error))
            failed = False
            for batch in super().rows(batches):
                failed = failed or batch.column("rank")[0].as_py() == EVENTS
                yield batch
            if self._host is not None and not failed:
                yield from result_rows(EVENTS, self._record(self._host))

    def _failed(self, failed: RankFailure) -> Iterator[pa.RecordBatch]:
        told: list[Event] = [] if failed.kind == DISMISSED else [failed]
        if told and self._met:
            self._send(failed)
        # What the host heard comes first: it knows which rank was the first to fail.
        record = b"" if self._host is None else self._record(self._host, within_s=_AFTER_FAILURE_S)
        return result_rows(EVENTS, record + packed(told))

    def _record(self, host: CoordinatorHandle, *, within_s: float | None = None) -> bytes:
        """Returns what the host has written down, and printed; with why it has failed, if it did."""
        try:
            record = host.record(within_s)
        except RankProcessError as error:
            if error.failure.kind == DISMISSED:
                return b""
            record = host.heard() + packed([self._failure_of(error)])
        return record + packed(host.printed(self.host))

    def _exchange(self, cards: Sequence[RankReport]) -> list[RankReport]:
        if self.rank == 0:
            cards = [self._with_host(cards[0]), *cards[1:]]
        met = super()._exchange(cards)
        first = met[0]
        if first.hosted:
            channel, *servers = [(first.host, port) for port in first.hosted]
            self._run, self._servers, self._met = replace(self._run, driver=channel), servers, True
            for rank, lines in self._early_lines:
                lines.begin(super()._output(rank))
        if self._host is not None:
            self._host.begin(self._run, num_ranks=len(met))
        return met

    def _connected(self) -> ChannelClient | None:
        """Nobody: the driver is out of reach, and hears of this task from Spark alone."""
        return None

    def _gathered(self, text: str) -> list[str]:
        # There is no channel yet, nor a driver that could make this exchange.
        return list(self._context.allGather(text))

    def _with_host(self, card: RankReport) -> RankReport:
        if self._host is not None:
            return replace(card, hosted=self._host.ports)
        return card if card.failure is not None else replace(card, failure=self._host_failure)

    def _output(self, rank: int) -> Lines | None:
        if not self._spec.shows_output:
            return None
        lines = EarlyOutput()
        self._early_lines.append((rank, lines))
        return lines

    def _rank_info(
        self,
        cards: Sequence[RankReport],
        rank_handle: RankHandle,
        placed: AssignedDevice,
        row_shapes: dict[str, tuple[int, ...]],
        listener_fd: int,
    ) -> RankInfo | WorkerInfo:
        if not self._servers:
            return super()._rank_info(cards, rank_handle, placed, row_shapes, listener_fd)
        card = cards[rank_handle.rank]
        rows = ShardSummary(num_rows=card.num_rows, num_validation=card.num_marked, row_shapes=card.row_shapes)
        served = ServerAddresses(servers=tuple(self._servers), layout=self._host_spec.layout, num_workers=len(cards))
        return self._assignment(rank_handle, placed, rows, served)


class CoordinatorHandle:
    """The host's process and the sockets that it listens on; leaving the ``with`` block ends both.

    Args:
        host: What it hosts.
        spec: What the run asks for.
        address: The address of this machine that the other ranks reach it at.

    Raises:
        ClusterError: A port is taken.
    """

    def __init__(self, host: CoordinatorSpec, spec: TaskSpec, address: str) -> None:
        self._spec, self._host = spec, host
        self._begun = False
        self._printed = EarlyOutput() if spec.shows_output else None
        self._closing = contextlib.ExitStack()
        try:
            self._sockets = [
                *listening_sockets(address, 0, 1),
                *listening_sockets(address, host.port, host.servers),
            ]
            for sock in self._sockets:
                self._closing.callback(sock.close)
            self._process = self._closing.enter_context(self._start())
        except BaseException:
            self._closing.close()
            raise
        self.ports = [int(sock.getsockname()[1]) for sock in self._sockets]

    def _start(self) -> RankProcess:
        spec, descriptors = self._spec, [sock.fileno() for sock in self._sockets]
        # Of what it is for one thread is enough, and none of the GPUs, which the ranks have.
        environment = process_environment(threads=1, devices=[], backend=spec.backend, more=spec.environment)
        process = RankProcess(
            self._host.program,
            environment,
            more_fds=descriptors,
            module="elephant.cluster.coordinator_process",
            lines=self._printed,
        )
        process.send(spec.job)
        # No variables besides: they are those of devices, of which it has none.
        process.send(b"{}")
        return process

    def begin(self, run: RunContext, *, num_ranks: int) -> None:
        """Tells the process its place, now that the ranks have met."""
        channel, *servers = [sock.fileno() for sock in self._sockets]
        place = CoordinatorInfo(
            run_id=run.run_id,
            token=run.token.hex(),
            num_ranks=num_ranks,
            channel_fd=channel,
            server_fds=servers,
            timeouts=self._spec.timeouts,
            extras=self._host.extras,
        )
        self._process.send(place.to_bytes())
        for sock in self._sockets:
            sock.close()
        self._begun = True

    def record(self, within_s: float | None = None) -> bytes:
        """Waits until the run has ended as the host sees it; returns what it has written down.

        Args:
            within_s: How long to wait at most, after which there is nothing; None waits.

        Raises:
            RankProcessError: The process has failed.
        """
        if not self._begun or (within_s is not None and not self._ends(within_s)):
            return b""
        failure = self._process.wait(silence_s=self._spec.timeouts.heartbeat_s)
        if failure is not None:
            raise RankProcessError(failure)
        return self._process.result()

    def heard(self) -> bytes:
        """Returns what the process had heard when it failed."""
        file = self._process.work_folder / HEARD_FILE
        return file.read_bytes() if file.exists() else b""

    def printed(self, name: str) -> list[Event]:
        """Returns what the process has printed, as lines of rank 0: the user's callbacks run in it.

        Args:
            name: Where it runs, for the reader.
        """
        if self._printed is None:
            return []
        lines, left_out = self._printed.taken()
        return [Printed(rank=0, host=name, lines=lines, left_out=left_out)] if lines else []

    def _ends(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while self._process.running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self._process.running

    def __enter__(self) -> CoordinatorHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


class EarlyOutput:
    """Keeps lines that a process prints, the first 200 of them, until it is known where they go."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._saved: list[str] = []
        self._left_out = 0
        self._lines: Lines | None = None

    def begin(self, lines: Lines | None) -> None:
        """Sends there what was kept, and what comes from now on."""
        with self._changing:
            self._lines = lines
            kept, self._saved = self._saved, []
        for line in kept:
            self.add(line)

    def add(self, line: str) -> None:
        """Takes one line."""
        if not line.strip() or is_noise(line):
            return
        with self._changing:
            lines = self._lines
            if lines is None and len(self._saved) < _MAX_EARLY_LINES:
                self._saved.append(line)
            elif lines is None:
                self._left_out += 1
        if lines is not None:
            lines.add(line)

    def taken(self) -> tuple[list[str], int]:
        """Returns the lines that were kept, and how many more there were."""
        with self._changing:
            return list(self._saved), self._left_out

    def close(self) -> None:
        """Takes no more."""
        if self._lines is not None:
            self._lines.close()
