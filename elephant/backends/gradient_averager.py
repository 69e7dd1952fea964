"""Gradient averaging: buckets of dense gradients, and rows of looked-up ones.

The average weighs each rank by its rows in the step, so that N ranks give what one process gives on the rows of all of
them. Gradients that were found to be sums over rows, as of a loss that is not reduced, are added up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from elephant.backends.lookups import BY_BATCH, UNTOLD, Places, Slices, added_up, are_equal
from elephant.backends.optimizer_part import OptimizerPart
from elephant.collective.communicator import Communicator
from elephant.collective.fusion import (
    FusedBuffer,
    LinkSpeed,
    Spec,
    automatic_bucket_bytes,
    plan_buckets,
    require_same_specs,
)
from elephant.compression import reduction_for
from elephant.net.buffers import RotatingBuffers
from elephant.net.work_queue import WorkQueue

logger = logging.getLogger(__name__)
# An optimizer's id and a variable's: of that gradient.
Name = tuple[int, int]
# Takes gradients, as a framework has them, and their variables, before an optimizer with this id would apply them.
Note = Callable[[int, Sequence[Any], Sequence[Any]], None]
# Buffers of more than this are worth asking TensorFlow for what it has done with and not yet given back.
_WORTH_RELEASING = 4 << 20


class StopSignal:
    """Agreement of ranks to stop at the same step: a request travels with what they exchange anyway.

    Attributes:
        words: Both, int32, where a kernel reads the one and writes the other.
    """

    def __init__(self) -> None:
        self.words = np.zeros(2, np.int32)

    @property
    def requested(self) -> bool:
        """Set by this rank to ask all ranks to stop."""
        return bool(self.words[0])

    @requested.setter
    def requested(self, value: bool) -> None:
        self.words[0] = value

    @property
    def agreed(self) -> bool:
        """True once any rank's request has arrived, on all ranks at the same step."""
        return bool(self.words[1])

    @agreed.setter
    def agreed(self, value: bool) -> None:
        self.words[1] = value


class Kernel(Protocol):
    """A backend's own way to average gradients within a step."""

    def close(self) -> None:
        """Lets go of what it holds; a step that is run after that raises."""


