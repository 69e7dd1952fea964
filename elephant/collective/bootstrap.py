"""Bootstrap: ranks accept and connect to each other until the process group stands.

First comes the watch: every rank calls those before it and is called by those after it.
The hellos tell all ranks who shares a host. Then come the groups: in each, every rank
calls those that come 1, 2, 4, ... places after it, over a Unix socket on its own host and
over TCP elsewhere. At last the ranks of a host share memory, where they can.

Every connection begins, after the proof of the token, with a hello: who calls, and what
the connection is for. The answer tells who was reached.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from elephant.collective.communicator import Communicator, LocalCommunicator
from elephant.collective.failure_detector import ControlMessage, FailureDetector
from elephant.collective.links import BruckAllgather, LinkPair, RankGroup, distances
from elephant.collective.operation import AlgorithmThresholds, AllreduceAlgorithm, Operation
from elephant.collective.process_group import COUNT_BYTES, ProcessGroup
from elephant.collective.ring import Ring
from elephant.collective.shared_memory import HostGroup, share_memory
from elephant.collective.topology import HierarchicalAllreduce, Topology, host_key, own_key
from elephant.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NetworkError,
    PeerLostError,
    ProtocolError,
)
from elephant.net.addresses import Address, Endpoint, local_listening_socket, local_name, name_of
from elephant.net.deadline import Deadline
from elephant.net.frames import Limits, Message
from elephant.net.handshake import check_token
from elephant.net.stream import Listener, Stream, connect

logger = logging.getLogger(__name__)
_TRANSPORTS = ("auto", "tcp")
_PENDING = 64
# How often a rank that waits for another one to call looks whether a third one has failed.
_LOOK_S = 0.05

_HELLO_S = 10.0
_LONGEST_ACCEPT_S = 3600.0
_LIMITS = Limits(max_manifest_bytes=4096, max_payload_bytes=0)


def form_collective(
    rank: int,
    addresses: Sequence[Address],
    listener: Listener,
    token: bytes,
    run_id: str,
    timeout_s: float,
    *,
    operation_timeout_s: float = 600.0,
    transport: str = "auto",
    sizes: AlgorithmThresholds | None = None,
) -> Communicator:
    """Connects this rank with the others; all ranks call it, in any order.

    Args:
        token: The job's random token, 16 bytes or more.
        run_id: The run, which a connection must belong to.
        timeout_s: Seconds until all ranks must be there.
        transport: ``"auto"``, or ``"tcp"`` to treat every rank as if it had a host of its own.
        sizes: Which arrays go which way; the same on every rank. ``AlgorithmThresholds()`` when None.

    Returns:
        The collective; one of a single rank for a single address.

    Raises:
        ConfigurationError: There is no such rank or transport, or the token is too short.
        AuthenticationError: What listens at another rank's address does not know the token or the run.
        ProtocolError: Another rank listens there.
        DeadlineExceededError: A rank was not there in time; the text names it.
        NetworkError: An address cannot be used, the listener was closed, or another rank has given up.
    """
    world_size = len(addresses)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank: expected one from 0 to {world_size - 1}. Received: {rank!r}.")
    if transport not in _TRANSPORTS:
        raise ConfigurationError(f"transport: expected one of {', '.join(_TRANSPORTS)}. Received: {transport!r}.")
    if world_size == 1:
        return LocalCommunicator()
    check_token(token)
    deadline = Deadline(timeout_s, f"Connecting {world_size} ranks on rank {rank}")
    with contextlib.ExitStack() as failed:
        forming = _Bootstrap(rank, addresses, token, run_id, deadline)
        failed.push(forming.give_up)
        placement = forming.connect(listener, transport)
        collective = _collective_of(forming, placement, failed, sizes or AlgorithmThresholds(), operation_timeout_s)
        failed.pop_all()
    return collective


class _Bootstrap:
    """The connections of one rank, in the making.

    Attributes:
        rank: This rank.
        operation: The connecting, for whoever waits.
        watch: The connections of the watch.
        groups: The connections of groups, by the group's name.
    """

    def __init__(self, rank: int, addresses: Sequence[Address], token: bytes, run_id: str, deadline: Deadline) -> None:
        self.rank = rank
        self.operation = Operation(0, "connecting the ranks", deadline)
        self.watch = FailureDetector(rank)
        self.groups: dict[str, RankGroup] = {}
        self._addresses = addresses
        self._token = token
        self._run_id = run_id
        self._deadline = deadline

    def connect(self, listener: Listener, transport: str) -> Topology:
        """Makes all connections, and returns where the ranks are."""
        with contextlib.ExitStack() as stack:
            local = self._listen_locally() if transport == "auto" else None
            if local is not None:
                stack.callback(local.close)
            own = PeerHello(self.rank, len(self._addresses), "", host_key() if local is not None else own_key())
            arrivals = PeerAcceptor(own, self._token, self._run_id, max_pending=_PENDING + len(self._addresses))
            stack.callback(arrivals.close)
            for sock in (listener, local):
                if sock is not None:
                    arrivals.listen(sock.fileno())
            placement = Topology(self._meet(own, arrivals))
            for name, members in placement.groups(self.rank).items():
                self.groups[name] = self._join(name, members, placement, own, arrivals)
        return placement

    def give_up(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tells the ranks that are there already, and closes everything."""
        lost = PeerLostError(f"Rank {self.rank} gave up connecting: {type(error).__name__}: {error}")
        self.watch.close(ControlMessage.of(error if isinstance(error, NetworkError) else lost, 0))
        for group in self.groups.values():
            group.close()

    def _listen_locally(self) -> socket.socket | None:
        try:
            return local_listening_socket(self._local_name(self.rank))
        except NetworkError as error:
            logger.info("Ranks of this host are reached over TCP, without shared memory: %s", error)
            return None

    def _local_name(self, rank: int) -> str:
        return local_name(self._token, f"{self._run_id}/{rank}/{name_of(self._addresses[rank])}")

    def _meet(self, own: PeerHello, arrivals: PeerAcceptor) -> list[str]:
        """Connects the watch, and returns every rank's host key."""
        keys = {self.rank: own.host}
        hello = replace(own, purpose="watch")
        for other in range(self.rank):
            sock, answer = self._call(self._addresses[other], hello, other)
            keys[other] = answer.host
            self.watch.add(other, sock)
        for other, (sock, answer) in self._await(arrivals, "watch", range(self.rank + 1, len(self._addresses))):
            keys[other] = answer.host
            self.watch.add(other, sock)
        return [keys[rank] for rank in range(len(self._addresses))]

    def _join(
        self, name: str, members: Sequence[int], placement: Topology, own: PeerHello, arrivals: PeerAcceptor
    ) -> RankGroup:
        """Makes this rank's connections in a group."""
        position, pairs = members.index(self.rank), {}
        with contextlib.ExitStack() as failed:
            for distance in distances(len(members)):
                after, before = (members[(position + step) % len(members)] for step in (distance, -distance))
                near = after in placement.neighbors(self.rank)
                endpoint = self._local_name(after) if near else self._addresses[after]
                purpose = f"{name}/{distance}"
                target, _ = self._call(endpoint, replace(own, purpose=purpose), after)
                failed.callback(target.close)
                ((_, (source, _)),) = self._await(arrivals, purpose, [before])
                failed.callback(source.close)
                pairs[distance] = LinkPair(source, before, target, after, self.watch)
            failed.pop_all()
        return RankGroup(members, position, pairs)

    def _call(self, endpoint: Endpoint, hello: PeerHello, other: int) -> tuple[socket.socket, PeerHello]:
        what = f"Connecting rank {self.rank} to rank {other} at {name_of(endpoint)}"
        deadline = self._deadline.shortened(self._deadline.seconds, what)
        try:
            return call(endpoint, self._token, self._run_id, hello, other, deadline)
        except AuthenticationError as error:
            raise AuthenticationError(f"{what}: {error}") from error

    def _await(
        self, arrivals: PeerAcceptor, purpose: str, ranks: Iterable[int]
    ) -> Iterator[tuple[int, tuple[socket.socket, PeerHello]]]:
        """Yields the connections that these ranks make, as they come."""
        missing = set(ranks)
        while missing:
            for rank, arrival in arrivals.take(purpose, missing, _LOOK_S).items():
                missing.discard(rank)
                yield rank, arrival
            self.watch.check(self.operation)
            if missing and self._deadline.expired:
                absent = ", ".join(map(str, sorted(missing)))
                raise self._deadline.exceeded(f"Ranks that did not connect: {absent}. {arrivals.seen}")


