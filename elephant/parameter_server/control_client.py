"""The driver's connections to the parameter servers of its fit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elephant.config import Timeouts
from elephant.errors import ProtocolError
from elephant.net.addresses import Address
from elephant.net.frames import fits, raw_view, require
from elephant.net.socket_io import Patience, SocketIO
from elephant.parameter_server.connection import Connection, Request, connect_all
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.protocol import RequestHeader, RequestKind, Role, decode_statistics
from elephant.parameter_server.server import FIELDS, combined
from elephant.parameter_server.tables import MARKED, NOT_FINITE, TablesWanted, require_markers, whole_tables
from elephant.tables.stored import TablePlaces


@dataclass(frozen=True, kw_only=True, eq=False)
class FetchedModel:
    """All that servers keep of a model.

    Args:
        values: The weights, float32 of shape (layout.num_values,).
        slots: The optimizer's vectors, of the same shape each.
        iterations: Updates that the optimizer has made, in this fit and before it.
        state: The averaged state, float64.
        tables: Of each table rows and slots by name, or references to them, where they were wanted.
    """

    values: np.ndarray
    slots: tuple[np.ndarray, ...]
    iterations: int
    state: np.ndarray
    tables: Sequence[dict[str, np.ndarray]] = ()


Ledger = dict[int, tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerState:
    """State of the servers from which a fit can go on.

    Args:
        fetched: What they keep of the model. All pushes of the ledgers are in it, whole, and no others.
        ledgers: For each server, by partition, the last step that was settled, its last call, and the highest call
            of any step.
        are_finite: Whether tables that servers have written have neither NaN nor infinity.
    """

    fetched: FetchedModel
    ledgers: tuple[Ledger, ...]
    are_finite: bool = True


class ControlClient:
    """Reads and steers the servers of a fit. Any thread may use it, one at a time.

    Args:
        addresses: Host and port of each server, in the order of their parts.
        timeouts: ``connect_s`` to reach servers, again as well; ``collective_s`` for a server's silence.
        require_alive: Called while a server is not reached; what it raises, where a server is known to be lost for
            good, ends the wait.

    Raises:
        ConfigurationError: The servers keep a model of other shapes.
        NetworkError: A server cannot be reached.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        token: bytes,
        run_id: str,
        layout: Layout,
        timeouts: Timeouts | None = None,
        require_alive: Callable[[], object] = lambda: None,
    ) -> None:
        self._layout = layout
        self._parts = layout.cut(len(addresses))
        self._using = threading.Lock()
        self._connections = connect_all(
            addresses,
            layout,
            token=token,
            run_id=run_id,
            role=Role.CONTROL,
            timeouts=timeouts,
            require_alive=require_alive,
        )

    def require_folders(self, table_places: TablePlaces) -> None:
        """Has all servers write to the folders of tables, and looks for what they have written; before any step.

        Raises:
            CheckpointError: A folder cannot be written to, or is another one where a server is.
        """
        if table_places.urls:
            marked = TablesWanted(places=table_places.of("begin"), action=MARKED)
            self.fetch(marked)
            require_markers(marked.places, len(self._connections))

    def fetch(self, wanted: TablesWanted | None = None) -> FetchedModel:
        """Reads everything. While workers push, stripes of a megabyte may be of different versions.

        Args:
            wanted: Of tables; None wants nothing.

        Raises:
            CheckpointError: A table cannot be written to its place.
            ServerFailedError: A server has given the fit up.
            NetworkError: A server cannot be reached.
        """
        return self._read(RequestKind.FETCH, wanted)[0]

    def keep(self, wanted: TablesWanted | None = None) -> ServerState:
        """Reads everything, as it is between two pushes at each server, and which pushes are in it.

        Args:
            wanted: Of tables; None wants nothing.

        Raises:
            CheckpointError: A table cannot be written to its place.
            ServerFailedError: A server has given the fit up.
            NetworkError: A server cannot be reached.
        """
        fetched, texts = self._read(RequestKind.KEEP, wanted)
        ledgers = [decode_statistics(text) for text in texts]
        not_finite = [ledger.pop(NOT_FINITE, False) for ledger in ledgers]
        return ServerState(fetched=fetched, ledgers=tuple(map(_push_log, ledgers)), are_finite=not any(not_finite))

    def _read(self, kind: RequestKind, wanted: TablesWanted | None) -> tuple[FetchedModel, list[bytes]]:
        num_slots = self._connections[0].welcome.num_slots
        vectors = [self._layout.zeros() for _ in range(1 + num_slots)]
        state = np.empty(self._connections[0].welcome.num_state_values)
        iterations, texts = 0, []
        wanted = wanted if self._layout.table_specs else None
        of_tables: list[list[np.ndarray]] = []
        with self._using:
            for place, (connection, part) in enumerate(zip(self._connections, self._parts, strict=True)):
                arrays = self._arrays_of(wanted, place)
                of_tables.append(arrays)
                tail = state[: connection.welcome.num_state_values]
                targets = [*(vector[part] for vector in vectors), tail]
                text = np.empty(connection.lengths.push_log if kind is RequestKind.KEEP else 0, np.uint8)
                request = b"" if wanted is None else wanted.to_bytes()
                targets += arrays
                iterations = self._ask(connection, RequestHeader(kind=kind), [*targets, text], request, arrays).step
                texts.append(text.tobytes())
        fetched = FetchedModel(
            values=vectors[0],
            slots=tuple(vectors[1:]),
            iterations=iterations,
            state=state,
            tables=() if wanted is None else whole_tables(self._layout.table_specs, wanted, of_tables),
        )
        return fetched, texts

    def _arrays_of(self, wanted: TablesWanted | None, place: int) -> list[np.ndarray]:
        """Returns arrays for what a server sends of tables."""
        return [] if wanted is None else wanted.arrays_of(self._layout.table_specs, place, len(self._connections))

    def pull(self, out: np.ndarray) -> None:
        """Reads the weights alone into ``out``, float32 of shape (layout.num_values,)."""
        with self._using:
            for connection, part in zip(self._connections, self._parts, strict=True):
                self._ask(connection, RequestHeader(kind=RequestKind.PULL), [out[part]])

    def statistics(self) -> dict[str, Any]:
        """Returns the servers' counts; see `elephant.parameter_server.server`."""
        with self._using:
            parts = []
            for connection in self._connections:
                text = np.empty(connection.lengths.statistics, np.uint8)
                self._ask(connection, RequestHeader(kind=RequestKind.STATISTICS), [text])
                part = decode_statistics(text.tobytes())
                require(part, FIELDS, "the statistics of a server")
                parts.append(part)
        return combined(parts)

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the updates to come; NaN goes back to that of the optimizer."""
        self._tell(RequestHeader(kind=RequestKind.SET_RATE, rate=rate))

    def stop(self) -> None:
        """Tells every worker, with the next reply that it gets, that the fit is to end."""
        self._tell(RequestHeader(kind=RequestKind.STOP))

    def open_epochs(self, count: int) -> None:
        """Lets servers that apply pushes in rounds apply those of the first epochs, and none of later ones."""
        self._tell(RequestHeader(kind=RequestKind.OPEN, step=count))

    def remind(self) -> None:
        """Tells servers that have come back from a snapshot what they were told after it: rate, epochs, and to stop."""
        # Whatever is asked: who was connected to a server that was lost connects anew, and says it all again.
        self.statistics()

    def close(self) -> None:
        """Leaves the servers; does nothing where that was done."""
        for connection in self._connections:
            connection.close_politely()
        self._connections = []

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, header: RequestHeader) -> None:
        with self._using:
            for connection in self._connections:
                connection.ask(Request(header=header), stands=True)

    def _ask(
        self,
        connection: Connection,
        header: RequestHeader,
        targets: Sequence[np.ndarray],
        wanted: bytes = b"",
        of_tables: Sequence[np.ndarray] = (),
    ) -> RequestHeader:
        def receive(sock: SocketIO, header: RequestHeader, patience: Patience) -> None:
            for target in targets:
                sock.receive(raw_view(target), patience)

        return connection.ask(
            Request(
                header=header,
                payload=lambda: [memoryview(wanted)] if wanted else [],
                receive=receive,
                more_bytes=len(wanted),
                more_reply_bytes=sum(array.nbytes for array in of_tables),
            )
        )


def _push_log(ledger: dict[str, Any]) -> Ledger:
    push_log = {}
    for partition, entry in ledger.items():
        if not (partition.isdecimal() and fits(entry, list[int]) and len(entry) == 3):
            raise ProtocolError(f"Expected step, call and highest call of a partition. Received: {partition}: {entry}.")
        push_log[int(partition)] = (entry[0], entry[1], entry[2])
    return push_log
