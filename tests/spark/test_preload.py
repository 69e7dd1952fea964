"""Keras is imported on the executors before there is a fit, whose ranks are forked from there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_tree import forked_in

SUPPORT = str(Path(__file__).resolve().parents[1] / "support")
SCRIPT = """
import os, sys, time, keras
sys.path.insert(0, sys.argv[1])
from elephant import KerasEstimator
from elephant.cluster.local import local_session
from keras_reference import classifier_data, regression_model
from process_tree import forked_in, runs
from spark_frames import partitioned_frame, split_rows

folder, SERVER = sys.argv[2], "elephant.task.forkserver"

class Parent(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        with open(os.path.join(target, "rank-" + str(os.getppid())), "w"):
            pass

def estimator():
    return KerasEstimator(regression_model("sgd"), numWorkers=2, batchSize=10, verbose=0, callbacks=[Parent()])

def await_servers(count):
    deadline = time.monotonic() + 90
    while len(servers := [process.pid for process in forked_in(folder) if runs(process, SERVER)]) != count:
        assert time.monotonic() < deadline, servers
        time.sleep(0.2)
    return servers

target = sys.argv[3]
session = local_session(2, conf={"spark.local.dir": folder})
estimator()
session.stop()
await_servers(0)
session = local_session(2, conf={"spark.local.dir": folder, "spark.ui.enabled": "false"})
made = estimator()
servers = await_servers(2)
jobs = session.sparkContext.statusTracker().getJobIdsForGroup("elephant-preload")
print("servers", *sorted(servers), "jobs", len(jobs))
rows = split_rows(classifier_data(40), (20, 20))
made.fit(partitioned_frame(session, rows, "features array<double>, label double"))
print("jobs", len(session.sparkContext.statusTracker().getJobIdsForGroup("elephant-preload")))
session.stop()
"""


@pytest.mark.slow("two sessions and an import; tests/cluster/test_preload.py and tests/task hold each half")
@pytest.mark.timeout(400)
def test_fit_when_its_estimator_was_made_before_then_its_ranks_are_forked_from_what_was_there(tmp_path):
    script, local, target = tmp_path / "fit.py", tmp_path / "local", tmp_path / "ranks"
    script.write_text(SCRIPT, encoding="utf-8")
    local.mkdir()
    target.mkdir()
    command = [sys.executable, str(script), SUPPORT, str(local), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    (_, *servers, _, before), (_, after) = [line.split() for line in done.stdout.splitlines() if "jobs" in line]
    assert len(servers) == 2 and before == after == "1"
    assert sorted(os.listdir(target)) == sorted(f"rank-{server}" for server in servers)
    # Neither the session that was stopped in the middle of it nor the other one says anything, or leaves a process.
    words = ("Traceback", " ERROR ", " WARN ")
    lines = [line for line in done.stderr.splitlines() if "WARN SparkConf" not in line]
    told = [line for line in lines if any(word in line for word in words)]
    assert told == []
    assert forked_in(local) == []
