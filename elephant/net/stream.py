"""Authenticated streams of messages: listening, connecting, and connecting again.

``connect`` and ``Listener.accept`` are the two ways to a ``Stream``; both return only
after the other side has proved that it knows the token. An encrypted stream goes on over a new connection
before the keys of its first one are worn; see `elephant.net.renewal`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from elephant.errors import (
    AuthenticationError,
    DeadlineExceededError,
    NetworkError,
    PeerLostError,
    ProtocolError,
    text_of,
)
from elephant.net import frames, socket_io, tls
from elephant.net.addresses import Address, Endpoint, Ports, listening_socket, name_of
from elephant.net.deadline import Deadline
from elephant.net.handshake import Admissions, Handshake, check_token, client_handshake, perform
from elephant.net.renewal import GOES_ON, HAS_MOVED, MOVED_WITHIN_S, Renewals

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# How long others of this process may take to close some, and how often to look.
_EXHAUSTED_S = 1.0
_LOOK_S = 0.05
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_ATTEMPT_S = 10.0
# A listener that was there, and refuses for so long, is gone.
_GONE_S = 1.0
_SENDS_BETWEEN = 100
_TEMPORARY = frozenset({
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT,
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAGAIN, socket.EAI_AGAIN,
})  # fmt: skip


class Stream:
    """Messages to and from one peer. One thread may send while another receives.

    An error in the middle of a message aborts the stream, because its place in the
    conversation is lost; a deadline that passes before a message begins does not.

    Args:
        sock: Connected, authenticated; owned from here on.
        dial_again: Connects to the same listener again, for a stream that is to go on when its keys are worn.

    Attributes:
        renewals: New connections of the server whose stream this is; None of a client's.
    """

    renewals: Renewals | None = None

    def __init__(
        self, sock: tls.AnySocket, peer: str, *, dial_again: Callable[[Deadline], tls.AnySocket] | None = None
    ) -> None:
        self.peer = peer
        # It receives from the first and sends to the last; there are several only while it goes on over another one.
        self._socks = deque([sock])
        self._dial_again = dial_again
        self._lost_after_s: float | None = None
        # Messages before it is tried again, after a new connection could not be had.
        self._sends_left = 0
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._state = threading.RLock()
        self._users = 0
        self._closed = self._is_detached = False
        socket_io.prepare(sock)

    def send(self, message: frames.Message, deadline: Deadline) -> None:
        """Sends a message; its arrays must not change until this returns.

        Raises:
            ConfigurationError: The message cannot travel in a frame. The stream stays usable.
            PeerLostError: The peer closed or reset the connection, or this side closed the stream.
            DeadlineExceededError: The peer did not take the whole message in time.
        """
        buffers = frames.encode(message)
        with self._in_use(self._sending, deadline), self._aborted_on_error():
            self._renew(deadline)
            socket_io.send_all(self._target, buffers, deadline, self.peer)

    def send_frame(self, frame: Sequence[bytes | memoryview], patience_s: float) -> None:
        """Sends a message that has been encoded, for as long as the peer goes on taking it.

        Raises:
            PeerLostError: The peer closed or reset the connection, or this side closed the stream.
            DeadlineExceededError: It took nothing for so long.
        """
        began = Deadline(patience_s, f"Sending to {self.peer}")
        with self._in_use(self._sending, began), self._aborted_on_error():
            socket_io.SocketIO(self._target, self.peer).send(frame, lambda: patience_s)

    def receive(
        self, deadline: Deadline, limits: frames.Limits | None = None, *, whole_within_s: float | None = None
    ) -> frames.Message:
        """Returns the next message.

        Args:
            deadline: When it must be there. If it passes before a message begins, the stream stays usable.
            limits: What is taken at most; ``Limits()`` when None.
            whole_within_s: Seconds for the rest of a message that has begun; ``deadline`` covers it when None.

        Raises:
            PeerLostError: The connection ended, or this side closed the stream.
            ProtocolError: What came is no frame within the limits.
            DeadlineExceededError: The message was not there in time.
        """
        with self._in_use(self._receiving, deadline):
            while True:
                socket_io.wait(self._source, select.POLLIN, deadline)
                deadline.remaining()
                whole = deadline
                if whole_within_s is not None:
                    whole = Deadline(whole_within_s, f"Receiving a message from {self.peer}")
                with self._aborted_on_error():
                    message = self._receive_frame(whole, limits or frames.Limits())
                    if message.kind != HAS_MOVED:
                        break
                    self._follow(message)
        if message.kind == GOES_ON:
            self._give_away(message)
        return message

    def lose_after(self, seconds: float) -> None:
        """Loses the peer when its host does not confirm for so long what was sent to it, as over a link that is cut.

        A peer that is only slow, or stopped, is kept as long as its system's buffers take what is sent.
        """
        with self._state:
            self._check_open()
            self._lost_after_s = seconds
            for sock in self._socks:
                socket_io.lose_after(sock, seconds)

    def close(self) -> None:
        """Ends the stream after what was sent; a receiver on the other side sees a PeerLostError.

        What the peer sent and nobody received is dropped. What it sends from now on resets the
        connection, with what is still on its way there: a message that must arrive wants an answer first.
        """
        if not self._closed:
            self._drop_received()
            self._end()

    def abort(self) -> None:
        """Ends the stream at once; a thread that waits on it, on either side, gets a PeerLostError."""
        with self._state:
            for sock in () if self._is_detached else self._socks:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._end()

    def detach(self) -> tls.AnySocket:
        """Returns the authenticated, non-blocking socket and gives up its ownership; the stream is closed then."""
        with self._state:
            self._check_open()
            self._closed = self._is_detached = True
        return self._socks[0]

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _receive_frame(self, deadline: Deadline, limits: frames.Limits) -> frames.Message:
        header = frames.decode_header(self._read(frames.HEADER_BYTES, deadline), limits)
        manifest = frames.decode_manifest(self._read(header.manifest_bytes, deadline), header, limits)
        arrays = manifest.empty_arrays()
        for array in arrays:
            socket_io.receive_into(self._source, frames.raw_view(array), deadline, self.peer)
        frames.check_values(arrays)
        return frames.Message(manifest.kind, manifest.fields, arrays)

    def _read(self, count: int, deadline: Deadline) -> bytes:
        buffer = bytearray(count)
        socket_io.receive_into(self._source, memoryview(buffer), deadline, self.peer)
        return bytes(buffer)

    @property
    def _target(self) -> tls.AnySocket:
        return self._socks[-1]

    @property
    def _source(self) -> tls.AnySocket:
        return self._socks[0]

    def _renew(self, deadline: Deadline) -> None:
        """Sends over a new connection from here on, where the keys are worn; what is received follows later."""
        old = self._target
        if self._dial_again is None or max(socket_io.carried(old)) < tls.RENEW_BYTES or self._sends_left:
            self._sends_left = max(self._sends_left - 1, 0)
            return
        try:
            half_s = min(deadline.remaining() / 2, _ATTEMPT_S)
            sock = self._dial_again(Deadline(half_s, f"Connecting to {self.peer} again"))
        except (PeerLostError, DeadlineExceededError):
            # The old one is good for as much again: a listener that is busy for a moment costs nothing.
            self._sends_left = _SENDS_BETWEEN
            return
        fields = {"number": secrets.token_hex(16)}
        try:
            socket_io.send_all(sock, frames.encode(frames.Message(GOES_ON, fields)), deadline, self.peer)
            # Before the other side can answer the last message on the old one.
            self._send_to(sock)
        except BaseException:
            sock.close()
            raise
        socket_io.send_all(old, frames.encode(frames.Message(HAS_MOVED, fields)), deadline, self.peer)

    def _send_to(self, sock: tls.AnySocket) -> None:
        with self._state:
            self._check_open()
            if self._lost_after_s is not None:
                socket_io.lose_after(sock, self._lost_after_s)
            self._socks.append(sock)

    def _follow(self, message: frames.Message) -> None:
        """Receives from the new connection from here on: the other side has sent its last message on the old one."""
        if self.renewals is not None:
            frames.require(message.fields, {"number": str}, HAS_MOVED)
            self._answer_on(self.renewals.take(message.fields["number"]))
        if len(self._socks) == 1:
            raise ProtocolError(f"Expected {self.peer} to go on over a new connection. Received: none.")
        with self._state:
            self._socks.popleft().close()

    def _answer_on(self, sock: tls.AnySocket | None) -> None:
        """Sends over a client's new connection from here on, as soon as no thread is in the middle of a message."""
        if sock is None:
            return
        deadline = Deadline(MOVED_WITHIN_S, f"Going on with {self.peer}")
        try:
            with self._in_use(self._sending, deadline):
                # A client that has closed meanwhile does not need it, and what it has sent last is on the new one.
                with contextlib.suppress(PeerLostError):
                    last = frames.encode(frames.Message(HAS_MOVED))
                    socket_io.send_all(self._target, last, deadline, self.peer)
                self._send_to(sock)
        except BaseException:
            sock.close()
            raise

    def _give_away(self, message: frames.Message) -> None:
        """Lets the stream have this connection that it goes on over; this stream itself is over."""
        if self.renewals is None:
            self.abort()
            raise ProtocolError(f"Expected a message of {self.peer}. Received: {message.kind!r}.")
        frames.require(message.fields, {"number": str}, GOES_ON)
        sock = self.detach()
        if not self.renewals.give(message.fields["number"], sock):
            sock.close()
        raise PeerLostError(f"{self.peer} goes on with another stream.")

    @contextlib.contextmanager
    def _in_use(self, direction: threading.Lock, deadline: Deadline) -> Iterator[None]:
        """Holds one direction, and keeps the descriptor from being closed, and given to another, meanwhile."""
        if not direction.acquire(timeout=deadline.remaining()):
            raise deadline.exceeded(f"Another thread uses the stream to {self.peer}.")
        try:
            with self._state:
                self._check_open()
                self._users += 1
            try:
                yield
            finally:
                with self._state:
                    self._users -= 1
                    self._release()
        finally:
            direction.release()

    @contextlib.contextmanager
    def _aborted_on_error(self) -> Iterator[None]:
        try:
            yield
        except NetworkError as error:
            closed_here = self._closed
            self.abort()
            if closed_here:
                raise PeerLostError(f"The stream to {self.peer} was closed on this side.") from error
            raise
        except BaseException:
            self.abort()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLostError(f"The stream to {self.peer} was closed on this side.")

    def _drop_received(self) -> None:
        waste = memoryview(bytearray(1 << 16))
        for sock in self._socks:
            with contextlib.suppress(NetworkError):
                for _ in range(16):
                    if socket_io.receive_some(sock, waste, self.peer) is None:
                        break

    def _end(self) -> None:
        with self._state:
            if not self._closed:
                self._closed = True
                for sock in self._socks:
                    socket_io.shut_down(sock)
                self._release()

    def _release(self) -> None:
        # One that was detached is another's.
        if self._closed and not (self._users or self._is_detached):
            for sock in self._socks:
                sock.close()