def _collective_of(
    forming: _Bootstrap, placement: Topology, failed: contextlib.ExitStack, sizes: AlgorithmThresholds, timeout_s: float
) -> Communicator:
    """Makes the collective of connected ranks; what must be closed when that fails goes on the stack."""
    groups, world = forming.groups, forming.groups["world"]
    exchange = BruckAllgather(world, max(sizes.small_bytes // world.size, COUNT_BYTES))
    route = _route(forming, placement, exchange, failed, sizes)
    failed.callback(route.close)
    return ProcessGroup(
        forming.rank,
        placement,
        watch=forming.watch,
        groups=list(groups.values()),
        exchange=exchange,
        route=route,
        sizes=sizes,
        timeout_s=timeout_s,
    )


def _route(
    forming: _Bootstrap,
    placement: Topology,
    exchange: BruckAllgather,
    failed: contextlib.ExitStack,
    sizes: AlgorithmThresholds,
) -> AllreduceAlgorithm:
    groups, world = forming.groups, forming.groups["world"]
    if len(placement.hosts) == world.size:
        return Ring(world, sizes)
    one_host = len(placement.hosts) == 1
    host = world if one_host else groups.get("host")
    shared = None
    if host is not None and (memory := share_memory(host, sizes.block_bytes, forming.operation)) is not None:
        inner = exchange if one_host else BruckAllgather(host, 0)
        shared = HostGroup(memory, inner, position=host.position, size=host.size, block_bytes=sizes.block_bytes)
        failed.callback(shared.close)
    has_memory = np.array([host is None or shared is not None], np.uint8)
    if not all(flag[0] for flag in exchange.gather(forming.operation, has_memory)):
        if forming.rank == 0:
            logger.warning("The ranks of a host cannot share memory on this system: all data goes through sockets.")
        if shared is not None:
            shared.close()
        return Ring(world, sizes)
    if one_host and shared is not None:
        return shared
    leaders = Ring(groups["leaders"], sizes) if "leaders" in groups else None
    return HierarchicalAllreduce(shared, leaders, Ring(world, sizes))


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
        fields: dict[str, Any] = dict(message.fields)
        kinds = {"rank": int, "world_size": int, "purpose": str, "host": str}
        if message.kind != "hello" or {name: type(value) for name, value in fields.items()} != kinds:
            raise ProtocolError(f"Expected a hello. Received: {message.kind!r} with {fields!r}.")
        return cls(**fields)


def call(
    endpoint: Endpoint, token: bytes, run_id: str, own: PeerHello, expected: int, deadline: Deadline
) -> tuple[socket.socket, PeerHello]:
    """Connects to another rank.

    Args:
        expected: Which rank must be there.
        deadline: When the connection must be there.

    Returns:
        The connection, and what the other rank answered.

    Raises:
        AuthenticationError: What listens there does not know the token or the run.
        ProtocolError: Another rank is there, or one that knows of a different number of ranks.
        DeadlineExceededError: Nobody was there in time.
    """
    stream = connect(endpoint, token, context_of(run_id), deadline)
    try:
        stream.send(own.to_message(), deadline)
        answer = PeerHello.of(stream.receive(deadline, _LIMITS))
        if (answer.rank, answer.world_size) != (expected, own.world_size):
            raise ProtocolError(
                f"Expected rank {expected} of {own.world_size} at {stream.peer}. "
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

    def __init__(self, own: PeerHello, token: bytes, run_id: str, max_pending: int) -> None:
        self._own = own
        self._token = token
        self._context = context_of(run_id)
        self._max_pending = max_pending
        self._listeners: list[Listener] = []
        self._threads: list[threading.Thread] = []
        self._arrived: dict[tuple[str, int], tuple[socket.socket, PeerHello]] = {}
        self._news = threading.Condition()
        self._failure: NetworkError | None = None
        self._closed = False

    def listen(self, descriptor: int) -> None:
        """Accepts on a listening socket, through a duplicate of its descriptor, so that it stays the caller's."""
        listener = Listener(socket.socket(fileno=os.dup(descriptor)), max_pending=self._max_pending)
        name = f"elephant-collective-accept-{self._own.rank}-{len(self._listeners)}"
        thread = threading.Thread(target=self._accept_all, args=(listener,), name=name, daemon=True)
        self._listeners.append(listener)
        self._threads.append(thread)
        thread.start()

    def take(self, purpose: str, ranks: Iterable[int], wait_s: float) -> dict[int, tuple[socket.socket, PeerHello]]:
        """Waits for connections of these ranks for a purpose, and returns, by rank, those that are there.

        Raises:
            NetworkError: A listener was closed.
        """
        wanted = {(purpose, rank) for rank in ranks}
        with self._news:
            self._news.wait_for(lambda: self._failure or not wanted.isdisjoint(self._arrived), wait_s)
            if self._failure is not None:
                raise self._failure
            return {key[1]: self._arrived.pop(key) for key in wanted & self._arrived.keys()}

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
        for sock, _ in self._arrived.values():
            sock.close()

    def _accept_all(self, listener: Listener) -> None:
        while not self._closed:
            try:
                deadline = Deadline(_LONGEST_ACCEPT_S, "Waiting for ranks to connect")
                self._admit(listener.accept(self._token, self._context, deadline))
            except DeadlineExceededError:
                continue
            except Exception as error:
                failure = (
                    error if isinstance(error, NetworkError) else NetworkError(f"Accepting ranks failed: {error!r}.")
                )
                with self._news:
                    self._failure = self._failure or failure
                    self._news.notify_all()
                return

    def _admit(self, stream: Stream) -> None:
        """Exchanges hellos with a rank that has proved itself; one that goes away meanwhile is forgotten."""
        deadline = Deadline(_HELLO_S, f"The hello of {stream.peer}")
        try:
            hello = PeerHello.of(stream.receive(deadline, _LIMITS))
            stream.send(self._own.to_message(), deadline)
        except NetworkError as error:
            logger.debug("A rank at %s came and went: %s", stream.peer, error)
            stream.abort()
            return
        with self._news:
            earlier = self._arrived.pop((hello.purpose, hello.rank), None)
            self._arrived[hello.purpose, hello.rank] = stream.detach(), hello
            self._news.notify_all()
        if earlier is not None:
            earlier[0].close()
