"""A client's connection to one server: one request at a time, and a new connection when the old one is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from elephant.config import Timeouts
from elephant.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineExceededError,
    NetworkError,
    PeerLostError,
    PositionLost,
    ProtocolError,
    ServerFailedError,
    SupersededError,
)
from elephant.net import stream
from elephant.net.addresses import Address, name_of
from elephant.net.deadline import Deadline
from elephant.net.socket_io import Patience, SocketIO
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.protocol import (
    CONTEXT,
    HEADER_BYTES,
    TEXT_BYTES,
    WELCOME_BYTES,
    ClientHello,
    Flags,
    Lengths,
    RequestHeader,
    RequestKind,
    Role,
    Status,
    Welcome,
    check_reply,
    decode_header,
    decode_text,
    lengths_of,
)

logger = logging.getLogger(__name__)

# A connection that is lost so often in one request is lost because of the request.
_MAX_LOSSES = 8
_DIAL_S = 2.0
_GOODBYE_S = 2.0

_ERRORS: dict[Status, type[Exception]] = {
    Status.FAILED: ServerFailedError,
    Status.MISMATCH: ConfigurationError,
    Status.ERROR: ProtocolError,
    Status.UNWRITTEN: CheckpointError,
}
Receive = Callable[[SocketIO, RequestHeader, Patience], None]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A client: its fit, what it says first, and the partition whose updates it pushes."""

    token: bytes = field(repr=False)
    run_id: str
    hello: ClientHello
    partition: int = 0
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request, which can be made again over a new connection.

    Args:
        header: Its header; the length of the payload is filled in.
        payload: Returns what follows the header, from its beginning, each time it is called.
        receive: Takes the payload of a reply with the status OK, DUPLICATE or REFUSED; None where there is none.
        more_bytes: What it has of tables, beside the length of its kind.
        more_reply_bytes: What the reply has of them.
    """

    header: RequestHeader
    payload: Callable[[], Iterable[memoryview]] = tuple
    receive: Receive | None = None
    more_bytes: int = 0
    more_reply_bytes: int = 0


class Connection:
    """One server, as a client sees it.

    Args:
        timeouts: ``connect_s`` for a connection, ``collective_s`` for the silence of a server that is at work.
        require_alive: Called while the server is not reached; raises where it is known that it never will be.

    Attributes:
        welcome: The server's last answer to HELLO.
        lengths: The legal lengths of payloads.
    """

    lengths: Lengths

    def __init__(
        self,
        address: Address,
        identity: Identity,
        timeouts: Timeouts,
        require_alive: Callable[[], object] = lambda: None,
    ) -> None:
        self.peer = f"the parameter server on {name_of(address)}"
        self._address = address
        self._identity = identity
        self._timeouts = timeouts
        self._require_alive = require_alive
        self._socket_io: SocketIO | None = None
        self._closed = threading.Event()
        self._counted = (0, 0)
        # The last push that the server acknowledged.
        self._acknowledged = (0, 0)
        self._highest_call = 0
        self._latest_header: RequestHeader | None = None
        # What a server that was restored has to be told again.
        self._standing: dict[RequestKind, Request] = {}
        self._using = threading.Lock()
        self.welcome = self._connect()
        self._acknowledged = self.welcome.place

    @property
    def bytes_counted(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        sent, received = self._counted
        return (sent, received) if self._socket_io is None else (
            sent + self._socket_io.bytes_sent, received + self._socket_io.bytes_received
        )  # fmt: skip

    @property
    def whole_step(self) -> int:
        """The last step that the server is known to have applied, with all of its calls."""
        step, call = self._acknowledged
        return step if call >= max(self.welcome.highest_call, self._highest_call) else step - 1

    def ask(self, request: Request, *, stands: bool = False) -> RequestHeader:
        """Makes a request, over as many connections as it takes, and returns the header of the reply.

        Raises:
            PositionLost: The server went back to before pushes that it had acknowledged.
            SupersededError: A newer attempt of the partition has come.
            ServerFailedError: The server has given the fit up.
            NetworkError: The server cannot be reached, or does not answer.
        """
        with self._using:
            self._highest_call = max(self._highest_call, request.header.call)
            if stands:
                self._standing[request.header.kind] = request
            for loss in range(_MAX_LOSSES + 1):
                try:
                    if self._socket_io is None:
                        self._reconnect()
                    return self._try(request)
                except PositionLost:
                    # Nothing was asked yet: the connection serves the steps to be repeated.
                    raise
                except PeerLostError as error:
                    self._drop()
                    if self._closed.is_set() or loss == _MAX_LOSSES:
                        raise
                    logger.debug("The connection to %s was lost, and is made again: %s", self.peer, error)
                except BaseException:
                    self._drop()
                    raise
        raise PeerLostError(f"The connection to {self.peer} was lost.")

    def finish(self) -> None:
        """Tells the server that this worker has done all of its steps, and waits until it has made sure of them."""
        self.ask(Request(header=RequestHeader(kind=RequestKind.BYE, flags=Flags.FINISHED)))

    def close_politely(self) -> None:
        """Ends the connection, and a request that is being made; the server need not answer."""
        if not self._using.acquire(blocking=False):
            # Another thread is in the middle of a request, or was when this one was interrupted.
            self.interrupt()
            self._using.acquire()
        try:
            if self._socket_io is not None and not self._closed.is_set():
                header = RequestHeader(
                    kind=RequestKind.BYE, partition=self._identity.partition, attempt=self._identity.attempt
                )
                self._socket_io.send([header.to_bytes()], lambda: _GOODBYE_S)
        except NetworkError as error:
            logger.debug("%s was gone before it was left: %s", self.peer, error)
        finally:
            self._closed.set()
            self._drop()
            self._using.release()

    def interrupt(self) -> None:
        """Ends a request that another thread makes, soon, with an error; no other can be made."""
        self._closed.set()
        sock = self._socket_io
        if sock is not None:
            sock.shut_down()

    def _try(self, request: Request) -> RequestHeader:
        sock, header = self._socket_io, request.header
        if sock is None:
            raise PeerLostError(f"The connection to {self.peer} was lost.")
        is_push = header.kind in (RequestKind.PUSH, RequestKind.PUSH_PULL)
        if not is_push or header.place > self.welcome.place:
            return self._exchange(request, sock)
        # It was applied before the connection was lost: what is left is nothing, or the pull.
        self._acknowledged = max(self._acknowledged, header.place)
        if header.kind is RequestKind.PUSH and self._latest_header is not None:
            return replace(self._latest_header, status=Status.DUPLICATE)
        pull = replace(header, kind=RequestKind.PULL)
        return replace(
            self._exchange(replace(request, header=pull, payload=tuple, more_bytes=0), sock), status=Status.DUPLICATE
        )

    def _exchange(self, request: Request, sock: SocketIO) -> RequestHeader:
        header = replace(
            request.header,
            partition=self._identity.partition,
            attempt=self._identity.attempt,
            payload_bytes=self.lengths.of_request(request.header.kind) + request.more_bytes,
        )
        head: list[bytes | memoryview] = [header.to_bytes()]
        for part in request.payload():
            sock.send([*head, part], self._patience)
            head = []
        sock.send(head, self._patience)
        reply = self._receive_reply(sock, header.kind, self.lengths, request.more_reply_bytes)
        if header.kind in (RequestKind.PUSH, RequestKind.PUSH_PULL):
            # Before the weights come: the memory of the update may be theirs, and it cannot be sent again then.
            self._acknowledged = max(self._acknowledged, header.place)
        if reply.payload_bytes and request.receive is not None:
            request.receive(sock, reply, self._patience)
        return reply

    def _receive_reply(
        self, sock: SocketIO, kind: RequestKind, lengths: Lengths | None, of_tables: int = 0
    ) -> RequestHeader:
        status = Status.WAIT
        while status is Status.WAIT:
            data = bytearray(HEADER_BYTES)
            sock.receive(memoryview(data), self._patience)
            header = decode_header(data)
            check_reply(header, kind, lengths, of_tables)
            status = header.status
        if header.status is Status.SUPERSEDED:
            raise SupersededError(
                f"Expected to be the newest attempt of partition {self._identity.partition}. Received: {self.peer} "
                f"has seen one after attempt {self._identity.attempt}, which goes on in the place of this one."
            )
        if header.status in _ERRORS:
            text = bytearray(TEXT_BYTES)
            sock.receive(memoryview(text), self._patience)
            raise _ERRORS[header.status](decode_text(text))
        self._latest_header = header
        return header

    def _connect(self) -> Welcome:
        """Connects and says HELLO, within ``connect_s`` seconds."""
        deadline = Deadline(self._timeouts.connect_s, f"Connecting to {self.peer}")
        while True:
            try:
                return self._handshake(self._dial(deadline))
            except PeerLostError as error:
                self._drop()
                if self._closed.is_set() or deadline.expired:
                    raise deadline.exceeded(str(error)) from error
                self._require_alive()
                self._closed.wait(0.05)
            except BaseException:
                self._drop()
                raise

    def _dial(self, deadline: Deadline) -> SocketIO:
        """Returns a connection; looks now and then whether this client was closed."""
        context = CONTEXT.format(run_id=self._identity.run_id)
        while not self._closed.is_set():
            piece = deadline.shortened(_DIAL_S, deadline.what)
            try:
                connected = stream.connect(self._address, self._identity.token, context, piece)
                self._socket_io = SocketIO(connected.detach(), self.peer)
                return self._socket_io
            except DeadlineExceededError as error:
                if deadline.expired:
                    raise deadline.exceeded(str(error)) from error
                self._require_alive()
        raise PeerLostError(f"The client of {self.peer} was closed.")

    def _handshake(self, sock: SocketIO) -> Welcome:
        hello, identity = self._identity.hello, self._identity
        payload = hello.to_bytes()
        header = RequestHeader(
            kind=RequestKind.HELLO, partition=identity.partition, attempt=identity.attempt, payload_bytes=len(payload)
        )
        sock.send([header.to_bytes(), payload], self._patience)
        self._receive_reply(sock, RequestKind.HELLO, None)
        data = bytearray(WELCOME_BYTES)
        sock.receive(memoryview(data), self._patience)
        welcome = Welcome.from_bytes(data)
        self.lengths = lengths_of(hello, welcome.num_slots, welcome.num_state_values, welcome.num_partitions)
        return welcome

    def _reconnect(self) -> None:
        """Connects again; raises PositionLost where the server turns out to lack what it had acknowledged."""
        self.welcome = self._connect()
        for standing in self._standing.values():
            self._try(standing)
        known = self.welcome.place
        if self._identity.hello.role is Role.WORKER and known < self._acknowledged:
            self._acknowledged = known
            raise PositionLost(self.whole_step)

    def _patience(self) -> float:
        return 0.0 if self._closed.is_set() else self._timeouts.collective_s

    def _drop(self) -> None:
        sock, self._socket_io = self._socket_io, None
        if sock is not None:
            self._counted = (self._counted[0] + sock.bytes_sent, self._counted[1] + sock.bytes_received)
            sock.close()


def connect_all(
    addresses: Sequence[Address],
    layout: Layout,
    *,
    token: bytes,
    run_id: str,
    role: Role,
    compression: str | None = None,
    partition: int = 0,
    attempt: int = 0,
    epoch_steps: int = 0,
    timeouts: Timeouts | None = None,
    require_alive: Callable[[], object] = lambda: None,
) -> list[Connection]:
    """Returns a connection to each server of a fit, in the order of their parts; where one fails, none stays open."""
    connections: list[Connection] = []
    try:
        for address, part in zip(addresses, layout.cut(len(addresses)), strict=True):
            hello = ClientHello(
                role=role, digest=layout.digest, codec=compression or "",
                first_value=part.start, num_values=part.stop - part.start, epoch_steps=epoch_steps,
            )  # fmt: skip
            identity = Identity(token=token, run_id=run_id, hello=hello, partition=partition, attempt=attempt)
            connections.append(Connection((address[0], address[1]), identity, timeouts or Timeouts(), require_alive))
    except BaseException:
        for connection in connections:
            connection.close_politely()
        raise
    return connections
