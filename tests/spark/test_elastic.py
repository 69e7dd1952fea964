"""Elastic fits on executors that are lost and come back: weights, rows and sizes, and what is refused."""

import json
import os
import subprocess
import sys
import time

import keras
import numpy as np
import psutil
import pytest
from elastic_reference import elastic_batches
from keras_reference import classifier_data, fit_one_process, largest_difference, regression_model
from process_tree import executor_of
from tiers import in_tiers

from elephant import KerasEstimator, SparkModel
from elephant.cluster.executors import count_slots
from elephant.cluster.piece_rows import partition_keys, spark_hash
from elephant.data.virtual_shards import number_of_pieces
from elephant.driver.elastic import fit as elastic_fit
from elephant.errors import ClusterError, ConfigurationError, UnsupportedError
from elephant.monitor.meetings import Meetings

SCHEMA = "features array<double>, label double"
BATCH, SEED = 4, 5


def frame_of(spark, columns):
    rows = [(row.tolist(), float(label)) for row, label in zip(columns["features"], columns["label"], strict=True)]
    return spark.createDataFrame(rows, SCHEMA)


def with_pieces(frame, columns, most):
    """Returns the columns with the piece of each row, as Spark computes its hash."""
    found = frame.selectExpr("label", f"pmod(xxhash64(features, label), {number_of_pieces(most)}) AS piece").collect()
    by_label = {np.float32(row["label"]): row["piece"] for row in found}
    assert len(by_label) == len(columns["label"])
    return {**columns, "piece": np.array([by_label[label] for label in columns["label"]])}


class Rows(keras.callbacks.Callback):
    """Writes its process' id, makes steps last, and awaits before some epochs that slots are there."""

    def __init__(self, folder, awaited):
        super().__init__()
        self.folder, self.awaited = folder, awaited

    def on_epoch_begin(self, epoch, logs=None):
        import os
        import time

        file, since = os.path.join(self.folder, f"slots of {epoch}"), time.monotonic()
        while epoch in self.awaited and not os.path.exists(file) and time.monotonic() - since < 100:
            time.sleep(0.05)

    def on_train_batch_end(self, batch, logs=None):
        import os
        import time

        with open(os.path.join(self.folder, str(os.getpid())), "w"):
            pass
        time.sleep(0.05)


class Moved(keras.callbacks.Callback):
    """On the workers: has eight virtual shards move to the second of two after the first epoch that they train."""

    def on_train_batch_begin(self, batch, logs=None):
        from elephant.data.piece_balance import PieceBalance

        owners = tuple(1 if piece < 8 else piece % 2 for piece in range(32))
        PieceBalance.epoch_ended = lambda balance, *_: owners if len(balance._rows) == 2 else None


class Hosts(keras.callbacks.Callback):
    """On the driver: at the end of epochs it takes executors, and gives their slots back.

    Args:
        folder: Of `Rows`.
        limit: Where the number of slots that the cluster is to have at most is changed.
        changes: By epoch how many slots there are afterwards; fewer than before kills an executor of a worker.
        slots: Returns those that the cluster has, which starts the executor anew that was killed.
    """

    def __init__(self, folder, limit, changes, slots):
        super().__init__()
        self.folder, self.limit, self.changes, self.slots = folder, limit, dict(changes), slots

    def on_epoch_end(self, epoch, logs=None):
        slots = self.changes.pop(epoch, None)
        if slots is None:
            return
        if slots < self.limit[0]:
            alive = [int(name) for name in os.listdir(self.folder) if name.isdigit() and psutil.pid_exists(int(name))]
            executor_of(max(alive)).kill()
        else:
            self.await_slots(slots)
        self.limit[0] = slots
        with open(os.path.join(self.folder, f"slots of {epoch + 1}"), "w"):
            pass

    def await_slots(self, number):
        since = time.monotonic()
        while self.slots() < number and time.monotonic() - since < 90:
            time.sleep(0.2)


