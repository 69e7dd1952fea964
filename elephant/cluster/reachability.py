"""Probe of the way from executors to the driver: it listens for a moment, and tasks try to come to it.

Spark's own ports say little about those of a fit, which a firewall may not know.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from elephant.cluster.addresses import driver_addresses
from elephant.cluster.session import is_remote, ports_of, session_settings, setting
from elephant.errors import NetworkError
from elephant.net.addresses import Address, Ports, name_of
from elephant.net.handshake import NONCE_BYTES, PREAMBLE, PROOF_BYTES
from elephant.net.server import Server
from elephant.net.stream import Listener, Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COORDINATOR, EXECUTORS = "spark.elephant.coordinator", "executors"
_TOKEN_BYTES = 32
_CONTEXT = "reachability probe"
_HANDSHAKE_S = 5.0
# Packets that a firewall drops are never answered.
_CONNECT_S = 5.0


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


@contextlib.contextmanager
def probe_of(session: SparkSession, timeout_s: float) -> Iterator[tuple[str, Callable[[], str]]]:
    """Listens on the driver of a session until the block ends.

    Yields:
        The place that executors connect to, and the function with which they do, in so many seconds.

    Raises:
        NetworkError: The driver has no address for executors, or cannot listen on it.
    """
    advertised, bind = driver_addresses(session)
    with ReachabilityProbe(bind, advertised, ports_of(None, session_settings(session))) as probe:
        yield name_of(probe.address), connect_back_function(probe.address, probe.token, timeout_s)


@contextlib.contextmanager
def way_to_driver(session: SparkSession) -> Iterator[tuple[str, Callable[[], str] | None]]:
    """Listens on the driver of a classic session, whose fits executors have to reach, until the block ends.

    Yields:
        The place that executors connect to, and the function with which they do; "" and None where they need not, or
        where the driver has no address for them, which the fit tells.
    """
    if is_remote(session) or setting(session, COORDINATOR) == EXECUTORS:
        yield "", None
        return
    with contextlib.ExitStack() as closing:
        place, connect_back = "", None
        with contextlib.suppress(NetworkError):
            place, connect_back = closing.enter_context(probe_of(session, _CONNECT_S))
        yield place, connect_back
