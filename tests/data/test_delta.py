"""Delta tables, written by the `deltalake` package: what is in their present version, and nothing else."""

import json
import struct
import sys

import pyarrow as pa
import pytest

from elephant.data.delta import delta_files
from elephant.errors import ConfigurationError, UnsupportedError

deltalake = pytest.importorskip("deltalake")


def rows_of(url, columns):
    planned = delta_files(url).planned(url)
    (part,) = planned.deal(1, seed=None)
    return [row for batch in planned.read(part, columns) for row in batch.to_pylist()]


def test_table_when_files_were_removed_from_it_then_they_are_not_read(tmp_path):
    url = str(tmp_path / "a table")
    deltalake.write_deltalake(url, pa.table({"n": [1, 2, 3]}))
    deltalake.write_deltalake(url, pa.table({"n": [4, 5]}), mode="overwrite")
    deltalake.write_deltalake(url, pa.table({"n": [6]}), mode="append")
    assert len(list((tmp_path / "a table").glob("*.parquet"))) == 3
    assert sorted(row["n"] for row in rows_of(url, ["n"])) == [4, 5, 6]


def test_table_when_partitioned_then_rows_have_the_columns_of_the_partitions(tmp_path):
    url = str(tmp_path / "table")
    rows = {"n": [1, 2, 3], "name": ["a b", "c/d", "é"], "year": pa.array([2024, 2025, 2026], pa.int32())}
    deltalake.write_deltalake(url, pa.table(rows), partition_by=["name", "year"])
    found = sorted(rows_of(url, ["n", "name", "year"]), key=lambda row: row["n"])
    assert found == pa.table(rows).to_pylist()


def test_table_when_columns_were_added_then_rows_from_before_have_nulls_in_them(tmp_path):
    url = str(tmp_path / "table")
    deltalake.write_deltalake(url, pa.table({"n": [1, 2], "Name": ["a", "b"]}))
    later = pa.table({"n": [3], "Name": ["c"], "weight": [0.5], "list": [[1.0, 2.0]]})
    deltalake.write_deltalake(url, later, mode="append", schema_mode="merge")
    table = delta_files(url)
    # Spark's form, whichever file is the first one.
    assert [field["name"] for field in table.schema.spark["fields"]] == later.column_names
    found = sorted(rows_of(url, ["n", "name", "weight", "list"]), key=lambda row: row["n"])
    expected = pa.concat_tables([pa.table({"n": [1, 2], "Name": ["a", "b"]}), later], promote_options="default")
    assert [list(row.values()) for row in found] == [list(row.values()) for row in expected.to_pylist()]


def deletion_vector(rows):
    """Returns deleted rows as the Delta protocol keeps them: one Roaring bitmap, with one container of an array."""
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16) + struct.pack(f"<{len(rows)}H", *rows)
    return struct.pack("<IQI", 1681511377, 1, 0) + bitmap


def z85(content):
    """Returns bytes in Z85 (RFC 32 of ZeroMQ), filled up with zeros."""
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    content += b"\x00" * (-len(content) % 4)
    words = struct.unpack(f">{len(content) // 4}I", content)
    return "".join(alphabet[word // 85**power % 85] for word in words for power in (4, 3, 2, 1, 0))


def test_table_when_rows_are_deleted_by_vectors_then_is_refused(tmp_path):
    url = tmp_path / "table"
    deltalake.write_deltalake(str(url), pa.table({"n": [1, 2, 3]}))
    log = url / "_delta_log" / "00000000000000000000.json"
    added = next(json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"add"'))["add"]
    inline = deletion_vector([1])
    vector = {"storageType": "i", "pathOrInlineDv": z85(inline), "sizeInBytes": len(inline), "cardinality": 1}
    features = ["deletionVectors"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    actions = [
        {"protocol": protocol},
        {"remove": {"path": added["path"], "deletionTimestamp": 0, "dataChange": True}},
        {"add": {**added, "deletionVector": vector}},
    ]
    (log.parent / "00000000000000000001.json").write_text("\n".join(json.dumps(action) for action in actions))
    words = (
        r"whose deleted rows have been removed.* Received: one with deletion vec.*REORG TABLE delta\.`/.*/table` APPLY"
    )
    with pytest.raises(UnsupportedError, match=words):
        delta_files(str(url))


def edited(url, change):
    """Makes a table of one row, and has a function change the actions of its log."""
    deltalake.write_deltalake(str(url), pa.table({"n": [1]}))
    log = url / "_delta_log" / "00000000000000000000.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        change(line)
    log.write_text("\n".join(json.dumps(line) for line in lines))


def test_table_when_columns_are_mapped_then_is_refused(tmp_path):
    def change(line):
        if "metaData" in line:
            line["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}

    edited(tmp_path / "table", change)
    with pytest.raises(UnsupportedError, match="Received: column mapping by name"):
        delta_files(str(tmp_path / "table"))


def test_table_when_a_column_is_of_a_user_s_type_then_is_refused(tmp_path):
    def change(line):
        if "metaData" in line:
            schema = json.loads(line["metaData"]["schemaString"])
            # As Spark describes its vectors.
            schema["fields"][0]["type"] = {"type": "udt", "class": "VectorUDT", "sqlType": "integer"}
            line["metaData"]["schemaString"] = json.dumps(schema)

    edited(tmp_path / "table", change)
    with pytest.raises(
        UnsupportedError, match=r"that the package deltalake reads\. Received: .*udt.* Pass a DataFrame"
    ):
        delta_files(str(tmp_path / "table"))


@pytest.mark.parametrize("root", ["file:/elsewhere", "s3://bucket/elsewhere"])
def test_table_when_its_files_are_another_table_s_then_is_refused(tmp_path, root):
    def change(line):
        if "add" in line:
            line["add"]["path"] = f"{root}/{line['add']['path']}"

    edited(tmp_path / "table", change)
    with pytest.raises(UnsupportedError, match="as in a shallow clone. Pass a DataFrame"):
        delta_files(str(tmp_path / "table"))


def test_table_when_there_is_none_then_says_so(tmp_path):
    with pytest.raises(ConfigurationError, match="expected a Delta table. Received: "):
        delta_files(str(tmp_path / "nothing"))


def test_table_when_the_package_is_missing_then_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'elephant-spark\[delta\]'"):
        delta_files(str(tmp_path))
