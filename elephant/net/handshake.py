"""The handshake of every port: proof of a shared token, and limits on who has not given it yet.

Three messages of fixed length, in the manner of the challenge and response of ISO/IEC 9798-4
(mutual authentication with a keyed check function)::

    client -> server   preamble, client's nonce
    server -> client   preamble, server's nonce, HMAC-SHA256(token, "server", both nonces, context)
    client -> server   HMAC-SHA256(token, "client", both nonces, context)

The nonces make a recorded conversation worthless, the roles stop a proof from being
sent back to its maker, and the context (the run id, and the edge of a ring) stops
a connection from being used for anything else. A side that is not convinced sends zeros
in the place of its own proof, so that the other side knows at once. The proof covers
the start of a connection: what follows is neither encrypted nor signed, except in a run
whose token has it encrypted; there all of this happens inside TLS. See `elephant.net.tls`.

Whoever reaches the port gets this far, so nothing here costs more than a socket
and a few bytes per stranger. The handshakes of all pending connections go on side
by side in the one thread that accepts.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from elephant.errors import AuthenticationError, ConfigurationError, NetworkError, PeerLostError, ProtocolError
from elephant.net import socket_io, tls
from elephant.net.deadline import Deadline
from elephant.net.tls import AnySocket, TlsSocket

PREAMBLE = b"elephant/auth/1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
MIN_TOKEN_BYTES = 16
REFUSAL = bytes(PROOF_BYTES)
HELLO_BYTES = len(PREAMBLE) + NONCE_BYTES

logger = logging.getLogger(__name__)
# Hosts that are told apart: whoever reaches the port may come from as many addresses as it likes.
MOST_HOSTS = 32
OTHERS = "other hosts"


@dataclass(frozen=True)
class Step:
    """One step of a handshake: bytes to send, and then how many to receive before the next step."""

    send: bytes
    receive: int


Handshake = Generator[Step, bytes, None]


def check_token(token: bytes) -> None:
    """Raises ConfigurationError unless the token is bytes, and enough of them."""
    if not isinstance(token, bytes) or len(token) < MIN_TOKEN_BYTES:
        received = f"{len(token)} bytes" if isinstance(token, bytes) else type(token).__name__
        raise ConfigurationError(f"token: expected at least {MIN_TOKEN_BYTES} random bytes. Received: {received}.")


def proof(token: bytes, role: str, client_nonce: bytes, server_nonce: bytes, context: str) -> bytes:
    """Returns the 32 bytes with which ``role`` ("client" or "server") shows that it knows the token."""
    message = b"\0".join((PREAMBLE, role.encode("ascii"), client_nonce + server_nonce, context.encode("utf-8")))
    return hmac.new(token, message, hashlib.sha256).digest()


def client_handshake(token: bytes, context: str, nonce: bytes | None = None) -> Handshake:
    """Yields the steps of the side that connected.

    Args:
        token: The job's random token, 16 bytes or more.
        context: What the connection is for; both sides must name the same.
        nonce: 32 bytes never used before; drawn here when None. Tests give one.

    Raises:
        AuthenticationError: The server did not prove that it knows the token and the context.
        ProtocolError: The other side is no server of this protocol.
    """
    check_token(token)
    own = nonce or os.urandom(NONCE_BYTES)
    answer = yield Step(PREAMBLE + own, HELLO_BYTES + PROOF_BYTES)
    server_nonce = _nonce_of(answer[:HELLO_BYTES])
    if not hmac.compare_digest(answer[HELLO_BYTES:], proof(token, "server", own, server_nonce, context)):
        yield Step(REFUSAL, 0)
        raise AuthenticationError(_refused("server", context))
    yield Step(proof(token, "client", own, server_nonce, context), 0)


def server_handshake(token: bytes, context: str, nonce: bytes | None = None) -> Handshake:
    """Yields the steps of the side that accepted; arguments and errors mirror those of ``client_handshake``."""
    check_token(token)
    own = nonce or os.urandom(NONCE_BYTES)
    client_nonce = _nonce_of((yield Step(b"", HELLO_BYTES)))
    answer = yield Step(PREAMBLE + own + proof(token, "server", client_nonce, own, context), PROOF_BYTES)
    if not hmac.compare_digest(answer, proof(token, "client", client_nonce, own, context)):
        raise AuthenticationError(_refused("client", context))


def perform(handshake: Handshake, sock: AnySocket, deadline: Deadline, peer: str) -> None:
    """Runs a handshake over a connected, non-blocking socket, and before it that of TLS, where the socket has one.

    Raises:
        AuthenticationError: The other side does not know the token or the context.
        ProtocolError: It does not speak this protocol.
        PeerLostError: It closed the connection.
        DeadlineExceededError: It did not answer in time.
    """
    while isinstance(sock, TlsSocket) and (events := sock.advance_handshake(peer)):
        socket_io.wait(sock, events, deadline)
    step = next(handshake)
    try:
        while True:
            socket_io.send_all(sock, [step.send], deadline, peer)
            answer = bytearray(step.receive)
            socket_io.receive_into(sock, memoryview(answer), deadline, peer)
            step = handshake.send(bytes(answer))
    except StopIteration:
        return


def _nonce_of(hello: bytes) -> bytes:
    if not hello.startswith(PREAMBLE):
        raise ProtocolError(f"Expected a peer that greets with {PREAMBLE!r}. Received: {hello[: len(PREAMBLE)]!r}.")
    return hello[len(PREAMBLE) :]


def _refused(role: str, context: str) -> str:
    return (
        f"Expected a {role} that knows this job's token, for {context!r}. Received: a proof that does not hold. "
        "The two sides belong to different runs, or disagree on what the connection is for."
    )


@dataclass
class _Candidate:
    sock: AnySocket
    peer: str
    handshake: Handshake
    step: Step
    expires: float
    is_secured: bool = False
    received: bytearray = field(default_factory=bytearray)


class Admissions:
    """The pending handshakes of one listener.

    Args:
        max_pending: Connections in a handshake at a time. When one more comes, the oldest is
            closed: a client that means it needs milliseconds, and tries again.

    Attributes:
        turned_away: How many connections of each host were closed without a proof; those of the first 32 hosts, and
            of all others together.
        last_reason: Why the last one was.
    """

    def __init__(self, *, max_pending: int, handshake_timeout_s: float) -> None:
        self._max_pending = max_pending
        self._timeout_s = handshake_timeout_s
        self._candidates: dict[int, _Candidate] = {}
        self._terms: tuple[bytes, str] = (b"", "")
        self.turned_away: dict[str, int] = {}
        self.last_reason = ""

    @property
    def descriptors(self) -> list[int]:
        """File descriptors of the pending connections."""
        return list(self._candidates)

    @property
    def next_expiry_s(self) -> float:
        """Seconds until the oldest handshake has taken too long; infinity where none is pending."""
        oldest = next(iter(self._candidates.values()), None)
        return float("inf") if oldest is None else max(oldest.expires - time.monotonic(), 0.0)

    def set_terms(self, token: bytes, context: str) -> None:
        """Names what newcomers must prove; handshakes begun on other terms are given up."""
        if self._terms != (token, context):
            self.close()
            self._terms = (token, context)

    def add(self, sock: socket.socket, peer: str) -> None:
        """Begins the handshake of a connection that was just accepted, and takes the socket over."""
        if len(self._candidates) >= self._max_pending:
            self._turn_away(next(iter(self._candidates)), f"more than {self._max_pending} connections at a time")
        try:
            socket_io.prepare(sock)
        except OSError:
            sock.close()
            return
        secured = tls.secured(sock, self._terms[0], is_server=True)
        handshake = server_handshake(*self._terms)
        expires = time.monotonic() + self._timeout_s
        self._candidates[sock.fileno()] = _Candidate(secured, peer, handshake, next(handshake), expires)

    def advance(self, descriptor: int) -> tuple[AnySocket, str] | None:
        """Reads what a pending connection sent; returns its socket and peer's name once the proof has come.

        A connection that fails is closed and counted, and no error is raised.
        """
        candidate = self._candidates.get(descriptor)
        if candidate is None:
            return None
        try:
            if not self._run(candidate):
                return None
        except NetworkError as error:
            self._turn_away(descriptor, str(error))
            return None
        del self._candidates[descriptor]
        return candidate.sock, candidate.peer

    def expire(self) -> None:
        """Closes the connections whose handshake has taken too long."""
        while self._candidates and self.next_expiry_s <= 0:
            self._turn_away(next(iter(self._candidates)), f"no proof within {self._timeout_s:g} s")

    def close(self) -> None:
        """Closes every pending connection."""
        for candidate in self._candidates.values():
            candidate.sock.close()
        self._candidates.clear()

    def _run(self, candidate: _Candidate) -> bool:
        """Takes the handshake as far as the bytes that have arrived carry it; returns whether it is over."""
        sock = candidate.sock
        if isinstance(sock, TlsSocket) and not candidate.is_secured:
            if sock.advance_handshake(candidate.peer):
                return False
            candidate.is_secured = True
        while True:
            missing = candidate.step.receive - len(candidate.received)
            if missing > 0:
                buffer = bytearray(missing)
                count = socket_io.receive_some(sock, memoryview(buffer), candidate.peer)
                if count is None:
                    return False
                candidate.received += buffer[:count]
                continue
            answer = bytes(candidate.received)
            candidate.received.clear()
            try:
                candidate.step = candidate.handshake.send(answer)
            except StopIteration:
                return True
            _send_whole(candidate)

    def _turn_away(self, descriptor: int, reason: str) -> None:
        candidate = self._candidates.pop(descriptor)
        with contextlib.suppress(OSError):
            candidate.sock.close()
        host = candidate.peer.rpartition(":")[0].strip("[]") or candidate.peer
        if host not in self.turned_away and len(self.turned_away) >= MOST_HOSTS:
            host = OTHERS
        self.turned_away[host] = self.turned_away.get(host, 0) + 1
        self.last_reason = f"{candidate.peer}: {reason}"
        logger.debug("Turned away %s", self.last_reason)


def _send_whole(candidate: _Candidate) -> None:
    """Sends a step's few bytes, for which a new connection always has room."""
    try:
        sent = candidate.sock.send(candidate.step.send)
    except OSError as error:
        raise PeerLostError(f"The connection to {candidate.peer} was lost: {error}.") from error
    if sent != len(candidate.step.send):
        raise PeerLostError(f"{candidate.peer} does not read.")
