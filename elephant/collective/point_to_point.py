"""Messages from one rank to another, over a connection for each direction that is made when it is first used.

A message goes out as far as the connection takes it at once. A thread sends the rest, of a copy. So ranks that send to
each other first, messages of any length, cannot stand still.

::

    frame as in `elephant.net.frames`, of kind 1: the arrays as bytes, "dtypes" and "shapes" in its fields
"""

from __future__ import annotations

import importlib
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from elephant.collective.generation import Generation, Member
from elephant.collective.operation import MESSAGE, Operation, is_half, name_of, numbered, spelled
from elephant.errors import DeadlineExceededError, NetworkError, PeerLostError, ProtocolError
from elephant.net import frames, socket_io, tls
from elephant.net.deadline import Deadline
from elephant.net.tls import AnySocket

# How much may wait to be sent before a send waits itself.
_MOST_WAITING_BYTES = 1 << 28
_LIMITS = frames.Limits(max_manifest_bytes=1 << 24, max_payload_bytes=1 << 40)
_KIND = 1
# How often a rank that waits for another one to make a link looks whether a third one has failed.
_LOOK_S = 0.05
_JOIN_S = 5.0
_MOST_BUFFERS = 64

T = TypeVar("T")


class Links:
    """The links of a group: from this rank to others, and from them to it.

    Args:
        group: The group's number.
        ranks: The members' numbers in the run, by rank.
        timeout_s: How long a message may take, and a rank may wait for one.
    """

    def __init__(self, generation: Generation, group: int, ranks: Sequence[int], timeout_s: float) -> None:
        self._generation = generation
        self._group = group
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._outgoing: dict[int, OutgoingLink] = {}
        self._incoming: dict[int, IncomingLink] = {}
        self._making = threading.Lock()

    @property
    def bytes_sent(self) -> int:
        """Bytes that were handed to the links so far."""
        return sum(link.bytes_sent for link in list(self._outgoing.values()))

    def send(self, arrays: Sequence[np.ndarray], dst: int) -> None:
        """Sends a message to a rank of the group; see `elephant.collective.communicator.Communicator.send`."""
        operation = self._operation(f"send to rank {self._ranks[dst]}", self._ranks[dst])
        self._perform(operation, lambda: self._link_to(dst, operation).send(_buffers_of(arrays), operation))

    def recv(self, src: int) -> list[np.ndarray]:
        """Returns the next message of a rank of the group; see `elephant.collective.communicator.Communicator.recv`."""
        operation = self._operation(f"recv from rank {self._ranks[src]}", self._ranks[src])
        return self._perform(operation, lambda: self._link_from(src).receive(operation))

    def flush(self) -> None:
        """Returns when all messages have gone out, or cannot any more."""
        for link in list(self._outgoing.values()):
            link.flush()

    def close(self) -> None:
        """Closes all links, and joins their threads."""
        for link in (*self._outgoing.values(), *self._incoming.values()):
            link.let_go()
        for link in self._outgoing.values():
            link.join()

    def _operation(self, name: str, number: int) -> Operation:
        where = f" in group {self._group}" if self._group else ""
        deadline = Deadline(self._timeout_s, f"The {name}{where} on rank {self._generation.rank}")
        return Operation(numbered(self._group, MESSAGE), name, deadline, ranks=(number,))

    def _perform(self, operation: Operation, body: Callable[[], T]) -> T:
        """Sends or receives, and breaks all groups on all ranks where that fails on this one."""
        self._generation.require_whole()
        last = numbered(self._group, 0)
        try:
            self._generation.detector.begin(operation)
            return body()
        except NetworkError as error:
            self._generation.fail(error, last)
            raise
        except BaseException as error:
            left = f"Rank {self._generation.rank} left the {operation.name}: {type(error).__name__}: {error}."
            self._generation.fail(PeerLostError(left), last)
            raise

    def _link_to(self, dst: int, operation: Operation) -> OutgoingLink:
        with self._making:
            if dst not in self._outgoing:
                self._outgoing[dst] = OutgoingLink(self._generation, self._group, self._ranks[dst], operation)
                self._generation.add(self._outgoing[dst])
            return self._outgoing[dst]

    def _link_from(self, src: int) -> IncomingLink:
        with self._making:
            if src not in self._incoming:
                self._incoming[src] = IncomingLink(self._generation, self._group, self._ranks[src])
                self._generation.add(self._incoming[src])
            return self._incoming[src]


