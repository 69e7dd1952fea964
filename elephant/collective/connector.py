"""Connections between the ranks of a run: each calls others, and takes their calls as long as its group stands.

Every connection begins, after the proof of the token, with a hello: who calls, and what the connection is for. The
answer tells who was reached. A rank is reached over a Unix socket on its own host and over TCP elsewhere.

The port stays open because groups and links are made when they are first needed. Strangers do not get past the proof.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import get_type_hints

from elephant.collective.operation import Operation
from elephant.collective.topology import host_key, own_key
from elephant.collective.watch.failure_detector import FailureDetector
from elephant.collective.watch.peer import watched_ranks
from elephant.errors import AuthenticationError, DeadlineExceededError, NetworkError, PeerLostError, ProtocolError
from elephant.net.addresses import Address, Endpoint, local_listening_socket, local_name, name_of
from elephant.net.deadline import Deadline
from elephant.net.frames import Limits, Message, require, shown
from elephant.net.stream import Listener, Stream, connect
from elephant.net.tls import AnySocket

logger = logging.getLogger(__name__)
_PENDING = 64
# How often a rank that waits for another one to call looks whether a third one has failed.
_LOOK_S = 0.05

_HELLO_S = 10.0
# After how many seconds of refusals a rank that was there is gone.
_REFUSED_S = 0.2
# How long an error of accepting is told to who waits for a connection.
_RECENT_S = 2.0
_LONGEST_ACCEPT_S = 3600.0
_LIMITS = Limits(max_manifest_bytes=4096, max_payload_bytes=0)


class PeerConnector:
    """Ways from this rank to all others, by their numbers in the run.

    Args:
        listener: Stays the caller's, and may be closed at once.
        detector: Tells, while this rank waits for a call, that another one is gone.
        is_local: Whether ranks of one host meet over Unix sockets.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[Address],
        token: bytes,
        run_id: str,
        *,
        listener: Listener,
        detector: FailureDetector,
        is_local: bool,
    ) -> None:
        self.rank = rank
        self._addresses = addresses
        self._token = token
        self._run_id = run_id
        self._detector = detector
        local = self._listen_locally() if is_local else None
        with contextlib.closing(local) if local is not None else contextlib.nullcontext():
            key = host_key() if local is not None else own_key()
            detector.hosts[rank] = key
            self._hello = PeerHello(rank, len(addresses), "", key)
            self._acceptor = PeerAcceptor(self._hello, token, run_id, max_pending=_PENDING + len(addresses))
            for sock in (listener, local):
                if sock is not None:
                    self._acceptor.listen(sock.fileno())

    def meet(self, operation: Operation) -> None:
        """Connects the detector with the ranks that it is to watch, and learns where all are."""
        everybody = range(len(self._addresses))
        if len(watched_ranks(self.rank, len(everybody))) + 1 < len(everybody):
            self._detector.pass_on()
        self.watch(everybody, operation)
        self._await_hosts(operation)

    def watch(self, ranks: Sequence[int], operation: Operation) -> None:
        """Connects the detector with the members of a group that this rank is to watch in it; all of these call it.

        So news reach all members by way of members alone, also when all other ranks have left.
        """
        places = watched_ranks(ranks.index(self.rank), len(ranks))
        missing = [ranks[place] for place in places if not self._detector.watches(ranks[place])]
        for other in (other for other in missing if other < self.rank):
            # It may not listen yet.
            arrival = self._call(self._addresses[other], "watch", other, operation, refused_s=math.inf)
            self._add_watch(other, *arrival)
        for other, arrival in self._await("watch", [other for other in missing if other > self.rank], operation):
            self._add_watch(other, *arrival)

    def host_of(self, rank: int) -> str:
        """Returns the key of a rank's host; known of all after `meet`."""
        return self._detector.hosts[rank]

    def call(self, other: int, purpose: str, operation: Operation) -> AnySocket:
        """Returns a connection to another rank, which does not need to wait for it.

        Raises:
            NetworkError: The rank is gone, or the operation's time is over.
        """
        near = self.host_of(other) == self.host_of(self.rank)
        endpoint = self._local_name(other) if near else self._addresses[other]
        try:
            return self._call(endpoint, purpose, other, operation, refused_s=_REFUSED_S)[0]
        except PeerLostError:
            self._detector.reason(other, operation)

    def take(self, other: int, purpose: str, operation: Operation) -> AnySocket:
        """Returns the connection that another rank makes for a purpose.

        Raises:
            NetworkError: A rank failed or is gone, or none came in time.
        """
        # No further than the first: what is looked at after it may raise, and the connection would be nobody's.
        return next(self._await(purpose, [other], operation))[1][0]

    def taken(self, other: int, purpose: str, wait_s: float) -> AnySocket | None:
        """Returns the connection that another rank has made for a purpose; None where it has not so far."""
        arrivals = self._acceptor.take(purpose, [other], wait_s)
        return arrivals[other][0] if other in arrivals else None

    def seal(self, context: str, data: bytes | memoryview) -> bytes:
        """Returns the proof that a process which knows the run's token has made some bytes, for one use of them."""
        digest = hmac.new(self._token, f"elephant/{self._run_id}/{context}\0".encode(), hashlib.sha256)
        digest.update(data)
        return digest.digest()

    def close(self) -> None:
        """Takes no more calls."""
        self._acceptor.close()

    def _add_watch(self, other: int, sock: AnySocket, answer: PeerHello) -> None:
        self._detector.add(other, sock, answer.host)

    def _await_hosts(self, operation: Operation) -> None:
        """Waits until the watch has told of all ranks."""
        poller = select.poll()
        poller.register(self._detector.fileno(), select.POLLIN)
        while missing := set(range(len(self._addresses))) - self._detector.hosts.keys():
            poller.poll(_LOOK_S * 1000)
            self._detector.check(operation)
            self._refuse_absent(missing, operation)

    def _listen_locally(self) -> socket.socket | None:
        try:
            return local_listening_socket(self._local_name(self.rank))
        except NetworkError as error:
            logger.info("Ranks of this host are reached over TCP, without shared memory: %s", error)
            return None

    def _local_name(self, rank: int) -> str:
        return local_name(self._token, f"{self._run_id}/{rank}/{name_of(self._addresses[rank])}")

    def _call(
        self, endpoint: Endpoint, purpose: str, other: int, operation: Operation, *, refused_s: float
    ) -> tuple[AnySocket, PeerHello]:
        what = f"Connecting rank {self.rank} to rank {other} at {name_of(endpoint)}"
        deadline = operation.deadline.shortened(operation.deadline.seconds, what)
        hello = replace(self._hello, purpose=purpose)
        try:
            return call(endpoint, self._token, self._run_id, hello, other, deadline, refused_s=refused_s)
        except AuthenticationError as error:
            raise AuthenticationError(f"{what}: {error}") from error

    def _await(
        self, purpose: str, ranks: Iterable[int], operation: Operation
    ) -> Iterator[tuple[int, tuple[AnySocket, PeerHello]]]:
        """Yields the connections that these ranks make, as they come."""
        missing = set(ranks)
        while missing:
            for rank, arrival in self._acceptor.take(purpose, missing, _LOOK_S).items():
                missing.discard(rank)
                yield rank, arrival
            self._detector.check(operation)
            self._refuse_absent(missing, operation)

    def _refuse_absent(self, missing: Collection[int], operation: Operation) -> None:
        if missing and operation.deadline.expired:
            absent = ", ".join(map(str, sorted(missing)))
            raise operation.deadline.exceeded(
                f"Ranks that did not connect: {absent}. {self._acceptor.seen}", "a-port-that-is-blocked"
            )


