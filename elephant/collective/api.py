"""The collective of this process: the run's, inside `elephant.run` and inside a fit, and a world of one elsewhere.

It belongs to the process and not to a thread, because frameworks call back from threads of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from elephant.collective.communicator import Communicator, LocalCommunicator
from elephant.compression import Codec

_SOLO = LocalCommunicator()
_installed: list[Communicator] = []
_users: list[BackgroundUser] = []
# Whom operations of a fit's steps ask, how much this rank counts there, and whether a step is under way.
_exchanges: list[tuple[Communicator, Callable[[], float], Callable[[], bool]]] = []


class BackgroundUser(Protocol):
    """User of the process group inside of a framework, in threads of its own.

    Attributes:
        error: What the collective raised there, which the framework replaces by an error of its own.
    """

    error: BaseException | None

    def close(self) -> None:
        """Ends its threads; called when the collective is not this process' own any more."""


@contextlib.contextmanager
def using(communicator: Communicator) -> Iterator[None]:
    """Makes a collective this process' own for the time of a ``with`` block; it stays the caller's to close.

    An error that leaves the block aborts it, which ends what goes on in the background.
    """
    _installed.append(communicator)
    _users.clear()
    try:
        yield
    except BaseException:
        communicator.abort()
        raise
    finally:
        _installed.remove(communicator)
        for user in _users:
            user.close()


def current_collective() -> Communicator:
    """Returns the collective that the functions of this module act on."""
    return _installed[-1] if _installed else _SOLO


@contextlib.contextmanager
def exchanging(communicator: Communicator, share: Callable[[], float], in_step: Callable[[], bool]) -> Iterator[None]:
    """Tells, for the time of a ``with`` block, whom operations of a fit's steps ask; outside of steps nobody.

    Args:
        communicator: The ranks whose gradients are averaged.
        share: Gives this rank's part in the average; zero where it has no rows.
        in_step: Tells whether a training step is under way.
    """
    _exchanges.append((communicator, share, in_step))
    try:
        yield
    finally:
        _exchanges.pop()


def current_exchange() -> tuple[Communicator, float]:
    """Returns whom operations of a step ask, and this rank's weight; in a function of a run all ranks weigh alike."""
    if not _exchanges:
        return current_collective(), 1.0
    communicator, share, in_step = _exchanges[-1]
    return (communicator, share()) if in_step() else (_SOLO, 1.0)


def in_run() -> bool:
    """Returns whether this process is a rank of a run or of a fit."""
    return bool(_installed)


def register(user: BackgroundUser) -> None:
    """Takes note of who else uses the collective, to ask for errors, and to close it at the end."""
    _users.append(user)


def failures() -> list[BaseException]:
    """Returns the errors that the users of the collective have met since it was installed."""
    return [user.error for user in _users if user.error is not None]


def rank() -> int:
    """Returns this process' rank, from zero.

    Examples:
        >>> from elephant import collective
        >>> collective.rank()
        0
    """
    return current_collective().rank


def world_size() -> int:
    """Returns how many ranks there are.

    Examples:
        >>> from elephant import collective
        >>> collective.world_size()
        1
    """
    return current_collective().world_size


def local_rank() -> int:
    """Returns this process' number among the ranks of its host, from zero.

    Examples:
        >>> from elephant import collective
        >>> collective.local_rank()
        0
    """
    return current_collective().local_rank


def local_world_size() -> int:
    """Returns how many ranks run on this host.

    Examples:
        >>> from elephant import collective
        >>> collective.local_world_size()
        1
    """
    return current_collective().local_world_size


