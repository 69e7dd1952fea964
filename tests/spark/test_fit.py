"""``fit`` on executors in processes of their own, against one process of plain Keras."""

import json
import os
import socket
import threading

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, regression_model
from spark_frames import partitioned_frame, rows_of, split_rows

import elephant
from elephant import KerasEstimator, KerasModel
from elephant.cli import main as program
from elephant.errors import ClusterError, ConfigurationError, DataError
from elephant.monitor.channel import Channel

SCHEMA = "features array<double>, label double"
TOLERANCE = 1e-5


def global_batches(columns, sizes, batch_size, epochs):
    starts = np.cumsum([0, *sizes])[:-1]
    batches = []
    for step in range(-(-max(sizes) // batch_size)):
        rows = np.concatenate(
            [
                start + np.arange(min(step * batch_size, size), min((step + 1) * batch_size, size))
                for start, size in zip(starts, sizes, strict=True)
            ]
        )
        batches.append({name: values[rows] for name, values in columns.items()})
    return batches * epochs


def test_fit_when_partitions_are_uneven_then_weights_equal_one_process_and_plan_and_epochs_are_shown(spark, capsys):
    sizes = (15, 0, 8)
    columns = classifier_data(sum(sizes))
    columns["weight"] = np.random.default_rng(1).uniform(0.5, 2, sum(sizes)).astype("float32")
    model = regression_model(keras.optimizers.Adam(0.01), l2=0.01, metrics=["mae"])
    frame = partitioned_frame(spark, split_rows(columns, sizes), SCHEMA + ", weight double")
    fitted = KerasEstimator(
        model=model, numWorkers=len(sizes), epochs=2, batchSize=4, shuffle=False, weightCol="weight", verbose=1
    ).fit(frame)
    expected, history = fit_one_process(model, global_batches(columns, sizes, 4, 2), epochs=2)
    assert isinstance(fitted, KerasModel)
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=TOLERANCE)
    assert set(fitted.history) == {"loss", "mae"}
    for name in fitted.history:
        np.testing.assert_allclose(fitted.history[name], history[name], rtol=1e-4)
    times = fitted.summary.ranks
    assert [(part["epoch"], part["rank"], part["rows"]) for part in times] == [
        (epoch, rank, rows) for epoch in (0, 1) for rank, rows in enumerate(sizes)
    ]
    assert fitted.summary.plan == fitted.plan and fitted.summary.options["numWorkers"] == "3"
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("starting, ", "waiting "))]
    titles = ["rank", "host", "executor", "device", "threads", "training", "rows", "validation", "rows"]
    assert shown[0].split() == titles
    # Spark chooses the executors, of which no two ranks share one.
    placed = [line.split() for line in shown[1 : 1 + len(sizes)]]
    assert len({executor for _, _, executor, *_ in placed}) == len(sizes)
    assert [[rank, host, *rest] for rank, host, _, *rest in placed] == [
        [str(rank), "127.0.0.1", "CPU", "1", str(rows), "0"] for rank, rows in enumerate(sizes)
    ]
    assert [line.split()[0] for line in shown if "/2" in line and "step" not in line] == ["1/2", "2/2"]


