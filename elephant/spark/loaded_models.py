"""Models in the Python workers of Spark: each is loaded once, by the first task that predicts, and kept.

This module imports neither Keras nor its backend. Both read their settings when they are
imported, so the worker's first use of a model sets the environment before that.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext, cloudpickle

from elephant.cluster.devices import given_names
from elephant.cluster.environment import environment
from elephant.cluster.rank_environment import process_environment
from elephant.cluster.warm_processes import COLD, WarmWorkers
from elephant.errors import UnsupportedError
from elephant.spark.model_process import compute
from elephant.training.chunks import ChunkFunction

if TYPE_CHECKING:
    import keras

    from elephant.training.predictor import Predictor

_MAX_MODELS = 2
# Memory of a GPU as it is needed: several tasks, each in a process of its own, may share one.
_SHARED_GPU = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_OF_PROCESSES = ("PYTHONPATH", "PYTHONUNBUFFERED")


@dataclass(frozen=True, repr=False)
class PackedModel:
    """A model as it travels in the closure of a task.

    Args:
        model_id: Tells models apart.
        backend: The Keras backend that it runs on.
        content: A pickled `elephant.modeling.model_spec.Servable`, opened where it is used.
        warm: How many processes with Keras may wait on an executor, in one of which a task predicts.
    """

    model_id: str
    backend: str
    content: bytes
    warm: WarmWorkers = COLD

    def compute(self, function: ChunkFunction, chunks: Iterable[Sequence[pa.Array]]) -> Iterator[Any]:
        """Yields what a function that uses the model makes of chunks, see `elephant.spark.model_process.compute`."""
        return compute(function, chunks, environment=lambda: _environment_of_task(self.backend), warm=self.warm)

    def loaded(self) -> Predictor:
        """Returns the model, loaded once in each Python worker that Spark reuses.

        Raises:
            UnsupportedError: The worker runs another backend already.
        """
        with _lock:
            if self.model_id not in _models:
                while len(_models) >= _MAX_MODELS:
                    _models.pop(next(iter(_models)))
                with _task_environment(self.backend):
                    _models[self.model_id] = self._load()
            else:
                _models[self.model_id] = _models.pop(self.model_id)
            return _models[self.model_id]

    def built(self) -> keras.Model:
        """Returns a new model, which is not kept."""
        return cloudpickle.loads(self.content).build()

    def _load(self) -> Predictor:
        backend = importlib.import_module("keras").config.backend()
        if backend != self.backend:
            raise UnsupportedError(
                f"model: expected a Python worker with the Keras backend {self.backend!r}. Received: one that runs "
                f"{backend!r} already. Set spark.python.worker.reuse to false."
            )
        predictor: type[Predictor] = importlib.import_module("elephant.training.predictor").Predictor
        return predictor(self.built())


_models: dict[str, Predictor] = {}
_lock = threading.Lock()


def _environment_of_task(backend: str) -> dict[str, str] | None:
    """Returns the environment of what computes in this task; None outside of a Spark task."""
    context = TaskContext.get()
    if context is None:
        return None
    gpu = context.resources().get("gpu")
    return process_environment(
        threads=max(int(context.cpus()), 1),
        devices=[] if gpu is None else given_names(gpu.addresses, os.environ),
        backend=backend,
        more=_SHARED_GPU,
    )


@contextlib.contextmanager
def _task_environment(backend: str) -> Iterator[None]:
    """Gives the backend the task's GPUs and cores while it starts; what else runs in the worker keeps its own."""
    wanted = _environment_of_task(backend)
    if wanted is None:
        yield
        return
    changed = {name: value for name, value in wanted.items() if name not in _OF_PROCESSES}
    with environment(changed):
        yield
