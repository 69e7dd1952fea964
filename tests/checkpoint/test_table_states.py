"""Files of tables: they stay while a checkpoint or one of the last states needs them, which is nothing without them."""

import threading

import numpy as np

from elephant.checkpoint.manager import CheckpointManager, CheckpointWriter
from elephant.checkpoint.memory import StatesInMemory
from elephant.checkpoint.state import FitState
from elephant.checkpoint.table_states import TableFiles
from elephant.errors import CheckpointError
from elephant.storage.folder import folder_at
from elephant.tables.stored import StoredTable


def written(folder, epochs, step=0, fit="fit", **facts):
    """Returns a state, whose table is in two files of a folder."""
    name = f"{fit}.{epochs}-{step}"
    stored = StoredTable(url=str(folder), name=f"{name}.0.embeddings", shape=(3, 2), parts=2)
    for part, rows in enumerate((2, 1)):
        stored.write(part, np.full((rows, 2), epochs, np.float32))
    facts = {"tables": {"name": name, "urls": [str(folder)], **facts}}
    return FitState(epochs=epochs, step=step, arrays={"model/user/embeddings": stored.to_array()}, facts=facts)


def states_in(folder):
    return {path.name.split(".0.")[0] for path in folder.iterdir()}


def is_there(state):
    return not StoredTable.from_array(state.arrays["model/user/embeddings"]).missing()


def test_files_when_states_are_in_memory_then_those_stay_that_a_fit_may_go_on_from(tmp_path):
    (tmp_path / "mine.txt").write_text("the user's")
    written(tmp_path, 1, fit="other")
    # Of a fit that has ended, whose model is somebody's.
    earlier = written(tmp_path, 2, fit="earlier")
    written(tmp_path, 2, fit="earlier.result")
    checkpoints = [earlier.facts]
    table_files = TableFiles(lambda: checkpoints)
    table_files.begin()
    memory = StatesInMemory(is_saved=lambda state: False)
    states = table_files.watched(memory, memory)
    states.keep(written(tmp_path, 1))
    for step in range(1, 8):
        states.keep(written(tmp_path, 1, step))
        assert [(one.epochs, one.step) for one in memory.held] == [(1, 0), (1, step)]
        assert all(map(is_there, memory.held))
    # Rows that are no numbers: nobody goes on from that.
    states.keep(written(tmp_path, 1, 9, finite=False))
    others = {"mine.txt", "other.1-0", "earlier.2-0", "earlier.result.2-0"}
    assert states_in(tmp_path) == others | {"fit.1-0", "fit.1-7"}
    checkpoints[:] = [memory.held[-1].facts]
    # What an attempt that failed has left, and the result.
    written(tmp_path, 3, 4)
    result = StoredTable(url=str(tmp_path), name="fit.result.0.embeddings", shape=(3, 2), parts=1)
    result.write(0, np.zeros((3, 2), np.float32))
    table_files.keep_result([np.zeros(3), result.to_array()])
    table_files.close()
    assert states_in(tmp_path) == others - {"earlier.2-0"} | {"fit.1-7", "fit.result"}


def test_files_when_a_checkpoint_takes_long_to_write_then_it_is_whole_with_them(tmp_path, monkeypatch):
    kept, tables = tmp_path / "kept", tmp_path / "tables"
    tables.mkdir()
    manager, may_write = CheckpointManager(folder_at(str(kept))), threading.Event()
    save = manager.save
    monkeypatch.setattr(manager, "save", lambda state: (may_write.wait(60), save(state)))
    table_files = TableFiles(lambda: [one.facts for one in CheckpointManager(folder_at(str(kept))).manifests()])
    with CheckpointWriter(manager) as writer:
        states = table_files.watched(writer, writer)
        for step in range(6):
            states.keep(written(tables, 1, step))
        may_write.set()
    assert [one.error for one in manager.survey()] == [None, None]
    table_files.close()
    assert [one.error for one in manager.survey()] == [None, None]
    assert states_in(tables) == {one.manifest.facts["tables"]["name"] for one in manager.survey()}


def test_files_when_checkpoints_cannot_be_read_then_the_fit_goes_on_and_nothing_is_removed(tmp_path):
    def unreadable():
        raise CheckpointError("half a file")

    table_files, memory = TableFiles(unreadable), StatesInMemory()
    states = table_files.watched(memory, memory)
    for step in range(1, 4):
        states.keep(written(tmp_path, 0, step))
    table_files.close()
    assert states_in(tmp_path) == {"fit.0-1", "fit.0-2", "fit.0-3"}


def test_checkpoint_when_a_file_of_its_table_is_gone_then_a_fit_goes_on_from_the_one_before(tmp_path):
    manager = CheckpointManager(folder_at(str(tmp_path / "kept")))
    for epochs in (1, 2):
        stored = StoredTable(url=str(tmp_path / "tables"), name=f"fit.{epochs}-0.0.embeddings", shape=(3, 2), parts=2)
        for part, rows in enumerate((2, 1)):
            stored.write(part, np.full((rows, 2), epochs, np.float32))
        manager.save(FitState(epochs=epochs, arrays={"model/user/embeddings": stored.to_array()}))
    assert [one.error for one in manager.survey()] == [None, None]
    (tmp_path / "tables" / "fit.2-0.0.embeddings.1-of-2.npy").unlink()
    found = manager.latest(lambda note: None)
    assert found.state.epochs == 1
    table = StoredTable.from_array(found.state.arrays["model/user/embeddings"])
    np.testing.assert_array_equal(table.opened().part(), np.ones((3, 2)))
    whole, damaged = manager.survey()
    assert whole.error is None and "is without fit.2-0.0.embeddings.1-of-2.npy of a table in" in damaged.error
