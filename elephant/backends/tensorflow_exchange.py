"""Average of gradients within a TensorFlow step: by host callbacks, or by a kernel, native/exchange.c.

The kernel takes the gradients of ranks that share a host, and slices of rows that the batch names. What it cannot do
goes by callbacks, with the same bits: several hosts, several buckets, compression, other slices, other types than
float32. So does everything where its library is not there, or cannot be loaded.

A step may be traced before the ranks have met. So the kernel asks, when it first runs, for the memory that the ranks
share; where they share none, it hands the gradients over, each time, to be averaged as a callback would.

XLA can contain neither: a step that it compiles is cut in two.
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
from typing import TYPE_CHECKING, Any

import numpy as np

from elephant.backends.gradient_averager import GradientAverager, GradientGroup, Name
from elephant.backends.lookups import BY_BATCH, Slices
from elephant.backends.tensorflow_gradients import lookups_of
from elephant.collective.process_group import ProcessGroup
from elephant.collective.shared_memory import SharedMemory
from elephant.net.buffers import ALIGNMENT
from elephant.storage.filesystem import require_safe_library

if TYPE_CHECKING:
    import keras

logger = logging.getLogger(__name__)

# Variable for the way that gradients take: "callback" leaves the kernel out.
EXCHANGE_VARIABLE = "ELEPHANT_EXCHANGE"

# As in exchange.c.
_VERSION = 2
_HEAD_BYTES = 64
_TURNS = 2
_JOIN, _TAKE = 0, 3
_DONE, _ATTACHED, _FAILED = range(3)

# Every rank reads what all have written: the work of a host grows with the square of its ranks.
_MOST_RANKS = 8
# What a round takes of a rank's gradients, and stays in the processor's cache; longer ones take several rounds.
_ROUND_BYTES = 1 << 20

_Numbers = type[ctypes.c_float | ctypes.c_int32 | ctypes.c_int64]
_INT64S = ctypes.POINTER(ctypes.c_int64)
_FLOATS = ctypes.POINTER(ctypes.POINTER(ctypes.c_float))
_POINTERS = ctypes.POINTER(ctypes.c_void_p)


class _Gradients(ctypes.Structure):
    """Tensors of a step: ``Gradients`` of exchange.c."""

    _fields_ = (
        ("dense", ctypes.c_int32),
        ("sparse", ctypes.c_int32),
        ("sizes", _INT64S),
        ("gradients", _FLOATS),
        ("averages", _FLOATS),
        ("rows", _INT64S),
        ("widths", _INT64S),
        ("indices", _POINTERS),
        ("values", _FLOATS),
        ("all_rows", _INT64S),
        ("all_indices", _POINTERS),
        ("all_values", _FLOATS),
        ("index_bytes", ctypes.c_int32),
    )


_Ask = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_double, ctypes.POINTER(_Gradients))


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
        Exception: It is not the one that belongs to this version of the package, or others could replace it.
    """

    def __init__(self, path: Path) -> None:
        import tensorflow as tf

        require_safe_library(path)
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


# Tensors: indices, values, numbers of the lookups and sizes of each.
_Slices = tuple[Any, Any, tuple[int, ...], Any]


