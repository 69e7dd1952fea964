"""Addresses: parsing, wildcards, and the local sockets of one host.

An abstract name is no file: nothing is left behind however a process ends. It belongs
to a network namespace, so that containers with networks of their own do not meet here.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
import sys

from elephant.errors import ConfigurationError, NetworkError, text_of

Address = tuple[str, int]
# A text is the abstract name of a Unix socket of this host.
Endpoint = Address | str
# The first and the last of those that may be listened on; None leaves the choice to the system.
Ports = tuple[int, int] | None
_BACKLOG = 128


def name_of(address: Endpoint | bytes) -> str:
    """Returns ``host:port`` as one writes it, with an IPv6 host in brackets; Unix sockets tell no name.

    >>> name_of(("::1", 4000))
    '[::1]:4000'
    """
    if isinstance(address, (str, bytes)):
        return "a process of this host"
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_socket(host: str, port: int = 0, ports: Ports = None) -> socket.socket:
    """Returns a socket that listens on one of this machine's own addresses.

    Args:
        host: An IPv4 or IPv6 address or a name; an empty one, which would mean all, is refused.
        port: The one to listen on; zero takes a free one.
        ports: Among which, where ``port`` is zero.

    Raises:
        ConfigurationError: No host was given.
        NetworkError: The address is in use, or not of this machine, or none of the ports is free.
    """
    if port or ports is None:
        return _listening_on(host, port)
    first, last = ports
    for one in range(first, last + 1):
        try:
            return _listening_on(host, one)
        except NetworkError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
    raise NetworkError(
        f"Cannot listen on {host}: expected a free port from {first} to {last}, as ports or spark.elephant.ports says. "
        "Received: all are taken. Give more of them; docs/clusters.md says how many a host needs.",
        topic="a-port-that-is-blocked",
    )


def _listening_on(host: str, port: int) -> socket.socket:
    if not host:
        raise ConfigurationError("host: expected the address to listen on. Received: an empty name.")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise NetworkError(
            f"Cannot listen on {name_of((host, port))}: {text_of(error)}.", topic="a-port-that-is-blocked"
        ) from error
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise NetworkError(
            f"Cannot listen on {name_of((host, port))}: {text_of(error)}.", topic="a-port-that-is-blocked"
        ) from error
    return sock


def numeric_addresses(host: str) -> list[str]:
    """Returns the addresses of a host as this machine resolves its name, in the system's order; addresses stay.

    Raises:
        NetworkError: The name has no address here.

    >>> numeric_addresses("127.0.0.1"), numeric_addresses("::1")
    (['127.0.0.1'], ['::1'])
    """
    if not host:
        raise NetworkError("Cannot resolve an empty host name.")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NetworkError(f"Cannot resolve {host}: {error}.") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_own_address(address: str) -> bool:
    """Returns whether a socket of this machine can have an address.

    >>> is_own_address("127.0.0.1"), is_own_address("192.0.2.1")
    (True, False)
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.bind(target)
    except OSError:
        return False
    return True


def address_towards(target: Address) -> str:
    """Returns the address of this machine from which it reaches another; nothing is sent.

    Raises:
        NetworkError: There is no way to it.

    >>> address_towards(("127.0.0.1", 9))
    '127.0.0.1'
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise NetworkError(f"Cannot reach {name_of(target)}: {error}.") from error


def local_name(token: bytes, purpose: str) -> str:
    """Returns the name on which to listen for a purpose; nobody without the token can guess it."""
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
