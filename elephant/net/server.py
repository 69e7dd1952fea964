"""One thread that accepts, and one for each authenticated connection."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elephant.errors import DeadlineExceededError, NetworkError
from elephant.net.addresses import Address, name_of
from elephant.net.deadline import Deadline
from elephant.net.descriptors import allow_descriptors
from elephant.net.renewal import Renewals
from elephant.net.stream import Listener, Stream

logger = logging.getLogger(__name__)


class Server:
    """Serves every client that knows the token, each in a thread of its own, until it is closed.

    How many strangers may be in a handshake, and for how long, is the listener's to say.

    Args:
        token: The job's random token, 16 bytes or more.
        context: What the connections are for; clients must name the same.
        on_connect: Serves one client. It receives first: connections over which others go on end there.
    """

    def __init__(
        self,
        listener: Listener,
        token: bytes,
        context: str,
        on_connect: Callable[[Stream], None],
        *,
        on_exhausted: Callable[[NetworkError], None] | None = None,
        name: str = "elephant-server",
    ) -> None:
        self._listener = listener
        self._on_connect = on_connect
        self._on_exhausted = on_exhausted or (lambda error: logger.error("%s", error))
        self._name = name
        self._closed = False
        self._state = threading.Lock()
        self._streams: dict[threading.Thread, Stream] = {}
        self._renewals = Renewals()
        self._address = listener.address
        self._acceptor = threading.Thread(
            target=self._accept_all, args=(token, context), name=f"{name}-accept", daemon=True
        )
        self._acceptor.start()

    @property
    def address(self) -> Address:
        """Host and port that it serves on."""
        return self._address

    def close(self, timeout_s: float = 10.0) -> None:
        """Stops accepting, aborts the open streams, and joins every thread.

        Raises:
            DeadlineExceededError: Some ``on_connect`` did not return in ``timeout_s`` seconds.
        """
        deadline = Deadline(timeout_s, f"Closing the server on {name_of(self._address)}")
        with self._state:
            self._closed = True
            streams = dict(self._streams)
        self._listener.close()
        self._renewals.close()
        for stream in streams.values():
            stream.abort()
        threads = [thread for thread in (self._acceptor, *streams) if thread is not threading.current_thread()]
        for thread in threads:
            thread.join(0 if deadline.expired else deadline.remaining())
        if alive := [thread.name for thread in threads if thread.is_alive()]:
            raise deadline.exceeded(f"Still running: {', '.join(alive)}.")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_all(self, token: bytes, context: str) -> None:
        while not self._closed:
            try:
                stream = self._listener.accept(token, context, Deadline(3600, "Waiting for a client"))
            except DeadlineExceededError:
                continue
            except NetworkError as error:
                if self._listener.fileno() < 0:
                    return
                self._on_exhausted(error)
                continue
            try:
                self._start(stream)
            except (RuntimeError, MemoryError) as error:
                # The client sees its connection end. Others are served, once there is room again.
                stream.abort()
                self._on_exhausted(NetworkError(f"Expected a thread for {stream.peer}. Received: {error}."))

    def _start(self, stream: Stream) -> None:
        allow_descriptors(2 * len(self._streams))
        stream.renewals = self._renewals
        thread = threading.Thread(target=self._serve, args=(stream,), name=f"{self._name}-{stream.peer}", daemon=True)
        with self._state:
            if not self._closed:
                thread.start()
                self._streams[thread] = stream
                return
        stream.abort()

    def _serve(self, stream: Stream) -> None:
        try:
            with stream:
                self._on_connect(stream)
        except NetworkError as error:
            logger.debug("The connection of %s ended: %s", stream.peer, error)
        except Exception:
            logger.exception("Serving %s failed", stream.peer)
        finally:
            with self._state:
                self._streams.pop(threading.current_thread(), None)
