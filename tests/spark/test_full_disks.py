"""What a fit says, and leaves, when the executors' disks are full."""

import contextlib
import os
import subprocess
import sys
import time

import keras
import pytest
from process_tree import forked_in

from elephant import KerasEstimator
from elephant.errors import ClusterError

LET_GO_S = 60.0


@contextlib.contextmanager
def small_disk(folder, num_bytes):
    """Mounts a file system of so many bytes on a folder, where the tests may do that."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield
    finally:
        # A process that is being killed may still be there.
        assert becomes_true(lambda: unmounted(folder))


def unmounted(folder):
    """Takes a file system away; Spark makes each of its folders once, and relies on those that it made meanwhile."""
    for process in forked_in(folder):
        # A fork server has a file there.
        process.terminate()
    ours = ("elephant-", "forkserver-")
    made = [child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith(ours)]
    if subprocess.run(["umount", str(folder)]).returncode:
        return False
    for name in made:
        (folder / name).mkdir(exist_ok=True)
    return True


def becomes_true(condition):
    deadline = time.monotonic() + LET_GO_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow("a fit in each kind of mode, and a file system of its own under an executor")
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_fit_when_an_executor_s_disk_is_full_then_the_error_says_so_and_nothing_is_left(
    spark, local_folder, mode, monkeypatch
):
    # The pre-flight would refuse such a disk; here it has become full since.
    monkeypatch.setattr("elephant.cluster.checks.executor_checks.FLOOR_BYTES", 0)
    # Small numbers: workers that have their rows may train until the first one's disk is full, and must not diverge.
    frame = spark.sql(
        "select transform(sequence(1, 500), i -> (i + id) / 1e5D) features, id / 1e4D label from range(0, 9000, 1, 3)"
    )
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((500,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    disks = list(local_folder.glob("spark-*/executor-*/blockmgr-*"))
    assert len(disks) >= 3
    # An executor that was lost before, in another test, has left its own: the newest one is of one that lives.
    disk = max(disks, key=lambda folder: folder.stat().st_ctime)
    # The others' workers have all their rows when the fit ends.
    with small_disk(disk, 2 << 20):
        with pytest.raises(ClusterError, match=r"expected room on the local disk .* Let spark.local.dir") as failure:
            KerasEstimator(model=model, numWorkers=3, mode=mode, verbose=0).fit(frame)
        assert str(disk) in str(failure.value)
        # Spark takes a moment to end the tasks of the other workers.
        assert becomes_true(lambda: not [left for disk in disks for left in disk.glob("elephant-*")])
