"""Node of one worker: a listener that answers its peers, and connections on which it asks them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from elephant.errors import DeadlineExceededError, NetworkError, ProtocolError
from elephant.gossip.exchange import Answerer, Asker, Asking, Member, Refusal
from elephant.gossip.peers import PeerChoice
from elephant.gossip.weights import Parcel, Weights
from elephant.net.addresses import Address
from elephant.net.deadline import Deadline
from elephant.net.frames import Limits, Message, require
from elephant.net.server import Server
from elephant.net.stream import Listener, Stream, connect

_OFFER, _REPLY, _REFUSED, _CONFIRM, _DONE = "Offer", "Reply", "Refused", "Confirm", "Done"
# All workers together have as many as there are of them.
_MOST_SHARE = 1e6
_READ, _MODEL = "Read", "Model"
_CONTEXT = "gossip"
# An exchange may take so long, and a second more for so many bytes.
_EXCHANGE_S = 3.0
_BYTES_PER_S = 10e6
# How much longer than the asker's own time an answerer waits for its confirmation.
_MARGIN_S = 2.0
# Who is busy is asked again later; who has not said that it is done is busy with other things.
_BUSY_S = 0.1
_DONE_S = 0.05
_IDLE_S = 3600.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


@dataclass
class PeerLink:
    """Connection on which a peer is asked, and how far the exchange on it is."""

    stream: Stream
    asker: Asker


@dataclass(frozen=True, eq=False)
class PeerModel:
    """Weights that a worker may begin from.

    Args:
        parcel: The weights to train with.
        state: Moving statistics, float64.
    """

    parcel: Parcel
    state: np.ndarray


def gossip_context(run_id: str) -> str:
    """Returns the purpose of connections between the workers of a run."""
    return f"{_CONTEXT}/{run_id}"


def exchange_seconds(num_values: int) -> float:
    """Returns the seconds that an exchange may take, by the length of the weights."""
    return _EXCHANGE_S + 2 * 4 * num_values / _BYTES_PER_S


class GossipNode:
    """One worker among its peers, from its first exchange to the moment in which it leaves.

    `exchange`, `leave` and `close` belong to the thread that trains; `set_peers` may be called by any.

    Args:
        weights: This worker's.
        member: Its partition and attempt.
        listener: Its listening socket; owned from here on.
        token: The run's secret.
        run_id: The run.
        peer_choice: Says whom to ask next.
        state: Moving statistics to begin with, float64.
        exchange_s: Seconds that an exchange may take; None goes by the length of the weights.

    Attributes:
        exchanges: Exchanges that this worker has asked for and that came about.
        missed: Those that did not: the peer was busy, slow, frozen or gone.
        waited_s: Seconds that training stood still for them.
        bytes_sent: Bytes of weights sent to peers that were asked.
    """

    def __init__(
        self,
        weights: Weights,
        member: Member,
        listener: Listener,
        *,
        token: bytes,
        run_id: str,
        peer_choice: PeerChoice,
        state: np.ndarray,
        exchange_s: float | None = None,
    ) -> None:
        held = weights.held()
        self.exchanges = self.missed = self.bytes_sent = 0
        self.waited_s = 0.0
        self._weights = weights
        self._member = member
        self._token, self._context = token, gossip_context(run_id)
        self._peer_choice = peer_choice
        self._state = np.array(state, np.float64)
        self._num_values, self._num_partitions = len(held.values), len(held.steps)
        self._limits = Limits(max_payload_bytes=4 * len(held.values) + 8 * len(held.steps) + 1024)
        self._exchange_s = exchange_seconds(len(held.values)) if exchange_s is None else exchange_s
        self._answerer = Answerer(weights)
        self._member_addresses: dict[Member, Address] = {}
        self._links: dict[Member, PeerLink] = {}
        # When a peer may be asked again, and how long it is left alone after the next time.
        self._member_again_at: dict[Member, float] = {}
        self._member_pause_s: dict[Member, float] = {}
        self._server = Server(listener, token, self._context, self._serve, name="elephant-gossip")

    @property
    def address(self) -> Address:
        """Host and port that it listens on."""
        return self._server.address

    def set_peers(self, peers: Mapping[Member, Address]) -> None:
        """Takes the addresses of the other workers that run now."""
        self._member_addresses = {member: address for member, address in peers.items() if member[0] != self._member[0]}

    def set_state(self, state: np.ndarray) -> None:
        """Takes the moving statistics for workers that begin from this one's weights."""
        self._state = np.array(state, np.float64)

    def exchange(self) -> bool:
        """Exchanges with one peer, where there is one that may be asked; returns whether that came about.

        A peer that does not take part costs the time of one exchange, and is then left alone for a while.
        """
        began = time.monotonic()
        peers = self._member_addresses
        self._forget_others(peers)
        able = {member[0]: member for member in peers if self._member_again_at.get(member, 0.0) <= began}
        partition = self._peer_choice.next(list(able))
        if partition is None:
            return False
        member = able[partition]
        deadline = Deadline(self._exchange_s, f"The exchange with worker {partition}")
        try:
            came_about = self._exchange_with(member, peers[member], deadline)
        except NetworkError:
            came_about = False
            self._lose(member)
        self.exchanges += came_about
        self.missed += not came_about
        self.waited_s += time.monotonic() - began
        return came_about

    def _exchange_with(self, member: Member, address: Address, deadline: Deadline) -> bool:
        peer_link = self._links.get(member)
        if peer_link is None:
            stream = connect(address, self._token, self._context, deadline, refused_s=0.0)
            peer_link = self._links[member] = PeerLink(stream, Asker(self._weights))
        stream, asker = peer_link.stream, peer_link.asker
        if asker.state is Asking.CONFIRMED and not self._is_done(peer_link):
            # Its connection stays: what it has not read yet is the confirmation of a gift.
            self._leave_alone(member)
            return False
        offer = asker.offer()
        stream.send(_parcel_message(_OFFER, offer, self._member), deadline)
        self.bytes_sent += offer.values.nbytes
        message = stream.receive(deadline, self._limits)
        if message.kind == _REFUSED:
            asker.refused()
            return False
        asker.replied(self._parcel_of(message, _REPLY))
        # One that came too late is none: the peer may have let go of its gift.
        deadline.remaining()
        stream.send(Message(kind=_CONFIRM), deadline)
        asker.confirmed()
        self._member_pause_s.pop(member, None)
        return True

    def _is_done(self, peer_link: PeerLink) -> bool:
        try:
            message = peer_link.stream.receive(Deadline(_DONE_S, "The end of an exchange"), self._limits)
        except DeadlineExceededError:
            return False
        if message.kind != _DONE:
            raise ProtocolError(f"Expected the end of an exchange. Received: {message.kind!r}.")
        peer_link.asker.done()
        return True

    def _lose(self, member: Member) -> None:
        peer_link = self._links.pop(member, None)
        if peer_link is not None:
            peer_link.stream.abort()
        self._leave_alone(member)

    def _leave_alone(self, member: Member) -> None:
        pause_s = self._member_pause_s.get(member, _FIRST_PAUSE_S)
        self._member_again_at[member] = time.monotonic() + pause_s
        self._member_pause_s[member] = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _forget_others(self, peers: Mapping[Member, Address]) -> None:
        for member in self._links.keys() - peers.keys():
            # Not aborted: it may still have to read a confirmation.
            self._links.pop(member).stream.close()
        for known in (self._member_again_at, self._member_pause_s):
            for member in known.keys() - peers.keys():
                del known[member]

    def leave(self) -> None:
        """Takes part no more: afterwards only `Weights.held` says what this worker contributes to the average."""
        self._answerer.leave(2 * self._exchange_s + 2 * _MARGIN_S)

    def close(self) -> None:
        """Ends all connections and threads."""
        for peer_link in self._links.values():
            peer_link.stream.close()
        self._links = {}
        self._server.close()

    def __enter__(self) -> GossipNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, stream: Stream) -> None:
        while True:
            try:
                message = stream.receive(Deadline(_IDLE_S, "Waiting for a peer"), self._limits)
            except DeadlineExceededError:
                continue
            if message.kind == _OFFER:
                self._answer(stream, message)
            elif message.kind == _READ:
                trained = self._weights.trained()
                arrays = (trained.values, trained.steps, self._state)
                stream.send(Message(kind=_MODEL, arrays=arrays), self._sending())
            else:
                raise ProtocolError(f"Expected an offer. Received: {message.kind!r}.")

    def _answer(self, stream: Stream, message: Message) -> None:
        offer_parcel = self._parcel_of(message, _OFFER)
        asker = (int(message.fields["partition"]), int(message.fields["attempt"]))
        reply = self._answerer.reply_to(asker, offer_parcel, patience_s=_BUSY_S)
        if isinstance(reply, Refusal):
            stream.send(Message(kind=_REFUSED, fields={"reason": reply.value}), self._sending())
            return
        try:
            stream.send(_parcel_message(_REPLY, reply, self._member), self._sending())
            self._await_confirmation(stream)
            self._answerer.confirm(asker)
        finally:
            self._answerer.drop(asker)
        stream.send(Message(kind=_DONE), self._sending())

    def _sending(self) -> Deadline:
        return Deadline(self._exchange_s, "Answering a peer")

    def _await_confirmation(self, stream: Stream) -> None:
        try:
            message = stream.receive(Deadline(self._exchange_s + _MARGIN_S, "Waiting for a confirmation"), self._limits)
        except DeadlineExceededError:
            # Where this process was frozen, it has come meanwhile.
            message = stream.receive(Deadline(_BUSY_S, "Looking for a confirmation"), self._limits)
        if message.kind != _CONFIRM:
            raise ProtocolError(f"Expected a confirmation. Received: {message.kind!r}.")

    def _parcel_of(self, message: Message, kind: str) -> Parcel:
        if message.kind != kind:
            raise ProtocolError(f"Expected {kind}. Received: {message.kind!r}.")
        require(message.fields, {"partition": int, "attempt": int, "share": float}, kind)
        lengths = (self._num_values, 0) if kind == _REPLY else (self._num_values,)
        return _checked_parcel(message.arrays, message.fields, lengths, self._num_partitions)