@pytest.mark.slow("a fit; test_coordinator and test_client of the parameter server count strangers")
def test_fit_when_a_stranger_comes_then_goes_on_and_says_who_it_was(spark, capsys, monkeypatch):
    strangers = []

    class Visited(Channel):
        def __init__(self, **options):
            super().__init__(**options)
            strangers.append(socket.create_connection((options["bind_host"], self.port), timeout=10))
            strangers[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a health check\r\n\r\n")

    monkeypatch.setattr("elephant.driver.run_ranks.Channel", Visited)
    frame = partitioned_frame(spark, split_rows(classifier_data(20), [10, 10]), SCHEMA)
    estimator = KerasEstimator(model=regression_model(keras.optimizers.SGD(0.1)), numWorkers=2)
    fitted = estimator.fit(frame)
    for stranger in strangers:
        stranger.close()
    assert fitted.training_statistics["refused_connections"] == {"127.0.0.1": 1}
    assert "refused connections: 1, from 127.0.0.1 (1): they did not prove" in capsys.readouterr().out


@pytest.mark.slow("a fit")
def test_fit_when_40_rows_lie_in_50_partitions_then_every_row_is_computed_once_and_counts_once(spark):
    columns, computed = classifier_data(40), spark.sparkContext.accumulator(0)

    def counted(batches):
        for batch in batches:
            computed.add(batch.num_rows)
            yield batch

    frame = partitioned_frame(spark, split_rows(columns, [1] * 40 + [0] * 10), SCHEMA).mapInArrow(counted, SCHEMA)
    model = regression_model(keras.optimizers.SGD(0.1))
    fitted = KerasEstimator(model=model, numWorkers=2, epochs=3, batchSize=40, shuffle=False, verbose=0).fit(frame)
    assert computed.value == 40
    # One step holds all rows, wherever Spark put them.
    expected, history = fit_one_process(model, [columns] * 3, epochs=3)
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=TOLERANCE)
    np.testing.assert_allclose(fitted.history["loss"], history["loss"], rtol=1e-4)


@pytest.mark.slow("a fit")
def test_fit_when_parts_of_a_union_match_the_workers_and_rows_are_fewer_then_trains_all_the_same(spark):
    columns = classifier_data(1)
    row, none = (partitioned_frame(spark, split_rows(columns, [size]), SCHEMA) for size in (1, 0))
    model = regression_model(keras.optimizers.SGD(0.1))
    frame = row.union(row).union(none).cache()
    fitted = KerasEstimator(model=model, numWorkers=3, epochs=2, batchSize=2, verbose=0).fit(frame)
    expected, _ = fit_one_process(model, [columns] * 2, epochs=2)
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=TOLERANCE)


@pytest.mark.slow("a fit; tests/rank/test_models.py trains a subclass, test_citizen saves and loads")
def test_fit_when_a_function_builds_a_subclassed_model_then_trains_saves_and_loads(spark, tmp_path):
    def build():
        import keras

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.hidden = keras.layers.Dense(4, "tanh")
                self.out = keras.layers.Dense(1)

            def call(self, inputs):
                return self.out(self.hidden(inputs))

        net = Net()
        net.compile(keras.optimizers.Adam(0.05), "mse")
        return net

    columns = classifier_data(60)
    frame = partitioned_frame(spark, split_rows(columns, [30, 30]), SCHEMA)
    fitted = KerasEstimator(model=build, numWorkers=2, epochs=15, batchSize=8, verbose=0).fit(frame)
    assert fitted.history["loss"][-1] < 0.5 * fitted.history["loss"][0]
    expected = fitted.model.predict(columns["features"], verbose=0)[:, 0]
    fitted.write().overwrite().save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"), trusted=True)
    rows = loaded.transform(frame).select("label", "prediction").collect()
    # Its output shape is not known before it is built, so the prediction is an array of one value.
    got = {row.label: np.ravel(row.prediction)[0] for row in rows}
    for label, value in zip(columns["label"], expected, strict=True):
        assert got[float(label)] == pytest.approx(value, abs=1e-5)


class Hears(elephant.FitListener):
    """Keeps what it hears, and cannot be pickled."""

    def __init__(self):
        self.lock, self.epochs, self.end = threading.Lock(), [], None

    def epoch_end(self, epoch, metrics, seconds):
        self.epochs.append(metrics["val_loss"])

    def fit_end(self, fitted, error):
        self.end = (fitted, error)


