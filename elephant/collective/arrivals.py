"""The connections that other ranks make to this one while a collective forms.

Every connection begins, after the proof of the token, with a hello: who calls, and what
the connection is for. The answer tells who was reached.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from elephant.errors import DeadlineExceededError, NetworkError, ProtocolError
from elephant.net.addresses import Endpoint
from elephant.net.deadline import Deadline
from elephant.net.frames import Limits, Message
from elephant.net.stream import Listener, Stream, connect

logger = logging.getLogger(__name__)

_HELLO_S = 10.0
_LONGEST_ACCEPT_S = 3600.0
_LIMITS = Limits(max_manifest_bytes=4096, max_payload_bytes=0)


@dataclass(frozen=True)
class Hello:
    """What one side of a new connection says.

    Args:
        rank: Who says it.
        world_size: How many ranks it knows of.
        purpose: What the connection is for.
        host: Its host key.
    """

    rank: int
    world_size: int
    purpose: str
    host: str

    def to_message(self) -> Message:
        """Returns it as a message."""
        return Message("hello", asdict(self))

    @classmethod
    def of(cls, message: Message) -> Hello:
        """Returns the hello in a message.

        Raises:
            ProtocolError: It is none.
        """
        fields: dict[str, Any] = dict(message.fields)
        kinds = {"rank": int, "world_size": int, "purpose": str, "host": str}
        if message.kind != "hello" or {name: type(value) for name, value in fields.items()} != kinds:
            raise ProtocolError(f"Expected a hello. Received: {message.kind!r} with {fields!r}.")
        return cls(**fields)


def call(
    endpoint: Endpoint, token: bytes, run_id: str, own: Hello, expected: int, deadline: Deadline
) -> tuple[socket.socket, Hello]:
    """Connects to another rank.

    Args:
        endpoint: Where it listens.
        token: The job's token.
        run_id: The run.
        own: What to tell it.
        expected: Which rank must be there.
        deadline: When the connection must be there.

    Returns:
        The connection, and what the other rank answered.

    Raises:
        AuthenticationError: What listens there does not know the token or the run.
        ProtocolError: Another rank is there, or one that knows of a different number of ranks.
        DeadlineExceededError: Nobody was there in time.
    """
    stream = connect(endpoint, token, context_of(run_id), deadline)
    try:
        stream.send(own.to_message(), deadline)
        answer = Hello.of(stream.receive(deadline, _LIMITS))
        if (answer.rank, answer.world_size) != (expected, own.world_size):
            raise ProtocolError(
                f"Expected rank {expected} of {own.world_size} at {stream.peer}. "
                f"Received: rank {answer.rank} of {answer.world_size}. "
                "All ranks must be given the same addresses in the same order."
            )
        return stream.detach(), answer
    except BaseException:
        stream.abort()
        raise


def context_of(run_id: str) -> str:
    """Returns the context that the proofs of a run's connections name."""
    return f"{run_id}/collective"


class Arrivals:
    """Accepts the connections of other ranks, in one thread for each listener.

    Args:
        own: What to answer.
        token: The job's token.
        run_id: The run.
        max_pending: Connections in a handshake at a time.
    """

    def __init__(self, own: Hello, token: bytes, run_id: str, max_pending: int) -> None:
        self._own = own
        self._token = token
        self._context = context_of(run_id)
        self._max_pending = max_pending
        self._listeners: list[Listener] = []
        self._threads: list[threading.Thread] = []
        self._arrived: dict[tuple[str, int], tuple[socket.socket, Hello]] = {}
        self._news = threading.Condition()
        self._failure: NetworkError | None = None
        self._closed = False

    def listen(self, descriptor: int) -> None:
        """Accepts on a listening socket, through a duplicate of its descriptor, so that it stays the caller's."""
        listener = Listener(socket.socket(fileno=os.dup(descriptor)), max_pending=self._max_pending)
        name = f"elephant-collective-accept-{self._own.rank}-{len(self._listeners)}"
        thread = threading.Thread(target=self._accept_all, args=(listener,), name=name, daemon=True)
        self._listeners.append(listener)
        self._threads.append(thread)
        thread.start()

    def take(self, purpose: str, ranks: Iterable[int], wait_s: float) -> dict[int, tuple[socket.socket, Hello]]:
        """Waits for connections of these ranks for a purpose, and returns, by rank, those that are there.

        Raises:
            NetworkError: A listener was closed.
        """
        wanted = {(purpose, rank) for rank in ranks}
        with self._news:
            self._news.wait_for(lambda: self._failure or not wanted.isdisjoint(self._arrived), wait_s)
            if self._failure is not None:
                raise self._failure
            return {key[1]: self._arrived.pop(key) for key in wanted & self._arrived.keys()}

    @property
    def seen(self) -> str:
        """Who came and could not be served, in a sentence for an error."""
        return self._listeners[0].seen

    def close(self) -> None:
        """Stops accepting, joins the threads, and closes the connections that nobody took."""
        with self._news:
            self._closed = True
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join(2 * _HELLO_S)
        for sock, _ in self._arrived.values():
            sock.close()

    def _accept_all(self, listener: Listener) -> None:
        while not self._closed:
            try:
                deadline = Deadline(_LONGEST_ACCEPT_S, "Waiting for ranks to connect")
                self._admit(listener.accept(self._token, self._context, deadline))
            except DeadlineExceededError:
                continue
            except NetworkError as error:
                with self._news:
                    self._failure = self._failure or error
                    self._news.notify_all()
                return

    def _admit(self, stream: Stream) -> None:
        """Exchanges hellos with a rank that has proved itself; one that goes away meanwhile is forgotten."""
        deadline = Deadline(_HELLO_S, f"The hello of {stream.peer}")
        try:
            hello = Hello.of(stream.receive(deadline, _LIMITS))
            stream.send(self._own.to_message(), deadline)
        except NetworkError as error:
            logger.debug("A rank at %s came and went: %s", stream.peer, error)
            stream.abort()
            return
        with self._news:
            earlier = self._arrived.pop((hello.purpose, hello.rank), None)
            self._arrived[hello.purpose, hello.rank] = stream.detach(), hello
            self._news.notify_all()
        if earlier is not None:
            earlier[0].close()
