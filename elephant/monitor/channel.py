"""The connection between every rank and the driver: events one way, kept alive by heartbeats."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from elephant.config import Timeouts
from elephant.errors import DeadlineExceededError, NetworkError
from elephant.monitor.events import Alive, EpochEnded, Event, Silent, StepEnded, Trained, from_message, to_message
from elephant.net.deadline import Deadline
from elephant.net.frames import Limits
from elephant.net.server import Server
from elephant.net.stream import Listener, Stream, connect

_MAX_MANIFEST_BYTES = 16 * 2**20
_MAX_RESULT_BYTES = 64 * 2**30


class Channel:
    """The driver's end: a server that puts what ranks say into one queue.

    Args:
        bind_host: Address to listen on: never a wildcard unless Spark was told to use one.
        token: The secret that ranks must know.
        run_id: The fit that they must belong to.
        timeouts: How long a rank may be silent.
    """

    def __init__(self, *, bind_host: str, token: bytes, run_id: str, timeouts: Timeouts) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        self._timeouts = timeouts
        listener = Listener.bind(bind_host, 0)
        self.port = int(listener.address[1])
        self._server = Server(listener, token=token, context=run_id, on_connect=self._serve)

    def next_event(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None when none comes in time."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _serve(self, stream: Stream) -> None:
        rank: int | None = None
        limits = Limits(max_manifest_bytes=_MAX_MANIFEST_BYTES, max_payload_bytes=_MAX_RESULT_BYTES)
        while True:
            try:
                message = stream.receive(Deadline(self._timeouts.heartbeat_s, "a rank's heartbeat"), limits)
                event = from_message(message)
            except DeadlineExceededError:
                if rank is not None:
                    self._events.put(Silent(rank=rank, silent_s=self._timeouts.heartbeat_s))
                return
            except NetworkError:
                # The rank has ended or died. Its Spark task knows which, and says so.
                return
            rank = event.rank
            if not isinstance(event, Alive):
                self._events.put(event)

    def close(self) -> None:
        """Ends all connections and threads."""
        self._server.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ChannelClient:
    """A rank's end, as the `elephant.training.job.Reporter` of its training.

    Args:
        address: Host and port of the driver's channel.
        token: The secret of the fit.
        run_id: The fit.
        rank: Who speaks.
        timeouts: How long connecting may take, and how often to say that the rank lives.
    """

    def __init__(self, address: tuple[str, int], *, token: bytes, run_id: str, rank: int, timeouts: Timeouts) -> None:
        self._rank = rank
        self._timeouts = timeouts
        self._stream = connect(
            address, token=token, context=run_id, deadline=Deadline(timeouts.connect_s, "connecting to the driver")
        )
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"elephant-heartbeat-{rank}", daemon=True)
        self._heart.start()

    def tell(self, event: Event, *, timeout_s: float = 60.0) -> None:
        """Sends one event; raises NetworkError when the driver is gone."""
        with self._lock:
            self._stream.send(to_message(event), Deadline(timeout_s, f"telling the driver {type(event).__name__}"))

    def step(self, epoch: int, step: int, steps: int, logs: dict[str, float]) -> None:
        """Tells that a step has ended."""
        self.tell(StepEnded(rank=self._rank, epoch=epoch, step=step, steps=steps, logs=logs))

    def epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Tells that an epoch has ended."""
        self.tell(EpochEnded(rank=self._rank, epoch=epoch, logs=logs))

    def result(self, variables: Sequence[np.ndarray], row_shape: tuple[int, ...]) -> None:
        """Sends the trained variables."""
        arrays = tuple(np.ascontiguousarray(variable) for variable in variables)
        self.tell(Trained(rank=self._rank, row_shape=list(row_shape), arrays=arrays), timeout_s=600.0)

    def _beat(self) -> None:
        while not self._closing.wait(self._timeouts.heartbeat_interval_s):
            try:
                self.tell(Alive(rank=self._rank))
            except NetworkError:
                return

    def close(self) -> None:
        """Ends the heartbeat and the connection."""
        self._closing.set()
        self._heart.join(timeout=5.0)
        self._stream.close()

    def __enter__(self) -> ChannelClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def usable_address(host: str) -> str:
    """Returns the numeric address of a host name of this machine; numeric ones stay as they are."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
