"""Links of Spark tasks: to the other tasks of their run, and to its coordinator."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from elephant.cluster.spark_job import ResultRow
from elephant.config import Timeouts
from elephant.errors import SUPERSEDED, NetworkError, PeerLostError, TrainingError, first_line
from elephant.monitor.channel import ChannelClient, Met
from elephant.monitor.events import Event, Joined, RankFailure, TaskStarted
from elephant.monitor.log_stream import OutputStream
from elephant.monitor.meetings import AGAIN, RELEASED
from elephant.net.frames import Message, require
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
        met: What the coordinator said when the tasks had met last; None before.
    """

    def __init__(self, spec: TaskSpec, run: RunContext, task: TaskStarted) -> None:
        self.run = run
        self.servers: ServerAddresses | None = None
        self.met: Met | None = None
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
    def fail(self, failure: RankFailure) -> Iterator[ResultRow]:
        """Reports the failure of a rank; yields rows of `elephant.task.task.result_rows`, or fails the task."""

    def end(self) -> Iterator[ResultRow]:
        """Yields rows of `elephant.task.task.result_rows` besides the ranks' own, when these have ended well."""
        return iter(())

    @abstractmethod
    def leave(self) -> None:
        """Ends the wait for other tasks, where these then wait for another attempt; called in another thread."""

    @abstractmethod
    def close(self) -> None:
        """Ends all that was opened."""

    def send(self, failure: RankFailure) -> None:
        """Reports a failure to the coordinator, and to the log of the executor, where users of Spark look."""
        report_failure(self.run, self._spec.timeouts, failure)
        self.log(failure)

    def log(self, failure: RankFailure) -> None:
        """Writes a failure to the log of the executor, unless that is the driver's console."""
        if self._task.executor != DRIVER:
            sys.stderr.write(f"{failure.traceback or failure.message}\n")


class ChannelLink(TaskLink):
    """Link over the channel of a coordinator that is there before the tasks: the driver's.

    Args:
        num_tasks: Tasks that meet.
        on_end: Called in the thread that listens where the driver says no more.
        on_message: More that the driver may say; see `elephant.monitor.channel.ChannelClient`.
    """

    def __init__(
        self,
        spec: TaskSpec,
        run: RunContext,
        task: TaskStarted,
        *,
        num_tasks: int = 1,
        on_end: Callable[[], None] | None = None,
        on_message: Mapping[str, Callable[[Message], None]] | None = None,
    ) -> None:
        super().__init__(spec, run, task)
        self._num_tasks = num_tasks
        self._on_end = on_end
        self._on_message = on_message
        self._channel: ChannelClient | None = None

    def open(self) -> None:
        """Begins to tell the driver that the task lives: one that is frozen must not be waited for."""
        self._channel = self._connected(self._spec.timeouts)

    def _connected(self, timeouts: Timeouts) -> ChannelClient:
        run = self.run
        client = ChannelClient(
            run.driver,
            token=run.token,
            run_id=run.run_id,
            rank=self._task.rank,
            timeouts=timeouts,
            on_dismissed=self._on_end,
            on_message=self._on_message,
        )
        client.send(self._task)
        return client

    @property
    def last_word(self) -> str:
        """The word with which the driver has ended what it says; none as long as it may say more."""
        return "" if self._channel is None else self._channel.last_word

    def tell(self, *events: Event) -> None:
        """Tells the driver something over this connection; one that is broken is noticed by who listens there."""
        if self._channel is not None:
            with contextlib.suppress(NetworkError):
                for event in events:
                    self._channel.send(event)

    def check(self) -> None:
        if self._channel is not None and self._channel.await_end(0.0):
            raise PeerLostError("expected the driver to wait for the rows. It has ended the run, or is gone.")

    def hang_up(self) -> None:
        if self._channel is not None:
            self._channel.hang_up()

    def leave(self) -> None:
        """Does nothing: the loss of a task ends the run, or the task waits for no others."""

    def close(self) -> None:
        self.hang_up()

    def exchange(self, reports: Sequence[RankReport]) -> list[RankReport]:
        return exchanged(self._meet, reports)

    def _meet(self, text: str) -> list[str]:
        if self._channel is None:
            raise PeerLostError("expected a connection to the driver. Received: none.")
        self.met = self._channel.meet(text, num_tasks=self._num_tasks)
        return self.met.texts

    def output(self, rank: int) -> Lines | None:
        return channel_output(self.run, self._spec, rank, self._task.host)

    def fail(self, failure: RankFailure) -> Iterator[ResultRow]:
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
            if not self._task.stays and (self._channel is None or self._channel.await_end(0.0)):
                self._channel = self._connected(replace(self._spec.timeouts, connect_s=_CONNECTED_WITHIN_S))
        yield
        if self._channel is not None:
            self._channel.await_end(_CANCELLED_WITHIN_S)
            time.sleep(_CANCELLED_EVERYWHERE_S)


class StayingLink(ChannelLink):
    """Link of a task that starts its ranks' processes anew when the driver calls the tasks to another meeting.

    Args:
        end_processes: Ends those that there are, at once; called in the thread that listens.
    """

    def __init__(
        self, spec: TaskSpec, run: RunContext, task: TaskStarted, *, num_tasks: int, end_processes: Callable[[], None]
    ) -> None:
        heard = {AGAIN: self._take_call}
        super().__init__(
            spec, run, replace(task, stays=True), num_tasks=num_tasks, on_end=self._take_end, on_message=heard
        )
        self._end_processes = end_processes
        self._called = 0
        self._is_over = False
        self._is_meeting = self._has_left = False
        self._hearing = threading.Condition()

    def _take_call(self, message: Message) -> None:
        require(message.fields, {"generation": int}, AGAIN)
        self._called = message.fields["generation"]
        # Before anybody hears of it, who may start others.
        self._end_processes()
        with self._hearing:
            self._hearing.notify_all()

    def _take_end(self) -> None:
        # Where the driver says that it ends, the ranks' processes hear it themselves, and tell it what they leave.
        if not self.last_word:
            self._end_processes()
        with self._hearing:
            self._is_over = True
            self._hearing.notify_all()

    @property
    def generation(self) -> int:
        """The number of the last meeting; -1 before the first one."""
        return -1 if self.met is None else self.met.generation

    @property
    def is_released(self) -> bool:
        """True if the ranks have done what the run is for, or another attempt at this task does it."""
        return self.last_word == RELEASED

    @property
    def is_called(self) -> bool:
        """True if the driver has called another meeting since the last one."""
        return self._called > self.generation

    def exchange(self, reports: Sequence[RankReport]) -> list[RankReport]:
        with self._hearing:
            if self._has_left:
                raise PeerLostError("expected a task that stays. It was asked to end.")
            self._is_meeting = True
        try:
            return super().exchange(reports)
        finally:
            self._is_meeting = False

    def leave(self) -> None:
        with self._hearing:
            self._has_left = True
        if self._is_meeting:
            super().hang_up()

    def hang_up(self) -> None:
        """Does nothing: it stays."""

    def close(self) -> None:
        super().hang_up()

    def report(self, failure: RankFailure) -> None:
        """Tells the driver that a rank has failed, which then decides what becomes of the fit."""
        if self.is_called or self._is_over or failure.kind == DISMISSED:
            return
        self.tell(Joined(rank=failure.rank, generation=self.generation), failure)
        self.log(failure)

    def await_word(self) -> bool:
        """Waits until the driver calls another meeting, or says no more; returns whether it has called."""
        with self._hearing:
            self._hearing.wait_for(lambda: self.is_called or self._is_over)
            return self.is_called and not self._is_over


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
