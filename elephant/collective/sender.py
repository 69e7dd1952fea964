"""A thread that sends the pieces of long flows, so that copying out goes on beside copying in and adding."""

from __future__ import annotations

import queue
import select
import socket
import threading

from elephant.collective.flow import Flow
from elephant.errors import PeerLostError
from elephant.net import socket_io
from elephant.net.deadline import Deadline

_JOIN_S = 5.0


class Sender:
    """Sends one flow after another; starts its thread with the first.

    Args:
        sock: The connection to the next rank, non-blocking; not owned.
        name: Of the thread.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._name = name
        self._thread: threading.Thread | None = None
        self._flows: queue.SimpleQueue[tuple[Flow, Deadline] | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._done_in, self._done_out = socket.socketpair()

    def begin(self, flow: Flow, deadline: Deadline) -> None:
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

    def _send(self, flow: Flow, deadline: Deadline) -> None:
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
