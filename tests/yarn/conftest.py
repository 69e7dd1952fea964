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
        with HadoopCluster(2, data_nodes=1, queues=QUEUES) as running:
            yield running
    except JarsUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def inputs(hadoop, tmp_path_factory):
    """A folder of this machine with the user's code; the data and a model are in ``/in`` of HDFS."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    with open(folder / "net_of_user.py", "a", encoding="utf-8") as file:
        file.write(CALLBACKS.format(folder=str(folder)))
    hadoop.put("/in", folder / "data.parquet", folder / "model.keras")
    return folder


# They look at batches, and so run on the workers, which are on this machine, too.
CALLBACKS = """

class Held(keras.callbacks.Callback):
    # From the fourth epoch on, each begins when the test says so.
    name = "epoch"

    def on_train_batch_end(self, batch, logs=None):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        import time

        while epoch >= 3 and not Path({folder!r}, f"{{self.name}}-{{epoch}}").exists():
            time.sleep(0.05)


class Killed(Held):
    name = "never"


class Hungry(keras.callbacks.Callback):
    # Takes more memory than a container has, in the second epoch of a fit that began with the first one.
    first = None

    def on_train_batch_end(self, batch, logs=None):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        import time

        self.first = epoch if self.first is None else self.first
        if self.first < epoch:
            taken = [b"x" * 2**26 for _ in range(40)]
            time.sleep(60)
"""
