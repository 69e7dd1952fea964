"""Failure detection: what a rank knows of the others, and the connections on which it learns it.

Up to eight ranks are connected with each other, each with all. Of more, a rank is connected with those that come 1, 2,
4, ... places before and after it in each of its groups (see `elephant.collective.watch.peer`). What it learns it passes
on, once, to those that it is connected with. A thread does, so that the ranks between two others may compute meanwhile.
A death is known everywhere after at most log2 of the ranks of such steps. Who leaves in good order says so before its
connections end, and is taken for dead by nobody.

A rank that dies is seen by those connected with it, as the end of that connection. One that fails tells why before it
leaves, so that all name the cause and not the messenger. When a deadline passes, a rank asks who is there, and names
those that do not answer. All connections are in one selector, whose descriptor the loops that move data poll next to
their own sockets: while nothing happens, watching costs nothing.

All groups of a run's ranks have one detector, and threads may be in operations of several groups. Numbers of
operations are compared within a group alone. A failure ends the operations of all groups.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

from elephant.collective.operation import Operation, group_of, spelled
from elephant.collective.watch.control_message import SENDER, ControlKind, ControlMessage, take_notice
from elephant.collective.watch.peer import WatchPeer
from elephant.errors import DeadlineExceededError, NetworkError, PeerLostError
from elephant.net import socket_io
from elephant.net.deadline import Deadline
from elephant.net.tls import AnySocket

# How long a rank whose deadline has passed waits for the others to say that they are there.
_ANSWER_S = 1.0
# How long a rank that lost a data connection waits to hear why: the notice takes milliseconds.
_REASON_S = 1.0
# How soon what a connection has not taken is offered to it again.
_RETRY_MS = 20
_JOIN_S = 5.0


class FailureDetector:
    """This rank's watch over all others.

    Attributes:
        rank: This rank, in the run.
        hosts: The host keys of the ranks that are known to be there, this one's included.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.hosts: dict[int, str] = {}
        self._peers: dict[int, WatchPeer] = {}
        self._incoming = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._incoming.fileno(), selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._pending = select.poll()
        self._pending.register(self.fileno(), select.POLLIN)
        self._interruption: NetworkError | None = None
        self._closed = False
        # Held while notices go out or the sockets are closed: an interrupt may come from another thread.
        self._telling = threading.Lock()
        # Held while what has come is read: operations of two groups may look at once.
        self._reading = threading.Lock()
        self._farewell_messages: dict[int, ControlMessage] = {}
        # The last operations of groups that ranks have closed, by rank and group.
        self._closed_after: dict[tuple[int, int], int] = {}
        # The ranks that are lost, each with the one whose connection with it has ended.
        self._lost: dict[int, int] = {}
        self._asked_at: float | None = None
        self._is_asked = False
        self._answered: int | None = None
        self._answer_messages: dict[int, ControlMessage] = {}
        self._late: set[int] = set()
        # What has been told, so that it is passed on once; of failures, the earliest of each group.
        self._told: set[tuple[ControlKind, int, int]] = set()
        self._failed_after: dict[int, int] = {}
        # Who is in an operation is to look; it has been woken.
        self._has_news = self._is_woken = False
        self._relay: threading.Thread | None = None
        self._stop: tuple[socket.socket, socket.socket] | None = None

    def add(self, rank: int, sock: AnySocket, host: str = "") -> None:
        """Watches an authenticated connection to another rank, on a host of this key; owned from here on."""
        socket_io.prepare(sock)
        peer = WatchPeer(rank, sock)
        with self._reading:
            known = [ControlMessage(ControlKind.HOST, 0, key, other) for other, key in self.hosts.items()]
            with self._telling:
                self._peers[rank] = peer
            self._incoming.register(sock, selectors.EVENT_READ, peer)
            self._heed(ControlMessage(ControlKind.HOST, 0, host), peer)
            self._flush()
            if socket_io.holds_bytes(sock):
                # They came with the end of the hello, and the selector does not tell of them.
                self._take_in([peer])
            if self._relay is not None:
                self._send([peer], *known)

    def watches(self, rank: int) -> bool:
        """Returns whether this rank is connected with another one for the watch."""
        return rank in self._peers

    def pass_on(self) -> None:
        """Has a thread pass on, from here on, what comes; for ranks that are not all connected with each other."""
        self._stop = socket.socketpair()
        self._incoming.register(self._stop[0], selectors.EVENT_READ)
        self._relay = threading.Thread(target=self._pass_on, name=f"elephant-watch-{self.rank}", daemon=True)
        self._relay.start()

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when ``check`` has something to read."""
        return self._selector.fileno()

    def begin(self, operation: Operation) -> None:
        """Finds out, at the start of an operation, what has happened since the last one; raises as ``check`` does."""
        with self._reading:
            if self._pending.poll(0):
                self._check(operation)
            else:
                self._raise_known(operation)

    def check(self, operation: Operation) -> None:
        """Reads what has come, and answers those that ask who is there.

        Raises:
            NetworkError: A rank is gone, has failed, or has closed before this operation; or
                this rank's collective was interrupted.
        """
        with self._reading:
            self._check(operation)

    def _check(self, operation: Operation) -> None:
        self._wake_up()
        self._take_in()
        self._has_news = False
        if self._is_asked:
            self._is_asked = False
            self._answer(operation)
        self._raise_known(operation)

    def _answer(self, operation: Operation) -> None:
        """Tells all others where this rank is; of many that ask, those who are told by way of others have heard it."""
        if self._relay is None or self._answered != operation.sequence:
            self._answered = operation.sequence
            self.tell(ControlMessage(ControlKind.PRESENT, operation.sequence, f"{operation.age_s:.6f}"))

    def reason(self, rank: int, operation: Operation) -> NoReturn:
        """Waits for the reason why a data connection to a rank broke, and raises it.

        Raises:
            NetworkError: What ``check`` finds, or that the rank was lost.
        """
        grace = Deadline(_REASON_S, "Waiting for the reason")
        with contextlib.suppress(DeadlineExceededError):
            while True:
                self._selector.select(grace.remaining())
                self.check(operation)
                grace.remaining()
        farewell = self._farewell_messages.get(rank)
        if operation.is_message and (last := self.closed_after(rank, operation)) is not None:
            raise PeerLostError(_closed(rank, last))
        raise (farewell and farewell.error) or PeerLostError(
            f"Rank {self.rank} lost rank {rank} in {_named(operation)}: the connection ended, and no rank reported an "
            f"error. See the executor log of rank {rank}."
        )

    def closed_after(self, rank: int, operation: Operation) -> int | None:
        """Returns the last operation of a rank that has closed an operation's group in good order; None of others."""
        return self._closed_after.get((rank, group_of(operation.sequence)))

    def absence(self, operation: Operation) -> DeadlineExceededError:
        """Asks, after the deadline, who is in the operation, and returns the error that names those who are not.

        Raises:
            NetworkError: What ``check`` finds meanwhile.
        """
        self._asked_at = time.monotonic()
        self.tell(ControlMessage(ControlKind.WAITING, operation.sequence))
        grace = Deadline(_ANSWER_S, "Waiting for answers")
        with contextlib.suppress(DeadlineExceededError):
            while self._absent(operation):
                self._selector.select(grace.remaining())
                self.check(operation)
                grace.remaining()
        return operation.deadline.exceeded(self._story(operation))

    def interrupt(self, error: NetworkError, sequence: int, *, own_error: NetworkError | None = None) -> None:
        """Tells all others of a failure, and makes ``check`` raise on this rank; may come from another thread.

        Args:
            own_error: What ``check`` raises here; that the collective was aborted where it is None.
        """
        # First the others: a thread that is woken tells them what it knows, which is less, and closes.
        self.tell(ControlMessage.of(error, sequence))
        with self._telling:
            if not self._closed and self._interruption is None:
                self._interruption = own_error or PeerLostError(
                    f"The collective was aborted on this rank, rank {self.rank}."
                )
                self._wake_out.send(b"!")

    def tell(self, message: ControlMessage) -> None:
        """Tells all others, by way of those that this rank is connected with."""
        self._send(self._peers.values(), message)

    def close(self, message: ControlMessage | None = None) -> None:
        """Tells all others that and why this rank leaves, unless they know, and closes the connections."""
        if message is not None:
            self.tell(message)
        with self._telling:
            if self._closed:
                return
            self._closed = True
        if self._relay is not None and self._stop is not None:
            self._stop[1].send(b"!")
            self._relay.join(_JOIN_S)
            for sock in self._stop:
                sock.close()
        for peer in self._peers.values():
            peer.close()
        self._selector.close()
        self._incoming.close()
        self._wake_in.close()
        self._wake_out.close()

    def _send(self, peers: Iterable[WatchPeer], *messages: ControlMessage) -> None:
        data = b"".join(message.to_bytes() for message in messages)
        with self._telling:
            for peer in () if self._closed else peers:
                peer.unsent += data
                peer.flush()

    def _pass_on(self) -> None:
        """Takes in what comes as long as the collective stands, also while this rank is in no operation."""
        poller = select.poll()
        poller.register(self._incoming.fileno(), select.POLLIN)
        while not self._closed:
            poller.poll(_RETRY_MS if any(peer.unsent for peer in list(self._peers.values())) else None)
            try:
                with self._reading:
                    if not self._closed:
                        self._take_in()
                        self._wake()
            except Exception as error:
                failure = error if isinstance(error, NetworkError) else NetworkError(f"The watch failed: {error!r}.")
                self.interrupt(failure, 0, own_error=failure)
                return

    def _wake(self) -> None:
        """Has those who are in an operation look at what another thread has taken in."""
        if self._has_news and not self._is_woken:
            self._is_woken = True
            self._wake_out.send(b"?")

    def _wake_up(self) -> None:
        """Raises what has interrupted this rank; what has woken it for another reason is over."""
        if not self._pending.poll(0):
            return
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(64)
        self._is_woken = False
        if self._interruption is not None:
            # All threads that wait are to find it.
            self._wake_out.send(b"!")
            raise self._interruption

    def _take_in(self, known: Sequence[WatchPeer] = ()) -> None:
        """Reads what has come, also from peers that are known to have sent something, and passes on what is new."""
        ended_peers: list[WatchPeer] = []
        ready = (key.data for key, _ in self._incoming.select(0) if key.data is not None)
        for peer in dict.fromkeys([*known, *ready]):
            if peer.read():
                ended_peers.append(peer)
            while (message := take_notice(peer.received)) is not None:
                self._heed(message, peer)
        for peer in ended_peers:
            self._incoming.unregister(peer.sock)
            self._heed(ControlMessage(ControlKind.DIED, 0, str(self.rank), peer.rank), peer)
        self._flush()

    def _flush(self) -> None:
        with self._telling:
            for peer in () if self._closed else self._peers.values():
                peer.flush()

    def _heed(self, message: ControlMessage, source: WatchPeer) -> None:
        """Takes note of what a peer says of itself or of another rank, and passes it on where that is new."""
        of_itself = message.rank in (SENDER, source.rank)
        message = replace(message, rank=source.rank) if message.rank == SENDER else message
        if message.rank == self.rank and message.kind is not ControlKind.DIED:
            return
        is_new = self._is_new(message)
        if message.kind is ControlKind.PRESENT:
            # A rank that this one is connected with is there if it says so itself: else the connection is broken.
            if of_itself or (is_new and message.rank not in self._peers):
                self._note_answer(message)
        elif message.tells_of_failure:
            self._farewell_messages.setdefault(message.rank, message)
        elif is_new:
            self._note(message)
        if is_new:
            self._has_news = True
            if self._relay is not None:
                data = message.to_bytes()
                with self._telling:
                    for peer in () if self._closed else self._peers.values():
                        if peer is not source:
                            peer.unsent += data

    def _is_new(self, message: ControlMessage) -> bool:
        """Returns whether others may not know what a message tells. It stays what it is however often it comes."""
        if message.tells_of_failure:
            group, known = group_of(message.sequence), self._failed_after.get(group_of(message.sequence))
            if known is None or message.sequence < known:
                self._failed_after[group] = message.sequence
                return True
            return False
        if message.kind is ControlKind.DIED and message.rank in self._farewell_messages:
            return False
        key = (message.kind, message.rank, message.sequence)
        is_new = key not in self._told
        self._told.add(key)
        return is_new

    def _note(self, message: ControlMessage) -> None:
        if message.kind is ControlKind.HOST:
            self.hosts.setdefault(message.rank, message.text)
        elif message.kind is ControlKind.WAITING:
            self._is_asked = True
        elif message.kind is ControlKind.DIED:
            lost, witness = message.rank, int(message.text)
            if lost == self.rank:
                # The network between the two broke, and each takes the other for dead.
                lost, witness = witness, lost
            self._lost.setdefault(lost, witness)
        else:
            self._closed_after.setdefault((message.rank, group_of(message.sequence)), message.sequence)
            if not group_of(message.sequence):
                self._farewell_messages.setdefault(message.rank, message)

    def _note_answer(self, message: ControlMessage) -> None:
        self._answer_messages[message.rank] = message
        if self._asked_at is not None and float(message.text) < time.monotonic() - self._asked_at:
            self._late.add(message.rank)

    def _raise_known(self, operation: Operation) -> None:
        """Raises where a rank has left that this operation needs; what it has finished, the others can finish too."""
        group = group_of(operation.sequence)
        for farewell in list(self._farewell_messages.values()):
            error, is_early = farewell.error, farewell.sequence < operation.sequence
            # While ranks connect none has finished anything: what one gives up then, the others cannot finish.
            if error is not None and (group != group_of(farewell.sequence) or is_early or operation.sequence == 0):
                raise error
        for (rank, closed), last in self._closed_after.items():
            is_over = closed == group and last < operation.sequence and not operation.is_message
            if is_over and operation.needs(rank):
                raise PeerLostError(_closed(rank, last))
        for lost, witness in self._lost.items():
            between = "the two" if witness == self.rank else f"it and rank {witness}"
            raise PeerLostError(
                f"Rank {self.rank} lost rank {lost} in {_named(operation)}: "
                f"its process died, or the network between {between} broke."
            )

    def _absent(self, operation: Operation) -> list[int]:
        """Returns the ranks that an operation needs and that have not answered."""
        others = self.hosts.keys() - self._answer_messages.keys() - {self.rank}
        return sorted(rank for rank in others if operation.needs(rank))

    def _story(self, operation: Operation) -> str:
        """Says in a sentence or two who came, who came late, and who did not come."""
        absent = self._absent(operation)
        elsewhere, late = {}, []
        for rank, message in self._answer_messages.items():
            if not operation.needs(rank):
                continue
            if not operation.is_entered(message.sequence):
                elsewhere[rank] = message.sequence
            elif rank in self._late:
                late.append(rank)
        parts = [f"Ranks that did not arrive: {_listed(absent)}."] if absent else []
        if late:
            parts.append(f"Ranks that arrived too late: {_listed(late)}.")
        parts += [f"Rank {rank} is still in {spelled(sequence)}." for rank, sequence in sorted(elsewhere.items())]
        # Of more than eight ranks, data crosses connections that the watch does not have.
        cut = "" if self._relay is None else ", or one between two ranks is cut"
        return " ".join(parts) or f"All ranks have arrived: the connections are too slow for the data{cut}."


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _closed(rank: int, last: int) -> str:
    return (
        f"Rank {rank} closed its collective after {spelled(last)}: its function has returned, or made fewer calls. All "
        "ranks must make the same calls, in the same order."
    )


def _named(operation: Operation) -> str:
    if operation.sequence == 0 or operation.is_message:
        return operation.name
    return f"{spelled(operation.sequence)} ({operation.name})"
