"""Fits in gossip mode without Spark: real workers, whose steps add up exactly, or which are killed and frozen."""

import dataclasses
import os
import signal
import threading
import time

import keras
import numpy as np
import pytest
from counting_model import RATE, counted, counting_data, counting_model
from gossip_fit import Marker, States, flat, gossip_fit, started
from keras_reference import classifier_data, job_for, regression_model
from warm_ranks import IDLE_S, SERVERS

from elephant.cluster.warm_workers import WarmWorkers
from elephant.config import AsynchronousOptions, Timeouts
from elephant.data.schema import DENSE, Field

WORKERS, EPOCHS, BATCH = 3, 3, 8
FORKED = WarmWorkers(limit=SERVERS, idle_s=IDLE_S)


def job_of(model, algorithm="adpsgd", callbacks=(), **options):
    job = job_for(model, mode="gossip", num_workers=WORKERS, epochs=EPOCHS, batch_size=BATCH, **options)
    config = job.config.changed(asynchronous=AsynchronousOptions(algorithm=algorithm))
    return dataclasses.replace(job, config=config, callbacks=tuple(callbacks))


def counting_job(**options):
    job = job_of(counting_model(), **options)
    inputs = (Field("features", ("features",), "float32", DENSE, (4,)),)
    return dataclasses.replace(job, schema=dataclasses.replace(job.schema, inputs=inputs))


def parts(columns):
    return [{name: values[worker::WORKERS] for name, values in columns.items()} for worker in range(WORKERS)]


def weights_of_state(state):
    return flat([array for name, array in state.arrays.items() if name.startswith("model/")])[:4]


@pytest.mark.slow("two fits of real processes; tests/gossip/test_node.py holds the sum of weights, over sockets")
def test_fit_when_all_begin_together_or_it_goes_on_then_the_average_has_every_step_of_every_worker_once(
    tmp_path, warm_ranks
):
    columns, states, seen = counting_data(24 * WORKERS), States(), []
    # Every row of a worker is the same: it does not matter which batches are left.
    columns["features"] = np.tile(columns["features"][:WORKERS], (24, 1))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()

    class Weights(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(flat(self.model.get_weights()))

    callbacks = [Marker(tmp_path / "first", WORKERS, sleep_s=0.05), Weights()]
    job = counting_job(callbacks=callbacks, checkpoint_path="unused", checkpoint_seconds=1e-9)
    result = gossip_fit(job, parts(columns), states=states, warm=FORKED)
    expected = counted(columns, batch_size=BATCH, epochs=EPOCHS) / WORKERS
    # One of the sums is zero, of parts that are not.
    np.testing.assert_allclose(flat(result.variables)[:4], expected, rtol=1e-5, atol=1e-6)
    assert len(result.history["loss"]) == EPOCHS and result.statistics["refused"] == 0
    assert result.statistics["exchanges"] > 0 and result.statistics["worker_retries"] == 0
    # Callbacks on the driver see the average at the end of each epoch.
    assert len(seen) == EPOCHS and np.any(seen[-1])
    first = next(state for state in states.all if state.epochs == 1 and not state.step)
    one_epoch = counted(columns, batch_size=BATCH, epochs=1) / WORKERS
    # A faster worker's next steps may be in the average of an epoch by way of its peers; and parts may cancel out.
    np.testing.assert_allclose(weights_of_state(first), one_epoch, atol=np.abs(one_epoch).max())
    # Within an epoch, each goes on after its own last step.
    within = [state for state in states.all if state.step]
    assert within
    first = within[len(within) // 2]
    left = [3 * EPOCHS - first.facts["ledgers"][0].get(str(worker), [0])[0] for worker in range(WORKERS)]
    steps = -RATE * np.asarray(columns["features"][:WORKERS], np.float64) / WORKERS
    again = dataclasses.replace(job, state=first, callbacks=(Marker(tmp_path / "second", WORKERS, sleep_s=0.05),))
    result = gossip_fit(again, parts(columns), warm=FORKED)
    moved = flat(result.variables)[:4] - weights_of_state(first)
    np.testing.assert_allclose(moved, np.dot(left, steps), rtol=1e-4, atol=1e-6)
    assert len(result.history["loss"]) == EPOCHS - first.epochs


@pytest.mark.slow("a fit of real processes; tests/gossip/test_node.py freezes and kills nodes")
def test_fit_when_a_worker_is_killed_and_another_freezes_then_both_are_started_again_and_go_on_from_their_peers(
    tmp_path,
):
    columns, notes = classifier_data(40 * BATCH * WORKERS), []
    callbacks = [Marker(tmp_path, WORKERS, sleep_s=0.05)]
    job = job_of(regression_model(keras.optimizers.SGD(0.02)), callbacks=callbacks, timeouts=Timeouts(heartbeat_s=4))

    def fault():
        workers = started(tmp_path, WORKERS, timeout_s=120)
        time.sleep(0.5)
        os.kill(workers[0], signal.SIGKILL)
        os.kill(workers[1], signal.SIGSTOP)

    thread = threading.Thread(target=fault, daemon=True)
    thread.start()
    result = gossip_fit(job, parts(columns), notes=notes)
    thread.join()
    assert result.statistics["worker_retries"] == 2, notes
    assert len(result.history["loss"]) == EPOCHS and result.history["loss"][-1] < 0.5
    model = regression_model("sgd")
    model.set_weights(result.variables[: len(model.get_weights())])
    assert float(np.mean((model.predict(columns["features"], verbose=0)[:, 0] - columns["label"]) ** 2)) < 0.5
