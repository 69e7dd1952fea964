"""Communicator: the operations of a group of ranks, and the group of one rank."""

from __future__ import annotations

import pickle  # noqa: S403  (its dumps alone)
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from elephant.collective.objects import copied
from elephant.collective.operation import (
    check_allgather,
    check_allreduce,
    check_alltoall,
    check_broadcast,
    check_message,
    check_peer,
    check_ranks,
    check_reduce_scatter,
    check_root,
)
from elephant.compression import Codec


class Communicator(ABC):
    """Operations of a group of ranks, that all of them take part in, in the same order and with matching arguments.

    A message goes from one rank to another, with `send` and `recv`, whatever the others do meanwhile.

    Every operation may raise ``ProtocolError`` (ranks asked for different things),
    ``PeerLostError`` (a rank died, or closed or aborted its collective) and
    ``DeadlineExceededError`` (a rank did not arrive in time; the text names it). After any
    of them the contents of the array are undefined and the collective is broken, with all groups of
    its run: each further call raises at once. ``ConfigurationError`` is raised before anything is sent,
    and breaks nothing.

    One thread at a time may call an operation, while others are in those of other groups, or in `send` and `recv`;
    ``abort`` may come from any thread.

    Attributes:
        waited_s: Seconds so far in which this rank stood still in operations, for their data and for other ranks.
        dumps: Pickles objects.
    """

    waited_s = 0.0
    dumps: Callable[[Any], bytes] = staticmethod(pickle.dumps)

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
    def ranks(self) -> tuple[int, ...]:
        """The members' numbers in the whole run, by rank."""

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
            op: ``"sum"``, ``"mean"`` (of floats), ``"min"``, ``"max"`` or ``"product"``.
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
    def alltoall(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Sends each rank a part, and returns those that came from all ranks, by rank; new ones.

        Args:
            parts: By rank, each of at least one dimension, of any dtype without Python objects. The first dimensions
                may all differ and may be zero; dtype and other dimensions are the same, on all ranks.

        Raises:
            ConfigurationError: There is not a part for each rank, or they cannot travel.
        """

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Returns the root's object on every rank; elsewhere than on the root what is given counts for nothing.

        It travels by cloudpickle, which runs code of the sender where it arrives. Ranks of one run trust each other:
        what arrives is looked at only after the proof that a process with the run's token sent it.

        Args:
            value: Of any kind that can be pickled.
            root: The rank whose object all receive.

        Raises:
            ConfigurationError: It cannot be pickled, or there is no such rank.
        """

    @abstractmethod
    def allgather_object(self, value: Any) -> list[Any]:
        """Returns every rank's object, by rank; see `broadcast_object` for how they travel.

        Args:
            value: Of any kind that can be pickled.

        Raises:
            ConfigurationError: It cannot be pickled.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    @abstractmethod
    def send(self, arrays: Sequence[np.ndarray], dst: int) -> None:
        """Sends a message to one rank. It does not wait for that rank to ask for it: two ranks may send first.

        Messages from one rank to another arrive in their order. The arrays are the caller's again when this returns.
        Where over 256 MB of earlier messages to the rank have not gone out, it waits for them.

        Args:
            arrays: Of any shapes and dtypes without Python objects; any number of them.
            dst: Another rank.

        Raises:
            ConfigurationError: The arrays cannot travel, or there is no such other rank.
        """

    @abstractmethod
    def recv(self, src: int) -> list[np.ndarray]:
        """Returns the arrays of the next message from one rank; waits for it.

        Args:
            src: Another rank.

        Raises:
            ConfigurationError: There is no such other rank.
        """

    @abstractmethod
    def new_group(self, ranks: Sequence[int]) -> Communicator | None:
        """Makes a group of some ranks of this one. All of these call it, in the same order, whether members or not.

        The group has operations and messages of its own; a member's rank in it is its place in ``ranks``. It is the
        caller's to close, and closed with the group that it was made of.

        Args:
            ranks: Ranks of this group, each once, in the order of the new one; alike on all ranks.

        Returns:
            The group; None on ranks outside of it.

        Raises:
            ConfigurationError: There is no such rank, or one is there twice.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves after the last operation; ranks that ask for another one get a PeerLostError.

        Messages that were sent go out first. Groups that were made of this one are closed, too.
        """

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
    """A collective of one: it checks arguments as the others do, and has nobody to talk to.

    Args:
        number: The rank's number in the whole run.
    """

    def __init__(self, number: int = 0) -> None:
        self._number = number

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self._number,)

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

    def alltoall(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        check_alltoall(parts, 1)
        return [part.copy(order="C") for part in parts]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        check_root(root, 1)
        return copied(value, self.dumps)

    def allgather_object(self, value: Any) -> list[Any]:
        return [copied(value, self.dumps)]

    def barrier(self) -> None:
        pass

    def send(self, arrays: Sequence[np.ndarray], dst: int) -> None:
        check_message(arrays)
        check_peer("dst", dst, 0, 1)

    def recv(self, src: int) -> list[np.ndarray]:
        check_peer("src", src, 0, 1)
        return []

    def new_group(self, ranks: Sequence[int]) -> Communicator | None:
        return LocalCommunicator(self._number) if check_ranks(ranks, 1) else None

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass
