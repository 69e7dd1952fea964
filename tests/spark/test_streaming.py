"""``fit_stream`` on files that arrive: every row counts once, through stops, failures and deliveries that repeat."""

import os
import time
from dataclasses import replace

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counting_model import counted, counting_data, counting_model, weights_of
from pyspark.java_gateway import ensure_callback_server_started

from elephant import KerasEstimator
from elephant.errors import ConfigurationError, DataError, TrainingError
from elephant.modeling.model_spec import model_source
from elephant.spark.params import fit_config
from elephant.spark.saving.streaming import StreamFolder, StreamState, StreamTrainer

pytestmark = pytest.mark.usefixtures("by_value")

SCHEMA = "features array<float>, label float"
DEADLINE_S = 150


class Held(keras.callbacks.Callback):
    """Says that training has begun; fails then, or waits to be ended, while a file says so."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def on_train_batch_end(self, batch, logs=None):
        """Looks at batches, and so runs on the workers."""

    def on_train_begin(self, logs=None):
        if os.path.exists(f"{self.folder}/fail"):
            raise RuntimeError("told to fail")
        while os.path.exists(f"{self.folder}/hold"):
            open(f"{self.folder}/began", "w").close()
            time.sleep(0.05)


def arrive(folder, columns, rows, number):
    """Puts some rows into a stream's folder, as a file that is there at once and younger than those before."""
    table = pa.table({"features": list(columns["features"][rows]), "label": columns["label"][rows]})
    path = folder / f".{number}"
    pq.write_table(table.cast(pa.schema([("features", pa.list_(pa.float32())), ("label", pa.float32())])), path)
    os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    path.rename(folder / f"{number}.parquet")


@pytest.fixture(scope="module", autouse=True)
def spark_calls_back(spark):
    """PySpark listens to its JVM from the first foreachBatch of a session on: begun here, as it stays."""
    ensure_callback_server_started(spark.sparkContext._gateway)


@pytest.fixture
def folders(tmp_path):
    for name in ("rows", "marks"):
        (tmp_path / name).mkdir()
    return tmp_path


def start(spark, folders, *, trigger=None, **options):
    estimator = KerasEstimator(
        model=counting_model(), numWorkers=1, batchSize=16, verbose=0, callbacks=[Held(folders / "marks")], **options
    )
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folders / "rows"))
    return estimator.fit_stream(
        stream, checkpointLocation=folders / "checkpoint", trigger=trigger or {"availableNow": True}
    )


@pytest.mark.slow("five fits, through every kind of stop")
def test_stream_when_stopped_failed_and_delivered_again_then_every_row_counts_once(spark, folders):
    columns = counting_data(48)
    once = counted(head(columns, 16), batch_size=16, epochs=1)
    arrive(folders / "rows", columns, slice(0, 16), 0)
    stream = start(spark, folders)
    assert stream.awaitTermination(DEADLINE_S)
    assert (stream.exception, stream.isActive, stream.lastBatch) == (None, False, 0)
    assert len(stream.history["loss"]) == 1
    np.testing.assert_array_equal(weights_of(stream.model), once)

    # As if the driver had died after the last checkpoint, before Spark noted that the micro-batch was done.
    for note in (folders / "checkpoint" / "stream" / "commits").glob("*0*"):
        note.unlink()
    arrive(folders / "rows", columns, slice(16, 32), 1)
    (folders / "marks" / "fail").touch()
    stream = start(spark, folders)
    with pytest.raises(TrainingError, match="RuntimeError: told to fail"):
        stream.awaitTermination(DEADLINE_S)
    assert isinstance(stream.exception, TrainingError)
    # The last state is there, and can be used.
    assert stream.lastBatch == 0
    np.testing.assert_array_equal(weights_of(stream.model), once)

    (folders / "marks" / "fail").unlink()
    (folders / "marks" / "hold").touch()
    stream = start(spark, folders, trigger={"processingTime": "100 milliseconds"})
    deadline = time.monotonic() + DEADLINE_S
    while not (folders / "marks" / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    stream.stop()
    assert (stream.isActive, stream.lastBatch, stream.exception) == (False, 0, None)

    (folders / "marks" / "hold").unlink()
    arrive(folders / "rows", columns, slice(0, 0), 2)
    arrive(folders / "rows", columns, slice(32, 48), 3)
    stream = start(spark, folders)
    assert stream.awaitTermination(DEADLINE_S)
    assert stream.lastBatch == 3
    assert len(stream.history["loss"]) == 3
    np.testing.assert_array_equal(weights_of(stream.model), counted(columns, batch_size=16, epochs=1))


def head(columns, rows):
    return {name: values[:rows] for name, values in columns.items()}


def test_stream_when_a_micro_batch_is_small_then_optimizer_goes_on_and_fewer_workers_train(spark, folders, capfd):
    columns = counting_data(20)
    arrive(folders / "rows", columns, slice(0, 16), 0)
    arrive(folders / "rows", columns, slice(16, 20), 1)
    model = counting_model(keras.optimizers.SGD(0.25, momentum=0.5))
    estimator = KerasEstimator(model=model, numWorkers=2, batchSize=16, scaleLearningRate=True, verbose=1)
    stream = estimator.fit_stream(
        spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folders / "rows")),
        checkpointLocation=str(folders / "checkpoint"),
        trigger={"availableNow": True},
        minRowsPerWorker=8,
    )
    assert stream.awaitTermination(DEADLINE_S)
    shown = capfd.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.split()[1:2] == ["127.0.0.1"]] == ["0", "1", "0"]
    # Two steps of SGD with momentum, at twice the rate, which the second one keeps.
    rate, means = 0.5, [columns["features"][:16].mean(axis=0), columns["features"][16:].mean(axis=0)]
    velocity = -rate * means[0]
    expected = velocity + (0.5 * velocity - rate * means[1])
    np.testing.assert_allclose(weights_of(stream.model), expected, atol=1e-6)


