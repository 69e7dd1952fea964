"""Checkpoints wherever the Hadoop client of Spark's JVM writes; without a JVM, where this process does."""

import csv
import os
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counting_model import counted, counting_data, counting_model, weights_of
from databricks_mounts import simulate_mounts
from keras_reference import regression_model
from pyspark.ml.linalg import Vectors

from elephant import KerasEstimator, KerasModel
from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState, named
from elephant.errors import CheckpointError, ConfigurationError
from elephant.spark import hadoop_files as folders
from elephant.spark.hadoop_files import HadoopFolder, checkpoint_folder, qualified, read_file, write_file
from elephant.storage import filesystem
from elephant.storage.folder import LocalFolder


def state_of(epochs):
    return FitState(epochs=epochs, arrays=named("model", [np.full(5, float(epochs))]))


def test_checkpoints_when_on_a_file_system_of_hadoop_then_are_kept_read_and_removed(spark, tmp_path, monkeypatch):
    # A file system by another name, with the local one behind it: to elephant it is one like HDFS.
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    configuration.set("fs.viewfs.mounttable.kept.link./data", f"file://{tmp_path}")
    folder = checkpoint_folder(spark, "viewfs://kept/data/fit")
    assert isinstance(folder, HadoopFolder)
    store = CheckpointManager(folder)
    assert store.latest() is None
    for epochs in (1, 2, 3):
        store.save(state_of(epochs))
    store.finish(np.ones((1, 5)))
    read = CheckpointManager(checkpoint_folder(spark, "viewfs://kept/data/fit/")).latest()
    assert (read.state.epochs, read.finished) == (3, True)
    np.testing.assert_array_equal(read.state.variables[0], np.full(5, 3.0))
    np.testing.assert_array_equal(read.result[0], np.ones(5))
    names = [path.name for path in (tmp_path / "fit").iterdir() if not path.name.startswith(".")]
    kinds = sorted((name.split(".")[0], name.split(".", 2)[2]) for name in names)
    second, third = "epoch-00000002", "epoch-00000003"
    assert kinds == [
        (second, "json"),
        (second, "state.npz"),
        (third, "json"),
        (third, "result.npz"),
        (third, "state.npz"),
    ]
    with pytest.raises(CheckpointError, match="expected to write the checkpoint of epoch 1. Received: OSError"):
        CheckpointManager(checkpoint_folder(spark, "viewfs://kept/elsewhere")).save(state_of(1))
    with pytest.raises(CheckpointError, match="expected a folder that can be made, or written to. Received: OSError"):
        CheckpointManager(checkpoint_folder(spark, "viewfs://kept/elsewhere")).require_writable()
    # A file is replaced in one call, between two of which a process that is killed would leave none.
    monkeypatch.setattr(HadoopFolder, "remove", None)
    for content in (b"events", b"more events"):
        write_file(spark, "viewfs://kept/data/events/fit.jsonl", content, overwrite=True)
        assert read_file(spark, "viewfs://kept/data/events/fit.jsonl") == content
    # Who reads a run's tag elsewhere has another default file system, and another folder.
    assert qualified(spark, "viewfs://kept/data/../data/fit.jsonl") == "viewfs://kept/data/fit.jsonl"
    assert qualified(spark, "/fits/fit.jsonl") == "file:/fits/fit.jsonl"
    assert qualified(spark, "fits/fit.jsonl") == f"file:{os.getcwd()}/fits/fit.jsonl"
    assert qualified(spark, "memory://fits/fit.jsonl") == "memory://fits/fit.jsonl"
    configuration.set("fs.broken.impl", "no.such.Class")
    with pytest.raises(OSError, match="no.such.Class"):
        qualified(spark, "broken://fits/fit.jsonl")


