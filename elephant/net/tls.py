"""TLS 1.3 for the connections of a run that is encrypted.

Its token says that it is, and has what it takes: behind the random bytes stands a key pair of the run's own, P-256,
with a certificate that it signed itself. So both go the same way, which Spark encrypts, to whoever is to have them,
and no connection that is made with the token can be forgotten. Each side shows that certificate and accepts no other.
What proves that both sides know the whole token comes afterwards, inside; see `elephant.net.handshake`.

No process writes the key to a disk. Unix sockets stay as they are: what they carry does not leave the host.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import secrets
import select
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from typing import cast

from elephant.errors import AuthenticationError, ConfigurationError, PeerLostError, ProtocolError

_RANDOM_BYTES = 32
_IDENTITY = b"\nelephant/tls/1\n"
# Eight full records; what is encrypted at once, and read at once. More no longer fits the caches: an eighth slower.
_PIECE_BYTES = 1 << 17
_RECORD_BYTES = 1 << 14
# AES-GCM is to encrypt no more than 2**24.5 full records by one key (RFC 8446, section 5.5), and Python has no call
# that renews keys. Connections are made again after half of that, between two operations or messages: those of streams
# by `elephant.net.renewal`, others by their owners.
RENEW_BYTES = 1 << 37
_MOST_BYTES = 1 << 38
# A certificate that is never too young or too old: clocks of hosts differ, and the run ends before its key gets old.
_FROM, _UNTIL = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)


def new_token(*, encryption: bool) -> bytes:
    """Returns the secret of a new run.

    Args:
        encryption: Whether the run's connections are encrypted.

    Raises:
        ConfigurationError: Encryption lacks the package cryptography, or a system that keeps files in memory.

    Example:
        >>> from elephant.net.tls import is_encrypted, new_token
        >>> is_encrypted(new_token(encryption=False)), is_encrypted(new_token(encryption=True))
        (False, True)
    """
    token = secrets.token_bytes(_RANDOM_BYTES)
    return token + _IDENTITY + _new_identity() if encryption else token


def is_encrypted(token: bytes) -> bool:
    """Returns whether the connections of the run with this token are encrypted."""
    return _IDENTITY in token


def secured(sock: socket.socket, token: bytes, *, is_server: bool) -> AnySocket:
    """Returns a new connection in TLS; the connection itself without encryption, and of Unix sockets.

    The TLS handshake is the caller's to do, by `TlsSocket.advance_handshake`.
    """
    if sock.family == socket.AF_UNIX or not is_encrypted(token):
        return sock
    return TlsSocket(sock, _context(token, is_server=is_server), is_server=is_server)


class TlsSocket:
    """Connection with what this package calls of a socket; what passes through it is encrypted on the network.

    One thread may send while another receives. As with all sockets here, calls do not wait.

    Args:
        sock: Connected, non-blocking; owned from here on.

    Attributes:
        bytes_sent: Bytes of the caller's that have gone out so far.
        bytes_received: Bytes that have come in, and were read.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.family = sock.family
        self.setsockopt, self.setblocking, self.fileno = sock.setsockopt, sock.setblocking, sock.fileno
        self.shutdown, self.close = sock.shutdown, sock.close
        self.bytes_sent = self.bytes_received = 0
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        # OpenSSL's objects are for one thread at a time.
        self._using = threading.Lock()
        self._first = b""  # a byte that was decrypted to see whether there is one
        self._unsent = memoryview(b"")  # encrypted bytes that the system has not taken,
        self._held = 0  # and how many bytes of the caller's they carry

    def advance_handshake(self, peer: str) -> int:
        """Takes the TLS handshake as far as it goes now; returns the poll event to wait for, or 0 once it is over.

        Raises:
            AuthenticationError: The other side does not have this run's key pair.
            ProtocolError: It does not speak TLS 1.3.
            PeerLostError: It closed the connection.
        """
        try:
            while True:
                self._flush()
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    self._unsent = memoryview(self._outgoing.read())
                    self._flush()
                    if not self._read_raw():
                        raise PeerLostError(f"{peer} closed the connection in the TLS handshake.") from None
                    continue
                self._unsent = memoryview(self._outgoing.read())
                self._flush()
                return 0
        except (BlockingIOError, InterruptedError):
            return select.POLLOUT if self._unsent else select.POLLIN
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):
                # The alert, which tells the other side.
                self._sock.send(self._outgoing.read())
            if isinstance(error, ssl.SSLCertVerificationError):
                raise AuthenticationError(_not_of_this_run(peer, error)) from error
            raise ProtocolError(f"Expected {peer} to speak TLS 1.3. Received: {error}.") from error
        except PeerLostError:
            raise
        except OSError as error:
            raise PeerLostError(f"The connection to {peer} was lost: {error}.") from error

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Sends as much as the connection takes at once, up to a limit, and returns how many bytes that were.

        Raises:
            BlockingIOError: It takes none. Some may be encrypted already: the next call must begin with the same bytes.
            OSError: The connection has ended, or has carried what its keys are good for.
        """
        return self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[bytes | bytearray | memoryview]) -> int:
        """Sends buffers as `send` does, as if they were one."""
        if not self._held:
            self._encrypt(buffers)
        self._flush()
        sent, self._held = self._held, 0
        self.bytes_sent += sent
        return sent

    def recv(self, count: int) -> bytes:
        """Returns bytes that have arrived, as `recv_into` does; none where the connection has ended."""
        data = bytearray(count)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Reads into a buffer what has arrived; returns the number of bytes, which is zero where the peer has closed.

        Raises:
            BlockingIOError: Nothing has arrived, and nothing is decrypted that `has_bytes` would tell of.
            OSError: The connection has ended.
        """
        view = memoryview(buffer).cast("B")
        while not (count := self._decrypted_into(view)):
            if not self._read_raw():
                return 0
        self.bytes_received += count
        return count

    def has_bytes(self) -> bool:
        """Returns whether bytes wait here that have left the system's buffers, so that no poll tells of them."""
        with self._using:
            if not self._first and not self._tls.pending() and self._incoming.pending:
                try:
                    self._first = self._tls.read(1)
                except ssl.SSLWantReadError:
                    return False
                except OSError:
                    # The next call that reads meets it again.
                    return True
            return bool(self._first or self._tls.pending())

    def _encrypt(self, buffers: Iterable[bytes | bytearray | memoryview]) -> None:
        if self.bytes_sent >= _MOST_BYTES:
            raise PeerLostError(
                f"Expected at most {_MOST_BYTES >> 30} GiB on an encrypted connection, after which its keys are worn. "
                "Received: more. Connect again."
            )
        # Apart from what raises: its traceback would keep the views, and a bytearray could not change meanwhile.
        with self._using:
            for piece in _pieces(buffers):
                self._held += self._tls.write(piece)
            self._unsent = memoryview(self._outgoing.read())

    def _decrypted_into(self, view: memoryview) -> int:
        with self._using:
            count = len(self._first)
            view[:count], self._first = self._first, b""
            with contextlib.suppress(ssl.SSLWantReadError):
                while count < len(view) and (more := self._read_record(view[count:])):
                    count += more
            return count

    def _read_record(self, view: memoryview) -> int:
        # Into a buffer, it returns a number; typeshed knows bytes alone.
        return cast(int, self._tls.read(len(view), cast(bytearray, view)))

    def _read_raw(self) -> bool:
        """Takes in encrypted bytes; returns False where the connection has ended."""
        count = self._sock.recv_into(_thread.buffer)
        with self._using:
            self._incoming.write(_thread.buffer[:count])
        return count > 0

    def _flush(self) -> None:
        while self._unsent:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]


