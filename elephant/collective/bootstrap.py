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
    thresholds: AlgorithmThresholds | None = None,
) -> Communicator:
    """Connects this rank with the others; all ranks call it, in any order.

    Args:
        token: The job's random token, 16 bytes or more.
        run_id: The run, which a connection must belong to.
        timeout_s: Seconds until all ranks must be there.
        transport: ``"auto"``, or ``"tcp"`` to treat every rank as if it had a host of its own.
        thresholds: Which arrays go which way; the same on every rank. ``AlgorithmThresholds()`` when None.

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
        bootstrap = _Bootstrap(rank, addresses, token, run_id, deadline)
        failed.push(bootstrap.give_up)
        topology = bootstrap.connect(listener, transport)
        communicator = _collective_of(
            bootstrap, topology, failed, thresholds or AlgorithmThresholds(), operation_timeout_s
        )
        failed.pop_all()
    return communicator


class _Bootstrap:
    """The connections of one rank, in the making.

    Attributes:
        rank: This rank.
        operation: The connecting, for whoever waits.
        detector: The connections of the watch.
        groups: The connections of groups, by the group's name.
    """

    def __init__(self, rank: int, addresses: Sequence[Address], token: bytes, run_id: str, deadline: Deadline) -> None:
        self.rank = rank
        self.operation = Operation(0, "connecting the ranks", deadline)
        self.detector = FailureDetector(rank)
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
            own_hello = PeerHello(self.rank, len(self._addresses), "", host_key() if local is not None else own_key())
            acceptor = PeerAcceptor(own_hello, self._token, self._run_id, max_pending=_PENDING + len(self._addresses))
            stack.callback(acceptor.close)
            for sock in (listener, local):
                if sock is not None:
                    acceptor.listen(sock.fileno())
            topology = Topology(self._meet(own_hello, acceptor))
            for name, members in topology.groups(self.rank).items():
                self.groups[name] = self._join(name, members, topology, own_hello, acceptor)
        return topology

    def give_up(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tells the ranks that are there already, and closes everything."""
        lost = PeerLostError(f"Rank {self.rank} gave up connecting: {type(error).__name__}: {error}")
        self.detector.close(ControlMessage.of(error if isinstance(error, NetworkError) else lost, 0))
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

    def _meet(self, own_hello: PeerHello, acceptor: PeerAcceptor) -> list[str]:
        """Connects the watch, and returns every rank's host key."""
        keys = {self.rank: own_hello.host}
        hello = replace(own_hello, purpose="watch")
        for other in range(self.rank):
            sock, answer = self._call(self._addresses[other], hello, other)
            keys[other] = answer.host
            self.detector.add(other, sock)
        for other, (sock, answer) in self._await(acceptor, "watch", range(self.rank + 1, len(self._addresses))):
            keys[other] = answer.host
            self.detector.add(other, sock)
        return [keys[rank] for rank in range(len(self._addresses))]

    def _join(
        self, name: str, members: Sequence[int], topology: Topology, own_hello: PeerHello, acceptor: PeerAcceptor
    ) -> RankGroup:
        """Makes this rank's connections in a group."""
        position, pairs = members.index(self.rank), {}
        with contextlib.ExitStack() as failed:
            for distance in distances(len(members)):
                after, before = (members[(position + step) % len(members)] for step in (distance, -distance))
                near = after in topology.neighbors(self.rank)
                endpoint = self._local_name(after) if near else self._addresses[after]
                purpose = f"{name}/{distance}"
                target, _ = self._call(endpoint, replace(own_hello, purpose=purpose), after)
                failed.callback(target.close)
                ((_, (source, _)),) = self._await(acceptor, purpose, [before])
                failed.callback(source.close)
                pairs[distance] = LinkPair(source, before, target, after, self.detector)
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
        self, acceptor: PeerAcceptor, purpose: str, ranks: Iterable[int]
    ) -> Iterator[tuple[int, tuple[socket.socket, PeerHello]]]:
        """Yields the connections that these ranks make, as they come."""
        missing = set(ranks)
        while missing:
            for rank, arrival in acceptor.take(purpose, missing, _LOOK_S).items():
                missing.discard(rank)
                yield rank, arrival
            self.detector.check(self.operation)
            if missing and self._deadline.expired:
                absent = ", ".join(map(str, sorted(missing)))
                raise self._deadline.exceeded(f"Ranks that did not connect: {absent}. {acceptor.seen}")