# Rank 0 has no JVM: its files go through what its Python knows, and the driver's through Hadoop.
@pytest.mark.slow("a fit, with TensorBoard on a worker")
def test_fit_when_callbacks_write_to_urls_then_files_of_the_driver_and_of_rank_0_arrive(spark, tmp_path):
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    configuration.set("fs.viewfs.mounttable.logs.link./data", f"file://{tmp_path}")
    log = keras.callbacks.CSVLogger("viewfs://logs/data/driver/log.csv")
    board = keras.callbacks.TensorBoard(f"local://{tmp_path}/rank/board", update_freq=1, write_graph=False)
    weights = f"local://{tmp_path}/rank/{{epoch}}.weights.h5"
    saving = keras.callbacks.ModelCheckpoint(weights, save_weights_only=True, save_freq=1)
    x = np.random.default_rng(0).normal(size=(32, 6))
    rows = spark.createDataFrame([(Vectors.dense(row), float(row.sum())) for row in x], ["features", "label"])
    model = regression_model("sgd")
    estimator = KerasEstimator(model, numWorkers=2, epochs=2, batchSize=8, verbose=0, callbacks=[log, board, saving])
    fitted = estimator.fit(rows)
    with open(tmp_path / "driver" / "log.csv") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses == pytest.approx(fitted.history["loss"])
    assert log.filename == "viewfs://logs/data/driver/log.csv"
    assert [path.name for path in (tmp_path / "rank" / "board" / "train").iterdir()]
    model.load_weights(tmp_path / "rank" / "2.weights.h5")
    np.testing.assert_allclose(model.get_weights()[0], fitted.model.get_weights()[0], rtol=1e-6)


def test_folder_when_spark_s_default_file_system_is_this_machine_then_is_a_local_one(spark, tmp_path):
    for path in (str(tmp_path), f"file://{tmp_path}", f"file:{tmp_path}"):
        folder = checkpoint_folder(spark, path)
        assert isinstance(folder, LocalFolder)
        folder.write("one", lambda file: file.write(b"content"))
        assert (tmp_path / "one").read_bytes() == b"content"
    assert checkpoint_folder(spark, "memory://kept/fit").names() == []


@pytest.mark.slow("a fit; tests/data/test_mounts.py has the paths, and copies in order")
def test_fit_when_all_is_on_a_mount_of_databricks_then_is_read_and_written_in_order(spark, tmp_path, monkeypatch):
    simulate_mounts(monkeypatch, tmp_path)
    place = "dbfs:"
    columns = counting_data(32)
    table = pa.table({"features": list(columns["features"]), "label": columns["label"]})
    rows = filesystem.local_form(f"{place}/rows")
    Path(rows).mkdir()
    pq.write_table(table, f"{rows}/0.parquet", row_group_size=9)
    options = {"checkpointPath": f"{place}/checkpoints", "eventsPath": f"{place}/events"}
    estimator = KerasEstimator(model=counting_model(), numWorkers=2, batchSize=32, epochs=2, verbose=0, **options)
    fitted = estimator.fit(f"{place}/rows")
    np.testing.assert_allclose(weights_of(fitted), counted(columns, batch_size=32, epochs=2), atol=1e-6)
    fitted.save(f"{place}/model.keras")
    np.testing.assert_array_equal(weights_of(KerasModel(f"{place}/model.keras")), weights_of(fitted))
    assert CheckpointManager(checkpoint_folder(spark, f"{place}/checkpoints")).latest().state.epochs == 2
    below = Path(rows).parent
    assert sorted(path.name for path in below.iterdir()) == ["checkpoints", "events", "model.keras", "rows"]
    assert len(list((below / "events").iterdir())) == 1


class RemoteSession:
    """As a session of Spark Connect is: of a class in its package."""


RemoteSession.__module__ = "pyspark.sql.connect.session"


@pytest.mark.parametrize("path", ["dbfs:/fits/a", "/dbfs/fits/a", "/Volumes/c/s/v/a", "dbfs:/Volumes/c/s/v/a"])
def test_folder_when_a_client_has_no_such_mount_then_is_refused_and_not_made_here(path, monkeypatch):
    monkeypatch.setattr(folders, "mounted_here", lambda path: None)
    with pytest.raises(ConfigurationError, match="whose mount is not on this machine"):
        checkpoint_folder(RemoteSession(), path)
