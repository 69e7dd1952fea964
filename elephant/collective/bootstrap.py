"""Bootstrap: ranks accept and connect to each other until the process group stands, and make groups of some of them.

First comes the watch: every rank calls those before it that it watches, and is called by those after it.
It tells all ranks who shares a host. Then come the connections of a group: every rank
calls those that come 1, 2, 4, ... places after it. At last the ranks of a host share
memory, where they can. A group of some ranks is made in the same way, with connections of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import numpy as np

from elephant.collective.communicator import Communicator, LocalCommunicator
from elephant.collective.connector import PeerConnector
from elephant.collective.data_plane import COUNT_BYTES, DataPlane
from elephant.collective.generation import Generation, GroupBuilder
from elephant.collective.links import BruckAllgather, LinkPair, RankGroup, distances
from elephant.collective.operation import AlgorithmThresholds, AllreduceAlgorithm, Operation
from elephant.collective.process_group import ProcessGroup
from elephant.collective.ring import Ring
from elephant.collective.shared_memory import HostGroup, share_memory
from elephant.collective.topology import HierarchicalAllreduce, Topology
from elephant.collective.watch.control_message import ControlMessage
from elephant.collective.watch.failure_detector import FailureDetector
from elephant.errors import ConfigurationError, NetworkError, PeerLostError
from elephant.net.addresses import Address
from elephant.net.deadline import Deadline
from elephant.net.descriptors import allow_descriptors
from elephant.net.handshake import check_token
from elephant.net.stream import Listener

logger = logging.getLogger(__name__)
_TRANSPORTS = ("auto", "tcp")
_GROUP_CONNECTIONS = 256


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
        listener: Stays the caller's, and may be closed; its port stays open as long as the collective stands.
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
    # An alltoall has two connections with every rank. The watch and groups have some for each doubling of their size.
    allow_descriptors(2 * world_size + _GROUP_CONNECTIONS)
    deadline = Deadline(timeout_s, f"Connecting {world_size} ranks on rank {rank}")
    operation, detector = Operation(0, "connecting the ranks", deadline), FailureDetector(rank)

    def give_up(kind: object, error: BaseException | None, trace: object) -> None:
        """Tells the ranks that are there already."""
        lost = PeerLostError(f"Rank {rank} gave up connecting: {type(error).__name__}: {error}")
        detector.close(ControlMessage.of(error if isinstance(error, NetworkError) else lost, 0))

    with contextlib.ExitStack() as failed:
        failed.push(give_up)
        connector = PeerConnector(
            rank, addresses, token, run_id, listener=listener, detector=detector, is_local=transport == "auto"
        )
        failed.callback(connector.close)
        connector.meet(operation)
        generation = Generation(detector, connector)
        builder = _Builder(generation, thresholds or AlgorithmThresholds(), operation_timeout_s)
        communicator = builder.build(tuple(range(world_size)), 0, operation)
        failed.pop_all()
    return communicator


class _Builder(GroupBuilder):
    """Maker of groups of some ranks.

    Args:
        timeout_s: Seconds that an operation of theirs may take.
    """

    def __init__(self, generation: Generation, thresholds: AlgorithmThresholds, timeout_s: float) -> None:
        self._generation = generation
        self._thresholds = thresholds
        self._timeout_s = timeout_s

    def build(self, ranks: tuple[int, ...], number: int, operation: Operation) -> Communicator:
        place = ranks.index(self._generation.rank)
        if len(ranks) == 1:
            return LocalCommunicator(ranks[0])
        self._generation.connector.watch(ranks, operation)
        topology = Topology([self._generation.connector.host_of(rank) for rank in ranks])
        with contextlib.ExitStack() as failed:
            groups: dict[str, RankGroup] = {}
            for name, members in topology.groups(place).items():
                group = groups[name] = RankGroup(members, members.index(place), {})
                failed.callback(group.close)
                for distance in distances(group.size):
                    self.connect(group, distance, f"{number}/{name}", ranks, operation)
            world = groups["world"]
            allgather = BruckAllgather(world, max(self._thresholds.small_bytes // world.size, COUNT_BYTES))
            algorithm = _route(groups, topology, allgather, failed, self._thresholds, operation)
            failed.callback(algorithm.close)
            data_plane = DataPlane(
                place,
                ranks=ranks,
                number=number,
                builder=self,
                groups=groups,
                allgather=allgather,
                algorithm=algorithm,
                thresholds=self._thresholds,
            )
            process_group = ProcessGroup(
                place,
                topology,
                ranks=ranks,
                number=number,
                generation=self._generation,
                builder=self,
                data_plane=data_plane,
                timeout_s=self._timeout_s,
            )
            self._generation.add(process_group)
            failed.pop_all()
        return process_group

    def connect(self, group: RankGroup, distance: int, name: str, ranks: Sequence[int], operation: Operation) -> None:
        connector, purpose = self._generation.connector, f"{name}/{distance}"
        before, after = (ranks[rank] for rank in group.neighbors(distance))
        target = connector.call(after, purpose, operation)
        try:
            source = connector.take(before, purpose, operation)
        except BaseException:
            target.close()
            raise
        group.pairs[distance] = LinkPair(source, before, target, after, self._generation.detector)

    def renew(self, group: RankGroup, distance: int, name: str, ranks: Sequence[int], operation: Operation) -> None:
        pair, connector, purpose = group.pairs[distance], self._generation.connector, f"{name}/{distance}/again"
        if pair.target_is_worn:
            pair.renew(target=connector.call(pair.target_rank, purpose, operation))
        if pair.source_is_worn:
            pair.renew(source=connector.take(pair.source_rank, purpose, operation))


def _route(
    groups: dict[str, RankGroup],
    topology: Topology,
    allgather: BruckAllgather,
    failed: contextlib.ExitStack,
    thresholds: AlgorithmThresholds,
    operation: Operation,
) -> AllreduceAlgorithm:
    world = groups["world"]
    if len(topology.hosts) == world.size:
        return _ring_of(world, thresholds, failed, operation)
    one_host = len(topology.hosts) == 1
    host = world if one_host else groups.get("host")
    host_group = None
    if host is not None and (memory := share_memory(host, thresholds.block_bytes, operation)) is not None:
        inner = allgather if one_host else BruckAllgather(host, 0)
        host_group = HostGroup(
            memory, inner, position=host.position, size=host.size, block_bytes=thresholds.block_bytes
        )
        failed.callback(host_group.close)
    has_memory = np.array([host is None or host_group is not None], np.uint8)
    if not all(flag[0] for flag in allgather.gather(operation, has_memory)):
        if world.ranks[world.position] == 0:
            logger.warning("The ranks of a host cannot share memory on this system: all data goes through sockets.")
        if host_group is not None:
            host_group.close()
        return _ring_of(world, thresholds, failed, operation)
    if one_host and host_group is not None:
        return host_group
    leader_ring = _ring_of(groups["leaders"], thresholds, failed, operation) if "leaders" in groups else None
    return HierarchicalAllreduce(host_group, leader_ring, Ring(world, thresholds))


def _ring_of(
    group: RankGroup, thresholds: AlgorithmThresholds, failed: contextlib.ExitStack, operation: Operation
) -> Ring:
    ring = Ring(group, thresholds)
    failed.callback(ring.close)
    ring.choose_rounds(operation)
    return ring