def _collective_of(
    bootstrap: _Bootstrap,
    topology: Topology,
    failed: contextlib.ExitStack,
    thresholds: AlgorithmThresholds,
    timeout_s: float,
) -> Communicator:
    """Makes the collective of connected ranks; what must be closed when that fails goes on the stack."""
    groups, world = bootstrap.groups, bootstrap.groups["world"]
    allgather = BruckAllgather(world, max(thresholds.small_bytes // world.size, COUNT_BYTES))
    algorithm = _route(bootstrap, topology, allgather, failed, thresholds)
    failed.callback(algorithm.close)
    return ProcessGroup(
        bootstrap.rank,
        topology,
        detector=bootstrap.detector,
        groups=list(groups.values()),
        allgather=allgather,
        algorithm=algorithm,
        thresholds=thresholds,
        timeout_s=timeout_s,
    )


def _route(
    bootstrap: _Bootstrap,
    topology: Topology,
    allgather: BruckAllgather,
    failed: contextlib.ExitStack,
    thresholds: AlgorithmThresholds,
) -> AllreduceAlgorithm:
    groups, world = bootstrap.groups, bootstrap.groups["world"]
    if len(topology.hosts) == world.size:
        return Ring(world, thresholds)
    one_host = len(topology.hosts) == 1
    host = world if one_host else groups.get("host")
    host_group = None
    if host is not None and (memory := share_memory(host, thresholds.block_bytes, bootstrap.operation)) is not None:
        inner = allgather if one_host else BruckAllgather(host, 0)
        host_group = HostGroup(
            memory, inner, position=host.position, size=host.size, block_bytes=thresholds.block_bytes
        )
        failed.callback(host_group.close)
    has_memory = np.array([host is None or host_group is not None], np.uint8)
    if not all(flag[0] for flag in allgather.gather(bootstrap.operation, has_memory)):
        if bootstrap.rank == 0:
            logger.warning("The ranks of a host cannot share memory on this system: all data goes through sockets.")
        if host_group is not None:
            host_group.close()
        return Ring(world, thresholds)
    if one_host and host_group is not None:
        return host_group
    leader_ring = Ring(groups["leaders"], thresholds) if "leaders" in groups else None
    return HierarchicalAllreduce(host_group, leader_ring, Ring(world, thresholds))


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
    endpoint: Endpoint, token: bytes, run_id: str, own_hello: PeerHello, expected: int, deadline: Deadline
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
        self._hellos: dict[tuple[str, int], tuple[socket.socket, PeerHello]] = {}
        self._news = threading.Condition()
        self._network_error: NetworkError | None = None
        self._closed = False

    def listen(self, descriptor: int) -> None:
        """Accepts on a listening socket, through a duplicate of its descriptor, so that it stays the caller's."""
        listener = Listener(socket.socket(fileno=os.dup(descriptor)), max_pending=self._max_pending)
        name = f"elephant-collective-accept-{self._own_hello.rank}-{len(self._listeners)}"
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
            self._news.wait_for(lambda: self._network_error or not wanted.isdisjoint(self._hellos), wait_s)
            if self._network_error is not None:
                raise self._network_error
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
            except Exception as error:
                network_error = (
                    error if isinstance(error, NetworkError) else NetworkError(f"Accepting ranks failed: {error!r}.")
                )
                with self._news:
                    self._network_error = self._network_error or network_error
                    self._news.notify_all()
                return

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
