"""Links of Spark tasks in a run whose driver they cannot reach: rank 0 takes the driver's place.

Rank 0 starts the coordinator's process beside its own, and says in the ranks' one exchange
where it listens. A rank that fails does not fail its task, with which all that was told would be
lost: what was heard, and what went wrong, are rows of the job as its results are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elephant.backends.process_environment import process_environment
from elephant.cluster.broadcast import in_task
from elephant.cluster.spark_job import ResultRow
from elephant.errors import COORDINATOR_LOST, ENDED, FROZEN, ElephantError, kind_of
from elephant.monitor.events import Event, Printed, RankFailure, TaskStarted, packed
from elephant.monitor.log_stream import is_noise
from elephant.parameter_server.process import listening_sockets
from elephant.task.process import DISMISSED, Lines, RankProcess
from elephant.task.process_watch import ProcessWatch
from elephant.task.rendezvous import RankReport
from elephant.task.specs import HEARD_FILE, CoordinatorInfo, CoordinatorSpec, RunContext, ServerAddresses, TaskSpec
from elephant.task.task import RankProcessError, result_rows
from elephant.task.task_link import TaskLink, channel_output, exchanged

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

# In the place of a rank, of rows that hold events and no rank's result.
EVENTS = -1
_MAX_EARLY_LINES = 200
# For the coordinator to end after a rank has failed, or of a loss that it waits to be explained.
_AFTER_FAILURE_S = 20.0
_HOLDS = "what is in memory there: the cache, batchSize, and the model, which the coordinator may keep as well"


class RankZeroLink(TaskLink):
    """Link of a task in a run whose coordinator is a process beside rank 0."""

    def __init__(
        self,
        coordinator: CoordinatorSpec,
        spec: TaskSpec,
        run: RunContext,
        task: TaskStarted,
        context: BarrierTaskContext,
        address: str,
    ) -> None:
        super().__init__(spec, run, task)
        self._coordinator = coordinator
        self._context = context
        self._address = address
        self._handle: CoordinatorHandle | None = None
        self._handle_failure: RankFailure | None = None
        self._has_met = False
        self._early_lines: list[tuple[int, EarlyOutput]] = []

    def open(self) -> None:
        """Starts the coordinator, where this is the task of rank 0. The others hear in the exchange that it failed."""
        if self._task.rank == 0:
            try:
                self._handle = CoordinatorHandle(self._coordinator, self._spec, self._address)
            except (ElephantError, OSError) as error:
                self._handle_failure = RankFailure(kind=kind_of(error), message=str(error))

    def exchange(self, reports: Sequence[RankReport]) -> list[RankReport]:
        # There is no channel yet, nor a driver that could make this exchange.
        own = [self._with_coordinator(report) if report.rank == 0 else report for report in reports]
        met = exchanged(lambda text: list(self._context.allGather(text)), own)
        first = met[0]
        if first.coordinator_ports:
            channel, *servers = [(first.host, port) for port in first.coordinator_ports]
            self.run, self._has_met = replace(self.run, driver=channel), True
            if servers:
                layout = self._coordinator.layout
                self.servers = ServerAddresses(servers=tuple(servers), layout=layout, num_workers=len(met))
            for rank, lines in self._early_lines:
                lines.begin(channel_output(self.run, self._spec, rank, self._task.host))
        if self._handle is not None:
            self._handle.begin(self.run, num_ranks=len(met))
        return met

    def _with_coordinator(self, report: RankReport) -> RankReport:
        if self._handle is not None:
            return replace(report, coordinator_ports=self._handle.ports)
        return report if report.failure is not None else replace(report, failure=self._handle_failure)

    def output(self, rank: int) -> Lines | None:
        if not self._spec.shows_output:
            return None
        lines = EarlyOutput()
        self._early_lines.append((rank, lines))
        return lines

    def fail(self, failure: RankFailure) -> Iterator[ResultRow]:
        """Yields the failure: the task goes on, or all that was heard would be lost with it."""
        own: list[Event] = [] if failure.kind == DISMISSED else [failure]
        if own and self._has_met:
            self.send(failure)
        # What the coordinator heard comes first: it knows which rank was the first to fail.
        record = b"" if self._handle is None else self._record(self._handle, within_s=_AFTER_FAILURE_S)
        return result_rows(EVENTS, record + packed(own))

    def end(self) -> Iterator[ResultRow]:
        """Yields the events that were heard here."""
        return iter(()) if self._handle is None else result_rows(EVENTS, self._record(self._handle))

    def check(self) -> None:
        """Does nothing: before the ranks have met, nobody knows of their coordinator."""

    def hang_up(self) -> None:
        """Does nothing: the driver hears of this task from Spark alone."""

    def leave(self) -> None:
        """Does nothing: the loss of a task ends the run."""

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()

    def _record(self, handle: CoordinatorHandle, *, within_s: float | None = None) -> bytes:
        """Returns the coordinator's record and its output, with the cause of its failure, if it failed."""
        try:
            record = handle.record(within_s)
        except RankProcessError as error:
            if error.failure.kind == DISMISSED:
                return b""
            record = handle.heard() + packed([_as_of_coordinator(error.failure).at(self._task)])
        return record + packed(handle.printed(self._task.host))


