"""Files and folders of an object store that speaks S3: moto's, on this machine, which refuses who has not its key."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elephant.data.delta import delta_files
from elephant.data.parquet import ParquetFile, ParquetFiles, read_footers
from elephant.errors import ConfigurationError, DataError
from elephant.storage.filesystem import list_files
from elephant.storage.folder import file_at, folder_at

pytest.importorskip("moto", reason="the package moto, with which tests have an object store, is not installed")
from object_store import object_store


@pytest.fixture(scope="module")
def store():
    with object_store("bucket") as store:
        yield store


@pytest.fixture
def reached(store, monkeypatch):
    """The store, for what finds it by the environment."""
    for name, value in {**store.place, **store.credentials, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    return store


def planned(url):
    found = list_files(url)[1]
    groups = [rows for _, rows in read_footers(url, found)]
    return ParquetFiles(url, tuple(ParquetFile(*parts) for parts in zip(found, groups, strict=True)))


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_folder_when_in_an_object_store_then_has_whole_files_that_are_written_read_and_removed(reached, scheme):
    folder = folder_at(f"{scheme}://bucket/{scheme}/folder")
    assert folder.names() == []
    folder.write("one", lambda file: file.write(b"content"))
    folder.replace("one", lambda file: file.write(b"other"))
    assert (folder.names(), folder.has("one"), folder.has("two")) == (["one"], True, False)
    with folder.reading("one") as file:
        file.seek(2)
        assert file.read() == b"her"
    assert file_at(f"{scheme}://bucket/{scheme}/folder/two").read() is None
    folder.remove("one")
    assert folder.names() == []


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_rows_when_their_files_are_in_an_object_store_then_are_those_that_were_written(reached, scheme):
    for place in range(3):
        table = pa.table({"n": range(10 * place, 10 * place + 10)})
        pq.write_table(table, f"bucket/rows-{scheme}/{place}.parquet", 4, filesystem=reached.file_system())
    files = planned(f"{scheme}://bucket/rows-{scheme}")
    parts = files.deal(2, seed=0)
    read = [[row for batch in files.read(part, ["n"]) for row in batch["n"].to_pylist()] for part in parts]
    assert [len(rows) for rows in read] == [15, 15]
    assert sorted(sum(read, [])) == list(range(30))


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_delta_table_when_in_an_object_store_then_has_the_rows_of_its_present_version(reached, scheme):
    deltalake = pytest.importorskip("deltalake")
    url = f"{scheme}://bucket/table-{scheme}"
    deltalake.write_deltalake(url, pa.table({"n": [1, 2]}))
    deltalake.write_deltalake(url, pa.table({"n": [3]}), mode="overwrite")
    deltalake.write_deltalake(url, pa.table({"n": [4, 5]}), mode="append")
    files = delta_files(url).planned(url)
    (part,) = files.deal(1, seed=None)
    assert sorted(row for batch in files.read(part, ["n"]) for row in batch["n"].to_pylist()) == [3, 4, 5]


def test_files_when_credentials_are_missing_then_errors_say_where_they_come_from(reached, monkeypatch):
    pq.write_table(pa.table({"n": [1]}), "bucket/kept/0.parquet", filesystem=reached.file_system())
    files = planned("s3://bucket/kept")
    (part,) = files.deal(1, seed=None)
    for name in reached.credentials:
        monkeypatch.delenv(name)
    # The driver, which lists them.
    with pytest.raises(ConfigurationError, match=r"'s3://bucket/kept': .*ACCESS_DENIED.*AWS_ACCESS_KEY_ID, ~/.aws"):
        list_files("s3://bucket/kept")
    # An executor, which reads what the driver has listed.
    with pytest.raises(DataError, match=r"bucket/kept/0.parquet: .*ACCESS_DENIED.*spark.executorEnv.AWS_ACCESS_KEY_ID"):
        list(files.read(part, ["n"]))
