"""Client of all parameter servers of a fit: cuts tensors into their parts, and asks side by side."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from elephant.config import Timeouts
from elephant.errors import ConfigurationError, PositionLost
from elephant.net.addresses import Address
from elephant.net.socket_io import Patience, SocketIO
from elephant.parameter_server.connection import Connection, Request, connect_all
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.protocol import (
    STRIPE_VALUES,
    Flags,
    RequestHeader,
    RequestKind,
    Role,
    Status,
    arrives_finite,
    check_encoding,
    encoded_length,
    pull_codec,
    push_codec,
    stripe_bytes,
    stripes,
)
from elephant.parameter_server.tables import contribution_bytes, lookup_bytes
from elephant.tables.stack import TableContribution, cuts_of, of_part, of_parts_together, stacks_of

T = TypeVar("T")
R = TypeVar("R")


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

    def forget(self) -> None:
        """Makes the next pull bring the weights, whatever their version."""
        self._version = 0

    def average_state(self, state: np.ndarray, weight: float, epochs: int) -> np.ndarray:
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
                header=RequestHeader(kind=RequestKind.STATE, rate=weight, step=epochs),
                payload=lambda: [state.view(np.uint8).data],
                receive=lambda sock, header, patience: sock.receive(average.view(np.uint8).data, patience),
            ),
            stands=True,
        )
        return average

    def look_up(self, lookup: np.ndarray, rows: np.ndarray) -> None:
        """Asks for rows of tables.

        Args:
            lookup: As it travels.
            rows: Bytes that they are received into.
        """
        self.connection.ask(
            Request(
                header=RequestHeader(kind=RequestKind.LOOKUP),
                payload=lambda: [lookup.data],
                receive=lambda sock, header, patience: sock.receive(rows.data, patience),
                more_bytes=lookup.nbytes,
                more_reply_bytes=rows.nbytes,
            )
        )

    def exchange(
        self,
        header: RequestHeader,
        update: np.ndarray | None,
        out: np.ndarray | None,
        of_tables: np.ndarray | None = None,
    ) -> RequestHeader:
        """Sends the part of an update, reads the part into ``out`` unless it holds the newest version, or both.

        Args:
            of_tables: What the push has of tables, as it travels, uint8; None where it has nothing.
        """
        encoded = tuple if update is None else _Encoding(self, update).views
        request = Request(
            header=header,
            payload=lambda: itertools.chain(encoded(), [] if of_tables is None else [of_tables.data]),
            more_bytes=0 if of_tables is None else of_tables.nbytes,
        )
        if out is None:
            return self.connection.ask(request)
        part = out

        def receive(sock: SocketIO, header: RequestHeader, patience: Patience) -> None:
            # Should the connection be lost in here, ``out`` is of no version.
            self._version = 0
            self._receive_weights(sock, part, patience)
            self._version = header.version

        header = replace(header, version=self._version)
        return self.connection.ask(replace(request, header=header, receive=receive))

    def _receive_weights(self, sock: SocketIO, out: np.ndarray, patience: Patience) -> None:
        for stripe in self._stripes:
            if self._pull_codec is None:
                sock.receive(out[stripe].view(np.uint8).data, patience)
                continue
            data = self._bounce[: stripe_bytes(self._pull_codec, stripe)]
            sock.receive(data.data, patience)
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


class ParallelCalls:
    """Does the same with each of several servers at a time; with one, in the calling thread."""

    def __init__(self, count: int) -> None:
        self._threads = None if count == 1 else ThreadPoolExecutor(count, thread_name_prefix="elephant-shard")

    def call(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Returns the function's result for each item; raises an error once all calls have ended."""
        if self._threads is None:
            return [function(item) for item in items]
        futures = [self._threads.submit(function, item) for item in items]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            # A lost position is an answer, and matters only where there was no failure.
            raise min(errors, key=lambda error: isinstance(error, PositionLost))
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads, once their calls have ended."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Reply of the servers to one request.

    Args:
        version: The version of the weights, of the server that is furthest behind.
        rate: The servers' learning rate; NaN where there is none.
        stop: Whether the fit is to end.
        modified: Whether weights came: there were newer ones than those of the last pull.
        refused: Whether a push was not finite, and nothing of it was applied.
    """

    version: int
    rate: float
    stop: bool
    modified: bool
    refused: bool


class ParameterServerClient:
    """All servers of a fit, as one flat vector that is pulled and pushed to.

    Every push is applied exactly once, however often connections and servers are lost meanwhile, as
    long as a worker that gets `PositionLost` repeats its steps from there on. One thread may use it at a time.

    Args:
        addresses: Host and port of each server, in the order of their parts.
        epoch_steps: Steps of the worker's epoch, which servers that apply pushes in rounds need to know.
        compression: How updates and weights travel: None, ``"bfloat16"``, ``"float16"``, ``"int8"`` or
            ``"int8:feedback"``. Updates that are pushed as int8 come back as bfloat16 weights.
        timeouts: ``connect_s`` to reach servers, again as well; ``collective_s`` for a server's silence.

    Attributes:
        position: The last step of the partition that all servers had applied when this worker came.
        waited_s: Seconds spent in exchanges.
        exchanges: Number of pulls, pushes and both in one.
        table_specs: Forms of the tables of which servers have rows.

    Raises:
        SupersededError: A newer attempt has come before.
        ConfigurationError: The servers keep a model of other shapes.
        UnsupportedError: The compression is one of ranks that reduce together.
        NetworkError: A server cannot be reached.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        token: bytes,
        run_id: str,
        layout: Layout,
        partition: int,
        attempt: int,
        epoch_steps: int = 0,
        compression: str | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        check_encoding(compression)
        self.waited_s = 0.0
        self.exchanges = 0
        self._compression = compression
        self._num_values = layout.num_values
        self._parts = layout.cut(len(addresses))
        self.table_specs = layout.table_specs
        self._stacks = stacks_of(layout.table_specs, len(addresses))
        self._using = threading.Lock()
        # What the last pull was written to.
        self._held: np.ndarray | None = None
        connections = connect_all(
            addresses, layout, token=token, run_id=run_id, role=Role.WORKER, compression=compression,
            partition=partition, attempt=attempt, epoch_steps=epoch_steps, timeouts=timeouts,
        )  # fmt: skip
        self._shards = [
            ShardClient(connection, compression, part.stop - part.start)
            for connection, part in zip(connections, self._parts, strict=True)
        ]
        self._together = ParallelCalls(len(addresses))
        self.position = self._whole_step()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to servers so far."""
        return sum(shard.connection.bytes_counted[0] for shard in self._shards)

    @property
    def bytes_received(self) -> int:
        """Bytes received from servers so far."""
        return sum(shard.connection.bytes_counted[1] for shard in self._shards)

    def pull(self, out: np.ndarray) -> Reply:
        """Reads the weights.

        Args:
            out: Float32 of shape (layout.num_values,). It is left as it is where it holds the last pull
                and nothing has been pushed by anyone since.

        Raises:
            PositionLost, SupersededError, ServerFailedError, NetworkError: As for ``push``.
        """
        return self._exchange(RequestHeader(kind=RequestKind.PULL), None, out)

    def push(self, update: np.ndarray, *, step: int, call: int = 0, rows: int = 0) -> Reply:
        """Has an update applied, exactly once, and returns when it was.

        Args:
            update: Float32 of shape (layout.num_values,).
            step: Number of the batch (the last one of a window) within the partition, from 1 on.
            call: Numbers several updates of one step, from 0 on.
            rows: Rows that the update is the mean of, for servers that apply pushes in rounds.

        Raises:
            ConfigurationError: An argument has another form.
            PositionLost: A server was restored to before a push that it had acknowledged; repeat from there on.
            SupersededError: A newer attempt of the partition has come.
            ServerFailedError: A server has given the fit up.
            NetworkError: A server cannot be reached.
        """
        return self._exchange(self._header_of(RequestKind.PUSH, update, step, call, rows), update, None)

    def look_up(self, numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns rows of tables, as some pushes have left them.

        Args:
            numbers: Of rows of each stack of tables (`elephant.tables.stack.stacks_of` as many parts as there are
                servers), int64 in ascending order, each there once.

        Returns:
            Rows of each stack, float32 of shape (numbers, width).

        Raises:
            PositionLost, SupersededError, ServerFailedError, NetworkError: As for ``push``.
        """
        parts, stacks = len(self._parts), self._stacks
        cuts = [cuts_of(own, parts) for own in numbers]
        found = [
            [
                np.empty((len(cut[part]), stack.specs[0].width), np.float32)
                for cut, stack in zip(cuts, stacks, strict=True)
            ]
            for part in range(parts)
        ]

        def ask(part: int) -> None:
            sizes = [array.nbytes for array in found[part]]
            received = np.empty(sum(sizes), np.uint8)
            self._shards[part].look_up(lookup_bytes(stacks, of_part(part, numbers, cuts)), received)
            for array, data in zip(found[part], np.split(received, np.cumsum(sizes)[:-1]), strict=True):
                array.reshape(-1).view(np.uint8)[:] = data

        with self._using:
            self._check_open()
            with self._asking():
                self._together.call(ask, range(parts))
        return of_parts_together(found, cuts)

    def push_pull(
        self,
        update: np.ndarray,
        out: np.ndarray,
        *,
        step: int,
        call: int = 0,
        rows: int = 0,
        contribution: TableContribution | None = None,
    ) -> Reply:
        """Does both, in this order, in one round trip.

        Args:
            update: As for ``push``.
            out: As for ``pull``; it may be the memory of the update.
            step: As for ``push``.
            call: As for ``push``.
            rows: As for ``push``.
            contribution: To rows of tables, which is applied with the update, or not at all.

        Raises:
            PositionLost, SupersededError, ServerFailedError, NetworkError: As for ``push``.
        """
        is_finite = contribution is None or contribution.is_finite
        header = self._header_of(RequestKind.PUSH_PULL, update, step, call, rows, is_finite=is_finite)
        return self._exchange(header, update, out, contribution)

    def average_state(self, state: np.ndarray, weight: float, epochs: int = 0) -> np.ndarray:
        """Sends state that is no weight, and returns its average over what all partitions have sent last.

        Args:
            state: Float64 of shape (num_state_values,).
            weight: What it counts, such as the partition's rows.
            epochs: Epochs that the worker has ended; servers that apply pushes in rounds wait for all workers' states.

        Raises:
            PositionLost, SupersededError, ServerFailedError, NetworkError: As for ``push``.
        """
        with self._using:
            self._check_open()
            try:
                return self._shards[0].average_state(state, weight, epochs)
            except PositionLost as lost:
                raise PositionLost(self._whole_step()) from lost

    def interrupt(self) -> None:
        """Ends an exchange that another thread waits for, with an error; what is left then is `close`."""
        for shard in self._shards:
            shard.connection.interrupt()

    def close(self, *, finished: bool) -> None:
        """Leaves the servers; does nothing where that was done.

        Raises:
            PositionLost: As for ``push``, and only when ``finished``: the connections stay open to repeat the steps.
            NetworkError: A server cannot be reached, so that it is not known whether it has all pushes.
        """
        if finished and self._shards:
            try:
                self._together.call(lambda shard: shard.connection.finish(), self._shards)
            except PositionLost as lost:
                raise PositionLost(self._whole_step()) from lost
            except BaseException:
                self.close(finished=False)
                raise
        for shard in self._shards:
            shard.connection.close_politely()
        self._shards = []
        self._together.close()

    def __enter__(self) -> ParameterServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(finished=False)

    def _exchange(
        self,
        header: RequestHeader,
        update: np.ndarray | None,
        out: np.ndarray | None,
        contribution: TableContribution | None = None,
    ) -> Reply:
        shares = [] if contribution is None else contribution.shares(len(self._parts))
        of_tables = [contribution_bytes(self._stacks, len(self.table_specs), share) for share in shares]

        def ask(shard: ShardClient, part: slice, place: int) -> RequestHeader:
            own_update, own_out = (None if array is None else array[part] for array in (update, out))
            return shard.exchange(header, own_update, own_out, of_tables[place] if of_tables else None)

        with self._using:
            if out is not None:
                self._check("out", out)
                self._aim(out)
            if update is not None and self._held is not None and np.may_share_memory(update, self._held):
                # Where the last pull was written to, an update has been made since.
                self._forget()
            with self._asking():
                triples = list(zip(self._shards, self._parts, range(len(self._parts)), strict=True))
                headers = self._together.call(lambda triple: ask(*triple), triples)
            self.exchanges += 1
            return _combined(headers)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Counts the seconds of a question to all servers, and says what step all have where one has lost some."""
        began = time.monotonic()
        try:
            yield
        except PositionLost as lost:
            raise PositionLost(self._whole_step()) from lost
        finally:
            self.waited_s += time.monotonic() - began

    def _whole_step(self) -> int:
        """The last step that every server has: one that was restored may have more than one that is being caught up."""
        return min(shard.connection.whole_step for shard in self._shards)

    def _aim(self, out: np.ndarray) -> None:
        """Forgets which versions are held unless ``out`` is the memory of the last pull."""
        held, self._held = self._held, out
        if held is None or held.ctypes.data != out.ctypes.data:
            self._forget()

    def _forget(self) -> None:
        for shard in self._shards:
            shard.forget()

    def _header_of(
        self, kind: RequestKind, update: np.ndarray, step: int, call: int, rows: int, *, is_finite: bool = True
    ) -> RequestHeader:
        """Returns the header of a push: no server applies its part when another part is not finite."""
        self._check("update", update)
        if step < 1 or call < 0:
            raise ConfigurationError(
                f"step and call: expected a step from 1 on and a call from 0 on. Received: {step!r} and {call!r}."
            )
        several = len(self._shards) > 1
        is_finite = is_finite and (not several or arrives_finite(update, self._compression))
        flags = Flags.NONE if is_finite else Flags.CONDEMNED
        return RequestHeader(kind=kind, step=step, call=call, rate=float(rows), flags=flags)

    def _check(self, name: str, array: np.ndarray) -> None:
        fits = array.dtype == np.float32 and array.shape == (self._num_values,) and array.flags.c_contiguous
        if not fits:
            raise ConfigurationError(
                f"{name}: expected a contiguous float32 array of shape ({self._num_values},), as Layout.zeros makes "
                f"one. Received: {array.dtype} of shape {array.shape}."
            )
        self._check_open()

    def _check_open(self) -> None:
        if not self._shards:
            raise ConfigurationError("Expected open connections to parameter servers. Received: closed ones.")


def _combined(headers: Sequence[RequestHeader]) -> Reply:
    return Reply(
        version=min(header.version for header in headers),
        rate=headers[0].rate,
        stop=any(header.flags & Flags.STOP for header in headers),
        modified=any(header.flags & Flags.MODIFIED for header in headers),
        refused=any(header.status is Status.REFUSED for header in headers),
    )
