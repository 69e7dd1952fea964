"""The order of rows by content: the same whatever order and batches they are delivered in."""

import numpy as np
import pyarrow as pa
import pytest
from rank_pool import write_shard

from elephant.data import shard as module
from elephant.data.schema import DENSE, RAGGED, SCALAR, SPARSE, TEXT, DataSchema, Field
from elephant.data.shard import Shard, ShardWriter, content_order, row_hashes

SCHEMA = DataSchema(
    inputs=(Field("features", ("x",), "float32", DENSE, (5,)),),
    labels=(Field("label", ("y",), "int32", SCALAR),),
    weights=(Field("weight", ("w",), "float64", SCALAR),),
)


def columns_of(rows):
    rng = np.random.default_rng(0)
    # Of few values each, so that rows differ in few bits and some are equal.
    return {
        "features": rng.integers(0, 2, (rows, 5)).astype("float32"),
        "label": rng.integers(0, 3, rows).astype("int32"),
        "weight": rng.integers(1, 3, rows).astype("float64"),
    }


def ordered_rows(tmp_path, columns):
    summary = write_shard(tmp_path / "shard", SCHEMA, columns)
    shard = Shard(tmp_path / "shard", SCHEMA, summary.row_shapes)
    order = content_order(shard)
    assert sorted(order) == list(range(len(columns["label"])))
    rows = np.column_stack([array[order].reshape(len(order), -1) for array in columns.values()])
    shard.close()
    return rows


@pytest.mark.parametrize("block", [40, 1000, 1 << 20])
def test_rows_when_delivered_in_any_order_then_end_up_in_the_same(tmp_path, monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK_BYTES", block)
    columns = columns_of(301)
    expected = ordered_rows(tmp_path, columns)
    for seed in range(5):
        shuffled = np.random.default_rng(seed).permutation(301)
        again = {name: values[shuffled] for name, values in columns.items()}
        np.testing.assert_array_equal(ordered_rows(tmp_path, again), expected)
    assert not np.array_equal(expected, np.column_stack([v.reshape(301, -1) for v in columns.values()]))


def test_hashes_when_rows_differ_anywhere_then_differ():
    rng = np.random.default_rng(1)
    rows = np.unique(rng.integers(0, 2, (5000, 30)).astype("float32"), axis=0)
    assert len(np.unique(row_hashes([rows], len(rows)))) == len(rows)
    # The same values in other places are another row.
    assert len(np.unique(row_hashes([np.eye(64, dtype="float32")], 64))) == 64
    narrow = np.arange(256, dtype="uint8")[:, None]
    assert len(np.unique(row_hashes([narrow, narrow[::-1]], 256))) == 256


def test_order_when_there_is_no_row_then_is_empty():
    assert len(content_order(Shard(None, SCHEMA, {"features": (5,)}))) == 0


VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)
# For each column: what it is declared as, its Arrow type, and values of which no two are alike.
KINDS = {
    "sequences": (
        Field("features", ("s",), "int32", RAGGED),
        pa.list_(pa.int32()),
        [[], [0], [0, 0], [1], [1, 0], [0, 1], [0, 0, 1]],
    ),
    "sequences of arrays": (
        Field("features_1", ("a",), "float32", RAGGED),
        pa.list_(pa.list_(pa.float32())),
        [
            [],
            [[1, 2, 3]],
            [[1, 2, 3], [4, 5, 6]],
            [[1, 2, 4], [3, 5, 6]],
            [[1, 4, 3], [2, 5, 6]],
            [[4, 5, 6], [1, 2, 3]],
        ],
    ),
    "sparse vectors": (
        Field("features_2", ("v",), "float32", SPARSE),
        VECTOR,
        [
            {"type": 0, "size": 4, "indices": indices, "values": values}
            for indices, values in [([], []), ([1], [1]), ([2], [1]), ([1], [2]), ([1, 2], [1, 2]), ([1, 2], [2, 1])]
        ],
    ),
    "texts": (
        Field("features_3", ("t",), "string", TEXT),
        pa.list_(pa.string()),
        [["", "ab"], ["a", "b"], ["ab", ""], ["b", "a"], ["\0", "ab"], ["", "ab\0"], ["", "\0ab"], ["ä", ""]],
    ),
}


def shard_of_kinds(folder, rows, order):
    """Writes rows, each a list of values of all columns, in an order and in two batches."""
    schema = DataSchema(
        inputs=tuple(field for field, _, _ in KINDS.values()), labels=(Field("label", ("y",), "int32", SCALAR),)
    )
    with ShardWriter(folder, schema) as writer:
        for part in np.array_split(order, 2):
            columns = [
                pa.array([rows[row][place] for row in part], kind) for place, (_, kind, _) in enumerate(KINDS.values())
            ]
            columns.append(pa.array([rows[row][-1] for row in part], pa.int32()))
            writer.write(pa.RecordBatch.from_arrays(columns, [field.role for field in schema]))
        summary = writer.finish()
    return Shard(folder, schema, summary.row_shapes)


def rows_of_kinds():
    """Returns rows of which each differs from the first in one value, or in two."""
    choices = [values for _, _, values in KINDS.values()] + [[0, 1]]
    rows = []
    for place, values in enumerate(choices):
        for value in values:
            for other, others in enumerate(choices):
                for different in others if other > place else []:
                    row = [known[0] for known in choices]
                    row[place], row[other] = value, different
                    if row not in rows:
                        rows.append(row)
    return rows


@pytest.mark.parametrize("block", [300, 1 << 20])
def test_rows_of_all_kinds_when_delivered_in_any_order_then_are_found_in_one_order(tmp_path, monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK_BYTES", block)
    rows = rows_of_kinds()
    assert len(rows) > 150
    found = []
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(rows))
        shard = shard_of_kinds(tmp_path / f"{seed}", rows, order)
        found.append([rows[order[place]] for place in content_order(shard)])
        shard.close()
    assert found[0] == found[1] == found[2]


def test_hashes_of_all_kinds_when_rows_differ_anywhere_then_differ(tmp_path):
    rows = rows_of_kinds()
    shard = shard_of_kinds(tmp_path / "s", rows, np.arange(len(rows)))
    hashes = row_hashes(list(shard.take(np.arange(len(rows)))), len(rows))
    assert len(np.unique(hashes)) == len(rows)
    twice = row_hashes(list(shard.take(np.repeat(np.arange(len(rows)), 2))), 2 * len(rows))
    np.testing.assert_array_equal(twice, np.repeat(hashes, 2))
