"""Three processes with Keras imported, kept for the whole session: real ranks over real sockets, without Spark."""

import multiprocessing
import os
import secrets
import socket
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

WORLD = 3
REPLY_TIMEOUT_S = 120
NUMBERS = pa.list_(pa.float64())


@dataclass
class Recording:
    """What a rank reported: it takes the place of the driver's channel."""

    epochs: list = field(default_factory=list)
    variables: list = field(default_factory=list)
    states: list = field(default_factory=list)

    def step(self, epoch, step, steps, logs):
        """Progress is not looked at here."""

    def epoch(self, epoch, logs):
        self.epochs.append(logs)

    def keep(self, state):
        self.states.append(state)

    def result(self, variables, rows):
        self.variables = [np.array(variable) for variable in variables]


def write_shard(path, schema, columns):
    """Writes arrays (rows, ...) as the record batches that Spark would send, in two batches where rows suffice."""
    from elephant.data.shard import ShardWriter

    with ShardWriter(path, schema) as writer:
        rows = len(columns["features"])
        for start, stop in ((0, rows // 2), (rows // 2, rows)):
            writer.write(record_batch(schema, {name: values[start:stop] for name, values in columns.items()}))
        return writer.finish()


def record_batch(schema, columns):
    arrays = [arrow_of(columns[field_.role], field_) for field_ in schema]
    return pa.RecordBatch.from_arrays(arrays, [field_.role for field_ in schema])


def arrow_of(values, field_):
    """Returns a column as Spark sends it; sequences and sparse rows are those of `model_jobs`."""
    if field_.kind == "sparse":
        rows = [(0, len(row), np.flatnonzero(row).tolist(), row[row != 0].tolist()) for row in values.matrix]
        kind = pa.struct({"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": NUMBERS})
        return pa.array([dict(zip(kind.names, row, strict=True)) for row in rows], kind)
    if field_.kind in ("ragged", "text"):
        return pa.array([np.asarray(row).tolist() for row in values])
    if not field_.is_array:
        return pa.array(values)
    flat = values.reshape(len(values), int(np.prod(values.shape[1:])))
    offsets = np.arange(len(flat) + 1, dtype=np.int32) * flat.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(flat.ravel()))


def run_rank(rank, listener, addresses, token, run_id, job, columns, transport):
    """Trains one rank of a fit; what a training process does, without its Spark task."""
    from elephant.collective.connect import form_collective
    from elephant.collective.current import using
    from elephant.data.shard import Shard
    from elephant.net.stream import Listener
    from elephant.training.job import epoch_plan
    from elephant.training.synchronous import train_rank

    recording = Recording()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        summaries = [write_shard(Path(folder) / f"{peer}", job.schema, part) for peer, part in enumerate(columns)]
        if summaries[rank].num_rows:
            path = Path(folder) / f"{rank}"
        row_shapes = next(summary.row_shapes for summary in summaries if summary.num_rows)
        shard = Shard(path if summaries[rank].num_rows else None, job.schema, row_shapes)
        plan = epoch_plan(
            job.config,
            job.schema,
            [summary.num_rows for summary in summaries],
            [summary.num_validation for summary in summaries],
        )
        with Listener(listener) as accepting:
            ring = form_collective(
                rank, addresses, accepting, token=token, run_id=run_id, timeout_s=30, transport=transport
            )
        with ring, using(ring):
            train_rank(job, shard, plan, ring, recording)
        shard.close()
    return recording


def fit_here(job, columns):
    """Returns the `Recording` of a fit of one rank, in this process: for what ranks do not do together.

    Args:
        job: The `TrainingJob`.
        columns: A dictionary of arrays by role, shape (rows, ...).
    """
    listener = socket.create_server(("127.0.0.1", 0))
    where = {"addresses": [listener.getsockname()], "token": secrets.token_bytes(32), "run_id": "here"}
    return run_rank(0, listener, job=job, columns=[columns], transport="auto", **where)


def call_rank(rank, listener, addresses, token, run_id, fn, args):
    """Calls a function as one rank of a run; what the process of a rank does, without its Spark task."""
    from elephant.collective import form_collective, using
    from elephant.net.stream import Listener

    with Listener(listener) as accepting:
        ring = form_collective(rank, addresses, accepting, token=token, run_id=run_id, timeout_s=30)
    with ring, using(ring):
        return fn(*args)


def serve(pipe, folder):
    # TensorFlow leaves its generated code there.
    tempfile.tempdir = folder
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras  # noqa: F401  (imported once for all tests)
    from pyspark import cloudpickle

    listener = None
    while True:
        try:
            kind, payload = pipe.recv()
        except EOFError:
            return
        if kind == "listen":
            listener = socket.create_server(("127.0.0.1", 0))
            pipe.send(listener.getsockname())
            continue
        try:
            work = {"fit": run_rank, "call": call_rank}[kind]
            pipe.send(("ok", work(listener=listener, **cloudpickle.loads(payload))))
        except BaseException as error:
            pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))


class RankError(Exception):
    """A rank of a test's fit failed."""

    def __init__(self, outcomes):
        self.outcomes = outcomes
        super().__init__("\n".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes)))


class RankPool:
    """Runs fits on processes that live as long as the tests."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self._folder.name), name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def fit(self, job, columns, transport="auto"):
        """Returns each rank's `Recording`.

        Args:
            job: The `TrainingJob`.
            columns: For each rank a dictionary of arrays by role, shape (rows, ...).
            transport: ``"tcp"`` makes every rank count as a host of its own.
        """
        order = {"job": job, "columns": columns, "transport": transport}
        return self._on_ranks("fit", [order] * len(columns))

    def run(self, fn, args_by_rank):
        """Returns what a function returns on each rank.

        Args:
            fn: The function, which travels by value.
            args_by_rank: Its arguments for each rank, a tuple each.
        """
        return self._on_ranks("call", [{"fn": fn, "args": args} for args in args_by_rank])

    def _on_ranks(self, kind, orders):
        from pyspark import cloudpickle

        pipes = self.pipes[: len(orders)]
        for pipe in pipes:
            pipe.send(("listen", None))
        shared = {
            "addresses": [self._reply(pipe) for pipe in pipes],
            "token": secrets.token_bytes(32),
            "run_id": secrets.token_hex(8),
        }
        for rank, (pipe, order) in enumerate(zip(pipes, orders, strict=True)):
            pipe.send((kind, cloudpickle.dumps({"rank": rank, **shared, **order})))
        outcomes = [self._reply(pipe) for pipe in pipes]
        if any(outcome == "error" for outcome, _ in outcomes):
            raise RankError([value for _, value in outcomes])
        return [value for _, value in outcomes]

    def _reply(self, pipe):
        if not pipe.poll(REPLY_TIMEOUT_S):
            raise TimeoutError("a rank did not answer")
        return pipe.recv()

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
