"""Tables of a model as one process sees them: all of their rows, wherever these are.

Gradients that come between two lookups belong to one step, however often the step looks rows up. They are summed, and
all tables are updated once when the next step begins to look up, or when somebody asks for a table.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elephant.errors import PeerLostError, ProtocolError, UnsupportedError
from elephant.net.addresses import Address
from elephant.net.deadline import Deadline
from elephant.net.frames import Message
from elephant.net.stream import Listener, Stream, connect
from elephant.tables.part_server import (
    BYE,
    FAILED,
    HELLO,
    PUSH,
    READ,
    STEP,
    PartServer,
    tables_context,
)
from elephant.tables.stack import (
    Groups,
    Stack,
    StackPart,
    TableContribution,
    cuts_of,
    of_part,
    of_parts_together,
    stacks_of,
)
from elephant.tables.stored import OpenedTable, StoredTable, TablePlace
from elephant.tables.table import ROWS, TablePart, TableSpec

# Of one message.
_MOST_BYTES = 1 << 26


class Tables(ABC):
    """Tables of one model, by their places among its layers.

    Args:
        specs: Their forms.
        stacks: Those of all tables.

    Attributes:
        updates_before_lookups: Whether the gradients of a step are applied when the next one begins to look up.
        error: The first error of a step, which a framework may replace by one of its own.
    """

    updates_before_lookups = True

    def __init__(self, specs: Sequence[TableSpec], stacks: Sequence[Stack]) -> None:
        self.specs = list(specs)
        self.error: BaseException | None = None
        self._stacks = list(stacks)
        self._pushed: set[int] = set()
        self._gradients: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in self._stacks]
        # Of the last lookup in each stack: its gradients have the same numbers, in most models.
        self._last_groups: list[tuple[np.ndarray, Groups]] = [_grouped([]) for _ in self._stacks]
        self._using = threading.RLock()
        # Where all tables are written, while somebody reads that.
        self._stored: list[dict[str, StoredTable]] = []

    def look_up(self, wanted: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Returns the rows of ids of tables, float32 of shape (ids, width) for each.

        Args:
            wanted: Tables, of which one may be there several times, and ids: int64 of shape (ids,), all of rows that
                there are.
        """
        with self._using:
            contribution = self._taken() if self.updates_before_lookups else None
            numbers = [self._numbers(stack, wanted) for stack in self._stacks]
            self._last_groups = [_grouped(one) for one in numbers]
            rows = self._rows_of([groups.numbers for _, groups in self._last_groups], contribution)
            found: dict[int, np.ndarray] = {}
            for stack, own, one, (_, groups) in zip(self._stacks, numbers, rows, self._last_groups, strict=True):
                ends = np.cumsum([len(numbers) for numbers in own])[:-1]
                places = [place for place, (table, _) in enumerate(wanted) if table in stack.tables]
                found.update(zip(places, np.split(groups.spread(one), ends), strict=False))
            return [found[place] for place in range(len(wanted))]

    def push(self, given: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Takes gradients of the step that has looked ids up.

        Args:
            given: Tables, ids, and gradients of these rows, as they are to be added up over all ranks; float32 of shape
                (ids, width).
        """
        with self._using:
            self._pushed |= {table for table, _, _ in given}
            for stack, waiting in zip(self._stacks, self._gradients, strict=True):
                gradients = [one for table, _, one in given if table in stack.tables]
                if gradients:
                    numbers = self._numbers(stack, [(table, ids) for table, ids, _ in given])
                    waiting.append((np.concatenate(numbers), np.concatenate(gradients)))

    def flush(self) -> None:
        """Has all gradients applied that have come; returns before that has been done everywhere."""
        with self._using:
            contribution = self._taken()
            if contribution is not None:
                self._update(contribution)

    def whole(self, table: int, name: str) -> np.ndarray:
        """Returns a copy of all rows, or of a slot of the rule, with all gradients that have come."""
        with self._using:
            self.flush()
            return self._whole(table, name)

    def is_finite(self, table: int) -> bool:
        """Returns whether the part of a table that is here has neither NaN nor infinity."""
        with self._using:
            return self._part_here(table).is_finite

    @contextlib.contextmanager
    def noting_error(self) -> Iterator[None]:
        """Notes the error of a part of a step."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            raise

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

    @contextlib.contextmanager
    def left_out(self, places: Sequence[TablePlace | None]) -> Iterator[None]:
        """Has `state` refer to where nothing is written, for a ``with`` block; None leaves a table as it is."""
        self._stored = [
            {} if place is None else {name: place.table(name, spec.shape_of(name), 1) for name in spec.array_names}
            for place, spec in zip(places, self.specs, strict=True)
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

    def _taken(self) -> TableContribution | None:
        """Returns the sums of the gradients that wait, and takes them away; None where none have come."""
        if not self._pushed:
            return None
        contribution = TableContribution(tuple(sorted(self._pushed)), [], [])
        for stack, waiting, (last, of_last) in zip(self._stacks, self._gradients, self._last_groups, strict=True):
            numbers = np.concatenate([np.empty(0, np.int64), *(one for one, _ in waiting)])
            groups = of_last if np.array_equal(numbers, last) else Groups.of(numbers)
            gradients = [np.empty((0, stack.specs[0].width), np.float32), *(one for _, one in waiting)]
            contribution.numbers.append(groups.numbers)
            contribution.gradients.append(groups.sums(np.concatenate(gradients)))
            waiting.clear()
        self._pushed = set()
        return contribution

    def _numbers(self, stack: Stack, wanted: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Returns numbers of the ids of a stack's tables among those that are wanted."""
        return [stack.first_of(table) + ids for table, ids in wanted if table in stack.tables]

    @abstractmethod
    def _rows_of(self, numbers: Sequence[np.ndarray], contribution: TableContribution | None) -> list[np.ndarray]:
        """Returns rows of each stack after an update with a contribution.

        Args:
            numbers: Of the rows of each stack, in ascending order, each there once.
        """

    @abstractmethod
    def _update(self, contribution: TableContribution) -> None:
        """Updates the rows of a contribution."""

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
        # Each is made when it is used first, or read from a file, and so lies in arrays of its own.
        super().__init__(specs, [Stack((table,), (spec,), 1) for table, spec in enumerate(specs)])
        self._given = [*arrays, *({} for _ in specs[len(arrays) :])]
        self._stack_parts: dict[int, StackPart] = {}
        self._opened: dict[int, OpenedTable] = {}

    def own_arrays(self, table: int) -> dict[str, np.ndarray]:
        """Returns copies of rows and slots by name, or references to them; nothing of what is as it is drawn."""
        with self._using:
            if table in self._stack_parts or table in self._pushed:
                return {name: self.whole(table, name) for name in self.specs[table].array_names}
            return {name: np.array(given) for name, given in self._given[table].items()}

    def state(self, table: int, name: str) -> np.ndarray:
        is_changed = self._stored or table in self._stack_parts or table in self._pushed
        given = None if is_changed else self._given[table].get(name)
        return super().state(table, name) if given is None else np.array(given)

    def _rows_of(self, numbers: Sequence[np.ndarray], contribution: TableContribution | None) -> list[np.ndarray]:
        if contribution is not None:
            self._update(contribution)
        return [self._rows_here(table, own) for table, own in enumerate(numbers)]

    def _rows_here(self, table: int, ids: np.ndarray) -> np.ndarray:
        if not len(ids):
            return np.empty((0, self.specs[table].width), np.float32)
        stored = StoredTable.from_array(self._given[table].get(ROWS))
        if table not in self._stack_parts and stored is not None:
            if table not in self._opened:
                self._opened[table] = stored.opened()
            return self._opened[table].take(ids)
        return self._stack_part(table).take(ids)

    def _update(self, contribution: TableContribution) -> None:
        for table in contribution.tables:
            self._stack_part(table).update(contribution.numbers[table], contribution.gradients[table], [table])

    def _whole(self, table: int, name: str) -> np.ndarray:
        stored = StoredTable.from_array(self._given[table].get(name))
        if table not in self._stack_parts and stored is not None:
            return stored.part(0, 1)
        return self._part_here(table).arrays[name].copy()

    def _part_here(self, table: int) -> TablePart:
        return self._stack_part(table).parts[0]

    def _stack_part(self, table: int) -> StackPart:
        if table not in self._stack_parts:
            self._stack_parts[table] = StackPart(self._stacks[table], 0, [self._given[table]])
            self._given[table] = {}
            self._opened.pop(table, None)
        return self._stack_parts[table]


class ZeroTables(Tables):
    """Tables whose rows are all zeros, and learn nothing: for a look at what a model computes of them.

    >>> tables = ZeroTables([TableSpec(num_rows=10**9, width=2)])
    >>> tables.look_up([(0, np.array([7, 10**8]))])[0].tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        super().__init__(specs, stacks_of(specs, 1))

    def _rows_of(self, numbers: Sequence[np.ndarray], contribution: TableContribution | None) -> list[np.ndarray]:
        widths = [stack.specs[0].width for stack in self._stacks]
        return [np.zeros((len(own), width), np.float32) for own, width in zip(numbers, widths, strict=True)]

    def _update(self, contribution: TableContribution) -> None:
        """Leaves them."""

    def _whole(self, table: int, name: str) -> np.ndarray:
        return np.zeros(self.specs[table].shape_of(name), np.float32)

    def _part_here(self, table: int) -> TablePart:
        raise UnsupportedError("Expected rows of a table. Received: a look at a model without them.")


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
        super().__init__(specs, stacks_of(specs, world_size))
        stack_parts = [StackPart(stack, rank, [arrays[table] for table in stack.tables]) for stack in self._stacks]
        self._rank, self._world_size = rank, world_size
        self._token, self._run_id, self._wait_s = token, run_id, wait_s
        self._round = 0
        self._streams: dict[int, Stream] = {}
        self._sent = 0
        self.waited_s = 0.0
        self.share: Callable[[], float | None] = lambda: None
        self._server = PartServer(stack_parts, world_size, listener, token=token, run_id=run_id, wait_s=wait_s)

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

    def look_up(self, wanted: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        with self._using:
            began = time.monotonic()
            try:
                with self.noting_error():
                    return super().look_up(wanted)
            finally:
                self.waited_s += time.monotonic() - began

    def push(self, given: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Takes gradients of the mean over this rank's rows of the step."""
        share = self.share()
        if share is not None:
            # Of rows that stand in for others there is nothing to add up.
            end = None if share else 0
            super().push([(table, ids[:end], one[:end] * np.float32(share)) for table, ids, one in given])

    def flush(self) -> None:
        with self.noting_error():
            super().flush()

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

    def _rows_of(self, numbers: Sequence[np.ndarray], contribution: TableContribution | None) -> list[np.ndarray]:
        cuts = [cuts_of(own, self._world_size) for own in numbers]
        wanted = [of_part(rank, numbers, cuts) for rank in range(self._world_size)]
        self._share_out(STEP, contribution, wanted)
        found = {self._rank: self._server.take(self._round, wanted[self._rank])}
        for rank in self._streams:
            found[rank] = list(self._received(rank, len(self._stacks)))
        return of_parts_together([found[rank] for rank in range(self._world_size)], cuts)

    def _update(self, contribution: TableContribution) -> None:
        self._share_out(PUSH, contribution, [[] for _ in range(self._world_size)])

    def _share_out(self, kind: str, contribution: TableContribution | None, wanted: Sequence[list[np.ndarray]]) -> None:
        """Gives each rank its rows' part of a contribution, and the numbers that are wanted of it.

        Args:
            wanted: Of each rank, for each stack.
        """
        tables, shares = [], None
        if contribution is not None:
            self._round += 1
            tables, shares = list(contribution.tables), contribution.shares(self._world_size)
        for rank in self._streams:
            arrays = self._travelling(wanted[rank])
            if shares is not None:
                arrays = [*self._travelling(shares[rank].numbers), *shares[rank].gradients, *arrays]
            self._send(rank, kind, {"round": self._round, "tables": tables}, tuple(arrays))
        if shares is not None:
            self._server.contribute(self._rank, self._round, shares[self._rank])

    def _whole(self, table: int, name: str) -> np.ndarray:
        spec, number = self.specs[table], self._round
        whole = np.empty(spec.shape_of(name), np.float32)
        if not spec.is_divided(name):
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
                    (found,) = self._received(rank, 1)
                part[first : first + count] = found
        return whole

    def _part_here(self, table: int) -> TablePart:
        return self._server.part(table, self._round)

    def _travelling(self, numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [own.astype(stack.dtype) for stack, own in zip(self._stacks, numbers, strict=False)]

    def _send(self, rank: int, kind: str, fields: Mapping[str, Any], arrays: tuple[np.ndarray, ...]) -> None:
        with _naming(rank):
            self._streams[rank].send(Message(kind=kind, fields=fields, arrays=arrays), self._sending())
        self._sent += sum(array.nbytes for array in arrays)

    def _received(self, rank: int, count: int) -> tuple[np.ndarray, ...]:
        with _naming(rank):
            message = self._streams[rank].receive(Deadline(self._wait_s, f"Waiting for rank {rank}'s part of a table"))
        if message.kind == FAILED:
            raise PeerLostError(str(message.fields.get("text")))
        if len(message.arrays) != count:
            raise ProtocolError(f"Expected {count} arrays of rank {rank}. Received: {message.kind!r}.")
        return message.arrays

    def _sending(self) -> Deadline:
        return Deadline(self._wait_s, "Sending to another rank's tables")


def _grouped(numbers: Sequence[np.ndarray]) -> tuple[np.ndarray, Groups]:
    """Returns numbers together, and their groups."""
    together = np.concatenate([np.empty(0, np.int64), *numbers])
    return together, Groups.of(together)


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Names the rank whose connection is lost."""
    try:
        yield
    except PeerLostError as error:
        raise PeerLostError(f"Rank {rank} is gone, which has a part of each table: {error}") from error
