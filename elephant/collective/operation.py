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

_COMBINE = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}
OPERATIONS = tuple(_COMBINE)
_HALVES = ("float16", "bfloat16")
_NAMES = (*_HALVES, "float32", "float64", "int32", "int64")


class Operation:
    """Operation that this rank asks for, and its deadline.

    Args:
        sequence: The number of the operation, from one; zero while the ranks connect.
        name: Operation, dtype and shape in words; all ranks must say the same.
        deadline: When it must be over.
        age_s: Seconds that this rank has been in it.

    Attributes:
        request: Number and name in a fixed number of bytes, the same on every rank.
    """

    def __init__(self, sequence: int, name: str, deadline: Deadline, age_s: float = 0.0) -> None:
        self.sequence = sequence
        self.name = name
        self.deadline = deadline
        self.request = _REQUEST.pack(_MAGIC, sequence, _fixed_length(name))
        self._began = time.monotonic() - age_s

    @property
    def age_s(self) -> float:
        """Seconds since this rank entered the operation."""
        return time.monotonic() - self._began

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
            f"Received: rank {other} asked for {shown!r} as operation {sequence}, "
            f"rank {rank} for {self.name!r} as operation {self.sequence}."
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
        rounds_bytes: Larger ones of up to this length are reduced in rounds, log2 of the ranks of them.
        piece_bytes: Length of the pieces in which those beyond go round a ring; a multiple of eight.
        threaded_bytes: Of arrays of this length, a second thread sends the pieces.
        block_bytes: Length of each rank's blocks in shared memory; a multiple of eight.
        staged_bytes: Length of the float32 blocks in which 16-bit floats are reduced; a multiple of eight.
    """

    small_bytes: int = 1 << 18
    rounds_bytes: int = 1 << 22
    piece_bytes: int = 1 << 19
    threaded_bytes: int = 1 << 23
    block_bytes: int = 1 << 20
    staged_bytes: int = 1 << 22


@dataclass(frozen=True)
class ReduceOp:
    """One reduction over the ranks, as two steps that a transport applies to pieces of arrays.

    Args:
        op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.
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
        raise ConfigurationError(f"op: expected sum, min or max for integers. Received: 'mean' for {dtype}.")


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
    if not 0 <= root < world_size:
        raise ConfigurationError(f"root: expected a rank from 0 to {world_size - 1}. Received: {root!r}.")


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