def fit_with_hosts(spark, monkeypatch, tmp_path, *, begins, changes, workers, epochs, callbacks=(), **options):
    limit, slots = [begins], elastic_fit.free_slots
    monkeypatch.setattr(
        elastic_fit, "free_slots", lambda session, own=0, profile=None: min(slots(session, own), limit[0])
    )
    absent = Meetings.absent

    def gone(self, ranks):
        # Spark is quick to replace an executor: the next attempt has the slots that the cluster is said to have.
        missing, since = absent(self, ranks)
        return missing, since - (1000.0 if self.generation else 0.0)

    monkeypatch.setattr(Meetings, "absent", gone)
    columns = classifier_data(47)
    frame = frame_of(spark, columns)
    model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9), metrics=["mae"])
    # Of a change to fewer none: the epoch's ranks are lost.
    before = [begins, *changes.values()]
    awaited = [epoch + 1 for (epoch, now), then in zip(changes.items(), before, strict=False) if now > then]
    fitted = KerasEstimator(
        model=model, numWorkers=workers, epochs=epochs, batchSize=BATCH, seed=SEED, verbose=0,
        callbacks=[Rows(str(tmp_path), awaited), *callbacks],
        driverCallbacks=[Hosts(str(tmp_path), limit, changes, lambda: count_slots(spark))],
        timeouts={"slots_s": 20.0}, **options,
    ).fit(frame)  # fmt: skip
    most = workers[1]
    batches = elastic_batches(
        with_pieces(frame, columns, most),
        pieces=number_of_pieces(most),
        global_rows=BATCH * most,
        seed=SEED,
        epochs=epochs,
    )
    expected, history = fit_one_process(model, list(batches), epochs=epochs)
    assert largest_difference(fitted.model.get_weights(), expected) <= 1e-5
    for name in ("loss", "mae"):
        assert fitted.history[name] == pytest.approx(history[name], rel=1e-4)
    statistics = fitted.training_statistics
    # What is told of ranks is of those of the end.
    ranks = list(range(statistics["workers"][-1]))
    assert [place["rank"] for place in fitted.summary.plan] == [place["rank"] for place in fitted.plan] == ranks
    assert sorted({times["rank"] for times in fitted.summary.ranks}) == ranks
    return statistics


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("by_value")
def test_fit_when_rows_move_and_an_executor_is_lost_and_comes_back_then_goes_2_1_2_and_equals_one_process(
    spark, monkeypatch, tmp_path
):
    # With a folder there is a state of every epoch's end, where the fit looks for slots; in memory they are fewer.
    statistics = fit_with_hosts(
        spark, monkeypatch, tmp_path, begins=2, changes={1: 1, 3: 2}, workers=(1, 2), epochs=6, callbacks=[Moved()],
        checkpointPath=str(tmp_path / "checkpoints"),
    )  # fmt: skip
    assert statistics["workers"] == [2, 1, 2] and statistics["restarts"] == 1
    # After the first epoch of two workers: of those that begin, and of those of the end, where they have a second one.
    moves = statistics["moves"]
    assert [move["epoch"] for move in moves] in ([0], [0, 4])
    assert all(move["moves"][0][:2] == [0, 1] and sum(move["rows"]) == 47 for move in moves)


@pytest.mark.slow("test_fit_when_rows_move_and_an_executor_is_lost holds the promise")
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("by_value")
def test_fit_when_hosts_are_added_and_removed_with_states_on_disk_then_equals_one_process(spark, monkeypatch, tmp_path):
    folder = tmp_path / "marks"
    folder.mkdir()
    statistics = fit_with_hosts(
        spark, monkeypatch, folder, begins=1, changes={0: 3, 2: 2, 4: 3}, workers=(1, 3), epochs=7,
        checkpointPath=str(tmp_path / "checkpoints"), checkpointSeconds=0.05,
    )  # fmt: skip
    assert statistics["workers"] == [1, 3, 2, 3] and statistics["restarts"] == 1


def test_hash_when_computed_here_then_is_spark_s_and_its_keys_reach_every_partition(spark):
    numbers = [0, 1, 2, 77, 123456, 2**31 - 1]
    found = [row[0] for row in spark.createDataFrame([(n,) for n in numbers], "n int").selectExpr("hash(n)").collect()]
    assert [spark_hash(number) for number in numbers] == found
    for count in (1, 2, 3, 8):
        keys = partition_keys(count)
        placed = spark.createDataFrame([(key,) for key in keys], "key int").repartition(count, "key")
        rows = placed.selectExpr("key", "spark_partition_id() AS place").collect()
        assert {row["key"]: row["place"] for row in rows} == {key: place for place, key in enumerate(keys)}


def test_fit_when_slots_are_fewer_than_the_fewest_workers_then_says_what_to_do(spark, monkeypatch):
    monkeypatch.setattr(elastic_fit, "free_slots", lambda *_: 1)
    estimator = KerasEstimator(model=regression_model("sgd"), numWorkers=(2, 3), timeouts={"slots_s": 0.5}, verbose=0)
    with pytest.raises(
        ClusterError, match=r"numWorkers=\(2, 3\): expected at least 2 task slots within [01] s\. Received: 1\. Give"
    ):
        estimator.fit(frame_of(spark, classifier_data(12)))