class _ThreadBuffer(threading.local):
    """Memory of this thread's own for encrypted bytes, which are in it for a moment only."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_PIECE_BYTES))


_thread = _ThreadBuffer()
AnySocket = socket.socket | TlsSocket


def _pieces(buffers: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
    """Yields the first bytes of all buffers together, in pieces that fill a record each, or less."""
    left = _PIECE_BYTES
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:left]
        left -= len(view)
        for start in range(0, len(view), _RECORD_BYTES):
            yield view[start : start + _RECORD_BYTES]


def _not_of_this_run(peer: str, error: ssl.SSLCertVerificationError) -> str:
    return f"Expected {peer} to show this run's certificate. Received: another one ({error.verify_message})."


@functools.lru_cache(maxsize=16)
def _context(token: bytes, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Names and addresses say nothing here: there is one certificate.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    identity = token.partition(_IDENTITY)[2]
    context.load_verify_locations(cadata=identity.partition(b"-----BEGIN PRIVATE KEY-----")[0].decode("ascii"))
    with _file_in_memory(identity) as path:
        context.load_cert_chain(path)
    if is_server:
        # Tickets would be sent over connections on which this side only receives.
        context.num_tickets = 0
    return context


@contextlib.contextmanager
def _file_in_memory(content: bytes) -> Iterator[str]:
    """Yields the path of a file that is on no disk, as OpenSSL takes keys from files alone."""
    descriptor = os.memfd_create("elephant-tls")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _new_identity() -> bytes:
    """Returns a certificate and its private key, in PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigurationError(
            "encryption: expected the package cryptography on the driver, which makes the key pair of a run. "
            f"Received: {error}. Install it there: pip install 'elephant-spark[tls]'."
        ) from error
    if not hasattr(os, "memfd_create"):
        raise ConfigurationError(
            "encryption: expected Linux, which keeps the key in memory. Received: a system without memfd_create."
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "elephant")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(_FROM).not_valid_after(_UNTIL)
    # Nobody who has one certificate signed may sign others.
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return certificate + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
