"""Parquet files as workers read them: their own rows, needed columns, and nothing that has changed meanwhile."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tables import every_case

from elephant.data.parquet import ParquetFile, ParquetFiles, partition_texts, read_footers, typed_partitions
from elephant.errors import ConfigurationError, DataError
from elephant.storage.filesystem import absolute, list_files


def written(folder, name, numbers, group_rows):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {"number": pa.array(numbers), "x": [[float(n), 0.5] for n in numbers], "unused": ["u"] * len(numbers)}
    )
    pq.write_table(table, path, row_group_size=group_rows)
    return path


def planned(url):
    root, found = list_files(str(url))
    types, constants = typed_partitions([partition_texts(file.path[len(root) :]) for file in found])
    groups = [rows for _, rows in read_footers(str(url), found)]
    files = (ParquetFile(*parts) for parts in zip(found, groups, constants, strict=True))
    return ParquetFiles(str(url), tuple(files), types)


def numbers_of(files, part, columns=("number",)):
    return [row for batch in files.read(part, list(columns)) for row in batch.to_pylist()]


@pytest.fixture
def folder(tmp_path):
    written(tmp_path, "a.parquet", range(0, 10), 4)
    written(tmp_path, "b.parquet", range(10, 11), 4)
    written(tmp_path, "c.parquet", range(11, 40), 29)
    (tmp_path / "_SUCCESS").touch()
    written(tmp_path, "_old/d.parquet", range(100, 110), 4)
    written(tmp_path, ".hidden.parquet", range(100, 110), 4)
    return tmp_path


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", [1, 3, 7, 50])
def test_rows_when_read_by_several_workers_then_each_comes_once(folder, workers, seed):
    files = planned(folder)
    parts = [[row["number"] for row in numbers_of(files, part)] for part in files.deal(workers, seed=seed)]
    assert sorted(sum(parts, [])) == list(range(40))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if seed is None:
        assert sum(parts, []) == list(range(40))


def test_rows_when_a_column_is_wanted_then_others_are_not_read(folder):
    files = planned(folder / "c.parquet")
    (part,) = files.deal(1, seed=None)
    batches = list(files.read(part, ["x"]))
    assert {tuple(batch.schema.names) for batch in batches} == {("x",)}
    assert batches[0].column(0).to_pylist()[:2] == [[11.0, 0.5], [12.0, 0.5]]


def test_rows_when_a_row_group_is_large_then_come_some_megabytes_at_a_time(tmp_path):
    values = np.random.default_rng(0).normal(size=(4000, 2048)).astype("float32")
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values.ravel(), 2048)})
    pq.write_table(table, tmp_path / "large.parquet", row_group_size=4000)
    files = planned(tmp_path)
    batches = list(files.read(*files.deal(1, seed=None), ["x"]))
    assert max(batch.nbytes for batch in batches) <= 16 << 20
    flat = np.concatenate([batch.column(0).flatten().to_numpy() for batch in batches])
    np.testing.assert_array_equal(flat, values.ravel())


def test_columns_when_their_names_have_dots_then_are_columns_or_parts_of_structs(tmp_path):
    structs = pa.array([{"data": b"ab", "Size": {"height": 3}}, {"data": b"c", "Size": {"height": 4}}])
    pq.write_table(pa.table({"image": structs, "image.name": ["x", "y"]}), tmp_path / "0.parquet")
    files = planned(tmp_path)
    (part,) = files.deal(1, seed=None)
    rows = numbers_of(files, part, ["image.data", "image.size.height", "image.name"])
    assert rows == [
        {"image.data": b"ab", "image.size.height": 3, "image.name": "x"},
        {"image.data": b"c", "image.size.height": 4, "image.name": "y"},
    ]


def test_columns_when_folders_name_them_then_rows_have_them(tmp_path):
    written(tmp_path, "year=2025/name=a%2Fb/0.parquet", range(0, 3), 2)
    written(tmp_path, "year=2026/name=__HIVE_DEFAULT_PARTITION__/0.parquet", range(3, 5), 2)
    files = planned(tmp_path)
    assert files.constant_types == {"year": pa.int32(), "name": pa.string()}
    (part,) = files.deal(1, seed=None)
    rows = numbers_of(files, part, ["year", "number", "name"])
    assert rows[0] == {"year": 2025, "number": 0, "name": "a/b"}
    assert rows[-1] == {"year": 2026, "number": 4, "name": None}


@every_case(
    ("texts", "kind", "values"),
    [
        (["1", "-2", None], pa.int32(), [1, -2, None]),
        (["1", "3000000000"], pa.int64(), [1, 3000000000]),
        (["1", "2.5"], pa.float64(), [1.0, 2.5]),
        (["1", "x"], pa.string(), ["1", "x"]),
        (["2026-01-01", "2026-13-01"], pa.string(), ["2026-01-01", "2026-13-01"]),
    ],
)
def test_folders_when_named_then_values_have_the_type_that_all_can_have(texts, kind, values):
    types, rows = typed_partitions([{"k": text} for text in texts])
    assert types == {"k": kind}
    assert [row["k"] for row in rows] == values


def test_folders_when_they_differ_in_columns_then_says_so():
    with pytest.raises(DataError, match=r"folders of the same partition columns. Received: \['a'\] and \['b'\]"):
        typed_partitions([{"a": "1"}, {"b": "1"}])


def test_path_when_a_name_has_a_colon_then_is_a_path_where_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day:1").mkdir()
    assert absolute("day:1") == str(tmp_path / "day:1")
    assert absolute("s3:bucket/day:1") == "s3:bucket/day:1"


def rewritten(path):
    written(path.parent, path.name, range(10, 13), 4)


def touched(path):
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (os.unlink, "b.parquet: expected the file that the driver has seen. Received: no such file on this executor"),
        (rewritten, "b.parquet: expected the .* bytes that the driver has seen. Received: .* written since"),
        (touched, "b.parquet: expected the .* bytes that the driver has seen. Received: .* written since"),
    ],
)
def test_file_when_it_changes_after_it_was_listed_then_is_not_read(folder, change, message):
    files = planned(folder)
    change(folder / "b.parquet")
    (part,) = files.deal(1, seed=None)
    with pytest.raises(DataError, match=message):
        numbers_of(files, part)


def test_file_when_its_bytes_are_damaged_then_says_which(folder):
    path = folder / "c.parquet"
    content, stat = bytearray(path.read_bytes()), path.stat()
    files = planned(folder)
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (part,) = files.deal(1, seed=None)
    with pytest.raises(DataError, match="c.parquet: expected a Parquet file that can be read. Received: "):
        numbers_of(files, part)


def test_files_when_one_is_no_parquet_file_then_says_which(folder):
    (folder / "z.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match="z.parquet: expected a Parquet file. Received: "):
        planned(folder)


def test_files_when_one_lacks_a_column_then_says_which(folder):
    pq.write_table(pa.table({"other": [1]}), folder / "z.parquet")
    files = planned(folder)
    (part,) = files.deal(1, seed=None)
    with pytest.raises(
        DataError, match="z.parquet: expected the column 'number', which other files have. Received: other"
    ):
        numbers_of(files, part)


def test_path_when_there_is_nothing_then_says_so(tmp_path):
    with pytest.raises(
        ConfigurationError, match="expected a file or a folder. Received: .*nowhere', where there is none"
    ):
        list_files(str(tmp_path / "nowhere"))


def test_files_when_fsspec_alone_knows_the_url_then_are_read():
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://elephant-test/rows/0.parquet", "wb") as file:
        pq.write_table(pa.table({"number": [1, 2, 3]}), file)
    try:
        files = planned("memory://elephant-test/rows")
        (part,) = files.deal(1, seed=None)
        assert [row["number"] for row in numbers_of(files, part)] == [1, 2, 3]
    finally:
        fsspec.filesystem("memory").rm("/elephant-test", recursive=True)
