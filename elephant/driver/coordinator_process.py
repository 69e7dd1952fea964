"""Coordinator in a process beside rank 0: ``python -m elephant.driver.coordinator_process``.

It is started and watched as the process of a rank is (`elephant.rank.__main__`), by
the same Spark task. What it leaves is a record of all that it heard, which the driver
reads when the run has ended.
"""

from __future__ import annotations

import contextlib
import os
import pickle  # noqa: S403  (the callbacks come from the parent process, through an inherited pipe)
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elephant.checkpoint.state import FitState
from elephant.driver.asynchronous_fit import AsynchronousFit
from elephant.driver.coordinator import Coordinator
from elephant.driver.coordinator_policy import SynchronousPolicy
from elephant.driver.server_processes import DriverServers, parts_of
from elephant.monitor.channel import Channel
from elephant.monitor.event_log import EventLog
from elephant.monitor.events import FilesLeft, ServerCounts, StateSaved, TrainingFinished
from elephant.net.buffers import portable
from elephant.net.stream import Listener
from elephant.rank.__main__ import end, main
from elephant.rank.executor import quick_imports
from elephant.rank.process_pipe import USER_FOLDER
from elephant.rank.program import Program, load_job
from elephant.storage.filesystem import WORK_FOLDER, local_folder
from elephant.storage.user_files import taken_files
from elephant.task.specs import HEARD_FILE, AsyncFitSpec, CoordinatorInfo

if TYPE_CHECKING:
    from elephant.rank.job import TrainingJob


_REST_S = 0.3


class BarrierTasks:
    """The ranks' tasks, as far as their coordinator knows of them."""

    def __init__(self, event_log: EventLog, num_ranks: int) -> None:
        self._event_log = event_log
        self._num_ranks = num_ranks
        self.error: Exception | None = None

    @property
    def running(self) -> bool:
        """True if a rank has more to say."""
        return len(self._event_log.record.ended) < self._num_ranks


class CoordinatorProgram(Program):
    """Program that listens to ranks in the driver's place, from the moment on at which they have met."""

    def load(self, block: bytes) -> bytes:
        """Returns the job as it came: a rank that has failed may not wait as long as it takes to load it."""
        return block

    def prepare(self) -> None:
        """Prepare nothing, which would keep ranks waiting."""

    def start(self, job: bytes, block: bytes, on_dismissed: Callable[[], None]) -> bytes:
        """Listens until all ranks have ended, or one has failed; returns the record."""
        info, event_log = CoordinatorInfo.from_bytes(block), EventLog()
        listener = Listener(socket.socket(fileno=info.channel_fd))
        token = bytes.fromhex(info.token)
        with Channel(bind_host=listener, token=token, run_id=info.run_id, timeouts=info.timeouts) as channel:
            try:
                try:
                    self.coordinate(job, info, channel, event_log)
                finally:
                    _record_files(event_log)
            except BaseException:
                # A callback of the user's has failed, say: what was heard until then is worth as much as otherwise.
                (Path(os.environ[WORK_FOLDER]) / HEARD_FILE).write_bytes(event_log.to_bytes())
                raise
        return event_log.to_bytes()

    @abstractmethod
    def coordinate(self, job: bytes, info: CoordinatorInfo, channel: Channel, event_log: EventLog) -> None:
        """Does what the driver does otherwise, until the run has ended."""


class SynchronousCoordinatorProgram(CoordinatorProgram):
    """Coordinates ranks that take every step together: it has their channel."""

    subject = "The run"

    def coordinate(self, job: bytes, info: CoordinatorInfo, channel: Channel, event_log: EventLog) -> None:
        """Listens."""
        coordinator = Coordinator(channel, event_log, SynchronousPolicy())
        _listen(coordinator, info, channel, event_log)
        event_log.show(ServerCounts(rank=0, statistics=coordinator.statistics))


class AsynchronousCoordinatorProgram(CoordinatorProgram):
    """Coordinates an asynchronous fit: it has the channel, the parameter servers and the user's callbacks."""

    subject = "The model, its custom objects or a callback"

    def prepare(self) -> None:
        """Imports Keras, in a thread."""
        threading.Thread(target=_import_keras, name="elephant-imports", daemon=True).start()

    def coordinate(self, job: bytes, info: CoordinatorInfo, channel: Channel, event_log: EventLog) -> None:
        """Does what the driver does otherwise; at the end of the record is the trained model."""
        _import_keras()
        from elephant.driver.server_model import ServerModel

        fit: AsyncFitSpec = pickle.loads(info.extras)  # noqa: S301  (see the import)
        training: TrainingJob = replace(load_job(self.subject, job), callbacks=tuple(fit.callbacks), state=fit.state)
        token = bytes.fromhex(info.token)
        model = ServerModel(training, fit.rows)
        with contextlib.ExitStack() as closing:
            listeners = [socket.socket(fileno=descriptor) for descriptor in info.server_fds]
            parts = parts_of(model, training.config, info.run_id)
            servers = closing.enter_context(DriverServers(parts, listeners, token=token, folder=local_folder()))
            checkpoint_writer = LoggedCheckpoints(event_log) if fit.keeps else None
            running = closing.enter_context(
                AsynchronousFit(
                    training, model, servers, token, info.run_id, channel, event_log, checkpoint_writer,
                    num_ranks=info.num_ranks, end_attempt=None,
                )
            )  # fmt: skip
            _listen(running.coordinator, info, channel, event_log)
            if not running.coordinator.record.failures:
                result = running.result()
                event_log.show(ServerCounts(rank=0, statistics=result.statistics))
                arrays = tuple(portable(variable) for variable in result.variables)
                event_log.show(TrainingFinished(rank=0, rows=fit.rows.to_json(), arrays=arrays))


class LoggedCheckpoints:
    """Writes down from where the fit could go on, for the driver to keep."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log

    def keep(self, state: FitState) -> bool:
        """Takes a state; users hear of it from the driver, which keeps it."""
        self._event_log.show(StateSaved.of(state, rank=0))
        return False

    is_wanted = False

    def check(self) -> None:
        """Does nothing: no write can fail here."""


def _record_files(event_log: EventLog) -> None:
    """Notes what callbacks that run in this process have written to relative paths."""
    folder = Path(os.environ[WORK_FOLDER]) / USER_FOLDER
    if any(found := taken_files(folder)):
        event_log.show(FilesLeft.of(*found, rank=0, of_coordinator=True))


def _listen(coordinator: Coordinator, info: CoordinatorInfo, channel: Channel, event_log: EventLog) -> None:
    coordinator.until_ended(BarrierTasks(event_log, info.num_ranks))
    channel.dismiss()
    # A moment longer: what ranks print comes by ways of its own, and later than their end.
    event = channel.next_event(_REST_S)
    while event is not None:
        event_log.show(event)
        event = channel.next_event(_REST_S)


def _import_keras() -> None:
    with quick_imports():
        import elephant.driver.server_model  # noqa: F401


PROGRAMS: dict[str, Program] = {
    "synchronous": SynchronousCoordinatorProgram(),
    "asynchronous": AsynchronousCoordinatorProgram(),
}

if __name__ == "__main__":
    end(main(PROGRAMS))
