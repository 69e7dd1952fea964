"""Models kept by Python workers, in this process or in one that was forked for them.

A Python worker that loaded the model itself would import Keras first, for seconds, and Spark ends idle workers
after a minute. The process is kept for the worker's next tasks and ends with the worker.

This module imports neither Keras nor its backend. Both read their settings when they are
imported, so the worker's first use of a model sets the environment before that.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle  # noqa: S403  (for the process of this task, through an inherited pipe)
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext, cloudpickle

from elephant.backends import GROWTH
from elephant.backends.process_environment import process_environment
from elephant.cluster.session import environment
from elephant.cluster.warm_workers import COLD, WarmWorkers
from elephant.config import Timeouts
from elephant.errors import TrainingError, UnsupportedError
from elephant.rank.chunks import ChunkChannel, ChunkFunction, HungUpError
from elephant.task.gpu_devices import given_names
from elephant.task.process import RankProcess
from elephant.task.process_watch import ProcessWatch

if TYPE_CHECKING:
    from elephant.rank.predictor import Predictor

# Name of the work folder, which is there as long as the Python worker.
_PREFIX = "model-"
_END_S = 5.0
_POLL_S = 0.02
# A process that is well touches its file twice a second; on a host that was busy, or stood still, it soon does again.
_SILENT_S, _WELL_S = 2.0, 4.0
# One that works and does not is frozen.
_FROZEN_S = Timeouts.heartbeat_s
_using = threading.Lock()

_MAX_MODELS = 2
_OF_PROCESSES = ("PYTHONPATH", "PYTHONUNBUFFERED")
_models: dict[str, Predictor] = {}
_lock = threading.Lock()


class ModelProcess:
    """A process that computes on chunks, one function after the other."""

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
            self._watch = ProcessWatch(self._process, silence_s=_FROZEN_S)
            self._closing = undoing.pop_all()

    def results(self, function: ChunkFunction, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[Any]:
        """Yields the results of a function on the chunks; raises TrainingError where the process is lost."""
        try:
            yield from self._channel.results(function, chunks)
        except HungUpError:
            self._watch.ends_within(_END_S)
            # It may have closed the connection alone.
            self._process.kill()
            failure = self._watch.failure.result()
            text = "it ended" if failure is None else f"{failure.message}\n{failure.log_tail}"
            raise TrainingError(f"The process that predicts is lost: {text}") from None

    def is_well(self) -> bool:
        """Returns whether the process works, after a moment: while it waits, it may be ended, or freeze."""
        deadline = time.monotonic() + _WELL_S
        while self._process.running and time.monotonic() < deadline:
            if self._process.silent_s < _SILENT_S:
                return True
            time.sleep(_POLL_S)
        return False

    def close(self) -> None:
        """Ends the process."""
        self._watch.close()
        self._closing.close()


_process: ModelProcess | None = None


def compute(
    function: ChunkFunction,
    chunks: Iterable[Sequence[pa.Array]],
    *,
    environment: Callable[[], Mapping[str, str] | None],
    warm: WarmWorkers,
    keeps: bool = True,
) -> Iterator[Any]:
    """Yields the results of a function on the chunks, in a warm process where one is wanted, or else right here.

    Args:
        environment: Tells that of the process; None outside of a Spark task.
        keeps: Whether the process is kept for the worker's next tasks.
    """
    global _process
    wanted = None if warm.limit == 0 or "keras" in sys.modules else environment()
    if wanted is None or not _using.acquire(blocking=False):
        yield from function(list(columns) for columns in chunks)
        return
    try:
        if _process is not None and not (_process.environment == wanted and _process.is_well()):
            # A task before had another device, or a model of another backend; or the process is gone, or frozen.
            _process.close()
            _process = None
        if _process is None:
            _process = ModelProcess(wanted, warm)
        whole = False
        try:
            yield from _process.results(function, chunks)
            whole = True
        finally:
            if not (whole and keeps):
                # Where it is not done, nobody knows what it still has to say.
                _process.close()
                _process = None
    finally:
        _using.release()


@dataclass(frozen=True, repr=False)
class PackedModel:
    """A model as it travels in the closure of a task.

    Args:
        model_id: Tells models apart.
        backend: The Keras backend that it runs on.
        content: A pickled `elephant.modeling.model_spec.Servable`, opened where it is used.
        warm: How many processes with Keras may wait on an executor, in one of which a task predicts.
        gpu_resource: Spark's name of GPUs.
    """

    model_id: str
    backend: str
    content: bytes
    warm: WarmWorkers = COLD
    gpu_resource: str = "gpu"

    def compute(self, function: ChunkFunction, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[Any]:
        """Yields the results of a function that uses the model on chunks, see `elephant.task.model_cache.compute`."""
        return compute(function, chunks, environment=self._environment, warm=self.warm)

    def _environment(self) -> dict[str, str] | None:
        return environment_of_task(self.backend, self.gpu_resource)

    def loaded(self) -> Predictor:
        """Returns the model, loaded once in each Python worker that Spark reuses.

        Raises:
            UnsupportedError: The worker runs another backend already.
        """
        with _lock:
            if self.model_id not in _models:
                while len(_models) >= _MAX_MODELS:
                    _models.pop(next(iter(_models)))
                with task_environment(self.backend, self.gpu_resource):
                    _models[self.model_id] = self._load()
            else:
                _models[self.model_id] = _models.pop(self.model_id)
            return _models[self.model_id]

    def built(self) -> Any:
        """Returns a new `keras.Model`, which is not kept."""
        return cloudpickle.loads(self.content).build()

    def _load(self) -> Predictor:
        require_backend(self.backend)
        predictor: type[Predictor] = importlib.import_module("elephant.rank.predictor").Predictor
        return predictor(self.built())


def require_backend(wanted: str) -> None:
    """Imports Keras; raises UnsupportedError where this process runs another backend already."""
    backend = importlib.import_module("keras").config.backend()
    if backend != wanted:
        raise UnsupportedError(
            f"model: expected a Python worker with the Keras backend {wanted!r}. Received: one that runs "
            f"{backend!r} already. Set spark.python.worker.reuse to false."
        )


def environment_of_task(backend: str, gpu_resource: str = "gpu") -> dict[str, str] | None:
    """Returns the environment of what computes in this task; None outside of a Spark task."""
    context = TaskContext.get()
    if context is None:
        return None
    gpu = context.resources().get(gpu_resource)
    return process_environment(
        threads=max(int(context.cpus()), 1),
        devices=[] if gpu is None else given_names(gpu.addresses, os.environ),
        backend=backend,
        # Several tasks, each in a process of its own, may share one.
        more=GROWTH,
    )


@contextlib.contextmanager
def task_environment(backend: str, gpu_resource: str = "gpu") -> Iterator[None]:
    """Gives the backend the task's GPUs and cores while it starts; what else runs in the worker keeps its own."""
    wanted = environment_of_task(backend, gpu_resource)
    if wanted is None:
        yield
        return
    changed = {name: value for name, value in wanted.items() if name not in _OF_PROCESSES}
    with environment(changed):
        yield
