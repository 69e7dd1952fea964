"""Mutual proof that both ends of a connection know the job's token, before anything is parsed.

Three messages of fixed length, in the manner of the challenge and response of ISO/IEC 9798-4
(mutual authentication with a keyed check function)::

    client -> server   greeting, client's nonce
    server -> client   greeting, server's nonce, HMAC-SHA256(token, "server", both nonces, context)
    client -> server   HMAC-SHA256(token, "client", both nonces, context)

The nonces make a recorded conversation worthless, the roles stop a proof from being
sent back to its maker, and the context (the run id, and the edge of a ring) stops
a connection from being used for anything else. A side that is not convinced sends zeros
in the place of its own proof, so that the other side knows at once. The proof covers
the start of a connection: what follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Generator
from dataclasses import dataclass

from elephant.errors import AuthenticationError, ConfigurationError, ProtocolError
from elephant.net import transfer
from elephant.net.deadline import Deadline

GREETING = b"elephant/auth/1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
MIN_TOKEN_BYTES = 16
REFUSAL = bytes(PROOF_BYTES)

_HELLO_BYTES = len(GREETING) + NONCE_BYTES


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
    message = b"\0".join((GREETING, role.encode("ascii"), client_nonce + server_nonce, context.encode("utf-8")))
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
    answer = yield Step(GREETING + own, _HELLO_BYTES + PROOF_BYTES)
    server_nonce = _nonce_of(answer[:_HELLO_BYTES])
    if not hmac.compare_digest(answer[_HELLO_BYTES:], proof(token, "server", own, server_nonce, context)):
        yield Step(REFUSAL, 0)
        raise AuthenticationError(_refused("server", context))
    yield Step(proof(token, "client", own, server_nonce, context), 0)


def server_handshake(token: bytes, context: str, nonce: bytes | None = None) -> Handshake:
    """Yields the steps of the side that accepted; arguments and errors mirror those of ``client_handshake``."""
    check_token(token)
    own = nonce or os.urandom(NONCE_BYTES)
    client_nonce = _nonce_of((yield Step(b"", _HELLO_BYTES)))
    answer = yield Step(GREETING + own + proof(token, "server", client_nonce, own, context), PROOF_BYTES)
    if not hmac.compare_digest(answer, proof(token, "client", client_nonce, own, context)):
        raise AuthenticationError(_refused("client", context))


def perform(handshake: Handshake, sock: socket.socket, deadline: Deadline, peer: str) -> None:
    """Runs a handshake over a connected, non-blocking socket.

    Raises:
        AuthenticationError: The other side does not know the token or the context.
        ProtocolError: It does not speak this protocol.
        PeerLostError: It closed the connection.
        DeadlineExceededError: It did not answer in time.
    """
    step = next(handshake)
    try:
        while True:
            transfer.send_all(sock, [step.send], deadline, peer)
            answer = bytearray(step.receive)
            transfer.receive_into(sock, memoryview(answer), deadline, peer)
            step = handshake.send(bytes(answer))
    except StopIteration:
        return


def _nonce_of(hello: bytes) -> bytes:
    if not hello.startswith(GREETING):
        raise ProtocolError(f"Expected a peer that greets with {GREETING!r}. Received: {hello[: len(GREETING)]!r}.")
    return hello[len(GREETING) :]


def _refused(role: str, context: str) -> str:
    return (
        f"Expected a {role} that knows this job's token, for {context!r}. Received: a proof that does not hold. "
        "The two sides belong to different runs, or disagree on what the connection is for."
    )