def test_stream_when_rows_cannot_be_trained_on_then_the_error_is_that_of_fit(spark, folders):
    pq.write_table(pa.table({"features": [[1.0, 2.0]], "label": [1.0]}), folders / "rows" / "0.parquet")
    estimator = KerasEstimator(model=counting_model(), verbose=0)
    stream = estimator.fit_stream(
        spark.readStream.schema("features array<double>, label double").parquet(str(folders / "rows")),
        checkpointLocation=folders / "checkpoint",
        trigger={"availableNow": True},
    )
    with pytest.raises(DataError, match="column 'features': expected 4 values"):
        stream.awaitTermination(DEADLINE_S)
    assert stream.model is None
    assert stream.history == {}


def test_stream_when_the_frame_or_an_option_cannot_work_then_says_so(spark, tmp_path):
    estimator = KerasEstimator(model=counting_model(), verbose=0)
    with pytest.raises(ConfigurationError, match="expected a streaming DataFrame, .* Use fit"):
        estimator.fit_stream(spark.range(3), checkpointLocation=tmp_path)
    stream = spark.readStream.schema(SCHEMA).parquet(str(tmp_path))
    with pytest.raises(ConfigurationError, match="^fit: .* Received: a streaming one. fit_stream trains on its"):
        estimator.fit(stream)
    with pytest.raises(ConfigurationError, match="^evaluate: .* Received: a streaming one. foreachBatch of its"):
        estimator.getModel().evaluate(stream)
    with pytest.raises(ConfigurationError, match="^predict: .* Received: a streaming one. transform takes it"):
        estimator.getModel().predict(stream)
    with pytest.raises(ConfigurationError, match="minRowsPerWorker: expected at least 1. Received: 0"):
        estimator.fit_stream(stream, checkpointLocation=tmp_path, minRowsPerWorker=0)


def test_state_when_read_again_then_is_another_model_for_workers_that_keep_models():
    source = model_source(counting_model())
    archive = source.archive
    states = [StreamState(stream_id="s", batch=batch, spec=source, history={}) for batch in range(2)]
    read = [StreamState.from_fit_state(state.to_fit_state(), source).spec for state in states]
    assert all(model.archive == archive for model in read)
    assert len({source.source_id, *(model.source_id for model in read)}) == 3


class OneState:
    """A folder of checkpoints that holds one."""

    def __init__(self, history):
        self.history = history

    def latest(self, source):
        state = StreamState(stream_id="s", batch=0, spec=source, history=self.history)
        return StreamState.from_fit_state(state.to_fit_state(), source)


@pytest.mark.parametrize(("history", "rate"), [({}, 0.5), ({"loss": [1.0]}, None)])
def test_stream_when_resumed_then_the_learning_rate_is_set_unless_a_micro_batch_was_trained_on(history, rate):
    estimator = KerasEstimator(model=counting_model(), learningRate=0.5, scaleLearningRate=True, numWorkers=2)
    trainer = StreamTrainer(estimator, OneState(history), min_rows_per_worker=1)
    source = OneState(history).latest(model_source(counting_model())).spec
    used = fit_config(trainer._estimator_for(source, 1, 10))
    assert (used.learning_rate, used.scale_learning_rate) == (rate, rate is not None)


def test_folder_when_the_newest_checkpoint_is_cut_short_then_the_one_before_counts(spark, tmp_path):
    source = model_source(counting_model())
    folder = StreamFolder(spark, str(tmp_path / "model"))
    assert folder.latest(source) is None
    for batch in range(4):
        folder.write(StreamState(stream_id="a", batch=batch, spec=source, history={"loss": [1.0] * batch}))
    manifests = sorted((tmp_path / "model").glob("*.json"))
    assert [path.name[:14] for path in manifests] == ["epoch-00000002", "epoch-00000003"]
    assert StreamFolder(spark, str(tmp_path / "model")).latest(source).batch == 3
    newest = manifests[-1].with_suffix(".state.npz")
    newest.write_bytes(newest.read_bytes()[:-30])
    state = StreamFolder(spark, str(tmp_path / "model")).latest(source)
    assert (state.batch, state.history) == (2, {"loss": [1.0, 1.0]})
    assert state.spec.build().get_weights()[0].tolist() == [[0.0]] * 4


def test_state_when_its_model_is_not_finite_then_is_gone_on_from_all_the_same(spark, tmp_path):
    source, folder = model_source(counting_model()), StreamFolder(spark, str(tmp_path))
    for batch, value in enumerate((1.0, np.nan)):
        weights = replace(source, variables=(np.full(3, value),))
        folder.write(StreamState(stream_id="a", batch=batch, spec=weights, history={}))
    assert StreamFolder(spark, str(tmp_path)).latest(source).batch == 1
