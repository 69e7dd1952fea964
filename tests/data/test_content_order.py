"""The order of rows by content: the same whatever order and batches they are delivered in."""

import numpy as np
import pytest
from rank_pool import write_shard

from elephant.data import content_order as module
from elephant.data.content_order import content_order, row_hashes
from elephant.data.schema import DENSE, SCALAR, DataSchema, Field
from elephant.data.shard import Shard

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
