"""`KerasEstimator.submit`: fits in the background of a Spark application."""

import time

import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, global_batches, regression_model, split
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.errors import ConfigurationError, JobCancelledError

SCHEMA = "features array<double>, label double"
SIZES = (9, 7)
DEADLINE_S = 120


def test_fit_when_submitted_then_is_that_of_one_process_and_another_that_is_cancelled_ends_in_seconds(spark):
    columns = classifier_data(sum(SIZES))
    frame = partitioned_frame(spark, split_rows(columns, SIZES), SCHEMA)
    estimator = KerasEstimator(model=regression_model("sgd"), numWorkers=2, batchSize=4, epochs=10**6, shuffle=False)
    endless = estimator.submit(frame)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while endless.progress["state"] == "starting" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert endless.progress["state"] == "training" and endless.progress["epochs"] == 10**6
    finally:
        endless.cancel()
    with pytest.raises(JobCancelledError, match="cancelled by its handle"):
        endless.result(30)
    # Its slots are free.
    handle = estimator.submit(frame, epochs=2)
    fitted = handle.result(DEADLINE_S)
    assert handle.history == fitted.history and handle.progress["epoch"] == 2
    expected, _ = fit_one_process(regression_model("sgd"), list(global_batches(split(columns, SIZES), 4, 2)), epochs=2)
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)


def test_submit_when_an_option_is_wrong_then_says_so_at_once(spark):
    estimator = KerasEstimator(model=regression_model("sgd"))
    frame = spark.createDataFrame([([0.0], 0.0)], SCHEMA)
    with pytest.raises(TypeError, match="epochs"):
        estimator.submit(frame, epoch=3)
    with pytest.raises(ConfigurationError, match="epochs"):
        estimator.submit(frame, epochs=0)
