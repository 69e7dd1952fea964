"""Keras' own callbacks on the driver: what they do to the model, its rate and the fit."""

import csv

import keras
import numpy as np
import pytest

import elephant
from elephant.driver.driver_callbacks import DriverCallbacks, check_asynchronous_callbacks
from elephant.errors import ConfigurationError, UnsupportedError


class Servers:
    """What the driver asks of the servers: their weights are the number of the last epoch."""

    def __init__(self):
        self.epoch, self.fetched, self.rates, self.stops = 0, 0, [], 0

    def refresh(self, model):
        self.fetched += 1
        model.set_weights([np.full(weight.shape, float(self.epoch)) for weight in model.get_weights()])

    def stop(self):
        self.stops += 1


def compiled(rate=0.1):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
    # As the driver's copy has once the first epoch's numbers have been put together: EarlyStopping looks at metrics.
    model.test_on_batch(np.zeros((1, 2)), np.zeros((1, 1)))
    return model


def drive(callbacks, losses, model=None, epochs=None):
    """Returns the servers, the model, and the logs of all epochs that counted."""
    servers, model = Servers(), model or compiled()
    driven = DriverCallbacks(
        model,
        callbacks,
        epochs=epochs or len(losses),
        refresh=servers.refresh,
        set_rate=servers.rates.append,
        stop=servers.stop,
    )
    driven.begin()
    counted = []
    for epoch, loss in enumerate(losses):
        servers.epoch = epoch + 1
        logs = driven.epoch_ended(epoch, {"loss": loss, "val_loss": loss, "val_mae": loss})
        if logs is not None:
            counted.append(logs)
    driven.end()
    return servers, model, counted


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.events = []

    def on_train_begin(self, logs=None):
        self.events.append(("train begins", self.params["epochs"]))

    def on_epoch_begin(self, epoch, logs=None):
        self.events.append(("begins", epoch, float(self.model.get_weights()[1][0])))

    def on_epoch_end(self, epoch, logs=None):
        self.events.append(("ends", epoch, float(self.model.get_weights()[1][0]), logs["loss"]))

    def on_train_end(self, logs=None):
        self.events.append(("train ends", float(self.model.get_weights()[1][0]), logs["loss"]))


def test_events_when_epochs_end_then_reach_the_users_own_object_with_the_servers_weights():
    recorder = Recorder()
    servers, _, counted = drive([recorder], [3.0, 2.0])
    assert recorder.events == [
        ("train begins", 2),
        ("begins", 0, 0.0),
        ("ends", 0, 1.0, 3.0),
        ("begins", 1, 1.0),
        ("ends", 1, 2.0, 2.0),
        ("train ends", 2.0, 2.0),
    ]
    assert [logs["loss"] for logs in counted] == [3.0, 2.0]
    assert servers.stops == 0


def test_events_when_they_are_functions_of_a_lambda_callback_then_see_the_servers_weights():
    seen, model = [], compiled()
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()[1][0]))
    drive([look], [3.0, 2.0], model)
    assert seen == [1.0, 2.0]


def test_early_stopping_when_it_restores_the_best_weights_then_they_are_the_result():
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    servers, model, counted = drive([stopping], [3.0, 1.0, 2.0, 2.0, 0.0, 0.0])
    assert stopping.best_epoch == 1
    assert servers.stops == 1
    assert len(counted) == 4
    assert model.get_weights()[1][0] == 2.0


def test_early_stopping_when_it_restores_nothing_then_no_weights_are_fetched_before_the_end():
    stopping = keras.callbacks.EarlyStopping("val_mae", patience=1)
    servers, model, counted = drive([stopping], [1.0, 2.0, 3.0])
    assert (servers.stops, servers.fetched, len(counted)) == (1, 1, 2)
    assert model.get_weights()[1][0] == 3.0


def test_rates_when_callbacks_change_them_then_reach_the_servers_and_the_logs():
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1)
    servers, _, counted = drive([plateau], [1.0, 1.0, 1.0, 1.0])
    assert servers.rates == pytest.approx([0.05, 0.025, 0.0125])
    assert servers.fetched == 1
    assert [logs["learning_rate"] for logs in counted] == pytest.approx([0.1, 0.1, 0.05, 0.025])


def test_schedulers_when_training_begins_then_the_first_epochs_rate_is_set_before_it():
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.4 / (epoch + 1))
    servers, _, counted = drive([scheduler], [1.0, 1.0])
    assert servers.rates == pytest.approx([0.4, 0.2])
    assert [logs["learning_rate"] for logs in counted] == pytest.approx([0.4, 0.2])


def test_rates_when_they_follow_a_schedule_then_are_left_alone():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    servers, _, _ = drive([Recorder()], [1.0, 1.0], model=compiled(schedule))
    assert servers.rates == []


def test_files_when_callbacks_write_them_then_hold_every_epoch(tmp_path):
    log, checkpoint = tmp_path / "log.csv", str(tmp_path / "epoch-{epoch}.keras")
    best = str(tmp_path / "best.weights.h5")
    callbacks = [
        keras.callbacks.CSVLogger(str(log)),
        keras.callbacks.ModelCheckpoint(checkpoint),
        keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True, save_weights_only=True),
    ]
    drive(callbacks, [3.0, 1.0, 2.0])
    with log.open() as file:
        assert [row["loss"] for row in csv.DictReader(file)] == ["3.0", "1.0", "2.0"]
    for epoch in (1, 2, 3):
        saved = keras.models.load_model(checkpoint.format(epoch=epoch))
        assert saved.get_weights()[1][0] == epoch
    model = compiled()
    model.load_weights(best)
    assert model.get_weights()[1][0] == 2.0


class StopsEarly(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


def test_stop_when_a_callback_asks_then_later_epochs_do_not_count():
    servers, _, counted = drive([StopsEarly()], [1.0, 2.0, 3.0])
    assert (servers.stops, len(counted)) == (1, 1)


def test_callbacks_when_they_cannot_work_here_then_are_refused_with_what_to_use():
    with pytest.raises(UnsupportedError, match="LearningRateWarmup.*CosineDecay"):
        check_asynchronous_callbacks([elephant.LearningRateWarmup()])
    with pytest.raises(UnsupportedError, match="save_freq=10.*save_freq='epoch'"):
        check_asynchronous_callbacks([keras.callbacks.ModelCheckpoint("m.keras", save_freq=10)])
    with pytest.raises(UnsupportedError, match="BackupAndRestore"):
        check_asynchronous_callbacks([keras.callbacks.BackupAndRestore("folder")])
    with pytest.raises(ConfigurationError, match="expected instances of keras.callbacks.Callback"):
        check_asynchronous_callbacks([print])
    with pytest.raises(UnsupportedError, match="servers hear of a rate between epochs alone"):
        check_asynchronous_callbacks([elephant.LearningRateWarmup()], in_rounds=True)
    check_asynchronous_callbacks([keras.callbacks.TerminateOnNaN(), keras.callbacks.EarlyStopping()])
