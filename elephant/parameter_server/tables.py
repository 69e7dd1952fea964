"""Tables of one server: its part of each, and how rows of them travel between it and its clients.

A lookup, and what a push has of tables behind its update, name rows by their numbers in each stack of tables::

    counts     uint32, one for each stack
    tables     uint8, one for each table: whether the push updates it (pushes alone)
    numbers    of rows of each stack, in its type, in ascending order
    gradients  of these rows of each stack, float32 (pushes alone)

The reply to a lookup has the rows of each stack, float32.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from elephant.errors import CheckpointError, ProtocolError
from elephant.net.frames import raw_view, require
from elephant.parameter_server.layout import ServerSpec
from elephant.storage.folder import folder_at
from elephant.tables.stack import Stack, StackPart, TableContribution, checked_contribution, checked_numbers, stacks_of
from elephant.tables.stored import TablePlace, writing_to
from elephant.tables.table import TablePart, TableSpec

# What becomes of tables that have a place: they are left where they are, or written there, or nothing is but a file
# that shows who can write there; then other tables stay as well.
LEFT, WRITTEN, MARKED = "left", "written", "marked"
# In the ledger of a state whose tables are not finite.
NOT_FINITE = "not finite"
_COUNT, _FLAG, _VALUE = np.dtype("<u4"), np.dtype(np.uint8), np.dtype("<f4")
Fill = Callable[[memoryview], None]


def empty_arrays(spec: ServerSpec) -> list[dict[str, np.ndarray]]:
    """Returns arrays of the sizes of a server's part of each table, by name."""
    return [
        {name: np.empty(one.shape_of(name, spec.part, spec.parts), _VALUE) for name in one.array_names}
        for one in spec.layout.table_specs
    ]


def bytes_of_tables(spec: ServerSpec) -> int:
    """Returns how many bytes a server's part of all tables has."""
    shapes = [one.shape_of(name, spec.part, spec.parts) for one in spec.layout.table_specs for name in one.array_names]
    return _VALUE.itemsize * sum(rows * width for rows, width in shapes)


@dataclass(frozen=True, kw_only=True)
class TablesWanted:
    """Request of the driver for what servers have of tables.

    Args:
        places: Of each table; None has it sent.
        action: What becomes of those that have a place.
    """

    places: Sequence[TablePlace | None]
    action: str = LEFT

    def to_bytes(self) -> bytes:
        """Returns the bytes that it travels as."""
        places = [None if place is None else asdict(place) for place in self.places]
        return json.dumps({"places": places, "action": self.action}).encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray, table_specs: Sequence[TableSpec]) -> TablesWanted:
        """Reads the form of `to_bytes`; raises ProtocolError for anything else."""
        try:
            fields = json.loads(bytes(data))
            require(fields, {"places": list[dict[str, str] | None], "action": str}, "a request for tables")
            places = [None if one is None else TablePlace(**one) for one in fields["places"]]
        except (ValueError, TypeError, AttributeError) as error:
            raise ProtocolError(f"Expected a request for tables. Received: {bytes(data[:40])!r} ({error}).") from None
        if len(places) != len(table_specs) or fields["action"] not in (LEFT, WRITTEN, MARKED):
            raise ProtocolError(f"Expected places of {len(table_specs)} tables. Received: {bytes(data[:40])!r}.")
        return cls(places=places, action=fields["action"])

    def are_sent(self, table: int) -> bool:
        """Returns whether the reply has the arrays of a table."""
        return self.action != MARKED and self.places[table] is None

    def arrays_of(self, table_specs: Sequence[TableSpec], part: int, parts: int) -> list[np.ndarray]:
        """Returns arrays of the sizes of what a server sends, in its order."""
        return [
            np.empty(spec.shape_of(name, part, parts), _VALUE)
            for table, spec in enumerate(table_specs)
            if self.are_sent(table)
            for name in spec.array_names
        ]


