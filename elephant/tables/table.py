"""One part of an embedding table: its rows, and what its optimizer remembers of them; and the optimizers.

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
        move: Takes the slots of the touched rows, which it changes, their gradients and a scale of each row; returns
            what is taken off the rows, times the learning rate.
        scale: Takes a count of the updates of a table so far, this one included.
    """

    slots: dict[str, Slot]
    move: Callable[[Slots, np.ndarray, np.ndarray], np.ndarray]
    scale: Callable[[int], float] = lambda count: 1.0


def _sgd(slots: Slots, gradients: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return gradients


def _adagrad(slots: Slots, gradients: np.ndarray, scales: np.ndarray) -> np.ndarray:
    slots["accumulator"][...] += np.square(gradients)
    return gradients / np.sqrt(slots["accumulator"] + np.float32(_EPSILON))


def _rowwise_adagrad(slots: Slots, gradients: np.ndarray, scales: np.ndarray) -> np.ndarray:
    slots["accumulator"][...] += np.mean(np.square(gradients), axis=1, keepdims=True)
    return gradients / np.sqrt(slots["accumulator"] + np.float32(_EPSILON))


def _lazy_adam(slots: Slots, gradients: np.ndarray, scales: np.ndarray) -> np.ndarray:
    mean, square = slots["momentum"], slots["velocity"]
    mean += (gradients - mean) * np.float32(1 - _BETA_1)
    square += (np.square(gradients) - square) * np.float32(1 - _BETA_2)
    return mean * scales / (np.sqrt(square) + np.float32(_EPSILON))


def _adam_scale(count: int) -> float:
    return math.sqrt(1 - _BETA_2**count) / (1 - _BETA_1**count)


# Adagrad: Duchi, Hazan & Singer 2011, in Keras' form; by rows: one accumulator of a row's mean square, as in DLRM
# (Naumov et al. 2019). Lazy Adam: Kingma & Ba 2015, in the order of section 2's end, on the touched rows alone, with a
# count of the table's updates.
RULES: dict[str, RowRule] = {
    "sgd": RowRule({}, _sgd),
    "adagrad": RowRule({"accumulator": Slot(None, _FIRST_SQUARE)}, _adagrad),
    "rowwise_adagrad": RowRule({"accumulator": Slot(1, _FIRST_SQUARE)}, _rowwise_adagrad),
    "lazy_adam": RowRule(
        {"momentum": Slot(None, 0.0), "velocity": Slot(None, 0.0), "updates": Slot(0, 0.0)}, _lazy_adam, _adam_scale
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

    @property
    def array_names(self) -> tuple[str, ...]:
        """Names of the rows and the slots, in the order in which they are kept and sent."""
        return (ROWS, *self.slots)

    def is_divided(self, name: str) -> bool:
        """Returns whether each part has values of its own of an array; of others all have the same."""
        return name == ROWS or self.slots[name].per_row != 0

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
        are_cut: Whether the arrays are those of the part.

    Attributes:
        arrays: Rows and slots by name: float32 of shape (rows, ...).
    """

    def __init__(
        self,
        spec: TableSpec,
        part: int = 0,
        parts: int = 1,
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        are_cut: bool = False,
    ) -> None:
        self.spec, self.part, self.parts = spec, part, parts
        self.arrays: dict[str, np.ndarray] = {}
        for name in spec.array_names:
            if arrays is not None and name in arrays and are_cut:
                self.arrays[name] = arrays[name]
            elif arrays is not None and name in arrays:
                given, stored = arrays[name], StoredTable.from_array(arrays[name])
                own = (part, parts) if spec.is_divided(name) else (0, 1)
                if stored is not None:
                    self.arrays[name] = stored.part(*own)
                else:
                    self.arrays[name] = np.array(given[own[0] :: own[1]], np.float32, order="C")
            elif name == ROWS:
                self.arrays[name] = spec.initial_rows(part, parts)
            else:
                self.arrays[name] = np.full(spec.shape_of(name, part, parts), spec.slots[name].first, np.float32)

    @property
    def is_finite(self) -> bool:
        """True if rows and slots have neither NaN nor infinity."""
        return all(bool(np.isfinite(array).all()) for array in self.arrays.values())

    def write(self, place: TablePlace) -> dict[str, StoredTable]:
        """Writes rows and slots; returns by name where all parts' are.

        Raises:
            CheckpointError: The folder cannot be written to.
        """
        stored = {}
        for name, array in self.arrays.items():
            is_divided = self.spec.is_divided(name)
            stored[name] = place.table(name, self.spec.shape_of(name), self.parts if is_divided else 1)
            if is_divided or self.part == 0:
                stored[name].write(self.part, array)
        return stored


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
