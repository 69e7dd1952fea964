"""Shards give back the rows that were written, in any order, however they were batched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import record_batch

from elephant.data.schema import DENSE, SCALAR, DataSchema, Field
from elephant.data.shard import Shard, ShardWriter
from elephant.errors import DataError

SCHEMA = DataSchema(
    inputs=(Field("features", ("x",), "float32", DENSE, (2, 3)),),
    labels=(Field("label", ("y",), "int32", SCALAR),),
    weights=(Field("weight", ("w",), "float32", SCALAR),),
    validation=Field("validation", ("v",), "bool", SCALAR),
)


def rows_of(count):
    return {
        "features": np.arange(count * 6, dtype="float32").reshape(count, 6),
        "label": np.arange(count, dtype="int32"),
        "weight": np.linspace(0, 1, count, dtype="float32"),
        "validation": np.arange(count) % 3 == 0,
    }


def write(path, columns, cuts):
    with ShardWriter(path, SCHEMA) as writer:
        for start, stop in zip([0, *cuts], [*cuts, len(columns["label"])], strict=True):
            writer.write(record_batch(SCHEMA, {name: values[start:stop] for name, values in columns.items()}))
        return writer.finish()


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 40), data=st.data())
def test_take_when_rows_are_drawn_then_equals_numpy_indexing(tmp_path_factory, count, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    drawn = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=20)), dtype=np.int64)
    columns = rows_of(count)
    path = tmp_path_factory.mktemp("shard") / "shard"
    summary = write(path, columns, cuts)
    assert (summary.num_rows, summary.num_validation) == (count, int(columns["validation"].sum()))
    shard = Shard(path, SCHEMA, summary.row_shapes)
    shard.unlink()
    features, label, weight = shard.take(drawn)
    np.testing.assert_array_equal(features, columns["features"][drawn].reshape(-1, 2, 3))
    np.testing.assert_array_equal(label, columns["label"][drawn])
    np.testing.assert_array_equal(weight, columns["weight"][drawn])
    np.testing.assert_array_equal(shard.validation_rows(), np.flatnonzero(columns["validation"]))
    shard.close()


def test_shard_when_there_is_no_row_then_gives_zeros_of_the_agreed_shape(tmp_path):
    with ShardWriter(tmp_path / "shard", SCHEMA) as writer:
        summary = writer.finish()
    assert summary.num_rows == 0 and not list(tmp_path.iterdir())
    shard = Shard(None, SCHEMA, {"features": (6,)})
    assert shard.num_rows == 0 and len(shard.validation_rows()) == 0
    features, label, _ = shard.zeros(1)
    assert features.shape == (1, 2, 3) and label.shape == (1,)


def test_writer_when_a_later_batch_is_unusable_then_the_row_is_counted_over_batches(tmp_path):
    columns = rows_of(4)
    bad = {**columns, "weight": np.array([1, 1, -1, 1], dtype="float32")}
    with ShardWriter(tmp_path / "shard", SCHEMA) as writer:
        writer.write(record_batch(SCHEMA, columns))
        with pytest.raises(DataError, match=r"column 'w': .* in row 6 "):
            writer.write(record_batch(SCHEMA, bad))


def test_writer_when_batches_are_empty_then_they_are_left_out(tmp_path):
    columns = rows_of(3)
    summary = write(tmp_path / "shard", columns, [0, 0, 3])
    assert summary.num_rows == 3
    assert (tmp_path / "shard" / "label.0").stat().st_size == 3 * 4
