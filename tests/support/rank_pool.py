"""Three processes with Keras imported, kept for the whole session: they run a rank's programs without Spark.

The programs are the product's own (`elephant.rank.program`). Only the driver's channel has
another in its place: a `Recording`, which keeps what a rank reports.
"""

import dataclasses
import functools
import multiprocessing
import os
import pickle
import secrets
import socket
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa

WORLD = 3
REPLY_TIMEOUT_S = 120
POLL_S = 0.2
NUMBERS = pa.list_(pa.float64())


@dataclass
class Recording:
    """What a rank or a worker reported: it takes the place of the driver's channel."""

    epochs: list = field(default_factory=list)
    variables: list = field(default_factory=list)
    states: list = field(default_factory=list)
    parts: list = field(default_factory=list)
    stops: int = 0
    sent: list = field(default_factory=list)

    def send(self, event):
        """That a rank has begun, and its progress, are kept."""
        self.sent.append(event)

    def epoch(self, epoch, logs):
        self.epochs.append(logs)

    def epoch_part(self, part):
        self.parts.append(part)

    def request_stop(self):
        self.stops += 1

    is_free = True
    state_wanted = False

    def await_callbacks(self, timeout_s):
        """Callbacks on the driver do nothing."""
        from elephant.monitor.events import CallbacksDone

        return CallbacksDone(rank=0, stop=False, logs=self.sent[-1].logs)

    def await_receipt(self, timeout_s):
        return True

    def keep(self, state):
        self.states.append(state)

    def result(self, variables, rows):
        self.variables = [np.array(variable) for variable in variables]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Nothing was opened."""


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


def run_program(name, job, place, transport):
    """Runs a program of the product as one rank; returns its `Recording`, and what the program returns."""
    from elephant.rank import program as programs

    recording, program = Recording(), programs.PROGRAMS[name]
    with mock.patch.multiple(
        programs,
        ChannelClient=lambda *_, **__: recording,
        form_collective=functools.partial(programs.form_collective, transport=transport),
    ):
        return recording, program.start(program.load(job), place, lambda: None)


def serve(pipe, folder):
    # A process that is killed removes nothing of its own, TensorFlow's generated code among it.
    tempfile.tempdir = folder
    from elephant.rank.program import PROGRAMS

    for program in PROGRAMS.values():
        program.prepare()
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            listener = socket.create_server(("127.0.0.1", 0))
            pipe.send((listener.getsockname(), listener.detach()))
            continue
        try:
            pipe.send(("ok", run_program(*order)))
        except BaseException as error:
            pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))


class RankError(Exception):
    """A rank of a test's fit failed."""

    def __init__(self, outcomes):
        self.outcomes = outcomes
        super().__init__("\n".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes)))


class WorkerError(Exception):
    """A worker of a test's fit failed.

    Attributes:
        kind: The name of the error's class.
        trace: The traceback.
    """

    def __init__(self, kind, message, trace):
        self.kind, self.trace = kind, trace
        super().__init__(f"{kind}: {message}\n{trace}")


