"""Forming the ring: every rank connects to its right neighbour while it accepts its left one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from elephant.collective.base import Collective
from elephant.collective.links import Links
from elephant.collective.ring import Ring
from elephant.collective.solo import Solo
from elephant.errors import ConfigurationError, DeadlineExceededError, NetworkError
from elephant.net.addresses import Address, name_of
from elephant.net.deadline import Deadline
from elephant.net.stream import Listener, Stream, connect

# How often the accepting thread looks whether connecting has failed, which makes waiting vain.
_LOOK_S = 0.1


def form_collective(
    rank: int,
    addresses: Sequence[Address],
    listener: Listener,
    token: bytes,
    run_id: str,
    timeout_s: float,
    *,
    operation_timeout_s: float = 600.0,
) -> Collective:
    """Connects this rank with its neighbours; all ranks call it, in any order.

    Args:
        rank: This rank.
        addresses: Host and port of every rank's listener, by rank.
        listener: This rank's own; it stays the caller's, who may close it afterwards.
        token: The job's random token, 16 bytes or more.
        run_id: The run, which a connection must belong to.
        timeout_s: Seconds until both neighbours must be there.
        operation_timeout_s: Seconds that one operation of the collective may take.

    Returns:
        A ring, or a collective of one for a single address.

    Raises:
        ConfigurationError: There is no such rank, or the token is too short.
        AuthenticationError: What listens at the neighbour's address does not know the token, the
            run, or is another rank.
        DeadlineExceededError: A neighbour was not there in time; the text names the rank.
        NetworkError: A neighbour's address cannot be used, or the listener was closed.
    """
    world_size = len(addresses)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank: expected one from 0 to {world_size - 1}. Received: {rank!r}.")
    if world_size == 1:
        return Solo()
    right_rank = (rank + 1) % world_size
    deadline = Deadline(timeout_s, f"Forming the ring of {world_size} ranks on rank {rank}")
    arrival = _Arrival(listener, token, run_id, (rank - 1) % world_size, rank, deadline)
    try:
        what = f"Connecting rank {rank} to rank {right_rank} at {name_of(addresses[right_rank])}"
        right = connect(
            addresses[right_rank], token, _edge(run_id, rank, right_rank), deadline.shortened(timeout_s, what)
        )
    except BaseException:
        arrival.cancel()
        raise
    try:
        left = arrival.result()
    except BaseException:
        right.abort()
        raise
    links = Links(left.detach(), right.detach(), rank=rank, world_size=world_size)
    return Ring(links, rank=rank, world_size=world_size, timeout_s=operation_timeout_s)


class _Arrival:
    """Accepts the left neighbour in a thread of its own."""

    def __init__(
        self, listener: Listener, token: bytes, run_id: str, left_rank: int, rank: int, deadline: Deadline
    ) -> None:
        self._outcome: queue.Queue[Stream | NetworkError] = queue.Queue()
        self._cancelled = threading.Event()
        self._thread = threading.Thread(
            target=self._accept,
            args=(listener, token, _edge(run_id, left_rank, rank), left_rank, deadline),
            name=f"elephant-ring-accept-{rank}",
            daemon=True,
        )
        self._thread.start()

    def result(self) -> Stream:
        """Returns the connection, or raises what went wrong; the thread has its deadline."""
        outcome = self._outcome.get()
        self._thread.join()
        if isinstance(outcome, NetworkError):
            raise outcome
        return outcome

    def cancel(self) -> None:
        """Gives up; a connection that has come is aborted."""
        self._cancelled.set()
        outcome = self._outcome.get()
        self._thread.join()
        if isinstance(outcome, Stream):
            outcome.abort()

    def _accept(self, listener: Listener, token: bytes, edge: str, left_rank: int, deadline: Deadline) -> None:
        what = f"Waiting for rank {left_rank} to connect"
        while True:
            try:
                self._outcome.put(listener.accept(token, edge, deadline.shortened(_LOOK_S, what)))
                return
            except DeadlineExceededError:
                if deadline.expired or self._cancelled.is_set():
                    self._outcome.put(deadline.exceeded(f"{what}: {listener.seen}"))
                    return
            except NetworkError as error:
                self._outcome.put(error)
                return


def _edge(run_id: str, source: int, target: int) -> str:
    return f"{run_id}/ring/{source}->{target}"
