"""A listener of the driver's at which executors knock, to see whether they reach it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from types import TracebackType

from elephant.net.addresses import Address
from elephant.net.handshake import GREETING, NONCE_BYTES, PROOF_BYTES
from elephant.net.server import Server
from elephant.net.stream import Listener, Stream

_TOKEN_BYTES = 32
_CONTEXT = "door"
_KNOCK_S = 5.0


class Door:
    """Answers whoever knows its token, from ``with`` to the end of the block; strangers do not keep others waiting.

    Args:
        host: The address to listen on.
        advertised: The address at which executors are to come.

    Attributes:
        address: Where executors knock.
        token: What they prove to know.

    Raises:
        NetworkError: The address cannot be listened on.
    """

    def __init__(self, host: str, advertised: str) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        listener = Listener.bind(host, handshake_timeout_s=_KNOCK_S)
        self.address: Address = (advertised, listener.address[1])
        self._server = Server(listener, self.token, _CONTEXT, _close, name="elephant-door")

    def __enter__(self) -> Door:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()


def _close(stream: Stream) -> None:
    """Has nothing more to say to who has proved itself."""


def knock_function(address: Address, token: bytes, timeout_s: float) -> Callable[[], str]:
    """Returns the function with which an executor knocks: it returns why it does not reach the driver, or nothing.

    It is made here, inside another one, because Spark then sends its code along: that executor may have no elephant.
    It is the client's side of `elephant.net.handshake`.

    Args:
        address: Where to knock.
        token: What to prove.
        timeout_s: How long to wait for an answer.
    """
    greeting, context = GREETING, _CONTEXT.encode()
    sizes = (len(GREETING), len(GREETING) + NONCE_BYTES, len(GREETING) + NONCE_BYTES + PROOF_BYTES)

    def knock() -> str:
        import hashlib
        import hmac
        import os
        import socket

        def proof(role: bytes, nonces: bytes) -> bytes:
            return hmac.new(token, b"\0".join((greeting, role, nonces, context)), hashlib.sha256).digest()

        begin, middle, end = sizes
        own, answer = os.urandom(middle - begin), b""
        try:
            with socket.create_connection(address, timeout=timeout_s) as door:
                door.settimeout(timeout_s)
                door.sendall(greeting + own)
                while len(answer) < end:
                    piece = door.recv(end - len(answer))
                    if not piece:
                        break
                    answer += piece
                nonces = own + answer[begin:middle]
                if not hmac.compare_digest(answer[middle:], proof(b"server", nonces)):
                    return "another program answers there"
                door.sendall(proof(b"client", nonces))
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return knock