def lookup_bytes(stacks: Sequence[Stack], numbers: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a lookup as it travels, uint8.

    Args:
        numbers: Of rows of one part, of each stack; int64 in ascending order.
    """
    counts = np.array([len(one) for one in numbers], _COUNT)
    travelling = [one.astype(stack.dtype) for stack, one in zip(stacks, numbers, strict=True)]
    arrays: list[np.ndarray] = [counts, *travelling]
    return np.concatenate([_bytes_of(one) for one in arrays])


def contribution_bytes(stacks: Sequence[Stack], num_tables: int, contribution: TableContribution) -> np.ndarray:
    """Returns a contribution as it travels behind the update of a push, uint8."""
    counts = np.array([len(one) for one in contribution.numbers], _COUNT)
    flags = np.zeros(num_tables, _FLAG)
    flags[list(contribution.tables)] = 1
    travelling = [one.astype(stack.dtype) for stack, one in zip(stacks, contribution.numbers, strict=True)]
    arrays: list[np.ndarray] = [counts, flags, *travelling, *contribution.gradients]
    return np.concatenate([_bytes_of(one) for one in arrays])


class ServedTables:
    """A server's part of each table.

    Args:
        spec: Of the server.
        arrays: Rows and slots of each whole table by name, or references to them, of which the part is taken; those not
            given are the first.
        are_cut: Whether they are those of this part.
    """

    def __init__(
        self, spec: ServerSpec, arrays: Sequence[Mapping[str, np.ndarray]] = (), *, are_cut: bool = False
    ) -> None:
        self._specs, self._part = spec.layout.table_specs, spec.part
        self._stacks = stacks_of(self._specs, spec.parts)
        given = arrays or [{} for _ in self._specs]
        self._stack_parts = [
            StackPart(stack, spec.part, [given[table] for table in stack.tables], are_cut=are_cut)
            for stack in self._stacks
        ]
        self._lock: Any = threading.Lock() if spec.locked else contextlib.nullcontext()

    @property
    def parts(self) -> list[TablePart]:
        """Part of each table."""
        found = {
            table: part
            for stack, one in zip(self._stacks, self._stack_parts, strict=True)
            for table, part in zip(stack.tables, one.parts, strict=True)
        }
        return [found[table] for table in range(len(self._specs))]

    @property
    def arrays(self) -> list[np.ndarray]:
        """Arrays of all tables, the server's own, in the order of `empty_arrays`."""
        return [part.arrays[name] for part in self.parts for name in part.spec.array_names]

    @property
    def most_bytes(self) -> int:
        """Bytes of a push's part about tables, at most: a lookup has less."""
        widths = [_VALUE.itemsize * stack.specs[0].width + np.dtype(stack.dtype).itemsize for stack in self._stacks]
        rows = [sum(spec.rows_of(self._part, stack.parts) for spec in stack.specs) for stack in self._stacks]
        fixed = len(self._stacks) * _COUNT.itemsize + len(self._specs)
        return fixed + sum(count * width for count, width in zip(rows, widths, strict=True)) if self._specs else 0

    def received_lookup(self, fill: Fill, num_bytes: int) -> list[np.ndarray]:
        """Returns the numbers of a lookup, of each stack.

        Args:
            fill: Receives so many bytes as a view has.
            num_bytes: Of the whole lookup, as its header has announced them.

        Raises:
            ProtocolError: It is none.
        """
        counts = self._received_counts(fill, num_bytes, per_row=0, fixed=0)
        return self._received_numbers(fill, counts)

    def received_contribution(self, fill: Fill, num_bytes: int) -> TableContribution:
        """Returns the contribution of a push; arguments and errors as of `received_lookup`."""
        counts = self._received_counts(fill, num_bytes, per_row=_VALUE.itemsize, fixed=len(self._specs))
        flags = np.empty(len(self._specs), _FLAG)
        fill(flags.data)
        numbers = self._received_numbers(fill, counts)
        gradients = []
        for stack, count in zip(self._stacks, counts, strict=True):
            gradients.append(np.empty((count, stack.specs[0].width), _VALUE))
            fill(raw_view(gradients[-1]))
        tables = tuple(np.flatnonzero(flags).tolist())
        return checked_contribution(self._stacks, self._part, TableContribution(tables, numbers, gradients))

    def take(self, numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns rows, float32 of shape (numbers, width) for each stack."""
        with self._lock:
            return [one.take(given) for one, given in zip(self._stack_parts, numbers, strict=True)]

    def update(self, contribution: TableContribution, factor: float = 1.0) -> None:
        """Updates the rows of a contribution; each gradient counts so much."""
        gradients = contribution.gradients
        if factor != 1.0:
            gradients = [one * np.float32(factor) for one in gradients]
        with self._lock:
            for one, numbers, given in zip(self._stack_parts, contribution.numbers, gradients, strict=True):
                one.update(numbers, given, contribution.tables)

    def put(self, wanted: TablesWanted) -> bool:
        """Writes what is wanted at a place; returns whether that is finite.

        Nobody may push meanwhile.

        Raises:
            CheckpointError: A folder cannot be written to.
        """
        is_finite = True
        for place, part in zip(wanted.places, self.parts, strict=True):
            if place is not None and wanted.action == WRITTEN:
                part.write(place)
                is_finite = is_finite and part.is_finite
            elif place is not None and wanted.action == MARKED:
                with writing_to(place.url):
                    folder_at(place.url).write(_marker_of(place, self._part), lambda file: file.write(b"here"))
        return is_finite

    def sent(self, wanted: TablesWanted) -> list[np.ndarray]:
        """Returns copies of the arrays that are wanted."""
        with self._lock:
            sent_parts = [part for table, part in enumerate(self.parts) if wanted.are_sent(table)]
            return [part.arrays[name].copy() for part in sent_parts for name in part.spec.array_names]

    def _received_counts(self, fill: Fill, num_bytes: int, *, per_row: int, fixed: int) -> list[int]:
        """Returns the number of rows of each stack; raises ProtocolError unless all they come to was announced."""
        counts = np.empty(len(self._stacks), _COUNT)
        if counts.nbytes + fixed > num_bytes:
            raise ProtocolError(f"Expected rows of {len(self._stacks)} stacks. Received: {num_bytes} bytes announced.")
        fill(raw_view(counts))
        pairs = list(zip(self._stacks, counts.tolist(), strict=True))
        rows = sum(count * (np.dtype(one.dtype).itemsize + per_row * one.specs[0].width) for one, count in pairs)
        if counts.nbytes + fixed + rows != num_bytes:
            raise ProtocolError(
                f"Expected {num_bytes} bytes of rows, as announced. Received: numbers of {counts.tolist()} rows, which "
                f"are {counts.nbytes + fixed + rows} bytes."
            )
        return [count for _, count in pairs]

    def _received_numbers(self, fill: Fill, counts: Sequence[int]) -> list[np.ndarray]:
        numbers = []
        for stack, count in zip(self._stacks, counts, strict=True):
            travelling = np.empty(count, stack.dtype)
            fill(raw_view(travelling))
            numbers.append(checked_numbers(stack, self._part, travelling))
        return numbers


def whole_tables(
    table_specs: Sequence[TableSpec], wanted: TablesWanted, received: Sequence[Sequence[np.ndarray]]
) -> list[dict[str, np.ndarray]]:
    """Returns arrays of each table by name, or references to where they are written.

    Args:
        received: What each server has sent, in their order.
    """
    tables, streams = [], [iter(arrays) for arrays in received]
    for table, (spec, place) in enumerate(zip(table_specs, wanted.places, strict=True)):
        arrays = {}
        for name in spec.array_names:
            is_divided = spec.is_divided(name)
            if place is not None:
                stored = place.table(name, spec.shape_of(name), len(received) if is_divided else 1)
                arrays[name] = stored.to_array()
            elif wanted.are_sent(table):
                arrays[name] = np.empty(spec.shape_of(name), np.float32)
                step = len(received) if is_divided else 1
                for part, stream in enumerate(streams):
                    # Of what is not divided, all have the same.
                    arrays[name][part % step :: step] = next(stream)
        tables.append(arrays)
    return tables


def require_markers(places: Sequence[TablePlace | None], parts: int) -> None:
    """Raises CheckpointError unless this process sees what all servers have written to places; removes it."""
    for place in places:
        if place is None:
            continue
        folder, markers = folder_at(place.url), [_marker_of(place, part) for part in range(parts)]
        missing = [part for part, marker in enumerate(markers) if not folder.has(marker)]
        for marker in markers:
            with contextlib.suppress(OSError):
                folder.remove(marker)
        if missing:
            raise CheckpointError(
                f"ShardedEmbedding(path={place.url!r}): expected one folder that the driver and all parameter servers "
                f"see. Received: one in which the driver does not see what server {missing[0]} has written. Name a "
                "folder of a file system that is mounted on all hosts, or of an object store."
            )


def _marker_of(place: TablePlace, part: int) -> str:
    """Returns the name of the file by which a server shows that it can write to a place."""
    return f"{place.state}.{part}"


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
