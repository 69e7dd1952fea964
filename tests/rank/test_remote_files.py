"""Callbacks that write to URLs, and to mounts which take files in order alone; the mount is simulated."""

import csv
import io
import os
from importlib.util import find_spec

import fsspec
import keras
import numpy as np
import pytest

from elephant.errors import ConfigurationError
from elephant.rank.callbacks.remote_files import RemoteFiles
from elephant.storage import filesystem, folder
from elephant.storage.filesystem import WORK_FOLDER


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

    monkeypatch.setattr(folder, "copy_in_order", copy)
    return root, copied


def fitted(callbacks, epochs=3):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    model.fit(x, x.sum(1), epochs=epochs, batch_size=8, verbose=0, callbacks=[*callbacks, RemoteFiles(callbacks)])
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
    remote = RemoteFiles([log])
    assert log.filename.startswith(f"{work}/")
    remote.close()
    assert log.filename == "dbfs:/log.csv" and not any(work.iterdir())


def test_remote_files_when_nothing_is_written_elsewhere_then_is_not_needed(tmp_path):
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    assert not RemoteFiles([log, keras.callbacks.History()]).is_needed
    assert log.filename == str(tmp_path / "log.csv")


@pytest.fixture
def memory():
    """fsspec's file system in this process, and a folder in it."""
    system, root = fsspec.filesystem("memory"), f"files-{os.getpid()}"
    yield system, root
    system.rm(f"/{root}", recursive=True)


def logged(system, path):
    return [row["epoch"] for row in csv.DictReader(io.StringIO(system.cat(path).decode()))]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="TensorBoard, whose files are read, comes with TensorFlow")
def test_fit_when_callbacks_write_to_a_url_then_models_logs_and_the_board_s_events_arrive_there(memory, tmp_path):
    system, root = memory
    saving = keras.callbacks.ModelCheckpoint(f"memory://{root}/{{epoch}}/model.keras")
    log = keras.callbacks.CSVLogger(f"memory://{root}/log.csv")
    board = keras.callbacks.TensorBoard(f"memory://{root}/board")
    during = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(len(logged(system, f"/{root}/log.csv")) if epoch else 0)
    )
    seen = []
    model, x = fitted([saving, log, board, during])
    assert system.ls(f"/{root}", detail=False) == [f"/{root}/{name}" for name in ("1", "2", "3", "board", "log.csv")]
    # At the end of every epoch, and not of the fit alone.
    assert seen == [0, 1, 2]
    system.get(f"/{root}/3/model.keras", str(tmp_path / "model.keras"))
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
    assert logged(system, f"/{root}/log.csv") == ["0", "1", "2"]
    system.get(f"/{root}/board/train", str(tmp_path / "train"), recursive=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "train")).Reload()
    assert [event.step for event in events.Tensors("epoch_loss")] == [0, 1, 2]
    assert (saving.filepath, log.filename) == (f"memory://{root}/{{epoch}}/model.keras", f"memory://{root}/log.csv")
    # A log of a URL is gone on with.
    fitted([keras.callbacks.CSVLogger(f"memory://{root}/log.csv", append=True)], epochs=1)
    assert logged(system, f"/{root}/log.csv") == ["0", "1", "2", "0"]


def test_fit_when_a_callback_writes_to_a_url_of_this_machine_then_it_writes_there_itself(tmp_path):
    log = keras.callbacks.CSVLogger(f"file://{tmp_path}/log.csv")
    remote = RemoteFiles([log])
    assert log.filename == f"{tmp_path}/log.csv"
    remote.close()
    assert log.filename == f"file://{tmp_path}/log.csv"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://bucket/log.csv", r"CSVLogger to write to a file system .*: 'nowhere://bucket/log.csv'\. path:"),
        ("memory://log.csv", r"expected a file below memory://log.csv, for CSVLogger"),
    ],
)
def test_remote_files_when_a_url_cannot_be_written_to_then_says_so_at_once(url, message, tmp_path, monkeypatch):
    monkeypatch.setenv(WORK_FOLDER, str(tmp_path))
    log = keras.callbacks.CSVLogger(url)
    with pytest.raises(ConfigurationError, match=message):
        RemoteFiles([log])
    assert log.filename == url and not any(tmp_path.iterdir())


def test_remote_files_when_a_callback_of_the_user_s_own_has_a_url_then_it_stays():
    class Own(keras.callbacks.Callback):
        log_dir = "s3://bucket/logs"

    assert not RemoteFiles([Own()]).is_needed
