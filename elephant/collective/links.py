"""Links between ranks 1, 2, 4, ... places apart: Bruck's allgather, and pipelines of chunks over them.

In a group, a connection leads from every member to the one that comes 1, 2, 4, ... places
after it. Those at distance 1 are the ring; all together serve dissemination.

The allgather of Bruck et al., "Efficient algorithms for all-to-all communications in
multiport message-passing systems" (1997), section 3.2: in the round of distance d, every
member sends what it has of up to d blocks to the member d places after it. After
ceil(log2 N) rounds everybody has everything. Without blocks it is the barrier of Hensgen,
Finkel & Manber, "Two algorithms for barrier synchronization" (1988).

Each message begins with the request of its sender, who has compared it with those of
all the blocks that it passes on. So a member that comes to the end knows that all have
asked for the same, and one that asks for something else is found out in this operation.

One loop serves both directions, so that a rank which cannot send for the moment goes on
receiving: a ring of ranks that all send first cannot stand still. For long flows a
second thread sends: it copies out, and encodes, while this one copies in and adds.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from elephant.collective.operation import REQUEST_BYTES, Operation
from elephant.collective.watch.failure_detector import FailureDetector
from elephant.errors import DeadlineExceededError, PeerLostError
from elephant.net import socket_io, tls
from elephant.net.deadline import Deadline
from elephant.net.tls import AnySocket

_JOIN_S = 5.0


def distances(size: int) -> list[int]:
    """Returns the distances at which the members of a group of this size are connected.

    >>> distances(2), distances(5)
    ([1], [1, 2, 4])
    """
    return [1 << power for power in range((size - 1).bit_length())]


class LinkPair:
    """The two connections of one rank at one distance, one way each: data comes from one rank and goes to another.

    Args:
        source: Connected to the rank that data comes from, authenticated; owned from here on.
        source_rank: That rank's number in the run.

    Attributes:
        bytes_sent: Bytes that were handed to it so far.
    """

    def __init__(
        self,
        source: AnySocket,
        source_rank: int,
        target: AnySocket,
        target_rank: int,
        detector: FailureDetector,
    ) -> None:
        self.source_rank, self.target_rank = source_rank, target_rank
        self.target = target
        self.source = source
        self.bytes_sent = 0
        self.detector = detector
        self._watch_descriptor = detector.fileno()
        self._pollers: dict[tuple[bool, bool, int | None], select.poll] = {}
        for sock in (source, target):
            socket_io.prepare(sock)

    def send(self, view: memoryview, operation: Operation) -> int:
        """Sends as much as the connection takes at once, and returns how many bytes that were."""
        try:
            return self.target.send(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.detector.reason(self.target_rank, operation)

    def receive(self, view: memoryview, operation: Operation) -> int:
        """Reads into the view what has arrived, and returns how many bytes that were."""
        try:
            count = self.source.recv_into(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            count = 0
        if count == 0:
            self.detector.reason(self.source_rank, operation)
        return count

    def wait(self, operation: Operation, *, reading: bool, writing: bool, descriptor: int | None = None) -> None:
        """Returns when data has come, or may go, or a notice has come that ends nothing.

        Raises:
            NetworkError: Another rank failed, or is gone.
            DeadlineExceededError: The operation's time is over; the text names the ranks that did not arrive.
        """
        poller = self._pollers.get((reading, writing, descriptor)) or self._new_poller(reading, writing, descriptor)
        try:
            timeout_ms = operation.deadline.remaining_ms()
        except DeadlineExceededError:
            raise self.detector.absence(operation) from None
        ready = poller.poll(0 if reading and socket_io.holds_bytes(self.source) else timeout_ms)
        for ready_one, _ in ready:
            if ready_one == self._watch_descriptor:
                self.detector.check(operation)

    @property
    def target_is_worn(self) -> bool:
        """True if the connection to the next rank is to be made again; that one's ``source_is_worn`` says the same."""
        return socket_io.carried(self.target)[0] >= tls.RENEW_BYTES

    @property
    def source_is_worn(self) -> bool:
        """True if the connection from the rank before is to be made again."""
        return socket_io.carried(self.source)[1] >= tls.RENEW_BYTES

    def renew(self, *, target: AnySocket | None = None, source: AnySocket | None = None) -> None:
        """Takes connections in the place of those of before, on which nothing is on its way."""
        for sock, old in ((target, self.target), (source, self.source)):
            if sock is not None:
                socket_io.prepare(sock)
                old.close()
        self.target, self.source = target or self.target, source or self.source
        self._pollers.clear()

    def shut_down(self) -> None:
        """Ends both connections, so that a thread that is in one of them wakes up."""
        socket_io.shut_down(self.source)
        socket_io.shut_down(self.target)

    def close(self) -> None:
        """Closes both connections; the thread of a sender must have ended."""
        self.shut_down()
        self.source.close()
        self.target.close()

    def _new_poller(self, reading: bool, writing: bool, descriptor: int | None) -> select.poll:
        poller = select.poll()
        poller.register(self._watch_descriptor, select.POLLIN)
        if reading:
            poller.register(self.source, select.POLLIN)
        if writing:
            poller.register(self.target, select.POLLOUT)
        if descriptor is not None:
            poller.register(descriptor, select.POLLIN)
        self._pollers[reading, writing, descriptor] = poller
        return poller


