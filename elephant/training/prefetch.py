"""Batches that are read on a thread of their own while the model works, in a form that Keras' ``fit`` takes."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from elephant.training.tensors import Tensors

# Where batches are read one by one.
BATCHES_AHEAD = 4

Arrays = tuple[np.ndarray, ...]


def batches_read_ahead(read: Callable[[int], Arrays], count: int | None, tensors: Tensors, *, in_runs: bool) -> Any:
    """Returns the batches in turn: those that come next are read before they are asked for.

    Args:
        read: Returns the arrays of what has this number: a batch, or several as one more dimension.
        count: How many there are to read; None for no end.
        tensors: Makes of the arrays what the model takes.
        in_runs: Whether several batches are read at once.
    """
    if keras.backend.backend() == "tensorflow":
        return _dataset(read, count, tensors, in_runs)
    indices = itertools.count() if count is None else range(count)
    return _each(read, indices, tensors, in_runs)


def _each(read: Callable[[int], Arrays], indices: Iterable[int], tensors: Tensors, in_runs: bool) -> Iterator[Any]:
    for run in _ahead(read, indices, 1 if in_runs else BATCHES_AHEAD):
        for batch in map(tensors.assembled, zip(*run, strict=True) if in_runs else [run]):
            # What Keras takes from a generator is a tuple.
            yield batch if isinstance(batch, tuple) else (batch,)


def _ahead(read: Callable[[int], Arrays], indices: Iterable[int], depth: int) -> Iterator[Arrays]:
    """Yields what ``read`` returns, which a thread calls up to ``depth`` times more than was asked for."""
    ready: queue.Queue[tuple[Arrays | None, BaseException | None]] = queue.Queue()
    room, ended = threading.Semaphore(depth + 1), threading.Event()

    def work() -> None:
        try:
            for index in indices:
                room.acquire()
                if ended.is_set():
                    return
                ready.put((read(index), None))
            ready.put((None, None))
        except BaseException as error:
            ready.put((None, error))

    thread = threading.Thread(target=work, name="elephant-feed", daemon=True)
    thread.start()
    try:
        while True:
            arrays, error = ready.get()
            if error is not None:
                raise error
            if arrays is None:
                return
            room.release()
            yield arrays
    finally:
        ended.set()
        room.release()
        thread.join()


def _dataset(read: Callable[[int], Arrays], count: int | None, tensors: Tensors, in_runs: bool) -> Any:
    """Returns the batches as a ``tf.data.Dataset``: one call into Python per run, on the thread of its prefetch."""
    import tensorflow as tf

    signature = tensors.signature()

    # Nothing here depends on what a tensor holds: rewriting it for graphs takes time, and can fail with a warning.
    @tf.autograph.experimental.do_not_convert
    def load(index: Any) -> tuple[Any, ...]:
        parts = tf.numpy_function(read, [index], [tf.as_dtype(dtype) for dtype, _ in signature], stateful=True)
        for part, (_, shape) in zip(parts, signature, strict=True):
            part.set_shape((None, *shape) if in_runs else shape)
        return tuple(parts) if in_runs else tensors.assembled(parts)

    @tf.autograph.experimental.do_not_convert
    def cut(*parts: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(tensors.assembled(parts))

    indices = tf.data.Dataset.counter() if count is None else tf.data.Dataset.range(count)
    batches = indices.map(load).prefetch(1 if in_runs else BATCHES_AHEAD)
    if in_runs:
        batches = batches.flat_map(cut)
    options = tf.data.Options()
    # There is nothing to tune, and the tuning takes a thread.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return batches.with_options(options)
