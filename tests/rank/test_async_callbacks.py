"""The user's callbacks on workers that train at their own pace, and who may stop them."""

import dataclasses

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import classifier_data, job_for, regression_model
from rank_pool import WorkerError
from tiers import in_tiers

from elephant.data.epoch_plan import EpochPlan
from elephant.modeling.variables import assign_flat, flatten, moving_statistics
from elephant.parameter_server.store import Averages
from elephant.rank.asynchronous.async_callbacks import WorkerEpochs, worker_copies
from elephant.rank.callbacks.shared_state import SharedState
from elephant.rank.rank_progress import TrainingPosition


def asynchronous(model, **options):
    return job_for(model, **{"mode": "asynchronous", "epochs": 2, "batch_size": 5, "shuffle": False, **options})


class RaisesAt(keras.callbacks.Callback):
    def __init__(self, batch, epoch=0):
        super().__init__()
        self.batch = batch
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.now, batch) == (self.epoch, self.batch):
            raise ValueError(f"batch {batch} is not to my liking")


class StopsAt(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        self.model.stop_training = self.seen == 7


def test_moving_statistics_when_a_worker_is_run_again_then_it_goes_on_from_the_servers(rank_pool, by_value):
    columns = classifier_data(12)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.BatchNormalization(momentum=0.5)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    columns["label"] = columns["features"].copy()
    job = asynchronous(model, batch_size=6, epochs=3, label_array=True)
    interrupted = dataclasses.replace(job, callbacks=(RaisesAt(0, epoch=2),))
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        with pytest.raises(WorkerError, match="not to my liking"):
            fit.train(0, job=interrupted)
        fit.train(0, attempt=1)
        state = fit.control.fetch().state
    mean = np.zeros(6)
    # What the first step of the last epoch had moved is lost with the worker that took it.
    for start in (0, 6, 0, 6, 6):
        mean = 0.5 * mean + 0.5 * columns["features"][start : start + 6].mean(axis=0)
    np.testing.assert_allclose(state[:6], mean, atol=1e-6)


def test_copies_when_they_go_to_workers_then_are_of_those_that_look_at_batches(tmp_path):
    logger, stopping = keras.callbacks.CSVLogger(str(tmp_path / "log")), RaisesAt(3)
    for callback in (logger, stopping):
        callback.set_model(regression_model("sgd"))
    logger.on_train_begin()
    (copy,) = worker_copies([logger, keras.callbacks.EarlyStopping(), stopping])
    logger.on_train_end()
    assert copy is not stopping
    assert (type(copy), copy.batch, copy.model) == (RaisesAt, 3, None)
    assert stopping.model is not None
    assert [type(c) for c in worker_copies([keras.callbacks.TerminateOnNaN()])] == [keras.callbacks.TerminateOnNaN]
    of_batches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    of_epochs = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    assert [vars(c).keys() for c in worker_copies([of_batches, of_epochs])] == [vars(of_batches).keys()]


def test_variable_of_the_loss_when_a_callback_sets_it_as_an_epoch_begins_then_the_worker_s_loss_has_it(rank_pool):
    alpha = keras.Variable(0.0, trainable=False)

    def loss(y_true, y_pred):
        return alpha + 0.0 * keras.ops.mean(y_pred, axis=-1)

    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            alpha.assign(0.5 + epoch)

    model = regression_model("sgd")
    model.compile("sgd", loss, run_eagerly=True)
    job, callback = asynchronous(model), Anneal()
    copies = worker_copies([callback], SharedState([callback], job.model, []))
    with AsynchronousFit(rank_pool, dataclasses.replace(job, callbacks=copies), [classifier_data(12)]) as fit:
        recording = fit.train(0)
    assert [part.logs["loss"] for part in recording.parts] == pytest.approx([0.5, 1.5])


def test_callbacks_when_they_raise_on_a_worker_then_it_fails_with_their_traceback(rank_pool, by_value):
    job = asynchronous(regression_model("sgd"), callbacks=[RaisesAt(1)])
    with AsynchronousFit(rank_pool, job, [classifier_data(12)]) as fit:
        with pytest.raises(WorkerError, match="batch 1 is not to my liking") as failure:
            fit.train(0)
    assert failure.value.kind == "ValueError"
    assert "on_train_batch_end" in failure.value.trace


def test_stop_training_when_set_in_mid_epoch_by_a_worker_then_is_asked_for_and_the_epoch_reported(rank_pool, by_value):
    job = asynchronous(regression_model("sgd"), callbacks=[StopsAt()])
    with AsynchronousFit(rank_pool, job, [classifier_data(22)]) as fit:
        recording = fit.train(0)
        counted = fit.control.statistics()
    assert recording.stops == 1
    assert [(part.rows, part.stopped) for part in recording.parts] == [(22, False), (10, True)]
    assert counted["updates"] == 7


ENGINES = {"gradients": {}, "windows": {"frequency": 2}}


@pytest.mark.parametrize("options", in_tiers(ENGINES, fast=["gradients"], slow="another way to exchange"))
def test_stop_when_the_driver_says_it_then_the_fit_ends_at_once(rank_pool, options):
    model = regression_model(keras.optimizers.SGD(0.01))
    job = asynchronous(model, **{"epochs": 100_000, **options})
    with AsynchronousFit(rank_pool, job, [classifier_data(20)]) as fit:
        fit.begin(0)
        fit.wait_for_step(0, 4)
        fit.control.stop()
        recording = rank_pool.result(0)
    assert recording.stops == 0
    assert len(recording.parts) < 10_000


class AveragesOf:
    """Connection of one worker to the average that all share."""

    def __init__(self, averages, partition):
        self._averages, self._partition = averages, partition

    def average_state(self, state, weight, epochs):
        return self._averages.add(self._partition, weight, state)


def test_moving_statistics_when_workers_end_epochs_one_after_the_other_then_have_the_steps_of_one_process():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.BatchNormalization(momentum=0.99)])
    averages, plan = Averages(np.array([0.0, 0.0, 1.0, 1.0])), EpochPlan((8, 8, 16), (0, 0, 0), 4)
    workers, seen = [], np.array([[1.0, 2.0, 4.0, 9.0], [3.0, -2.0, 2.0, 5.0], [5.0, 0.0, 3.0, 1.0]])
    for partition in range(3):
        about = (partition, plan, None, None, AveragesOf(averages, partition), TrainingPosition(8), None)
        workers.append(WorkerEpochs(*about, callbacks=()))
        workers[-1].set_model(model)
    variables = moving_statistics(model)
    kept = []
    for worker in workers:
        worker.average_state(0.0)
        kept.append(flatten(variables))
    for _epoch in range(5):
        for worker, rows, weight, place in zip(workers, seen, (8, 8, 16), range(3), strict=True):
            assign_flat(variables, 0.99**8 * kept[place] + (1 - 0.99**8) * rows)
            worker.average_state(weight, steps=8)
            kept[place] = flatten(variables)
    left = 0.99 ** (5 * 3 * 8)
    expected = left * np.array([0.0, 0.0, 1.0, 1.0]) + (1 - left) * np.average(seen, axis=0, weights=(8, 8, 16))
    np.testing.assert_allclose(averages.average(), expected, rtol=1e-4, atol=1e-4)
