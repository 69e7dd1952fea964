"""A listener of the driver's at which executors knock, to see whether they reach it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from elephant.net.addresses import Address, listening_socket

TOKEN_BYTES = 32
_KNOCK_S = 5.0
_POLL_S = 0.2


class Door:
    """Answers whoever knows its token, from ``with`` to the end of the block.

    Args:
        host: The address to listen on.
        advertised: The address at which executors are to come.

    Attributes:
        address: Where executors knock.
        token: What they show.

    Raises:
        NetworkError: The address cannot be listened on.
    """

    def __init__(self, host: str, advertised: str) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._socket = listening_socket(host, 0)
        self._socket.settimeout(_POLL_S)
        self.address: Address = (advertised, int(self._socket.getsockname()[1]))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._answer_all, name="elephant-door", daemon=True)
        self._thread.start()

    def __enter__(self) -> Door:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(2 * _KNOCK_S)
        self._socket.close()

    def _answer_all(self) -> None:
        while not self._closed.is_set():
            # Nobody came, or whoever came has gone already.
            with contextlib.suppress(OSError):
                visitor, _ = self._socket.accept()
                with visitor, contextlib.suppress(OSError):
                    self._answer(visitor)

    def _answer(self, visitor: socket.socket) -> None:
        visitor.settimeout(_KNOCK_S)
        shown = b""
        while len(shown) < TOKEN_BYTES:
            piece = visitor.recv(TOKEN_BYTES - len(shown))
            if not piece:
                return
            shown += piece
        if hmac.compare_digest(shown, self.token):
            visitor.sendall(hashlib.sha256(self.token).digest())


def knock_function(address: Address, token: bytes, timeout_s: float) -> Callable[[], str]:
    """Returns the function with which an executor knocks: it returns why it does not reach the driver, or nothing.

    It is made here, inside another one, because Spark then sends its code along.

    Args:
        address: Where to knock.
        token: What to show.
        timeout_s: How long to wait for an answer.
    """

    def knock() -> str:
        import hashlib
        import socket

        try:
            with socket.create_connection(address, timeout=timeout_s) as door:
                door.settimeout(timeout_s)
                door.sendall(token)
                answer = b""
                while len(answer) < 32:
                    piece = door.recv(32 - len(answer))
                    if not piece:
                        break
                    answer += piece
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return "" if answer == hashlib.sha256(token).digest() else "another program answers there"

    return knock
