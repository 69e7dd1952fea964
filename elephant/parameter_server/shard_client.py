"""One server's part of the vector, as a worker pulls and pushes it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from elephant.errors import ConfigurationError
from elephant.net.socket_io import Patience, SocketIO
from elephant.parameter_server.connection import Connection, Request
from elephant.parameter_server.protocol import Flags, RequestHeader, RequestKind
from elephant.parameter_server.session import (
    STRIPE_VALUES,
    encoded_length,
    pull_codec,
    push_codec,
    stripe_bytes,
    stripes,
)

Place = tuple[int, int]


class ShardClient:
    """Pulls and pushes of one server's part, encoded as agreed."""

    def __init__(self, connection: Connection, compression: str | None, num_values: int) -> None:
        self.connection = connection
        self._stripes = tuple(stripes(num_values))
        self._push_codec = push_codec(compression, num_values)
        self._pull_codec = pull_codec(compression)
        # All of an encoded update, because one that is sent again has to be the same bytes.
        self._encoded = np.empty(
            0 if self._push_codec is None else encoded_length(self._push_codec, num_values), np.uint8
        )
        longest = min(STRIPE_VALUES, num_values)
        self._bounce = np.empty(0 if self._pull_codec is None else self._pull_codec.encoded_bytes(longest), np.uint8)
        self._version = 0
        self._held = (0, 0)

    def forget(self) -> None:
        """Makes the next pull bring the weights, whatever their version."""
        self._version = 0

    def pull(self, out: np.ndarray) -> RequestHeader:
        """Reads the part into ``out`` unless it holds this version."""
        return self._ask(RequestHeader(kind=RequestKind.PULL, version=self._version), None, out)

    def push(self, update: np.ndarray, place: Place, flags: Flags) -> RequestHeader:
        """Sends the part of an update."""
        return self._ask(RequestHeader(kind=RequestKind.PUSH, step=place[0], call=place[1], flags=flags), update, None)

    def push_pull(self, update: np.ndarray, out: np.ndarray, place: Place, flags: Flags) -> RequestHeader:
        """Does both."""
        header = RequestHeader(
            kind=RequestKind.PUSH_PULL, step=place[0], call=place[1], flags=flags, version=self._version
        )
        return self._ask(header, update, out)

    def average_state(self, state: np.ndarray, weight: float) -> np.ndarray:
        """Sends a state and returns the average."""
        expected = self.connection.welcome.num_state_values
        state = np.ascontiguousarray(state, np.float64)
        if state.shape != (expected,) or not math.isfinite(weight):
            raise ConfigurationError(
                f"state: expected float64 of shape ({expected},) and a finite weight. "
                f"Received: shape {state.shape} and {weight!r}."
            )
        average = np.empty(expected)
        self.connection.ask(
            Request(
                header=RequestHeader(kind=RequestKind.STATE, rate=weight),
                payload=lambda: [state.view(np.uint8).data],
                receive=lambda line, reply, patience: line.receive(average.view(np.uint8).data, patience),
            ),
            stands=True,
        )
        return average

    def _ask(self, header: RequestHeader, update: np.ndarray | None, out: np.ndarray | None) -> RequestHeader:
        """Makes a request, and notes which version ``out`` has then."""
        payload = tuple if update is None else _Encoding(self, update).views
        if out is None:
            return self.connection.ask(Request(header=header, payload=payload))
        part = out

        def receive(line: SocketIO, reply: RequestHeader, patience: Patience) -> None:
            # Should the connection be lost in here, ``out`` is of no version.
            self._version = 0
            self._receive_weights(line, part, patience)
            self._version = reply.version

        return self.connection.ask(Request(header=header, payload=payload, receive=receive))

    def _receive_weights(self, line: SocketIO, out: np.ndarray, patience: Patience) -> None:
        for stripe in self._stripes:
            if self._pull_codec is None:
                line.receive(out[stripe].view(np.uint8).data, patience)
                continue
            data = self._bounce[: stripe_bytes(self._pull_codec, stripe)]
            line.receive(data.data, patience)
            with np.errstate(all="ignore"):
                self._pull_codec.decode(data, out[stripe])


class _Encoding:
    """One update on its way: each stripe is encoded once, however often it is sent."""

    def __init__(self, shard: ShardClient, update: np.ndarray) -> None:
        self._shard = shard
        self._update = update
        self._encoded_stripes = 0

    def views(self) -> Iterator[memoryview]:
        """Yields the bytes to send, from the beginning."""
        codec, encoded = self._shard._push_codec, self._shard._encoded
        if codec is None:
            yield self._update.view(np.uint8).data
            return
        start = 0
        for index, stripe in enumerate(self._shard._stripes):
            data = encoded[start : start + stripe_bytes(codec, stripe)]
            if index == self._encoded_stripes:
                with np.errstate(all="ignore"):
                    codec.encode(self._update[stripe], data, offset=stripe.start)
                self._encoded_stripes += 1
            yield data.data
            start += len(data)
