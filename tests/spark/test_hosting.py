"""Rank 0 hosts what the driver hosts otherwise: a classic session that is told so; see also tests/spark_connect."""

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, regression_model
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.errors import WorkerFailure

# Two fits that import Keras in three processes each, two of them at the same time.
pytestmark = pytest.mark.timeout(600)
SCHEMA = "features array<double>, label double"


@pytest.fixture
def hosted(spark):
    spark.conf.set("spark.elephant.hosting", "executors")
    yield spark
    spark.conf.unset("spark.elephant.hosting")


def callback_that_raises():
    # A class of its own function travels by value: executors have no modules of tests.
    class Raises(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            print("said before it fails", flush=True)
            raise RuntimeError("of the user's own")

    return Raises()


@pytest.mark.parametrize(("mode", "workers"), [("synchronous", 2), ("asynchronous", 1)])
def test_fit_when_rank_0_hosts_then_equals_one_process_and_its_errors_are_whole(hosted, capsys, mode, workers):
    columns = classifier_data(40)
    frame = partitioned_frame(hosted, split_rows(columns, [25, 15]), SCHEMA)
    model = regression_model(keras.optimizers.SGD(0.05))
    options = {"model": model, "numWorkers": workers, "epochs": 2, "batchSize": 40, "mode": mode}
    fitted = KerasEstimator(**options).fit(frame)
    expected, _ = fit_one_process(model, [columns] * 2, epochs=2)
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)
    shown = capsys.readouterr().out
    assert "rank 0 hosts the channel of this run" in shown and "2/2" in shown
    with pytest.raises(WorkerFailure, match="of the user's own") as failed:
        KerasEstimator(callbacks=[callback_that_raises()], **options).fit(frame)
    assert failed.value.host and "on_epoch_end" in failed.value.traceback
    # The plan was heard before, and what the callback has said itself: in asynchronous mode both in the host's process.
    shown = capsys.readouterr().out
    assert "training rows" in shown and "] said before it fails" in shown
