"""Workers and servers that are lost in mid-fit: every batch counts once, and none is left out."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import classifier_data, job_for, largest_difference
from rank_pool import WorkerError
from tiers import in_tiers

from elephant.config import AsynchronousOptions

pytestmark = pytest.mark.usefixtures("by_value")


class Interrupt(keras.callbacks.Callback):
    """Fails the worker after so many batches of one attempt."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt("interrupted")


def spying_builder(log):
    """Returns a function that builds a model whose loss writes down the rows that it sees: their labels, one a line."""

    def build():
        from elephant.backends import current

        def write_down(labels):
            with open(log, "a") as file:
                file.write(" ".join(str(int(label)) for label in labels.ravel()) + "\n")
            return [np.zeros((), np.float32)]

        def loss(labels, outputs):
            (seen,) = current().call_on_host(write_down, [labels], [((), "float32")])
            return keras.ops.square(outputs[:, 0] - 0.01 * keras.ops.reshape(labels, [-1])) + seen

        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
        return model

    return build


def numbered_rows(rows):
    return {**classifier_data(rows), "label": np.arange(rows, dtype="float32")}


def rows_seen(log):
    return [int(row) for row in Path(log).read_text().split()]


MODES = {
    "gradients": {},
    "windows": {"frequency": 2, "asynchronous": AsynchronousOptions(algorithm="sum")},
}


@pytest.mark.parametrize("options", in_tiers(MODES, fast=["windows"], slow="three positions, two workers each"))
def test_worker_when_interrupted_at_any_position_then_its_successor_takes_exactly_the_rest(
    rank_pool, tmp_path, options
):
    if keras.config.backend() == "torch":
        pytest.skip("Keras on PyTorch tries the loss on rows of its own first, which the loss writes down too")
    rows, columns = 10, numbered_rows(10)
    shuffled = np.random.default_rng(1).permutation(rows)
    # Spark may deliver the rows in another order to the second attempt.
    delivered_again = {name: values[shuffled] for name, values in columns.items()}
    log = str(tmp_path / "rows")
    job = job_for(spying_builder(log), mode="asynchronous", epochs=2, batch_size=3, seed=4, **options)
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        fit.train(0)
        expected, uninterrupted = fit.weights(), Path(log).read_text()
    assert sorted(rows_seen(log)[:rows]) == sorted(rows_seen(log)[rows:]) == list(range(rows))
    # In either epoch, and between them. With windows, the last push is that of the last whole window.
    for position in (2, 4) if options else (1, 4, 7):
        os.unlink(log)
        first = dataclasses.replace(job, callbacks=(Interrupt(position),))
        with AsynchronousFit(rank_pool, job, [columns]) as fit:
            with pytest.raises(WorkerError, match="interrupted"):
                fit.train(0, attempt=position, job=first)
            recording = fit.train(0, attempt=position + 1, columns=delivered_again)
            trained = fit.weights()
        assert [sorted(line.split()) for line in Path(log).read_text().splitlines()] == [
            sorted(line.split()) for line in uninterrupted.splitlines()
        ], position
        assert largest_difference(trained, expected) <= 1e-6 or not same_state(options, position)
        # Every epoch from the one that was interrupted on is reported, an epoch's end included.
        assert [part.epoch for part in recording.parts] == ([0, 1] if position <= 4 else [1])
        assert sum(part.steps for part in recording.parts) == 8 - position


def same_state(options, position):
    """With windows, the momentum of the worker's own optimizer is lost with it."""
    return not options


def test_worker_when_its_partition_is_finished_then_ends_at_once_and_reports_the_last_epoch(rank_pool, tmp_path):
    log = str(tmp_path / "rows")
    job = job_for(spying_builder(log), mode="asynchronous", epochs=2, batch_size=3)
    with AsynchronousFit(rank_pool, job, [numbered_rows(10)]) as fit:
        fit.train(0)
        before, seen = fit.weights(), rows_seen(log)
        recording = fit.train(0, attempt=1)
        assert largest_difference(fit.weights(), before) == 0
    assert rows_seen(log) == seen
    assert [(part.epoch, part.rows, part.steps) for part in recording.parts] == [(1, 0, 0)]


