"""A driver that dies takes its workers with it, its parameter servers, and what waits for the next fit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from process_tree import forked_in, predicts, runs, with_servers

SUPPORT = str(Path(__file__).resolve().parents[1] / "support")
SCRIPT = """
import sys, threading, keras
sys.path.insert(0, sys.argv[2])
from elephant import KerasEstimator
from elephant.cluster.local import local_session
from keras_reference import classifier_data, regression_model
from spark_frames import partitioned_frame, split_rows

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        import os, time
        open(os.path.join(sys_argv_1, str(os.getpid())), "w").close()
        time.sleep(0.1)

sys_argv_1 = sys.argv[1]
session = local_session(3, conf={"spark.local.dir": sys.argv[3]})
frame = partitioned_frame(session, split_rows(classifier_data(40), (20, 20)), "features array<double>, label double")

def fit(mode, epochs, callbacks, **options):
    estimator = KerasEstimator(regression_model("sgd"), mode=mode, epochs=epochs, batchSize=2, **options)
    return estimator.setVerbose(0).setCallbacks(callbacks).fit(frame)

# Python workers keep the processes that predict.
assert len(fit("synchronous", 1, []).transform(frame).collect()) == 40
options = {"serverPlacement": "executors"}
threading.Thread(target=fit, args=("asynchronous", 10000, [Slow()]), kwargs=options, daemon=True).start()
fit("synchronous", 10000, [Slow()])
"""
WORKERS, SERVERS = 2, 1


@pytest.mark.slow("a driver with a cluster of its own")
@pytest.mark.timeout(400)
def test_ranks_and_servers_when_the_driver_is_killed_then_end_in_ten_seconds(tmp_path):
    script, marker, local = tmp_path / "fit.py", tmp_path / "ranks", tmp_path / "local"
    script.write_text(SCRIPT, encoding="utf-8")
    snapshots = tmp_path / "snapshots"
    for folder in (marker, local, snapshots):
        folder.mkdir()
    with open(tmp_path / "log", "w") as log:
        environment = {**os.environ, "TMPDIR": str(snapshots)}
        command = [sys.executable, str(script), str(marker), SUPPORT, str(local)]
        driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    below = []
    try:
        deadline = time.monotonic() + 240
        while len(os.listdir(marker)) < WORKERS and time.monotonic() < deadline and driver.poll() is None:
            time.sleep(0.2)
        ranks = [int(name) for name in os.listdir(marker)]
        assert len(ranks) == WORKERS, (tmp_path / "log").read_text()
        below = list({*psutil.Process(driver.pid).children(recursive=True), *with_servers(ranks)})
        servers = [process.pid for process in below if runs(process, "elephant.parameter_server")]
        assert len(servers) == SERVERS
        assert [process for process in forked_in(local) if predicts(process)]
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        mine = [process for process in below if process.pid in ranks + servers]
        gone, alive = psutil.wait_procs(mine, timeout=10)
        assert not alive
        assert len(gone) == WORKERS + SERVERS
        assert list(snapshots.glob("**/elephant-server-*")) == []
        _, alive = psutil.wait_procs(below, timeout=30)
        assert [process.cmdline() for process in alive] == []
        deadline = time.monotonic() + 30
        while left := [*forked_in(local), *local.glob("**/forkserver-*"), *local.glob("**/model-*")]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        for process in [*below, psutil.Process(driver.pid)] if driver.poll() is None else below:
            if process.is_running():
                process.kill()
