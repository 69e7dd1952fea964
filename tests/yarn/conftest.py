"""YARN and HDFS for the jobs, and what these are given."""

import pytest
from hadoop_cluster import HadoopCluster
from maven_jars import JarsUnavailableError
from spark_submit import write_inputs

# A job that has the whole cluster has more than its share.
QUEUES = {"default": 50, "urgent": 50}


@pytest.fixture(scope="session")
def hadoop():
    try:
        with HadoopCluster(3, queues=QUEUES) as running:
            yield running
    except JarsUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def inputs(hadoop, tmp_path_factory):
    """A folder of this machine with the user's code; the data and a model are in ``/in`` of HDFS."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    with open(folder / "net_of_user.py", "a", encoding="utf-8") as file:
        file.write(SLOW)
    hadoop.put("/in", folder / "data.parquet", folder / "model.keras")
    return folder


SLOW = """

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        import time

        time.sleep(0.05)
"""