def send_to_all(streams: Sequence[Stream], message: frames.Message, patience_s: float) -> None:
    """Sends one message, encoded once, to many peers side by side, so that none waits for another one.

    Those that are lost, or take nothing for so long, do not get it: their streams say so to whoever reads them.
    """
    frame = frames.encode(message)

    def send(stream: Stream) -> None:
        with contextlib.suppress(NetworkError):
            stream.send_frame(frame, patience_s)

    with ThreadPoolExecutor(max(len(streams), 1), thread_name_prefix="elephant-send") as pool:
        list(pool.map(send, streams))


def connect(
    address: Endpoint,
    token: bytes,
    context: str,
    deadline: Deadline,
    *,
    refused_s: float = math.inf,
    renewable: bool = True,
) -> Stream:
    """Connects to a listener, and tries again until the deadline while nobody listens there yet.

    Args:
        address: Host and port; IPv4, IPv6 or a name. Or the name of a Unix socket of this host.
        token: The job's random token, 16 bytes or more.
        context: What the connection is for; the listener must name the same.
        deadline: When the stream must be there.
        refused_s: See `dial`.
        renewable: Whether an `elephant.net.server.Server` listens, with which a stream goes on when its keys are worn.

    Raises:
        AuthenticationError: The listener does not know the token or the context.
        ProtocolError: Something else listens there.
        PeerLostError: Nobody listens there any more.
        DeadlineExceededError: No listener was there in time; the text tells of the last attempt.
        NetworkError: The address cannot be used, such as an unknown host name.
    """
    check_token(token)

    def dialled(deadline: Deadline, refused_s: float = _GONE_S) -> tls.AnySocket:
        return dial(address, token, lambda: client_handshake(token, context), deadline, refused_s=refused_s)

    return Stream(dialled(deadline, refused_s), name_of(address), dial_again=dialled if renewable else None)