def averaged(
    averager: GradientAverager,
    group: GradientGroup,
    dense: list[Any],
    sparse: list[_Slices],
    release: Callable[[], None],
    names: Sequence[Name] = (),
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Returns the averages of tensors, and the (indices, values) of all ranks.

    Args:
        names: Of the gradients that are slices, see `GradientAverager.gather`.
    """
    kernel = averager.kernel
    if isinstance(kernel, ExchangeKernel) and kernel.takes(group, dense, sparse):
        return kernel.in_graph(group, dense, sparse)
    return Callbacks(averager, group, release, names).in_graph(dense, sparse)


def on_host(function: Callable[..., Sequence[np.ndarray]], tensors: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Calls a function of arrays in a step, in a graph or eagerly, and returns its results as tensors.

    Args:
        types: TensorFlow's, of each result.
    """
    import tensorflow as tf

    results = tf.numpy_function(function, list(tensors), list(types), stateful=True)
    # Run eagerly, a single one comes by itself, and a list of it would be its rows.
    return list(results) if isinstance(results, (list, tuple)) else [results]


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

    def __init__(self, library: Library, averager: GradientAverager) -> None:
        self._library = library
        self._averager = averager
        self._group: GradientGroup | None = None
        self._memory: SharedMemory | None = None
        self._has_asked = False
        self._gathered: list[tuple[np.ndarray, np.ndarray]] = []
        # The library calls it as long as the exchange is open.
        self._asked = _Ask(self._answer)
        self._number = library.open(self._asked)

    def takes(self, group: GradientGroup, dense: Sequence[Any], sparse: Sequence[_Slices] = ()) -> bool:
        """Returns whether it can average these tensors; what it has once taken, it takes again."""
        # Before the ranks have met, nothing speaks against it: it can still hand the gradients over.
        communicator = self._averager.communicator
        is_open = self._averager.uses_kernel or communicator.world_size == 1
        values = [*dense, *(part for _, part, _, _ in sparse)]
        is_plain = len(group.buckets) == 1 and all(tensor.dtype.name == "float32" for tensor in values)
        # Rows of a slice that the step itself names are added up, which takes all of them.
        are_named = all(set(numbers) == {BY_BATCH} for _, _, numbers, _ in sparse)
        of_one_type = len({indices.dtype for indices, _, _, _ in sparse}) <= 1
        return (
            (is_open and is_plain and are_named and of_one_type)
            and (communicator.world_size <= _MOST_RANKS and self._averager.compression is None)
            and self._group in (None, group)
        )

    def in_graph(
        self, group: GradientGroup, dense: list[Any], sparse: Sequence[_Slices] = ()
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Returns the averages of tensors, and the (indices, values) of all ranks."""
        self._group = group
        averages, indices, values = self._library.op(
            gradients=dense,
            indices=[indices for indices, _, _, _ in sparse],
            values=[values for _, values, _, _ in sparse],
            exchange=self._number,
        )
        return list(averages), list(zip(indices, values, strict=True))

    def close(self) -> None:
        """Ends the exchange, and lets the memory go."""
        self._library.close(self._number)
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _answer(self, what: int, waited_s: float, given: Any) -> int:
        """Answers the kernel, on a thread of TensorFlow's; an error goes to where the fit looks for it."""
        try:
            if what == _JOIN and self._attached(given[0]):
                return _ATTACHED
            if what == _JOIN:
                self._average(given[0])
            elif what == _TAKE:
                self._hand_back(given[0])
            else:
                self._look(waited_s)
            return _DONE
        except BaseException as error:
            self._averager.error = error
            return _FAILED

    def _look(self, waited_s: float) -> None:
        communicator = self._averager.communicator
        if isinstance(communicator, ProcessGroup):
            communicator.look("exchange of gradients", waited_s)

    def _attached(self, gradients: _Gradients) -> bool:
        """Returns whether the ranks share memory for such gradients; asks for it once."""
        communicator, cell = self._averager.communicator, getattr(self._averager.share, "cell", None)
        if self._has_asked or not self._averager.uses_kernel or not isinstance(communicator, ProcessGroup):
            return False
        self._has_asked = True
        if cell is None or communicator.world_size > _MOST_RANKS:
            return False
        # Each step may have another number of slices.
        bytes_of_step = _ROUND_BYTES if gradients.sparse else 4 * sum(gradients.sizes[: gradients.dense])
        block_bytes = _HEAD_BYTES + _aligned(8 * gradients.sparse) + _aligned(min(bytes_of_step, _ROUND_BYTES))
        self._memory = communicator.shared_memory(block_bytes, _TURNS)
        if self._memory is None:
            return False
        shared = _Shared(
            memory=self._memory.blocks(0)[0].ctypes.data,
            block_bytes=block_bytes,
            weight=cell.ctypes.data,
            stop=self._averager.stop.words.ctypes.data,
            waited_s=communicator.waited.ctypes.data,
            timeout_s=communicator.timeout_s,
            rank=communicator.rank,
            size=communicator.world_size,
            watch=communicator.watch_descriptor,
        )
        self._library.attach(self._number, ctypes.byref(shared))
        return True

    def _average(self, gradients: _Gradients) -> None:
        """Exchanges what the kernel hands over."""
        if self._group is None:
            raise RuntimeError("expected gradients of a step that was traced with this kernel")
        shapes = self._group.shapes
        own = [_array(gradients.gradients[index], shape) for index, shape in enumerate(shapes)]
        for index, average in enumerate(self._group.average(own)):
            _array(gradients.averages[index], shapes[index])[...] = average
        index_type, slices = _index_type(gradients), list[Slices]()
        for place in range(gradients.sparse):
            rows = gradients.rows[place]
            indices = _array(gradients.indices[place], (rows,), index_type)
            values = _array(gradients.values[place], (rows, gradients.widths[place]))
            slices.append(((BY_BATCH,), indices, values, np.array([rows])))
        self._gathered = self._averager.gather(slices)
        for place, (indices, _) in enumerate(self._gathered):
            gradients.all_rows[place] = len(indices)

    def _hand_back(self, gradients: _Gradients) -> None:
        """Writes gathered slices to where the kernel has made room for them."""
        for place, (indices, values) in enumerate(self._gathered):
            _array(gradients.all_indices[place], indices.shape, _index_type(gradients))[...] = indices
            _array(gradients.all_values[place], values.shape)[...] = values
        self._gathered = []


def _aligned(count: int) -> int:
    """Returns the length in bytes of what begins and ends at a cache line."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _index_type(gradients: _Gradients) -> _Numbers:
    return ctypes.c_int64 if gradients.index_bytes == 8 else ctypes.c_int32


def _array(address: Any, shape: Sequence[int], numbers: _Numbers = ctypes.c_float) -> np.ndarray:
    # Without elements, there may be no address.
    if not math.prod(shape):
        return np.empty(shape, numbers)
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(numbers)), tuple(shape))


class Callbacks:
    """The host callbacks of one ``apply`` in a TensorFlow graph.

    One bucket takes one callback. Several take one each, as soon as their gradients are
    there, and a last one that waits for all: until then the backward pass goes on.
    """

    def __init__(
        self,
        averager: GradientAverager,
        group: GradientGroup,
        release: Callable[[], None],
        names: Sequence[Name] = (),
    ) -> None:
        self._averager = averager
        self._group = group
        self._release = release
        self._names = names
        self._numbers: list[tuple[int, ...]] = []

    def in_graph(self, dense: list[Any], sparse: list[_Slices]) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Returns the averaged tensors and the gathered (indices, values) of (indices, values, lookups, sizes)."""
        import tensorflow as tf

        slices = [part for indices, values, _, sizes in sparse for part in (indices, values, sizes)]
        self._numbers = [numbers for _, _, numbers, _ in sparse]
        types = [tensor.dtype for tensor in (*dense, *(part for item in sparse for part in item[:2]))]
        if len(self._group.buckets) == 1:
            outputs = on_host(self._whole(len(dense)), [*dense, *slices], types)
        else:
            token = tf.constant(0)
            for number, bucket in enumerate(self._group.buckets):
                gradients = [dense[position] for position in bucket.positions]
                (token,) = on_host(self._submit(number), [token, *gradients], [tf.int32])
            outputs = on_host(self._wait(), [token, *slices], types)
        gathered = outputs[len(dense) :]
        return outputs[: len(dense)], list(zip(gathered[0::2], gathered[1::2], strict=True))

    def _whole(self, num_dense: int) -> Callable[..., list[np.ndarray]]:
        def average(*arrays: np.ndarray) -> list[np.ndarray]:
            averages = self._group.average(arrays[:num_dense], self._release)
            return [*averages, *self._gathered(arrays[num_dense:])]

        return self._averager.noting_failure(average)

    def _submit(self, number: int) -> Callable[..., list[np.ndarray]]:
        def submit(token: np.ndarray, *gradients: np.ndarray) -> list[np.ndarray]:
            self._group.submit(number, gradients, self._release)
            return [np.asarray(token, np.int32)]

        return self._averager.noting_failure(submit)

    def _wait(self) -> Callable[..., list[np.ndarray]]:
        def wait(_: np.int32, *slices: np.ndarray) -> list[np.ndarray]:
            averages = self._group.wait()
            return [*averages, *self._gathered(slices)]

        return self._averager.noting_failure(wait)

    def _gathered(self, slices: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = zip(self._numbers, slices[0::3], slices[1::3], slices[2::3], strict=True)
        return [part for pair in self._averager.gather(list(found), self._names) for part in pair]


def cut_step(
    model: keras.Model,
    average: Callable[..., list[Any]],
    exchange: Callable[[], None],
    host_calls: Callable[[], int],
) -> None:
    """Makes a model's step of two functions that XLA compiles, with the average of gradients between them.

    The first one is the model's own step, of which the optimizer takes the gradients; the second one applies averages.

    Two things are left to TensorFlow alone. One are slices of embeddings, which would be a program for each number of
    them when they are applied. The other is a step that calls the host, such as for batch normalization over all ranks.

    Args:
        model: A compiled one, whose step applies gradients once.
        average: Puts the average over the ranks into a graph; takes gradients, their variables and `Lookups`.
        exchange: Puts the exchange of what ranks have updated into a graph, where each updates a part.
        host_calls: How often calls of the host were put into graphs.
    """
    import tensorflow as tf

    optimizer, step, make_test_function = model.optimizer, model.train_step, model.make_test_function
    apply = optimizer.apply

    def train_step(data: Any) -> Any:
        # Variables of this trace: another one may have others, as where a callback freezes a layer.
        variables: Sequence[Any] | None = None
        numbers: list[tuple[int, ...]] = []
        calls_host = False

        def compute(data: Any) -> tuple[Any, list[Any], list[Any]]:
            nonlocal variables, numbers, calls_host
            taken: list[tuple[list[Any], Sequence[Any] | None]] = []
            calls = host_calls()
            optimizer.apply = lambda grads, trainable_variables=None: taken.append((list(grads), trainable_variables))
            try:
                logs = step(data)
            finally:
                optimizer.apply = apply
            # Without trainable weights Keras applies nothing.
            ((gradients, variables),) = taken or [([], None)]
            lookups = [lookups_of(gradient.indices) for gradient in gradients if isinstance(gradient, tf.IndexedSlices)]
            numbers, calls_host = [known for known, _ in lookups], host_calls() > calls
            return logs, gradients, [sizes for _, sizes in lookups]

        def finish(averages: list[Any]) -> None:
            apply(averages, variables)

        compiled = tf.function(compute, jit_compile=True, reduce_retracing=True, autograph=False)
        compiled_finish = tf.function(finish, jit_compile=True, reduce_retracing=True, autograph=False)
        compiled.get_concrete_function(data)
        if calls_host:
            logger.warning("jit_compile is switched off: XLA cannot contain what the step exchanges between ranks.")
        logs, gradients, sizes = compute(data) if calls_host else compiled(data)
        if gradients:
            averages = average(gradients, variables, list(zip(numbers, sizes, strict=True)))
            (finish if numbers or calls_host else compiled_finish)(averages)
            exchange()
        return logs

    def make_compiled_test_function(force: bool = False) -> Any:
        model.jit_compile = True
        try:
            return make_test_function(force)
        finally:
            model.jit_compile = False

    model.train_step, model.make_test_function, model.jit_compile = train_step, make_compiled_test_function, False
