"""Two attempts at one partition, as Spark's speculation makes them: real tasks and processes, without Spark."""

import os
import threading
import time

import keras
import numpy as np
import pytest
from counting_model import counted, counting_data, counting_model
from pyspark import cloudpickle
from rank_pool import record_batch

from elephant.config import FitConfig, Timeouts
from elephant.data.schema import DENSE, SCALAR, DataSchema, Field
from elephant.driver.server_model import ServerModel
from elephant.driver.server_processes import DriverServers, parts_of
from elephant.errors import ClusterError, TrainingError
from elephant.modeling.model_spec import model_source
from elephant.monitor.channel import Channel
from elephant.monitor.events import EpochPart, RankFailure
from elephant.parameter_server.control_client import ControlClient
from elephant.parameter_server.process import listening_sockets
from elephant.rank.job import TrainingJob
from elephant.task.rank_task import WorkerTask
from elephant.task.rendezvous import installed_versions
from elephant.task.specs import RunContext, ServerAddresses, TaskSpec

TOKEN, RUN_ID, EPOCHS = bytes(range(32)), "run", 6


class Context:
    """Spark's context of one attempt at partition 0."""

    def __init__(self, attempt):
        self.attempt = attempt

    def partitionId(self):
        return 0

    def attemptNumber(self):
        return 0

    def taskAttemptId(self):
        return self.attempt

    def cpus(self):
        return 1

    def resources(self):
        return {}


def meeting_callback(marker):
    """Returns a callback that makes an attempt wait, in its third batch, until another one trains as well."""

    class Meet(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import os
            import time

            with open(os.path.join(marker, str(os.getpid())), "w"):
                pass
            deadline = time.monotonic() + 60
            while batch == 2 and len(os.listdir(marker)) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)

    return Meet()


def job_of(marker):
    schema = DataSchema(
        inputs=(Field("features", ("features",), "float32", DENSE, (4,)),),
        labels=(Field("label", ("label",), "float32", SCALAR),),
    )
    config = FitConfig(mode="asynchronous", epochs=EPOCHS, batch_size=8)
    return TrainingJob(model_source(counting_model()), (meeting_callback(str(marker)),), config, schema)


@pytest.fixture
def fit(tmp_path):
    """A driver without Spark: its channel, its server, and a function that runs an attempt at partition 0."""
    job = job_of(tmp_path)
    model = ServerModel(job, (4,))
    with (
        Channel(bind_host="127.0.0.1", token=TOKEN, run_id=RUN_ID, timeouts=Timeouts()) as channel,
        DriverServers(
            parts_of(model, job.config, RUN_ID), listening_sockets("127.0.0.1", 0, 1), token=TOKEN
        ) as servers,
    ):
        spec = TaskSpec(
            program="asynchronous",
            driver_versions=installed_versions(),
            job=cloudpickle.dumps(job),
            backend=keras.config.backend(),
            schema=job.schema,
            timeouts=Timeouts(),
        )
        run = RunContext(run_id=RUN_ID, token=TOKEN, driver=("127.0.0.1", channel.port))
        served = ServerAddresses(servers=servers.addresses, layout=model.layout.to_json(), num_workers=1)
        yield channel, servers, model, lambda attempt: WorkerTask(spec, run, served, Context(attempt))
        channel.dismiss()


def attempt_in_thread(task, columns, ends):
    def attempt():
        batches = [record_batch(task._spec.schema, columns)]
        try:
            ends.append(list(task.rows(batches)))
        except TrainingError as error:
            ends.append(error)

    thread = threading.Thread(target=attempt, name="attempt")
    thread.start()
    return thread


@pytest.mark.slow(
    "two training processes; tests/rank/test_resume.py has a later attempt, tests/parameter_server the counts"
)
def test_attempt_when_a_second_one_comes_then_the_first_ends_and_no_batch_counts_twice(fit, tmp_path):
    channel, servers, model, task_of = fit
    columns = counting_data(40)
    # Spark's shuffle may deliver a retry's rows in another order.
    turned = {name: values[::-1] for name, values in columns.items()}
    first, second = [], []
    threads = [attempt_in_thread(task_of(11), columns, first)]
    deadline = time.monotonic() + 60
    while not os.listdir(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    threads.append(attempt_in_thread(task_of(12), turned, second))
    for thread in threads:
        thread.join(timeout=90)
    (error,), (rows,) = first, second
    assert "SupersededError" in str(error)
    assert rows[0] == (0, b"")
    control = ControlClient(servers.control_addresses, token=TOKEN, run_id=RUN_ID, layout=model.layout)
    (weights,) = model.layout.views(control.fetch().values)
    updates = control.statistics()["updates"]
    control.close()
    np.testing.assert_array_equal(weights[:, 0], counted(columns, batch_size=8, epochs=EPOCHS))
    assert updates == 5 * EPOCHS
    events = []
    while (event := channel.next_event(0.0)) is not None:
        events.append(event)
    assert [event.kind for event in events if isinstance(event, RankFailure)] == ["elephant.SupersededError"]
    assert {event.epoch for event in events if isinstance(event, EpochPart)} == set(range(EPOCHS))


def test_attempt_when_versions_differ_then_the_error_names_both():
    spec = TaskSpec(
        program="asynchronous",
        driver_versions={**installed_versions(), "keras": "9.9"},
        job=b"",
        backend=None,
        schema=None,
        timeouts=Timeouts(),
    )
    with Channel(bind_host="127.0.0.1", token=TOKEN, run_id=RUN_ID, timeouts=Timeouts()) as channel:
        run = RunContext(run_id=RUN_ID, token=TOKEN, driver=("127.0.0.1", channel.port))
        served = ServerAddresses(servers=(), layout=[], num_workers=1)
        with pytest.raises(ClusterError, match=r"'keras': '9.9'.* on every executor. Received: .* on 127.0.0.1"):
            WorkerTask(spec, run, served, Context(1)).run([])