@dataclass(frozen=True)
class RankGroup:
    """Some of the ranks of a communicator, in the order in which they are connected.

    Args:
        ranks: The communicator's, in the order of the group.
        position: This rank's place among them.
        pairs: This rank's connections, by distance; none in a group of one. Those at further distances than
            `distances` has are added when they are needed.
    """

    ranks: Sequence[int]
    position: int
    pairs: dict[int, LinkPair]

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def neighbors(self, distance: int) -> tuple[int, int]:
        """Returns the ranks so many places before this one, and after it."""
        before, after = ((self.position + step) % self.size for step in (-distance, distance))
        return self.ranks[before], self.ranks[after]

    def close(self) -> None:
        """Closes this rank's connections."""
        for pair in self.pairs.values():
            pair.close()


def rounds(size: int) -> list[tuple[int, int]]:
    """Returns, for each round, the distance of the target and how many blocks go there.

    >>> rounds(5)
    [(1, 1), (2, 2), (4, 1)]
    """
    return [(distance, min(distance, size - distance)) for distance in distances(size)]


class BruckAllgather:
    """Exchanges blocks and requests in a group.

    Args:
        longest_block: Length of the longest block, in bytes.
    """

    def __init__(self, group: RankGroup, longest_block: int) -> None:
        self._group = group
        self._rounds = [(group.pairs[distance], distance, count) for distance, count in rounds(group.size)]
        # Block i is that of the member i places before this one; the one of the lowest rank is to come first.
        places = {member: (group.position - place) % group.size for place, member in enumerate(group.ranks)}
        self._order = [places[member] for member in sorted(group.ranks)]
        self._gathered = np.empty(REQUEST_BYTES + group.size * longest_block, np.uint8)
        self._incoming = np.empty(REQUEST_BYTES + group.size * longest_block, np.uint8)

    def agree(self, operation: Operation) -> None:
        """Returns when all members have asked for this operation; raises as ``gather`` does."""
        self._exchange(operation, 0)

    def gather(self, operation: Operation, block: np.ndarray) -> list[np.ndarray]:
        """Returns every member's block, by rank.

        Args:
            block: Uint8, of the same length on all ranks that ask for this operation.

        Returns:
            Uint8 views of memory that the next call overwrites.

        Raises:
            ProtocolError: A member asked for something else.
            NetworkError: A rank failed, is gone, or did not arrive in time.
        """
        size = len(block)
        self._gathered[REQUEST_BYTES : REQUEST_BYTES + size] = block
        self._exchange(operation, size)
        starts = [REQUEST_BYTES + place * size for place in self._order]
        return [self._gathered[start : start + size] for start in starts]

    def _exchange(self, operation: Operation, size: int) -> None:
        gathered, incoming = self._gathered.data, self._incoming.data
        gathered[:REQUEST_BYTES] = operation.request
        for pair, distance, count in self._rounds:
            length = REQUEST_BYTES + count * size
            self._swap(pair, gathered[:length], incoming[:length], operation)
            start = REQUEST_BYTES + distance * size
            gathered[start : start + count * size] = incoming[REQUEST_BYTES:length]

    def _swap(self, pair: LinkPair, outgoing: memoryview, incoming: memoryview, operation: Operation) -> None:
        """Sends and receives one message; compares the requests as soon as that of the other side is there."""
        sent = received = 0
        pair.bytes_sent += len(outgoing)
        while True:
            if sent < len(outgoing):
                sent += pair.send(outgoing[sent:] if sent else outgoing, operation)
            reading, writing = received < len(incoming), sent < len(outgoing)
            if not reading and not writing:
                return
            pair.wait(operation, reading=reading, writing=writing)
            if reading:
                before = received
                received += pair.receive(incoming[received:] if received else incoming, operation)
                if before < REQUEST_BYTES <= received:
                    operation.check(incoming[:REQUEST_BYTES], pair.detector.rank, pair.source_rank)


