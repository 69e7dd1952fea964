"""With speculation on, Spark starts tasks twice: ranks of a barrier stage never, workers and servers without harm."""

import json
import sys

import numpy as np
import pytest
from counting_model import counted, counting_data
from standalone_cluster import Place, StandaloneCluster

ROWS, EPOCHS = 64, 8
SCRIPT = """
import json, sys, threading, keras
sys.path.insert(0, sys.argv[1])
from pyspark.sql import SparkSession
from elephant import KerasEstimator
from counting_model import counting_data, counting_model, weights_of
from spark_frames import partitioned_frame, split_rows

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        import time
        time.sleep(0.1)

session = SparkSession.builder.getOrCreate()
tracker = session.sparkContext.statusTracker()

def watch(copies, ended):
    while not ended.wait(0.1):
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None:
                copies[stage] = max(copies.get(stage, 0), info.numActiveTasks - info.numTasks)

def fit(**options):
    rows = split_rows(counting_data(64), (64,))
    frame = partitioned_frame(session, rows, "features array<double>, label double")
    copies, ended = {}, threading.Event()
    watcher = threading.Thread(target=watch, args=(copies, ended), daemon=True)
    watcher.start()
    fitted = KerasEstimator(
        model=counting_model(), numWorkers=1, epochs=8, batchSize=8, callbacks=[Slow()], verbose=0, **options
    ).fit(frame)
    ended.set()
    watcher.join()
    # In the order in which the stages began.
    in_order = [copies[stage] for stage in sorted(copies)]
    return {"copies": in_order, "weights": weights_of(fitted).tolist(), "epochs": len(fitted.history["loss"])}

results = {"synchronous": fit(), "asynchronous": fit(mode="asynchronous", serverPlacement="executors")}
print(json.dumps(results))
session.stop()
"""
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    # Of stages with no more tasks than an executor has slots: whatever lasts longer gets a copy.
    "spark.speculation.task.duration.threshold": "3s",
}


@pytest.mark.slow("a cluster of its own, on which tasks run for seconds")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the loopback interface has one address")
@pytest.mark.timeout(300)
def test_fits_when_spark_speculates_then_every_batch_counts_once_and_ranks_have_no_copies(tmp_path, pytestconfig):
    script = tmp_path / "fit.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # Spark runs a copy on another host than the task, and tells hosts by their addresses.
    places = [Place("127.0.0.2"), Place("127.0.0.3")]
    with StandaloneCluster(places=places, cores=2, conf=CONF) as cluster:
        done = cluster.submit(script, pytestconfig.rootpath / "tests" / "support", timeout_s=270)
    assert done.returncode == 0, done.stderr[-5000:]
    said = json.loads(done.stdout.splitlines()[-1])
    exact = counted(counting_data(ROWS), batch_size=8, epochs=EPOCHS)
    # The stage before the ranks' looks at the executors, and may last longer on a busy machine.
    assert said["synchronous"]["copies"][-1] == 0
    # The worker was overtaken by its copy; so would the server have been, which holds the only weights. The stage that
    # writes rows lasts long enough on a busy machine too.
    assert sum(copies > 0 for copies in said["asynchronous"]["copies"][1:]) >= 2
    for fit in said.values():
        np.testing.assert_array_equal(fit["weights"], exact)
        assert fit["epochs"] == EPOCHS
