"""With speculation on, Spark starts tasks twice: ranks of a barrier stage never, workers and servers without harm."""

import json
import sys

import numpy as np
import pytest
from counting_model import counted, counting_data
from standalone_cluster import Place, StandaloneCluster

ROWS, EPOCHS = 64, 8
SCRIPT = """
import json, sys, time, keras
sys.path.insert(0, sys.argv[1])
from pyspark.sql import SparkSession
from elephant import KerasEstimator
from counting_model import counting_data, counting_model, weights_of
from spark_frames import partitioned_frame, split_rows

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)

session = SparkSession.builder.getOrCreate()

def fit(**options):
    rows = split_rows(counting_data(64), (64,))
    frame = partitioned_frame(session, rows, "features array<double>, label double")
    began = time.time()
    fitted = KerasEstimator(
        model=counting_model(), numWorkers=1, epochs=8, batchSize=8, callbacks=[Slow()], verbose=0, **options
    ).fit(frame)
    return {"began": began, "weights": weights_of(fitted).tolist(), "epochs": len(fitted.history["loss"])}

results = {"synchronous": fit(), "asynchronous": fit(mode="asynchronous", serverPlacement="executors")}
print(json.dumps(results))
session.stop()
"""
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    # Of stages with no more tasks than an executor has slots: whatever lasts longer gets a copy.
    "spark.speculation.task.duration.threshold": "3s",
    # What Spark has done, a line of JSON for each event.
    "spark.eventLog.enabled": "true",
    "spark.eventLog.rolling.enabled": "false",
    "spark.eventLog.compress": "false",
}


def copies_of_stages(lines):
    """Returns the time at which each stage began, in seconds, and how many copies of its tasks Spark has started."""
    began, copies = {}, {}
    for event in map(json.loads, lines):
        if event["Event"] == "SparkListenerStageSubmitted":
            stage = event["Stage Info"]
            began[stage["Stage ID"]] = stage["Submission Time"] / 1000
        elif event["Event"] == "SparkListenerTaskStart":
            copies[event["Stage ID"]] = copies.get(event["Stage ID"], 0) + event["Task Info"]["Speculative"]
    return [(began[stage], copies.get(stage, 0)) for stage in sorted(began)]


@pytest.mark.slow("a cluster of its own, on which tasks run for seconds")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the loopback interface has one address")
@pytest.mark.timeout(300)
def test_fits_when_spark_speculates_then_every_batch_counts_once_and_ranks_have_no_copies(tmp_path, pytestconfig):
    script = tmp_path / "fit.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # Spark runs a copy on another host than the task, and tells hosts by their addresses.
    places = [Place("127.0.0.2"), Place("127.0.0.3")]
    conf = {**CONF, "spark.eventLog.dir": tmp_path.as_uri()}
    with StandaloneCluster(places=places, cores=2, conf=conf) as cluster:
        done = cluster.submit(script, pytestconfig.rootpath / "tests" / "support", timeout_s=270)
    assert done.returncode == 0, done.stderr[-5000:]
    said = json.loads(done.stdout.splitlines()[-1])
    (log,) = tmp_path.glob("app-*")
    stages = copies_of_stages(log.read_text(encoding="utf-8").splitlines())
    # The stage of the ranks is the last one before the second fit; that before it looks at the executors.
    asynchronous = said["asynchronous"]["began"]
    assert [copies for began, copies in stages if began < asynchronous][-1] == 0
    # The worker and the server, which holds the only weights, had a copy each; the first stage looks at the executors.
    assert sum(copies > 0 for began, copies in stages if began >= asynchronous) >= 2
    exact = counted(counting_data(ROWS), batch_size=8, epochs=EPOCHS)
    for fit in said.values():
        np.testing.assert_array_equal(fit["weights"], exact)
        assert fit["epochs"] == EPOCHS
