"""Communicator: the operations of a group of ranks, and the group of one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

import numpy as np

from elephant.collective.operation import check_allgather, check_allreduce, check_broadcast, check_reduce_scatter
from elephant.compression import Codec


class Communicator(ABC):
    """Operations that all ranks of a fit take part in, in the same order and with matching arguments.

    Every operation may raise ``ProtocolError`` (ranks asked for different things),
    ``PeerLostError`` (a rank died, or closed or aborted its collective) and
    ``DeadlineExceededError`` (a rank did not arrive in time; the text names it). After any
    of them the contents of the array are undefined and the collective is broken: each
    further call raises at once. ``ConfigurationError`` is raised before anything is sent,
    and breaks nothing.

    One thread at a time may call an operation; ``abort`` may come from any thread.

    Attributes:
        waited_s: Seconds so far in which this rank stood still in operations, for their data and for other ranks.
    """

    waited_s = 0.0

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank, from zero."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def local_rank(self) -> int:
        """This rank's place, from zero, among the ranks of its host, which are ordered by rank."""

    @property
    @abstractmethod
    def local_world_size(self) -> int:
        """Number of ranks on this rank's host."""

    @property
    @abstractmethod
    def crosses_hosts(self) -> bool:
        """True if there is more than one host, so that a codec has something to encode."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over connections to other ranks so far; those that hosts exchange in memory are not."""
        return 0

    @abstractmethod
    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        """Replaces the array, on every rank, by the elementwise reduction over all ranks.

        The results are the same on all ranks to the last bit. NaN wins over numbers. 16-bit
        floats are reduced in float32 and rounded once.

        Args:
            array: C-contiguous, writable, of dtype float16, bfloat16, float32, float64, int32 or
                int64; any shape, the same one on every rank.
            op: ``"sum"``, ``"mean"`` (of floats), ``"min"`` or ``"max"``.
            codec: Encodes the float32 pieces of a sum or mean that go from host to host; the same
                on every rank. Small arrays, other dtypes and other operations go as they are.

        Raises:
            ConfigurationError: The array or the operation is none of these.
        """

    def allreduce(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> np.ndarray:
        """Returns the elementwise reduction over all ranks as a new array; see ``allreduce_``.

        Args:
            array: As for ``allreduce_``, but it may be read-only and need not be contiguous.
            op: See ``allreduce_``.
            codec: See ``allreduce_``.

        Returns:
            An array of the same shape and dtype.
        """
        result = np.array(array, order="C")
        self.allreduce_(result, op, codec=codec)
        return result

    @abstractmethod
    def reduce_scatter(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        """Returns this rank's part of the reduction over all ranks, as a new array.

        The parts are cut along the first dimension as ``numpy.array_split`` cuts them: when the
        rows do not divide evenly, the first ranks get one more.

        Args:
            array: At least one dimension and one of the dtypes of ``allreduce_``; the same shape on every rank.
            op: See ``allreduce_``.

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
                shape on every rank.
            root: The rank whose array all receive.

        Raises:
            ConfigurationError: The array cannot be written in place, or there is no such rank.
        """

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Returns the root's array, as a new one, on every rank.

        Args:
            array: As for ``broadcast_``, but it may be read-only and need not be contiguous.
            root: The rank whose array all receive.
        """
        result = np.array(array, order="C")
        self.broadcast_(result, root)
        return result

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Leaves after the last operation; ranks that ask for another one get a PeerLostError."""

    @abstractmethod
    def abort(self) -> None:
        """Breaks the collective for all ranks, at once and from any thread; operations under way raise."""

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class LocalCommunicator(Communicator):
    """A collective of one: it checks arguments as the others do, and has nobody to talk to."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def local_world_size(self) -> int:
        return 1

    @property
    def crosses_hosts(self) -> bool:
        return False

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        check_allreduce(array, op)

    def reduce_scatter(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        check_reduce_scatter(array, op)
        return array.copy(order="C")

    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        check_allgather(array)
        return [array.copy(order="C")]

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        check_broadcast(array, root, 1)

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass
