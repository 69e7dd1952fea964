"""Processes with Keras imported, kept for the whole session, that train workers against real parameter servers."""

import contextlib
import multiprocessing
import os
import secrets
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rank_pool import write_shard

WORKERS = 3
REPLY_TIMEOUT_S = 120


@dataclass
class WorkerRecording:
    """What a worker reported: it takes the place of the driver's channel."""

    parts: list = field(default_factory=list)
    steps: int = 0
    stops: int = 0

    def step(self, epoch, step, steps, logs):
        self.steps += 1

    def epoch_part(self, part):
        self.parts.append(part)

    def request_stop(self):
        self.stops += 1


def train_partition(job, columns, partition, attempt, num_workers, addresses, token, run_id, layout):
    """Trains one worker; what a training process does, without its Spark task."""
    from elephant.config import Timeouts
    from elephant.data.shard import Shard
    from elephant.parameter_server.client import ParameterServers
    from elephant.parameter_server.layout import Layout
    from elephant.training.assignment import Assignment
    from elephant.training.asynchronous import train_worker

    recording = WorkerRecording()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        summary = write_shard(path, job.schema, columns)
        row_shapes = summary.row_shapes or {"features": (int(np.prod(columns["features"].shape[1:])),)}
        assignment = Assignment(
            partition=partition,
            attempt=attempt,
            num_workers=num_workers,
            num_rows=summary.num_rows,
            num_marked=summary.num_validation,
            row_shapes=row_shapes,
            shard=str(path) if summary.num_rows else None,
            driver=("127.0.0.1", 0),
            run_id=run_id,
            token=token.hex(),
            servers=list(addresses),
            layout=layout,
            host="here",
            device="CPU",
            threads=1,
            timeouts=Timeouts(connect_s=30, collective_s=60),
        )
        assignment = Assignment.from_bytes(assignment.to_bytes())
        shard = Shard(path if summary.num_rows else None, job.schema, row_shapes)
        with contextlib.closing(shard):
            with ParameterServers(
                assignment.servers,
                token=token,
                run_id=run_id,
                layout=Layout.from_json(layout),
                partition=partition,
                attempt=attempt,
                compression=job.config.compression,
                timeouts=assignment.timeouts,
            ) as servers:
                train_worker(job, shard, assignment, servers, recording)
    return recording


def serve(pipe, folder):
    # A process that is killed removes nothing of its own, TensorFlow's generated code among it.
    tempfile.tempdir = folder
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras  # noqa: F401  (imported once for all tests)
    from pyspark import cloudpickle

    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", train_partition(**cloudpickle.loads(order))))
        except BaseException as error:
            pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))


class WorkerError(Exception):
    """A worker of a test's fit failed.

    Attributes:
        kind: The name of the error's class.
        trace: The traceback.
    """

    def __init__(self, kind, message, trace):
        self.kind, self.trace = kind, trace
        super().__init__(f"{kind}: {message}\n{trace}")


class WorkerPool:
    """Processes that train one worker after the other; a killed one is replaced."""

    def __init__(self):
        self._context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="worker-pool-")
        self._pipes, self._processes = [None] * WORKERS, [None] * WORKERS
        for index in range(WORKERS):
            self._start(index)

    def _start(self, index):
        mine, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, self._folder.name), name=f"worker-{index}", daemon=True
        )
        process.start()
        theirs.close()
        self._pipes[index], self._processes[index] = mine, process

    def begin(self, index, **order):
        """Starts what `train_partition` does in one of the processes."""
        from pyspark import cloudpickle

        self._pipes[index].send(cloudpickle.dumps(order))

    def result(self, index):
        """Returns the worker's `WorkerRecording`; raises `WorkerError`."""
        if not self._pipes[index].poll(REPLY_TIMEOUT_S):
            raise TimeoutError("a worker did not answer")
        outcome, value = self._pipes[index].recv()
        if outcome == "error":
            raise WorkerError(*value)
        return value

    def kill(self, index):
        """Ends a process at once, whatever it does, and starts another in its place."""
        self._processes[index].kill()
        self._processes[index].join()
        self._pipes[index].close()
        self._start(index)

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def row_spec(schema, columns):
    """Returns what one row of the input is."""
    with tempfile.TemporaryDirectory() as folder:
        return schema.row_spec(write_shard(Path(folder) / "shard", schema, columns).row_shapes)


