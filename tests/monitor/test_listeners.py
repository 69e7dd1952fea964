"""Listeners of a fit: which events they hear, what a failing one does, the file of events, and MLflow's runs."""

import json
import math
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import pandas as pd
import pytest
from mlflow_state import own_mlflow

import elephant
from elephant.cli.event_file import find_events
from elephant.errors import ConfigurationError
from elephant.monitor.events import (
    Awaited,
    EpochEnded,
    RankFailure,
    RankGone,
    RankSilent,
    Started,
    StateSaved,
    StepEnded,
)
from elephant.monitor.listeners import EventFile, FitListener, Listeners, mlflow_listeners


class Records(FitListener):
    def __init__(self):
        self.heard = []

    def fit_begin(self, params):
        self.heard.append(("begin", dict(params)))

    def epoch_end(self, epoch, metrics, seconds):
        self.heard.append(("epoch", epoch, dict(metrics), seconds))

    def worker_lost(self, rank, host, reason):
        self.heard.append(("lost", rank, host, reason))

    def checkpoint(self, epochs):
        self.heard.append(("checkpoint", epochs))

    def fit_end(self, fitted, error):
        self.heard.append(("end", fitted, error))


def started(rank):
    return Started(rank=rank, host=f"host{rank}", device="CPU", threads=1, training_rows=1, validation_rows=0)


EVENTS = [
    started(0),
    started(1),
    EpochEnded(rank=0, epoch=0, logs={"loss": 0.5, "per_class": [1.0, 2.0]}, seconds=1.5),
    StateSaved(rank=0, epochs=1, history={}, facts={}, names=[]),
    # One loss is told once, however many say so; who follows others into failure says nothing.
    RankGone(rank=1),
    RankFailure(rank=1, kind="ValueError", message="later"),
    RankFailure(rank=0, kind="elephant.PeerLostError", message="the other one"),
    started(1),
    RankSilent(rank=1, silent_s=60.0),
]
HEARD = [
    ("epoch", 0, {"loss": 0.5}, 1.5),
    ("checkpoint", 1),
    ("lost", 1, "host1", "its connection has ended without a word"),
    ("lost", 1, "host1", "nothing was heard from it for 60 s"),
]


def test_listener_when_a_fit_ends_well_then_has_heard_each_event_once():
    records = Records()
    with Listeners([records], {"epochs": 1}) as listeners:
        for event in EVENTS:
            listeners.show(event)
        listeners.fitted = "fitted"
    assert records.heard == [("begin", {"epochs": 1}), *HEARD, ("end", "fitted", None)]


def test_listener_when_it_raises_then_is_warned_of_and_the_others_and_the_fit_go_on():
    class Broken(FitListener):
        def epoch_end(self, epoch, metrics, seconds):
            raise ConnectionError("no such server")

        def fit_end(self, fitted, error):
            raise AssertionError("hears nothing more")

    records, error = Records(), ValueError("of the fit")
    with pytest.raises(ValueError, match="of the fit"), Listeners([Broken(), records], {}) as listeners:
        with pytest.warns(UserWarning, match=r"Broken has failed and hears nothing more .*ConnectionError: no such"):
            listeners.show(EVENTS[2])
        raise error
    assert records.heard[-1] == ("end", None, error)


def test_listener_when_it_raises_at_the_end_then_the_end_is_told_once_and_is_warned_of():
    class Broken(Records):
        def fit_end(self, fitted, error):
            super().fit_end(fitted, error)
            raise ConnectionError("no such server")

    broken, records = Broken(), Records()
    with pytest.warns(UserWarning, match=r"^Broken has failed at the end of the fit: ConnectionError: no such server$"):
        fit(0, "fitted", [broken, records])
    assert broken.heard[1:] == records.heard[1:] == [("end", "fitted", None)]


def test_event_file_when_a_fit_fails_then_has_a_line_for_each_event_with_its_arguments():
    written = []
    with pytest.raises(RuntimeError), Listeners([EventFile(written.append)], {"epochs": 3}) as listeners:
        listeners.show(EVENTS[2])
        listeners.show(EVENTS[4])
        raise RuntimeError("lost")
    # After every event the whole file.
    assert [len(content.splitlines()) for content in written] == [1, 2, 3, 4]
    lines = [json.loads(line) for line in written[-1].splitlines()]
    assert all(line.pop("time") > 1.7e9 for line in lines)
    assert lines == [
        {"event": "fit_begin", "params": {"epochs": 3}},
        {"event": "epoch_end", "epoch": 0, "metrics": {"loss": 0.5}, "seconds": 1.5},
        {"event": "worker_lost", "rank": 1, "host": "", "reason": "its connection has ended without a word"},
        {"event": "fit_end", "error": "RuntimeError: lost"},
    ]


