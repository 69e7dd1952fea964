"""Workers in rounds at parameter servers, against one process of plain Keras on the rows of all of them."""

import dataclasses
import os
import signal
import time

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import (
    classifier_data,
    fit_one_process,
    global_batches,
    job_for,
    largest_difference,
    regression_model,
    split,
)
from own_step import OwnStep
from rank_pool import WorkerError
from servers import until

from elephant.config import FitConfig
from elephant.errors import UnsupportedError
from elephant.rank.asynchronous.round_checks import check_rounds

TOLERANCE = 1e-5
SIZES = (19, 4, 12)


def in_rounds(model, **options):
    defaults = {"aggregation": "server", "epochs": 3, "batch_size": 5, "shuffle": False}
    return job_for(model, **{**defaults, **options})


def reference(model, parts, epochs=3):
    return fit_one_process(model, list(global_batches(parts, 5, epochs)), epochs=epochs)


def test_weights_when_partitions_are_uneven_then_equal_one_process(rank_pool):
    parts = split(classifier_data(sum(SIZES)), SIZES)
    model = regression_model(keras.optimizers.Adam(0.01), l2=0.05)
    with AsynchronousFit(rank_pool, in_rounds(model), parts, parameter_servers=2) as fit:
        recordings = fit.train_all()
        trained, counted = fit.weights(), fit.control.statistics()
    expected, history = reference(model, parts)
    assert largest_difference(trained, expected) <= TOLERANCE
    # Keras' Mean keeps its sum and its count.
    sums = [sum(np.asarray(one.parts[epoch].arrays[0][:2]) for one in recordings) for epoch in range(3)]
    np.testing.assert_allclose([loss / rows for loss, rows in sums], history["loss"], rtol=1e-5)
    assert counted["updates"] == counted["iterations"] == 12 and not counted["refused"]


@pytest.mark.slow("twenty epochs; tests/parameter_server/test_rounds.py loses both without Keras")
def test_weights_when_a_worker_and_the_server_are_lost_then_equal_one_process(rank_pool):
    parts = split(classifier_data(sum(SIZES)), SIZES)
    model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9))
    with AsynchronousFit(rank_pool, in_rounds(model, epochs=20), parts, of_server={"snapshot_updates": 7}) as fit:
        for partition in range(3):
            fit.begin(partition)
        fit.wait_for_step(1, 10)
        rank_pool.kill(0)
        fit.begin(0, attempt=1)
        fit.wait_for_step(0, 40)
        os.kill(fit.servers[0].process_id, signal.SIGKILL)
        until(lambda: fit.servers[0].restarts == 1, "the server")
        fit.control.remind()
        for partition in range(3):
            rank_pool.result(partition)
        trained, counted = fit.weights(), fit.control.statistics()
    expected, _ = reference(model, parts, epochs=20)
    assert largest_difference(trained, expected) <= TOLERANCE
    assert counted["positions"] == {"0": 80, "1": 20, "2": 60}


class Slow(keras.callbacks.Callback):
    """Holds each step up, and with it the others' rounds."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.2)


def with_statistics():
    """Returns a model that has moving statistics, which change none of its outputs."""
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((6,))
    beside = keras.layers.Rescaling(0.0)(keras.layers.BatchNormalization()(inputs))
    hidden = keras.layers.Add()([keras.layers.Dense(6, "tanh")(inputs), beside])
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.slow(
    "two fits; test_asynchronous_checkpoints.py goes on, and tests/parameter_server/test_rounds.py keeps rounds"
)
def test_weights_when_a_fit_goes_on_from_within_an_epoch_then_equal_one_process(rank_pool, by_value):
    parts, model = split(classifier_data(sum(SIZES)), SIZES), with_statistics()
    job = in_rounds(model)
    with AsynchronousFit(rank_pool, job, parts) as fit:
        for partition in range(3):
            fit.begin(partition, job=dataclasses.replace(job, callbacks=(Slow(),)))
        # The partition with one step an epoch has ended its second one, the others have not.
        fit.wait_for_step(0, 6)
        state = fit.checkpoint()
        for partition in range(3):
            rank_pool.kill(partition)
    assert state.epochs == 1 and 0 < state.step < 8
    assert [state.facts["ledgers"][0][partition][0] for partition in "012"] == [6, 2, 5]
    with AsynchronousFit(rank_pool, dataclasses.replace(job, state=state), parts) as fit:
        recordings = fit.train_all()
        trained = fit.weights()
    expected, _ = reference(model, parts)
    expected = [value for value, variable in zip(expected, model.weights, strict=True) if variable.trainable]
    assert largest_difference(trained, expected) <= TOLERANCE
    assert [[(part.epoch, part.steps) for part in one.parts] for one in recordings] == [
        [(1, 2), (2, 4)], [(1, 0), (2, 1)], [(1, 1), (2, 3)],
    ]  # fmt: skip


def test_moving_statistics_when_workers_take_steps_together_then_are_the_average_of_theirs(rank_pool):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.BatchNormalization(momentum=0.5)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    parts = [
        {"features": np.full((rows, 6), value, "float32"), "label": np.zeros((rows, 6), "float32")}
        for rows, value in ((12, 5.0), (6, 2.0))
    ]
    job = in_rounds(model, batch_size=3, label_array=True)
    with AsynchronousFit(rank_pool, job, parts) as fit:
        fit.train_all()
        mean = fit.control.fetch().state[:6]
    expected = 0.0
    for _ in range(3):
        own = [0.5**steps * expected + (1 - 0.5**steps) * value for steps, value in ((4, 5.0), (2, 2.0))]
        expected = (12 * own[0] + 6 * own[1]) / 18
    np.testing.assert_allclose(mean, expected, rtol=1e-5)


def summed(labels, outputs):
    return keras.ops.sum(keras.ops.square(keras.ops.reshape(labels, (-1, 1)) - outputs))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (keras.losses.MeanSquaredError(reduction="sum"), "loss: expected a mean over the rows .* which is a sum"),
        (summed, "loss: expected"),
    ],
    ids=["sum", "of the user's"],
)
def test_loss_when_it_is_a_sum_then_is_refused_before_any_step(rank_pool, by_value, loss, message):
    model = regression_model(keras.optimizers.SGD(0.05))
    model.compile(keras.optimizers.SGD(0.05), loss)
    with AsynchronousFit(rank_pool, in_rounds(model), split(classifier_data(20), (10, 10))) as fit:
        fit.begin(0)
        with pytest.raises(WorkerError, match=message):
            rank_pool.result(0)
        assert not fit.control.statistics()["updates"]


def test_model_when_a_round_would_not_be_its_step_then_is_refused_by_name():
    config = FitConfig(aggregation="server")
    own = OwnStep()
    own.compile(keras.optimizers.SGD(0.05))
    scaled = regression_model(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)))
    clipped = regression_model(keras.optimizers.SGD(0.05, global_clipnorm=1.0))
    clipped.optimizer.build(clipped.trainable_variables)
    with pytest.raises(UnsupportedError, match="Received: a model with a train_step of its own"):
        check_rounds(own, config)
    with pytest.raises(UnsupportedError, match="Received: an optimizer that scales the loss"):
        check_rounds(scaled, config)
    check_rounds(clipped, config)
    several = FitConfig.of({"aggregation": "server", "parameter_servers": 2})
    with pytest.raises(UnsupportedError, match="Received: gradients that are clipped by their norm"):
        check_rounds(clipped, several)