class AsynchronousFit:
    """One fit: its servers, and workers of a pool that train against them.

    Args:
        pool: The `WorkerPool`.
        job: The `TrainingJob`.
        columns: For each partition a dictionary of arrays by role.
        servers: How many.
        kept: What the servers of an earlier fit kept (`Control.keep`), which this one goes on from.
        spec: More of `ServerSpec`.
    """

    def __init__(self, pool, job, columns, *, servers=1, kept=None, **spec):
        from elephant.modeling.flat import layout_of, read_weights
        from elephant.modeling.translation import slots_of, translate
        from elephant.modeling.variables import build_variables, flatten, moving_statistics
        from elephant.parameter_server.control import Control
        from elephant.parameter_server.optimizers import without_clipping
        from elephant.parameter_server.process import ServerProcess, listening_sockets
        from elephant.parameter_server.sharding import shard_specs
        from elephant.parameter_server.spec import ServerSpec
        from elephant.training.algorithms import divides_by_staleness

        self.pool, self.job, self.columns = pool, job, columns
        self.model = model = job.model.build()
        if not model.built:
            build_variables(model, row_spec(job.schema, columns[0]))
        if job.config.learning_rate is not None:
            model.optimizer.learning_rate = job.config.learning_rate
        self.layout = layout_of(model)
        state = flatten(moving_statistics(model))
        slots, iterations = [], 0
        rule = {"name": "add"}
        if job.config.pushes_gradients:
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            rule = translate(model.optimizer, self.layout)
            rule = rule if servers == 1 else without_clipping(rule)[0]
            slots, iterations = slots_of(model.optimizer, self.layout)
        self.run_id, self.token = secrets.token_hex(8), secrets.token_bytes(32)
        whole = ServerSpec(
            run_id=self.run_id,
            layout=self.layout,
            first_value=0,
            num_values=self.layout.num_values,
            rule=rule,
            divide_by_staleness=divides_by_staleness(job.config),
            num_partitions=len(columns),
            num_state_values=len(state),
            **spec,
        )
        values, ledgers = read_weights(model, self.layout), [{}] * servers
        if kept is not None:
            values, slots, iterations = kept.fetched.values, kept.fetched.slots, kept.fetched.iterations
            ledgers = kept.ledgers
        self.notes = []
        self.servers = []
        sockets = listening_sockets("127.0.0.1", 0, servers)
        for part, listener, ledger in zip(shard_specs(whole, servers), sockets, ledgers, strict=True):
            span = slice(part.first_value, part.first_value + part.num_values)
            self.servers.append(
                ServerProcess(
                    part,
                    listener,
                    self.token,
                    values[span],
                    [slot[span] for slot in slots],
                    iterations,
                    state if part.num_state_values else None,
                    ledger=ledger,
                    note=self.notes.append,
                )
            )
        self.addresses = [server.address for server in self.servers]
        self.control = Control(self.addresses, token=self.token, run_id=self.run_id, layout=self.layout)

    def begin(self, partition, *, attempt=0, index=None, job=None, columns=None):
        """Starts a worker, in the process of its partition's number unless another is given."""
        self.pool.begin(
            partition if index is None else index,
            job=job or self.job,
            columns=columns or self.columns[partition],
            partition=partition,
            attempt=attempt,
            num_workers=len(self.columns),
            addresses=self.addresses,
            token=self.token,
            run_id=self.run_id,
            layout=self.layout.to_json(),
        )

    def train(self, partition, **options):
        """Trains one worker to its end."""
        self.begin(partition, **options)
        index = options.get("index")
        return self.pool.result(partition if index is None else index)

    def train_all(self):
        """Trains all workers at the same time; returns their recordings."""
        for partition in range(len(self.columns)):
            self.begin(partition)
        return [self.pool.result(partition) for partition in range(len(self.columns))]

    def weights(self):
        """Returns the servers' weights, an array for each trainable variable."""
        fetched = self.control.fetch().values
        return [np.array(view) for view in self.layout.views(fetched)]

    def wait_for_step(self, partition, step, timeout_s=60):
        """Waits until the servers have applied a step of a partition."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            positions = self.control.statistics()["positions"]
            if int(positions.get(str(partition), positions.get(partition, 0))) >= step:
                return
            time.sleep(0.01)
        raise TimeoutError(f"partition {partition} did not get to step {step}")

    def close(self):
        self.control.close()
        for server in self.servers:
            server.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
