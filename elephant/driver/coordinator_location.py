"""Location of the coordinator: the driver, or rank 0 where executors cannot reach the driver.

The driver of a classic session is reached: Spark itself needs that. A client of Spark
Connect reaches its server, and nothing says that executors reach the client: it may sit
behind a firewall, or address translation. So it listens for a moment, and one task of a
small Spark job tries to come to it; what came of it holds as long as the session.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import secrets
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from elephant.checkpoint.manager import CheckpointWriter
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.checks.executor_facts import ask_executors
from elephant.cluster.session import is_remote, setting
from elephant.cluster.spark_job import SparkJob
from elephant.driver.coordinator import Coordinator
from elephant.driver.coordinator_policy import ReplayPolicy
from elephant.driver.launcher import RankJob, SparkLauncher, coordinate
from elephant.errors import ConfigurationError, NetworkError, first_line
from elephant.monitor.events import Event, StepEnded, unpacked
from elephant.monitor.progress import Progress
from elephant.net.addresses import Address, name_of
from elephant.net.handshake import NONCE_BYTES, PREAMBLE, PROOF_BYTES
from elephant.net.server import Server
from elephant.net.stream import Listener, Stream
from elephant.task.coordinator_task import EVENTS
from elephant.task.rank_task import run_coordinator_partition
from elephant.task.specs import CoordinatorSpec, RunContext, TaskSpec
from elephant.task.task import results_by_rank

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.cluster.row_source import RowSource, TaskFunction

# An address for documentation (RFC 5737): the way to it is the way to everywhere.
_ANYWHERE: Address = ("192.0.2.1", 9)

_TOKEN_BYTES = 32
_CONTEXT = "reachability probe"
_HANDSHAKE_S = 5.0

logger = logging.getLogger(__name__)
SETTING = "spark.elephant.coordinator"
_FORMER_SETTING = "spark.elephant.hosting"
_AUTO, _DRIVER, _EXECUTORS = "auto", "driver", "executors"
_PROBE_S = 3.0
# The first job of an application starts Python on its executors, which takes a busy machine long.
_ANSWER_S = 120.0
_reached: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


class ReachabilityProbe:
    """Answers whoever knows its token, from ``with`` to the end of the block; strangers do not keep others waiting.

    Attributes:
        address: Host and port that executors connect to.
        token: What they prove to know.

    Raises:
        NetworkError: The address cannot be listened on.
    """

    def __init__(self, host: str, advertised: str) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        listener = Listener.bind(host, handshake_timeout_s=_HANDSHAKE_S)
        self.address: Address = (advertised, listener.address[1])
        self._server = Server(listener, self.token, _CONTEXT, _close, name="elephant-probe")

    def __enter__(self) -> ReachabilityProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()


def _close(stream: Stream) -> None:
    """Has nothing more to say to who has proved itself."""


def connect_back_function(address: Address, token: bytes, timeout_s: float) -> Callable[[], str]:
    """Returns the function that connects an executor to the probe, and returns why it could not, or nothing.

    It is made here, inside another one, because Spark then sends its code along: that executor may have no elephant.
    It is the client's side of `elephant.net.handshake`.
    """
    preamble, context = PREAMBLE, _CONTEXT.encode()
    sizes = (len(PREAMBLE), len(PREAMBLE) + NONCE_BYTES, len(PREAMBLE) + NONCE_BYTES + PROOF_BYTES)

    def connect_back() -> str:
        import hashlib
        import hmac
        import os
        import socket

        def proof(role: bytes, nonces: bytes) -> bytes:
            return hmac.new(token, b"\0".join((preamble, role, nonces, context)), hashlib.sha256).digest()

        begin, middle, end = sizes
        own, answer = os.urandom(middle - begin), b""
        try:
            with socket.create_connection(address, timeout=timeout_s) as connection:
                connection.settimeout(timeout_s)
                connection.sendall(preamble + own)
                while len(answer) < end:
                    piece = connection.recv(end - len(answer))
                    if not piece:
                        break
                    answer += piece
                nonces = own + answer[begin:middle]
                if not hmac.compare_digest(answer[middle:], proof(b"server", nonces)):
                    return "another program answers there"
                connection.sendall(proof(b"client", nonces))
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return connect_back


def coordinates_on_executors(session: SparkSession) -> bool:
    """Returns whether the coordinator is to run beside rank 0, and not on the driver.

    Args:
        session: The Spark session; its ``spark.elephant.coordinator`` decides, unless that is ``auto`` or not set.

    Raises:
        ConfigurationError: The setting has another value, or its former name.
    """
    wanted = _wanted(session)
    if wanted != _AUTO:
        return wanted == _EXECUTORS
    if not is_remote(session):
        return False
    reached = _reached.get(session)
    if reached is None:
        reached = is_reached(session)
    if reached is None:
        # Not known, and tried again for the next fit: beside rank 0 it works in any case.
        return True
    _reached[session] = reached
    return not reached


def may_coordinate_on_executors(session: SparkSession) -> bool:
    """Returns whether the coordinator runs beside rank 0 at least where executors do not reach the driver.

    Raises:
        ConfigurationError: Its ``spark.elephant.coordinator`` has another value.
    """
    wanted = _wanted(session)
    return wanted == _EXECUTORS or (wanted == _AUTO and is_remote(session))


def _wanted(session: SparkSession) -> str:
    if former := setting(session, _FORMER_SETTING):
        raise ConfigurationError(
            f"{_FORMER_SETTING}: expected its new name, {SETTING}. Received: {former!r}. Set that one to it, and "
            f"unset {_FORMER_SETTING}."
        )
    wanted = setting(session, SETTING) or _AUTO
    if wanted not in (_AUTO, _DRIVER, _EXECUTORS):
        raise ConfigurationError(f"{SETTING}: expected auto, driver or executors. Received: {wanted!r}.")
    return wanted


def is_reached(session: SparkSession) -> bool | None:
    """Returns whether an executor reaches this process, which one task of a small Spark job tries.

    None says that no slot was free for that task in time, or that it failed, which the look at the cluster explains.
    """
    try:
        advertised, bind = driver_addresses(session)
        probe = ReachabilityProbe(bind, advertised)
    except NetworkError as error:
        logger.info("this client has no address for executors: %s", error)
        return False
    with probe:
        connect_back = connect_back_function(probe.address, probe.token, _PROBE_S)
        try:
            (hindrance,) = ask_executors(session, connect_back, tasks=1, timeout_s=_ANSWER_S)
        except Exception as error:
            logger.info("no executor has tried whether it reaches this client: %s", first_line(error))
            return None
    place = name_of(probe.address)
    logger.info("executors %s", f"do not reach this client at {place}: {hindrance}" if hindrance else f"reach {place}")
    return not hindrance


class SparkCoordinatorLauncher(SparkLauncher):
    """Starts ranks in a barrier stage, and the coordinator beside rank 0.

    Args:
        coordinator: What is beside rank 0.
    """

    is_barrier = True

    def __init__(self, rows: RowSource, coordinator: CoordinatorSpec, events: LoggedEvents) -> None:
        super().__init__(rows)
        self._coordinator = coordinator
        self._events = events

    def task(self, spec: TaskSpec, run: RunContext) -> TaskFunction:
        return functools.partial(run_coordinator_partition, spec, run, self._coordinator)

    def start(self, spec: TaskSpec, run: RunContext) -> SparkJob:
        job = super().start(spec, run)
        self._events.follow(job)
        return job


class LoggedEvents:
    """Events of a job that has ended, one after the other; while it runs there are none."""

    def __init__(self) -> None:
        self._job: SparkJob | None = None
        self._events: Iterator[Event] | None = None

    def follow(self, job: SparkJob) -> None:
        """Reads what this job leaves."""
        self._job = job

    def is_lost(self) -> bool:
        """Returns whether the job has failed, and what it would have left is gone."""
        return self._job is not None and self._job.error is not None

    def next_event(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None when there is none."""
        if self._job is None:
            return None
        if self._job.running:
            self._job.wait(timeout_s)
            return None
        if self._events is None:
            self._events = iter(unpacked(results_by_rank(self._job.rows).get(EVENTS, b"")))
        return next(self._events, None)

    @property
    def turned_away(self) -> Mapping[str, int]:
        """Nothing: rank 0 has seen who came, and has written it down."""
        return {}

    def dismiss(self) -> None:
        """Nothing: rank 0 has told the others."""


