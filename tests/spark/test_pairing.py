"""Every row leaves ``transform`` beside its own result, whatever Spark does to the plan and to the executors."""

import os
import pathlib
import signal
import threading
import time

import keras
import numpy as np
import pytest
from process_tree import processes_of
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)
from spark_frames import partitioned_frame

from elephant.modeling.model_spec import model_source
from elephant.spark.model import KerasModel

ROWS, PARTITIONS = 600, 6
WAIT_S = 120


def identity():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Activation("linear")(inputs))
    model.compile("sgd", "mse")
    return KerasModel(model_source(model))


def features_of(number):
    return [float(number), number * 0.5, float(number % 7)]


@pytest.fixture(scope="module")
def fitted():
    return identity()


@pytest.fixture(scope="module")
def frame(spark):
    rows = [(number, features_of(number)) for number in range(ROWS)]
    sizes = (0, 1, 200, 0, 399)
    bounds = np.cumsum([0, *sizes])
    parts = [rows[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    return partitioned_frame(spark, parts, "id int, features array<double>")


def require_pairs(rows, number=ROWS):
    assert len(rows) == number
    for row in rows:
        assert list(row.prediction) == [np.float32(value) for value in row.features]


def python_steps(frame):
    plan = frame._jdf.queryExecution().executedPlan().toString()
    return plan.count("ArrowEvalPython") + plan.count("MapInArrow")


def test_transform_when_rows_move_and_columns_are_random_then_rows_keep_their_own(frame, fitted):
    drawn = frame.select("id", F.array(F.rand(), F.rand() * 10, F.randn()).alias("features"))
    require_pairs(fitted.transform(drawn).collect())
    moved = drawn.withColumn("order", F.rand()).repartition(5).sortWithinPartitions("order")
    numbered = moved.withColumn("place", F.monotonically_increasing_id())
    predicted = fitted.transform(numbered).repartition(3, "place").cache()
    try:
        require_pairs(predicted.collect())
        drawn_rows = predicted.sample(0.5, seed=1).orderBy("id").collect()
        require_pairs(drawn_rows, len(drawn_rows))
        assert 100 < len(drawn_rows) < ROWS
    finally:
        predicted.unpersist()


def test_transform_when_predictions_are_used_again_and_again_then_the_model_runs_once(frame, fitted):
    predicted = fitted.transform(frame)
    first = F.col("prediction")[0]
    kept = predicted.filter(first >= 100).filter(F.col("id") % 2 == 0)
    again = kept.select("*", (first + 1).alias("more"), F.size("prediction").alias("size"))
    assert python_steps(again) == 1
    rows = again.collect()
    require_pairs(rows, (ROWS - 100) // 2)
    assert all(row.more == row.id + 1 and row.size == 3 for row in rows)
    # Nobody asks for the predictions: the model does not run.
    assert python_steps(predicted.select("id")) <= 1
    assert predicted.select("id").distinct().count() == ROWS


@pytest.mark.slow("four predictions of the same rows")
def test_transform_when_frames_are_joined_then_rows_keep_their_own(frame, fitted):
    predicted = fitted.transform(frame)
    second = fitted.copy({fitted.predictionCol: "second"})
    joined = predicted.join(second.transform(frame).select("id", "second"), "id").union(
        predicted.withColumn("second", F.col("prediction"))
    )
    rows = joined.collect()
    require_pairs(rows, 2 * ROWS)
    assert all(row.second == row.prediction for row in rows)
    means = predicted.groupBy((F.col("id") % 3).alias("key")).agg(F.avg(F.col("prediction")[0]).alias("mean")).collect()
    assert {row.key: row["mean"] for row in means} == {key: np.mean(range(key, ROWS, 3)) for key in range(3)}


def waiting(marker):
    """Returns a map that writes a file for each partition that it meets, and waits for leave to go on."""

    def run(batches):
        import pathlib
        import time
        import uuid

        folder = pathlib.Path(marker)
        (folder / f"met-{uuid.uuid4().hex}").touch()
        deadline = time.monotonic() + 120
        while not (folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield from batches

    return run


@pytest.mark.slow("an executor that comes back")
def test_transform_when_an_executor_is_killed_after_a_shuffle_then_rows_keep_their_own(spark, frame, fitted, tmp_path):
    killed = []

    def kill():
        deadline = time.monotonic() + WAIT_S
        folder = pathlib.Path(tmp_path)
        while time.monotonic() < deadline:
            if len(list(folder.glob("met-*"))) >= 2:
                victim = processes_of("org.apache.spark.executor.CoarseGrainedExecutorBackend")[0]
                os.kill(victim.pid, signal.SIGKILL)
                killed.append(victim.pid)
                break
            time.sleep(0.05)
        (folder / "go").touch()

    shuffled = frame.repartition(PARTITIONS).mapInArrow(waiting(str(tmp_path)), frame.schema)
    predicted = fitted.transform(
        fitted.copy({fitted.predictionCol: "before"}).transform(frame).select("id", "before").join(shuffled, "id")
    )
    thread = threading.Thread(target=kill, name="fault", daemon=True)
    thread.start()
    rows = predicted.collect()
    thread.join()
    assert killed
    require_pairs(rows)
    assert sorted(row.id for row in rows) == list(range(ROWS))
    assert all(row.before == row.prediction for row in rows)