@dataclass(frozen=True)
class PeerHello:
    """Greeting of one side of a new connection.

    Args:
        rank: Who says it.
        world_size: How many ranks it knows of.
        purpose: What the connection is for.
        host: Its host key.
    """

    rank: int
    world_size: int
    purpose: str
    host: str

    def to_message(self) -> Message:
        """Returns it as a message."""
        return Message("hello", asdict(self))

    @classmethod
    def of(cls, message: Message) -> PeerHello:
        """Returns the hello in a message.

        Raises:
            ProtocolError: It is none.
        """
        if message.kind != "hello":
            raise ProtocolError(f"Expected a hello. Received: {shown(message.kind)}.")
        require(message.fields, get_type_hints(cls), "a hello")
        return cls(**message.fields)


def call(
    endpoint: Endpoint,
    token: bytes,
    run_id: str,
    own_hello: PeerHello,
    expected: int,
    deadline: Deadline,
    *,
    refused_s: float,
) -> tuple[AnySocket, PeerHello]:
    """Connects to another rank.

    Args:
        expected: Which rank must be there.
        deadline: When the connection must be there.
        refused_s: After how many seconds of refusals nobody is there any more.

    Returns:
        The connection, and what the other rank answered.

    Raises:
        AuthenticationError: What listens there does not know the token or the run.
        ProtocolError: Another rank is there, or one that knows of a different number of ranks.
        DeadlineExceededError: Nobody was there in time.
        PeerLostError: Nobody is there any more.
    """
    stream = connect(endpoint, token, context_of(run_id), deadline, refused_s=refused_s, renewable=False)
    try:
        stream.send(own_hello.to_message(), deadline)
        answer = PeerHello.of(stream.receive(deadline, _LIMITS))
        if (answer.rank, answer.world_size) != (expected, own_hello.world_size):
            raise ProtocolError(
                f"Expected rank {expected} of {own_hello.world_size} at {stream.peer}. "
                f"Received: rank {answer.rank} of {answer.world_size}. "
                "All ranks must be given the same addresses in the same order."
            )
        return stream.detach(), answer
    except BaseException:
        stream.abort()
        raise