def test_fit_when_callbacks_see_epochs_then_all_ranks_stop_and_logs_listeners_and_events_are_where_the_user_is(
    spark, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    columns = classifier_data(64)
    frame = partitioned_frame(spark, split_rows(columns, [40, 24]), SCHEMA)
    seen, hears = [], Hears()
    spark.conf.set("spark.elephant.trace", "true")
    estimator = KerasEstimator(
        regression_model(keras.optimizers.SGD(0.0)),
        numWorkers=2,
        epochs=30,
        validationFraction=0.25,
        callbacks=[
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=2),
            keras.callbacks.CSVLogger("log.csv"),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["val_loss"])),
            # Spark has put the other one there.
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: open("steps.txt", "a").write(
                    f"{batch} {os.path.exists('stderr')} {os.getpid()}\n"
                )
            ),
        ],
        driverCallbacks=hears,
        eventsPath=f"file://{tmp_path}/events",
        verbose=0,
    )
    try:
        fitted = estimator.fit(frame)
    finally:
        spark.conf.unset("spark.elephant.trace")
    losses = fitted.history["val_loss"]
    assert len(losses) == 3 and losses == seen == hears.epochs
    assert hears.end == (fitted, None)
    logged = (tmp_path / "log.csv").read_text().splitlines()
    assert logged[0] == "epoch,loss,val_loss" and [line.split(",")[0] for line in logged[1:]] == ["0", "1", "2"]
    (path,) = (tmp_path / "events").glob("*.jsonl")
    told = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [one["metrics"]["val_loss"] for one in told if one["event"] == "epoch_end"]
    assert (told[0]["event"], told[-1]["event"]) == ("fit_begin", "fit_end") and ends == losses
    assert told[0]["params"]["epochs"] == 30
    # What the file says is what the model says.
    assert program.main(["report", str(path.parent), "--output", str(tmp_path / "told.html")]) == 0
    assert (tmp_path / "told.html").read_text() == fitted.summary.report(tmp_path / "own.html").read_text()
    (path,) = (tmp_path / "events").glob("*.json")
    traced = json.loads(path.read_text())["traceEvents"]
    assert [one["pid"] for one in traced if one["name"] == "epoch 3"].count(2) == 1
    assert {one["pid"] for one in traced if one["name"] == "step"} == {2, 3}
    steps = [(tmp_path / place / "steps.txt").read_text().splitlines() for place in ("", "rank-1")]
    assert all(line.split()[1] == "True" for lines in steps for line in lines)
    assert [sum(line.startswith("0 ") for line in lines) for lines in steps] == [3, 3]
    assert any("steps.txt" in note for note in fitted.summary.notes)
    # Of a worker, such a path would be one where nobody looks.
    often = keras.callbacks.ModelCheckpoint("model.keras", save_freq=3)
    with pytest.raises(ConfigurationError, match=r"absolute path.*ModelCheckpoint.*Received: 'model.keras'"):
        estimator.fit(frame, callbacks=often, driverCallbacks=[])


def test_fit_when_there_are_no_rows_then_says_so(spark):
    estimator = KerasEstimator(model=regression_model("sgd"), numWorkers=2, verbose=0)
    rows = spark.createDataFrame([([0.0] * 6, 1.0)], SCHEMA)
    # Of some of them Spark knows it before, and makes no task at all.
    for frame in (spark.createDataFrame([], SCHEMA), rows.where("label > 1").repartition(3)):
        with pytest.raises(DataError, match="expected rows to train on. Received: a DataFrame without rows"):
            estimator.fit(frame)


def test_fit_when_a_row_is_unusable_then_the_error_names_column_and_row(spark):
    frame = partitioned_frame(spark, [[([0.0] * 6, 1.0), ([0.0] * 5, 1.0)]], SCHEMA)
    message = "column 'features': expected 6 values .* Received: 5 values in row 1"
    with pytest.raises(DataError, match=message):
        KerasEstimator(model=regression_model("sgd"), verbose=0).fit(frame)


def test_fit_when_slots_are_too_few_then_says_so_before_any_job(spark):
    frame = partitioned_frame(spark, [rows_of(classifier_data(4))], SCHEMA)
    with pytest.raises(
        ClusterError, match=r"numWorkers=9: expected 9 task slots .* Received: 3. Lower numWorkers to 3"
    ):
        KerasEstimator(model=regression_model("sgd"), numWorkers=9, verbose=0).fit(frame)
