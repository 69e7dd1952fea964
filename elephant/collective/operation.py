"""One collective operation: its header, deadline, reduction and arguments, and the interface of its algorithms."""

from __future__ import annotations

import functools
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elephant.compression import Codec
from elephant.errors import ConfigurationError, ProtocolError
from elephant.net.deadline import Deadline

# Where a part of an array begins and ends.
Bounds = tuple[int, int]

_REQUEST = struct.Struct("<4s4xQ64s")
_MAGIC = b"EREQ"
_NAME_BYTES = 64
REQUEST_BYTES = _REQUEST.size
# A number of an operation has that of its group in its upper 16 bits.
_GROUP_SHIFT = 48
MOST_GROUPS = 1 << 16
# What sends and waits for messages have in the place of a number in the order of their group.
MESSAGE = (1 << _GROUP_SHIFT) - 1

_COMBINE = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
OPERATIONS = tuple(_COMBINE)
_HALVES = ("float16", "bfloat16")
_NAMES = (*_HALVES, "float32", "float64", "int32", "int64")


def numbered(group: int, count: int) -> int:
    """Returns the number of a group's operation.

    >>> hex(numbered(2, 5))
    '0x2000000000005'
    """
    return group << _GROUP_SHIFT | count


def group_of(sequence: int) -> int:
    """Returns the number of the group that an operation is of; zero is that of all ranks."""
    return sequence >> _GROUP_SHIFT


def spelled(sequence: int) -> str:
    """Returns an operation's number as errors tell it.

    >>> spelled(5), spelled(numbered(2, 5)), spelled(numbered(0, MESSAGE))
    ('operation 5', 'operation 5 of group 2', 'a send or recv')
    """
    group, count = group_of(sequence), sequence & MESSAGE
    text = "a send or recv" if count == MESSAGE else f"operation {count}"
    return f"{text} of group {group}" if group else text


