"""The one exchange between the Spark tasks of a run before the first step, which the driver's channel makes.

A task that waits here waits on a socket of its own. In Spark's ``allGather``, which takes a second
besides, it would take its executor down as soon as another rank's task fails (3.5.9 and 4.3.0).
"""

from __future__ import annotations

import threading

from elephant.config import Timeouts
from elephant.errors import DeadlineExceededError, NetworkError, PeerLostError
from elephant.monitor.events import Alive, Arrived, to_message
from elephant.net.addresses import Address
from elephant.net.deadline import Deadline
from elephant.net.fields import require
from elephant.net.frames import Limits, Message
from elephant.net.stream import Stream, connect

MET = "Met"
# Of a thousand tasks, each of which tells of eight GPUs.
_LIMITS = Limits(max_manifest_bytes=64 * 2**20)
_SEND_S = 60.0
# The driver listens before there is any task: where nobody does, the run has ended.
_CONNECT_S = 15.0


class Meeting:
    """The driver's end: keeps what tasks say until all have come, and then tells it to all of them.

    Attributes:
        is_over: Whether all have come. Those that hang up afterwards have heard it.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._arrived: dict[int, tuple[Stream, str]] = {}
        self.is_over = False

    def add(self, arrived: Arrived, stream: Stream) -> None:
        """Takes what a task says, and answers all of them when it was the last one.

        Args:
            arrived: What it says.
            stream: Where it waits for the answer.
        """
        with self._changing:
            self._arrived[arrived.rank] = (stream, arrived.text)
            if len(self._arrived) < arrived.num_tasks:
                return
            self.is_over = True
            told = [text for _, (_, text) in sorted(self._arrived.items())]
            for waiting, _ in self._arrived.values():
                try:
                    waiting.send(Message(kind=MET, fields={"texts": told}), Deadline(_SEND_S, "answering a task"))
                except NetworkError:
                    # It is lost: the thread that listens to it says so.
                    continue


def meet(
    address: Address, text: str, *, num_tasks: int, token: bytes, run_id: str, rank: int, timeouts: Timeouts
) -> list[str]:
    """Waits until the tasks of all ranks have come here; returns what each of them told, by rank.

    Args:
        address: Host and port of the driver's channel.
        text: What this one tells.
        num_tasks: How many they are.
        token: The secret of the run.
        run_id: The run.
        rank: The task's first rank.
        timeouts: How long connecting may take, and how often to say that the task lives.

    Raises:
        PeerLostError: The run has ended, or the driver.
        NetworkError: The driver cannot be reached.
    """
    deadline = Deadline(min(timeouts.connect_s, _CONNECT_S), "connecting to the driver")
    with connect(address, token=token, context=run_id, deadline=deadline) as stream:
        stream.lose_after(timeouts.heartbeat_s)
        stream.send(
            to_message(Arrived(rank=rank, text=text, num_tasks=num_tasks)),
            Deadline(_SEND_S, "telling the driver of this task"),
        )
        while True:
            try:
                answer = stream.receive(Deadline(timeouts.heartbeat_interval_s, "the driver"), _LIMITS)
            except DeadlineExceededError:
                stream.send(to_message(Alive(rank=rank)), Deadline(_SEND_S, "telling the driver that a task lives"))
                continue
            if answer.kind != MET:
                raise PeerLostError("expected all ranks to come. The driver has ended the run.")
            require(answer.fields, {"texts": list[str]}, MET)
            return list(answer.fields["texts"])
