"""Location of the coordinator: the driver, or rank 0 where executors cannot reach the driver.

The driver of a classic session is reached: Spark itself needs that. A client of Spark
Connect reaches its server, and nothing says that executors reach the client: it may sit
behind a firewall, or address translation. So it listens for a moment, and one task of a
small Spark job tries to come to it; what came of it holds as long as the session.
"""

from __future__ import annotations

import functools
import logging
import secrets
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from elephant.checkpoint.manager import CheckpointSink
from elephant.cluster.addresses import driver_addresses
from elephant.cluster.checks.executor_facts import ask_executors
from elephant.cluster.session import is_remote, ports_of, session_settings, setting
from elephant.cluster.spark_job import end_attempt
from elephant.driver.coordinator import Coordinator
from elephant.driver.launcher import RankJob, SparkBarrierLauncher, SparkRestartableLauncher
from elephant.driver.recovery.generations import Recovering
from elephant.driver.replay import attempt_beside_rank_0
from elephant.driver.run_ranks import RestartsOfTasks, RunAttempt, Turns, attempt_here
from elephant.errors import ConfigurationError, NetworkError, first_line
from elephant.monitor.progress import Progress
from elephant.net.addresses import Address, Ports, name_of
from elephant.net.handshake import NONCE_BYTES, PREAMBLE, PROOF_BYTES
from elephant.net.server import Server
from elephant.net.stream import Listener, Stream
from elephant.task.specs import CoordinatorSpec, TaskSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from elephant.cluster.row_source import RowSource

Result = TypeVar("Result")
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

    def __init__(self, host: str, advertised: str, ports: Ports = None) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        listener = Listener.bind(host, ports=ports, handshake_timeout_s=_HANDSHAKE_S)
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
        probe = ReachabilityProbe(bind, advertised, ports_of(None, session_settings(session)))
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


def attempts_at_ranks(
    session: SparkSession,
    spec: TaskSpec,
    progress: Progress,
    *,
    result: Callable[[Coordinator, RankJob], Result],
    checkpoint_writer: CheckpointSink | None = None,
    turns: Turns | None = None,
    recovering: Recovering | None = None,
) -> Callable[[RowSource], AbstractContextManager[RunAttempt[Result]]]:
    """Returns a function that opens an attempt at ranks of one job, with the coordinator where it can be.

    Args:
        session: The Spark session.
        spec: What the run asks for.
        progress: Shown what happens.
        result: What comes of ranks that have ended well.
        checkpoint_writer: Writes checkpoints; None makes none.
        turns: Runs callbacks on the driver, where the coordinator is there; None where there are none.
        recovering: Has ranks begin again within the job, where the coordinator is on the driver; None ends the attempt
            with a loss.
    """
    if coordinates_on_executors(session):
        beside = CoordinatorSpec(program="synchronous")
        return functools.partial(
            attempt_beside_rank_0,
            beside,
            spec,
            progress,
            result=result,
            checkpoint_writer=checkpoint_writer,
        )
    recovery = None
    if recovering is not None:
        recovery = RestartsOfTasks(recovering, spec, functools.partial(end_attempt, session))
    return functools.partial(
        attempt_here,
        SparkBarrierLauncher if recovery is None else SparkRestartableLauncher,
        spec,
        progress,
        result=result,
        checkpoint_writer=checkpoint_writer,
        turns=turns,
        recovery=recovery,
    )
