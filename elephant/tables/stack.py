"""Tables of one form, stacked: their rows are looked up and updated together, as those of one table.

A step of a model with many tables takes about as many operations of numpy as one with a single table, on longer arrays.
The name is that of Keras RS and of SparseCores, which stack tables as well.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from elephant.errors import ProtocolError
from elephant.tables.table import ROWS, RULES, TablePart, TableSpec

# Numbers of rows that travel in four bytes.
_SHORT_NUMBERS = 1 << 32


@dataclass(frozen=True)
class Stack:
    """Tables of one width and optimizer, one after the other.

    Their rows are numbered through. Each table begins with a multiple of the number of parts, so that a row is of part
    ``number % parts``, and is there the one of place ``number // parts``. A few numbers between two tables are none.

    Args:
        tables: Places of the tables among those of the model.
        specs: Their forms.
        parts: Number of parts of each.

    >>> stack = Stack((0, 4), (TableSpec(num_rows=5, width=2), TableSpec(num_rows=3, width=2)), 2)
    >>> stack.first_of(4), stack.has(np.array([0, 4, 8]), 0), stack.has(np.array([1, 5]), 1)
    (6, True, False)
    >>> stack.tables_of(np.array([6, 8]))
    {4}
    """

    tables: tuple[int, ...]
    specs: tuple[TableSpec, ...]
    parts: int

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Places within a part at which tables begin, and at which the last one ends; int64 of shape (tables + 1,)."""
        return np.cumsum([0, *(spec.rows_of(0, self.parts) for spec in self.specs)], dtype=np.int64)

    @property
    def dtype(self) -> type[np.integer]:
        """Type in which numbers of rows travel."""
        return np.uint32 if self.starts[-1] * self.parts <= _SHORT_NUMBERS else np.int64

    def first_of(self, table: int) -> int:
        """Returns the number of a table's first row."""
        return int(self.starts[self.tables.index(table)]) * self.parts

    def tables_of(self, numbers: np.ndarray) -> set[int]:
        """Returns the tables that have numbers, int64 in ascending order."""
        counts = np.diff(np.searchsorted(numbers, self.starts * self.parts))
        return {table for table, count in zip(self.tables, counts, strict=True) if count}

    def has(self, numbers: np.ndarray, part: int) -> bool:
        """Returns whether numbers, int64, are of rows of a part, in ascending order and each there once."""
        if not len(numbers):
            return True
        firsts = self.starts[:-1] * self.parts
        ends = firsts + [spec.num_rows for spec in self.specs]
        begins, stops = np.searchsorted(numbers, firsts), np.searchsorted(numbers, ends)
        are_rows = begins[0] == 0 and stops[-1] == len(numbers) and bool((begins[1:] == stops[:-1]).all())
        return are_rows and bool((np.diff(numbers) > 0).all() and (numbers % self.parts == part).all())


def stacks_of(specs: Sequence[TableSpec], parts: int) -> list[Stack]:
    """Returns tables in stacks, the most that have one form in each."""
    members: dict[tuple[int, str, float], list[int]] = {}
    for table, spec in enumerate(specs):
        members.setdefault((spec.width, spec.rule, spec.learning_rate), []).append(table)
    return [Stack(tuple(tables), tuple(specs[table] for table in tables), parts) for tables in members.values()]


def cuts_of(numbers: np.ndarray, parts: int) -> list[np.ndarray]:
    """Returns the places of each part's numbers among those of a stack.

    >>> [places.tolist() for places in cuts_of(np.array([0, 3, 4]), 2)]
    [[0, 2], [1]]
    """
    owners = numbers % parts
    return [np.flatnonzero(owners == part) for part in range(parts)]