class GradientAverager:
    """Averages gradients over all ranks, once for every call of an optimizer's ``apply``.

    Args:
        share: Gives this rank's weight in the average, at every step anew; over all ranks the weights make 1.
        compression: How gradients are encoded where they cross hosts; see `elephant.compression`.
        bucket_bytes: Gradients of about this many bytes travel together, while the next ones
            are computed; None chooses by ``link``, zero puts all in one bucket.
        link: What `elephant.collective.fusion.measure_link` found; None means a fast one.

    Attributes:
        share: Gives this rank's weight in the average.
        kernel: The backend's own way, if it has one.
        uses_kernel: Whether all ranks go that way, for what it takes.
        sums: Gradients that are sums over a rank's rows, and no means: all ranks with rows count once.
        places: Of gradients that are slices, what an eager step does not tell; see `Places`.
        optimizer_part: The variables that this rank updates, whose values ranks exchange after that; None means all.
        note: Takes gradients in the place of an average and an update, in a rehearsal of a step; None in a step.
        error: What the collective raised, which TensorFlow replaces by an error of its own.
    """

    def __init__(
        self,
        communicator: Communicator,
        share: Callable[[], float],
        *,
        compression: str | None = None,
        bucket_bytes: int | None = None,
        link: LinkSpeed | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        self.communicator = communicator
        self.share = share
        self._weight = 0.0
        self.compression = compression if communicator.crosses_hosts else None
        self._bucket_bytes = bucket_bytes
        self._link = link
        self._groups: dict[Hashable, GradientGroup] = {}
        self.exchange = WorkQueue(f"elephant-gradients-{communicator.rank}")
        self.stop = stop or StopSignal()
        self.kernel: Kernel | None = None
        self.uses_kernel = False
        self.sums: set[Name] = set()
        self.places: dict[Name, Places] = {}
        self.optimizer_part: OptimizerPart | None = None
        self.note: Note | None = None
        # Steps may not tell their names: gradients of which ranks have had slices of other places.
        self._named_by_batch: set[Name | None] = set()
        self.error: BaseException | None = None
        # What groups that are still to be made are to remember.
        self._remembered: list[np.ndarray] = []

    def bind(self, communicator: Communicator, share: Callable[[], float], stop: StopSignal) -> None:
        """Connects it to ranks that were not known when it was made, without compression, for small gradients."""
        self.communicator, self.share, self.stop = communicator, share, stop

    def agree_on_kernel(self) -> None:
        """Finds out whether all ranks have a kernel, and share a host, as they must; all of them call it."""
        if not self.communicator.crosses_hosts:
            has_it = np.array([self.kernel is not None], np.int32)
            self.communicator.allreduce_(has_it, "min")
            self.uses_kernel = bool(has_it[0])

    def group(self, owner: Hashable, specs: Sequence[Spec], names: Sequence[Name | None] = ()) -> GradientGroup:
        """Returns the place where gradients of one kind are averaged: the same one for the same arguments.

        Args:
            owner: Whose gradients they are, such as an optimizer's id.
            specs: Shape and dtype of each dense gradient.
            names: Of each, as ``sums`` has them; none where nobody asks.
        """
        key = (owner, *((tuple(shape), np.dtype(dtype).name) for shape, dtype in specs), *names)
        if key not in self._groups:
            self._groups[key] = group = GradientGroup(self, specs, names or [None] * len(specs))
            given_back = give_back(group.memory, self._remembered)
            self._remembered = self._remembered[given_back:]
        return self._groups[key]

    def flagged_group(self, owner: Hashable, specs: Sequence[Spec], names: Sequence[Name | None] = ()) -> GradientGroup:
        """Returns the place of such gradients, with flags before them that tell which of them are there.

        A step knows that last, and the first of a group travels last.
        """
        flags = ((len(specs),), _flag_dtype(self.compression))
        return self.group(owner, [flags, *specs], [None, *names] if names else ())

    def bucket_bytes(self, total_bytes: int) -> int:
        """Returns how long buckets of so many bytes of gradients should be."""
        if self._bucket_bytes is not None:
            return self._bucket_bytes or total_bytes
        return total_bytes if self._link is None else automatic_bucket_bytes(total_bytes, self._link)

    def begin(self) -> float:
        """Returns this rank's weight in the average that begins now."""
        self._weight = self.share()
        return self._weight

    def weight_of(self, name: Name | None, weight: float) -> float:
        """Returns the weight of a gradient where this rank has the given one."""
        return float(weight > 0) if name in self.sums else weight

    def average(
        self, owner: int, gradients: Sequence[np.ndarray | None], variables: Sequence[Any]
    ) -> list[np.ndarray | None]:
        """Returns the averages of gradients that ranks may have, or lack, as their steps go: None where none has one.

        Args:
            owner: Whose gradients they are, such as an optimizer's id.
            gradients: One for each variable.
            variables: What has the shape and dtype of a gradient that is absent.
        """
        specs = [spec_of(*pair) for pair in zip(gradients, variables, strict=True)]
        # As the flag of who wants to stop, it must arrive as it is.
        present = np.array([array is not None for array in gradients], _flag_dtype(self.compression))
        filled = [np.zeros(*spec) if array is None else array for array, spec in zip(gradients, specs, strict=True)]
        names = [(owner, id(variable)) for variable in variables]
        shares, *averages = self.flagged_group(owner, specs, names).average([present, *filled])
        # A step to which no rank brings rows leaves all as they are.
        found = shares > 0 if shares.any() else np.ones_like(shares)
        return [average if there else None for average, there in zip(averages, found, strict=True)]

    def gather(
        self, slices: Sequence[Slices], names: Sequence[Name | None] = ()
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the slices of all ranks, (indices, values), weighted as the dense gradients before them.

        Gradients of embeddings stay slices, because optimizers treat rows without a gradient differently
        from rows with a zero one. Slices of rows that one process looks up once are added.

        Args:
            slices: Numbers of lookups, indices, values of shape (indices, ...), sizes.
            names: Of their gradients; none where nobody asks.
        """
        return [self._gathered(*one, name) for one, name in zip(slices, names or [None] * len(slices), strict=True)]

    def _gathered(
        self,
        numbers: Sequence[int],
        indices: np.ndarray,
        values: np.ndarray,
        sizes: np.ndarray,
        name: Name | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        weight = self.weight_of(name, self._weight)
        if weight == 0.0:
            indices, values, sizes = indices[:0], values[:0], np.zeros_like(sizes)
        of_ranks = self._of_ranks(indices), self._of_ranks(values * values.dtype.type(weight))
        if UNTOLD in numbers and not are_equal(of_ranks[0]):
            # Never again, whatever rows a batch may happen to name.
            self._named_by_batch.add(name)
        if set(numbers) == {BY_BATCH} or name in self._named_by_batch:
            return np.concatenate(of_ranks[0]), np.concatenate(of_ranks[1])
        return added_up(numbers, *of_ranks, self._of_ranks(sizes))

    def _of_ranks(self, array: np.ndarray) -> list[np.ndarray]:
        return self.communicator.allgather(np.ascontiguousarray(array))

    def noting_failure(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of the step that leaves what it raises in ``error``."""

        def noting(*arrays: np.ndarray) -> Any:
            try:
                return function(*arrays)
            except BaseException as error:
                self.error = error
                raise

        return noting

    @property
    def memory(self) -> list[np.ndarray]:
        """Arrays that compression keeps from one step to the next, of all groups as they were made."""
        return [array for group in self._groups.values() for array in group.memory]

    def remember(self, memory: Sequence[np.ndarray]) -> None:
        """Gives compression back what it kept, as far as it is of this form; before the first step."""
        self._remembered = list(memory)

    def close(self) -> None:
        """Ends the thread that exchanges gradients in the background, and the kernel."""
        self.exchange.close()
        if self.kernel is not None:
            self.kernel.close()


class GradientGroup:
    """A fixed list of dense gradients, and the buckets in which they travel.

    Args:
        specs: Shape and dtype of each.
        names: Name of each, or None.

    Attributes:
        shapes: Shape of each.
    """

    def __init__(self, averager: GradientAverager, specs: Sequence[Spec], names: Sequence[Name | None]) -> None:
        self._averager = averager
        self._names = names
        self.shapes = [tuple(shape) for shape, _ in specs]
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in specs]
        plan = plan_buckets(sizes, averager.bucket_bytes(sum(sizes))) or [[]]
        self.buckets = [
            _Bucket(positions, [specs[position] for position in positions], averager.compression) for positions in plan
        ]
        self._specs = list(specs)
        self._are_agreed = False
        self._filled_buffers: list[FusedBuffer] = []
        self._weight = self._waited_s = 0.0

    @property
    def memory(self) -> list[np.ndarray]:
        """Arrays that compression keeps from one step to the next."""
        return [array for bucket in self.buckets for array in bucket.memory]

    def average(self, gradients: Sequence[np.ndarray], release: Callable[[], object] = int) -> list[np.ndarray]:
        """Returns the averages of all gradients; see ``submit`` and ``wait``. Buckets that have left are left out."""
        for number in range(len(self._filled_buffers), len(self.buckets)):
            self.submit(number, [gradients[position] for position in self.buckets[number].positions], release)
        return self.wait()

    def submit(self, number: int, gradients: Sequence[np.ndarray], release: Callable[[], object] = int) -> None:
        """Takes the gradients of one bucket; buckets are submitted in order, on all ranks."""
        bucket, averager = self.buckets[number], self._averager
        if number == 0:
            if not self._are_agreed:
                # A buffer hides shapes: as many values of another layer would be added up in silence.
                require_same_specs(averager.communicator, self._specs, "gradients")
                self._are_agreed = True
            self._filled_buffers, self._weight = [], averager.begin()
            self._waited_s = averager.communicator.waited_s
        buffer = bucket.buffers.unused(release=release if bucket.is_large else None)
        weights = [averager.weight_of(self._names[position], self._weight) for position in bucket.positions]
        buffer.pack([*gradients, bucket.no_flag], [*weights, 0.0])
        if averager.stop.requested:
            buffer.unpack()[-1][0] = 1
        self._filled_buffers.append(buffer)
        if len(self.buckets) > 1:
            averager.exchange.submit(lambda: bucket.reduce(buffer, averager.communicator))
        else:
            bucket.reduce(buffer, averager.communicator)

    def wait(self) -> list[np.ndarray]:
        """Returns the averages of all gradients, once they are there.

        Nothing writes to them as long as they are held. Raises what the collective raised.
        """
        filled_buffers, self._filled_buffers = self._filled_buffers, []
        if len(self.buckets) > 1:
            began = time.monotonic()
            self._averager.exchange.wait()
            # What was exchanged while the step went on has kept nobody waiting.
            self._averager.communicator.waited_s = self._waited_s + time.monotonic() - began
        averages: dict[int, np.ndarray] = {}
        stop = self._averager.stop
        for bucket, buffer in zip(self.buckets, filled_buffers, strict=True):
            *arrays, flag = buffer.unpack()
            stop.agreed = stop.agreed or bool(flag[0] > 0)
            averages |= zip(bucket.positions, arrays, strict=True)
        return [averages[position] for position in range(len(averages))]


class _Bucket:
    """The buffers of one bucket, used in turn: a framework may still read the last step's."""

    def __init__(self, positions: Sequence[int], specs: Sequence[Spec], compression: str | None) -> None:
        self.positions = positions
        # The flag of who wants to stop must arrive as it is, so it stays out of a buffer that is compressed.
        flag_dtype = _flag_dtype(compression)
        self.no_flag = np.zeros(1, flag_dtype)
        specs = [*specs, ((1,), flag_dtype)]
        self.buffers = RotatingBuffers(lambda: FusedBuffer(specs))
        first = self.buffers.unused()
        self.is_large = first.nbytes > _WORTH_RELEASING
        self._reduction = reduction_for(compression, first.float32_slices)

    @property
    def memory(self) -> list[np.ndarray]:
        """Arrays that compression keeps from one step to the next."""
        return self._reduction.memory

    def reduce(self, buffer: FusedBuffer, communicator: Communicator) -> None:
        """Sums a buffer over all ranks, in place."""
        buffer.allreduce(communicator, lambda flat: self._reduction.reduce_(flat, communicator))


def give_back(memory: Sequence[np.ndarray], kept: Sequence[np.ndarray]) -> int:
    """Writes what was kept of compression to where it is kept; returns how many arrays that were.

    Where a link was found to be another one than before, buckets are others: then the memory begins anew.
    """
    fits = [array.shape for array in memory] == [array.shape for array in kept[: len(memory)]]
    for array, value in zip(memory, kept, strict=False) if fits else ():
        array[...] = value
    if not fits and kept:
        logger.warning("what compression had kept is of other gradients, and begins anew.")
    return len(memory)


def _flag_dtype(compression: str | None) -> np.dtype[Any]:
    return np.dtype(np.float32 if compression is None else np.float64)


def spec_of(gradient: np.ndarray | None, variable: Any) -> Spec:
    """Returns shape and dtype of a gradient; those of its variable where it is absent."""
    if gradient is not None:
        return gradient.shape, gradient.dtype
    return tuple(variable.shape), np.dtype(str(variable.dtype))
