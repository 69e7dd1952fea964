"""Training as a team does it, an epoch per turn: as ranks of elephant, or as the user's own ``model.fit``.

Both sides run unmodified: `elephant.rank.synchronous.train_rank` on a shard as
Spark would have written it, and ``model.fit`` on arrays in memory. A callback holds
them at the beginning of every epoch until their turn comes.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from team import Interval, Member
from workloads import WORKLOADS, make_images

TIMEOUT_S = 300.0
# How many rows Spark puts into one record batch (spark.sql.execution.arrow.maxRecordsPerBatch).
_ROWS_PER_RECORD_BATCH = 10_000
# Of a `model.fit` that is tuned.
STEPS_PER_EXECUTION = 32


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one process of a team trains.

    Args:
        workload: Name of one in `workloads.WORKLOADS`.
        rows: Rows of an epoch, of this process.
        batch_size: Rows of a step, of this process.
        epochs: Turns that it takes, the first ones included that are not counted.
        hosts: Where the ranks listen, by rank; on loopback when there is none.
        transport: What ranks exchange gradients by.
        options: Further options of the fit, of `elephant.config.FitConfig`.
        source: For ranks, what `pickled_source` returned.
    """

    workload: str
    rows: int
    batch_size: int
    epochs: int
    hosts: Sequence[str] = ()
    transport: str = "auto"
    options: Mapping[str, Any] | None = None
    source: bytes = b""


@dataclass(frozen=True)
class Epoch:
    """What a process tells of one epoch.

    Args:
        interval: When it began and ended.
        cpu_s: Processor seconds of all threads of the process.
        grown: Bytes by which its resident memory has risen, at most, since training began.
        faults: Pages that the process waited for until they were read from disk.
        slot_bytes: Bytes of the variables that its optimizer has.
    """

    interval: Interval
    cpu_s: float
    grown: int
    faults: int = 0
    slot_bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.interval[1] - self.interval[0]


