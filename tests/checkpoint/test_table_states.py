"""Files of tables: they stay while a checkpoint or one of the last states needs them, which is nothing without them."""

import numpy as np

from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.memory import StatesInMemory
from elephant.checkpoint.state import FitState
from elephant.checkpoint.table_states import TableFiles
from elephant.storage.folder import folder_at
from elephant.tables.stored import StoredTable


def written(folder, name):
    """Returns a state, whose table is in two files of a folder."""
    for part in range(2):
        (folder / f"{name}.0.embeddings.{part}-of-2.npy").write_bytes(b"rows")
    return FitState(epochs=1, facts={"tables": {"name": name, "urls": [str(folder)]}})


def states_in(folder):
    return {path.name.split(".0.")[0] for path in folder.iterdir()}


def test_files_when_states_follow_then_those_of_checkpoints_and_of_the_last_states_stay(tmp_path):
    (tmp_path / "mine.txt").write_text("the user's")
    written(tmp_path, "other.1-0")
    checkpoints = [written(tmp_path, "old.2-0").facts]
    table_files = TableFiles(folder_at, lambda: checkpoints)
    table_files.begin()
    states = table_files.watched(StatesInMemory())
    for step in range(1, 8):
        assert states.keep(written(tmp_path, f"fit.0-{step}")) is True
        if step == 2:
            checkpoints = [written(tmp_path, "fit.0-2").facts]
    needed = {"mine.txt", "other.1-0", "fit.0-2"}
    assert states_in(tmp_path) == needed | {f"fit.0-{step}" for step in range(4, 8)}
    table_files.close()
    assert states_in(tmp_path) == needed


def test_files_when_a_folder_is_gone_then_the_fit_goes_on(tmp_path):
    state = written(tmp_path, "fit.0-1")
    table_files = TableFiles(lambda url: (_ for _ in ()).throw(OSError("no folder")), list)
    states = table_files.watched(StatesInMemory())
    for _ in range(6):
        states.keep(state)
    table_files.close()
    assert states_in(tmp_path) == {"fit.0-1"}


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
