"""Request handling: the connections of one server, and the pool of their buffers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from elephant.compression import Codec
from elephant.errors import CheckpointError, NetworkError, ProtocolError
from elephant.net.buffers import aligned_vector
from elephant.net.frames import raw_view
from elephant.net.socket_io import Patience, SocketIO
from elephant.net.stream import Listener, Stream
from elephant.parameter_server.layout import ServerSpec
from elephant.parameter_server.protocol import (
    HEADER_BYTES,
    HELLO_BYTES,
    STRIPE_VALUES,
    ClientHello,
    Flags,
    Lengths,
    RequestHeader,
    RequestKind,
    Role,
    Status,
    Welcome,
    check_encoding,
    check_request,
    decode_header,
    encode_statistics,
    encode_text,
    is_finite,
    lengths_of,
    pull_codec,
    push_codec,
    stripe_bytes,
)
from elephant.parameter_server.push_log import Entry
from elephant.parameter_server.server import ParameterServer
from elephant.parameter_server.snapshot import Snapshotter
from elephant.parameter_server.store import SnapshotImage
from elephant.parameter_server.tables import NOT_FINITE, TablesWanted
from elephant.tables.stack import TableContribution

Taken = TypeVar("Taken")
POOL_BUFFERS = 2
# How long others wait for the buffer of a client that has stopped in the middle of a push.
IMPATIENCE_S = 1.0

logger = logging.getLogger(__name__)
_FOREVER_S = 1e9
_HELLO_S = 30.0
_SNAPSHOT_S = 120.0
_HEARTBEAT_S = 1.0


class BufferPool:
    """A bounded number of buffers, made when they are first needed.

    Args:
        num_values: Length of each, float32.
        size: How many there are at most.
        stall_s: Seconds without a byte that a client may hold one while nobody else needs it.
    """

    def __init__(self, num_values: int, *, size: int = POOL_BUFFERS, stall_s: float = 60.0) -> None:
        self._num_values = num_values
        self._stall_s = stall_s
        self._unmade = size
        self._free: list[np.ndarray] = []
        self._waiting = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[np.ndarray]:
        """Waits for a buffer, and takes it back at the end of the ``with`` block."""
        buffer = self._take()
        try:
            yield buffer
        finally:
            with self._changed:
                self._free.append(buffer)
                self._changed.notify()

    def patience(self) -> float:
        """Returns the seconds without a byte that who holds a buffer is allowed at present."""
        return min(IMPATIENCE_S, self._stall_s) if self._waiting else self._stall_s

    def _take(self) -> np.ndarray:
        with self._changed:
            self._waiting += 1
            try:
                # The holder of a buffer gives it back: patience() sees to that.
                self._changed.wait_for(lambda: self._free or self._unmade)
            finally:
                self._waiting -= 1
            if self._free:
                return self._free.pop()
            self._unmade -= 1
        try:
            return aligned_vector(self._num_values)
        except BaseException:
            with self._changed:
                self._unmade += 1
                self._changed.notify()
            raise


class MismatchError(NetworkError):
    """A client expects other weights than this server keeps."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Session of one client: who it is, and how its values travel.

    Args:
        role: A worker, or the driver.
        partition: Whose updates a worker pushes.
        attempt: Which attempt at that partition it is.
        lengths: The legal lengths of payloads.
        push_codec: Decodes pushes; None takes them as they are.
        pull_codec: Encodes pulls; None sends them as they are.
        epoch_steps: Steps of a worker's epoch, where pushes are applied in rounds.
    """

    role: Role
    partition: int
    attempt: int
    lengths: Lengths
    push_codec: Codec | None
    pull_codec: Codec | None
    epoch_steps: int | None = None

    @property
    def is_worker(self) -> bool:
        """True if it pushes, and is waited for."""
        return self.role is Role.WORKER


def open_session(
    hello: ClientHello, *, partition: int, attempt: int, spec: ServerSpec, num_slots: int, most_rows: int
) -> Session:
    """Returns the session of a client that said HELLO.

    Raises:
        MismatchError: It means another part, or another model, than this server keeps.
    """
    _check_hello(hello, partition, spec)
    pushed, pulled = push_codec(hello.codec or None), pull_codec(hello.codec or None)
    return Session(
        role=hello.role,
        partition=partition,
        attempt=attempt,
        lengths=lengths_of(hello, num_slots, spec.num_state_values, spec.num_partitions, most_rows),
        push_codec=pushed,
        pull_codec=pulled,
        epoch_steps=None if spec.rounds_from is None else hello.epoch_steps,
    )


def welcome(entry: Entry, spec: ServerSpec, *, num_slots: int, incarnation: int) -> Welcome:
    """Returns the answer to HELLO."""
    return Welcome(
        step=entry.step,
        call=entry.call,
        highest_call=entry.highest_call,
        num_slots=num_slots,
        num_state_values=spec.num_state_values,
        first_value=spec.first_value,
        num_values=spec.num_values,
        num_partitions=spec.num_partitions,
        incarnation=incarnation,
    )


def _check_hello(hello: ClientHello, partition: int, spec: ServerSpec) -> None:
    if hello.digest != spec.layout.digest:
        raise MismatchError(
            f"Expected a model of the driver's shapes (digest {spec.layout.digest}). Received: a worker whose "
            f"model has other shapes (digest {hello.digest}). Build the same model on the driver and on executors."
        )
    if (hello.first_value, hello.num_values) != (spec.first_value, spec.num_values):
        raise MismatchError(
            f"Expected a client of {spec.num_values} values from {spec.first_value} on. Received: one of "
            f"{hello.num_values} from {hello.first_value} on. Name the servers in the order of their parts."
        )
    try:
        check_encoding(hello.codec or None)
    except ValueError as error:
        raise MismatchError(str(error)) from error
    if hello.role is Role.WORKER and partition >= spec.num_partitions:
        raise MismatchError(f"Expected a partition below {spec.num_partitions}. Received: {partition}.")


def _require_same_steps(known: int | None, session: Session) -> None:
    if known not in (None, session.epoch_steps):
        raise MismatchError(
            f"Expected partition {session.partition} with the {known} steps an epoch that it had before it was lost. "
            f"Received: {session.epoch_steps}. The DataFrame is computed anew and comes out differently: write it to "
            "disk, or checkpoint it, before fit."
        )


class RequestService:
    """Service of one server; `serve` is called with each connection, in a thread of its own."""

    def __init__(self, server: ParameterServer, pool: BufferPool, snapshotter: Snapshotter, listener: Listener) -> None:
        self.server = server
        self.pool = pool
        self.snapshotter = snapshotter
        self._listener = listener

    def statistics(self) -> dict[str, Any]:
        """Returns the server's counts, and the connections that it has refused."""
        return {**self.server.statistics(), "refused_connections": self._listener.turned_away}

    def serve(self, stream: Stream) -> None:
        """Serves one connection to its end."""
        sock = SocketIO(stream.detach(), stream.peer)
        conversation = RequestHandler(self, sock)
        try:
            conversation.run()
        except NetworkError as error:
            logger.debug("The connection of %s ended: %s", sock.peer, error)
        finally:
            conversation.end()


