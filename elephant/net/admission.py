"""Connections that have not proved yet that they know the token: few, briefly, and none waits for another.

Whoever reaches the port gets this far, so nothing here costs more than a socket
and a few bytes per stranger. The handshakes of all pending connections go on side
by side in the one thread that accepts.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from dataclasses import dataclass, field

from elephant.errors import NetworkError, PeerLostError
from elephant.net import transfer
from elephant.net.authentication import Handshake, Step, server_handshake

logger = logging.getLogger(__name__)

# Hosts that are told apart: whoever reaches the port may come from as many addresses as it likes.
MOST_HOSTS = 32
OTHERS = "other hosts"


@dataclass
class _Candidate:
    sock: socket.socket
    peer: str
    handshake: Handshake
    step: Step
    expires: float
    received: bytearray = field(default_factory=bytearray)


class Admissions:
    """The pending handshakes of one listener.

    Args:
        max_pending: Connections in a handshake at a time. When one more comes, the oldest is
            closed: a client that means it needs milliseconds, and tries again.
        handshake_timeout_s: Seconds that one handshake may take.

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
            transfer.prepare(sock)
        except OSError:
            sock.close()
            return
        handshake = server_handshake(*self._terms)
        expires = time.monotonic() + self._timeout_s
        self._candidates[sock.fileno()] = _Candidate(sock, peer, handshake, next(handshake), expires)

    def advance(self, descriptor: int) -> tuple[socket.socket, str] | None:
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
        while True:
            missing = candidate.step.receive - len(candidate.received)
            if missing > 0:
                buffer = bytearray(missing)
                count = transfer.receive_some(candidate.sock, memoryview(buffer), candidate.peer)
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