def allreduce(array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> np.ndarray:
    """Returns the elementwise sum, mean, minimum, maximum or product of an array over all ranks, in a new array.

    Args:
        array: Of dtype float16, bfloat16, float32, float64, int32 or int64; any shape, with the
            same shape and dtype on every rank.
        op: ``"sum"``, ``"mean"`` (of floats), ``"min"``, ``"max"`` or ``"product"``.
        codec: Encodes what goes from host to host; the same on every rank.

    Raises:
        ConfigurationError: The array or the operation is none of these.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> collective.allreduce(np.array([1.0, 2.0]), op="mean")
        array([1., 2.])
    """
    return current_collective().allreduce(array, op, codec=codec)


def allreduce_(array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
    """Replaces an array, on every rank, by its sum, mean, minimum, maximum or product over all ranks.

    Args:
        array: C-contiguous and writable; else as in `allreduce`.
        op: As in `allreduce`.
        codec: As in `allreduce`.

    Raises:
        ConfigurationError: The array or the operation cannot be taken.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> array = np.array([1, 2])
        >>> collective.allreduce_(array)
        >>> array
        array([1, 2])
    """
    current_collective().allreduce_(array, op, codec=codec)


def reduce_scatter(array: np.ndarray, op: str = "sum") -> np.ndarray:
    """Reduces an array over all ranks and returns this rank's part of the result, in a new array.

    The parts are cut along the first dimension as ``numpy.array_split`` cuts them.

    Args:
        array: At least one dimension; else as in `allreduce`.
        op: As in `allreduce`.

    Raises:
        ConfigurationError: The array or the operation cannot be taken.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> collective.reduce_scatter(np.array([1.0, 2.0, 3.0]))
        array([1., 2., 3.])
    """
    return current_collective().reduce_scatter(array, op)


def allgather(array: np.ndarray) -> list[np.ndarray]:
    """Returns every rank's array, by rank.

    Args:
        array: At least one dimension, any dtype without Python objects. The first dimension may
            differ between ranks and may be zero; dtype and other dimensions are the same.

    Raises:
        ConfigurationError: The array has no dimension, or holds Python objects.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> collective.allgather(np.array([1, 2]))
        [array([1, 2])]
    """
    return current_collective().allgather(array)


def broadcast(array: np.ndarray, root: int = 0) -> np.ndarray:
    """Returns the root's array on every rank, in a new array.

    Args:
        array: Any dtype without Python objects, with the same dtype and shape on every rank.
        root: The rank whose array all receive.

    Raises:
        ConfigurationError: The array cannot be sent, or there is no such rank.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> collective.broadcast(np.array([1, 2]))
        array([1, 2])
    """
    return current_collective().broadcast(array, root)


def broadcast_(array: np.ndarray, root: int = 0) -> None:
    """Replaces an array, on every rank, by the root's.

    Args:
        array: C-contiguous and writable; else as in `broadcast`.
        root: As in `broadcast`.

    Raises:
        ConfigurationError: The array cannot be written in place, or there is no such rank.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> collective.broadcast_(np.array([1, 2]))
    """
    current_collective().broadcast_(array, root)


def alltoall(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sends each rank a part, and returns those that came from all ranks, by rank.

    Args:
        parts: By rank, each with at least one dimension, of any dtype without Python objects. The first dimensions
            may all differ and may be zero; dtype and other dimensions are the same, on all ranks.

    Raises:
        ConfigurationError: There is not a part for each rank, or they cannot travel.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> collective.alltoall([np.array([1, 2])])
        [array([1, 2])]
    """
    return current_collective().alltoall(parts)


def broadcast_object(value: Any, root: int = 0) -> Any:
    """Returns the root's object on every rank.

    Objects travel by cloudpickle. Ranks of one run trust each other: what arrives is unpickled only after the proof
    that a process with the run's token sent it.

    Args:
        value: Of any kind that can be pickled; counts on the root alone.
        root: The rank whose object all receive.

    Raises:
        ConfigurationError: It cannot be pickled, or there is no such rank.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> collective.broadcast_object({"rate": 0.1})
        {'rate': 0.1}
    """
    return current_collective().broadcast_object(value, root)


def allgather_object(value: Any) -> list[Any]:
    """Returns every rank's object, by rank; see `broadcast_object` for how they travel.

    Args:
        value: Of any kind that can be pickled.

    Raises:
        ConfigurationError: It cannot be pickled.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> collective.allgather_object("zero")
        ['zero']
    """
    return current_collective().allgather_object(value)


def send(arrays: Sequence[np.ndarray], dst: int) -> None:
    """Sends a message to one rank, without waiting for that rank to ask for it.

    Messages from one rank to another arrive in their order. The arrays are the caller's again when this returns.
    Where over 256 MB of earlier messages to the rank have not gone out, it waits for them.

    Args:
        arrays: Of any shapes and dtypes without Python objects; any number of them.
        dst: Another rank.

    Raises:
        ConfigurationError: The arrays cannot travel, or there is no such other rank.
        NetworkError: Another rank is gone, or earlier messages were not taken in time.

    Examples:
        >>> from elephant import collective
        >>> if collective.rank() > 0:
        ...     collective.send([np.array([1.0])], dst=0)
    """
    current_collective().send(arrays, dst)


def recv(src: int) -> list[np.ndarray]:
    """Returns the arrays of the next message from one rank.

    Args:
        src: Another rank.

    Raises:
        ConfigurationError: There is no such other rank.
        NetworkError: Another rank is gone, or no message came in time.

    Examples:
        >>> from elephant import collective
        >>> if collective.rank() == 0:
        ...     gathered = [collective.recv(src) for src in range(1, collective.world_size())]
    """
    return current_collective().recv(src)


def new_group(ranks: Sequence[int]) -> Communicator | None:
    """Makes a group of some ranks, with operations and messages of its own; all ranks call it, in the same order.

    Args:
        ranks: Each once, in the order of the group: a member's rank in it is its place here. Alike on all ranks.

    Returns:
        The group; None on ranks outside of it.

    Raises:
        ConfigurationError: There is no such rank, or one is there twice.
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> group = collective.new_group([0])
        >>> group.world_size
        1
    """
    return current_collective().new_group(ranks)


def barrier() -> None:
    """Returns when every rank has called it.

    Raises:
        NetworkError: Another rank is gone, too late, or asked for something else.

    Examples:
        >>> from elephant import collective
        >>> collective.barrier()
    """
    current_collective().barrier()
