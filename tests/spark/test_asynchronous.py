"""Asynchronous fits on executors in processes of their own: the first fit, windows, callbacks, waves."""

import os
import threading
import time

import keras
import numpy as np
import pytest
from counting_model import counted, counting_data, counting_model, weights_of
from keras_reference import classifier_data
from process_tree import processes_of
from spark_frames import partitioned_frame, split_rows
from tiers import name_of

from elephant import KerasEstimator, KerasModel, LearningRateWarmup
from elephant.errors import ConfigurationError, DataError, UnsupportedError

SCHEMA = "features array<double>, label double"


def frame_of(spark, columns, sizes):
    return partitioned_frame(spark, split_rows(columns, sizes), SCHEMA)


def estimator_of(model, **options):
    return KerasEstimator(model=model, **{"mode": "asynchronous", "batchSize": 8, "verbose": 0, **options})


def watching_servers(seen):
    """Notes the process ids of parameter servers, in a thread, until the first one is gone."""

    def watch():
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            alive = {process.pid for process in processes_of("elephant.parameter_server")}
            if seen and not alive:
                return
            seen.update(alive)
            time.sleep(0.1)

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    return thread


def test_fit_when_asynchronous_then_a_server_applies_every_batch_once_and_the_model_keeps_its_counts(
    spark, tmp_path, capsys
):
    columns, servers = counting_data(80), set()
    watcher = watching_servers(servers)
    fitted = estimator_of(counting_model(), numWorkers=2, epochs=3, verbose=2).fit(frame_of(spark, columns, (48, 32)))
    watcher.join()
    np.testing.assert_array_equal(weights_of(fitted), counted(columns, batch_size=8, epochs=3))
    assert len(servers) == 1 and os.getpid() not in servers
    assert len(fitted.history["loss"]) == 3
    statistics = fitted.training_statistics
    assert (statistics["updates"], statistics["refused"], statistics["duplicates"]) == (30, 0, 0)
    assert sum(statistics["staleness"].values()) == 30
    assert [(part["epoch"], part["rank"]) for part in fitted.summary.ranks] == [
        (e, r) for e in range(3) for r in (0, 1)
    ]
    assert fitted.summary.staleness and sum(part["bytes_sent"] for part in fitted.summary.ranks) > 0
    # What the server counted goes into the model's optimizer, as one process would have counted it.
    assert int(fitted.model.optimizer.iterations) == 30
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("starting, ")]
    rank, host, executor, *rest = shown[1].split()
    assert [rank, host, *rest] == ["0", "127.0.0.1", "CPU", "1", "48", "0"] and executor.isdecimal()
    assert [line.split()[0] for line in shown if "/3" in line] == ["1/3", "2/3", "3/3"]
    assert shown[-1].startswith("30 updates, ") and shown[-1].endswith(" at most, 0 refused")
    fitted.write().overwrite().save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"))
    assert loaded.training_statistics == statistics and not loaded.hasSummary


@pytest.mark.slow("a fit; tests/rank/test_push_windows.py holds each algorithm exactly")
def test_fit_when_windows_are_exchanged_with_several_servers_then_its_loss_falls(spark):
    def unbuilt():
        # Without an Input: the driver learns the width from the first row.
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5, nesterov=True), "mse")
        return model

    columns = classifier_data(320)
    options = {"algorithm": "adag", "frequency": 3, "parameterServers": 2, "compression": "bfloat16"}
    estimator = estimator_of(unbuilt, numWorkers=2, epochs=6, validationFraction=0.2, **options)
    fitted = estimator.fit(frame_of(spark, columns, (160, 160)))
    variance = float(np.var(columns["label"]))
    assert fitted.history["val_loss"][-1] < 0.5 * variance, fitted.history
    assert len(fitted.history["loss"]) == 6
    predicted = fitted.model.predict(columns["features"], verbose=0)[:, 0]
    assert np.mean((predicted - columns["label"]) ** 2) < 0.5 * variance


@pytest.mark.slow("a fit; tests/driver/test_driver_callbacks.py holds the decision")
def test_fit_when_early_stopping_has_seen_enough_then_all_workers_stop(spark):
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import time

            time.sleep(0.05)

    columns = counting_data(64)
    # A loss that only ever falls by far less than this does not count as better.
    stopping = keras.callbacks.EarlyStopping(monitor="loss", min_delta=1e12, patience=1)
    fitted = estimator_of(counting_model(), numWorkers=2, epochs=500, callbacks=[stopping, Slow()]).fit(
        frame_of(spark, columns, (32, 32))
    )
    assert 1 <= stopping.stopped_epoch < 20
    assert len(fitted.history["loss"]) == stopping.stopped_epoch + 1


@pytest.mark.slow("a fit of four workers")
def test_fit_when_workers_outnumber_slots_and_rows_then_they_take_turns(spark, capsys):
    columns = counting_data(3)
    random = np.random.get_state()[1].copy()
    fitted = estimator_of(counting_model(), numWorkers=4, epochs=2, batchSize=1, verbose=2).fit(
        frame_of(spark, columns, (3, 0))
    )
    np.testing.assert_array_equal(weights_of(fitted), counted(columns, batch_size=1, epochs=2))
    assert "4 workers on 3 task slots: they take turns" in capsys.readouterr().out
    assert len(fitted.history["loss"]) == 2
    # The driver builds the model seeded as workers do; what the user draws here goes on as it was.
    np.testing.assert_array_equal(np.random.get_state()[1], random)


def test_fit_when_there_are_no_rows_to_train_on_then_says_so(spark):
    with pytest.raises(DataError, match="Received: a DataFrame without rows"):
        estimator_of(counting_model()).fit(frame_of(spark, counting_data(4), (4,)).where("label > 0"))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"syncBatchNorm": True}, ConfigurationError, "syncBatchNorm: expected mode='synchronous'"),
        ({"scaleLearningRate": True}, ConfigurationError, "scaleLearningRate: expected mode='synchronous'"),
        (
            {"algorithm": "adag:0.1"},
            ConfigurationError,
            "algorithm: expected .*'aeasgd' and 'eamsgd' may have a moving rate",
        ),
        ({"algorithm": "easgd"}, ConfigurationError, "algorithm: expected one of downpour"),
        ({"mode": "synchronous", "algorithm": "adag"}, ConfigurationError, "algorithm: expected mode='asynchronous'"),
        ({"mode": "synchronous", "port": 4000}, ConfigurationError, "port: expected mode='asynchronous'"),
        ({"parameterServers": 0}, ConfigurationError, "parameterServers: expected an integer of at least 1"),
        ({"backgroundExchange": True, "frequency": 5}, UnsupportedError, "backgroundExchange: expected workers that"),
        ({"callbacks": [LearningRateWarmup(2)]}, UnsupportedError, "LearningRateWarmup changes the rate between"),
    ],
    ids=name_of,
)
def test_options_when_they_cannot_work_then_the_constructor_says_why(options, error, text):
    with pytest.raises(error, match=text):
        estimator_of(counting_model(), **options)
