"""Links of Spark tasks: to the other tasks of their run, and to its coordinator."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from elephant.config import Timeouts
from elephant.errors import SUPERSEDED, NetworkError, PeerLostError, TrainingError, first_line
from elephant.monitor.channel import ChannelClient
from elephant.monitor.events import RankFailure, TaskStarted
from elephant.monitor.log_stream import OutputStream
from elephant.rank.executor import DRIVER
from elephant.task.process import DISMISSED, Lines
from elephant.task.rendezvous import RankReport
from elephant.task.specs import RunContext, ServerAddresses, TaskSpec

logger = logging.getLogger(__name__)
_ENDED_WITHIN_S = 10.0
_CONNECTED_WITHIN_S = _CANCELLED_WITHIN_S = 1.0
# Until an executor has heard of it too.
_CANCELLED_EVERYWHERE_S = 0.1


class TaskLink(ABC):
    """Link of one task to the others, and to the coordinator.

    Attributes:
        run: How to reach the coordinator.
        servers: Parameter servers that it has started; None where it has none.
    """

    def __init__(self, spec: TaskSpec, run: RunContext, task: TaskStarted) -> None:
        self.run = run
        self.servers: ServerAddresses | None = None
        self._spec = spec
        self._task = task

    @abstractmethod
    def open(self) -> None:
        """Begins to tell the coordinator that the task lives."""

    @abstractmethod
    def exchange(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """Waits for the tasks of all ranks; returns the reports of all, by rank."""

    @abstractmethod
    def output(self, rank: int) -> Lines | None:
        """Returns the receiver of lines that a rank's process prints; None where the driver does not show them."""

    @abstractmethod
    def hang_up(self) -> None:
        """Does nothing: the ranks' processes tell the coordinator that they live."""

    @abstractmethod
    def check(self) -> None:
        """Raises PeerLostError where the run is known to be over: nobody else may end this task."""

    @abstractmethod
    def fail(self, failure: RankFailure) -> Iterator[pa.RecordBatch]:
        """Reports the failure of a rank; yields rows of `elephant.task.task.result_rows`, or fails the task."""

    def end(self) -> Iterator[pa.RecordBatch]:
        """Yields rows of `elephant.task.task.result_rows` besides the ranks' own, when these have ended well."""
        return iter(())

    @abstractmethod
    def close(self) -> None:
        """Ends all that was opened."""

    def send(self, failure: RankFailure) -> None:
        """Reports a failure to the coordinator, and to the log of the executor, where users of Spark look."""
        report_failure(self.run, self._spec.timeouts, failure)
        if self._task.executor != DRIVER:
            sys.stderr.write(f"{failure.traceback or failure.message}\n")


class ChannelLink(TaskLink):
    """Link over the channel of a coordinator that is there before the tasks: the driver's."""

    def __init__(self, spec: TaskSpec, run: RunContext, task: TaskStarted, *, num_tasks: int = 1) -> None:
        super().__init__(spec, run, task)
        self._num_tasks = num_tasks
        self._channel: ChannelClient | None = None

    def open(self) -> None:
        """Begins to tell the driver that the task lives: one that is frozen must not be waited for."""
        self._channel = self._connected(self._spec.timeouts)

    def _connected(self, timeouts: Timeouts) -> ChannelClient:
        run = self.run
        client = ChannelClient(run.driver, token=run.token, run_id=run.run_id, rank=self._task.rank, timeouts=timeouts)
        client.send(self._task)
        return client

    def check(self) -> None:
        if self._channel is not None and self._channel.await_end(0.0):
            raise PeerLostError("expected the driver to wait for the rows. It has ended the run, or is gone.")

    def hang_up(self) -> None:
        if self._channel is not None:
            self._channel.hang_up()

    def close(self) -> None:
        self.hang_up()

    def exchange(self, reports: Sequence[RankReport]) -> list[RankReport]:
        return exchanged(self._meet, reports)

    def _meet(self, text: str) -> list[str]:
        if self._channel is None:
            raise PeerLostError("expected a connection to the driver. Received: none.")
        return self._channel.meet(text, num_tasks=self._num_tasks)

    def output(self, rank: int) -> Lines | None:
        return channel_output(self.run, self._spec, rank, self._task.host)

    def fail(self, failure: RankFailure) -> Iterator[pa.RecordBatch]:
        """Tells the driver why a rank has failed, and fails the task."""
        if failure.kind != DISMISSED:
            # A worker that Spark runs again is not to wait for a driver that goes on.
            from elephant.errors import is_retryable

            goes_on = self._spec.program in ("asynchronous", "gossip") and is_retryable(failure.kind)
            with contextlib.nullcontext() if goes_on else self._until_cancelled():
                self.send(failure)
        if failure.kind == SUPERSEDED:
            # To be ended by the driver, which Spark does not count as a failure of the task; it does count errors.
            time.sleep(_ENDED_WITHIN_S)
        # One line: the driver has the rest, and Spark prints this one several times.
        place, reason = f"rank {failure.rank} on {failure.host}", first_line(failure.message)
        raise TrainingError(f"{place}: {failure.kind}: {reason}") from None

    @contextlib.contextmanager
    def _until_cancelled(self) -> Iterator[None]:
        """Waits a moment for the driver to cancel the job: of a cancelled task Spark prints a line, not a stack."""
        with contextlib.suppress(NetworkError):
            if self._channel is None or self._channel.await_end(0.0):
                self._channel = self._connected(replace(self._spec.timeouts, connect_s=_CONNECTED_WITHIN_S))
        yield
        if self._channel is not None:
            self._channel.await_end(_CANCELLED_WITHIN_S)
            time.sleep(_CANCELLED_EVERYWHERE_S)


def exchanged(gather: Callable[[str], list[str]], reports: Sequence[RankReport]) -> list[RankReport]:
    """Returns the reports of all ranks.

    Raises:
        PeerLostError: A task has failed, and takes part no more.
    """
    try:
        texts = gather(json.dumps([report.to_text() for report in reports]))
    except NetworkError:
        raise
    except Exception as error:
        raise PeerLostError(f"another rank's Spark task failed before the ranks had met: {error}") from error
    return [RankReport.from_text(report) for text in texts for report in json.loads(text)]


def channel_output(run: RunContext, spec: TaskSpec, rank: int, host: str) -> Lines | None:
    """Returns a stream of lines of a rank's process to the coordinator; None where the driver does not show them."""
    if not spec.shows_output:
        return None
    return OutputStream(run.driver, token=run.token, run_id=run.run_id, rank=rank, host=host, timeouts=spec.timeouts)


def report_failure(run: RunContext, timeouts: Timeouts, failure: RankFailure) -> None:
    """Tells the coordinator of a run that a rank has failed, where it can be reached."""
    # Who only follows others into failure has nothing to tell that is worth waiting for.
    timeouts = replace(timeouts, connect_s=1.0 if failure.is_echo else 5.0)
    try:
        with ChannelClient(
            run.driver, token=run.token, run_id=run.run_id, rank=failure.rank, timeouts=timeouts
        ) as client:
            client.send(failure)
    except NetworkError:
        # The driver is gone, or cannot be reached: Spark's own report of the exception is what remains.
        logger.warning("could not tell the driver: %s\n%s", failure.message, failure.traceback)
