"""One part of an embedding table: its rows, what its optimizer remembers of them, and one update for each touched row.

Row i of a table of N parts is row i // N of part i mod N, so that frequent ids, which often are the small ones, fall on
all of them. The initial rows are drawn in blocks of all parts' rows: they are the same whatever N is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from elephant.errors import ConfigurationError
from elephant.tables.stored import StoredTable, TablePlace

# Rows that are drawn from one generator.
_BLOCK_ROWS = 4096
# Those of Keras' optimizers of these names.
_EPSILON = 1e-7
_FIRST_SQUARE = 0.1
_BETA_1, _BETA_2 = 0.9, 0.999
# Deviations, as in Keras.
_TRUNCATED_AT = 2.0

ROWS = "embeddings"
Slots = Mapping[str, np.ndarray]


class Slot(NamedTuple):
    """An array that a rule remembers.

    Args:
        per_row: Values of each row; None is one for each of the row's own, zero is one for the whole table.
        first: The value to begin with.
    """

    per_row: int | None
    first: float


class RowRule(NamedTuple):
    """An optimizer of rows, each of which it updates by itself.

    Args:
        slots: Arrays that it remembers, by name.
        move: Takes the slots of the touched rows, which it changes, their gradients and a count of the updates so far,
            this one included; returns what is taken off the rows, times the learning rate.
    """

    slots: dict[str, Slot]
    move: Callable[[Slots, np.ndarray, int], np.ndarray]


def _sgd(slots: Slots, gradients: np.ndarray, count: int) -> np.ndarray:
    return gradients


def _adagrad(slots: Slots, gradients: np.ndarray, count: int) -> np.ndarray:
    slots["accumulator"][...] += np.square(gradients)
    return gradients / np.sqrt(slots["accumulator"] + np.float32(_EPSILON))


def _rowwise_adagrad(slots: Slots, gradients: np.ndarray, count: int) -> np.ndarray:
    slots["accumulator"][...] += np.mean(np.square(gradients), axis=1, keepdims=True)
    return gradients / np.sqrt(slots["accumulator"] + np.float32(_EPSILON))


def _lazy_adam(slots: Slots, gradients: np.ndarray, count: int) -> np.ndarray:
    mean, square = slots["momentum"], slots["velocity"]
    mean += (gradients - mean) * np.float32(1 - _BETA_1)
    square += (np.square(gradients) - square) * np.float32(1 - _BETA_2)
    scale = math.sqrt(1 - _BETA_2**count) / (1 - _BETA_1**count)
    return mean * np.float32(scale) / (np.sqrt(square) + np.float32(_EPSILON))


# Adagrad: Duchi, Hazan & Singer 2011, in Keras' form; by rows: one accumulator of a row's mean square, as in DLRM
# (Naumov et al. 2019). Lazy Adam: Kingma & Ba 2015, in the order of section 2's end, on the touched rows alone, with a
# count of the table's updates.
RULES: dict[str, RowRule] = {
    "sgd": RowRule({}, _sgd),
    "adagrad": RowRule({"accumulator": Slot(None, _FIRST_SQUARE)}, _adagrad),
    "rowwise_adagrad": RowRule({"accumulator": Slot(1, _FIRST_SQUARE)}, _rowwise_adagrad),
    "lazy_adam": RowRule(
        {"momentum": Slot(None, 0.0), "velocity": Slot(None, 0.0), "updates": Slot(0, 0.0)}, _lazy_adam
    ),
}


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """Form of a table.

    Args:
        num_rows: Rows of all parts.
        width: Values of a row.
        rule: A key of `RULES`.
        learning_rate: Of the rule.
        draw: ``uniform`` between two values; ``normal`` of a mean and a deviation, or ``truncated_normal``, of which
            none is further than two deviations from the mean; or ``constant``.
        drawn: Those values.
        seed: Of the initial rows.
    """

    num_rows: int
    width: int
    rule: str = "adagrad"
    learning_rate: float = 0.01
    draw: str = "uniform"
    drawn: tuple[float, ...] = (-0.05, 0.05)
    seed: int = 0

    @property
    def slots(self) -> dict[str, Slot]:
        """Arrays that its rule remembers."""
        return RULES[self.rule].slots

    def rows_of(self, part: int, parts: int) -> int:
        """Returns how many rows a part has.

        >>> [TableSpec(num_rows=5, width=2).rows_of(part, 2) for part in range(2)]
        [3, 2]
        """
        return -(-(self.num_rows - part) // parts)

    def shape_of(self, name: str, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """Returns the shape of a part's rows, or of a slot.

        >>> spec = TableSpec(num_rows=5, width=3, rule="lazy_adam")
        >>> spec.shape_of("velocity"), spec.shape_of("velocity", 1, 2), spec.shape_of("updates")
        ((5, 3), (2, 3), (1, 1))
        """
        slot = Slot(None, 0.0) if name == ROWS else self.slots[name]
        if slot.per_row == 0:
            return 1, 1
        return self.rows_of(part, parts), self.width if slot.per_row is None else slot.per_row

    def initial_rows(self, part: int = 0, parts: int = 1) -> np.ndarray:
        """Returns the rows of a part before any update, float32.

        >>> spec = TableSpec(num_rows=9000, width=2, seed=3)
        >>> whole = spec.initial_rows()
        >>> all(np.array_equal(spec.initial_rows(part, 3), whole[part::3]) for part in range(3))
        True
        """
        rows = np.empty((self.rows_of(part, parts), self.width), np.float32)
        for first in range(0, self.num_rows, _BLOCK_ROWS):
            offset = (part - first) % parts
            block = self._block(first)[offset::parts]
            place = (first + offset) // parts
            rows[place : place + len(block)] = block
        return rows

    def _block(self, first: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, first // _BLOCK_ROWS]))
        shape = (min(_BLOCK_ROWS, self.num_rows - first), self.width)
        if self.draw == "uniform":
            low, high = self.drawn
            return np.float32(low) + np.float32(high - low) * generator.random(shape, np.float32)
        if self.draw in ("normal", "truncated_normal"):
            mean, deviation = self.drawn
            values = generator.standard_normal(shape, np.float32)
            while self.draw == "truncated_normal" and (far := np.abs(values) > _TRUNCATED_AT).any():
                values[far] = generator.standard_normal(int(far.sum()), np.float32)
            return np.float32(mean) + np.float32(deviation) * values
        return np.full(shape, self.drawn[0], np.float32)


class TablePart:
    """Rows of one part, in this process' memory, and what the rule remembers of them.

    Args:
        part: Which of the parts.
        parts: How many there are.
        arrays: Rows and slots of the whole table by name, or references to them, of which the part is taken; those not
            given are the first.

    Attributes:
        arrays: Rows and slots by name: float32 of shape (rows, ...).

    >>> part = TablePart(TableSpec(num_rows=4, width=1, rule="sgd", learning_rate=0.5, draw="constant", drawn=(1.0,)))
    >>> part.update(np.array([3, 1, 3]), np.array([[1.0], [2.0], [1.0]], np.float32))
    >>> part.take(np.arange(4)).ravel().tolist()
    [1.0, 0.0, 1.0, 0.0]
    """

    def __init__(
        self, spec: TableSpec, part: int = 0, parts: int = 1, arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        self.spec, self.part, self.parts = spec, part, parts
        self.arrays: dict[str, np.ndarray] = {}
        for name in (ROWS, *spec.slots):
            if arrays is not None and name in arrays:
                given, stored = arrays[name], StoredTable.from_array(arrays[name])
                own = (part, parts) if name == ROWS or spec.slots[name].per_row != 0 else (0, 1)
                if stored is not None:
                    self.arrays[name] = stored.opened().part(*own)
                else:
                    self.arrays[name] = np.array(given[own[0] :: own[1]], np.float32, order="C")
            elif name == ROWS:
                self.arrays[name] = spec.initial_rows(part, parts)
            else:
                self.arrays[name] = np.full(spec.shape_of(name, part, parts), spec.slots[name].first, np.float32)

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Returns rows of this part, float32 of shape (ids, width).

        Args:
            ids: Of the whole table, all of this part.
        """
        return np.take(self.arrays[ROWS], ids // self.parts, axis=0)

    def write(self, place: TablePlace) -> dict[str, StoredTable]:
        """Writes rows and slots; returns by name where all parts' are.

        Raises:
            CheckpointError: The folder cannot be written to.
        """
        stored = {}
        for name, array in self.arrays.items():
            is_divided = name == ROWS or self.spec.slots[name].per_row != 0
            stored[name] = place.table(name, self.spec.shape_of(name), self.parts if is_divided else 1)
            if is_divided or self.part == 0:
                stored[name].write(self.part, array)
        return stored

    def update(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Updates each touched row once, with the sum of its gradients, in the order in which they are given.

        Args:
            ids: Of the whole table, all of this part; one may be there several times.
            gradients: float32 of shape (ids, width).
        """
        count = 0
        if "updates" in self.arrays:
            self.arrays["updates"] += 1
            count = int(self.arrays["updates"][0, 0])
        if not len(ids):
            return
        touched, sums = sums_by_id(ids, gradients)
        places = touched // self.parts
        rule = RULES[self.spec.rule]
        slots = {name: self.arrays[name][places] for name, slot in rule.slots.items() if slot.per_row != 0}
        move = rule.move(slots, sums, count)
        self.arrays[ROWS][places] -= np.float32(self.spec.learning_rate) * move
        for name, values in slots.items():
            self.arrays[name][places] = values


def sums_by_id(ids: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids without repetition, in ascending order, and the sum of the gradients of each, in the order given.

    >>> ids, sums = sums_by_id(np.array([7, 2, 7]), np.array([[1.0], [2.0], [4.0]], np.float32))
    >>> ids.tolist(), sums.ravel().tolist()
    ([2, 7], [2.0, 5.0])
    """
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1)) if len(ids) else np.empty(0, np.intp)
    if len(firsts) == len(ids):
        return ordered, gradients[order]
    return ordered[firsts], np.add.reduceat(gradients[order], firsts, axis=0)