REFUSED = {
    "asynchronous": ({"mode": "asynchronous"}, "mode='synchronous' with a pair .* Received: mode='asynchronous' with"),
    "gossip": ({"mode": "gossip"}, "mode='synchronous' with a pair"),
    "server": ({"aggregation": "server"}, "aggregation='allreduce' with a pair"),
    "frequency": ({"frequency": 4}, "frequency='batch' with a pair .* Received: frequency=4"),
    "compression": ({"compression": "topk"}, "no compression, or 'bfloat16', 'float16' or 'int8' with a pair"),
    "feedback": ({"compression": "int8:feedback"}, "no compression, or"),
    "stages": ({"pipelineStages": 2}, "no pipelineStages with a pair"),
    "buckets": ({"bucketByLength": True}, "bucketByLength=False with a pair"),
    "GPUs": ({"gpusPerWorker": 2}, "gpusPerWorker=1 with a pair"),
    "most below least": ({"numWorkers": (3, 2)}, r"numWorkers: expected an integer of at least 1, or the fewest .*"),
    "none": ({"numWorkers": (0, 2)}, r"numWorkers: expected .* Received: \(0, 2\)"),
    "three": ({"numWorkers": (1, 2, 3)}, r"numWorkers: expected .* Received: \(1, 2, 3\)"),
}


@pytest.mark.parametrize("case", in_tiers(REFUSED, fast=REFUSED, slow=""))
def test_estimator_when_a_pair_does_not_go_with_another_option_then_is_refused_by_name(case):
    options, message = case
    with pytest.raises(ConfigurationError, match=message):
        KerasEstimator(model=regression_model("sgd"), **{"numWorkers": (1, 2), **options})


def test_estimator_when_saved_with_a_pair_then_has_it_again(spark, tmp_path):
    KerasEstimator(model=regression_model("sgd"), numWorkers=(1, 2)).write().save(str(tmp_path / "estimator"))
    assert KerasEstimator.load(str(tmp_path / "estimator")).getNumWorkers() == (1, 2)


def test_estimator_when_the_numbers_are_no_integers_then_is_refused():
    with pytest.raises((TypeError, ConfigurationError), match="Received: .1.5, 2."):
        KerasEstimator(model=regression_model("sgd"), numWorkers=(1.5, 2))


def test_spark_model_when_given_a_pair_then_is_refused():
    with pytest.raises(ConfigurationError, match=r"num_workers: expected an integer of at least 1.* \(1, 2\)"):
        SparkModel(regression_model("sgd"), mode="synchronous", num_workers=(1, 2))


def test_fit_when_workers_read_files_themselves_then_a_pair_is_refused(spark, tmp_path):
    frame_of(spark, classifier_data(12)).write.parquet(str(tmp_path / "rows"))
    estimator = KerasEstimator(model=regression_model("sgd"), numWorkers=(1, 2), verbose=0)
    with pytest.raises(UnsupportedError, match=r"expected a DataFrame with a pair .* Received: files that the workers"):
        estimator.fit(str(tmp_path / "rows"))


DYNAMIC = """
import faulthandler, json, sys
# Where it stands, should it hang.
faulthandler.dump_traceback_later(240, exit=True)
from elephant.cluster.local import local_session
from elephant import KerasEstimator, SparkModel
from keras_reference import classifier_data, regression_model

prefix = "spark.dynamicAllocation."
conf = {prefix + name: value for name, value in {
    "enabled": "true", "shuffleTracking.enabled": "true", "minExecutors": "0", "initialExecutors": "0",
    "maxExecutors": "2"}.items()}
session = local_session(2, conf={"spark.sql.shuffle.partitions": "2", "spark.executor.cores": "1", **conf})
columns = classifier_data(47)
rows = [(row.tolist(), float(label)) for row, label in zip(columns["features"], columns["label"])]
frame = session.createDataFrame(rows, "features array<double>, label double")
fitted = KerasEstimator(
    model=regression_model("sgd"), numWorkers=(1, 2), epochs=2, batchSize=4, seed=5, verbose=2
).fit(frame)
pieces = [row[0] for row in frame.selectExpr("pmod(xxhash64(features, label), 32)").collect()]
weights = [weight.tolist() for weight in fitted.model.get_weights()]
session.stop()
print(json.dumps({"workers": fitted.training_statistics["workers"], "weights": weights, "pieces": pieces}))
"""


@pytest.mark.slow("a Spark application of its own")
@pytest.mark.timeout(300)
def test_fit_when_spark_starts_executors_on_demand_then_they_come_and_weights_equal_one_process(pytestconfig):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(pytestconfig.rootpath / "tests" / "support"),
                                                               str(pytestconfig.rootpath)])}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", DYNAMIC], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["workers"][-1] == 2
    columns = {**classifier_data(47), "piece": np.array(said["pieces"])}
    model = regression_model("sgd")
    batches = elastic_batches(columns, pieces=32, global_rows=BATCH * 2, seed=SEED, epochs=2)
    expected, _ = fit_one_process(model, list(batches), epochs=2)
    assert largest_difference([np.array(weight) for weight in said["weights"]], expected) <= 1e-5
