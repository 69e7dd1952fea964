"""The two connections of one rank: data comes from the left neighbour and goes to the right one.

One loop serves both directions, so that a rank which cannot send for the moment goes on
receiving: a ring of ranks that all send first cannot stand still. It also listens for
notices, which come from the right (see `elephant.collective.wire`). For long flows a
second thread sends: on idle cores that gains nothing, on busy ones a factor of two to five.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import NoReturn

from elephant.collective.flow import Flow
from elephant.collective.sender import Sender
from elephant.collective.wire import NOTICE_BYTES, Notice, decode_notice, text_bytes_of
from elephant.errors import DeadlineExceededError, PeerLostError
from elephant.net import transfer
from elephant.net.deadline import Deadline

# How long a rank whose left neighbour is gone waits to hear the reason from its right one. The
# notice of a failure takes milliseconds; only when two ranks die at once does it not come.
_GRACE_S = 1.0

# Flows that send less go out of the one loop: waking the sender costs a tenth of a millisecond.
_LONG_BYTES = 1 << 20


class Links:
    """Runs flows over the sockets of one rank.

    Args:
        left: Connected to the left neighbour, authenticated; owned from here on.
        right: Connected to the right neighbour, likewise.
        rank: This rank.
        world_size: How many ranks there are, two or more.
    """

    def __init__(self, left: socket.socket, right: socket.socket, *, rank: int, world_size: int) -> None:
        self._left, self._right = left, right
        self.left_rank = (rank - 1) % world_size
        self.right_rank = (rank + 1) % world_size
        self._rank = rank
        self._right_finished: int | None = None
        self._interrupted_here = False
        self._sender = Sender(right, f"elephant-ring-send-{rank}")
        for sock in (left, right):
            transfer.prepare(sock)

    def run(self, flow: Flow, sequence: int, deadline: Deadline) -> None:
        """Sends and receives all pieces of a flow.

        Args:
            flow: The pieces.
            sequence: The number of the operation.
            deadline: When it must be over.

        Raises:
            PeerLostError: A rank is gone.
            ProtocolError: A rank, or ``flow.on_piece``, found that the ranks disagree.
            DeadlineExceededError: A neighbour did not answer in time.
        """
        self._check_usable(sequence)
        if flow.outgoing_bytes >= _LONG_BYTES:
            self._run_long(flow, sequence, deadline)
            return
        writable = True
        while True:
            writable = writable and self._send(flow, sequence)
            arrived = self._receive(flow, sequence)
            if flow.over:
                return
            if arrived or (writable and flow.may_send):
                continue
            from_right = self._wait(flow, writable, deadline)
            writable = writable or bool(from_right)
            if from_right & ~select.POLLOUT:
                self._hear(sequence)

    def _run_long(self, flow: Flow, sequence: int, deadline: Deadline) -> None:
        """Receives here and sends in the other thread."""
        self._sender.begin(flow, deadline)
        while flow.into is not None:
            missing = flow.pieces_missing
            if self._receive(flow, sequence):
                if flow.pieces_missing < missing:
                    self._sender.piece_arrived()
            elif self._wait(flow, True, deadline):
                self._hear(sequence)
        try:
            self._sender.finish(deadline)
        except DeadlineExceededError:
            raise deadline.exceeded(self._missing(flow)) from None
        except OSError:
            self._hear(sequence)
            raise self._lost(self.right_rank) from None

    def leave(self, notice: Notice) -> None:
        """Tells the left neighbour why, and closes both connections."""
        self.interrupt(notice)
        self._sender.stop()
        self._left.close()
        self._right.close()

    def interrupt(self, notice: Notice) -> None:
        """Tells the left neighbour why, and wakes the thread that is in ``run``; may come from another thread."""
        self._interrupted_here = True
        with contextlib.suppress(OSError):
            self._left.send(notice.to_bytes())
        transfer.shut_down(self._left)
        transfer.shut_down(self._right)

    def _check_usable(self, sequence: int) -> None:
        if self._interrupted_here:
            raise self._interrupted()
        if self._right_finished is not None and self._right_finished < sequence:
            raise self._right_closed()

    def _send(self, flow: Flow, sequence: int) -> bool:
        """Sends what the socket takes of the next piece; returns whether it may take more."""
        if flow.out is None or not flow.may_send:
            return True
        try:
            flow.sent(self._right.send(flow.out))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self._hear(sequence)
            raise self._lost(self.right_rank) from None
        return True

    def _receive(self, flow: Flow, sequence: int) -> bool:
        """Reads what has arrived of the next piece; returns whether anything had."""
        if flow.into is None:
            return False
        try:
            count = self._left.recv_into(flow.into)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            count = 0
        if count == 0:
            self._left_ended(sequence)
        flow.received(count)
        return True

    def _wait(self, flow: Flow, writable: bool, deadline: Deadline) -> int:
        """Returns when a socket is ready, with the poll events of the right one."""
        poller = select.poll()
        left, right = self._left.fileno(), self._right.fileno()
        try:
            if flow.into is not None:
                poller.register(left, select.POLLIN)
            wanted = (0 if writable else select.POLLOUT) | (select.POLLIN if self._right_finished is None else 0)
            if wanted:
                poller.register(right, wanted)
        except ValueError:
            raise self._interrupted() from None
        try:
            ready = dict(poller.poll(deadline.remaining_ms()))
        except DeadlineExceededError:
            raise deadline.exceeded(self._missing(flow)) from None
        return ready.get(right, 0)

    def _missing(self, flow: Flow) -> str:
        missing = []
        if flow.into is not None:
            missing.append(f"rank {self.left_rank} did not send the rest of its data")
        if flow.may_send:
            missing.append(f"rank {self.right_rank} did not take all of this rank's data")
        return f"Rank {self._rank} was waiting: {' and '.join(missing)}."

    def _left_ended(self, sequence: int) -> NoReturn:
        """Finds out why the data ended: the notice of the rank that knows comes from the right."""
        if self._interrupted_here:
            raise self._interrupted()
        grace = Deadline(_GRACE_S, "Waiting for the reason")
        try:
            while self._right_finished is None:
                self._hear(sequence, grace)
        except DeadlineExceededError:
            raise self._lost(self.left_rank, f", and rank {self.right_rank} does not say why") from None
        raise self._lost(self.left_rank)

    def _hear(self, sequence: int, deadline: Deadline | None = None) -> None:
        """Reads a notice of the right neighbour, and returns only if that one has finished this operation."""
        if self._interrupted_here:
            raise self._interrupted()
        deadline = deadline or Deadline(_GRACE_S, "Reading a notice")
        try:
            head = self._read(NOTICE_BYTES, deadline)
            notice = decode_notice(head, self._read(text_bytes_of(head), deadline))
        except PeerLostError:
            raise (self._interrupted() if self._interrupted_here else self._lost(self.right_rank)) from None
        if notice.error is not None:
            raise notice.error
        self._right_finished = notice.finished
        if notice.finished < sequence:
            raise self._right_closed()

    def _read(self, count: int, deadline: Deadline) -> bytes:
        buffer = bytearray(count)
        transfer.receive_into(self._right, memoryview(buffer), deadline, f"rank {self.right_rank}")
        return bytes(buffer)

    def _lost(self, rank: int, detail: str = "") -> PeerLostError:
        return PeerLostError(f"Rank {self._rank} lost its neighbour, rank {rank}: the connection ended{detail}.")

    def _right_closed(self) -> PeerLostError:
        finished = self._right_finished
        return PeerLostError(f"Rank {self.right_rank} closed its collective after operation {finished}.")

    def _interrupted(self) -> PeerLostError:
        return PeerLostError(f"The collective was aborted on this rank, rank {self._rank}.")
