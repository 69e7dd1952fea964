"""Weights of one server: values, slots of the optimizer, averages, and the image of them that a snapshot keeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elephant.compression import Codec
from elephant.parameter_server.optimizers import Rule
from elephant.parameter_server.protocol import stripes
from elephant.parameter_server.tables import ServedTables

Contribution = tuple[float, np.ndarray]

# Stripes of an update from which on a second thread is worth waking.
_WORTH_HELP = 8


class Averages:
    """Last values of each partition, and their weighted average.

    Args:
        initial: Float64 of shape (num_state_values,): the average before anybody has sent anything.

    >>> averages = Averages(np.zeros(1))
    >>> averages.add(0, 1.0, np.array([2.0])), averages.add(1, 3.0, np.array([6.0]))
    (array([2.]), array([5.]))
    """

    def __init__(self, initial: np.ndarray, contributions: Mapping[int, Contribution] | None = None) -> None:
        self._initial = initial
        self._contributions = dict(contributions or {})
        self._lock = threading.Lock()

    def add(self, partition: int, weight: float, state: np.ndarray) -> np.ndarray:
        """Replaces a partition's contribution, where it is finite, and returns the average over all partitions.

        Args:
            state: Float64 of shape (num_state_values,).
        """
        with self._lock:
            if np.isfinite(weight) and weight > 0 and np.isfinite(state).all():
                self._contributions[partition] = (weight, state)
            return self._average()

    def average(self) -> np.ndarray:
        """Returns the average of what has been sent, float64 of shape (num_state_values,)."""
        with self._lock:
            return self._average()

    def contributions(self) -> dict[int, Contribution]:
        """Returns weight and state by partition."""
        with self._lock:
            return dict(self._contributions)

    def _average(self) -> np.ndarray:
        if not self._contributions:
            return self._initial.copy()
        # In the order of the partitions, so that the order in which they came does not show.
        parts = [self._contributions[partition] for partition in sorted(self._contributions)]
        total = sum(weight for weight, _ in parts)
        return np.sum([weight / total * state for weight, state in parts], axis=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class SnapshotImage:
    """Everything that a server needs to go on from where another one was.

    Args:
        values: The weights, float32 of shape (num_values,).
        slots: The rule's vectors, of the same shape; none means that they begin as the rule has them.
        state: The averaged state, float64 of shape (num_state_values,).
        iterations: Updates that the optimizer has made, in this fit and before it.
        updates: ... in this fit.
        entries: The fields of the ledger's entries by partition.
        contributions: Weight and state that each partition sent last.
        rate: The learning rate that was set; None leaves it to the rule.
        stopped: Whether the fit is to end.
        counts: What `elephant.parameter_server.server.Counters` has counted.
        staleness: How many pushes had which staleness.
        tables: The server's part of each table; None where it is as it is drawn.
    """

    values: np.ndarray
    slots: Sequence[np.ndarray] = ()
    state: np.ndarray
    iterations: int = 0
    updates: int = 0
    entries: dict[int, dict[str, int]] = field(default_factory=dict)
    contributions: dict[int, Contribution] = field(default_factory=dict)
    rate: float | None = None
    stopped: bool = False
    counts: dict[str, float] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    tables: ServedTables | None = None

    @property
    def sections(self) -> list[np.ndarray]:
        """The arrays, in the order in which they lie in the file."""
        states = [self.contributions[partition][1] for partition in sorted(self.contributions)]
        return [self.values, *self.slots, self.state, *states, *(self.tables.arrays if self.tables else [])]

    def facts(self) -> dict[str, Any]:
        """Returns everything that is no array, as JSON values."""
        return {
            "num_slots": len(self.slots),
            "iterations": self.iterations,
            "updates": self.updates,
            "entries": {str(partition): entry for partition, entry in self.entries.items()},
            "weights": [[partition, self.contributions[partition][0]] for partition in sorted(self.contributions)],
            "rate": self.rate,
            "stopped": self.stopped,
            "counts": self.counts,
            "staleness": self.staleness,
        }


class Store:
    """A part of the flat vector, and the vectors that the rule keeps besides.

    Several pushes may be applied while others pull: a stripe is locked while it is read
    or written, so that no reader sees half of an update of it, and no addition is lost.
    Different stripes may be of different versions.

    Args:
        values: Float32 of shape (num_values,); it is changed in place.
        slots: One vector of the same shape for each slot of the rule; changed in place.
        locked: Whether stripes are locked. Without locks additions are lost now and then, and
            what is read may be torn (Recht et al. 2011, Hogwild!).
    """

    def __init__(
        self,
        rule: Rule,
        values: np.ndarray,
        slots: Sequence[np.ndarray],
        *,
        first_value: int = 0,
        locked: bool = True,
    ) -> None:
        self.rule = rule
        self.values = values
        self.slots = tuple(slots)
        self.stripes = tuple(stripes(len(values)))
        self._first_value = first_value
        self._locks: list[Any] = [threading.Lock() if locked else contextlib.nullcontext() for _ in self.stripes]

    def apply(self, scalars: Any, update: np.ndarray, factor: float = 1.0) -> None:
        """Applies one update.

        Args:
            scalars: What the rule's ``begin`` returned.
            update: Float32 of shape (num_values,); it is overwritten.
        """
        # A faster thread takes more of them: taking the next number is one step of the interpreter.
        turns = iter(range(len(self.stripes)))
        if len(self.stripes) < _WORTH_HELP:
            return self._apply_stripes(turns, scalars, update, factor)
        # The worker waits for its reply meanwhile: there is a core to spare.
        with ThreadPoolExecutor(1, thread_name_prefix="elephant-store") as helper:
            helping = helper.submit(self._apply_stripes, turns, scalars, update, factor)
            self._apply_stripes(turns, scalars, update, factor)
            helping.result()

    def _apply_stripes(self, turns: Iterator[int], scalars: Any, update: np.ndarray, factor: float) -> None:
        with np.errstate(all="ignore"):
            for index in turns:
                stripe = self.stripes[index]
                part = update[stripe]
                if factor != 1.0:
                    np.multiply(part, np.float32(factor), out=part)
                slots = [slot[stripe] for slot in self.slots]
                with self._locks[index]:
                    self.rule.update(scalars, self._first_value + stripe.start, self.values[stripe], part, slots)

    def read(self, index: int, out: np.ndarray, vector: int = 0) -> None:
        """Copies one stripe.

        Args:
            out: Float32, as long as the stripe.
            vector: Of which vector: 0 for the weights, 1 for the first slot, and so on.
        """
        source = (self.values, *self.slots)[vector]
        with self._locks[index]:
            np.copyto(out, source[self.stripes[index]])

    def encode(self, index: int, codec: Codec, out: np.ndarray) -> None:
        """Encodes one stripe of the weights into ``out``, uint8."""
        stripe = self.stripes[index]
        with self._locks[index], np.errstate(all="ignore"):
            codec.encode(self.values[stripe], out, offset=stripe.start)
