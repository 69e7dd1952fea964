"""Connecting to a listener that may not be there yet."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from elephant.errors import (
    AuthenticationError,
    DeadlineExceededError,
    NetworkError,
    PeerLostError,
    ProtocolError,
    text_of,
)
from elephant.net import transfer
from elephant.net.addresses import Address, Endpoint, name_of
from elephant.net.authentication import Handshake, perform
from elephant.net.deadline import Deadline

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_ATTEMPT_S = 10.0
_PASSING = frozenset({
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT,
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAGAIN, socket.EAI_AGAIN,
})  # fmt: skip


def dial(address: Endpoint, new_handshake: Callable[[], Handshake], deadline: Deadline) -> socket.socket:
    """Returns a connected, non-blocking socket on which a handshake has succeeded.

    A connection that is refused, reset or unreachable, and one that the listener
    closes in mid-handshake, is tried again until the deadline.

    Args:
        address: Host and port; IPv4, IPv6 or a name. Or the name of a Unix socket of this host.
        new_handshake: Makes the handshake of one attempt.
        deadline: When the connection must be there.

    Raises:
        AuthenticationError: The listener does not know the token or the context.
        ProtocolError: Something else listens there.
        DeadlineExceededError: No listener was there in time; the text tells of the last attempt.
        NetworkError: The address cannot be used, such as an unknown host name.
    """
    peer = name_of(address)
    last: OSError | None = None
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return _attempt(address, new_handshake(), deadline, peer)
        except (AuthenticationError, ProtocolError):
            raise
        except DeadlineExceededError as error:
            seen = f"last failed with: {last}" if last else "took the connection and did not answer."
            raise deadline.exceeded(f"{peer} {seen}") from error
        except OSError as error:
            if not _may_pass(error):
                raise NetworkError(f"Cannot connect to {peer}: {text_of(error)}.") from error
            last = error
        if not deadline.expired:
            time.sleep(min(pause, deadline.remaining()))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _attempt(address: Endpoint, handshake: Handshake, deadline: Deadline, peer: str) -> socket.socket:
    sock = _open_local(address, deadline) if isinstance(address, str) else _open(address, deadline)
    try:
        transfer.prepare(sock)
        perform(handshake, sock, deadline, peer)
    except BaseException:
        sock.close()
        raise
    return sock


def _open(address: Address, deadline: Deadline) -> socket.socket:
    """Connects to the first of the host's addresses that takes it."""
    failure: OSError = ConnectionRefusedError(errno.ECONNREFUSED, "the name has no address")
    for family, kind, protocol, _, target in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        timeout_s = min(deadline.remaining(), _ATTEMPT_S)
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(timeout_s)
            sock.connect(target)
            # A port of this machine that nobody listens on can be given to the connecting end itself.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens on that port")
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


def _open_local(name: str, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(min(deadline.remaining(), _ATTEMPT_S))
        sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return sock


def _may_pass(error: OSError) -> bool:
    return isinstance(error, (PeerLostError, TimeoutError)) or error.errno in _PASSING
