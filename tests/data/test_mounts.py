"""Paths of Databricks, and writing to mounts that take files in order alone; the mounts are simulated."""

import pytest
from databricks_mounts import simulate_mounts
from tables import every_case

from elephant.storage.filesystem import absolute, copy_in_order, is_mounted, local_form, mounted_here, spark_form


@every_case(
    ("path", "local"),
    [
        ("dbfs:/models/a", "/dbfs/models/a"),
        ("dbfs:///models/a", "/dbfs/models/a"),
        ("DBFS:/models/a", "/dbfs/models/a"),
        ("dbfs:/Volumes/c/s/v/a", "/Volumes/c/s/v/a"),
        ("/Volumes/c/s/v/a", "/Volumes/c/s/v/a"),
        ("/dbfs/a", "/dbfs/a"),
        ("s3://bucket/dbfs/a", "s3://bucket/dbfs/a"),
        ("/data/dbfs:/a", "/data/dbfs:/a"),
    ],
)
def test_local_form_when_a_path_is_of_databricks_then_is_that_of_its_mount(path, local):
    assert local_form(path) == local
    if path.lower().startswith("dbfs:"):
        # fit(path) lists the files on the driver, and sends this form to the executors.
        assert absolute(path) == local


def test_is_mounted_when_paths_only_look_alike_then_tells_them_apart():
    assert is_mounted("dbfs:/a") and is_mounted("/dbfs/a") and is_mounted("/dbfs") and is_mounted("/Volumes/c/s/v/a")
    assert not any(is_mounted(path) for path in ("/dbfsx/a", "/data/dbfs/a", "s3://dbfs/a", "Volumes/a", "/volumes/a"))


def test_spark_form_when_on_databricks_then_names_the_mount_as_spark_does(monkeypatch):
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    assert spark_form("/dbfs/models/a") == "/dbfs/models/a"
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    assert spark_form("/dbfs/models/a") == "dbfs:/models/a"
    assert spark_form("/dbfs") == spark_form("/dbfs/") == "dbfs:/"
    assert [spark_form(path) for path in ("/Volumes/c/s/v/a", "dbfs:/a", "/data/a")] == [
        "/Volumes/c/s/v/a",
        "dbfs:/a",
        "/data/a",
    ]


def test_mounted_here_when_there_is_no_such_mount_then_is_none(simulated_mount):
    assert mounted_here("dbfs:/models/a") == simulated_mount / "models" / "a"
    # The mount itself, to which a model's file may be written.
    assert mounted_here("dbfs:/") == mounted_here(str(simulated_mount)) == simulated_mount
    assert mounted_here("/Volumes/c/s/v/a") is None
    assert mounted_here("/data/a") is None


def test_copy_in_order_when_the_mount_refuses_to_seek_then_arrives_whole(simulated_mount, tmp_path):
    source, content = tmp_path / "source", bytes(range(256)) * 10_000
    source.write_bytes(content)
    target = simulated_mount / "folder" / "of" / "it"
    copy_in_order(source, target)
    assert target.read_bytes() == content
    # The simulation can fail: what writes out of order is refused.
    with pytest.raises(OSError, match="Operation not supported"), open(target, "wb") as file:
        file.write(b"head")
        file.seek(0)


def test_mounted_here_when_only_the_folder_of_all_volumes_is_there_then_is_none(simulated_mount, tmp_path):
    # As on a Mac, where disks are mounted below /Volumes.
    (tmp_path / "Volumes").mkdir()
    path = f"{tmp_path}/Volumes/catalog/schema/volume/models/a"
    assert mounted_here(path) is None
    (tmp_path / "Volumes" / "catalog" / "schema" / "volume").mkdir(parents=True)
    assert str(mounted_here(path)) == path


@pytest.fixture
def simulated_mount(tmp_path, monkeypatch):
    """A folder that stands for /dbfs, where files that are written refuse to seek."""
    return simulate_mounts(monkeypatch, tmp_path)
