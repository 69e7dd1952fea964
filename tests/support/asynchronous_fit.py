"""An asynchronous fit without Spark: real parameter servers, and workers in processes of the `RankPool`."""

import contextlib
import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
from gossip_fit import States
from rank_pool import who_runs, write_shard


def row_spec(schema, columns):
    """Returns what one row of the input is."""
    with tempfile.TemporaryDirectory() as folder:
        return schema.row_spec(write_shard(Path(folder) / "shard", schema, columns).row_shapes)


class AsynchronousFit:
    """One fit: its servers, and workers of a pool that train against them.

    Args:
        pool: The `RankPool`.
        job: The `TrainingJob`.
        columns: For each partition a dictionary of arrays by role.
        of_server: Fields of every server's `ServerSpec` that no option has.
        options: More of `AsynchronousOptions`.

    Attributes:
        servers: Their processes (`ServerProcess`).
        control: The driver's connection to them.
        layout: The places of the weights.
    """

    def __init__(self, pool, job, columns, *, of_server=None, **options):
        from elephant.driver.server_model import ServerModel
        from elephant.driver.server_processes import parts_of
        from elephant.parameter_server.control_client import ControlClient
        from elephant.parameter_server.process import listening_sockets

        self.pool, self.job, self.columns = pool, job, columns
        asynchronous = dataclasses.replace(job.config.asynchronous, **options)
        config = dataclasses.replace(job.config, num_workers=len(columns), asynchronous=asynchronous)
        # Some tests say no more of a state than how many epochs are done.
        state = job.state if job.state is not None and job.state.arrays else None
        self._of_driver = dataclasses.replace(job, config=config, state=state)
        self._model = model = ServerModel(self._of_driver, row_spec(job.schema, columns[0]))
        self.layout, self._run = model.layout, who_runs()
        parts = [
            dataclasses.replace(part, spec=dataclasses.replace(part.spec, **(of_server or {})))
            for part in parts_of(model, config, self._run["run_id"])
        ]
        token = bytes.fromhex(self._run["token"])
        self._folder = tempfile.TemporaryDirectory()
        self.servers = [
            part.served(listener, token, self._folder.name)
            for part, listener in zip(parts, listening_sockets("127.0.0.1", 0, len(parts)), strict=True)
        ]
        addresses = [server.address for server in self.servers]
        self.control = ControlClient(addresses, token=token, run_id=self._run["run_id"], layout=self.layout)
        if config.trains_in_rounds:
            # Nobody looks at the epochs here: they need not be opened one by one.
            self.control.open_epochs(config.epochs)

    def begin(self, partition, *, attempt=0, index=None, job=None, columns=None):
        """Starts a worker, in the process of its partition's number unless another is given."""
        from elephant.rank.rank_info import RankInfo

        job, columns = job or self.job, columns or self.columns[partition]
        if job.state is not None:
            job = dataclasses.replace(job, state=job.state.without_arrays())
        shard = Path(tempfile.mkdtemp(dir=self._folder.name)) / "shard"
        summary = write_shard(shard, job.schema, columns)
        rank_info = RankInfo(
            rank=partition,
            attempt=attempt,
            num_rows=[summary.num_rows if rank == partition else 0 for rank in range(len(self.columns))],
            num_marked=[summary.num_validation if rank == partition else 0 for rank in range(len(self.columns))],
            row_shapes=summary.row_shapes or {"features": (int(np.prod(columns["features"].shape[1:])),)},
            shard=str(shard) if summary.num_rows else None,
            servers=[server.address for server in self.servers],
            layout=self.layout.to_json(),
            **self._run,
        )
        self.pool.begin(partition if index is None else index, job, rank_info)

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

    def checkpoint(self, timeout_s=60):
        """Returns a state within an epoch, as the driver makes it while workers go on."""
        from elephant.driver.driver_epochs import DriverEpochs
        from elephant.monitor.events import EpochPart, Started, StepEnded

        # Ends of epochs are to make none.
        options = {"checkpoint_path": "unused", "checkpoint_seconds": 1e-9, "checkpoint_epochs": 10**6}
        job = dataclasses.replace(self._of_driver, config=self._of_driver.config.changed(**options))
        place, states, end = {"host": "h", "device": "CPU", "threads": 1}, States(), time.monotonic() + timeout_s
        with contextlib.closing(DriverEpochs(job, self._model, self.control, states)) as epochs:
            epochs.begin()
            for rank, columns in enumerate(self.columns):
                epochs.note(Started(rank=rank, training_rows=len(columns["features"]), validation_rows=0, **place))
            done = job.first_epoch
            while not states.all and time.monotonic() < end:
                steps, positions = epochs._epoch_steps, self.control.statistics()["positions"]
                ended = min(positions.get(str(rank), 0) // count for rank, count in steps.items() if count)
                for epoch in range(done, ended):
                    for rank in steps:
                        epochs.add(EpochPart(rank=rank, epoch=epoch, rows=0, val_rows=0, steps=0, wait_s=0.0, logs={}))
                done = max(done, ended)
                epochs.note(StepEnded(rank=0, epoch=done, step=1, steps=1, logs={}))
                epochs.keep_up()
        return states.all[0]

    def close(self):
        self.control.close()
        for server in self.servers:
            server.close()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
