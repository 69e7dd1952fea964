"""Every mode that `SparkModel` is asked for really runs: what only it does is counted where it is."""

import json
import os

import keras
import numpy as np
import pyspark.rdd
import pytest
from counting_model import counted, counting_data, counting_model

import elephant.driver.server_processes as servers
from elephant import SparkModel

ROWS, BATCH, EPOCHS, WORKERS = 32, 4, 2, 2
STEPS = ROWS // WORKERS // BATCH


def spying_callback(folder):
    """Returns a callback that counts, in the process of a rank, how often weights or gradients go to all ranks."""

    class Spy(keras.callbacks.Callback):
        def __setstate__(self, state):
            # In the process of a rank, before its step is made: the kernel of TensorFlow would exchange without Python.
            os.environ["ELEPHANT_EXCHANGE"] = "callback"
            vars(self).update(state)

        def on_train_batch_end(self, batch, logs=None):
            """Looks at batches, and so runs on the workers."""

        def on_train_begin(self, logs=None):
            from elephant.collective import api

            self.collective, self.float32 = api.current_collective(), 0
            kind = type(self.collective)
            self.original = kind.allreduce_

            def counting(collective, array, *args, **kwargs):
                self.float32 += array.dtype == "float32"
                return self.original(collective, array, *args, **kwargs)

            kind.allreduce_ = counting

        def on_train_end(self, logs=None):
            type(self.collective).allreduce_ = self.original
            with open(f"{folder}/rank-{self.collective.rank}", "w") as file:
                json.dump({"world_size": self.collective.world_size, "exchanges": int(self.float32)}, file)

    return Spy()


@pytest.fixture
def spied(monkeypatch):
    """Collects what is asked of Spark and of server processes, and lets it happen."""
    seen = {"barriers": 0, "plain": 0, "locked": []}
    in_barrier, plain, served = (
        pyspark.rdd.RDDBarrier.mapPartitions,
        pyspark.rdd.RDD.mapPartitions,
        servers.ServerProcess.__init__,
    )

    def map_in_barrier(self, f, *args, **kwargs):
        seen["barriers"] += 1
        return in_barrier(self, f, *args, **kwargs)

    def map_plain(self, f, *args, **kwargs):
        seen["plain"] += "run_on_records" in repr(f)
        return plain(self, f, *args, **kwargs)

    def serve(self, spec, *args, **kwargs):
        seen["locked"].append(spec.locked)
        served(self, spec, *args, **kwargs)

    monkeypatch.setattr(pyspark.rdd.RDDBarrier, "mapPartitions", map_in_barrier)
    monkeypatch.setattr(pyspark.rdd.RDD, "mapPartitions", map_plain)
    monkeypatch.setattr(servers.ServerProcess, "__init__", serve)
    return seen


def rdd_of(spark, columns):
    pairs = list(zip(columns["features"], columns["label"], strict=True))
    return spark.sparkContext.parallelize(pairs, WORKERS)


@pytest.mark.slow("a fit; tests/rank/test_local_sgd.py holds all frequencies without Spark")
def test_fit_when_synchronous_then_ranks_of_a_barrier_stage_exchange_as_often_as_asked(spark, spied, tmp_path):
    columns, model = counting_data(ROWS), counting_model()
    trained = SparkModel(model, "synchronous", 3, WORKERS, BATCH)
    history = trained.fit(rdd_of(spark, columns), EPOCHS, verbose=0, callbacks=[spying_callback(tmp_path)])
    told = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(WORKERS)]
    assert told == [{"world_size": WORKERS, "exchanges": EPOCHS * -(-STEPS // 3)}] * WORKERS
    assert spied == {"barriers": 1, "plain": 0, "locked": []}
    # The gradient does not depend on the weights, so averages of either have the same sum.
    expected = counted(columns, batch_size=BATCH * WORKERS, epochs=EPOCHS)
    np.testing.assert_array_equal(model.get_weights()[0][:, 0], expected)
    assert (
        trained.training_statistics == {"refused_connections": {}} and int(model.optimizer.iterations) == EPOCHS * STEPS
    )
    assert trained.training_histories == [history.history] and len(history.history["loss"]) == EPOCHS


@pytest.mark.parametrize(
    "mode", ["asynchronous", pytest.param("hogwild", marks=pytest.mark.slow("the same, without locks"))]
)
def test_fit_when_asynchronous_then_a_server_counts_a_push_of_every_step(spark, spied, mode):
    columns, model = counting_data(ROWS), counting_model()
    trained = SparkModel(model, mode=mode, batch_size=BATCH)
    trained.fit(rdd_of(spark, columns), epochs=EPOCHS, verbose=0)
    assert spied == {"barriers": 0, "plain": 1, "locked": [mode == "asynchronous"]}
    assert trained.training_statistics["updates"] == WORKERS * EPOCHS * STEPS
    assert len(trained.training_statistics["positions"]) == WORKERS
    if mode == "asynchronous":
        # Gradients are applied each by itself.
        np.testing.assert_array_equal(model.get_weights()[0][:, 0], counted(columns, batch_size=BATCH, epochs=EPOCHS))
    else:
        # Without locks an addition may be lost.
        assert np.abs(model.get_weights()[0]).max() > 0
    assert len(trained.training_histories[0]["loss"]) == EPOCHS
