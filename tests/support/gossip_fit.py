"""A fit in gossip mode without Spark: the workers' own processes, each beside a thread that runs its task again."""

import contextlib
import dataclasses
import functools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import keras
import numpy as np
from pyspark import cloudpickle
from rank_pool import record_batch

from elephant.cluster.gpu_plan import NONE, ResourcePlan
from elephant.cluster.warm_workers import COLD
from elephant.driver.gossip.fit import gossip_attempt
from elephant.driver.launcher import LOOPBACK, Launcher
from elephant.driver.run_ranks import run_ranks
from elephant.driver.server_model import ServerModel
from elephant.errors import TrainingError
from elephant.monitor.progress import Progress
from elephant.task.rank_task import WorkerTask
from elephant.task.rendezvous import installed_versions
from elephant.task.specs import TaskSpec

# Spark's default of spark.task.maxFailures.
MOST_ATTEMPTS = 4


@dataclass(frozen=True)
class AttemptContext:
    """What a task asks `pyspark.TaskContext`."""

    rank: int
    attempt: int

    def partitionId(self):
        return self.rank

    def attemptNumber(self):
        return 0

    def taskAttemptId(self):
        return self.attempt

    def cpus(self):
        return 1

    def resources(self):
        return {}


class Job:
    """Tasks of one run; see `elephant.driver.launcher.RankJob`."""

    rows = ()

    def __init__(self, task_of, batches):
        self._task_of, self._tasks, self._ended = task_of, [], False
        self._pool = ThreadPoolExecutor(len(batches))
        self._ends = [self._pool.submit(self._run, rank, own) for rank, own in enumerate(batches)]

    def _run(self, rank, batch):
        for attempt in range(MOST_ATTEMPTS):
            # Numbers of attempts are those of all tasks of an application.
            task = self._task_of(AttemptContext(rank, 100 * attempt + rank))
            self._tasks.append(task)
            try:
                return list(task.rows([batch]))
            except TrainingError:
                if self._ended or attempt == MOST_ATTEMPTS - 1:
                    raise

    @property
    def running(self):
        return not all(end.done() for end in self._ends)

    @property
    def error(self):
        return next((end.exception() for end in self._ends if end.done() and end.exception()), None)

    def cancel(self):
        self._ended = True

    def close(self):
        for task in self._tasks:
            task.kill()
        self._pool.shutdown()


class Tasks(Launcher):
    """Starts the workers of a fit as ordinary tasks."""

    addresses = (LOOPBACK, LOOPBACK)

    def __init__(self, batches, servers):
        self._batches, self._servers, self._closing = batches, servers, contextlib.ExitStack()

    def start(self, spec, run):
        job = Job(functools.partial(WorkerTask, spec, run, self._servers), self._batches)
        self._closing.callback(job.close)
        return job

    def close(self):
        self._closing.close()


class States:
    """Keeps the states that a fit could go on from, in place of a `CheckpointWriter`."""

    is_wanted = False

    def __init__(self):
        self.all = []

    def check(self):
        """Nothing is written."""

    def keep(self, state):
        self.all.append(state)


def gossip_fit(job, columns, *, notes=None, warm=COLD, states=None):
    """Trains a `TrainingJob` on arrays by role, for each worker; returns its `FitResult`.

    Args:
        job: Its options say how many workers there are.
        notes: A list for the lines that a user is shown.
        warm: How many processes may wait that have imported Keras.
        states: The `States` to keep; None keeps none.
    """
    from elephant.rank.asynchronous.async_callbacks import worker_copies

    batches = [record_batch(job.schema, part) for part in columns]
    progress = Progress(num_workers=len(columns), epochs=job.config.epochs, verbose=0)
    if notes is not None:
        progress.note = notes.append
    copies = worker_copies(job.callbacks)
    spec = TaskSpec(
        program="gossip",
        driver_versions=installed_versions(),
        job=cloudpickle.dumps(with_callbacks(job, copies)),
        backend=keras.config.backend(),
        schema=job.schema,
        timeouts=job.config.timeouts,
        plan=ResourcePlan(devices=NONE, slots_needed=len(columns)),
        warm=warm,
    )
    model = ServerModel(job, job.schema.row_spec({}))
    attempt_on = functools.partial(gossip_attempt, Tasks, spec, job, model, progress, states, lambda attempt: False)
    return run_ranks(batches, spec, progress, attempt_on)


def with_callbacks(job, callbacks):
    """Returns a job as its workers get it."""
    state = None if job.state is None else job.state.without_arrays()
    return dataclasses.replace(job, callbacks=tuple(callbacks), driver_callbacks=(), state=state)


class Marker(keras.callbacks.Callback):
    """Writes a worker's process id once it has trained a step, awaits the others, and sleeps after each step.

    Args:
        folder: Where.
        workers: How many are awaited.
        sleep_s: Seconds of sleep after each step of the worker that is slow.
        slow: The partition that sleeps; its features' first column says it.
    """

    def __init__(self, folder, workers, sleep_s=0.0):
        super().__init__()
        self.folder, self.workers, self.sleep_s = str(folder), workers, sleep_s

    def on_train_batch_end(self, batch, logs=None):
        path = os.path.join(self.folder, str(os.getpid()))
        if not os.path.exists(path):
            with open(path, "w"):
                pass
        end = time.monotonic() + 60
        while len(os.listdir(self.folder)) < self.workers and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(self.sleep_s)


def started(folder, workers, timeout_s=60):
    """Returns the process ids of the workers, once all have trained a step."""
    end = time.monotonic() + timeout_s
    while len(os.listdir(folder)) < workers:
        if time.monotonic() > end:
            raise TimeoutError(f"{os.listdir(folder)} of {workers} workers began")
        time.sleep(0.02)
    return sorted(int(name) for name in os.listdir(folder))


def flat(variables):
    """Returns arrays as one vector."""
    return np.concatenate([np.asarray(one).ravel() for one in variables])
