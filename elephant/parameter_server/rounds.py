"""Rounds: the contributions of all partitions to one step, added up and applied as one update when the last has come.

Centralized synchronous training: Dean et al. 2012 name it as what Downpour SGD does without, and TensorFlow calls it
central storage. A round has its number in the epoch, because partitions may have different numbers of steps; one is
absent from the steps beyond its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elephant.errors import ProtocolError
from elephant.parameter_server.protocol import RequestHeader
from elephant.parameter_server.push_log import Entry

# Contributions of a round are held apart, and added in the order of the partitions, up to so many bytes.
MOST_HELD_BYTES = 256_000_000
_LOOK_S = 0.2
_FLOAT32_BYTES = 4

Key = tuple[float, int]
# Of a partition that takes no part any more.
_NEVER: Key = (float("inf"), 0)


@dataclass(frozen=True, eq=False)
class Contribution:
    """Contribution of one partition to the round that is open.

    Args:
        rows: Rows that the gradient is the mean of; zero where it was not finite, and does not count.
        entry: What the log of pushes had of the partition before.
        total: The gradient times the rows, float32; None where it does not count, or was added to those of others.
    """

    rows: float
    entry: Entry
    total: np.ndarray | None


class Rounds:
    """Open round of one server, and who is still missing.

    A round is applied when every partition that has such a step in its epoch has contributed, and when the driver has
    opened the epoch. Nothing of an open round is in a snapshot: nobody was told that it was applied.

    Args:
        num_partitions: Workers of the fit.
        num_values: Length of the server's part of the weights.
        first_epoch: The epoch that the fit begins with, from zero.
        entries: What a log of pushes has of each partition.
        most_held_bytes: Contributions of one round take so much memory at most; larger ones are added up as they come.

    >>> rounds = Rounds(2, 1, 0, {})
    >>> for partition in (0, 1):
    ...     rounds.enter(partition, steps=1, done=0)
    >>> rounds.open_epochs(1)
    >>> rounds.add(1, 1, 3.0, np.array([5.0], np.float32), Entry())
    >>> rounds.take() is None, rounds.may_go_on(1)
    (True, False)
    >>> rounds.add(0, 1, 1.0, np.array([1.0], np.float32), Entry())
    >>> rounds.take(), rounds.close(), rounds.may_go_on(1)
    (array([4.], dtype=float32), None, True)
    """

    def __init__(
        self,
        num_partitions: int,
        num_values: int,
        first_epoch: int,
        entries: Mapping[int, Entry],
        *,
        most_held_bytes: int = MOST_HELD_BYTES,
    ) -> None:
        self._partitions = range(num_partitions)
        self._num_values = num_values
        self._first_epoch = first_epoch
        self._keeps = num_partitions * num_values * _FLOAT32_BYTES <= most_held_bytes
        self._steps: dict[int, int] = {}
        # Steps of the whole fit that each partition has contributed to.
        self._done: dict[int, int] = {}
        self._finished: set[int] = set()
        self._contributions: dict[int, Contribution] = {}
        self._vectors: dict[int, np.ndarray] = {}
        self._sum: np.ndarray | None = None
        self._adding = threading.Lock()
        self._epochs = 0
        # Epochs after which each partition has sent its state.
        self._states: dict[int, int] = {}
        self._released = self._is_taken = False
        # The round that is open, None until all partitions are known; and who has not contributed to it.
        self._key: Key | None = None
        self._missing: set[int] = set()
        self._changed = threading.Condition()
        for partition, entry in entries.items():
            if entry.epoch_steps is not None:
                self.enter(partition, entry.epoch_steps, entry.step)

    def steps_of(self, partition: int) -> int | None:
        """Returns the steps of a partition's epoch, as far as they are known."""
        return self._steps.get(partition)

    def enter(self, partition: int, steps: int, done: int) -> None:
        """Notes a worker that has come: the steps of its epoch, and those of the whole fit that the log knows of."""
        with self._changed:
            self._steps[partition] = steps
            self._done[partition] = max(done, self._first_epoch * steps, self._done.get(partition, 0))
            self._finished.discard(partition)
            self._look()

    def finish(self, partition: int) -> None:
        """Notes that a worker has done all of its steps: no round waits for it."""
        with self._changed:
            self._finished.add(partition)
            self._look()

    def open_epochs(self, count: int) -> None:
        """Lets the rounds of the first epochs be applied."""
        with self._changed:
            self._epochs = max(self._epochs, count)

    def release(self) -> None:
        """Lets all workers go on without what they wait for, because the fit is to end."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def check(self, push: RequestHeader) -> None:
        """Raises ProtocolError for a push that belongs to no round."""
        if push.call:
            raise ProtocolError(
                "aggregation='server': expected one update for each batch. Received: a train_step that makes "
                f"{push.call + 1} or more. Use aggregation='allreduce'."
            )
        if not push.rate >= 1:
            raise ProtocolError(f"Expected a push with the number of its rows. Received: {push.rate} rows.")
        next_step = self._done.get(push.partition, 0) + 1
        if push.step > next_step:
            raise ProtocolError(
                f"Expected step {next_step} of partition {push.partition}, because no batch is left out of a round. "
                f"Received: step {push.step}."
            )

    def add(self, partition: int, step: int, rows: float, update: np.ndarray, entry: Entry) -> None:
        """Takes a partition's contribution to its next round.

        Args:
            step: Number of the batch within the partition, over the whole fit, from 1 on.
            rows: Rows of the batch; zero leaves the gradient out.
            update: Their gradient, float32 of shape (num_values,); it is overwritten.
            entry: What the log of pushes had of the partition before.
        """
        total = None
        if rows:
            np.multiply(update, np.float32(rows), out=update)
            if self._keeps:
                total = self._held(partition, update)
            else:
                self._add_up(update)
        with self._changed:
            self._done[partition] = step
            self._contributions[partition] = Contribution(rows, entry, total)
            self._missing.discard(partition)

    def take(self) -> np.ndarray | None:
        """Returns the mean gradient over all rows of the open round if it is complete; then ``close`` is to be called.

        Returns:
            Float32 of shape (num_values,), which may be overwritten; empty where no contribution counts. None where
            somebody is missing, the epoch is not open, or another thread has taken it.
        """
        with self._changed:
            if (
                self._is_taken
                or self._key is None
                or not self._contributions
                or self._missing
                or self._key[0] >= self._epochs
            ):
                return None
            self._is_taken = True
        return self._mean()

    def close(self) -> None:
        """Notes that the round that was taken has been applied: its workers go on."""
        with self._changed:
            self._contributions.clear()
            self._is_taken = False
            self._look()

    def may_go_on(self, partition: int) -> bool:
        """Returns whether all rounds before a worker's next one have been applied."""
        with self._changed:
            return self._may_go_on(partition)

    def wait(self, partition: int, timeout_s: float, given_up: Callable[[], bool]) -> bool:
        """Waits until a worker may go on; returns whether the wait has ended before its time."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while not self._may_go_on(partition) and not given_up():
                if time.monotonic() >= end:
                    return False
                self._changed.wait(_LOOK_S)
        return True

    def add_state(self, partition: int, epochs: int) -> None:
        """Notes that a worker has sent its state after so many epochs."""
        with self._changed:
            self._states[partition] = epochs
            self._changed.notify_all()

    def has_state(self, partition: int, epochs: int) -> bool:
        """Returns whether a worker, or one before it, has sent its state after so many epochs."""
        with self._changed:
            return self._states.get(partition, 0) >= epochs

    def wait_for_states(
        self, epochs: int, live: Callable[[], Sequence[int]], timeout_s: float, given_up: Callable[[], bool]
    ) -> bool:
        """Waits until all live workers with steps have sent their state after so many epochs.

        One that is lost meanwhile is not waited for: it has done its part in the epoch's rounds.

        Returns:
            Whether the wait has ended before its time.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while not (self._released or self._have_states(epochs, live()) or given_up()):
                if time.monotonic() >= end:
                    return False
                self._changed.wait(_LOOK_S)
        return True

    def _have_states(self, epochs: int, live: Sequence[int]) -> bool:
        return all(self._states.get(each, 0) >= epochs for each in live if self._steps.get(each))

    def unapplied(self) -> dict[int, Entry]:
        """Returns the entries of the log as they were before the open round, of the partitions that wait for it."""
        with self._changed:
            return {partition: contribution.entry for partition, contribution in self._contributions.items()}

    def _may_go_on(self, partition: int) -> bool:
        if self._released or partition in self._finished:
            return True
        if partition in self._contributions or self._key is None:
            return False
        return self._key_of(partition) <= self._key

    def _key_of(self, partition: int) -> Key:
        """Returns the epoch and the step of the first round that is not applied and has a step of the partition."""
        steps = self._steps[partition]
        if not steps or partition in self._finished:
            return _NEVER
        return divmod(self._done[partition] - (partition in self._contributions), steps)

    def _look(self) -> None:
        """Finds out which round is open, and who is missing."""
        self._key = None
        if len(self._steps) == len(self._partitions):
            keys = {partition: self._key_of(partition) for partition in self._partitions}
            self._key = min(keys.values())
            self._missing = {
                partition
                for partition, key in keys.items()
                if key == self._key and partition not in self._contributions
            }
        self._changed.notify_all()

    def _held(self, partition: int, total: np.ndarray) -> np.ndarray:
        # One push of a partition at a time is settled: nobody else writes to its vector.
        if partition not in self._vectors:
            self._vectors[partition] = np.empty_like(total)
        np.copyto(self._vectors[partition], total)
        return self._vectors[partition]

    def _add_up(self, total: np.ndarray) -> None:
        with self._adding:
            if self._sum is None:
                self._sum = total.copy()
            else:
                self._sum += total

    def _mean(self) -> np.ndarray:
        counted = [
            self._contributions[partition]
            for partition in sorted(self._contributions)
            if self._contributions[partition].rows
        ]
        total, self._sum = self._sum, None
        for contribution in counted:
            if contribution.total is not None:
                # Always in the same order, so that every run has the same bits.
                total = contribution.total if total is None else np.add(total, contribution.total, out=total)
        if total is None:
            return np.empty(0, np.float32)
        return np.divide(total, np.float32(sum(contribution.rows for contribution in counted)), out=total)