class OutgoingLink(Member):
    """Link to another rank.

    Args:
        number: The rank's, in the run.
        operation: In which it is made.

    Attributes:
        bytes_sent: Bytes that were handed to it so far.
    """

    def __init__(self, generation: Generation, group: int, number: int, operation: Operation) -> None:
        self.bytes_sent = 0
        self._generation = generation
        self._group = group
        self._number = number
        self._turn = 0
        self._sock = self._call(operation)
        # What waits to be sent, and the operation that has sent it.
        self._waiting: deque[tuple[list[memoryview], Operation]] = deque()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_closed = False
        self._news = threading.Condition()

    def send(self, views: list[memoryview], operation: Operation) -> None:
        """Sends a message, or copies what does not go out at once."""
        self._await_room(operation)
        with self._news:
            self.bytes_sent += sum(map(len, views))
            if not self._waiting and not self._is_closing:
                try:
                    self._renew(operation)
                    while views and (sent := _sent(self._sock, views)) is not None:
                        views = sent
                except OSError:
                    self._is_closing = True
            if views:
                self._waiting.append(([memoryview(bytes(view)) for view in views], operation))
                self._waiting_bytes += sum(map(len, views))
                self._news.notify_all()
            is_lost = self._is_closing
            if views and not is_lost and self._thread is None:
                name = f"elephant-link-{self._generation.rank}-{self._group}-{self._number}"
                self._thread = threading.Thread(target=self._send_waiting, name=name, daemon=True)
                self._thread.start()
        if is_lost:
            self._generation.require_whole()
            self._generation.detector.reason(self._number, operation)

    def flush(self) -> None:
        """Returns when nothing waits any more, or the link is closing."""
        with self._news:
            self._news.wait_for(lambda: self._is_closing or not self._waiting)

    def let_go(self) -> None:
        with self._news:
            self._is_closing = True
            self._news.notify_all()
        socket_io.shut_down(self._sock)
        if self._thread is None:
            self._finish()

    def join(self) -> None:
        """Joins the thread of a link that has been let go."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _call(self, operation: Operation) -> AnySocket:
        purpose = _purpose(self._group, self._turn)
        sock = self._generation.connector.call(self._number, purpose, operation)
        socket_io.prepare(sock)
        return sock

    def _renew(self, operation: Operation) -> None:
        """Makes the connection again, where nothing waits, when it has carried what its keys are good for."""
        if socket_io.carried(self._sock)[0] >= tls.RENEW_BYTES:
            self._turn += 1
            old, self._sock = self._sock, self._call(operation)
            old.close()

    def _await_room(self, operation: Operation) -> None:
        """Returns when so little waits that more may; looks after the other ranks meanwhile."""
        while True:
            with self._news:
                if self._news.wait_for(lambda: self._is_closing or self._waiting_bytes <= _MOST_WAITING_BYTES, _LOOK_S):
                    return
            self._generation.detector.check(operation)
            if operation.deadline.expired:
                raise self._generation.detector.absence(operation)

    def _send_waiting(self) -> None:
        try:
            while (message := self._next()) is not None:
                self._send_message(*message)
        except NetworkError as error:
            self._generation.fail(error, numbered(self._group, 0))
        finally:
            self._finish()

    def _next(self) -> tuple[list[memoryview], Operation] | None:
        with self._news:
            self._news.wait_for(lambda: self._is_closing or self._waiting)
            return None if self._is_closing else self._waiting[0]

    def _send_message(self, views: list[memoryview], operation: Operation) -> None:
        size, poller = sum(map(len, views)), select.poll()
        poller.register(self._sock, select.POLLOUT)
        try:
            while views:
                sent = _sent(self._sock, views)
                if sent is None:
                    poller.poll(operation.deadline.remaining_ms())
                else:
                    views = sent
        except OSError as error:
            if self._is_closing:
                return
            if isinstance(error, DeadlineExceededError):
                raise operation.deadline.exceeded(f"Rank {self._number} has not taken it.") from None
            self._generation.detector.reason(self._number, operation)
        with self._news:
            self._waiting.popleft()
            self._waiting_bytes -= size
            self._news.notify_all()

    def _finish(self) -> None:
        with self._news:
            if self._is_closed:
                return
            self._is_closed = self._is_closing = True
            self._waiting.clear()
            self._sock.close()
            self._news.notify_all()
        self._generation.leave(self)


class IncomingLink(Member):
    """Link from another rank, which makes it.

    Args:
        number: The rank's, in the run.
    """

    def __init__(self, generation: Generation, group: int, number: int) -> None:
        self._generation = generation
        self._group = group
        self._number = number
        self._sock: AnySocket | None = None
        self._turn = 0
        self._poller = select.poll()
        self._busy = threading.Lock()
        self._is_closed = False

    def receive(self, operation: Operation) -> list[np.ndarray]:
        """Returns the next message."""
        if not self._busy.acquire(timeout=operation.deadline.remaining()):
            raise operation.deadline.exceeded("Another thread waits for a message of the same rank.")
        try:
            if self._is_closed:
                raise PeerLostError(f"The link from rank {self._number} was closed on this rank.")
            if self._sock is None:
                self._sock = self._take(operation)
            header = bytearray(frames.HEADER_BYTES)
            while not self._fill(self._sock, memoryview(header), operation, renewable=True):
                self._sock.close()
                self._turn += 1
                self._sock = self._take(operation)
            return self._received(self._sock, bytes(header), operation)
        finally:
            if self._generation.error is not None:
                self._finish()
            self._busy.release()

    def let_go(self) -> None:
        # Who is in an operation is woken, and leaves by itself.
        if self._busy.acquire(blocking=False):
            try:
                self._finish()
            finally:
                self._busy.release()

    def _take(self, operation: Operation) -> AnySocket:
        """Waits until the other rank has made the link."""
        detector, purpose = self._generation.detector, _purpose(self._group, self._turn)
        while True:
            last = detector.closed_after(self._number, operation)
            sock = self._generation.connector.taken(self._number, purpose, _LOOK_S)
            if sock is not None:
                socket_io.prepare(sock)
                self._poller = select.poll()
                self._poller.register(sock, select.POLLIN)
                self._poller.register(detector.fileno(), select.POLLIN)
                return sock
            detector.check(operation)
            if last is not None:
                raise PeerLostError(f"Rank {self._number} closed its collective after {spelled(last)}.")
            if operation.deadline.expired:
                raise detector.absence(operation)

    def _received(self, sock: AnySocket, first: bytes, operation: Operation) -> list[np.ndarray]:
        header = frames.decode_header(first, _LIMITS)
        manifest = frames.decode_manifest(self._read(sock, header.manifest_bytes, operation), header, _LIMITS)
        arrays = [_typed(*one) for one in zip(manifest.empty_arrays(), *_kinds_of(manifest.fields), strict=True)]
        for array in arrays:
            self._fill(sock, frames.raw_view(array), operation)
        return arrays

    def _read(self, sock: AnySocket, count: int, operation: Operation) -> bytes:
        buffer = bytearray(count)
        self._fill(sock, memoryview(buffer), operation)
        return bytes(buffer)

    def _fill(self, sock: AnySocket, view: memoryview, operation: Operation, *, renewable: bool = False) -> bool:
        """Fills the view; returns False where nothing of it comes because the sender makes the connection again.

        Args:
            renewable: Whether it may, here between two messages.
        """
        detector, length = self._generation.detector, len(view)
        while view:
            try:
                count = sock.recv_into(view)
            except (BlockingIOError, InterruptedError):
                try:
                    ready = self._poller.poll(operation.deadline.remaining_ms())
                except DeadlineExceededError:
                    raise detector.absence(operation) from None
                if any(descriptor == detector.fileno() for descriptor, _ in ready):
                    detector.check(operation)
                continue
            except OSError:
                count = 0
            if count == 0:
                if renewable and len(view) == length and socket_io.carried(sock)[1] >= tls.RENEW_BYTES:
                    return False
                detector.reason(self._number, operation)
            view = view[count:]
        return True

    def _finish(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._sock is not None:
                self._sock.close()
            self._generation.leave(self)


def _purpose(group: int, turn: int) -> str:
    """Returns the name of a link's connection; that of another turn is made after the one before was worn."""
    return f"link/{group}/{turn}"


