"""Pipeline: chunks on their way in and out at the same time, with a sender thread.

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

from elephant.collective.links import LinkPair
from elephant.collective.operation import Operation
from elephant.errors import DeadlineExceededError, PeerLostError
from elephant.net import socket_io
from elephant.net.deadline import Deadline

_JOIN_S = 5.0


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
    def all_sent(self) -> bool:
        """Whether nothing is left to be sent."""
        return self._sent == len(self._outgoing)

    @property
    def may_send(self) -> bool:
        """Whether there is a next outgoing piece, and it has been taken in, or needs not be."""
        return not self.all_sent and self._sent < max(self._free, self._received + self._lag)

    @property
    def over(self) -> bool:
        """Whether everything has been sent and received."""
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
        sock: The connection to the next rank, non-blocking; not owned.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._name = name
        self._thread: threading.Thread | None = None
        self._flows: queue.SimpleQueue[tuple[ChunkSchedule, Deadline] | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._done_in, self._done_out = socket.socketpair()

    def begin(self, flow: ChunkSchedule, deadline: Deadline) -> None:
        """Hands over the outgoing side of a flow; ``finish`` must follow, or ``stop``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all_flows, name=self._name, daemon=True)
            self._thread.start()
        self._flows.put((flow, deadline))

    def piece_arrived(self) -> None:
        """Tells that one more piece has been taken in, which may have to be forwarded."""
        self._arrivals.put(True)

    @property
    def done(self) -> bool:
        """Whether the flow has been sent, or sending it has failed."""
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
            self._flows.put(None)
            self._thread.join(_JOIN_S)
        self._done_in.close()
        self._done_out.close()

    def _send_all_flows(self) -> None:
        while (order := self._flows.get()) is not None:
            flow, deadline = order
            del order
            try:
                self._send(flow, deadline)
                self._results.put(None)
            except Exception as error:
                self._results.put(error)
            # The buffers are the caller's: an idle thread may not keep them alive.
            del flow
            self._done_out.send(b"!")

    def _send(self, flow: ChunkSchedule, deadline: Deadline) -> None:
        while not flow.all_sent:
            if not flow.may_send:
                self._wait_for_piece(deadline)
                continue
            try:
                flow.sent(self._sock.send(flow.next_out()))
            except (BlockingIOError, InterruptedError):
                socket_io.wait(self._sock, select.POLLOUT, deadline)

    def _wait_for_piece(self, deadline: Deadline) -> None:
        try:
            going_on = self._arrivals.get(timeout=deadline.remaining())
        except queue.Empty:
            raise deadline.exceeded() from None
        if not going_on:
            raise PeerLostError("The sender was stopped.")


class Pipeline:
    """Runs flows over one pair of connections.

    Args:
        pair: The connections; not owned.
    """

    def __init__(self, pair: LinkPair, name: str) -> None:
        self._pair = pair
        self._sender = SenderThread(pair.target, name)

    def run(self, flow: ChunkSchedule, operation: Operation, *, threaded: bool) -> None:
        """Sends and receives all pieces of a flow.

        Args:
            threaded: Whether the thread sends, which costs a tenth of a millisecond to begin with.

        Raises:
            NetworkError: A rank failed, is gone, or did not arrive in time.
        """
        if threaded:
            self._run_with_sender(flow, operation)
        else:
            self._run_alone(flow, operation)

    def close(self) -> None:
        """Joins the thread; ends the connections first, which ends what it is in."""
        self._pair.shut_down()
        self._sender.stop()

    def _run_alone(self, flow: ChunkSchedule, operation: Operation) -> None:
        pair = self._pair
        while not flow.over:
            sent = pair.send(flow.next_out(), operation) if flow.may_send else None
            if sent:
                flow.sent(sent)
            received = pair.receive(flow.into, operation) if flow.into is not None else 0
            if received:
                flow.received(received)
            if not sent and not received:
                pair.wait(operation, reading=flow.into is not None, writing=sent is not None)

    def _run_with_sender(self, flow: ChunkSchedule, operation: Operation) -> None:
        pair, sender = self._pair, self._sender
        sender.begin(flow, operation.deadline)
        sending = True
        while sending or flow.into is not None:
            count = pair.receive(flow.into, operation) if flow.into is not None else 0
            if count:
                if flow.received(count):
                    sender.piece_arrived()
            elif sending and sender.done:
                self._finish_sending(operation)
                sending = False
            else:
                reading, descriptor = flow.into is not None, sender.fileno() if sending else None
                pair.wait(operation, reading=reading, writing=False, descriptor=descriptor)

    def _finish_sending(self, operation: Operation) -> None:
        try:
            self._sender.finish()
        except DeadlineExceededError:
            raise self._pair.watch.absence(operation) from None
        except OSError:
            self._pair.watch.reason(self._pair.target_rank, operation)
