"""What clients of Spark Connect do in the tests.

``connect_clients.py URL`` imports Keras and PySpark once, and then makes a client of each line that it reads, in a
process that is forked for it: what a client imports takes longer than what most of them do.
"""

import json
import os
import sys
import tempfile
import time
import traceback
import warnings

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, regression_model
from pyspark.sql import SparkSession
from secret_search import TokenWatch

import elephant
from elephant import KerasEstimator, KerasModel
from elephant.driver.coordinator_location import coordinates_on_executors
from elephant.errors import ClusterError, DataError, UnsupportedError, WorkerFailure

ROWS = 40
TOLERANCE = 1e-5
SCHEMA = "features array<float>, label double"


def data():
    return classifier_data(ROWS)


def frame_of(spark, columns):
    rows = list(zip(columns["features"].tolist(), map(float, columns["label"]), strict=True))
    return spark.createDataFrame(rows, SCHEMA)


def reference(model, epochs):
    """What one process gives that takes all rows in one step per epoch, however they are dealt out."""
    return fit_one_process(model, [data()] * epochs, epochs=epochs)


def check_weights(fitted, expected):
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=TOLERANCE)


def fit_synchronously(spark):
    """Two workers that step together give what one process gives."""
    spark.conf.set("spark.elephant.coordinator", "auto")
    assert not coordinates_on_executors(spark)
    frame, model = frame_of(spark, data()), regression_model(keras.optimizers.SGD(0.05))
    expected, history = reference(model, 2)
    fitted = KerasEstimator(model=model, numWorkers=2, epochs=2, batchSize=ROWS).fit(frame)
    check_weights(fitted, expected)
    np.testing.assert_allclose(fitted.history["loss"], history["loss"], rtol=1e-4)


def hosted(spark, folder):
    """What rank 0 hosts, in one session: each session has its own Python on the executors, which imports all anew."""
    find_out(spark)
    fit_asynchronously(spark)
    fail(spark, folder)


def find_out(spark):
    """A client whose address nobody listens on finds that out, and has rank 0 host for it."""
    # Ours to listen on is 127.0.0.1; this one is another.
    spark.conf.set("spark.elephant.driver.host", "127.0.0.77")
    assert coordinates_on_executors(spark)
    assert elephant.run(elephant.collective.rank, num_workers=2, spark=spark) == [0, 1]


def fit_asynchronously(spark):
    """One worker of a server that rank 0 hosts gives what one process gives."""
    spark.conf.set("spark.elephant.coordinator", "executors")
    assert coordinates_on_executors(spark)
    model, seen = regression_model(keras.optimizers.SGD(0.05)), SeesEpochs()
    options = {"mode": "asynchronous", "epochs": 2, "batchSize": ROWS, "callbacks": [seen], "verbose": 0}
    fitted = KerasEstimator(model=model, numWorkers=1, **options).fit(frame_of(spark, data()))
    check_weights(fitted, reference(model, 2)[0])
    assert fitted.training_statistics["updates"] == 2
    # It hosts callbacks too, which are copies of the user's.
    assert seen.epochs == []


class SeesEpochs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


