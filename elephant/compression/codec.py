"""Codecs, error feedback, the reducers that sum gradients over the ranks, and both by name."""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from elephant.errors import ConfigurationError

# 256 KiB of float32: a block and its scratch fit in the second-level cache. Half of that was up to a quarter
# slower, because of the fixed cost of each numpy call; the double of it was no faster.
BLOCK_VALUES = 1 << 16

# Start in the flat array, and shape, of each array in it.
Slices = Sequence[tuple[int, tuple[int, ...]]]


class Codec(ABC):
    """Encodes pieces of a flat float32 array, of any length, each for itself.

    A codec may keep scratch memory for encoding, so that it allocates nothing in the steady state.
    One thread may encode while others decode: decoding keeps nothing.
    """

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Returns how many bytes ``count`` values take, whatever they are."""

    @abstractmethod
    def encode(self, values: np.ndarray, out: np.ndarray, *, offset: int) -> None:
        """Writes the encoded values.

        Args:
            values: Float32 of shape (count,), not changed.
            out: Uint8 of shape (``encoded_bytes(count)``,).
            offset: Index of the first value in the whole array that the piece belongs to. In one
                operation, each index is encoded at most once by each rank.
        """

    @abstractmethod
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """Writes the values that were encoded.

        Args:
            data: Uint8 of shape (``encoded_bytes(count)``,), not changed.
            out: Float32 of shape (count,).
        """

    @property
    def memory(self) -> list[np.ndarray]:
        """Arrays that it keeps from one operation to the next, to read and to write to; none, in most."""
        return []

    def encode_keeping(self, values: np.ndarray, out: np.ndarray, lost: np.ndarray, *, offset: int) -> None:
        """Encodes as ``encode`` does, and writes what ``decode`` will be short of.

        Args:
            values: As for ``encode``.
            out: As for ``encode``.
            lost: Float32 of shape (count,): gets ``values`` less what ``decode`` makes of ``out``.
            offset: As for ``encode``.
        """
        self.encode(values, out, offset=offset)
        self.decode(out, lost)
        np.subtract(values, lost, out=lost)


def blocks(count: int, length: int = BLOCK_VALUES) -> Iterator[slice]:
    """Yields the slices, in order, that together cover ``count`` values.

    >>> list(blocks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))