class Operation:
    """Operation that this rank asks for, and its deadline.

    Args:
        sequence: The number of the operation, from one, see `numbered`; zero while the ranks connect.
        name: Operation, dtype and shape in words; all ranks must say the same.
        deadline: When it must be over.
        age_s: Seconds that this rank has been in it.
        ranks: Those that it needs, by their numbers in the run; None where it needs all.

    Attributes:
        request: Number and name in a fixed number of bytes, the same on every rank.
    """

    def __init__(
        self,
        sequence: int,
        name: str,
        deadline: Deadline,
        age_s: float = 0.0,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.sequence = sequence
        self.name = name
        self.deadline = deadline
        self.ranks = ranks
        self.request = _REQUEST.pack(_MAGIC, sequence, _fixed_length(name))
        self._began = time.monotonic() - age_s

    @property
    def age_s(self) -> float:
        """Seconds since this rank entered the operation."""
        return time.monotonic() - self._began

    @property
    def is_message(self) -> bool:
        """True of the send of a message, and of the wait for one."""
        return self.sequence & MESSAGE == MESSAGE

    def needs(self, rank: int) -> bool:
        """Returns whether it needs a rank, by its number in the run."""
        return self.ranks is None or rank in self.ranks

    def is_entered(self, sequence: int) -> bool:
        """Returns whether a rank that is in another operation has come to this one."""
        messages = self.is_message or sequence & MESSAGE == MESSAGE
        return not messages and group_of(sequence) == group_of(self.sequence) and sequence >= self.sequence

    def check(self, request: bytes | memoryview, rank: int, other: int) -> None:
        """Compares the request of another rank with this one.

        Args:
            request: The other rank's ``request``.

        Raises:
            ProtocolError: The other rank asked for something else.
        """
        if request == self.request:
            return
        magic, sequence, name = _REQUEST.unpack(request)
        if magic != _MAGIC:
            raise ProtocolError(f"Expected a request of rank {other}. Received: {bytes(request[:8])!r}.")
        shown = name.rstrip(b"\0").decode("ascii", "backslashreplace")
        raise ProtocolError(
            "Expected all ranks to call the same operations in the same order, with the same shapes and dtypes. "
            f"Received: rank {other} asked for {shown!r} as {spelled(sequence)}, "
            f"rank {rank} for {self.name!r} as {spelled(self.sequence)}."
        )


def _fixed_length(name: str) -> bytes:
    """Returns the name in 64 bytes; a longer one keeps its start, and the checksum of the whole as its end."""
    data = name.encode("ascii", "backslashreplace")
    if len(data) > _NAME_BYTES:
        data = data[: _NAME_BYTES - 9] + b"~%08x" % zlib.crc32(data)
    return data.ljust(_NAME_BYTES, b"\0")


@dataclass(frozen=True, kw_only=True)
class AlgorithmThresholds:
    """The limits between the ways that an array can go, in bytes, as measured.

    Args:
        small_bytes: Arrays that make no more than this over all ranks are gathered whole on every rank.
        rounds_bytes: Larger ones of up to this length are reduced in rounds, log2 of the ranks of them; None lets a
            group's links decide, see `elephant.collective.ring.Ring.choose_rounds`.
        piece_bytes: Length of the pieces in which those beyond go round a ring; a multiple of eight.
        threaded_bytes: Of arrays of this length, a second thread sends the pieces.
        block_bytes: Length of each rank's blocks in shared memory; a multiple of eight.
        staged_bytes: Length of the float32 blocks in which 16-bit floats are reduced; a multiple of eight.
    """

    small_bytes: int = 1 << 18
    rounds_bytes: int | None = None
    piece_bytes: int = 1 << 19
    threaded_bytes: int = 1 << 23
    block_bytes: int = 1 << 20
    staged_bytes: int = 1 << 22


@dataclass(frozen=True)
class ReduceOp:
    """One reduction over the ranks, as two steps that a transport applies to pieces of arrays.

    Args:
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``.
        world_size: How many ranks bring a value.
    """

    op: str
    world_size: int

    @property
    def is_linear(self) -> bool:
        """True if it adds, so that what a codec loses can be made up for in a later one."""
        return self.op in ("sum", "mean")

    def combine(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        """Writes the reduction of two partial results; ``out`` may be either of them."""
        _COMBINE[self.op](left, right, out=out)

    def finish(self, values: np.ndarray) -> None:
        """Turns the combination of all ranks' values into the result, in place."""
        if self.op == "mean":
            np.divide(values, self.world_size, out=values)


@functools.lru_cache(maxsize=64)
def name_of(dtype: np.dtype) -> str:
    """Returns the dtype's name, which numpy takes microseconds to make."""
    return dtype.name if dtype.isnative else dtype.str


def dimensions(array: np.ndarray) -> str:
    """Returns an array's shape as the names of operations have it.

    >>> dimensions(np.zeros((2, 3))), dimensions(np.zeros(6)), dimensions(np.zeros(()))
    ('2x3', '6', 'one')
    """
    return "x".join(map(str, array.shape)) or "one"


def is_half(dtype: np.dtype) -> bool:
    """Returns whether values of the dtype are reduced in float32."""
    # bfloat16 is known by its name: numpy has no kind for it.
    return dtype.itemsize == 2 and name_of(dtype) in _HALVES


def is_reducible(dtype: np.dtype) -> bool:
    """Returns whether ``allreduce_`` takes arrays of the dtype.

    >>> is_reducible(np.dtype("float32")), is_reducible(np.dtype(">f4")), is_reducible(np.dtype("uint8"))
    (True, False, False)
    """
    return name_of(dtype) in _NAMES


def check_reduction(dtype: np.dtype, op: str) -> None:
    """Raises ConfigurationError unless values of the dtype can be reduced by the operation."""
    if op not in _COMBINE:
        raise ConfigurationError(f"op: expected one of {', '.join(_COMBINE)}. Received: {op!r}.")
    if not is_reducible(dtype):
        raise ConfigurationError(f"array: expected dtype {', '.join(_NAMES)}. Received: {dtype}.")
    if op == "mean" and dtype.kind == "i":
        raise ConfigurationError(f"op: expected sum, min, max or product for integers. Received: 'mean' for {dtype}.")


def check_allreduce(array: np.ndarray, op: str) -> None:
    """Raises ConfigurationError unless ``allreduce_`` can take these arguments."""
    check_reduction(array.dtype, op)
    _check_in_place(array)


def check_reduce_scatter(array: np.ndarray, op: str) -> None:
    """Raises ConfigurationError unless ``reduce_scatter`` can take these arguments."""
    check_reduction(array.dtype, op)
    _check_rows(array)


def check_allgather(array: np.ndarray) -> None:
    """Raises ConfigurationError unless ``allgather`` can take this array."""
    _check_plain(array)
    _check_rows(array)


def check_broadcast(array: np.ndarray, root: int, world_size: int) -> None:
    """Raises ConfigurationError unless ``broadcast_`` can take these arguments."""
    _check_plain(array)
    _check_in_place(array)
    check_root(root, world_size)


def check_root(root: int, world_size: int) -> None:
    """Raises ConfigurationError unless there is such a rank."""
    if not 0 <= root < world_size:
        raise ConfigurationError(f"root: expected a rank from 0 to {world_size - 1}. Received: {root!r}.")


def check_alltoall(parts: Sequence[np.ndarray], world_size: int) -> None:
    """Raises ConfigurationError unless ``alltoall`` can take these parts."""
    if len(parts) != world_size:
        raise ConfigurationError(f"parts: expected one for each of {world_size} ranks. Received: {len(parts)}.")
    for part in parts:
        check_allgather(part)
    kinds = list(dict.fromkeys((name_of(part.dtype), part.shape[1:]) for part in parts))
    if len(kinds) > 1:
        raise ConfigurationError(
            f"parts: expected rows of one dtype and shape. Received: {', '.join(f'{a} {b}' for a, b in kinds)}."
        )


def check_message(arrays: Sequence[np.ndarray] | np.ndarray) -> None:
    """Raises ConfigurationError unless ``send`` can take these arrays."""
    if isinstance(arrays, np.ndarray):
        raise ConfigurationError("arrays: expected a list of arrays. Received: one array. Put it into a list.")
    for array in arrays:
        _check_plain(array)
        if array.dtype.kind == "V" and not is_half(array.dtype):
            raise ConfigurationError(f"arrays: expected a dtype without fields. Received: {array.dtype}.")


def check_peer(name: str, peer: int, rank: int, world_size: int) -> None:
    """Raises ConfigurationError unless there is such a rank, other than this one."""
    if not 0 <= peer < world_size or peer == rank:
        raise ConfigurationError(
            f"{name}: expected another rank than {rank}, from 0 to {world_size - 1}. Received: {peer!r}."
        )


def check_ranks(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Returns the ranks of a new group; raises ConfigurationError unless they are ranks of this one, each once."""
    members = tuple(int(rank) for rank in ranks)
    if len(set(members)) < len(members) or not all(0 <= rank < world_size for rank in members):
        raise ConfigurationError(
            f"ranks: expected ranks from 0 to {world_size - 1}, each once. Received: {list(members)}."
        )
    return members


def _check_plain(array: np.ndarray) -> None:
    if array.dtype.hasobject:
        raise ConfigurationError(f"array: expected a dtype without Python objects. Received: {array.dtype}.")


def _check_rows(array: np.ndarray) -> None:
    if array.ndim == 0:
        raise ConfigurationError("array: expected at least one dimension. Received: a scalar.")


def _check_in_place(array: np.ndarray) -> None:
    if not array.flags.c_contiguous or not array.flags.writeable:
        kind = "read-only" if array.flags.c_contiguous else "not contiguous"
        raise ConfigurationError(f"array: expected a C-contiguous, writable array. Received: one that is {kind}.")


class AllreduceAlgorithm(ABC):
    """Moves large arrays between all ranks.

    Attributes:
        agrees: Whether its operations begin with an agreement of all ranks, so that none is needed before.
    """

    agrees: bool

    @abstractmethod
    def allreduce(self, flat: np.ndarray, op: ReduceOp, codec: Codec | None, operation: Operation) -> None:
        """Reduces a flat array, not empty, of all ranks in place."""

    @abstractmethod
    def reduce_scatter(self, flat: np.ndarray, bounds: Sequence[Bounds], op: ReduceOp, operation: Operation) -> None:
        """Reduces a flat array, not empty, of all ranks so that this rank's part is complete in place.

        The other parts are undefined then. ``bounds`` has where the parts begin and end, by rank.
        """

    @abstractmethod
    def allgather(self, blocks: Sequence[np.ndarray], operation: Operation) -> None:
        """Fills every rank's block, uint8 of any length and not all empty, by rank; this rank's is there."""

    @abstractmethod
    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        """Copies the root's bytes, uint8 and not empty, to all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of threads and memory, and ends the connections that threads are in."""
