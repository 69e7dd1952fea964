"""Meetings of Spark tasks on the driver's channel: one before their ranks begin, and one more after each loss.

The ranks that begin after a meeting are a generation. Where a fit may begin again, its tasks stay connected: they
start their ranks' processes anew when the driver says so, and come to the next meeting. A task that Spark runs again
joins them there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from elephant.monitor.events import Arrived
from elephant.net.frames import Message
from elephant.net.stream import Stream, send_to_all

MET = "Met"
# To tasks that stay: begin again with new processes; nobody needs you any more; say that you are alive.
AGAIN, RELEASED, PING = "Again", "Released", "Ping"
# A task that waits reads at once, and one that is frozen never does.
SEND_S = 20.0


@dataclass
class _Seat:
    """Place of one task: the connection that has it, and that of another attempt at it, which waits for the place."""

    stream: Stream
    text: str | None = None  # what it has told the others; None until it has come to the meeting
    num_tasks: int = 0
    has_met: bool = False
    is_retry: bool = False
    next_seat: _Seat | None = None


@dataclass
class Meetings:
    """The driver's end: keeps what tasks say until all have come, and then tells it to all of them.

    Of two attempts at one task the first one has the place, as long as it gives signs of life. Spark runs a task again
    that goes on where it repeats a stage, because rows of another task are lost, say: such an attempt ends well at
    once, so that the next one has its slot. Or it takes a task for slow (speculation): that attempt waits, as Spark
    would end the first one as soon as the other has ended well.

    Args:
        are_repeated: Whether tasks stay connected, and meet again.

    Attributes:
        generation: The number of the last meeting that was called, from zero.
        is_over: Whether all have come to it. Those that hang up afterwards have heard it.
        goes_on: Whether its ranks are to ask for a state.
    """

    are_repeated: bool = False
    generation: int = 0
    is_over: bool = False
    goes_on: bool = False
    _seats: dict[int, _Seat] = field(default_factory=dict)
    _changing: threading.Lock = field(default_factory=threading.Lock)
    # When the place of a task was left, or that of one that was never there has been missed.
    _absent_since: float | None = None
    _is_released: bool = False

    def enter(self, rank: int, stream: Stream, *, is_retry: bool = False) -> None:
        """Gives a task its place that stays connected; where another attempt has it, that one is asked for a sign.

        Args:
            is_retry: Whether Spark runs a single task again, and not a stage.
        """
        with self._changing:
            seat = self._seats.get(rank)
            is_needless = seat is not None and seat.next_seat is not None and not is_retry
            if seat is None:
                self._seats[rank] = _Seat(stream)
            elif not is_needless:
                seat.next_seat = _Seat(stream, is_retry=is_retry)
            self._absent_since = time.monotonic()
        if is_needless:
            # A copy waits already.
            send_to_all([stream], Message(kind=RELEASED), SEND_S)
        elif seat is not None:
            send_to_all([seat.stream], Message(kind=PING), SEND_S)

    def holds(self, rank: int, stream: Stream) -> bool:
        """Returns whether a task's place is that of this connection."""
        with self._changing:
            seat = self._seats.get(rank)
            return seat is not None and seat.stream is stream

    def hear(self, rank: int, stream: Stream) -> None:
        """Takes a sign of life; another attempt at the same task is not needed then."""
        with self._changing:
            seat = self._seats.get(rank)
            needless = None
            if seat is not None and seat.stream is stream and seat.next_seat and not seat.next_seat.is_retry:
                needless, seat.next_seat = seat.next_seat, None
        if needless is not None:
            send_to_all([needless.stream], Message(kind=RELEASED), SEND_S)

    def add(self, arrived: Arrived, stream: Stream) -> None:
        """Takes what a task says, and answers all of them when it was the last one."""
        with self._changing:
            seat: _Seat | None = self._seats.get(arrived.rank)
            if not self.are_repeated:
                seat = self._seats[arrived.rank] = _Seat(stream)
            elif seat is not None and seat.stream is not stream:
                seat = seat.next_seat
            if seat is None or seat.stream is not stream:
                return
            seat.text, seat.num_tasks = arrived.text, arrived.num_tasks
        self._end_where_complete()

    def _end_where_complete(self) -> None:
        with self._changing:
            seats = [seat for _, seat in sorted(self._seats.items())]
            told = [seat.text for seat in seats if seat.text is not None]
            if self.is_over or not told or len(told) < max(seat.num_tasks for seat in seats):
                return
            self.is_over = True
            for seat in seats:
                seat.has_met = True
            fields = {"texts": told, "generation": self.generation, "goes_on": self.goes_on}
        send_to_all([seat.stream for seat in seats], Message(kind=MET, fields=fields), SEND_S)

    def leave(self, rank: int, stream: Stream) -> int | None:
        """Takes note that the connection of a task that stays has ended; returns the generation that has lost ranks.

        It is None where they had not met, and the others wait for another attempt.
        """
        with self._changing:
            seat = self._seats.get(rank)
            if seat is None or seat.stream is not stream:
                if seat is not None and seat.next_seat is not None and seat.next_seat.stream is stream:
                    seat.next_seat = None
                return None
            del self._seats[rank]
            if seat.next_seat is not None:
                self._seats[rank] = seat.next_seat
            self._absent_since = time.monotonic()
            lost = self.generation if seat.has_met and not self._is_released else None
        self._end_where_complete()
        return lost

    def begin_again(self, *, goes_on: bool) -> None:
        """Calls the next meeting: tells all tasks to come with new processes."""
        with self._changing:
            self.generation += 1
            self.is_over, self.goes_on = False, goes_on
            # Others have come since the last one.
            met = [seat for seat in self._seats.values() if seat.has_met]
            for seat in met:
                seat.text, seat.has_met = None, False
        send_to_all([seat.stream for seat in met], Message(kind=AGAIN, fields={"generation": self.generation}), SEND_S)
        self._end_where_complete()

    def release(self) -> None:
        """Tells all tasks that their ranks have done what the run is for."""
        with self._changing:
            self._is_released = True
            waiting = [seat.next_seat for seat in self._seats.values() if seat.next_seat is not None]
            streams = [seat.stream for seat in (*self._seats.values(), *waiting)]
        send_to_all(streams, Message(kind=RELEASED), SEND_S)

    def absent(self, ranks: Sequence[int]) -> tuple[list[int], float]:
        """Returns those of some ranks whose tasks are not here, and since when, in seconds of the monotonic clock."""
        with self._changing:
            missing = [] if self._is_released else [rank for rank in ranks if rank not in self._seats]
            since = time.monotonic() if self._absent_since is None or not missing else self._absent_since
            return missing, since