def _as_of_coordinator(failure: RankFailure) -> RankFailure:
    """Returns the failure of the run that the coordinator's is: of its own code's errors what it says, as before."""
    if failure.kind not in (ENDED, FROZEN):
        return failure
    text = f"the coordinator of the run, a process of its own beside rank 0, is lost: {failure.message}"
    return replace(failure, kind=COORDINATOR_LOST, message=text, step=None)


class CoordinatorHandle:
    """The coordinator's process and the sockets that it listens on.

    Raises:
        ClusterError: A port is taken.
    """

    def __init__(self, coordinator_spec: CoordinatorSpec, spec: TaskSpec, address: str) -> None:
        self._spec, self._coordinator_spec = spec, coordinator_spec
        self._watch: ProcessWatch | None = None
        self._printed = EarlyOutput() if spec.shows_output else None
        self._closing = contextlib.ExitStack()
        try:
            self._sockets = [
                *listening_sockets(address, 0, 1, spec.ports),
                *listening_sockets(address, coordinator_spec.port, coordinator_spec.servers, spec.ports),
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
        # It may have to come from the driver: before there is a process that would be left.
        job = in_task(spec.job)
        # The coordinator needs one thread and no GPU: ranks have the GPUs.
        environment = process_environment(threads=1, devices=[], backend=spec.backend, more=spec.environment)
        process = RankProcess(
            self._coordinator_spec.program,
            environment,
            more_fds=descriptors,
            module="elephant.driver.coordinator_process",
            lines=self._printed,
            keeps_files=spec.brings_files,
            holds=_HOLDS,
        )
        process.send(job)
        # No variables besides: they are those of devices, of which it has none.
        process.send(b"{}")
        return process

    def begin(self, run: RunContext, *, num_ranks: int) -> None:
        """Tells the process its place, now that the ranks have met."""
        channel, *servers = [sock.fileno() for sock in self._sockets]
        info = CoordinatorInfo(
            run_id=run.run_id,
            token=run.token.hex(),
            num_ranks=num_ranks,
            channel_fd=channel,
            server_fds=servers,
            timeouts=self._spec.timeouts,
            extras=in_task(self._coordinator_spec.extras),
        )
        self._process.send(info.to_bytes())
        for sock in self._sockets:
            sock.close()
        # From now on, ranks wait for it: they hear of its end, and of nothing else.
        self._watch = ProcessWatch(self._process, silence_s=self._spec.timeouts.heartbeat_s)

    def record(self, within_s: float | None = None) -> bytes:
        """Waits until the run has ended as the coordinator sees it; returns what it has written down.

        Args:
            within_s: How long to wait at most, after which there is nothing; None waits.

        Raises:
            RankProcessError: The process has failed.
        """
        if self._watch is None:
            return b""
        if within_s is not None and not self._watch.ends_within(within_s):
            if self._process.silent_s < within_s / 2:
                return b""
            # Ranks may have failed of it, and heard no more than that it does not answer.
            raise RankProcessError(RankFailure(kind=FROZEN, message=f"it gave no sign of life for {within_s / 2:g} s"))
        failure = self._watch.failure.result()
        if failure is not None:
            raise RankProcessError(failure)
        return self._process.result()

    def heard(self) -> bytes:
        """Returns the events that the process had recorded when it failed."""
        file = self._process.work_folder / HEARD_FILE
        return file.read_bytes() if file.exists() else b""

    def printed(self, name: str) -> list[Event]:
        """Returns the process' output, as lines of rank 0: the user's callbacks run in it."""
        if self._printed is None:
            return []
        lines, left_out = self._printed.taken()
        return [Printed(rank=0, host=name, lines=lines, left_out=left_out)] if lines else []

    def close(self) -> None:
        """Ends the process and the sockets."""
        if self._watch is not None:
            self._watch.close()
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
