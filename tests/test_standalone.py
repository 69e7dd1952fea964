"""The standalone cluster that other tests run on: it starts, trains what it is given, and leaves nothing behind."""

import json

import numpy as np
import psutil
import pytest
from keras_reference import classifier_data, fit_one_process, regression_model
from standalone_cluster import StandaloneCluster

ROWS = 24
APPLICATION = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pyspark.sql import SparkSession
from elephant import KerasEstimator
from keras_reference import classifier_data, regression_model
from spark_frames import partitioned_frame, split_rows

session = SparkSession.builder.getOrCreate()
rows = split_rows(classifier_data(24), (12, 12))
frame = partitioned_frame(session, rows, "features array<double>, label double")
options = dict(numWorkers=2, epochs=2, batchSize=12, shuffle=False, verbose=0)
fitted = KerasEstimator(model=regression_model("sgd"), **options).fit(frame)
master = session.sparkContext.master
print(json.dumps({"master": master, "weights": [weight.tolist() for weight in fitted.model.get_weights()]}))
session.stop()
"""


@pytest.mark.spark
# More than the cluster may take to start, and the application to end.
@pytest.mark.timeout(500)
def test_submit_when_the_application_fits_then_it_trains_on_the_cluster_and_nothing_is_left(tmp_path, pytestconfig):
    script = tmp_path / "application.py"
    script.write_text(APPLICATION, encoding="utf-8")
    before = set(psutil.Process().children(recursive=True))
    with StandaloneCluster(2) as cluster:
        folder = cluster.folder
        done = cluster.submit(script, pytestconfig.rootpath / "tests" / "support")
        assert done.returncode == 0, done.stderr
        said, master = json.loads(done.stdout.splitlines()[-1]), cluster.url
        executors = cluster.executor_logs()
    assert said["master"] == master
    assert len(executors) == 2
    expected, _ = fit_one_process(regression_model("sgd"), [classifier_data(ROWS)] * 2, epochs=2)
    for weight, wanted in zip(said["weights"], expected, strict=True):
        np.testing.assert_allclose(np.array(weight), wanted, atol=1e-5)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not folder.exists()


@pytest.mark.spark
def test_enter_when_a_worker_cannot_start_then_its_output_is_told_and_nothing_is_left():
    before = set(psutil.Process().children(recursive=True))
    cluster = StandaloneCluster(1, worker_properties={"spark.worker.resource.gpu.amount": "1"})
    with pytest.raises(RuntimeError, match="worker-0 of the standalone cluster did not start(?s:.*)gpu"), cluster:
        pass
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not cluster.folder.exists()
