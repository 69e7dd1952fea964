"""Tables of a model as one process sees them: all of their rows, wherever these are.

Gradients that come between two lookups of a table belong to one step, however often the step looks rows up in it. They
are summed, and the table is updated once when the next step begins to look up, or when somebody asks for the table.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from elephant.errors import PeerLostError, ProtocolError
from elephant.net.addresses import Address
from elephant.net.deadline import Deadline
from elephant.net.frames import Message
from elephant.net.stream import Listener, Stream, connect
from elephant.tables.part_server import BYE, FAILED, HELLO, PUSH, READ, STEP, Contribution, PartServer, tables_context
from elephant.tables.stored import OpenedTable, StoredTable, TablePlace
from elephant.tables.table import ROWS, Slot, TablePart, TableSpec, sums_by_id

Result = TypeVar("Result")
# Of one message.
_MOST_BYTES = 1 << 26
# Rows whose numbers travel in four bytes.
_SHORT_ROWS = 1 << 32


class Tables(ABC):
    """Tables of one model, by their places among its layers."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self.specs = list(specs)
        self._contributions: list[list[Contribution]] = [[] for _ in specs]
        self._using = threading.RLock()
        # Where all tables are written, while somebody reads that.
        self._stored: list[dict[str, StoredTable]] = []

    def look_up(self, table: int, ids: np.ndarray) -> np.ndarray:
        """Returns the rows of ids, float32 of shape (ids, width).

        Args:
            ids: int64 of shape (ids,), all of rows that there are.
        """
        with self._using:
            unique, places = np.unique(ids, return_inverse=True)
            return self._rows_of(table, unique, self._taken(table))[places]

    def push(self, table: int, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Takes gradients of the step that has looked ids up.

        Args:
            gradients: Those of the rows, as they are to be added up over all ranks; float32 of shape (ids, width).
        """
        with self._using:
            self._contributions[table].append((ids, gradients))

    def flush(self) -> None:
        """Has all gradients applied that have come; returns before that has been done everywhere."""
        with self._using:
            for table in range(len(self.specs)):
                contribution = self._taken(table)
                if contribution is not None:
                    self._update(table, *contribution)

    def whole(self, table: int, name: str) -> np.ndarray:
        """Returns a copy of all rows, or of a slot of the rule, with all gradients that have come."""
        with self._using:
            self.flush()
            return self._whole(table, name)

    @contextlib.contextmanager
    def stored_at(self, places: Sequence[TablePlace | None]) -> Iterator[None]:
        """Writes the parts that are here, with all gradients that have come; all ranks do.

        In the ``with`` block `state` refers to what was written, of which the others' parts may not be there yet.

        Args:
            places: One for each table; None leaves it unwritten.

        Raises:
            CheckpointError: The folder cannot be written to.
        """
        with self._using:
            self.flush()
            self._stored = [
                {} if place is None else self._part_here(table).write(place) for table, place in enumerate(places)
            ]
        try:
            yield
        finally:
            self._stored = []

    def state(self, table: int, name: str) -> np.ndarray:
        """Returns a copy of all rows, or of a slot, or a reference to where they lie.

        See `elephant.tables.stored.StoredTable`.
        """
        stored = self._stored[table] if self._stored else {}
        return stored[name].to_array() if stored else self.whole(table, name)

    def _taken(self, table: int) -> Contribution | None:
        """Returns the sums of the gradients that wait, by id, and takes them away; None where none have come."""
        pending, self._contributions[table] = self._contributions[table], []
        if not pending:
            return None
        ids, gradients = (np.concatenate([one[place] for one in pending]) for place in range(2))
        return sums_by_id(ids, gradients)

    @abstractmethod
    def _rows_of(self, table: int, ids: np.ndarray, contribution: Contribution | None) -> np.ndarray:
        """Returns the rows of ids in ascending order, each there once, after an update with a contribution."""

    @abstractmethod
    def _update(self, table: int, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Updates the rows of ids in ascending order, each there once."""

    @abstractmethod
    def _whole(self, table: int, name: str) -> np.ndarray:
        """Returns a copy of all rows, or of a slot of the rule."""

    @abstractmethod
    def _part_here(self, table: int) -> TablePart:
        """Returns the part of a table that this process has, after all updates so far."""


class LocalTables(Tables):
    """Tables of which this process has all rows: in memory, or until they are changed where ranks have written them.

    Args:
        specs: Their forms.
        arrays: Rows and slots of each by name, or references to them; those not given are the first.
    """

    def __init__(self, specs: Sequence[TableSpec], arrays: Sequence[Mapping[str, np.ndarray]] = ()) -> None:
        super().__init__(specs)
        self._given = [*arrays, *({} for _ in specs[len(arrays) :])]
        self._parts: dict[int, TablePart] = {}
        self._opened: dict[int, OpenedTable] = {}

    def own_arrays(self, table: int) -> dict[str, np.ndarray]:
        """Returns copies of rows and slots by name, or references to them; nothing of what is as it is drawn."""
        with self._using:
            if table in self._parts or self._contributions[table]:
                return {name: self.whole(table, name) for name in (ROWS, *self.specs[table].slots)}
            return {name: np.array(given) for name, given in self._given[table].items()}

    def state(self, table: int, name: str) -> np.ndarray:
        is_changed = self._stored or table in self._parts or self._contributions[table]
        given = None if is_changed else self._given[table].get(name)
        return super().state(table, name) if given is None else np.array(given)

    def _rows_of(self, table: int, ids: np.ndarray, contribution: Contribution | None) -> np.ndarray:
        if contribution is not None:
            self._update(table, *contribution)
        if table not in self._parts and (stored := StoredTable.from_array(self._given[table].get(ROWS))) is not None:
            if table not in self._opened:
                self._opened[table] = stored.opened()
            return self._opened[table].take(ids)
        return self._part_here(table).take(ids)

    def _update(self, table: int, ids: np.ndarray, gradients: np.ndarray) -> None:
        self._part_here(table).update(ids, gradients)

    def _whole(self, table: int, name: str) -> np.ndarray:
        stored = StoredTable.from_array(self._given[table].get(name))
        if table not in self._parts and stored is not None:
            return stored.opened().part()
        return self._part_here(table).arrays[name].copy()

    def _part_here(self, table: int) -> TablePart:
        if table not in self._parts:
            self._parts[table] = TablePart(self.specs[table], arrays=self._given[table])
            self._given[table] = {}
            self._opened.pop(table, None)
        return self._parts[table]


class RankTables(Tables):
    """Tables whose rows are divided over the ranks of a fit; each has a part in a server of its own.

    All ranks take the same steps: a step's gradients of all of them are applied together. Lookups that no gradient
    comes back for, as those of a validation, each rank may do as often as it likes.

    Args:
        specs: Their forms, the same on all ranks.
        arrays: Rows and slots of each whole table by name, or references to them, of which this rank's part is taken;
            those not given are the first.
        rank: This rank.
        world_size: Number of ranks.
        listener: Where the others reach this one; owned from here on.
        token: The run's secret.
        run_id: The run.
        wait_s: Seconds that a rank may keep the others waiting.

    Attributes:
        waited_s: Seconds so far in which lookups waited for rows, and for other ranks' gradients.
        share: This rank's part of all rows of the step under way; None out of a step, where gradients are nobody's.
        error: The first error of a call, which a framework may replace by one of its own.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        arrays: Sequence[Mapping[str, np.ndarray]],
        *,
        rank: int,
        world_size: int,
        listener: Listener,
        token: bytes,
        run_id: str,
        wait_s: float,
    ) -> None:
        super().__init__(specs)
        parts = [TablePart(spec, rank, world_size, one) for spec, one in zip(specs, arrays, strict=True)]
        self._rank, self._world_size = rank, world_size
        self._token, self._run_id, self._wait_s = token, run_id, wait_s
        self._rounds = [0] * len(specs)
        self._streams: dict[int, Stream] = {}
        self._sent = 0
        self.waited_s = 0.0
        self.share: Callable[[], float | None] = lambda: None
        self.error: Exception | None = None
        self._server = PartServer(parts, world_size, listener, token=token, run_id=run_id, wait_s=wait_s)

    @property
    def address(self) -> Address:
        """Host and port at which other ranks reach this one."""
        return self._server.address

    @property
    def bytes_sent(self) -> int:
        """Bytes of ids, rows and gradients that went from this rank to others."""
        return self._sent + self._server.bytes_sent

    def connect(self, addresses: Sequence[Address]) -> None:
        """Connects to the other ranks.

        Args:
            addresses: Of all ranks, in their order.
        """
        deadline = Deadline(self._wait_s, "Connecting to the other ranks' tables")
        for rank, address in enumerate(addresses):
            if rank != self._rank:
                stream = connect(address, self._token, tables_context(self._run_id), deadline)
                self._streams[rank] = stream
                stream.send(Message(kind=HELLO, fields={"rank": self._rank}), deadline)

    def look_up(self, table: int, ids: np.ndarray) -> np.ndarray:
        with self._using:
            began = time.monotonic()
            try:
                return self._noting(lambda: Tables.look_up(self, table, ids))
            finally:
                self.waited_s += time.monotonic() - began

    def push(self, table: int, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Takes gradients of the mean over this rank's rows of the step."""
        share = self.share()
        if share is not None:
            # Of rows that stand in for others there is nothing to add up.
            count = len(ids) if share else 0
            super().push(table, ids[:count], gradients[:count] * np.float32(share))

    def flush(self) -> None:
        self._noting(lambda: Tables.flush(self))

    def leave(self) -> None:
        """Waits until no rank needs the others any more; where a fit ends well."""
        self.flush()
        for stream in self._streams.values():
            stream.send(Message(kind=BYE), self._sending())
        self._server.await_others()

    def close(self) -> None:
        """Ends all connections and threads."""
        for stream in self._streams.values():
            stream.close()
        self._server.close()

    def _noting(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except Exception as error:
            self.error = self.error or error
            raise

    def _rows_of(self, table: int, ids: np.ndarray, contribution: Contribution | None) -> np.ndarray:
        number = self._next_round(table, contribution)
        cuts = self._cut(ids)
        push_cuts = None if contribution is None else self._cut(contribution[0])
        for rank in self._streams:
            arrays: tuple[np.ndarray, ...] = (self._travelling(table, ids[cuts[rank]]),)
            if contribution is not None and push_cuts is not None:
                arrays = (*self._contribution(table, contribution, push_cuts[rank]), *arrays)
            self._send(rank, STEP, {"table": table, "round": number}, arrays)
        if contribution is not None and push_cuts is not None:
            self._contribute(table, number, contribution, push_cuts[self._rank])
        rows = np.empty((len(ids), self.specs[table].width), np.float32)
        rows[cuts[self._rank]] = self._server.take(table, number, ids[cuts[self._rank]])
        for rank in self._streams:
            (found,) = self._received(rank)
            rows[cuts[rank]] = found
        return rows

    def _update(self, table: int, ids: np.ndarray, gradients: np.ndarray) -> None:
        contribution = ids, gradients
        number, cuts = self._next_round(table, contribution), self._cut(ids)
        for rank in self._streams:
            arrays = self._contribution(table, contribution, cuts[rank])
            self._send(rank, PUSH, {"table": table, "round": number}, arrays)
        self._contribute(table, number, contribution, cuts[self._rank])

    def _whole(self, table: int, name: str) -> np.ndarray:
        spec, number = self.specs[table], self._rounds[table]
        whole = np.empty(spec.shape_of(name), np.float32)
        slot = Slot(None, 0.0) if name == ROWS else spec.slots[name]
        if slot.per_row == 0:
            # All parts have the same.
            return self._server.values(table, number, name, 0, 1)
        step = max(1, _MOST_BYTES // (4 * whole.shape[1]))
        for rank in range(self._world_size):
            part = whole[rank :: self._world_size]
            for first in range(0, len(part), step):
                count = min(step, len(part) - first)
                if rank == self._rank:
                    found = self._server.values(table, number, name, first, count)
                else:
                    fields = {"table": table, "round": number, "name": name, "first": first, "count": count}
                    self._send(rank, READ, fields, ())
                    (found,) = self._received(rank)
                part[first : first + count] = found
        return whole

    def _part_here(self, table: int) -> TablePart:
        return self._server.part(table, self._rounds[table])

    def _next_round(self, table: int, contribution: Contribution | None) -> int:
        self._rounds[table] += contribution is not None
        return self._rounds[table]

    def _cut(self, ids: np.ndarray) -> list[np.ndarray]:
        """Returns the places of each rank's ids among these."""
        owners = ids % self._world_size
        return [np.flatnonzero(owners == rank) for rank in range(self._world_size)]

    def _contribution(self, table: int, contribution: Contribution, places: np.ndarray) -> Contribution:
        ids, gradients = contribution
        return self._travelling(table, ids[places]), gradients[places]

    def _contribute(self, table: int, number: int, contribution: Contribution, places: np.ndarray) -> None:
        self._server.contribute(table, self._rank, number, contribution[0][places], contribution[1][places])

    def _travelling(self, table: int, ids: np.ndarray) -> np.ndarray:
        return ids.astype(np.uint32) if self.specs[table].num_rows <= _SHORT_ROWS else ids

    def _send(self, rank: int, kind: str, fields: Mapping[str, Any], arrays: tuple[np.ndarray, ...]) -> None:
        with _naming(rank):
            self._streams[rank].send(Message(kind=kind, fields=fields, arrays=arrays), self._sending())
        self._sent += sum(array.nbytes for array in arrays)

    def _received(self, rank: int) -> tuple[np.ndarray, ...]:
        with _naming(rank):
            message = self._streams[rank].receive(Deadline(self._wait_s, f"Waiting for rank {rank}'s part of a table"))
        if message.kind == FAILED:
            raise PeerLostError(str(message.fields.get("text")))
        if len(message.arrays) != 1:
            raise ProtocolError(f"Expected one array of rank {rank}. Received: {message.kind!r}.")
        return message.arrays

    def _sending(self) -> Deadline:
        return Deadline(self._wait_s, "Sending to another rank's tables")


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Names the rank whose connection is lost."""
    try:
        yield
    except PeerLostError as error:
        raise PeerLostError(f"Rank {rank} is gone, which has a part of each table: {error}") from error