def test_worker_when_a_later_attempt_has_come_then_ends_with_superseded_error(rank_pool):
    columns = classifier_data(8)
    job = job_for(linear_model, mode="asynchronous", epochs=2000, batch_size=2)
    short = dataclasses.replace(job, config=dataclasses.replace(job.config, epochs=2000), callbacks=(Interrupt(3),))
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        fit.begin(0, attempt=0)
        fit.wait_for_step(0, 5)
        with pytest.raises(WorkerError, match="interrupted"):
            fit.train(0, attempt=1, index=1, job=short)
        with pytest.raises(WorkerError) as failure:
            rank_pool.result(0)
    assert failure.value.kind == "SupersededError"


def linear_model():
    """Returns a model whose gradient is the sum of a batch's rows, whatever its weights: pushes of whole numbers."""

    def loss(labels, outputs):
        return outputs[:, 0] * keras.ops.cast(keras.ops.shape(outputs)[0], "float32")

    model = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(1.0), loss)
    return model


def whole_numbers(rows, seed):
    features = np.random.default_rng(seed).integers(-9, 10, (rows, 6)).astype("float32")
    return {"features": features, "label": np.zeros(rows, "float32")}


EXCHANGES = {
    "gradients": {},
    "in the background": {"asynchronous": AsynchronousOptions(background_exchange=True)},
    "windows": {"frequency": 3, "asynchronous": AsynchronousOptions(algorithm="sum")},
}


LOSSES = {
    "the server, gradients": ("the server", "gradients"),
    "the server, in the background": ("the server", "in the background"),
    "a worker, windows": ("a worker", "windows"),
}


@pytest.mark.parametrize(
    "case", in_tiers(LOSSES, fast=["the server, gradients"], slow="tests/spark kills a worker, and others exchange so")
)
def test_weights_when_somebody_is_killed_in_mid_fit_then_are_the_exact_sum_of_all_pushes(rank_pool, case):
    lost, exchange = case
    parts = [whole_numbers(rows, seed) for seed, rows in enumerate((31, 17))]
    epochs, options = 80, EXCHANGES[exchange]
    job = job_for(linear_model, mode="asynchronous", num_workers=2, epochs=epochs, batch_size=4, seed=1, **options)
    with AsynchronousFit(rank_pool, job, parts, of_server={"snapshot_updates": 50}) as fit:
        for partition in range(2):
            fit.begin(partition)
        fit.wait_for_step(1, 60)
        if lost == "a worker":
            rank_pool.kill(1)
            fit.begin(1, attempt=7)
        if lost == "the server":
            os.kill(fit.servers[0].process_id, signal.SIGKILL)
        recordings = [rank_pool.result(partition) for partition in range(2)]
        (trained,) = fit.weights()
        assert fit.servers[0].restarts == (1 if lost == "the server" else 0)
    total = sum(part["features"].sum(axis=0, dtype=np.float64) for part in parts)
    np.testing.assert_array_equal(trained[:, 0], -epochs * total)
    assert all(recording.parts[-1].epoch == epochs - 1 for recording in recordings)


@pytest.mark.slow(
    "waits; tests/parameter_server/test_client.py holds the wait, test_epochs.py that its seconds are told"
)
def test_workers_when_a_slow_one_is_waited_for_then_tell_how_long(rank_pool):
    parts = [whole_numbers(8, 0), whole_numbers(8, 1)]
    job = job_for(linear_model, mode="asynchronous", num_workers=2, epochs=3, batch_size=2)
    slow = dataclasses.replace(job, callbacks=(Slow(),))
    with AsynchronousFit(rank_pool, job, parts, max_staleness=1) as fit:
        fit.begin(0, job=slow)
        fit.wait_for_step(0, 1)
        fit.begin(1)
        recordings = [rank_pool.result(partition) for partition in range(2)]
    waited = [sum(part.wait_s for part in recording.parts) for recording in recordings]
    assert waited[1] > waited[0]


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.3)
