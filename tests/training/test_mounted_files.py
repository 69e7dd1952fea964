"""Callbacks that write to mounts which take files in order alone; the mount is simulated."""

import csv

import keras
import numpy as np
import pytest

from elephant.storage import filesystem
from elephant.storage.filesystem import WORK_FOLDER
from elephant.training import callbacks
from elephant.training.callbacks import MountedFiles


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """A folder that stands for /dbfs; nothing but copying in order may write to it."""
    root = tmp_path / "dbfs"
    root.mkdir()
    monkeypatch.setattr(filesystem, "_DBFS", f"{root}/")
    copied = []
    real = filesystem.copy_in_order

    def copy(source, target):
        if str(target).startswith(str(root)):
            copied.append(str(target))
        real(source, target)

    monkeypatch.setattr(callbacks, "copy_in_order", copy)
    return root, copied


def fitted(callbacks, epochs=3):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    model.fit(x, x.sum(1), epochs=epochs, batch_size=8, verbose=0, callbacks=[*callbacks, MountedFiles(callbacks)])
    return model, x


def test_fit_when_callbacks_write_to_a_mount_then_files_arrive_there_by_copies_alone(mount):
    root, copied = mount
    saving = keras.callbacks.ModelCheckpoint("dbfs:/run/epoch-{epoch}.keras")
    weights = keras.callbacks.ModelCheckpoint("dbfs:/run/last.weights.h5", save_weights_only=True)
    log = keras.callbacks.CSVLogger("dbfs:/run/log.csv")
    model, x = fitted([saving, weights, log])
    names = sorted(path.name for path in (root / "run").iterdir())
    assert names == ["epoch-1.keras", "epoch-2.keras", "epoch-3.keras", "last.weights.h5", "log.csv"]
    assert set(copied) == {str(root / "run" / name) for name in names}
    again = keras.models.load_model(root / "run" / "epoch-3.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
    with open(root / "run" / "log.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    # The user's own objects are as they were.
    assert (saving.filepath, log.filename) == ("dbfs:/run/epoch-{epoch}.keras", "dbfs:/run/log.csv")


def test_fit_when_a_log_is_gone_on_with_then_keeps_what_was_there(mount):
    root, _ = mount
    fitted([keras.callbacks.CSVLogger("dbfs:/log.csv")], epochs=2)
    fitted([keras.callbacks.CSVLogger("dbfs:/log.csv", append=True)], epochs=1)
    with open(root / "log.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "0"]


def test_fit_when_a_rank_writes_to_a_mount_then_its_files_lie_in_its_work_folder_meanwhile(
    mount, tmp_path, monkeypatch
):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv(WORK_FOLDER, str(work))
    log = keras.callbacks.CSVLogger("dbfs:/log.csv")
    mounted = MountedFiles([log])
    assert log.filename.startswith(f"{work}/")
    mounted.close()
    assert log.filename == "dbfs:/log.csv" and not any(work.iterdir())


def test_mounted_files_when_nothing_writes_to_a_mount_then_is_not_needed(tmp_path):
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    assert not MountedFiles([log, keras.callbacks.History()]).is_needed
    assert log.filename == str(tmp_path / "log.csv")
