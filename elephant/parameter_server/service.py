"""One client's connection at the server: requests in, replies out, one after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import numpy as np

from elephant.errors import NetworkError, ProtocolError
from elephant.net.stream import Stream
from elephant.parameter_server.archivist import Archivist
from elephant.parameter_server.encoding import (
    STRIPE_VALUES,
    check_encoding,
    encoded_length,
    is_finite,
    pull_codec,
    push_codec,
    stripe_bytes,
)
from elephant.parameter_server.engine import Engine
from elephant.parameter_server.line import Line
from elephant.parameter_server.pool import Pool
from elephant.parameter_server.protocol import (
    HEADER_BYTES,
    HELLO_BYTES,
    Flags,
    Header,
    Hello,
    Kind,
    Lengths,
    Role,
    Status,
    Welcome,
    check_request,
    decode_header,
    encode_statistics,
    encode_text,
)

logger = logging.getLogger(__name__)

_FOREVER_S = 1e9
_HELLO_S = 30.0
_SNAPSHOT_S = 120.0


class MismatchError(NetworkError):
    """What a client expects of this server is not what it keeps."""


class Service:
    """What all connections of one server have in common; `serve` is called with each, in a thread of its own.

    Args:
        engine: The server.
        pool: Its receive buffers.
        archivist: Takes snapshots; None takes none.
    """

    def __init__(self, engine: Engine, pool: Pool, archivist: Archivist | None) -> None:
        self.engine = engine
        self.pool = pool
        self.archivist = archivist

    def serve(self, stream: Stream) -> None:
        """Serves one connection to its end."""
        line = Line(stream.detach(), stream.peer)
        conversation = Conversation(self, line)
        try:
            conversation.run()
        except NetworkError as error:
            logger.debug("The connection of %s ended: %s", line.peer, error)
        finally:
            conversation.end()


class Conversation:
    """One connection from its HELLO to its end.

    Args:
        service: What it shares with the others.
        line: The connection.
    """

    def __init__(self, service: Service, line: Line) -> None:
        self._service = service
        self._engine = service.engine
        self._line = line
        self._hello: Hello | None = None
        self._lengths: Lengths | None = None
        self._partition, self._attempt = 0, 0
        self._is_live = False
        self._counted = (0, 0)
        self._stall_s = service.engine.spec.stall_s

    def run(self) -> None:
        """Answers requests until the client says BYE or is gone.

        Raises:
            NetworkError: The connection was lost, or what came is not this protocol.
        """
        try:
            self._greet()
            while self._answer(self._next()):
                self._count()
        except (ProtocolError, MismatchError) as error:
            status = Status.ERROR if isinstance(error, ProtocolError) else Status.MISMATCH
            kind = Kind.HELLO if self._lengths is None else Kind.BYE
            self._reply(Header(kind=kind), status, encode_text(str(error)))
            raise

    def end(self) -> None:
        """Closes the connection; its worker is no longer live."""
        self._count()
        self._line.close()
        if self._is_live:
            self._engine.clock.leave(self._partition)

    @property
    def _agreed(self) -> Hello:
        if self._hello is None:
            raise ProtocolError("Expected HELLO before anything else.")
        return self._hello

    @property
    def _known_lengths(self) -> Lengths:
        if self._lengths is None:
            raise ProtocolError("Expected HELLO before anything else.")
        return self._lengths

    def _next(self) -> Header:
        """Returns the next request, however long the client takes to begin it."""
        head = bytearray(HEADER_BYTES)
        first_s = _HELLO_S if self._hello is None else _FOREVER_S
        self._line.receive(memoryview(head)[:1], lambda: first_s)
        self._line.receive(memoryview(head)[1:], self._patience)
        header = decode_header(head)
        check_request(header, None if self._hello is None else self._hello.role, self._lengths)
        return header

    def _patience(self) -> float:
        return self._stall_s

    def _greet(self) -> None:
        header = self._next()
        data = bytearray(HELLO_BYTES)
        self._line.receive(memoryview(data), self._patience)
        hello = Hello.from_bytes(data)
        self._check(header, hello)
        self._partition, self._attempt = header.partition, header.attempt
        codec, spec = hello.codec or None, self._engine.spec
        self._lengths = Lengths(
            push=encoded_length(push_codec(codec), spec.num_values),
            pull=encoded_length(pull_codec(codec), spec.num_values),
            whole=4 * spec.num_values * (1 + len(self._engine.store.slots)) + 8 * spec.num_state_values,
            state=8 * spec.num_state_values,
            num_partitions=spec.num_partitions,
        )
        place = self._admit() if hello.role is Role.WORKER else (0, 0)
        if place is None:
            self._reply(header, Status.SUPERSEDED)
            raise NetworkError(f"{self._line.peer} is an attempt that has been superseded.")
        self._hello = hello
        self._reply(header, Status.OK, self._welcome(place))

    def _check(self, header: Header, hello: Hello) -> None:
        """Raises MismatchError unless the client means this very part of this very model."""
        spec = self._engine.spec
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
        if hello.role is Role.WORKER and header.partition >= spec.num_partitions:
            raise MismatchError(f"Expected a partition below {spec.num_partitions}. Received: {header.partition}.")

    def _admit(self) -> tuple[int, int] | None:
        entry = self._engine.ledger.greet(self._partition, self._attempt)
        if entry is None:
            self._engine.counters.add("superseded")
            return None
        self._engine.staleness.greeted(self._partition, self._engine.updates)
        self._engine.clock.enter(self._partition, entry.step)
        self._is_live = True
        return entry.place

    def _welcome(self, place: tuple[int, int]) -> bytes:
        spec = self._engine.spec
        return Welcome(
            step=place[0], call=place[1],
            num_slots=len(self._engine.store.slots), num_state_values=spec.num_state_values,
            first_value=spec.first_value, num_values=spec.num_values,
            num_partitions=spec.num_partitions, incarnation=self._engine.incarnation,
        ).to_bytes()  # fmt: skip

    def _answer(self, request: Header) -> bool:
        """Does what is asked; returns whether the client may ask for more."""
        if request.kind in (Kind.PUSH, Kind.PUSH_PULL):
            self._push(request)
        elif request.kind is Kind.STATE:
            self._average(request)
        elif request.kind in (Kind.PULL, Kind.FETCH):
            if not self._has_failed(request):
                self._pull(request, Status.OK) if request.kind is Kind.PULL else self._fetch(request)
        elif request.kind is Kind.BYE:
            self._part(request)
            return False
        else:
            self._command(request)
        return True

    def _push(self, request: Header) -> None:
        self._wait_for_slower()
        with self._service.pool.borrowed() as buffer:
            finite = self._receive_update(buffer)
            if self._has_failed(request):
                return
            # Who sent it is what HELLO said, whatever the header has.
            push = Header(
                kind=request.kind,
                partition=self._partition,
                attempt=self._attempt,
                step=request.step,
                call=request.call,
            )
            finite = finite and not request.flags & Flags.CONDEMNED
            status = self._engine.settle(push, buffer, finite=finite)
        if self._has_failed(request):
            return
        if request.kind is Kind.PUSH or status is Status.SUPERSEDED:
            return self._reply(request, status)
        self._pull(request, status)

    def _receive_update(self, buffer: np.ndarray) -> bool:
        """Receives and decodes a whole update, and returns whether all of it is finite."""
        codec, finite = push_codec(self._agreed.codec or None), True
        patience = self._service.pool.patience
        bounce = np.empty(0 if codec is None else codec.encoded_bytes(min(STRIPE_VALUES, len(buffer))), np.uint8)
        with np.errstate(all="ignore"):
            for stripe in self._engine.store.stripes:
                part = buffer[stripe]
                if codec is None:
                    self._line.receive(part.view(np.uint8).data, patience)
                else:
                    data = bounce[: stripe_bytes(codec, stripe)]
                    self._line.receive(data.data, patience)
                    codec.decode(data, part)
                finite = finite and is_finite(part)
        return finite

    def _pull(self, request: Header, status: Status) -> None:
        self._wait_for_slower()
        engine = self._engine
        if self._agreed.role is Role.WORKER:
            if engine.ledger.is_superseded(self._partition, self._attempt):
                return self._reply(request, Status.SUPERSEDED)
            engine.staleness.pulled(self._partition, engine.updates)
        # Read before the first stripe: the weights that are sent have at least this version.
        version = engine.version
        if request.version == version:
            return self._reply(request, status)
        self._send_header(request, status, self._known_lengths.pull, flags=Flags.MODIFIED, version=version)
        self._send_stripes()

    def _send_stripes(self) -> None:
        store, codec = self._engine.store, pull_codec(self._agreed.codec or None)
        longest = min(STRIPE_VALUES, len(store.values))
        bounce = np.empty(4 * longest if codec is None else codec.encoded_bytes(longest), np.uint8)
        for index, stripe in enumerate(store.stripes):
            data = bounce[: stripe_bytes(codec, stripe)]
            if codec is None:
                store.read(index, data.view(np.float32))
            else:
                store.encode(index, codec, data)
            self._line.send([data.data], self._patience)

    def _fetch(self, request: Header) -> None:
        """Sends the weights, then each slot, then the state."""
        store = self._engine.store
        self._send_header(request, Status.OK, self._known_lengths.whole, step=self._engine.iterations)
        bounce = np.empty(min(STRIPE_VALUES, len(store.values)), np.float32)
        for vector in range(1 + len(store.slots)):
            for index, stripe in enumerate(store.stripes):
                part = bounce[: stripe.stop - stripe.start]
                store.read(index, part, vector)
                self._line.send([part.data], self._patience)
        self._line.send([self._engine.averages.average().data], self._patience)

    def _average(self, request: Header) -> None:
        state = np.empty(self._engine.spec.num_state_values)
        self._line.receive(state.view(np.uint8).data, self._patience)
        if self._has_failed(request):
            return
        if self._engine.ledger.is_superseded(self._partition, self._attempt):
            return self._reply(request, Status.SUPERSEDED)
        average = self._engine.averages.add(self._partition, request.rate, state)
        self._reply(request, Status.OK, average.data)

    def _command(self, request: Header) -> None:
        if request.kind is Kind.SET_RATE:
            self._engine.set_rate(request.rate)
        elif request.kind is Kind.STOP:
            self._engine.stop()
        else:
            self._count()
            length = self._known_lengths.statistics
            return self._reply(request, Status.OK, encode_statistics(self._engine.statistics(), length))
        self._reply(request, Status.OK)

    def _part(self, request: Header) -> None:
        """Says good-bye. What a finished worker has pushed is on the disk by then: nobody would send it again."""
        if request.flags & Flags.FINISHED and self._agreed.role is Role.WORKER:
            self._engine.clock.finish(self._partition)
            if self._service.archivist is not None:
                self._service.archivist.request(_SNAPSHOT_S)
        self._reply(request, Status.OK)

    def _wait_for_slower(self) -> None:
        if self._agreed.role is Role.WORKER:
            began = time.monotonic()
            self._engine.clock.wait(self._partition, lambda: self._line.hung_up)
            self._engine.counters.waited(time.monotonic() - began)

    def _has_failed(self, request: Header) -> bool:
        """Returns whether the fit has been given up, and says so then."""
        failure = self._engine.failure
        if failure is not None:
            self._reply(request, Status.FAILED, encode_text(failure))
        return failure is not None

    def _reply(self, request: Header, status: Status, payload: bytes | memoryview = b"") -> None:
        length = memoryview(payload).nbytes
        self._send_header(request, status, length, more=[payload], version=self._engine.version)

    def _send_header(
        self,
        request: Header,
        status: Status,
        length: int,
        *,
        flags: Flags = Flags.NONE,
        step: int = 0,
        version: int = 0,
        more: Iterable[bytes | memoryview] = (),
    ) -> None:
        engine = self._engine
        header = Header(
            kind=request.kind, status=status, flags=engine.flags | flags, step=step or request.step, call=request.call,
            version=version, rate=engine.rate, payload_bytes=length,
        )  # fmt: skip
        self._line.send([header.to_bytes(), *more], self._patience)

    def _count(self) -> None:
        received, sent = self._line.bytes_received, self._line.bytes_sent
        self._engine.counters.add("bytes_in", received - self._counted[0])
        self._engine.counters.add("bytes_out", sent - self._counted[1])
        self._counted = (received, sent)
