"""Checkpoints are written beside the fit; the newest one counts, and a failure is told."""

import threading

import numpy as np
import pytest

from elephant.checkpoint.manager import CheckpointManager, CheckpointWriter
from elephant.checkpoint.state import FitState, named
from elephant.errors import CheckpointError, ConfigurationError
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


def state_of(epochs, step=0, **history):
    arrays = named("model", [np.full(3, float(epochs))])
    return FitState(epochs=epochs, step=step, arrays=arrays, history={name: [one] for name, one in history.items()})


def places_in(path):
    return [manifest.place for manifest in CheckpointManager(LocalFolder(path)).manifests()]


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


def test_best_state_when_others_come_faster_than_the_disk_then_is_written_before_the_newest(tmp_path):
    folder = SlowFolder(tmp_path)
    with CheckpointWriter(CheckpointManager(folder, keep_best="val_loss")) as checkpoint_writer:
        checkpoint_writer.keep(state_of(1, val_loss=9.0))
        assert folder.begun.acquire(timeout=30)
        for epochs, loss in ((2, 5.0), (3, 4.0), (4, 6.0), (5, float("nan")), (6, 7.0)):
            checkpoint_writer.keep(state_of(epochs, val_loss=loss))
        folder.may_go_on.release(100)
        # It is the newest one that the fit ends with.
        checkpoint_writer.finish(state_of(6).variables)
    assert places_in(tmp_path) == [(3, 0), (6, 0)]
    assert CheckpointManager(LocalFolder(tmp_path)).latest().finished


def test_state_of_an_epoch_s_end_when_those_within_the_next_come_faster_than_the_disk_then_is_written(tmp_path):
    folder = SlowFolder(tmp_path)
    with CheckpointWriter(CheckpointManager(folder)) as checkpoint_writer:
        checkpoint_writer.keep(state_of(0, 3))
        assert folder.begun.acquire(timeout=30)
        # Of those within an epoch, the newest one counts.
        for state in (state_of(0, 6), state_of(0, 9), state_of(1), state_of(1, 3), state_of(1, 6)):
            checkpoint_writer.keep(state)
        folder.may_go_on.release(100)
    assert places_in(tmp_path) == [(1, 0), (1, 6)]


def test_keeper_when_the_fit_lacks_the_metric_to_keep_the_best_of_then_names_those_that_it_has(tmp_path):
    with CheckpointWriter(CheckpointManager(LocalFolder(tmp_path), keep_best="val_loss")) as checkpoint_writer:
        # Within the first epoch nobody knows.
        checkpoint_writer.keep(state_of(0, 3))
        with pytest.raises(ConfigurationError, match="keepBest: expected a metric of the fit: loss, acc. .*'val_loss'"):
            checkpoint_writer.keep(state_of(1, loss=1.0, acc=0.5))
        checkpoint_writer.keep(state_of(1, loss=1.0, val_loss=1.0))
    store = CheckpointManager(LocalFolder(tmp_path), keep_best="val_acc")
    store.latest()
    with CheckpointWriter(store) as checkpoint_writer:
        # Epochs of the fit before, which had other metrics.
        checkpoint_writer.keep(state_of(1, 3, loss=1.0, val_loss=1.0))
        with pytest.raises(ConfigurationError, match="Received: 'val_acc'"):
            checkpoint_writer.keep(state_of(2, loss=1.0, val_loss=1.0))


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
