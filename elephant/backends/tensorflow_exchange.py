"""Average of gradients within a TensorFlow step: by host callbacks, or by a kernel, native/exchange.c.

The kernel takes the gradients of ranks that share a host. What it cannot do goes by callbacks, with the same bits:
several hosts, several buckets, compression, slices of embeddings, other types than float32. So does everything where
its library is not there, or cannot be loaded.

A step may be traced before the ranks have met. So the kernel asks, when it first runs, for the memory that the ranks
share; where they share none, it hands the gradients over, each time, to be averaged as a callback would.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elephant.backends.gradient_averager import GradientAverager, GradientGroup
from elephant.collective.process_group import ProcessGroup
from elephant.collective.shared_memory import SharedMemory, memory_bytes
from elephant.net.buffers import ALIGNMENT

logger = logging.getLogger(__name__)

# Of the way that gradients take: "callback" leaves the kernel out.
EXCHANGE_VARIABLE = "ELEPHANT_EXCHANGE"

# As in exchange.c.
_VERSION = 1
_HEAD_BYTES = 64
_TURNS = 2
_JOIN = 0
_DONE, _ATTACHED, _FAILED = range(3)

# Every rank reads what all have written: the work of a host grows with the square of its ranks, and each rank's
# memory with their number. Of long gradients the exchange is a small part of a step, and a callback takes less memory.
_MOST_RANKS = 8
_MOST_BYTES = 128 << 20

_INT64S = ctypes.POINTER(ctypes.c_int64)
_FLOATS = ctypes.POINTER(ctypes.POINTER(ctypes.c_float))
_Ask = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_double, ctypes.c_int32, _INT64S, _FLOATS, _FLOATS)


class _Shared(ctypes.Structure):
    """Memory and settings of an exchange: ``Shared`` of exchange.c."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("block_bytes", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("waited_s", ctypes.c_void_p),
        ("timeout_s", ctypes.c_double),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("watch", ctypes.c_int32),
    )


class Library:
    """The loaded library: the op, and the functions that its kernel is set up by.

    Raises:
        Exception: It is not the one that belongs to this version of the package.
    """

    def __init__(self, path: Path) -> None:
        import tensorflow as tf

        self.op = tf.load_op_library(str(path)).elephant_exchange
        functions = ctypes.CDLL(str(path))
        version = ctypes.c_int32.in_dll(functions, "elephant_exchange_version").value
        if version != _VERSION:
            raise ImportError(f"expected version {_VERSION}. Received: {version}")
        self.open = functions.elephant_exchange_open
        self.open.restype, self.open.argtypes = ctypes.c_int64, [_Ask]
        self.attach = functions.elephant_exchange_attach
        self.attach.restype, self.attach.argtypes = None, [ctypes.c_int64, ctypes.POINTER(_Shared)]
        self.close = functions.elephant_exchange_close
        self.close.restype, self.close.argtypes = None, [ctypes.c_int64]


# Indices, values, numbers of the lookups and sizes of each.
_Slices = tuple[Any, Any, tuple[int, ...], Any]


