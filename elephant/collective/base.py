"""What every transport between ranks offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

import numpy as np

from elephant.errors import ConfigurationError

REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
REDUCIBLE = {np.dtype(name): name for name in ("float32", "float64", "int32", "int64")}


class Collective(ABC):
    """Operations that all ranks of a fit take part in, in the same order and with matching arguments.

    Every operation may raise ``ProtocolError`` (ranks asked for different things),
    ``PeerLostError`` (a rank died, or closed or aborted its collective) and
    ``DeadlineExceededError`` (a rank did not answer in time). After any of them the
    contents of the array are undefined and the collective is broken: each further
    call raises at once.

    One thread at a time may call an operation; ``abort`` may come from any thread.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank, from zero."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks there are."""

    @abstractmethod
    def allreduce_(self, array: np.ndarray, op: str = "sum") -> None:
        """Replaces the array, on every rank, by the elementwise sum, max or min over all ranks.

        The results are the same on all ranks to the last bit. NaN wins over numbers in all three.

        Args:
            array: C-contiguous, writable, of dtype float32, float64, int32 or int64; any shape,
                with the same number of elements on every rank.
            op: ``"sum"``, ``"max"`` or ``"min"``.

        Raises:
            ConfigurationError: The array or the operation is none of these.
        """

    @abstractmethod
    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        """Returns every rank's array, by rank; new ones, that rank's own included.

        Args:
            array: At least one dimension, any dtype without Python objects. The first dimension
                may differ between ranks and may be zero; dtype and other dimensions are the same.

        Raises:
            ConfigurationError: The array has no dimension, or holds Python objects.
        """

    @abstractmethod
    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        """Replaces the array, on every rank, by that of the root.

        Args:
            array: C-contiguous, writable, any dtype without Python objects, with the same dtype and
                number of elements on every rank.
            root: The rank whose array all receive.

        Raises:
            ConfigurationError: The array cannot be written in place, or there is no such rank.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Leaves after the last operation; ranks that ask for another one get a PeerLostError."""

    @abstractmethod
    def abort(self) -> None:
        """Breaks the collective for all ranks, at once and from any thread; operations under way raise."""

    def __enter__(self) -> Collective:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def check_reduction(array: np.ndarray, op: str) -> None:
    """Raises ConfigurationError unless ``allreduce_`` can take these arguments."""
    if op not in REDUCTIONS:
        raise ConfigurationError(f"op: expected one of {', '.join(REDUCTIONS)}. Received: {op!r}.")
    if array.dtype not in REDUCIBLE:
        raise ConfigurationError(f"array: expected dtype {', '.join(REDUCIBLE.values())}. Received: {array.dtype}.")
    _check_in_place(array)


def check_gather(array: np.ndarray) -> None:
    """Raises ConfigurationError unless ``allgather`` can take this array."""
    _check_plain(array)
    if array.ndim == 0:
        raise ConfigurationError("array: expected at least one dimension. Received: a scalar.")


def check_broadcast(array: np.ndarray, root: int, world_size: int) -> None:
    """Raises ConfigurationError unless ``broadcast_`` can take these arguments."""
    _check_plain(array)
    _check_in_place(array)
    if not 0 <= root < world_size:
        raise ConfigurationError(f"root: expected a rank from 0 to {world_size - 1}. Received: {root!r}.")


def _check_plain(array: np.ndarray) -> None:
    if array.dtype.hasobject:
        raise ConfigurationError(f"array: expected a dtype without Python objects. Received: {array.dtype}.")


def _check_in_place(array: np.ndarray) -> None:
    if not array.flags.c_contiguous or not array.flags.writeable:
        kind = "read-only" if array.flags.c_contiguous else "not contiguous"
        raise ConfigurationError(f"array: expected a C-contiguous, writable array. Received: one that is {kind}.")
