"""A file of a checkpoint is on the disk, and complete, before it has its name; and the name is on the disk as well."""

import os
import sys

import numpy as np
import pytest
from disk_order import DiskOrder, failing_replace

from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState, named
from elephant.errors import CheckpointError
from elephant.storage.folder import LocalFolder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names of descriptors come from /proc")


def state_of(epochs):
    return FitState(epochs=epochs, arrays=named("model", [np.full(100, float(epochs))]))


def test_file_when_written_then_is_on_the_disk_before_it_has_its_name_and_the_folder_after(tmp_path, monkeypatch):
    order = DiskOrder(monkeypatch)
    LocalFolder(tmp_path / "kept").write("name", lambda file: file.write(b"x" * 1000))
    (file, move, folder) = order.events
    assert file[0] == "sync" and file[1].startswith(".name.") and file[2] == 1000
    assert move == ("replace", "name")
    assert folder[:2] == ("sync", "kept")


def test_file_when_it_cannot_get_its_name_then_nothing_is_left_of_it(tmp_path, monkeypatch):
    folder = LocalFolder(tmp_path)
    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="Read-only"):
        folder.write("name", lambda file: file.write(b"x"))
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_when_saved_then_its_arrays_come_first_and_old_ones_go_last(tmp_path, monkeypatch):
    store = CheckpointManager(LocalFolder(tmp_path))
    store.save(state_of(1))
    store.save(state_of(2))
    order = DiskOrder(monkeypatch)
    store.save(state_of(3))
    assert [event[0] for event in order.events] == ["sync", "replace", "sync"] * 2 + ["remove"] * 2
    assert [event[1].split(".", 2)[2] for event in order.events if event[0] == "replace"] == ["state.npz", "json"]
    removed = [event[1] for event in order.events if event[0] == "remove"]
    # The manifest before what it names: what has no manifest is nothing.
    assert [name.split(".")[0] for name in removed] == ["epoch-00000001"] * 2
    assert removed[0].endswith(".json") and removed[1].endswith(".npz")


@pytest.mark.parametrize("failing", ["state.npz", "json"])
def test_checkpoint_when_a_file_cannot_get_its_name_then_the_one_before_is_read(tmp_path, monkeypatch, failing):
    store, replace = CheckpointManager(LocalFolder(tmp_path)), os.replace
    store.save(state_of(1))

    def fail_once_there(source, target):
        (failing_replace if os.fspath(target).endswith(failing) else replace)(source, target)

    monkeypatch.setattr(os, "replace", fail_once_there)
    with pytest.raises(CheckpointError, match="Read-only file system. That of epoch 1 is still there"):
        store.save(state_of(2))
    monkeypatch.undo()
    assert len(os.listdir(tmp_path)) == 2
    np.testing.assert_array_equal(
        CheckpointManager(LocalFolder(tmp_path)).latest().state.variables[0], np.full(100, 1.0)
    )