def of_ranks(job, count):
    """Returns a job as the driver sends it to so many ranks."""
    return dataclasses.replace(
        job, config=dataclasses.replace(job.config, num_workers=count // job.config.gpus_per_worker)
    )


def places_of(job, columns, folder):
    """Writes the ranks' shards; returns what each rank's `RankInfo` says of them."""
    shards = [folder / str(rank) for rank in range(len(columns))]
    summaries = [write_shard(path, job.schema, part) for path, part in zip(shards, columns, strict=True)]
    shared = {
        "num_rows": [summary.num_rows for summary in summaries],
        "num_marked": [summary.num_validation for summary in summaries],
        "row_shapes": next(summary.row_shapes for summary in summaries if summary.num_rows),
    }
    return [
        {**shared, "shard": str(path) if summary.num_rows else None}
        for path, summary in zip(shards, summaries, strict=True)
    ]


def fit_here(job, columns):
    """Returns the `Recording` of a fit of one rank, in this process: for what ranks do not do together.

    Args:
        job: The `TrainingJob`.
        columns: A dictionary of arrays by role, shape (rows, ...).
    """
    from pyspark import cloudpickle

    from elephant.rank.rank_info import RankInfo

    with tempfile.TemporaryDirectory() as folder:
        (place,) = places_of(job, [columns], Path(folder))
        listener = socket.create_server(("127.0.0.1", 0))
        where = {"addresses": [listener.getsockname()], "listener_fd": listener.detach()}
        rank_info = RankInfo(rank=0, **who_runs(), **where, **place)
        recording, _ = run_program("fit", cloudpickle.dumps(of_ranks(job, 1)), rank_info.to_bytes(), "auto")
    return recording


class RankPool:
    """Processes that are ranks of one fit together, or workers each by itself.

    One starts when it is first needed, and again when it is needed after it was lost: a server forks it that has
    imported Keras, as one does on an executor.

    Args:
        backend: Of Keras in these processes; None leaves it to their environment.
        environment: More of theirs, by name.
        size: Processes at most.
    """

    def __init__(self, backend=None, environment=None, size=WORLD):
        self._environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **({"KERAS_BACKEND": backend} if backend else {})}
        self._environment |= environment or {}
        self._context = multiprocessing.get_context("forkserver")
        # One of its own: another pool has another backend.
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(["elephant.rank.synchronous"])
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._pipes, self._processes, self._is_busy = [None] * size, [None] * size, [False] * size

    def _start(self, index):
        mine, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, self._folder.name), name=f"rank-{index}", daemon=True
        )
        with (
            mock.patch.dict(os.environ, self._environment),
            mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process),
        ):
            process.start()
        theirs.close()
        self._pipes[index], self._processes[index], self._is_busy[index] = mine, process, False

    def fit(self, job, columns, transport="auto", **limits):
        """Trains synchronously; returns each rank's `Recording`, and raises `RankError`.

        Args:
            job: The `TrainingJob`.
            columns: For each rank a dictionary of arrays by role, shape (rows, ...).
            transport: ``"tcp"`` makes every rank count as a host of its own.
            limits: Of `elephant.config.Timeouts`.
        """
        from pyspark import cloudpickle

        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            places = places_of(job, columns, Path(folder))
            block = cloudpickle.dumps(of_ranks(job, len(columns)))
            outcomes = self._together("fit", [block] * len(places), places, transport, **limits)
        return [recording for recording, _ in outcomes]

    def run(self, fn, args_by_rank):
        """Returns what a function returns on each rank.

        Args:
            fn: The function, which travels by value.
            args_by_rank: Its arguments for each rank, a tuple each.
        """
        from pyspark import cloudpickle

        from elephant.rank.program import FunctionCall

        calls = [FunctionCall(fn=fn, args=args, kwargs={}, pickled=cloudpickle.dumps) for args in args_by_rank]
        place = {"num_rows": [], "num_marked": [], "row_shapes": {}, "shard": None}
        jobs = [cloudpickle.dumps(call) for call in calls]
        return [pickle.loads(result) for _, result in self._together("function", jobs, [place] * len(jobs))]

    def _together(self, program, jobs, places, transport="auto", **limits):
        from elephant.rank.rank_info import RankInfo

        ranks = range(len(places))
        for rank in ranks:
            self._send(rank, None)
        listeners = [self._reply(rank) for rank in ranks]
        shared = {**who_runs(**limits), "addresses": [address for address, _ in listeners]}
        for rank, ((_, descriptor), place) in enumerate(zip(listeners, places, strict=True)):
            rank_info = RankInfo(rank=rank, listener_fd=descriptor, **shared, **place)
            self._send(rank, (program, jobs[rank], rank_info.to_bytes(), transport))
        outcomes = self._outcomes(ranks)
        if any(outcome == "error" for outcome, _ in outcomes):
            raise RankError([value for _, value in outcomes])
        return [value for _, value in outcomes]

    def _outcomes(self, ranks):
        """Returns each rank's outcome; those that are stopped when all others have answered are ended."""
        outcomes, deadline = {}, time.monotonic() + REPLY_TIMEOUT_S
        while waiting := [rank for rank in ranks if rank not in outcomes]:
            ready = connection.wait([self._pipes[rank] for rank in waiting], timeout=POLL_S)
            outcomes |= {rank: self._outcome(rank) for rank in waiting if self._pipes[rank] in ready}
            if not ready and all(self._is_stopped(rank) for rank in waiting):
                for rank in waiting:
                    self.kill(rank)
                    outcomes[rank] = "error", ("Stopped", "its process was stopped", "")
            elif time.monotonic() > deadline:
                raise TimeoutError(f"processes {waiting} of the pool did not answer")
        return [outcomes[rank] for rank in ranks]

    def _is_stopped(self, rank):
        return psutil.Process(self._processes[rank].pid).status() == psutil.STATUS_STOPPED

    def _outcome(self, rank):
        try:
            return self._reply(rank)
        except EOFError:
            return "error", ("EOFError", "its process has ended", "")

    def begin(self, index, job, rank_info):
        """Has one of the processes train a worker.

        Args:
            index: Which process.
            job: The `TrainingJob`.
            rank_info: The worker's `RankInfo`.
        """
        from pyspark import cloudpickle

        self._send(index, ("asynchronous", cloudpickle.dumps(job), rank_info.to_bytes(), "auto"))

    def result(self, index):
        """Returns the worker's `Recording`; raises `WorkerError`."""
        outcome, value = self._reply(index)
        if outcome == "error":
            raise WorkerError(*value)
        return value[0]

    def kill(self, index):
        """Ends a process at once, whatever it does; whoever needs it next has another in its place."""
        if self._processes[index] is not None:
            self._processes[index].kill()
            self._processes[index].join()
            self._pipes[index].close()
            self._processes[index] = None

    def _send(self, index, order):
        process = self._processes[index]
        if process is not None and (self._is_busy[index] or not process.is_alive()):
            # A test that has failed before has left it like that.
            self.kill(index)
        if self._processes[index] is None:
            self._start(index)
        self._pipes[index].send(order)
        self._is_busy[index] = True

    def _reply(self, index):
        if not self._pipes[index].poll(REPLY_TIMEOUT_S):
            raise TimeoutError(f"process {index} of the pool did not answer")
        reply = self._pipes[index].recv()
        self._is_busy[index] = False
        return reply

    def close(self):
        running = [index for index, process in enumerate(self._processes) if process is not None]
        for index in running:
            self._pipes[index].close()
        for index in running:
            self._processes[index].join(timeout=10)
            self.kill(index)
        self._server._stop()
        self._folder.cleanup()


def who_runs(**limits):
    """Returns what every rank of a run is told of it, and of its place.

    Args:
        limits: Of `elephant.config.Timeouts`.
    """
    from elephant.config import Timeouts

    return {
        "driver": ("127.0.0.1", 0),
        "run_id": secrets.token_hex(8),
        "token": secrets.token_hex(32),
        "host": "here",
        "device": "CPU",
        "threads": 1,
        "timeouts": Timeouts(**{"connect_s": 30, "collective_s": 60, **limits}),
    }
