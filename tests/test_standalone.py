"""The standalone cluster that other tests run on: it starts, runs what it is given, and leaves nothing behind."""

import json

import psutil
import pytest
from standalone_cluster import StandaloneCluster

APPLICATION = """
import json
import elephant
from pyspark.sql import SparkSession

session = SparkSession.builder.getOrCreate()
ranks = elephant.run(lambda: elephant.collective.rank(), num_workers=2, verbose=0)
print(json.dumps({"master": session.sparkContext.master, "ranks": ranks}))
session.stop()
"""


@pytest.mark.slow("a cluster of its own; tests/spark_jobs submit to one")
@pytest.mark.spark
# More than the cluster may take to start, and the application to end.
@pytest.mark.timeout(500)
def test_submit_when_the_application_runs_ranks_then_they_are_on_the_cluster_and_nothing_is_left(tmp_path):
    script = tmp_path / "application.py"
    script.write_text(APPLICATION, encoding="utf-8")
    before = set(psutil.Process().children(recursive=True))
    with StandaloneCluster(2) as cluster:
        folder = cluster.folder
        done = cluster.submit(script)
        assert done.returncode == 0, done.stderr
        said, master = json.loads(done.stdout.splitlines()[-1]), cluster.url
        executors = cluster.executor_logs()
    assert said["master"] == master
    assert len(executors) == 2
    assert said["ranks"] == [0, 1]
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not folder.exists()


@pytest.mark.slow("a cluster of its own")
@pytest.mark.spark
def test_enter_when_a_worker_cannot_start_then_its_output_is_told_and_nothing_is_left():
    before = set(psutil.Process().children(recursive=True))
    cluster = StandaloneCluster(1, worker_properties={"spark.worker.resource.gpu.amount": "1"})
    with pytest.raises(RuntimeError, match="worker-0 of the standalone cluster did not start(?s:.*)gpu"), cluster:
        pass
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not cluster.folder.exists()