def _nothing(index: int) -> None:
    pass


class ChunkSchedule:
    """The pieces that one operation sends and receives, and how far it is.

    Args:
        lag: Outgoing piece ``i`` is, from ``free`` on, incoming piece ``i - lag``.
        on_leaving: Called with the number of each outgoing piece before its first byte goes.
    """

    def __init__(
        self,
        outgoing: Sequence[memoryview],
        incoming: Sequence[memoryview],
        *,
        free: int,
        lag: int,
        on_leaving: Callable[[int], None] = _nothing,
        on_arrived: Callable[[int], None] = _nothing,
    ) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._free, self._lag = free, lag
        self._on_leaving, self._on_arrived = on_leaving, on_arrived
        self._sent = self._received = 0
        self._out: memoryview | None = None
        self.into = incoming[0] if incoming else None

    @property
    def outgoing_bytes(self) -> int:
        """Bytes of all pieces that are to be sent."""
        return sum(map(len, self._outgoing))

    @property
    def all_sent(self) -> bool:
        """True if nothing is left to be sent."""
        return self._sent == len(self._outgoing)

    @property
    def may_send(self) -> bool:
        """True if there is a next outgoing piece, and it has been taken in, or needs not be."""
        return not self.all_sent and self._sent < max(self._free, self._received + self._lag)

    @property
    def over(self) -> bool:
        """True if everything has been sent and received."""
        return self.all_sent and self.into is None

    def next_out(self) -> memoryview:
        """Returns the rest of the piece to be sent, which ``may_send`` must allow."""
        if self._out is None:
            self._on_leaving(self._sent)
            self._out = self._outgoing[self._sent]
        return self._out

    def sent(self, count: int) -> None:
        """Notes that ``count`` bytes of ``next_out`` went out."""
        rest = self.next_out()[count:]
        if rest:
            self._out = rest
        else:
            self._out = None
            self._sent += 1

    def received(self, count: int) -> bool:
        """Notes that ``count`` bytes of the incoming piece came in; returns whether it is complete."""
        if self.into is None or count < len(self.into):
            self.into = self.into and self.into[count:]
            return False
        self._on_arrived(self._received)
        self._received += 1
        self.into = self._incoming[self._received] if self._received < len(self._incoming) else None
        return True