class ErrorFeedback(Codec):
    """Encodes with another codec, and keeps for each index what that lost until the next operation.

    Over many operations the sum of what others decode then differs from the sum of what was
    given by one loss only, whatever the codec rounds away each time (Seide et al. 2014,
    section 3; Karimireddy et al. 2019, algorithm 1).

    Where a decoded value is not finite, nothing is kept: a step that overflows is not made, and what was
    kept before it is forgotten there.

    Args:
        codec: The codec; it belongs to this one from here on.
        count: Length of the whole array. The memory, one float32 for each value, is taken as it is used.
    """

    def __init__(self, codec: Codec, count: int) -> None:
        self._codec = codec
        self._memory = np.zeros(count, np.float32)
        self._wanted = np.empty(BLOCK_VALUES, np.float32)

    @property
    def memory(self) -> list[np.ndarray]:
        return [self._memory]

    def encoded_bytes(self, count: int) -> int:
        return sum(self._codec.encoded_bytes(block.stop - block.start) for block in blocks(count))

    def encode(self, values: np.ndarray, out: np.ndarray, *, offset: int) -> None:
        if not 0 <= offset <= len(self._memory) - len(values):
            raise ConfigurationError(
                f"offset: expected pieces of an array of {len(self._memory)} values. Received: {len(values)} "
                f"values from {offset} on. Make the codec for the length of the whole array."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            for block, data in self._blocks(len(values), out):
                self._encode_block(values[block], data, offset + block.start)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        for block, part in self._blocks(len(out), data):
            self._codec.decode(part, out[block])

    def _blocks(self, count: int, data: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields the values and the bytes of each block: one by one they stay in the cache for all passes."""
        start = 0
        for block in blocks(count):
            stop = start + self._codec.encoded_bytes(block.stop - block.start)
            yield block, data[start:stop]
            start = stop

    def _encode_block(self, values: np.ndarray, data: np.ndarray, offset: int) -> None:
        memory, wanted = self._memory[offset : offset + len(values)], self._wanted[: len(values)]
        np.add(values, memory, out=wanted)
        self._codec.encode_keeping(wanted, data, memory, offset=offset)
        # One number tells of them all.
        if not np.isfinite(np.add.reduce(memory)):
            memory[~np.isfinite(memory)] = 0


@dataclass(frozen=True, kw_only=True)
class RegisteredCodec:
    """A codec that ``compression`` names.

    Attributes:
        ratio: How many times fewer bytes float32 values take.
        make: Makes one for a flat array of so many values; of zero values, one that only decodes.
        pull: Makes one for weights that workers of a parameter server pull.
        finite_limit: Largest size of a value that stays finite; None where every finite value does.
    """

    ratio: float
    make: Callable[[int], Codec]
    pull: Callable[[], Codec]
    finite_limit: float | None = None


CODECS: dict[str, RegisteredCodec] = {}


def register_codec(
    name: str,
    make: Callable[[int], Codec],
    *,
    ratio: float,
    pull: Callable[[], Codec] | None = None,
    finite_limit: float | None = None,
) -> None:
    """Makes a codec known by a name, for synchronous fits and for parameter servers.

    Args:
        name: What ``compression`` is to be.
        make: As in `RegisteredCodec`.
        ratio: As in `RegisteredCodec`.
        pull: As in `RegisteredCodec`; the same codec without one.
        finite_limit: As in `RegisteredCodec`.
    """
    CODECS[name] = RegisteredCodec(ratio=ratio, make=make, pull=pull or (lambda: make(0)), finite_limit=finite_limit)


class Exchange(Protocol):
    """The part of a collective that reductions need; ``elephant.collective.Communicator`` has it."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def crosses_hosts(self) -> bool:
        """True if ranks are on different hosts; the same answer on all of them."""

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        """Replaces the array by the sum over all ranks, to the same bits on all."""

    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        """Returns every rank's array, by rank."""


class GradientReducer(ABC):
    """Sums the gradients of one step over all ranks; every rank makes its own, with the same arguments.

    What a reduction loses it keeps, and adds to the next call's gradients: one object serves
    one flat array, from step to step. On one host nothing is compressed.

    What lies behind the arrays, such as a flag that travels with them, is never compressed.

    Args:
        slices: Start and shape of each array in the flat one, in the order in which they lie; between them may be gaps.

    Raises:
        ConfigurationError: The arrays overlap.
    """

    def __init__(self, slices: Slices) -> None:
        self._count = num_values(slices)

    @property
    def memory(self) -> list[np.ndarray]:
        """Arrays that it keeps from one step to the next, to read and to write to between these; none, in most."""
        return []

    def reduce_(self, flat: np.ndarray, exchange: Exchange) -> None:
        """Replaces the array, on every rank, by the sum over all ranks, to the same bits on all.

        Args:
            flat: Float32 of one dimension, contiguous and writable, with the arrays at their places.

        Raises:
            ConfigurationError: The array is not float32 of one dimension, or too short.
            NetworkError: The exchange failed; the contents of the array are undefined.
        """
        if flat.dtype != np.float32 or flat.ndim != 1 or flat.size < self._count:
            raise ConfigurationError(
                f"flat: expected float32 of one dimension and at least {self._count} values. "
                f"Received: {flat.dtype} of shape {flat.shape}."
            )
        if not exchange.crosses_hosts:
            exchange.allreduce_(flat)
            return
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            self._reduce(flat, exchange)

    @abstractmethod
    def _reduce(self, flat: np.ndarray, exchange: Exchange) -> None:
        """Sums over ranks of different hosts."""

    def _reduce_rest(self, flat: np.ndarray, exchange: Exchange) -> None:
        """Sums what lies behind the arrays."""
        if flat.size > self._count:
            exchange.allreduce_(flat[self._count :])


class Uncompressed(GradientReducer):
    """The plain sum, for fits without compression."""

    def _reduce(self, flat: np.ndarray, exchange: Exchange) -> None:
        exchange.allreduce_(flat)


class Encoded(GradientReducer):
    """A sum whose pieces travel encoded."""

    def __init__(self, slices: Slices, codec: Codec) -> None:
        super().__init__(slices)
        self._codec = codec

    @property
    def memory(self) -> list[np.ndarray]:
        return self._codec.memory

    def _reduce(self, flat: np.ndarray, exchange: Exchange) -> None:
        exchange.allreduce_(flat[: self._count], codec=self._codec)
        self._reduce_rest(flat, exchange)


def num_values(slices: Slices) -> int:
    """Returns how many values there are up to the end of the last array; raises ConfigurationError for overlaps.

    >>> num_values([(0, (2, 3)), (6, (3,)), (16, ())])
    17
    """
    stop = 0
    for index, (start, shape) in enumerate(slices):
        size = math.prod(shape)
        if size and start < stop:
            raise ConfigurationError(
                f"slices[{index}]: expected a start from {stop} on, where the array before it ends. Received: {start}."
            )
        stop = max(stop, start + size)
    return stop


@dataclass(frozen=True, kw_only=True)
class Compression:
    """One way to compress.

    Attributes:
        name: As it was asked for.
        ratio: How many times fewer bytes a rank's gradient takes; None where that depends on the
            shapes of its arrays.
        is_codec: Whether the pieces of an allreduce travel encoded. Otherwise the ranks exchange something else.
        reduction: Makes one rank's reduction for the arrays at these places.
    """

    name: str
    ratio: float | None
    is_codec: bool = False
    reduction: Callable[[Slices], GradientReducer]


# From the whole name and what stands behind its colon, None without one; ValueError for no such option.
DescribedReducer = Callable[[str, str | None], Compression]
_REDUCERS: dict[str, DescribedReducer] = {}


def register_reducer(name: str, describe: DescribedReducer) -> None:
    """Makes a reducer that is no codec known by a name, for synchronous fits."""
    _REDUCERS[name] = describe


def known_names() -> tuple[str, ...]:
    """Returns the values of ``compression``, without the options behind a colon."""
    return (*(name for name in CODECS if ":" not in name), *_REDUCERS)


def compression_of(name: str | None) -> Compression | None:
    """Returns the compression of that name, and None for None.

    Args:
        name: One of ``KNOWN``. Three take an option behind a colon: ``"topk:0.001"`` sends that share
            of the values in each step (0.01 without it), ``"powersgd:2"`` has factors of that
            rank (4 without it), ``"int8:feedback"`` adds what a step's rounding lost to the next step.

    Raises:
        ConfigurationError: There is no such name, or no such option.

    >>> compression_of("bfloat16").ratio, compression_of("topk").ratio, compression_of(None)
    (2.0, 66.66666666666667, None)
    """
    if name is None:
        return None
    if name in CODECS:
        codec = CODECS[name]
        return Compression(
            name=name, ratio=codec.ratio, is_codec=True, reduction=functools.partial(_encoded, codec.make)
        )
    base, colon, option = str(name).partition(":")
    with contextlib.suppress(ValueError):
        if base in _REDUCERS:
            return _REDUCERS[base](str(name), option if colon else None)
    raise ConfigurationError(
        f"compression: expected None or one of {', '.join(known_names())}. topk takes a share of the values in (0, 1], "
        "as in topk:0.001, powersgd a rank of at least 1, as in powersgd:2, and int8 a word, as in int8:feedback. "
        f"Received: {name!r}."
    )


def check_compression(name: str | None) -> None:
    """Raises ConfigurationError, which lists the names, unless there is a compression of that name or it is None."""
    compression_of(name)


def reduction_for(name: str | None, slices: Slices) -> GradientReducer:
    """Returns the reduction that sums one flat array of gradients over the ranks of a fit.

    Args:
        name: As for ``compression_of``; without one nothing is compressed.
        slices: Start and shape of each array in the flat one, in the order in which they lie; the
            same on all ranks.

    Raises:
        ConfigurationError: There is no such name, or the arrays overlap.
    """
    compression = compression_of(name)
    return Uncompressed(slices) if compression is None else compression.reduction(slices)


def _encoded(codec: Callable[[int], Codec], slices: Slices) -> GradientReducer:
    return Encoded(slices, codec(num_values(slices)))