class Listener:
    """A listening socket that hands out authenticated streams. Strangers on its port do not disturb it.

    Args:
        sock: A bound and listening socket, such as one inherited from a parent process; owned from here on.
    """

    def __init__(self, sock: socket.socket, *, max_pending: int = 64, handshake_timeout_s: float = 10.0) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._admissions = Admissions(max_pending=max_pending, handshake_timeout_s=handshake_timeout_s)
        self._accepting = threading.Lock()
        self._alarm_in, self._alarm_out = socket.socketpair()
        self._closed = False
        self._exhausted_at: float | None = None

    @classmethod
    def bind(
        cls,
        host: str,
        port: int = 0,
        *,
        ports: Ports = None,
        max_pending: int = 64,
        handshake_timeout_s: float = 10.0,
    ) -> Listener:
        """Listens on one of this machine's own addresses.

        Args:
            host: An IPv4 or IPv6 address or a name; an empty one, which would mean all, is refused.
            port: The one to listen on; zero takes a free one.
            ports: Among which, where ``port`` is zero.

        Raises:
            ConfigurationError: No host was given.
            NetworkError: The address is in use, or not of this machine, or none of the ports is free.
        """
        sock = listening_socket(host, port, ports)
        return cls(sock, max_pending=max_pending, handshake_timeout_s=handshake_timeout_s)

    @property
    def address(self) -> Address:
        """Host and port that it listens on."""
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    @property
    def turned_away(self) -> dict[str, int]:
        """Number of refused connections by host: they did not know the token; see `Admissions`."""
        return dict(self._admissions.turned_away)

    @property
    def seen(self) -> str:
        """Sentence for an error about connections that could not be served."""
        count, reason = sum(self.turned_away.values()), self._admissions.last_reason
        return (
            f"Connections turned away: {count}; the last was {reason}." if count else "Nobody came to be turned away."
        )

    def fileno(self) -> int:
        """Returns the listening descriptor, for a child process that adopts it with ``socket.socket(fileno=...)``."""
        return self._sock.fileno()

    def accept(self, token: bytes, context: str, deadline: Deadline) -> Stream:
        """Returns the next connection whose other side proves that it knows the token and the context.

        Others are closed and counted. Handshakes that are under way when this returns go on in the next call.

        Raises:
            DeadlineExceededError: No such connection came in time; the text tells of those turned away.
            NetworkError: The listener was closed, or this process can open nothing more; the text says which limit.
        """
        check_token(token)
        if not self._accepting.acquire(timeout=deadline.remaining()):
            raise deadline.exceeded("Another thread accepts on the same listener.")
        try:
            self._admissions.set_terms(token, context)
            while True:
                stream = self._advance(self._wait(deadline))
                if stream is not None:
                    return stream
        finally:
            if self._closed:
                self._release()
            self._accepting.release()

    def close(self) -> None:
        """Stops listening, in this process; a thread in ``accept`` gets a NetworkError."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._alarm_out.send(b"!")
        if self._accepting.acquire(timeout=5):
            self._release()
            self._accepting.release()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, deadline: Deadline) -> list[int]:
        if self._closed:
            raise NetworkError("The listener was closed.")
        if deadline.expired:
            raise deadline.exceeded(self.seen)
        poller = select.poll()
        for descriptor in (self._alarm_in.fileno(), self._sock.fileno(), *self._admissions.descriptors):
            poller.register(descriptor, select.POLLIN)
        timeout_s = min(deadline.remaining(), self._admissions.next_expiry_s)
        return [descriptor for descriptor, _ in poller.poll(timeout_s * 1000 + 1)]

    def _advance(self, descriptors: list[int]) -> Stream | None:
        for descriptor in descriptors:
            if descriptor == self._sock.fileno():
                self._take_newcomer()
            elif admitted := self._admissions.advance(descriptor):
                return Stream(*admitted)
        self._admissions.expire()
        return None

    def _take_newcomer(self) -> None:
        try:
            sock, address = self._sock.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._admissions.close()
                self._await_room(error)
            return
        self._exhausted_at = None
        self._admissions.add(sock, name_of(address))

    def _await_room(self, error: OSError) -> None:
        """Waits a moment for what this process lacks; raises NetworkError when it has lacked it for a while."""
        now = time.monotonic()
        self._exhausted_at = now if self._exhausted_at is None else self._exhausted_at
        if now - self._exhausted_at > _EXHAUSTED_S:
            self._exhausted_at = None
            raise NetworkError(f"Cannot take a connection on {name_of(self.address)}: {text_of(error)}.") from error
        time.sleep(_LOOK_S)

    def _release(self) -> None:
        self._admissions.close()
        for sock in (self._sock, self._alarm_in, self._alarm_out):
            sock.close()


def dial(
    address: Endpoint,
    token: bytes,
    new_handshake: Callable[[], Handshake],
    deadline: Deadline,
    *,
    refused_s: float = math.inf,
) -> tls.AnySocket:
    """Returns a connected, non-blocking socket on which a handshake has succeeded.

    A connection that is refused, reset or unreachable, and one that the listener
    closes in mid-handshake, is tried again until the deadline.

    Args:
        address: Host and port; IPv4, IPv6 or a name. Or the name of a Unix socket of this host.
        token: Of the run, which says whether the connection is encrypted.
        deadline: When the connection must be there.
        refused_s: After how many seconds in which it was refused each time the listener is gone, where it was there
            before. Unless told, it may still come.

    Raises:
        AuthenticationError: The listener does not know the token or the context.
        ProtocolError: Something else listens there.
        PeerLostError: Nobody listens there any more.
        DeadlineExceededError: No listener was there in time; the text tells of the last attempt.
        NetworkError: The address cannot be used, such as an unknown host name.
    """
    peer = name_of(address)
    last: OSError | None = None
    refused_until = math.inf
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return _attempt(address, token, new_handshake(), deadline, peer)
        except (AuthenticationError, ProtocolError):
            raise
        except DeadlineExceededError as error:
            seen = f"last failed with: {last}" if last else "took the connection and did not answer."
            raise deadline.exceeded(f"{peer} {seen}", "a-port-that-is-blocked") from error
        except OSError as error:
            if not _may_pass(error):
                raise NetworkError(
                    f"Cannot connect to {peer}: {text_of(error)}.", topic="a-port-that-is-blocked"
                ) from error
            last, now = error, time.monotonic()
            is_refused = isinstance(error, ConnectionRefusedError)
            refused_until = min(refused_until, now + refused_s) if is_refused else math.inf
            if now > refused_until:
                raise PeerLostError(
                    f"{peer} listens no more: it has refused for {refused_s:g} s.", topic="a-port-that-is-blocked"
                ) from error
        if not deadline.expired:
            time.sleep(min(pause, deadline.remaining()))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _attempt(address: Endpoint, token: bytes, handshake: Handshake, deadline: Deadline, peer: str) -> tls.AnySocket:
    sock = _open_local(address, deadline) if isinstance(address, str) else _open(address, deadline)
    try:
        socket_io.prepare(sock)
        secured = tls.secured(sock, token, is_server=False)
        perform(handshake, secured, deadline, peer)
    except BaseException:
        sock.close()
        raise
    return secured


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
    return isinstance(error, (PeerLostError, TimeoutError)) or error.errno in _TEMPORARY
