"""The one exchange between the Spark tasks of a run before the first step, which the driver's channel makes.

A task that waits here waits on a socket of its own, see `elephant.monitor.channel.ChannelClient.meet`. In Spark's
``allGather``, which takes a second besides, it would take its executor down as soon as another rank's task fails
(3.5.9 and 4.3.0).
"""

from __future__ import annotations

import threading

from elephant.errors import NetworkError
from elephant.monitor.events import Arrived
from elephant.net.deadline import Deadline
from elephant.net.frames import Limits, Message
from elephant.net.stream import Stream

MET = "Met"
# Of a thousand tasks, each of which tells of eight GPUs.
ANSWER_LIMITS = Limits(max_manifest_bytes=64 * 2**20)
_SEND_S = 60.0


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
