"""Sockets between processes of one host: Unix sockets with abstract names, which Linux alone has.

An abstract name is no file: nothing is left behind however a process ends. It belongs
to a network namespace, so that containers with networks of their own do not meet here.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import sys

from elephant.errors import NetworkError

_BACKLOG = 128


def local_name(token: bytes, purpose: str) -> str:
    """Returns the name on which to listen for a purpose; nobody without the token can guess it.

    Args:
        token: The job's random token.
        purpose: What the socket is for; at one time, only one process of a host may have it.
    """
    digest = hmac.new(token, b"elephant/local\0" + purpose.encode("utf-8"), hashlib.sha256).hexdigest()
    return f"\0elephant-{digest}"


def local_listening_socket(name: str) -> socket.socket:
    """Returns a Unix socket that listens on an abstract name.

    Raises:
        NetworkError: The name is in use, or the system has no such names.
    """
    if sys.platform != "linux":
        raise NetworkError(f"Expected Linux, which has abstract names of sockets. Received: {sys.platform}.")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise NetworkError(f"Cannot listen on a Unix socket of this host: {error}.") from error
    return sock
