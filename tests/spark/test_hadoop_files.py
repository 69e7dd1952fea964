"""Checkpoints wherever the Hadoop client of Spark's JVM writes; without a JVM, where this process does."""

import numpy as np
import pytest

from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState, named
from elephant.errors import CheckpointError, ConfigurationError
from elephant.spark import hadoop_files as folders
from elephant.spark.hadoop_files import HadoopFolder, checkpoint_folder
from elephant.storage.folder import LocalFolder


def state_of(epochs):
    return FitState(epochs=epochs, arrays=named("model", [np.full(5, float(epochs))]))


def test_checkpoints_when_on_a_file_system_of_hadoop_then_are_kept_read_and_removed(spark, tmp_path):
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
    np.testing.assert_array_equal(read.state.group("model")[0], np.full(5, 3.0))
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


def test_folder_when_spark_s_default_file_system_is_this_machine_then_is_a_local_one(spark, tmp_path):
    for path in (str(tmp_path), f"file://{tmp_path}", f"file:{tmp_path}"):
        folder = checkpoint_folder(spark, path)
        assert isinstance(folder, LocalFolder)
        folder.write("one", lambda file: file.write(b"content"))
        assert (tmp_path / "one").read_bytes() == b"content"
    assert checkpoint_folder(spark, "memory://kept/fit").names() == []


class RemoteSession:
    """As a session of Spark Connect is: of a class in its package."""


RemoteSession.__module__ = "pyspark.sql.connect.session"


@pytest.mark.parametrize("path", ["dbfs:/fits/a", "/dbfs/fits/a", "/Volumes/c/s/v/a", "dbfs:/Volumes/c/s/v/a"])
def test_folder_when_a_client_has_no_such_mount_then_is_refused_and_not_made_here(path, monkeypatch):
    monkeypatch.setattr(folders, "mounted_here", lambda path: None)
    with pytest.raises(ConfigurationError, match="whose mount is not on this machine"):
        checkpoint_folder(RemoteSession(), path)
