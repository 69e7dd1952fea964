"""Shards give back the rows that were written, in any order, however they were batched."""

import contextlib
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import record_batch

from elephant.data.schema import DENSE, SCALAR, DataSchema, Field
from elephant.data.shard import Shard, ShardWriter
from elephant.errors import ClusterError, DataError

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


@contextlib.contextmanager
def small_disk(folder, num_bytes):
    """Mounts a file system of so many bytes, where the tests may do that."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_writer_when_the_disk_is_full_then_says_where_and_leaves_nothing(tmp_path):
    columns = rows_of(1000)
    batch = record_batch(SCHEMA, columns)
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        with pytest.raises(ClusterError) as failure, ShardWriter(disk / "shard", SCHEMA) as writer:
            for _ in range(100):
                writer.write(batch)
        assert not list(disk.iterdir())
        assert os.statvfs(disk).f_bfree * os.statvfs(disk).f_bsize == 256 << 10
    message = str(failure.value)
    assert f"{disk}: expected room on the local disk" in message and "spark.local.dir" in message
    assert "after 0.3 MB of rows" in message and "0.3 MB are free without" in message


def test_writer_when_a_file_may_not_grow_then_the_error_is_the_same(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(ClusterError, match="expected room on the local disk"):
            with ShardWriter(tmp_path / "shard", SCHEMA) as writer:
                writer.write(record_batch(SCHEMA, rows_of(5000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())


def test_writer_when_a_row_is_unusable_then_what_was_written_is_removed(tmp_path):
    columns = rows_of(4)
    bad = record_batch(SCHEMA, {**columns, "weight": np.array([1, 1, np.nan, 1], dtype="float32")})
    with pytest.raises(DataError), ShardWriter(tmp_path / "shard", SCHEMA) as writer:
        writer.write(record_batch(SCHEMA, columns))
        assert (tmp_path / "shard").exists()
        writer.write(bad)
    assert not list(tmp_path.iterdir())
