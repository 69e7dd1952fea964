"""Tables in files: read by other numbers of parts than have written them, looked up, and refused where damaged."""

import numpy as np
import pytest

from elephant.errors import CheckpointError
from elephant.tables.rank_tables import LocalTables
from elephant.tables.stack import Stack, StackPart
from elephant.tables.stored import StoredTable, TablePlace, shape_of
from elephant.tables.table import ROWS, TablePart, TableSpec

SPEC = TableSpec(num_rows=7, width=3, rule="lazy_adam", seed=4)


def stored_by(folder, parts):
    """Returns references to a table of so many parts that has taken one update, and its arrays."""
    stacked = StackPart(Stack((0,), (SPEC,), 1))
    stacked.update(np.array([5, 1]), np.ones((2, 3), np.float32), [0])
    (whole,) = stacked.parts
    place = TablePlace(url=str(folder), state="fit.1-0.0")
    written = [TablePart(SPEC, part, parts, whole.arrays).write(place) for part in range(parts)]
    assert all(one == written[0] for one in written)
    return {name: stored.to_array() for name, stored in written[0].items()}, whole.arrays


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_table_when_parts_are_in_files_then_any_number_of_parts_reads_its_own(tmp_path, parts):
    references, arrays = stored_by(tmp_path, parts)
    assert {name: shape_of(one) for name, one in references.items()} == {
        name: one.shape for name, one in arrays.items()
    }
    for number in (1, 2, 4):
        for part in range(number):
            read, wanted = TablePart(SPEC, part, number, references), TablePart(SPEC, part, number, arrays)
            for name, array in wanted.arrays.items():
                np.testing.assert_array_equal(read.arrays[name], array)


def test_tables_when_rows_are_in_files_then_are_looked_up_there_until_they_change(tmp_path):
    references, arrays = stored_by(tmp_path, 2)
    tables = LocalTables([SPEC], [references])
    ids = np.array([6, 0, 6, 5])
    np.testing.assert_array_equal(tables.look_up([(0, ids)])[0], arrays[ROWS][ids])
    np.testing.assert_array_equal(tables.state(0, ROWS), references[ROWS])
    np.testing.assert_array_equal(tables.whole(0, "velocity"), arrays["velocity"])
    tables.push([(0, ids, np.ones((4, 3), np.float32))])
    expected = StackPart(Stack((0,), (SPEC,), 1), 0, [arrays])
    expected.update(ids, np.ones((4, 3), np.float32), [0])
    np.testing.assert_array_equal(tables.state(0, ROWS), expected.parts[0].arrays[ROWS])
    np.testing.assert_array_equal(tables.look_up([(0, ids)])[0], expected.take(ids))


def test_table_when_its_folder_is_on_another_file_system_then_is_copied_here_while_it_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("ELEPHANT_WORK_FOLDER", str(tmp_path))
    references, arrays = stored_by(f"memory://tables-{tmp_path.name}", 2)
    opened = StoredTable.from_array(references[ROWS]).opened()
    assert len(list(tmp_path.iterdir())) == 2
    np.testing.assert_array_equal(opened.part(1, 3), arrays[ROWS][1::3])
    del opened
    assert not list(tmp_path.iterdir())


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


def other_rows(path):
    np.save(path, np.zeros((3, 4), np.float32))


def other_kind(path):
    np.save(path, np.array([{}]), allow_pickle=True)


@pytest.mark.parametrize("damage", [cut, other_rows, other_kind, lambda path: path.unlink()])
def test_table_when_a_file_is_damaged_then_the_error_names_it(tmp_path, damage):
    references, _ = stored_by(tmp_path, 2)
    damage(tmp_path / "fit.1-0.0.embeddings.1-of-2.npy")
    with pytest.raises(
        CheckpointError, match=r"path=.*expected fit\.1-0\.0\.embeddings\.1-of-2\.npy, in which a worker"
    ):
        StoredTable.from_array(references[ROWS]).opened()


def test_part_when_its_folder_cannot_be_written_then_the_error_names_it(tmp_path):
    (tmp_path / "file").write_text("no folder")
    place = TablePlace(url=str(tmp_path / "file"), state="fit.1-0.0")
    with pytest.raises(CheckpointError, match=r"path='.*file'\): expected a folder that every worker can write"):
        TablePart(SPEC).write(place)