class FailsInEpoch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        """Looks at batches, and so runs on the workers."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise ValueError("this callback fails in its second epoch")


def fail(spark, folder):
    """Errors arrive whole, in whatever way they come, and a fit goes on from the checkpoint before its own."""
    spark.conf.set("spark.elephant.coordinator", "executors")
    frame, model = frame_of(spark, data()), regression_model(keras.optimizers.SGD(0.05, momentum=0.9))
    expected, _ = reference(model, 3)

    def estimator(**options):
        return KerasEstimator(model=model, numWorkers=2, epochs=3, batchSize=ROWS, **{"verbose": 0, **options})

    path = f"{folder}/checkpoints"
    with pytest.raises(WorkerFailure) as failed:
        estimator(callbacks=[FailsInEpoch()], checkpointPath=path, verbose=1).fit(frame)
    # Both ranks fail of it: either may have been the first.
    assert failed.value.rank in (0, 1) and failed.value.host and failed.value.executor
    assert "ValueError: this callback fails in its second epoch" in failed.value.summary
    assert "in on_epoch_end" in failed.value.traceback and failed.value.step is not None
    check_weights(estimator(checkpointPath=path, resume=True, verbose=1).fit(frame), expected)
    for mode in ("synchronous", "asynchronous"):
        with pytest.raises(DataError, match="column 'label': expected a value in every row. Received: null"):
            estimator(mode=mode).fit(frame.selectExpr("features", "nullif(label, label) AS label"))
    with pytest.raises(WorkerFailure, match="SIGKILL") as killed:
        elephant.run(die_as_rank_1, num_workers=2, spark=spark, verbose=0)
    assert killed.value.rank == 1 and "last words" in killed.value.log_tail
    assert sorted(elephant.run(rank_and_bytes, num_workers=2, spark=spark, verbose=0)) == [
        (0, 3 * 2**20),
        (1, 3 * 2**20),
    ]


def die_as_rank_1():
    if elephant.collective.rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), 9)
    elephant.collective.barrier()


def rank_and_bytes():
    return elephant.collective.rank(), len(bytes(3 * 2**20))


def use(spark, folder):
    """What a fitted model is used for, and files."""
    from pyspark.ml import Pipeline, PipelineModel

    columns = data()
    frame, model = frame_of(spark, columns), regression_model(keras.optimizers.SGD(0.05))
    path = f"{folder}/model"
    estimator = KerasEstimator(model=model, numWorkers=2, batchSize=ROWS, verbose=0)
    estimator.save(f"{folder}/estimator")
    piped = Pipeline(stages=[KerasEstimator.load(f"{folder}/estimator")]).fit(frame)
    fitted = piped.stages[0]
    expected = {
        round(float(label), 5): float(value)
        for label, value in zip(
            columns["label"], fitted.model.predict(columns["features"], verbose=0)[:, 0], strict=True
        )
    }

    def check(rows):
        assert len(rows) == ROWS
        for label, prediction in rows:
            assert prediction == pytest.approx(expected[round(label, 5)], abs=1e-5)

    check(frame.select("label", elephant.predict_udf(fitted)("features")).collect())
    assert fitted.evaluate(frame)["loss"] == pytest.approx(
        fitted.model.evaluate(columns["features"], columns["label"], verbose=0), rel=1e-4
    )
    fitted.save(path)
    with pytest.raises(FileExistsError, match="expected a path where nothing is saved yet"):
        fitted.save(path)
    fitted.write().overwrite().save(path)
    check_weights(KerasModel.load(path), fitted.model.get_weights())
    keras.saving.load_model(f"{path}/model.keras")
    piped.save(f"{folder}/pipeline")
    check(PipelineModel.load(f"{folder}/pipeline").transform(frame).select("label", "prediction").collect())
    files(spark, estimator, folder, expected)


def files(spark, estimator, folder, expected):
    from elephant.spark.hadoop_files import SparkFolder, read_file, write_file

    frame_of(spark, data()).write.parquet(f"{folder}/rows")
    again = estimator.fit(f"{folder}/rows")
    predicted = again.model.predict(data()["features"], verbose=0)[:, 0]
    np.testing.assert_allclose(predicted, list(expected.values()), atol=1e-5)
    content = np.random.default_rng(0).bytes(5 * 2**20 + 17)
    write_file(spark, f"file:{folder}/kept/bytes", content)
    assert read_file(spark, f"{folder}/kept/bytes") == content
    with pytest.raises(FileExistsError, match="expected no file at"):
        write_file(spark, f"{folder}/kept/bytes", b"other")
    write_file(spark, f"{folder}/kept/bytes", b"other", overwrite=True)
    assert read_file(spark, f"{folder}/kept/bytes") == b"other"
    kept = SparkFolder(spark, f"{folder}/kept")
    assert kept.names() == ["bytes"] and kept.has("bytes")
    kept.remove("bytes")
    assert read_file(spark, f"{folder}/kept/bytes") is None and kept.names() == []
    write_file(spark, "memory://kept/bytes", b"here")
    assert read_file(spark, "memory://kept/bytes") == b"here"


def tune(spark, folder):
    """Rows that are prepared, tables that workers divide and write, and a search: they need no JVM here."""
    columns = {"features": np.arange(ROWS)[:, None] % 7.0, "label": data()["label"]}
    frame = frame_of(spark, columns)

    def model_of(embedding):
        keras.utils.set_random_seed(0)
        layers = [keras.Input((1,)), embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    options = {"optimizer": "sgd", "learning_rate": 0.05, "seed": 1, "name": "sevens"}
    plain = keras.layers.Embedding(7, 2)
    plain.build((None, 1))
    plain.embeddings.assign(elephant.ShardedEmbedding(7, 2, **options).table_spec.initial_rows())
    expected = model_of(plain)
    expected.fit(columns["features"], columns["label"], epochs=2, batch_size=ROWS, verbose=0)
    estimator = KerasEstimator(model_of(plain), numWorkers=2, epochs=2, batchSize=ROWS, verbose=0)
    with elephant.prepared(frame, estimator) as rows:
        for path in (None, f"{folder}/tables"):
            model = model_of(elephant.ShardedEmbedding(7, 2, path=path, **options))
            table = estimator.setModel(model).fit(rows).table("sevens")
            listed = {row.id: row.embedding for row in table.toDF().collect()}
            np.testing.assert_allclose(table.numpy(), plain.embeddings.numpy(), atol=TOLERANCE)
            np.testing.assert_allclose([listed[place] for place in range(7)], table.numpy(), atol=1e-6)
    found = elephant.search(
        estimator.copy({estimator.numWorkers: 1, estimator.epochs: 1}),
        frame,
        {"batchSize": [20, 40]},
        metric="loss",
        trials=2,
        parallelism=2,
    )
    assert len(found.study.trials) == 2 and found.best_value == min(trial.value for trial in found.study.trials)


def refuse(spark):
    """What needs a JVM, or cannot work, says so at once."""
    from elephant.spark.conversions import to_simple_rdd

    frame, model = frame_of(spark, data()), regression_model("sgd")
    with pytest.raises(UnsupportedError, match="sc: expected a SparkContext.* use elephant.KerasEstimator"):
        to_simple_rdd(spark, data()["features"], data()["label"])
    with pytest.raises(TypeError, match="expected an RDD .* only way on Spark Connect"):
        elephant.SparkModel(model).fit(frame)
    stream = spark.readStream.format("rate").load()
    with pytest.raises(UnsupportedError, match="fit_stream: expected a classic Spark session"):
        KerasEstimator(model=model).fit_stream(stream, checkpointLocation=tempfile.gettempdir())
    with pytest.raises(ClusterError, match="numWorkers=5.* expected 5 task slots at the same time. Received: 2"):
        KerasEstimator(model=model, numWorkers=5, verbose=0).fit(frame)
    spark.conf.set("spark.elephant.coordinator", "clients")
    with pytest.raises(elephant.errors.ConfigurationError, match="expected auto, driver or executors"):
        KerasEstimator(model=model, numWorkers=2, verbose=0).fit(frame)


def keep_tokens(spark, canary, folder, server_folder, pages, application):
    """Tokens of runs are nowhere that others can read, and a canary is in each place where they are looked for."""
    watch = TokenWatch(bytes.fromhex(canary), [folder, server_folder], (pages, application))
    frame = frame_of(spark, data())
    # More than a MiB: of such a length a classic session writes a function to a file.
    layers = [keras.layers.Input((6,)), keras.layers.Dense(600), keras.layers.Dense(600), keras.layers.Dense(1)]

    def fit(look, coordinator, **options):
        spark.conf.set("spark.elephant.coordinator", coordinator)
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        callbacks = [AwaitsLook(canary, look)]
        KerasEstimator(model=model, batchSize=10, verbose=0, callbacks=callbacks, **options).fit(frame)

    calls = {
        "synchronous": lambda look: fit(look, "driver", numWorkers=2),
        "rank 0 hosts": lambda look: fit(look, "executors", numWorkers=1, mode="asynchronous"),
        "failing": lambda look: elephant.run(
            fails_when_looked_at, args=(canary, look, bytes(2**21)), num_workers=2, spark=spark, verbose=0
        ),
    }
    for name, call in calls.items():
        watch.call(name, f"{folder}/{name}", call)
    print(json.dumps({"calls": watch.said, "found": watch.look()}))


def await_look(folder):
    # A search that begins from now on sees this run.
    open(f"{folder}/begun", "w").close()
    end = time.monotonic() + 20
    while not os.path.exists(f"{folder}/looked") and time.monotonic() < end:
        time.sleep(0.05)


class AwaitsLook(keras.callbacks.Callback):
    def __init__(self, canary, folder):
        super().__init__()
        self.canary, self.folder = canary, folder

    def on_train_batch_end(self, batch, logs=None):
        print("canary", self.canary, flush=True)
        await_look(self.folder)


def fails_when_looked_at(canary, folder, ballast):
    await_look(folder)
    raise ValueError(f"canary {canary} and {len(ballast)} bytes")


def wait(spark, mark):
    """Runs until it is interrupted; makes a file when its ranks run."""
    spark.conf.set("spark.elephant.coordinator", "executors")
    elephant.run(mark_and_wait, args=(mark,), num_workers=2, spark=spark, verbose=0)


def mark_and_wait(mark):
    import threading

    elephant.collective.barrier()
    if elephant.collective.rank() == 0:
        open(mark, "w").close()
    threading.Event().wait(600)


def main():
    (url,) = sys.argv[1:]
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os._exit(call_as_told(url, **json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def call_as_told(url, command, folder, output):
    """Runs a function as a new process would, with what it prints in a file; returns the exit status."""
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        call(url, *command)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def call(url, name, *arguments):
    spark = SparkSession.builder.remote(url).getOrCreate()
    try:
        globals()[name](spark, *arguments)
    finally:
        # Nobody stops the session after a cell that was interrupted: its job is to end all the same.
        if name != "wait":
            spark.stop()


if __name__ == "__main__":
    main()