class RequestHandler:
    """One connection from its HELLO to its end."""

    def __init__(self, service: RequestService, sock: SocketIO) -> None:
        self._service = service
        self._server = service.server
        self._socket_io = sock
        self._session: Session | None = None
        self._is_live = False
        self._counted = (0, 0)
        self._stall_s = service.server.spec.stall_s

    def run(self) -> None:
        """Answers requests until the client says BYE or is gone.

        Raises:
            NetworkError: The connection was lost, or what came is not this protocol.
        """
        try:
            session = self._handshake()
            while session is not None and self._answer(session, self._next()):
                self._count()
        except (ProtocolError, MismatchError) as error:
            status = Status.ERROR if isinstance(error, ProtocolError) else Status.MISMATCH
            kind = RequestKind.HELLO if self._session is None else RequestKind.BYE
            self._reply(RequestHeader(kind=kind), status, encode_text(str(error)))
            raise

    def end(self) -> None:
        """Closes the connection; its worker is no longer live."""
        self._count()
        self._socket_io.close()
        if self._is_live and self._session is not None:
            self._server.clock.leave(self._session.partition)

    def _next(self) -> RequestHeader:
        """Returns the next request, however long the client takes to begin it."""
        head = bytearray(HEADER_BYTES)
        first_s = _HELLO_S if self._session is None else _FOREVER_S
        self._socket_io.receive(memoryview(head)[:1], lambda: first_s)
        self._socket_io.receive(memoryview(head)[1:], self._patience)
        header = decode_header(head)
        session = self._session
        check_request(header, *((None, None) if session is None else (session.role, session.lengths)))
        return header

    def _patience(self) -> float:
        return self._stall_s

    def _handshake(self) -> Session | None:
        """Answers HELLO; returns the session, or None where the client's place has been taken."""
        header, server = self._next(), self._server
        data = bytearray(HELLO_BYTES)
        self._socket_io.receive(memoryview(data), self._patience)
        num_slots = len(server.store.slots)
        session = open_session(
            ClientHello.from_bytes(data),
            partition=header.partition,
            attempt=header.attempt,
            spec=server.spec,
            num_slots=num_slots,
            # One update is made of a round, and none of its rows.
            most_rows=server.tables.most_bytes if server.rounds is None else 0,
        )
        entry = self._admit(session) if session.is_worker else Entry()
        if entry is None:
            self._reply(header, Status.SUPERSEDED)
            return None
        self._session = session
        answer = welcome(entry, server.spec, num_slots=num_slots, incarnation=server.incarnation)
        self._reply(header, Status.OK, answer.to_bytes())
        return session

    def _admit(self, session: Session) -> Entry | None:
        """Takes a worker in; returns where its partition stands, or None where a newer attempt has come."""
        server = self._server
        if server.rounds is not None:
            _require_same_steps(server.rounds.steps_of(session.partition), session)
        entry = server.push_log.register(session.partition, session.attempt, session.epoch_steps)
        if entry is None:
            server.counters.add("superseded")
            return None
        server.staleness.registered(session.partition, server.updates)
        server.enter(session.partition, entry)
        # Before the reply, which may fail.
        self._session, self._is_live = session, True
        return entry

    def _answer(self, session: Session, request: RequestHeader) -> bool:
        """Does what is asked; returns whether the client may ask for more."""
        if request.kind in (RequestKind.PUSH, RequestKind.PUSH_PULL):
            self._push(session, request)
        elif request.kind is RequestKind.STATE:
            self._average(session, request)
        elif request.kind is RequestKind.LOOKUP:
            self._look_up(request)
        elif request.kind in (RequestKind.PULL, RequestKind.FETCH, RequestKind.KEEP):
            wanted = self._received_wanted(request)
            if not self._has_failed(request):
                self._give(session, request, wanted)
        elif request.kind is RequestKind.BYE:
            self._part(session, request)
            return False
        else:
            self._command(session, request)
        return True

    def _give(self, session: Session, request: RequestHeader, wanted: TablesWanted | None) -> None:
        if request.kind is RequestKind.PULL:
            return self._pull(session, request, Status.OK)
        try:
            if request.kind is RequestKind.FETCH:
                self._fetch(session, request, wanted)
            else:
                self._keep(session, request, wanted)
        except CheckpointError as error:
            self._reply(request, Status.UNWRITTEN, encode_text(str(error)))

    def _received_wanted(self, request: RequestHeader) -> TablesWanted | None:
        if not request.payload_bytes:
            return None
        data = bytearray(request.payload_bytes)
        self._socket_io.receive(memoryview(data), self._patience)
        return TablesWanted.from_bytes(data, self._server.spec.layout.table_specs)

    def _look_up(self, request: RequestHeader) -> None:
        numbers = self._server.tables.received_lookup(self._fill(self._patience), request.payload_bytes)
        if self._has_failed(request):
            return
        rows = [raw_view(array) for array in self._server.tables.take(numbers)]
        self._send_header(request, Status.OK, sum(view.nbytes for view in rows))
        self._socket_io.send(rows, self._patience)

    def _fill(self, patience: Patience) -> Callable[[memoryview], None]:
        return lambda view: self._socket_io.receive(view, patience)

    def _push(self, session: Session, request: RequestHeader) -> None:
        # Not for ever: meanwhile the client can send no more. What it pulls then is what it waits for.
        self._wait_for_others(session, request, longest_s=self._stall_s)
        # Who sent it is what HELLO said, whatever the header has.
        push = RequestHeader(
            kind=request.kind,
            partition=session.partition,
            attempt=session.attempt,
            step=request.step,
            call=request.call,
            rate=request.rate,
        )
        if self._server.rounds is not None:
            self._server.rounds.check(push)
        # Others wait for the buffer: the end of a round is waited for without it.
        with self._service.pool.borrowed() as buffer:
            finite = self._receive_update(session, buffer)
            contribution = self._receive_contribution(session, request)
            if self._has_failed(request):
                return
            finite = finite and not request.flags & Flags.CONDEMNED
            finite = finite and (contribution is None or contribution.is_finite)
            status = self._server.settle(push, buffer, finite=finite, contribution=contribution)
        if self._has_failed(request):
            return
        if request.kind is RequestKind.PUSH or status is Status.SUPERSEDED:
            if self._server.rounds is not None:
                self._wait_for_others(session, request)
            return self._reply(request, status)
        self._pull(session, request, status)

    def _receive_update(self, session: Session, buffer: np.ndarray) -> bool:
        """Receives and decodes a whole update, and returns whether all of it is finite."""
        codec, finite = session.push_codec, True
        patience = self._service.pool.patience
        bounce = np.empty(0 if codec is None else codec.encoded_bytes(min(STRIPE_VALUES, len(buffer))), np.uint8)
        with np.errstate(all="ignore"):
            for stripe in self._server.store.stripes:
                part = buffer[stripe]
                if codec is None:
                    self._socket_io.receive(part.view(np.uint8).data, patience)
                else:
                    data = bounce[: stripe_bytes(codec, stripe)]
                    self._socket_io.receive(data.data, patience)
                    codec.decode(data, part)
                finite = finite and is_finite(part)
        return finite

    def _receive_contribution(self, session: Session, request: RequestHeader) -> TableContribution | None:
        """Receives what a push has of tables; None where it has nothing."""
        of_tables = request.payload_bytes - session.lengths.push
        if not of_tables:
            return None
        return self._server.tables.received_contribution(self._fill(self._service.pool.patience), of_tables)

    def _pull(self, session: Session, request: RequestHeader, status: Status) -> None:
        self._wait_for_others(session, request)
        if self._has_failed(request):
            return
        server = self._server
        if session.is_worker:
            if server.push_log.is_superseded(session.partition, session.attempt):
                return self._reply(request, Status.SUPERSEDED)
            server.staleness.pulled(session.partition, server.updates)
        # Read before the first stripe: the weights that are sent have at least this version.
        version = server.version
        if request.version == version:
            return self._reply(request, status)
        self._send_header(request, status, session.lengths.pull, flags=Flags.MODIFIED, version=version)
        self._send_stripes(session)

    def _send_stripes(self, session: Session) -> None:
        store, codec = self._server.store, session.pull_codec
        longest = min(STRIPE_VALUES, len(store.values))
        bounce = np.empty(4 * longest if codec is None else codec.encoded_bytes(longest), np.uint8)
        for index, stripe in enumerate(store.stripes):
            data = bounce[: stripe_bytes(codec, stripe)]
            if codec is None:
                store.read(index, data.view(np.float32))
            else:
                store.encode(index, codec, data)
            self._socket_io.send([data.data], self._patience)

    def _fetch(self, session: Session, request: RequestHeader, wanted: TablesWanted | None) -> None:
        """Sends the weights, then each slot, then the state, then what is wanted of tables."""
        store, of_tables = self._server.store, self._tables_between_pushes(request, wanted, lambda: None)[2]
        length = session.lengths.whole + sum(view.nbytes for view in of_tables)
        self._send_header(request, Status.OK, length, step=self._server.iterations)
        bounce = np.empty(min(STRIPE_VALUES, len(store.values)), np.float32)
        for vector in range(1 + len(store.slots)):
            for index, stripe in enumerate(store.stripes):
                part = bounce[: stripe.stop - stripe.start]
                store.read(index, part, vector)
                self._socket_io.send([part.data], self._patience)
        self._socket_io.send([self._server.averages.average().data, *of_tables], self._patience)

    def _keep(self, session: Session, request: RequestHeader, wanted: TablesWanted | None) -> None:
        """Sends what `_fetch` sends, and the ledger, as they are between two pushes."""

        def taken() -> tuple[SnapshotImage, list[np.ndarray]]:
            image = self._server.image()
            # Copies: pushes are to go on before all is sent.
            return image, [np.array(vector) for vector in (image.values, *image.slots)]

        (image, vectors), is_finite, of_tables = self._tables_between_pushes(request, wanted, taken)
        length = session.lengths.push_log
        entries: dict[str, Any] = {
            str(key): [entry["step"], entry["call"], entry["highest_call"]] for key, entry in image.entries.items()
        }
        if not is_finite:
            entries[NOT_FINITE] = True
        of_tables_bytes = sum(view.nbytes for view in of_tables)
        self._send_header(request, Status.OK, session.lengths.whole + of_tables_bytes + length, step=image.iterations)
        self._socket_io.send([*(raw_view(array) for array in (*vectors, image.state)), *of_tables], self._patience)
        self._socket_io.send([encode_statistics(entries, length)], self._patience)

    def _tables_between_pushes(
        self, request: RequestHeader, wanted: TablesWanted | None, take: Callable[[], Taken]
    ) -> tuple[Taken, bool, list[memoryview]]:
        """Does what is wanted of tables, while nobody pushes; the client hears now and then that nothing is wrong.

        Args:
            take: Takes what is to be as it is then.

        Returns:
            What it has taken, whether what was written is finite, and the bytes to send.
        """
        server = self._server

        def put() -> tuple[Taken, bool, list[memoryview]]:
            with server.shared_lock.exclusive():
                if wanted is None:
                    return take(), True, []
                return take(), server.tables.put(wanted), [raw_view(array) for array in server.tables.sent(wanted)]

        if wanted is None:
            return put()
        with ThreadPoolExecutor(1, thread_name_prefix="elephant-tables") as threads:
            putting = threads.submit(put)
            self._tell_while(request, lambda timeout_s, _: bool(wait([putting], timeout_s).done))
            return putting.result()

    def _average(self, session: Session, request: RequestHeader) -> None:
        state = np.empty(self._server.spec.num_state_values)
        self._socket_io.receive(state.view(np.uint8).data, self._patience)
        if self._has_failed(request):
            return
        if self._server.push_log.is_superseded(session.partition, session.attempt):
            return self._reply(request, Status.SUPERSEDED)
        averages, rounds = self._server.averages, self._server.rounds
        if rounds is not None and rounds.has_state(session.partition, request.step):
            # A worker that has begun again at the end of an epoch has no other than that of all.
            average = averages.average()
        else:
            average = averages.add(session.partition, request.rate, state)
        if rounds is not None and request.rate > 0:
            rounds.add_state(session.partition, request.step)
            waiting = partial(rounds.wait_for_states, request.step, self._server.clock.live)
            self._server.counters.add("waited_s", self._tell_while(request, waiting))
            average = averages.average()
        self._reply(request, Status.OK, average.data)

    def _command(self, session: Session, request: RequestHeader) -> None:
        if request.kind is RequestKind.SET_RATE:
            self._server.set_rate(request.rate)
            if self._server.rounds is not None and self._server.updates:
                # A server that is lost is not to take rounds again with a rate of later ones.
                self._service.snapshotter.request(_SNAPSHOT_S)
        elif request.kind is RequestKind.STOP:
            self._server.stop()
        elif request.kind is RequestKind.OPEN:
            self._server.open_epochs(request.step)
        else:
            self._count()
            length = session.lengths.statistics
            return self._reply(request, Status.OK, encode_statistics(self._service.statistics(), length))
        self._reply(request, Status.OK)

    def _part(self, session: Session, request: RequestHeader) -> None:
        """Says good-bye. What a finished worker has pushed is on the disk by then: nobody would send it again."""
        if request.flags & Flags.FINISHED and session.is_worker:
            self._server.finish(session.partition)
            self._service.snapshotter.request(_SNAPSHOT_S)
        self._reply(request, Status.OK)

    def _wait_for_others(self, session: Session, request: RequestHeader, *, longest_s: float = _FOREVER_S) -> None:
        """Lets a worker wait that is too far ahead, or whose round is open."""
        if not session.is_worker:
            return
        waited_s = self._tell_while(request, partial(self._server.wait, session.partition), longest_s)
        self._server.counters.add("waited_s", waited_s)

    def _tell_while(
        self,
        request: RequestHeader,
        wait: Callable[[float, Callable[[], bool]], bool],
        longest_s: float = _FOREVER_S,
    ) -> float:
        """Waits, and tells the client now and then that nothing is wrong; returns the seconds that it took.

        Args:
            wait: Waits for so many seconds at most, or until the function says so; returns whether it is over.
        """
        began = time.monotonic()
        while not wait(_HEARTBEAT_S, lambda: self._socket_io.hung_up):
            if time.monotonic() - began >= longest_s:
                break
            self._reply(request, Status.WAIT)
        return time.monotonic() - began

    def _has_failed(self, request: RequestHeader) -> bool:
        """Returns whether the fit has been given up, and says so then."""
        failure = self._server.failure
        if failure is not None:
            self._reply(request, Status.FAILED, encode_text(failure))
        return failure is not None

    def _reply(self, request: RequestHeader, status: Status, payload: bytes | memoryview = b"") -> None:
        length = memoryview(payload).nbytes
        self._send_header(request, status, length, more=[payload], version=self._server.version)

    def _send_header(
        self,
        request: RequestHeader,
        status: Status,
        length: int,
        *,
        flags: Flags = Flags.NONE,
        step: int = 0,
        version: int = 0,
        more: Iterable[bytes | memoryview] = (),
    ) -> None:
        server = self._server
        header = RequestHeader(
            kind=request.kind, status=status, flags=server.flags | flags, step=step or request.step, call=request.call,
            version=version, rate=server.rate, payload_bytes=length,
        )  # fmt: skip
        self._socket_io.send([header.to_bytes(), *more], self._patience)

    def _count(self) -> None:
        received, sent = self._socket_io.bytes_received, self._socket_io.bytes_sent
        self._server.counters.add("bytes_in", received - self._counted[0])
        self._server.counters.add("bytes_out", sent - self._counted[1])
        self._counted = (received, sent)
