"""The collective of two or more ranks: one operation at a time, numbered, checked, with a deadline.

How arrays move is the matter of its data plane.

A group of some ranks is the same over connections of its own. All groups live as long as their generation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from elephant.collective import ring
from elephant.collective.communicator import Communicator
from elephant.collective.data_plane import DataPlane, bytes_of
from elephant.collective.generation import Generation, GroupBuilder, Member
from elephant.collective.objects import opened, pickled, sealed
from elephant.collective.operation import (
    MOST_GROUPS,
    Operation,
    check_allgather,
    check_allreduce,
    check_alltoall,
    check_broadcast,
    check_message,
    check_peer,
    check_ranks,
    check_reduce_scatter,
    check_root,
    dimensions,
    name_of,
    numbered,
)
from elephant.collective.point_to_point import Links
from elephant.collective.shared_memory import SharedMemory
from elephant.collective.topology import Topology
from elephant.collective.watch.control_message import ControlKind, ControlMessage
from elephant.compression import Codec
from elephant.errors import NetworkError, PeerLostError, ProtocolError
from elephant.net.deadline import Deadline

T = TypeVar("T")


class ProcessGroup(Communicator, Member):
    """A collective of two or more ranks; made by `elephant.collective.bootstrap.form_collective`, or `new_group`.

    Args:
        rank: This rank in the group.
        ranks: The members' numbers in the run, by rank.
        number: The group's; zero is that of all ranks.
        generation: What it shares with other groups; owned from here on by the group of all ranks.
        builder: Makes groups of some of its ranks.
        data_plane: Moves the arrays; owned from here on.

    Attributes:
        timeout_s: Seconds that an operation may take.
        waited: ``waited_s`` in memory, shape (1,), where a kernel can add to it.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        *,
        ranks: tuple[int, ...],
        number: int,
        generation: Generation,
        builder: GroupBuilder,
        data_plane: DataPlane,
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._number = number
        self._topology = topology
        self._world_size = len(topology.ring)
        self._generation = generation
        self._detector = generation.detector
        self._builder = builder
        self._data = data_plane
        self.timeout_s = timeout_s
        self._sequence = numbered(number, 0)
        # Where errors say that an operation was.
        self._where = f"on rank {ranks[rank]}" if number == 0 else f"in group {number} on rank {ranks[rank]}"
        self._needed = None if number == 0 else ranks
        self._busy = threading.Lock()
        self._is_closed = self._is_released = False
        self._links = Links(generation, number, ranks, timeout_s)
        self._subgroups: list[ProcessGroup] = []
        self.waited = np.zeros(1)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    @property
    def local_rank(self) -> int:
        return self._topology.neighbors(self._rank).index(self._rank)

    @property
    def local_world_size(self) -> int:
        return len(self._topology.neighbors(self._rank))

    @property
    def crosses_hosts(self) -> bool:
        return len(self._topology.hosts) > 1

    @property
    def waited_s(self) -> float:
        return float(self.waited[0])

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        self.waited[0] = seconds

    @property
    def bytes_sent(self) -> int:
        return self._links.bytes_sent + self._data.bytes_sent

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        check_allreduce(array, op)
        flat = array.reshape(-1)
        encoding = f" by {type(codec).__name__}" if codec is not None else ""

        def reduce(operation: Operation) -> None:
            self._data.allreduce(flat, op, codec, operation)

        self._perform(f"allreduce {op} of {dimensions(array)} {name_of(flat.dtype)}{encoding}", reduce)

    def reduce_scatter(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        check_reduce_scatter(array, op)
        bounds = ring.segment_bounds(len(array), self._world_size)
        rows = slice(*bounds[self._rank])

        def reduce(operation: Operation) -> np.ndarray:
            values = np.array(array, order="C")
            row = values.size // len(array) if len(array) else 0
            parts = [(start * row, stop * row) for start, stop in bounds]
            self._data.reduce_scatter(values.reshape(-1), parts, op, operation)
            return values[rows].copy()

        return self._perform(f"reduce_scatter {op} of {array.shape} {name_of(array.dtype)}", reduce)

    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        check_allgather(array)
        array = np.ascontiguousarray(array)

        def gather(operation: Operation) -> list[np.ndarray]:
            return self._data.allgather(array, operation)

        return self._perform(f"allgather of {name_of(array.dtype)} rows of shape {array.shape[1:]}", gather)

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        check_broadcast(array, root, self._world_size)

        def spread(operation: Operation) -> None:
            self._data.broadcast(bytes_of(array), root, operation)

        self._perform(f"broadcast of {dimensions(array)} {name_of(array.dtype)} from rank {root}", spread)

    def alltoall(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        check_alltoall(parts, self._world_size)
        outgoing = [np.ascontiguousarray(part) for part in parts]
        dtype, trailing = outgoing[0].dtype, outgoing[0].shape[1:]

        def exchange(operation: Operation) -> list[np.ndarray]:
            return self._data.alltoall(outgoing, operation)

        return self._perform(f"alltoall of {name_of(dtype)} rows of shape {trailing}", exchange)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        check_root(root, self._world_size)
        return self._exchanged(value, [root])[0]

    def allgather_object(self, value: Any) -> list[Any]:
        return self._exchanged(value, range(self._world_size))

    def barrier(self) -> None:
        self._perform("barrier", self._data.agree)

    def send(self, arrays: Sequence[np.ndarray], dst: int) -> None:
        check_message(arrays)
        check_peer("dst", dst, self._rank, self._world_size)
        self._require_open()
        self._links.send(arrays, dst)

    def recv(self, src: int) -> list[np.ndarray]:
        check_peer("src", src, self._rank, self._world_size)
        self._require_open()
        began = time.monotonic()
        arrays = self._links.recv(src)
        self.waited_s += time.monotonic() - began
        return arrays

    def new_group(self, ranks: Sequence[int]) -> Communicator | None:
        members = check_ranks(ranks, self._world_size)

        def form(operation: Operation) -> Communicator | None:
            # Groups of some ranks may have made others: these have counted further.
            known = self._data.gather_alike(np.array([self._generation.groups], np.int64), operation)
            number = max(int(count[0]) for count in known)
            if number >= MOST_GROUPS:
                raise ProtocolError(f"Expected fewer than {MOST_GROUPS} groups in a run. Received: one more.")
            self._generation.groups = number + 1
            if self._rank not in members:
                return None
            return self._builder.build(tuple(self._ranks[member] for member in members), number, operation)

        group = self._perform(f"new_group of ranks {', '.join(map(str, members))}", form)
        if group is not None:
            group.dumps = self.dumps
        if isinstance(group, ProcessGroup):
            self._subgroups.append(group)
        return group

    def shared_memory(self, block_bytes: int, turns: int) -> SharedMemory | None:
        """Makes memory that all ranks share, blocks by turn and rank, for what they exchange outside of operations.

        All ranks call it. The memory is the caller's, and may outlive the collective.

        Returns:
            None, on all ranks, where one of them cannot have it.
        """
        if self.crosses_hosts:
            return None
        name = f"memory of {turns} x {block_bytes} bytes for each rank"
        return self._perform(name, lambda operation: self._data.share_memory(block_bytes, turns, operation))

    @property
    def watch_descriptor(self) -> int:
        """Descriptor that becomes readable when ``look`` has something to see."""
        return self._detector.fileno()

    def look(self, name: str, waited_s: float) -> None:
        """Looks after the other ranks, for one that waits for them outside of operations, but between the same two.

        Args:
            name: What it waits in, for errors.
            waited_s: For how long it has.

        Raises:
            NetworkError: What an operation would raise. The collective is broken on all ranks then.
        """
        if not self._busy.acquire(blocking=False):
            # The thread that is in an operation looks.
            return
        try:
            self._require_open()
            deadline = Deadline(self.timeout_s, f"The {name} {self._where}")
            operation = Operation(self._sequence + 1, name, deadline, waited_s, ranks=self._needed)
            try:
                self._detector.check(operation)
                if waited_s >= self.timeout_s:
                    raise self._detector.absence(operation)
            except NetworkError as error:
                self._generation.fail(error, self._sequence)
                raise
        finally:
            self._end_operation()

    def close(self) -> None:
        for group in self._subgroups:
            group.close()
        self._links.flush()
        with self._busy:
            if not self._is_closed and self._generation.error is None:
                if self._number == 0:
                    self._generation.close(self._sequence)
                else:
                    self._detector.tell(ControlMessage(ControlKind.CLOSED, self._sequence))
            self._is_closed = True
            self._links.close()
            self._release()

    def abort(self) -> None:
        rank = self._generation.rank
        self._generation.fail(
            PeerLostError(f"Rank {rank} aborted its collective."),
            self._sequence,
            own_error=PeerLostError(f"The collective was aborted on this rank, rank {rank}."),
        )

    def let_go(self) -> None:
        # Who is in an operation is woken, and leaves by itself.
        if self._busy.acquire(blocking=False):
            self._end_operation()

    def _require_open(self) -> None:
        self._generation.require_whole()
        if self._is_closed:
            raise PeerLostError(f"Expected a group that is open. Received: group {self._number}, closed on this rank.")

    def _perform(self, name: str, body: Callable[[Operation], T]) -> T:
        """Runs an operation, and breaks all groups on all ranks where it fails on this one."""
        deadline, began = Deadline(self.timeout_s, f"The {name} {self._where}"), time.monotonic()
        if not self._busy.acquire(timeout=deadline.remaining()):
            raise deadline.exceeded("Another thread uses the collective.")
        try:
            self._require_open()
            operation = Operation(self._sequence + 1, name, deadline, ranks=self._needed)
            try:
                self._detector.begin(operation)
                self._data.renew(operation)
                with np.errstate(over="ignore", invalid="ignore"):
                    result = body(operation)
            except NetworkError as error:
                self._generation.fail(error, self._sequence)
                raise
            except BaseException as error:
                left = f"Rank {self._generation.rank} left the {name}: {type(error).__name__}: {error}."
                self._generation.fail(PeerLostError(left), self._sequence)
                raise
            self._sequence += 1
            self.waited_s += time.monotonic() - began
            return result
        finally:
            self._end_operation()

    def _end_operation(self) -> None:
        """Lets others use the group, or lets go of it where it has been broken or closed."""
        try:
            if self._generation.error is not None:
                self._release()
        finally:
            self._busy.release()

    def _release(self) -> None:
        """Lets go of everything: first the threads, then the connections that they use."""
        if not self._is_released:
            self._is_released = True
            self._data.close()
            self._generation.leave(self)

    def _exchanged(self, value: Any, senders: Sequence[int]) -> list[Any]:
        """Returns the objects of some ranks on all of them; others' count for nothing."""
        sequence, connector, own = self._sequence + 1, self._generation.connector, np.empty(0, np.uint8)

        def seal(sender: int, data: bytes) -> bytes:
            return connector.seal(f"object {sequence} of rank {sender}", data)

        if self._rank in senders:
            own = sealed(pickled(value, self.dumps), seal, self._ranks[self._rank])
        arrays = self.allgather(own)
        return [opened(arrays[sender], seal, self._ranks[sender]) for sender in senders]