def read_model(
    address: Address, deadline: Deadline, *, token: bytes, run_id: str, num_values: int, num_partitions: int
) -> PeerModel:
    """Returns the weights of a worker that runs now; raises NetworkError where it does not tell them in time."""
    with connect(address, token, gossip_context(run_id), deadline, refused_s=0.0) as stream:
        stream.send(Message(kind=_READ), deadline)
        message = stream.receive(deadline)
    if message.kind != _MODEL or len(message.arrays) != 3:
        raise ProtocolError(f"Expected {_MODEL} with 3 arrays. Received: {message.kind!r}.")
    parcel = _checked_parcel(message.arrays[:2], {"share": 1.0}, (num_values,), num_partitions)
    return PeerModel(parcel, np.asarray(message.arrays[2], np.float64))


def _parcel_message(kind: str, parcel: Parcel, member: Member) -> Message:
    fields = {"partition": member[0], "attempt": member[1], "share": parcel.share}
    return Message(kind=kind, fields=fields, arrays=(parcel.values, parcel.steps))


def _checked_parcel(
    arrays: tuple[np.ndarray, ...], fields: Mapping[str, Any], lengths: tuple[int, ...], num_partitions: int
) -> Parcel:
    forms = [(array.dtype.name, array.shape) for array in arrays]
    if forms not in [[("float32", (length,)), ("int64", (num_partitions,))] for length in lengths]:
        raise ProtocolError(
            f"Expected float32 weights of length {' or '.join(map(str, lengths))} and {num_partitions} int64 steps. "
            f"Received: {forms}."
        )
    share = float(fields["share"])
    if not (np.isfinite(arrays[0]).all() and 0 <= share <= _MOST_SHARE):
        # It would go from worker to worker, until all of them had it.
        raise ProtocolError(f"Expected finite weights, and a share from 0 on. Received: a share of {share:g}.")
    return Parcel(arrays[0], share, arrays[1])
