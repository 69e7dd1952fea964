"""One Spark cluster of three executors, in processes of their own, for all tests of this folder."""

import os
import tempfile
import threading
import time

import psutil
import pytest
from process_tree import predicts, processes_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

EXECUTORS = 3
LET_GO_S = 60.0
REPLACED_S = 60.0


@pytest.fixture(scope="session")
def local_folder(tmp_path_factory):
    """Where the executors keep temporary data."""
    return tmp_path_factory.mktemp("spark-local")


@pytest.fixture(scope="session")
def server_folder(tmp_path_factory):
    """Where the driver's parameter servers keep snapshots: the driver's temporary folder."""
    folder, before = tmp_path_factory.mktemp("driver"), tempfile.tempdir
    tempfile.tempdir = str(folder)
    yield folder
    tempfile.tempdir = before


@pytest.fixture(scope="session")
def spark(local_folder, server_folder):
    from elephant.cluster.local import local_session

    session = local_session(EXECUTORS, conf={"spark.sql.shuffle.partitions": "3", "spark.local.dir": str(local_folder)})
    yield session
    session.stop()


def work_folders(local_folder):
    """Returns the folders of training processes that are left on the executors' disks."""
    return [str(path) for path in local_folder.glob("spark-*/executor-*/blockmgr-*/elephant-*")]


def elephant_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("elephant")]


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Fails a test after which a training process, a thread, a listening socket or a shard is left."""
    if "spark" not in request.fixturenames:
        yield
        return
    await_executors(request.getfixturevalue("spark"))
    folder = request.getfixturevalue("local_folder")
    snapshots = request.getfixturevalue("server_folder")
    listening = listening_ports()
    yield
    deadline = time.monotonic() + LET_GO_S
    left = ["not looked yet"]
    while left and time.monotonic() < deadline:
        left = [
            process.pid
            for name in ("rank", "parameter_server")
            for process in processes_of(f"elephant.{name}", folder=folder)
            # A Python worker of Spark keeps the process in which it predicts, for its next task.
            if not predicts(process)
        ]
        left += elephant_threads() + work_folders(folder) + list(snapshots.glob("elephant-server-*"))
        left += sorted(listening_ports() - listening)
        time.sleep(0.1 if left else 0)
    assert left == []


def await_executors(session):
    """Waits until Spark has replaced an executor that a test before has ended."""
    from elephant.cluster.executors import running_executors

    deadline = time.monotonic() + REPLACED_S
    while len(running_executors(session)) < EXECUTORS and time.monotonic() < deadline:
        time.sleep(0.1)


def listening_ports():
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture
def empty_cache(request):
    """Has Spark's cache without what tests before have left in it, where a test has a session."""
    if "spark" in request.fixturenames:
        request.getfixturevalue("spark").catalog.clearCache()