def averaged(
    averager: GradientAverager,
    group: GradientGroup,
    dense: list[Any],
    sparse: list[_Slices],
    release: Callable[[], None],
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Returns the averages of tensors, and the (indices, values) of all ranks."""
    kernel = averager.kernel
    if isinstance(kernel, ExchangeKernel) and not sparse and kernel.takes(group, dense):
        return kernel.in_graph(group, dense), []
    return Callbacks(averager, group, release).in_graph(dense, sparse)


def kernel_of(averager: GradientAverager) -> ExchangeKernel | None:
    """Returns a kernel for an averager; None where there is no library."""
    loaded = library()
    return None if loaded is None else ExchangeKernel(loaded, averager)


def library() -> Library | None:
    """Returns the library; None where it was not built, is not wanted, or cannot be used, as a line in the log says."""
    path = library_path()
    return None if path is None or os.environ.get(EXCHANGE_VARIABLE) == "callback" else _loaded(path)


@functools.cache
def _loaded(path: Path) -> Library | None:
    try:
        return Library(path)
    except Exception as error:
        logger.warning(
            "Gradients are exchanged by Python: expected a library of TensorFlow's kernel in %s. Received: %s: %s. "
            "Install elephant again where there is a C compiler, or leave it so: the results are the same.",
            path,
            type(error).__name__,
            error,
        )
        return None


def library_path() -> Path | None:
    """Returns where setup.py has put the library; None where it has built none."""
    names = [f"exchange{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for name in names if (path := Path(__file__).with_name("native") / name).exists()), None)


class ExchangeKernel:
    """The kernel of one averager, whose step applies gradients once."""

    def __init__(self, loaded: Library, averager: GradientAverager) -> None:
        self._library = loaded
        self._averager = averager
        self._group: GradientGroup | None = None
        self._memory: SharedMemory | None = None
        self._has_asked = False
        # The library calls it as long as the exchange is open.
        self._asked = _Ask(self._answer)
        self._number = loaded.open(self._asked)

    def takes(self, group: GradientGroup, gradients: Sequence[Any]) -> bool:
        """Returns whether it can average these tensors; what it has once taken, it takes again."""
        # Before the ranks have met, nothing speaks against it: it can still hand the gradients over.
        is_open = self._averager.uses_kernel or self._averager.collective.world_size == 1
        is_plain = len(group.buckets) == 1 and all(grad.dtype.name == "float32" for grad in gradients)
        fits = self._fits(_block_bytes(sum(map(math.prod, group.shapes))))
        return is_open and is_plain and fits and self._averager.compression is None and self._group in (None, group)

    def _fits(self, block_bytes: int) -> bool:
        size = self._averager.collective.world_size
        return size <= _MOST_RANKS and memory_bytes(size, block_bytes, _TURNS) <= _MOST_BYTES

    def in_graph(self, group: GradientGroup, gradients: list[Any]) -> list[Any]:
        """Returns the averages of tensors."""
        self._group = group
        return list(self._library.op(gradients=gradients, exchange=self._number))

    def close(self) -> None:
        """Ends the exchange, and lets the memory go."""
        self._library.close(self._number)
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _answer(self, what: int, waited_s: float, count: int, sizes: Any, gradients: Any, averages: Any) -> int:
        """Answers the kernel, on a thread of TensorFlow's; an error goes to where the fit looks for it."""
        try:
            if what != _JOIN:
                self._look(waited_s)
                return _DONE
            if self._attached(sum(sizes[:count])):
                return _ATTACHED
            self._average(gradients, averages)
            return _DONE
        except BaseException as error:
            self._averager.error = error
            return _FAILED

    def _look(self, waited_s: float) -> None:
        collective = self._averager.collective
        if isinstance(collective, ProcessGroup):
            collective.look("exchange of gradients", waited_s)

    def _attached(self, count: int) -> bool:
        """Returns whether the ranks share memory for so many numbers of each; asks for it once."""
        collective, cell = self._averager.collective, getattr(self._averager.share, "cell", None)
        if self._has_asked or not self._averager.uses_kernel or not isinstance(collective, ProcessGroup):
            return False
        self._has_asked = True
        block_bytes = _block_bytes(count)
        if cell is None or not self._fits(block_bytes):
            return False
        self._memory = collective.shared_memory(block_bytes, _TURNS)
        if self._memory is None:
            return False
        shared = _Shared(
            memory=self._memory.blocks(0)[0].ctypes.data,
            block_bytes=block_bytes,
            weight=cell.ctypes.data,
            stop=self._averager.stop.words.ctypes.data,
            waited_s=collective.waited.ctypes.data,
            timeout_s=collective.timeout_s,
            rank=collective.rank,
            size=collective.world_size,
            watch=collective.watch_descriptor,
        )
        self._library.attach(self._number, ctypes.byref(shared))
        return True

    def _average(self, gradients: Any, averages: Any) -> None:
        """Averages what the kernel hands over."""
        if self._group is None:
            raise RuntimeError("expected gradients of a step that was traced with this kernel")
        shapes = self._group.shapes
        own = [_array(gradients[index], shape) for index, shape in enumerate(shapes)]
        for index, average in enumerate(self._group.average(own)):
            _array(averages[index], shapes[index])[...] = average


def _block_bytes(count: int) -> int:
    """Returns the length of a block that has room for so many numbers."""
    return -(-(_HEAD_BYTES + 4 * count) // ALIGNMENT) * ALIGNMENT


def _array(address: Any, shape: Sequence[int]) -> np.ndarray:
    # Without elements, there may be no address.
    size = math.prod(shape)
    return np.ctypeslib.as_array(address, (size,)).reshape(shape) if size else np.empty(shape, np.float32)


class Callbacks:
    """The host callbacks of one ``apply`` in a TensorFlow graph.

    One bucket takes one callback. Several take one each, as soon as their gradients are
    there, and a last one that waits for all: until then the backward pass goes on.
    """

    def __init__(self, averager: GradientAverager, group: GradientGroup, release: Callable[[], None]) -> None:
        self._averager = averager
        self._group = group
        self._release = release
        self._numbers: list[tuple[int, ...]] = []

    def in_graph(self, dense: list[Any], sparse: list[_Slices]) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Returns the averaged tensors and the gathered (indices, values) of (indices, values, lookups, sizes)."""
        import tensorflow as tf

        slices = [part for indices, values, _, sizes in sparse for part in (indices, values, sizes)]
        self._numbers = [numbers for _, _, numbers, _ in sparse]
        types = [tensor.dtype for tensor in (*dense, *(part for item in sparse for part in item[:2]))]
        if len(self._group.buckets) == 1:
            outputs = tf.numpy_function(self._whole(len(dense)), [*dense, *slices], types, stateful=True)
        else:
            token = tf.constant(0)
            for number, bucket in enumerate(self._group.buckets):
                gradients = [dense[position] for position in bucket.positions]
                token = tf.numpy_function(self._submit(number), [token, *gradients], tf.int32, stateful=True)
            outputs = tf.numpy_function(self._wait(), [token, *slices], types, stateful=True)
        outputs = list(outputs)
        gathered = outputs[len(dense) :]
        return outputs[: len(dense)], list(zip(gathered[0::2], gathered[1::2], strict=True))

    def _whole(self, num_dense: int) -> Callable[..., list[np.ndarray]]:
        def average(*arrays: np.ndarray) -> list[np.ndarray]:
            averages = self._group.average(arrays[:num_dense], self._release)
            return [*averages, *self._gathered(arrays[num_dense:])]

        return self._averager.noting_failure(average)

    def _submit(self, number: int) -> Callable[..., np.int32]:
        def submit(token: np.int32, *gradients: np.ndarray) -> np.int32:
            self._group.submit(number, gradients, self._release)
            return np.int32(token)

        return self._averager.noting_failure(submit)

    def _wait(self) -> Callable[..., list[np.ndarray]]:
        def wait(_: np.int32, *slices: np.ndarray) -> list[np.ndarray]:
            averages = self._group.wait()
            return [*averages, *self._gathered(slices)]

        return self._averager.noting_failure(wait)

    def _gathered(self, slices: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = zip(self._numbers, slices[0::3], slices[1::3], slices[2::3], strict=True)
        return [part for pair in self._averager.gather(list(found)) for part in pair]