def _sent(sock: AnySocket, views: list[memoryview]) -> list[memoryview] | None:
    """Sends as much as the connection takes at once; returns the rest, or None where it takes nothing."""
    try:
        count = sock.sendmsg(views[:_MOST_BUFFERS])
    except (BlockingIOError, InterruptedError):
        return None
    gone = 0
    while gone < len(views) and count >= len(views[gone]):
        count -= len(views[gone])
        gone += 1
    return [views[gone][count:], *views[gone + 1 :]] if gone < len(views) else []


def _buffers_of(arrays: Sequence[np.ndarray]) -> list[memoryview]:
    """Returns a message as it travels."""
    whole = [np.asarray(array, order="C") for array in arrays]
    fields = {
        "dtypes": [name_of(array.dtype) if is_half(array.dtype) else array.dtype.str for array in whole],
        "shapes": [list(array.shape) for array in whole],
    }
    raw = tuple(array.reshape(-1).view(np.uint8) for array in whole)
    return [memoryview(buffer).cast("B") for buffer in frames.encode(frames.Message(_KIND, fields, raw))]


def _kinds_of(fields: dict[str, Any]) -> tuple[list[str], list[list[int]]]:
    frames.require(fields, {"dtypes": list[str], "shapes": list[list[int]]}, "a message")
    return fields["dtypes"], fields["shapes"]


def _typed(raw: np.ndarray, dtype: str, shape: list[int]) -> np.ndarray:
    """Returns an array of a message, in its bytes."""
    try:
        return raw.view(_dtype_of(dtype)).reshape(shape)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"Expected an array of {dtype} {shape}. Received: {len(raw)} bytes ({error}).") from None


def _dtype_of(name: str) -> np.dtype:
    if name == "bfloat16":
        # numpy has no such kind, and knows its name once the package has been imported.
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    return np.dtype(name)
