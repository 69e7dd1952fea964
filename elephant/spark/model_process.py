"""The process in which a Python worker of Spark predicts: forked from one that has imported Keras already.

A Python worker that loaded the model itself would import Keras first, for seconds, and Spark ends idle workers
after a minute. The process is kept for the worker's next tasks and ends with the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle  # noqa: S403  (for the process of this task, through an inherited pipe)
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from elephant.cluster.process import RankProcess
from elephant.cluster.warm_processes import WarmWorkers
from elephant.errors import TrainingError
from elephant.training.chunks import ChunkChannel, ChunkFunction, HungUpError

# Of its work folder: it is there as long as the Python worker.
_PREFIX = "model-"
_END_S = 5.0
_POLL_S = 0.02


class ModelProcess:
    """A process that computes on chunks, one function after the other.

    Args:
        environment: Its environment, which tells its backend, threads and devices.
        warm: How many may wait.
    """

    def __init__(self, environment: Mapping[str, str], warm: WarmWorkers) -> None:
        self.environment = environment
        with contextlib.ExitStack() as undoing:
            self._channel, descriptors = ChunkChannel.pair()
            undoing.callback(self._channel.close)
            with contextlib.ExitStack() as theirs:
                for descriptor in descriptors:
                    theirs.callback(os.close, descriptor)
                process = RankProcess("chunks", environment, more_fds=descriptors, warm=warm, prefix=_PREFIX)
                self._process = undoing.enter_context(process)
                for block in (pickle.dumps(None), b"{}", json.dumps(descriptors).encode()):
                    self._process.send(block)
                self._process.await_start()
            self._closing = undoing.pop_all()

    def results(self, function: ChunkFunction, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[Any]:
        """Yields what a function makes of the chunks; raises TrainingError where the process is lost."""
        try:
            yield from self._channel.results(function, chunks)
        except HungUpError:
            deadline = time.monotonic() + _END_S
            while self._process.running and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            # It may have closed the connection alone.
            self._process.kill()
            failure = self._process.wait()
            text = "it ended" if failure is None else f"{failure.message}\n{failure.log_tail}"
            raise TrainingError(f"The process that predicts is lost: {text}") from None

    @property
    def running(self) -> bool:
        """Whether the process has not ended: while it waits, the kernel may take it for its memory."""
        return self._process.running

    def close(self) -> None:
        """Ends the process."""
        self._closing.close()


_process: ModelProcess | None = None
_using = threading.Lock()


def compute(
    function: ChunkFunction,
    chunks: Iterable[Sequence[pa.Array]],
    *,
    environment: Callable[[], Mapping[str, str] | None],
    warm: WarmWorkers,
) -> Iterator[Any]:
    """Yields what a function makes of the chunks, in a warm process where one is wanted, or else right here.

    Args:
        function: From the columns of each chunk to results.
        chunks: The columns of each chunk.
        environment: Tells that of the process; None outside of a Spark task.
        warm: How many processes may wait; with none the function runs here.
    """
    global _process
    wanted = None if warm.limit == 0 or "keras" in sys.modules else environment()
    if wanted is None or not _using.acquire(blocking=False):
        yield from function(list(columns) for columns in chunks)
        return
    try:
        if _process is not None and not (_process.running and _process.environment == wanted):
            # A task before had another device, or a model of another backend.
            _process.close()
            _process = None
        if _process is None:
            _process = ModelProcess(wanted, warm)
        whole = False
        try:
            yield from _process.results(function, chunks)
            whole = True
        finally:
            if not whole:
                # Nobody knows what it still has to say: the next task begins with a process of its own.
                _process.close()
                _process = None
    finally:
        _using.release()