def test_event_file_when_it_cannot_be_written_for_a_while_then_is_tried_again_and_the_fit_has_not_failed(monkeypatch):
    def write(content):
        tried.append(clock[0])
        if is_away:
            raise OSError("503 Slow Down")
        written.append(content)

    written, tried, clock, is_away = [], [], [100.0], False
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Listeners([EventFile(write)], {"epochs": 2}) as listeners:
        is_away = True
        with pytest.warns(UserWarning, match=r"are tried again while it goes on: OSError: 503 Slow Down") as warned:
            listeners.show(EVENTS[2])
            clock[0] += 1.0
            # It is not asked again at once, and the warning comes once.
            listeners.show(Awaited(text="", seconds=0))
            clock[0] += 5.0
            listeners.show(Awaited(text="", seconds=0))
        assert len(warned) == 1 and tried == [100.0, 100.0, 106.0] and len(written) == 1
        is_away = False
        clock[0] += 5.0
        listeners.show(Awaited(text="", seconds=0))
        names = [json.loads(line)["event"] for line in written[-1].splitlines()]
        assert names == ["fit_begin", "epoch_end"]
    assert json.loads(written[-1].splitlines()[-1])["error"] is None


def test_event_file_when_it_cannot_be_begun_then_is_warned_of_and_no_failed_fit_is_written():
    written = []

    def write(content):
        written.append(content)
        raise OSError("no such bucket")

    with pytest.warns(UserWarning, match=r"^eventsPath: expected a folder .*no such bucket"):
        with Listeners([EventFile(write)], {}) as listeners:
            listeners.show(EVENTS[2])
    assert len(written) == 1 and b"fit_end" not in written[0]