class WithoutSteps:
    """Shows all but steps: those of a record are there to tell the step of a failure."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def show(self, event: Event) -> None:
        """Shows an event."""
        if not isinstance(event, StepEnded):
            self._progress.show(event)

    def note(self, text: str) -> None:
        """Shows a line about the run as a whole."""
        self._progress.note(text)


def coordinate_on_executor(
    rows: RowSource,
    spec: TaskSpec,
    coordinator_spec: CoordinatorSpec,
    progress: Progress,
    checkpoint_writer: CheckpointWriter | None = None,
) -> tuple[Coordinator, RankJob]:
    """Runs ranks to their end, with the coordinator beside rank 0.

    Args:
        coordinator_spec: What is beside rank 0.
        progress: Shown what has happened, in the end.
        checkpoint_writer: Writes the last checkpoint, in the end; None makes none.

    Returns:
        A coordinator that has read the other one's events, and the ranks.
    """
    progress.note("rank 0 coordinates this run: its progress is shown when it has ended")
    events = LoggedEvents()
    coordinator = replay_coordinator(events, progress, checkpoint_writer, ranks_per_task=spec.plan.gpus_per_worker)
    run = RunContext(run_id=uuid.uuid4().hex, token=secrets.token_bytes(32), driver=_direction(rows.session))
    launcher = SparkCoordinatorLauncher(rows, coordinator_spec, events)
    return coordinator, coordinate(launcher, spec, run, events, coordinator)


def replay_coordinator(
    events: LoggedEvents,
    progress: Progress,
    checkpoint_writer: CheckpointWriter | None = None,
    *,
    ranks_per_task: int = 1,
) -> Coordinator:
    """Returns a coordinator that takes what rank 0 has written down of its run as if it were heard now."""
    policy = ReplayPolicy(events.is_lost, ranks_per_task=ranks_per_task)
    return Coordinator(events, WithoutSteps(progress), policy, checkpoint_writer)


def _direction(session: SparkSession) -> Address:
    """Returns an address in the direction of the cluster's own network, as executors see it."""
    host = (setting(session, "spark.driver.host") or "").strip("[]")
    try:
        return str(ipaddress.ip_address(host)), _ANYWHERE[1]
    except ValueError:
        return _ANYWHERE
