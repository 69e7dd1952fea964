"""Checkpoints are written beside the fit; the newest one counts, and a failure is told."""

import threading

import numpy as np
import pytest

from elephant.checkpoint.manager import CheckpointManager, CheckpointWriter
from elephant.checkpoint.state import FitState, named
from elephant.errors import CheckpointError
from elephant.storage.folder import LocalFolder


class SlowFolder(LocalFolder):
    """A folder whose writes wait until they may go on."""

    def __init__(self, path):
        super().__init__(path)
        self.begun, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def write(self, name, fill):
        self.begun.release()
        assert self.may_go_on.acquire(timeout=30)
        super().write(name, fill)


def state_of(epochs):
    return FitState(epochs=epochs, arrays=named("model", [np.full(3, float(epochs))]))


def test_states_when_they_come_faster_than_the_disk_then_the_newest_is_written(tmp_path):
    folder = SlowFolder(tmp_path)
    with CheckpointWriter(CheckpointManager(folder)) as checkpoint_writer:
        checkpoint_writer.keep(state_of(1))
        assert folder.begun.acquire(timeout=30)
        for epochs in (2, 3, 4):
            checkpoint_writer.keep(state_of(epochs))
        folder.may_go_on.release(100)
        checkpoint_writer.finish(state_of(4).variables)
        checkpoint_writer.check()
    read = CheckpointManager(LocalFolder(tmp_path)).latest()
    assert (read.state.epochs, read.finished) == (4, True)
    assert sorted({path.name[:14] for path in tmp_path.iterdir()}) == ["epoch-00000001", "epoch-00000004"]


def test_keeper_when_a_write_fails_then_check_says_so_once(tmp_path):
    (tmp_path / "kept").mkdir()
    store = CheckpointManager(LocalFolder(tmp_path / "kept"))
    (tmp_path / "kept").rmdir()
    (tmp_path / "kept").write_text("no folder")
    checkpoint_writer = CheckpointWriter(store)
    checkpoint_writer.keep(state_of(1))
    checkpoint_writer.close()
    with pytest.raises(CheckpointError, match="checkpointPath="):
        checkpoint_writer.check()
    checkpoint_writer.check()


class OnceFailingFolder(LocalFolder):
    """A folder whose first write fails."""

    def __init__(self, path):
        super().__init__(path)
        self.begun = threading.Event()

    def write(self, name, fill):
        if not self.begun.is_set():
            self.begun.set()
            raise OSError(28, "No space left on device")
        super().write(name, fill)


def test_keeper_when_a_later_write_succeeds_then_the_failure_before_it_is_told(tmp_path):
    folder = OnceFailingFolder(tmp_path)
    with CheckpointWriter(CheckpointManager(folder)) as checkpoint_writer:
        checkpoint_writer.keep(state_of(1))
        assert folder.begun.wait(30)
        checkpoint_writer.keep(state_of(2))
    with pytest.raises(CheckpointError, match="checkpoint of epoch 1. Received: OSError: .*No space left"):
        checkpoint_writer.check()
    checkpoint_writer.check()
    assert CheckpointManager(LocalFolder(tmp_path)).latest().state.epochs == 2


def test_finish_when_an_earlier_write_has_failed_then_tells_it(tmp_path):
    folder = OnceFailingFolder(tmp_path)
    with CheckpointWriter(CheckpointManager(folder)) as checkpoint_writer:
        checkpoint_writer.keep(state_of(1))
        assert folder.begun.wait(30)
        checkpoint_writer.keep(state_of(2))
        with pytest.raises(CheckpointError, match="checkpoint of epoch 1"):
            checkpoint_writer.finish(state_of(2).variables)


def test_keeper_when_closed_then_all_is_written_and_its_thread_has_ended(tmp_path):
    with CheckpointWriter(CheckpointManager(LocalFolder(tmp_path))) as checkpoint_writer:
        checkpoint_writer.keep(state_of(1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("elephant")]
    assert CheckpointManager(LocalFolder(tmp_path)).latest().state.epochs == 1


class ForeignError(Exception):
    """What the library of an object store raises, which is no OSError."""


class ForeignFolder(LocalFolder):
    """A folder whose library fails in its own way: in writing, or in removing."""

    fails = ()

    def write(self, name, fill):
        if "write" in self.fails:
            raise ForeignError("the endpoint does not answer")
        super().write(name, fill)

    def remove(self, name):
        if "remove" in self.fails:
            raise ForeignError("the endpoint does not answer")
        super().remove(name)


def test_finish_when_a_store_s_library_fails_in_its_own_way_then_is_a_checkpoint_error(tmp_path):
    folder = ForeignFolder(tmp_path)
    store = CheckpointManager(folder)
    store.save(state_of(1))
    folder.fails = ("write",)
    with CheckpointWriter(store) as checkpoint_writer:
        with pytest.raises(CheckpointError, match="ForeignError: the endpoint does not answer"):
            checkpoint_writer.finish(state_of(1).variables)


def test_states_when_old_ones_cannot_be_removed_then_are_kept_all_the_same(tmp_path):
    folder = ForeignFolder(tmp_path)
    folder.fails = ("remove",)
    store = CheckpointManager(folder)
    for epochs in (1, 2, 3):
        store.save(state_of(epochs))
    with CheckpointWriter(store) as checkpoint_writer:
        checkpoint_writer.finish(state_of(3).variables)
    assert CheckpointManager(LocalFolder(tmp_path)).latest().finished
