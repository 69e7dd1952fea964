"""TFRecord files, read by a process with TensorFlow, as the task of a worker reads them."""

import os

import pytest
import tensorflow as tf

from elephant.cluster.row_source import RecordFiles
from elephant.errors import DataError
from elephant.rank.input.tfrecord_reader import describe, read_shares
from elephant.storage.filesystem import list_files


def feature_of(value):
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def write_records(path, rows, compression=""):
    with tf.io.TFRecordWriter(str(path), options=compression) as writer:
        for row in rows:
            features = {name: feature_of(value) for name, value in row.items() if value != []}
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def row_of(number):
    return {
        "number": number,
        "vector": [number / 2, 1.0],
        "words": list(range(number % 3)),
        "image": b"\x00" * number,
        "names": [b"a", b"%d" % number],
    }


def planned(folder):
    _, found = list_files(str(folder))
    return RecordFiles(str(folder), tuple(found), describe(str(folder), found))


def rows_of(files, part):
    return [row for batch in files.read(part, sorted(files.features)) for row in batch.to_pylist()]


def test_records_when_read_then_each_comes_once_with_all_that_it_holds(tmp_path):
    write_records(tmp_path / "a.tfrecord", map(row_of, range(2000)))
    write_records(tmp_path / "b.tfrecord.gz", map(row_of, range(2000, 2007)), "GZIP")
    files = planned(tmp_path)
    assert files.features == {
        "number": ("int64_list", True),
        "vector": ("float_list", False),
        "words": ("int64_list", False),
        "image": ("bytes_list", True),
        "names": ("bytes_list", False),
    }
    parts = [rows_of(files, part) for part in files.deal(2, seed=None)]
    # The second file is small: both workers take every other record of each.
    assert [len(part) for part in parts] == [1003, 1004] or [len(part) for part in parts] == [1004, 1003]
    assert sorted(sum(parts, []), key=lambda row: row["number"]) == [row_of(number) for number in range(2007)]


@pytest.mark.slow("a process with TensorFlow; the test below has records that are refused")
def test_records_when_one_is_unlike_the_first_ones_then_says_which(tmp_path):
    write_records(tmp_path / "a.tfrecord", [{"number": n} for n in range(150)] + [{"number": [1, 2]}])
    files = planned(tmp_path)
    with pytest.raises(
        DataError, match="one value of the feature 'number' in every record, .* Received: 2 in record 150"
    ):
        rows_of(files, *files.deal(1, seed=None))


def test_records_when_bytes_are_damaged_then_says_which_file(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_records(path, map(row_of, range(300)))
    files = planned(tmp_path)
    content = bytearray(path.read_bytes())
    content[-200] ^= 255
    stat = path.stat()
    path.write_bytes(content)
    with pytest.raises(DataError, match="a.tfrecord: expected the .* written since"):
        rows_of(files, *files.deal(1, seed=None))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(
        DataError, match="a.tfrecord: expected TFRecords of tf.train.Example that can be read. Received: "
    ):
        rows_of(files, *files.deal(1, seed=None))


def test_files_when_they_hold_no_examples_then_says_so(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"no records at all, but some bytes")
    with pytest.raises(
        DataError, match="a.tfrecord: expected TFRecords of tf.train.Example that can be read. Received: "
    ):
        planned(tmp_path)


def test_files_when_another_file_system_has_them_then_are_copied_and_read(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    write_records(tmp_path / "a.tfrecord.gz", map(row_of, range(5)), "GZIP")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "a.tfrecord.gz"), "/elephant-records/a.tfrecord.gz")
    try:
        url = "memory://elephant-records"
        _, found = list_files(url)
        features = describe(url, found)
        batches = read_shares(url, [(found[0], 1, 2)], features)
        assert [row for batch in batches for row in batch.select(sorted(features)).to_pylist()] == [
            dict(sorted(row_of(number).items())) for number in (1, 3)
        ]
    finally:
        memory.rm("/elephant-records", recursive=True)
