"""Fits and predictions in processes that an executor's fork server has made, one after the other in one session."""

import os
import time

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, regression_model
from process_tree import forked_in, predicts, runs
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator, KerasModel

SCHEMA = "features array<double>, label double"
SIZES = (12, 10, 8)
FORKED = "3 of 3 processes were forked from waiting ones"
WAIT_S = 90


def frame_of(spark):
    return partitioned_frame(spark, split_rows(classifier_data(sum(SIZES)), SIZES), SCHEMA)


def leaving(folder):
    """Returns a callback that writes down what is there before it, and leaves all it can in its process."""

    class Leaving(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            """Looks at batches, and so runs on the workers."""

        def on_train_begin(self, logs=None):
            import threading
            import time

            import keras

            threads = [thread.name for thread in threading.enumerate()]
            seen = ["LEFT_BEHIND" in os.environ, hasattr(keras, "left_behind"), "left-behind" in threads]
            with open(os.path.join(folder, f"{os.getpid()}-{os.getppid()}"), "w") as file:
                file.write(str(seen))
            os.environ["LEFT_BEHIND"] = "1"
            keras.left_behind = True
            keras.backend.set_floatx("float64")
            threading.Thread(target=time.sleep, args=(1000,), name="left-behind", daemon=True).start()

    return Leaving()


def fit(spark, workers=3, **options):
    model = regression_model(keras.optimizers.SGD(0.1))
    return KerasEstimator(model=model, numWorkers=workers, epochs=2, batchSize=30, shuffle=False, **options).fit(
        frame_of(spark)
    )


def assert_equals_one_process(fitted):
    columns = classifier_data(sum(SIZES))
    expected, _ = fit_one_process(regression_model(keras.optimizers.SGD(0.1)), [columns] * 2, epochs=2)
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        assert value.dtype == wanted.dtype
        np.testing.assert_allclose(value, wanted, atol=1e-5)


def test_fit_when_one_ran_before_then_is_forked_and_finds_nothing_of_it(spark, tmp_path, capsys):
    seen = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        fitted = fit(spark, callbacks=[leaving(str(folder))])
        assert FORKED in capsys.readouterr().out
        assert_equals_one_process(fitted)
        seen.append({path.name: path.read_text() for path in folder.iterdir()})
    first, second = seen
    assert len(first) == len(second) == 3 and not first.keys() & second.keys()
    assert set((first | second).values()) == {"[False, False, False]"}
    # The same servers have made them.
    assert {name.split("-")[1] for name in first} == {name.split("-")[1] for name in second}


@pytest.mark.slow("imports Keras in a process; tests/task/test_warm_processes.py holds the rule")
def test_fit_when_no_process_may_wait_then_none_is_forked(spark, capsys):
    spark.conf.set("spark.elephant.warmWorkers", "0")
    try:
        fitted = fit(spark, workers=1)
    finally:
        spark.conf.unset("spark.elephant.warmWorkers")
    shown = capsys.readouterr().out
    assert "training rows" in shown and "forked" not in shown
    assert_equals_one_process(fitted)


def test_predictions_when_python_workers_are_killed_then_no_process_and_no_folder_is_left(spark, local_folder):
    fitted = KerasModel(regression_model("sgd")).setLabelCol("label")
    rows = fitted.transform(frame_of(spark)).select("features", "prediction").collect()
    expected = fitted.model.predict(np.array([row.features for row in rows]), verbose=0)[:, 0]
    np.testing.assert_allclose([np.ravel(row.prediction)[0] for row in rows], expected, atol=1e-5)
    loss = fitted.evaluate(frame_of(spark))["loss"]
    columns = classifier_data(sum(SIZES))
    assert loss == pytest.approx(fitted.model.evaluate(columns["features"], columns["label"], verbose=0), rel=1e-4)
    predicting = [process for process in forked_in(local_folder) if predicts(process)]
    assert predicting
    for process in worker_daemons(spark):
        process.kill()
    await_none(lambda: [process for process in forked_in(local_folder) if predicts(process)])
    await_none(lambda: list(local_folder.glob("**/model-*")))


def worker_daemons(spark):
    """Returns Spark's Python workers and what has forked them."""
    import psutil

    return [process for process in psutil.Process().children(recursive=True) if runs(process, "pyspark.daemon")]


def await_none(found):
    deadline = time.monotonic() + WAIT_S
    while left := found():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