def make_turns(member: Member) -> Any:
    """Returns a callback that lets each epoch begin when the member's turn has come, and replies an `Epoch`.

    An epoch lasts until the next one could begin, so that all that is done between two of them counts.
    """
    import keras

    class Turns(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self._turns = member.turns()
            self._began = self._cpu = 0.0
            self._before = self._faults = 0

        def on_train_begin(self, logs: Any = None) -> None:
            self._before = forget_peak()

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch:
                self._reply()
            if next(self._turns, None) is None:
                raise SystemExit("the team was closed in mid-training")
            self._began, self._cpu, self._faults = time.monotonic(), time.process_time(), faults()

        def on_train_end(self, logs: Any = None) -> None:
            self._reply()

        def _reply(self) -> None:
            interval, cpu_s = (self._began, time.monotonic()), time.process_time() - self._cpu
            slots = sum(4 * math.prod(variable.shape) for variable in self.model.optimizer.variables)
            member.reply(Epoch(interval, cpu_s, peak_bytes() - self._before, faults() - self._faults, slots))

    return Turns()


def faults() -> int:
    """Returns how many pages this process has waited for until they were read from disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def forget_peak() -> int:
    """Makes the peak of this process' resident memory what it is now, and returns that in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Returns the peak of this process' resident memory, shared memory that it touched included."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


@functools.cache
def pickled_source(workload: str, backend: str = "tensorflow") -> bytes:
    """Returns the pickled `elephant.modeling.model_spec.ModelSpec` of a workload, made in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as driver:
        return driver.submit(_make_source, workload, backend).result(TIMEOUT_S)


def _make_source(workload: str, backend: str) -> bytes:
    os.environ["KERAS_BACKEND"] = backend
    from elephant.modeling.model_spec import model_source

    return pickle.dumps(model_source(WORKLOADS[workload].build))


def fit_alone(member: Member, training: Training) -> None:
    """The user's own ``model.fit``, without any communication."""
    model, x, y = _prepared(member, training)
    _fit(member, training, model, x, y)


def fit_tuned(member: Member, training: Training) -> None:
    """The same with several steps for each call of the runtime, as Keras' guide to speed has it."""
    model, x, y = _prepared(member, training)
    model.steps_per_execution = STEPS_PER_EXECUTION
    _fit(member, training, model, x, y)


def fit_from_data(member: Member, training: Training) -> None:
    """The same on a `tf.data.Dataset` that shuffles the numbers of rows, and looks up whole batches of them."""
    import tensorflow as tf

    model, x, y = _prepared(member, training)
    model.steps_per_execution = STEPS_PER_EXECUTION
    rows = (tf.constant(x), tf.constant(y))
    order = tf.data.Dataset.range(len(y)).shuffle(len(y)).batch(training.batch_size)
    data = order.map(lambda places: tuple(tf.gather(part, places) for part in rows), tf.data.AUTOTUNE)
    data = data.prefetch(tf.data.AUTOTUNE)
    model.fit(data, epochs=training.epochs, shuffle=False, callbacks=[make_turns(member)], verbose=0)


def fit_hooked(member: Member, training: Training) -> None:
    """The same with elephant's hook in the optimizer, in a world of one."""
    from elephant.backends import current
    from elephant.backends.gradient_averager import GradientAverager
    from elephant.collective import LocalCommunicator

    model, x, y = _prepared(member, training)
    averager = GradientAverager(LocalCommunicator(), lambda: 1.0)
    current().average_gradients(averager, model.optimizer, model)
    _fit(member, training, model, x, y)
    averager.close()


def fit_as_rank(member: Member, training: Training) -> None:
    """One rank of a fit, as its training process runs it."""
    from elephant.collective import form_collective
    from elephant.config import FitConfig
    from elephant.net import Listener
    from elephant.net.tls import new_token
    from elephant.rank.job import TrainingJob, epoch_plan
    from elephant.rank.synchronous import train_rank

    schema = schema_of(training)
    config = FitConfig(
        num_workers=member.size, epochs=training.epochs, batch_size=training.batch_size, **(training.options or {})
    )
    # As in a real fit, no model has been built in this process yet.
    source = pickle.loads(training.source)
    job = TrainingJob(source, (make_turns(member),), config, schema)
    shard = shard_of(schema, *rows_of(member, training))
    plan = epoch_plan(job, [training.rows] * member.size, [0] * member.size)
    token = new_token(encryption=bool(config.encryption))
    with Listener.bind(training.hosts[member.rank] if training.hosts else "127.0.0.1") as listener:
        addresses, tokens = zip(*member.exchange((listener.address, token)), strict=True)
        collective = form_collective(
            member.rank, addresses, listener, tokens[0], "benchmark", TIMEOUT_S, transport=training.transport
        )
    with collective:
        train_rank(job, shard, plan, collective, _Silent())
    shard.close()


def schema_of(training: Training) -> Any:
    """Returns what the rows of a workload hold."""
    from elephant.data.schema import DENSE, SCALAR, DataSchema, Field

    workload = WORKLOADS[training.workload]
    return DataSchema(
        inputs=(Field("features", ("features",), workload.dtype, DENSE, workload.row_shape),),
        labels=(Field("label", ("label",), "int32", SCALAR),),
    )


class _Silent:
    """Stands where a rank's connection to the driver is."""

    def send(self, event: Any) -> None:
        """Nobody looks."""

    def epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Nobody looks."""

    def await_callbacks(self, timeout_s: float) -> None:
        """Nobody looks."""

    def keep(self, state: Any) -> None:
        """Nobody looks."""

    def result(self, variables: Sequence[np.ndarray], rows: Any) -> None:
        """Nobody looks."""


def _prepared(member: Member, training: Training) -> tuple[Any, np.ndarray, np.ndarray]:
    member.exchange(None)
    workload = WORKLOADS[training.workload]
    model = workload.build()
    model.optimizer.build(model.trainable_variables)
    x, y = rows_of(member, training)
    return model, x.reshape(-1, *workload.row_shape), y


def _fit(member: Member, training: Training, model: Any, x: np.ndarray, y: np.ndarray) -> None:
    model.fit(x, y, batch_size=training.batch_size, epochs=training.epochs, callbacks=[make_turns(member)], verbose=0)


def rows_of(member: Member, training: Training) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images and labels of one process."""
    arrays = make_images(training.rows * member.size)
    mine = slice(member.rank * training.rows, (member.rank + 1) * training.rows)
    return WORKLOADS[training.workload].rows_of(arrays["x_train"][mine]).copy(), arrays["y_train"][mine].copy()


def shard_of(schema: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """Returns the rows as a rank has them: written as Spark's record batches, memory-mapped, without a name."""
    import pyarrow as pa

    from elephant.data.shard import Shard, ShardWriter

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as folder:
        path = Path(folder) / "shard"
        with ShardWriter(path, schema) as writer:
            for start in range(0, len(y), _ROWS_PER_RECORD_BATCH):
                part = slice(start, start + _ROWS_PER_RECORD_BATCH)
                offsets = np.arange(len(y[part]) + 1, dtype=np.int32) * x.shape[1]
                columns = [pa.ListArray.from_arrays(offsets, pa.array(x[part].ravel())), pa.array(y[part])]
                writer.write(pa.RecordBatch.from_arrays(columns, ["features", "label"]))
            summary = writer.finish()
        return Shard(path, schema, summary.row_shapes)


def rank_environment(backend: str = "tensorflow") -> dict[str, str]:
    """Returns the environment in which elephant starts a training process with one core."""
    from elephant.backends.process_environment import process_environment

    return process_environment(threads=1, devices=(), backend=backend)


def plain_environment(backend: str = "tensorflow") -> dict[str, str]:
    """Returns the environment of the user's own process: what a shell would give, and no chatter."""
    return {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
