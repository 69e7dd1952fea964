"""Forming a collective: the ranks find each other, learn who shares a host, and connect.

First comes the watch: every rank calls those before it and is called by those after it.
The hellos tell all ranks who shares a host. Then come the groups: in each, every rank
calls those that come 1, 2, 4, ... places after it, over a Unix socket on its own host and
over TCP elsewhere. At last the ranks of a host share memory, where they can.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from elephant.collective.arrivals import Arrivals, Hello, call
from elephant.collective.base import Collective
from elephant.collective.dissemination import Dissemination
from elephant.collective.group import Group, Pair, distances
from elephant.collective.hosts import Placement, host_key, own_key
from elephant.collective.memory import share_memory
from elephant.collective.notice import Notice
from elephant.collective.operation import Operation
from elephant.collective.ring import Ring
from elephant.collective.routes import HierarchicalRoute, RingRoute, Route, SharedRoute
from elephant.collective.shared import Shared
from elephant.collective.sizes import Sizes
from elephant.collective.solo import Solo
from elephant.collective.watch import Watch
from elephant.collective.world import COUNT_BYTES, World
from elephant.errors import AuthenticationError, ConfigurationError, NetworkError, PeerLostError
from elephant.net.addresses import Address, Endpoint, local_listening_socket, local_name, name_of
from elephant.net.deadline import Deadline
from elephant.net.handshake import check_token
from elephant.net.stream import Listener

logger = logging.getLogger(__name__)

_TRANSPORTS = ("auto", "tcp")
_PENDING = 64
# How often a rank that waits for another one to call looks whether a third one has failed.
_LOOK_S = 0.05


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
    sizes: Sizes | None = None,
) -> Collective:
    """Connects this rank with the others; all ranks call it, in any order.

    Args:
        rank: This rank.
        addresses: Host and port of every rank's listener, by rank.
        listener: This rank's own; it stays the caller's, who may close it afterwards.
        token: The job's random token, 16 bytes or more.
        run_id: The run, which a connection must belong to.
        timeout_s: Seconds until all ranks must be there.
        operation_timeout_s: Seconds that one operation of the collective may take.
        transport: ``"auto"``, or ``"tcp"`` to treat every rank as if it had a host of its own.
        sizes: Which arrays go which way; the same on every rank. ``Sizes()`` when None.

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
        return Solo()
    check_token(token)
    deadline = Deadline(timeout_s, f"Connecting {world_size} ranks on rank {rank}")
    with contextlib.ExitStack() as failed:
        forming = _Forming(rank, addresses, token, run_id, deadline)
        failed.push(forming.give_up)
        placement = forming.connect(listener, transport)
        collective = _collective_of(forming, placement, failed, sizes or Sizes(), operation_timeout_s)
        failed.pop_all()
    return collective


class _Forming:
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
        self.watch = Watch(rank)
        self.groups: dict[str, Group] = {}
        self._addresses = addresses
        self._token = token
        self._run_id = run_id
        self._deadline = deadline

    def connect(self, listener: Listener, transport: str) -> Placement:
        """Makes all connections, and returns where the ranks are."""
        with contextlib.ExitStack() as stack:
            local = self._listen_locally() if transport == "auto" else None
            if local is not None:
                stack.callback(local.close)
            own = Hello(self.rank, len(self._addresses), "", host_key() if local is not None else own_key())
            arrivals = Arrivals(own, self._token, self._run_id, max_pending=_PENDING + len(self._addresses))
            stack.callback(arrivals.close)
            for sock in (listener, local):
                if sock is not None:
                    arrivals.listen(sock.fileno())
            placement = Placement(self._meet(own, arrivals))
            for name, members in placement.groups(self.rank).items():
                self.groups[name] = self._join(name, members, placement, own, arrivals)
        return placement

    def give_up(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tells the ranks that are there already, and closes everything."""
        lost = PeerLostError(f"Rank {self.rank} gave up connecting: {type(error).__name__}: {error}")
        self.watch.close(Notice.of(error if isinstance(error, NetworkError) else lost, 0))
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

    def _meet(self, own: Hello, arrivals: Arrivals) -> list[str]:
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

    def _join(self, name: str, members: Sequence[int], placement: Placement, own: Hello, arrivals: Arrivals) -> Group:
        """Makes this rank's connections in a group."""
        position, pairs = members.index(self.rank), {}
        with contextlib.ExitStack() as failed:
            for distance in distances(len(members)):
                after, before = (members[(position + step) % len(members)] for step in (distance, -distance))
                near = after in placement.neighbours(self.rank)
                endpoint = self._local_name(after) if near else self._addresses[after]
                purpose = f"{name}/{distance}"
                target, _ = self._call(endpoint, replace(own, purpose=purpose), after)
                failed.callback(target.close)
                ((_, (source, _)),) = self._await(arrivals, purpose, [before])
                failed.callback(source.close)
                pairs[distance] = Pair(source, before, target, after, self.watch)
            failed.pop_all()
        return Group(members, position, pairs)

    def _call(self, endpoint: Endpoint, hello: Hello, other: int) -> tuple[socket.socket, Hello]:
        what = f"Connecting rank {self.rank} to rank {other} at {name_of(endpoint)}"
        deadline = self._deadline.shortened(self._deadline.seconds, what)
        try:
            return call(endpoint, self._token, self._run_id, hello, other, deadline)
        except AuthenticationError as error:
            raise AuthenticationError(f"{what}: {error}") from error

    def _await(
        self, arrivals: Arrivals, purpose: str, ranks: Iterable[int]
    ) -> Iterator[tuple[int, tuple[socket.socket, Hello]]]:
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
    forming: _Forming, placement: Placement, failed: contextlib.ExitStack, sizes: Sizes, timeout_s: float
) -> Collective:
    """Makes the collective of connected ranks; what must be closed when that fails goes on the stack."""
    groups, world = forming.groups, forming.groups["world"]
    exchange = Dissemination(world, max(sizes.small_bytes // world.size, COUNT_BYTES))
    route = _route(forming, placement, exchange, failed, sizes)
    failed.callback(route.close)
    return World(
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
    forming: _Forming, placement: Placement, exchange: Dissemination, failed: contextlib.ExitStack, sizes: Sizes
) -> Route:
    groups, world = forming.groups, forming.groups["world"]
    if len(placement.hosts) == world.size:
        return RingRoute(Ring(world, sizes), world.members)
    one_host = len(placement.hosts) == 1
    host = world if one_host else groups.get("host")
    shared = None
    if host is not None and (memory := share_memory(host, sizes.block_bytes, forming.operation)) is not None:
        inner = exchange if one_host else Dissemination(host, 0)
        shared = Shared(memory, inner, position=host.position, size=host.size, block_bytes=sizes.block_bytes)
        failed.callback(shared.close)
    has_memory = np.array([host is None or shared is not None], np.uint8)
    if not all(flag[0] for flag in exchange.gather(forming.operation, has_memory)):
        if forming.rank == 0:
            logger.warning("The ranks of a host cannot share memory on this system: all data goes through sockets.")
        if shared is not None:
            shared.close()
        return RingRoute(Ring(world, sizes), world.members)
    if one_host and shared is not None:
        return SharedRoute(shared, forming.rank)
    leaders = Ring(groups["leaders"], sizes) if "leaders" in groups else None
    return HierarchicalRoute(shared, leaders, RingRoute(Ring(world, sizes), world.members))