class SenderThread:
    """Sends one flow after another; starts its thread with the first.

    Args:
        pair: Has the connection to the next rank; not owned.
    """

    def __init__(self, pair: LinkPair, name: str) -> None:
        self._pair = pair
        self._name = name
        self._thread: threading.Thread | None = None
        self._schedules: queue.SimpleQueue[tuple[ChunkSchedule, Deadline] | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._done_in, self._done_out = socket.socketpair()

    def begin(self, schedule: ChunkSchedule, deadline: Deadline) -> None:
        """Hands over the outgoing side of a flow; ``finish`` must follow, or ``stop``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all_flows, name=self._name, daemon=True)
            self._thread.start()
        self._schedules.put((schedule, deadline))

    def piece_arrived(self) -> None:
        """Tells that one more piece has been taken in, which may have to be forwarded."""
        self._arrivals.put(True)

    @property
    def done(self) -> bool:
        """True if the flow has been sent, or sending it has failed."""
        return not self._results.empty()

    def fileno(self) -> int:
        """Returns a descriptor that is readable from when the flow is done until ``finish``."""
        return self._done_in.fileno()

    def finish(self) -> None:
        """Ends a flow that is done.

        Raises:
            OSError: Sending failed, or the deadline passed.
        """
        self._done_in.recv(1)
        failure = self._results.get()
        while not self._arrivals.empty():
            self._arrivals.get()
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """Joins the thread; the socket must have been shut down, which ends what the thread is in."""
        if self._thread is not None:
            self._arrivals.put(False)
            self._schedules.put(None)
            self._thread.join(_JOIN_S)
        self._done_in.close()
        self._done_out.close()

    def _send_all_flows(self) -> None:
        while (order := self._schedules.get()) is not None:
            schedule, deadline = order
            del order
            try:
                self._send(schedule, deadline)
                self._results.put(None)
            except Exception as error:
                self._results.put(error)
            # The buffers are the caller's: an idle thread may not keep them alive.
            del schedule
            self._done_out.send(b"!")

    def _send(self, schedule: ChunkSchedule, deadline: Deadline) -> None:
        sock = self._pair.target
        while not schedule.all_sent:
            if not schedule.may_send:
                self._wait_for_piece(deadline)
                continue
            try:
                schedule.sent(sock.send(schedule.next_out()))
            except (BlockingIOError, InterruptedError):
                socket_io.wait(sock, select.POLLOUT, deadline)

    def _wait_for_piece(self, deadline: Deadline) -> None:
        try:
            going_on = self._arrivals.get(timeout=deadline.remaining())
        except queue.Empty:
            raise deadline.exceeded() from None
        if not going_on:
            raise PeerLostError("The sender was stopped.")


def run_alone(pair: LinkPair, schedule: ChunkSchedule, operation: Operation) -> None:
    """Sends and receives all pieces of a flow in this thread, whichever is possible at the moment."""
    while not schedule.over:
        sent = pair.send(schedule.next_out(), operation) if schedule.may_send else None
        if sent:
            schedule.sent(sent)
        received = pair.receive(schedule.into, operation) if schedule.into is not None else 0
        if received:
            schedule.received(received)
        if not sent and not received:
            pair.wait(operation, reading=schedule.into is not None, writing=sent is not None)


def swap(pair: LinkPair, outgoing: memoryview, incoming: memoryview, operation: Operation) -> None:
    """Sends bytes the one way, and fills others with what comes from the other; any number of them, or none."""
    flow = ChunkSchedule([outgoing][: len(outgoing)], [incoming][: len(incoming)], free=1, lag=0)
    pair.bytes_sent += len(outgoing)
    run_alone(pair, flow, operation)


class Pipeline:
    """Runs flows over one pair of connections.

    Args:
        pair: The connections; not owned.
    """

    def __init__(self, pair: LinkPair, name: str) -> None:
        self._pair = pair
        self._sender = SenderThread(pair, name)

    def run(self, schedule: ChunkSchedule, operation: Operation, *, threaded: bool) -> None:
        """Sends and receives all pieces of a flow.

        Args:
            threaded: Whether the thread sends, which costs a tenth of a millisecond to begin with.

        Raises:
            NetworkError: A rank failed, is gone, or did not arrive in time.
        """
        self._pair.bytes_sent += schedule.outgoing_bytes
        if threaded:
            self._run_with_sender(schedule, operation)
        else:
            run_alone(self._pair, schedule, operation)

    def close(self) -> None:
        """Joins the thread; ends the connections first, which ends what it is in."""
        self._pair.shut_down()
        self._sender.stop()

    def _run_with_sender(self, schedule: ChunkSchedule, operation: Operation) -> None:
        pair, sender = self._pair, self._sender
        sender.begin(schedule, operation.deadline)
        sending = True
        while sending or schedule.into is not None:
            count = pair.receive(schedule.into, operation) if schedule.into is not None else 0
            if count:
                if schedule.received(count):
                    sender.piece_arrived()
            elif sending and sender.done:
                self._finish_sending(operation)
                sending = False
            else:
                reading, descriptor = schedule.into is not None, sender.fileno() if sending else None
                pair.wait(operation, reading=reading, writing=False, descriptor=descriptor)

    def _finish_sending(self, operation: Operation) -> None:
        try:
            self._sender.finish()
        except DeadlineExceededError:
            raise self._pair.detector.absence(operation) from None
        except OSError:
            self._pair.detector.reason(self._pair.target_rank, operation)