def test_event_file_when_writing_takes_a_job_then_is_not_written_for_the_moment(monkeypatch):
    written, clock = [], [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Listeners([EventFile(written.append, has_moments=False)], {"epochs": 1}) as listeners:
        for _ in range(3):
            clock[0] += 100.0
            listeners.show(Awaited(text="rows", seconds=4))
        assert len(written) == 1


def test_event_file_when_time_goes_on_then_ends_with_what_is_of_the_moment_until_it_is_written_again(monkeypatch):
    def step(rank, number):
        return StepEnded(rank=rank, epoch=0, step=number, steps=9, logs={"loss": math.nan}, rows=8)

    def moments():
        lines = [json.loads(line) for line in written[-1].splitlines()]
        return [(line["event"], line.get("step", line.get("text"))) for line in lines]

    written, clock = [], [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Listeners([EventFile(written.append)], {"epochs": 1, "mode": "synchronous"}) as listeners:
        listeners.show(Awaited(text="rows", seconds=4))
        # Nothing is written more often than every five seconds.
        assert len(written) == 1
        clock[0] += 5.0
        listeners.show(Awaited(text="rows", seconds=5))
        assert moments() == [("fit_begin", None), ("waiting", "rows")]
        for event in (Awaited(text="", seconds=0), started(0), started(1), step(1, 2), step(0, 2), step(0, 3)):
            listeners.show(event)
        clock[0] += 5.0
        listeners.show(step(1, 3))
        lasting = [("fit_begin", None), *[("worker_begin", None)] * 2]
        assert moments() == [*lasting, ("worker_step", 3), ("worker_step", 3)]
        assert json.loads(written[-1].splitlines()[-1])["logs"] == {"loss": None}
        # While a step takes long, the driver is there.
        clock[0] += 5.0
        listeners.show(Awaited(text="", seconds=0))
        assert len(written) == 4 and len(moments()) == 5
    assert moments() == [*lasting, ("fit_end", None)]


class Fitted:
    """Stands for a fitted model."""

    def __init__(self, *layers):
        self.model = keras.Sequential([keras.layers.Input((3,)), *layers, keras.layers.Dense(2)])
        self.source = SimpleNamespace(custom_objects={})


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    with own_mlflow() as mlflow:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
        yield mlflow


def fit(epochs, fitted=None, listening=None):
    """Does what a fit does for listeners: MLflow's, where no other ones are given."""
    heard = mlflow_listeners() if listening is None else listening
    with Listeners(heard, {"epochs": epochs, "labelCol": "y" * 7000}) as listeners:
        for epoch in range(epochs):
            listeners.show(EpochEnded(rank=0, epoch=epoch, logs={"loss": 1.0 / (epoch + 1)}, seconds=1.0))
        listeners.fitted = fitted


def test_mlflow_when_a_run_is_active_then_it_has_params_epochs_and_a_model_and_further_fits_have_runs_of_their_own(
    mlflow,
):
    assert mlflow_listeners() == []
    fitted, client = Fitted(), mlflow.MlflowClient()
    with mlflow.start_run() as run:
        fit(2, fitted)
        fit(3)
        # The user's run stays the active one.
        assert mlflow.active_run().info.run_id == run.info.run_id
    first = client.get_run(run.info.run_id).data
    assert first.params["epochs"] == "2" and len(first.params["labelCol"]) == 6000
    history = client.get_metric_history(run.info.run_id, "loss")
    # MLflow's file store has those of the model's step, the last one, once more.
    assert sorted({(metric.step, metric.value) for metric in history}) == [(0, 1.0), (1, 0.5)]
    (nested,) = client.search_runs([run.info.experiment_id], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
    assert nested.data.params["epochs"] == "3" and nested.info.status == "FINISHED"
    (model,) = mlflow.search_logged_models(output_format="list")
    assert {metric.key: metric.value for metric in model.metrics} == {"loss": 0.5, "epoch_seconds": 1.0}
    rows = np.ones((4, 3), "float32")
    wanted = fitted.model.predict_on_batch(rows)
    np.testing.assert_array_equal(mlflow.keras.load_model(model.model_uri).predict_on_batch(rows), wanted)
    np.testing.assert_array_equal(mlflow.pyfunc.load_model(model.model_uri).predict(rows), wanted)
    needed = mlflow.pyfunc.get_model_dependencies(model.model_uri)
    assert {line.split("==")[0] for line in open(needed).read().split()} >= {"keras", keras.config.backend()}


def test_mlflow_when_a_fit_has_an_event_file_then_its_run_names_it_and_who_asks_for_the_run_finds_it(mlflow, tmp_path):
    path = tmp_path / "fits" / "20261129T1-a.jsonl"
    path.parent.mkdir()
    path.write_text("events\n")
    with mlflow.start_run() as run:
        fit(1, listening=mlflow_listeners(str(path)))
    found = find_events(run.info.run_id)
    assert found.read() == b"events\n" and found.run_id == run.info.run_id
    with mlflow.start_run() as other:
        fit(1)
    with pytest.raises(ConfigurationError, match=f"run {other.info.run_id} without the tag elephant.events: MLflow"):
        find_events(other.info.run_id)
    with pytest.raises(ConfigurationError, match="expected the id of a run that MLflow knows at file:.* Set MLFLOW"):
        find_events("0" * 32)


def test_mlflow_when_the_model_cannot_be_logged_then_ends_its_own_run_alone_and_the_run_says_what_it_lacks(mlflow):
    class Unsaved:
        @property
        def model(self):
            raise OSError("the disk is full")

    client = mlflow.MlflowClient()
    with mlflow.start_run() as run:
        fit(1)
        with pytest.warns(UserWarning, match=r"run \w+ of MLflow has the params and metrics .* the disk is full\. The"):
            fit(2, Unsaved())
        # The user's run goes on, and is the active one.
        assert mlflow.active_run().info.run_id == run.info.run_id
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
    assert client.get_run(run.info.run_id).info.status == "FINISHED"
    nested = client.search_runs([run.info.experiment_id], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
    said = [(one.data.params["epochs"], one.info.status, one.data.tags["elephant.fit"]) for one in nested]
    assert said == [("2", "FINISHED", "finished, without its model")]


def test_mlflow_when_no_run_can_be_opened_then_the_users_run_goes_on(mlflow, monkeypatch):
    client = mlflow.MlflowClient()
    with mlflow.start_run() as run:
        fit(1)
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="no such server"):
            patch.setattr(mlflow, "start_run", _refuse)
            fit(1)
        assert mlflow.active_run().info.run_id == run.info.run_id
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
        assert client.get_run(run.info.run_id).data.tags["elephant.fit"] == "finished"


def _refuse(*args, **kwargs):
    raise ConnectionError("no such server")


def test_mlflow_when_a_callback_leaves_a_run_open_then_the_fits_own_run_ends_and_that_one_stays(mlflow):
    class Opening(FitListener):
        def epoch_end(self, epoch, metrics, seconds):
            self.run = mlflow.start_run(nested=True)

    opening, client = Opening(), mlflow.MlflowClient()
    with mlflow.start_run() as run:
        fit(1)
        fit(1, None, [*mlflow_listeners(), opening])
        assert client.get_run(opening.run.info.run_id).info.status == "RUNNING"
        (own,) = client.search_runs([run.info.experiment_id], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
        assert own.info.status == "FINISHED"


class Twice(keras.layers.Layer):
    def call(self, inputs):
        return 2.0 * inputs


@keras.saving.register_keras_serializable(package="tests")
class Thrice(keras.layers.Layer):
    def call(self, inputs):
        return 3.0 * inputs


# A process of its own: MLflow, Keras and TensorFlow begin anew in it, some seconds.
def test_mlflow_when_a_layer_is_not_registered_then_says_how_a_new_process_loads_the_model(mlflow, recwarn):
    with mlflow.start_run():
        fit(1, Fitted(Thrice()))
    assert not [one for one in recwarn if "custom_objects" in str(one.message)]
    fitted = Fitted(Twice())
    with mlflow.start_run(), pytest.warns(UserWarning, match="does not find by itself: Twice") as warned:
        fit(1, fitted)
    (said,) = [str(one.message) for one in warned if "custom_objects" in str(one.message)]
    # The sentence itself is run.
    load = said[said.index("mlflow.keras.load_model(") : said.index(" loads it")]
    lines = [
        "import keras, mlflow.keras, numpy as np",
        "class Twice(keras.layers.Layer):",
        "    def call(self, inputs):",
        "        return 2.0 * inputs",
        f"mlflow.set_tracking_uri({mlflow.get_tracking_uri()!r})",
        f"print({load}.predict(np.ones((1, 3), 'float32'), verbose=0).tolist())",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = fitted.model.predict(np.ones((1, 3), "float32"), verbose=0)
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), wanted, rtol=1e-6)


def test_mlflow_when_a_model_has_layers_of_elephant_then_says_what_loading_it_needs(mlflow):
    fitted = Fitted(elephant.ShardedEmbedding(5, 2), keras.layers.Flatten())
    told = "layers of elephant: ShardedEmbedding. .* import elephant; elephant.ShardedEmbedding."
    with mlflow.start_run(), pytest.warns(UserWarning, match=told):
        fit(1, fitted)


def test_mlflow_when_autologging_is_on_and_no_hook_has_opened_a_run_then_the_fit_opens_one_and_registers_its_model(
    mlflow,
):
    given = {name: keras.Input((2,), name=name) for name in ("left", "right")}
    outputs = keras.layers.Dense(1)(keras.layers.Subtract()([given["left"], given["right"]]))
    fitted = Fitted()
    fitted.model = keras.Model(given, outputs)
    try:
        # What users call; its hook in Keras' own fit hears nothing of a fit of elephant.
        mlflow.keras.autolog(registered_model_name="differences")
        fit(2, fitted)
        mlflow.keras.autolog(log_models=False)
        fit(1, fitted)
        # Fits in threads would each open one.
        found = []
        thread = threading.Thread(target=lambda: found.append(mlflow_listeners()))
        thread.start()
        thread.join(10)
        assert found == [[]]
    finally:
        mlflow.keras.autolog(disable=True)
    runs = mlflow.search_runs(output_format="list")
    assert sorted((run.data.params["epochs"], run.info.status) for run in runs) == [
        ("1", "FINISHED"),
        ("2", "FINISHED"),
    ]
    assert mlflow.active_run() is None and len(mlflow.search_logged_models(output_format="list")) == 1
    # As the function that MLflow makes for Spark does: a column for each of several inputs.
    x = np.arange(12, dtype="float32").reshape(2, 3, 2)
    columns = pd.DataFrame({name: list(part) for name, part in zip(("left", "right"), x, strict=True)})
    kernel, bias = fitted.model.get_weights()
    predicted = mlflow.pyfunc.load_model("models:/differences/1").predict(columns)
    np.testing.assert_allclose(predicted, (x[0] - x[1]) @ kernel + bias, rtol=1e-5)