def context_of(run_id: str) -> str:
    """Returns the context that the proofs of a run's connections name."""
    return f"{run_id}/collective"


class PeerAcceptor:
    """Accepts the connections of other ranks, in one thread for each listener."""

    def __init__(self, own_hello: PeerHello, token: bytes, run_id: str, max_pending: int) -> None:
        self._own_hello = own_hello
        self._token = token
        self._context = context_of(run_id)
        self._max_pending = max_pending
        self._listeners: list[Listener] = []
        self._threads: list[threading.Thread] = []
        self._hellos: dict[tuple[str, int], tuple[AnySocket, PeerHello]] = {}
        self._news = threading.Condition()
        # The last error, and until when it is told.
        self._network_error: tuple[NetworkError, float] | None = None
        self._closed = False

    def listen(self, descriptor: int) -> None:
        """Accepts on a listening socket, through a duplicate of its descriptor, so that it stays the caller's."""
        listener = Listener(socket.socket(fileno=os.dup(descriptor)), max_pending=self._max_pending)
        name = f"elephant-collective-accept-{self._own_hello.rank}-{len(self._listeners)}"
        thread = threading.Thread(target=self._accept_all, args=(listener,), name=name, daemon=True)
        self._listeners.append(listener)
        self._threads.append(thread)
        thread.start()

    def take(self, purpose: str, ranks: Iterable[int], wait_s: float) -> dict[int, tuple[AnySocket, PeerHello]]:
        """Waits for connections of these ranks for a purpose, and returns, by rank, those that are there.

        Raises:
            NetworkError: This process can open nothing more.
        """
        wanted = {(purpose, rank) for rank in ranks}
        with self._news:
            self._news.wait_for(lambda: self._recent_error() or not wanted.isdisjoint(self._hellos), wait_s)
            if (error := self._recent_error()) is not None:
                raise error
            return {key[1]: self._hellos.pop(key) for key in wanted & self._hellos.keys()}

    @property
    def seen(self) -> str:
        """Sentence for an error about connections that could not be served."""
        return self._listeners[0].seen

    def close(self) -> None:
        """Stops accepting, joins the threads, and closes the connections that nobody took."""
        with self._news:
            self._closed = True
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join(2 * _HELLO_S)
        for sock, _ in self._hellos.values():
            sock.close()

    def _accept_all(self, listener: Listener) -> None:
        while not self._closed:
            try:
                deadline = Deadline(_LONGEST_ACCEPT_S, "Waiting for ranks to connect")
                self._admit(listener.accept(self._token, self._context, deadline))
            except DeadlineExceededError:
                continue
            except NetworkError as error:
                # What this process lacks for the moment it may have later.
                self._tell(error)
            except Exception as error:
                self._tell(NetworkError(f"Accepting ranks failed: {error!r}."))
                return

    def _tell(self, error: NetworkError) -> None:
        with self._news:
            self._network_error = error, time.monotonic() + _RECENT_S
            self._news.notify_all()

    def _recent_error(self) -> NetworkError | None:
        if self._network_error is None or time.monotonic() > self._network_error[1]:
            return None
        return self._network_error[0]

    def _admit(self, stream: Stream) -> None:
        """Exchanges hellos with a rank that has proved itself; one that goes away meanwhile is forgotten."""
        deadline = Deadline(_HELLO_S, f"The hello of {stream.peer}")
        try:
            hello = PeerHello.of(stream.receive(deadline, _LIMITS))
            stream.send(self._own_hello.to_message(), deadline)
        except NetworkError as error:
            logger.debug("A rank at %s came and went: %s", stream.peer, error)
            stream.abort()
            return
        with self._news:
            earlier = self._hellos.pop((hello.purpose, hello.rank), None)
            self._hellos[hello.purpose, hello.rank] = stream.detach(), hello
            self._news.notify_all()
        if earlier is not None:
            earlier[0].close()