def initializer_of(given: Any) -> tuple[str, tuple[float, ...]]:
    """Returns `TableSpec.draw` and `TableSpec.drawn` for an initializer of Keras, or for its name.

    Raises:
        ConfigurationError: It is another one.

    >>> initializer_of("uniform"), initializer_of("zeros")
    (('uniform', (-0.05, 0.05)), ('constant', (0.0,)))
    """
    config = given.get_config() if hasattr(given, "get_config") else {}
    names = {"uniform": "RandomUniform", "normal": "RandomNormal", "zeros": "Zeros", "ones": "Ones"}
    kind = type(given).__name__ if config or not isinstance(given, str) else names.get(given, given)
    if kind in ("RandomUniform", "random_uniform"):
        return "uniform", (config.get("minval", -0.05), config.get("maxval", 0.05))
    if kind in ("RandomNormal", "random_normal"):
        return "normal", (config.get("mean", 0.0), config.get("stddev", 0.05))
    if kind in ("TruncatedNormal", "truncated_normal"):
        return "truncated_normal", (config.get("mean", 0.0), config.get("stddev", 0.05))
    if kind in ("Zeros", "Ones", "Constant"):
        return "constant", (float(config.get("value", kind == "Ones")),)
    raise ConfigurationError(
        "embeddings_initializer: expected 'uniform', 'normal', 'zeros', 'ones', or keras.initializers.RandomUniform, "
        f"RandomNormal, TruncatedNormal or Constant, whose rows can be drawn part by part. Received: {given!r}."
    )