def of_part(part: int, arrays: Sequence[np.ndarray], cuts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Returns a part of an array of each stack.

    Args:
        cuts: `cuts_of` the numbers of each stack.
    """
    return [np.take(array, cut[part], axis=0) for array, cut in zip(arrays, cuts, strict=True)]


def of_parts_together(found: Sequence[Sequence[np.ndarray]], cuts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Returns an array of each stack, of those that each part has: the inverse of `of_part` for all parts."""
    together = []
    for stack, cut in enumerate(cuts):
        first = found[0][stack]
        whole = np.empty((sum(map(len, cut)), *first.shape[1:]), first.dtype)
        for part, places in enumerate(cut):
            whole[places] = found[part][stack]
        together.append(whole)
    return together


class TableContribution(NamedTuple):
    """Gradients of a step, of one rank.

    Args:
        tables: Those that the step updates, be it in no row of this rank's batch; in ascending order.
        numbers: Of rows of each stack, int64 in ascending order.
        gradients: Of these rows, float32 of shape (numbers, width) for each stack.
    """

    tables: tuple[int, ...]
    numbers: list[np.ndarray]
    gradients: list[np.ndarray]

    def shares(self, parts: int) -> list[TableContribution]:
        """Returns the contribution to each part."""
        cuts = [cuts_of(own, parts) for own in self.numbers]
        both = self.numbers, self.gradients
        return [
            TableContribution(self.tables, *(of_part(part, arrays, cuts) for arrays in both)) for part in range(parts)
        ]

    @property
    def is_finite(self) -> bool:
        """True if no gradient is infinite or not a number."""
        return all(bool(np.isfinite(one).all()) for one in self.gradients)


def checked_numbers(stack: Stack, part: int, numbers: np.ndarray) -> np.ndarray:
    """Returns numbers that have come from another process, int64; raises ProtocolError unless they are of a part."""
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ProtocolError(f"Expected numbers of shape (numbers,). Received: {numbers!r}.")
    numbers = numbers.astype(np.int64)
    if not stack.has(numbers, part):
        raise ProtocolError(
            f"Expected numbers of rows of part {part} of {stack.parts}, in ascending order. Received: others."
        )
    return numbers


def checked_contribution(stacks: Sequence[Stack], part: int, contribution: TableContribution) -> TableContribution:
    """Returns a contribution that has come from another process; raises ProtocolError unless it is to a part."""
    numbers = [checked_numbers(stack, part, one) for stack, one in zip(stacks, contribution.numbers, strict=True)]
    named = set().union(*(stack.tables_of(given) for stack, given in zip(stacks, numbers, strict=True)))
    known = {table for stack in stacks for table in stack.tables}
    if not named <= set(contribution.tables) <= known:
        raise ProtocolError(f"Expected tables that there are, with those of the rows. Received: {contribution.tables}.")
    for stack, given, one in zip(stacks, numbers, contribution.gradients, strict=True):
        expected = (len(given), stack.specs[0].width)
        if one.shape != expected or one.dtype != np.float32:
            raise ProtocolError(f"Expected float32 gradients of shape {expected}. Received: {one.dtype} {one.shape}.")
    return TableContribution(contribution.tables, numbers, list(contribution.gradients))


class StackPart:
    """One part of each table of a stack, in this process' memory.

    Args:
        part: Which of the parts.
        arrays: Rows and slots of each whole table by name, see `TablePart`.
        are_cut: Whether they are those of this part.

    Attributes:
        parts: Those of the tables, in their order.

    >>> spec = TableSpec(num_rows=4, width=1, rule="sgd", learning_rate=0.5, draw="constant", drawn=(1.0,))
    >>> part = StackPart(Stack((0,), (spec,), 1))
    >>> part.update(np.array([3, 1, 3]), np.array([[1.0], [2.0], [1.0]], np.float32), [0])
    >>> part.take(np.arange(4)).ravel().tolist()
    [1.0, 0.0, 1.0, 0.0]
    """

    def __init__(
        self,
        stack: Stack,
        part: int = 0,
        arrays: Sequence[Mapping[str, np.ndarray]] | None = None,
        *,
        are_cut: bool = False,
    ) -> None:
        self.stack, self.part = stack, part
        self._rule, self._rate = RULES[stack.specs[0].rule], np.float32(stack.specs[0].learning_rate)
        given = arrays or [{} for _ in stack.specs]
        made = (
            TablePart(spec, part, stack.parts, one, are_cut=are_cut)
            for spec, one in zip(stack.specs, given, strict=True)
        )
        if len(stack.specs) == 1:
            self.parts = list(made)
            self._arrays = self.parts[0].arrays
        else:
            self.parts, self._arrays = [], {}
            for place, one in enumerate(made):
                self._take_over(place, one)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Returns rows of this part, float32 of shape (numbers, width)."""
        return np.take(self._arrays[ROWS], numbers // self.stack.parts, axis=0)

    def update(self, numbers: np.ndarray, gradients: np.ndarray, tables: Sequence[int]) -> None:
        """Updates each touched row once, with the sum of its gradients, in the order in which they are given.

        Args:
            numbers: Of rows of this part; one may be there several times.
            gradients: float32 of shape (numbers, width).
            tables: Those of the model that are updated once more, be it in none of their rows.
        """
        scales = np.ones(len(self.parts), np.float32)
        if "updates" in self._arrays:
            self._arrays["updates"][np.isin(self.stack.tables, tables)] += 1
            scales[:] = [self._rule.scale(max(1, int(count))) for count in self._arrays["updates"][:, 0]]
        if not len(numbers):
            return
        groups = Groups.of(numbers)
        places = groups.numbers // self.stack.parts
        per_table = np.diff(np.searchsorted(places, self.stack.starts))
        slots = {name: np.take(self._arrays[name], places, axis=0) for name in self._row_slots}
        move = self._rule.move(slots, groups.sums(gradients), np.repeat(scales, per_table)[:, None])
        self._arrays[ROWS][places] -= self._rate * move
        for name, values in slots.items():
            self._arrays[name][places] = values

    @property
    def _row_slots(self) -> list[str]:
        return [name for name, slot in self._rule.slots.items() if slot.per_row != 0]

    def _take_over(self, place: int, table_part: TablePart) -> None:
        """Puts the arrays of a table's part among those of the stack, of which it has views from then on."""
        starts = self.stack.starts
        for name, array in table_part.arrays.items():
            is_divided = name == ROWS or name in self._row_slots
            if name not in self._arrays:
                rows = int(starts[-1]) if is_divided else len(self.stack.specs)
                self._arrays[name] = np.zeros((rows, array.shape[1]), np.float32)
            first = int(starts[place]) if is_divided else place
            own = self._arrays[name][first : first + len(array)]
            own[...] = array
            table_part.arrays[name] = own
        self.parts.append(table_part)


class Groups(NamedTuple):
    """Numbers that are equal, together.

    Args:
        numbers: Each once, in ascending order.
        order: Places of all numbers as they were given: those of the smallest first, and of equal ones in their order.
        firsts: Where in `order` the places of each number begin.

    >>> groups = Groups.of(np.array([7, 2, 7]))
    >>> groups.numbers.tolist(), groups.sums(np.array([[1.0], [2.0], [4.0]], np.float32)).ravel().tolist()
    ([2, 7], [2.0, 5.0])
    >>> groups.spread(np.array([[0.5], [1.5]])).ravel().tolist()
    [1.5, 0.5, 1.5]
    """

    numbers: np.ndarray
    order: np.ndarray
    firsts: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray) -> Groups:
        """Returns the groups of numbers, int64 and not negative.

        Rows of all tables times numbers of a step have to be less than 2 ** 62, as they are in any memory.
        """
        if not len(numbers):
            return cls(numbers, np.empty(0, np.int64), np.empty(0, np.int64))
        # Sorted with their places in the low bits, they take a fifth of the time of a stable argsort.
        bits = len(numbers).bit_length()
        keys = (numbers << bits) | np.arange(len(numbers))
        keys.sort()
        ordered = keys >> bits
        firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
        return cls(ordered[firsts], keys & ((1 << bits) - 1), firsts)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of each number's values, which are added in their order; of shape (numbers, width)."""
        ordered = np.take(values, self.order, axis=0)
        return ordered if len(self.firsts) == len(self.order) else np.add.reduceat(ordered, self.firsts, axis=0)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Returns the values of each number at the places at which it was given."""
        which = np.empty(len(self.order), np.int64)
        which[self.order] = np.repeat(np.arange(len(self.firsts)), np.diff(self.firsts, append=len(self.order)))
        return np.take(values, which, axis=0)
