"""The coordinator is beside rank 0: a classic session that is told so; see also tests/spark_connect."""

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, regression_model
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.errors import TrainingError, WorkerFailure

# Two fits that import Keras in three processes each, two of them at the same time.
pytestmark = pytest.mark.timeout(600)
SCHEMA = "features array<double>, label double"


@pytest.fixture
def hosted(spark):
    spark.conf.set("spark.elephant.coordinator", "executors")
    yield spark
    spark.conf.unset("spark.elephant.coordinator")


def callback_that_raises():
    # A class of its own function travels by value: executors have no modules of tests.
    class Raises(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            print("said before it fails", flush=True)
            raise RuntimeError("of the user's own")

    return Raises()


MODES = [
    ("synchronous", 2),
    pytest.param("asynchronous", 1, marks=pytest.mark.slow("the same fit in the other engine")),
]


def estimator_of(mode, workers, **options):
    model = regression_model(keras.optimizers.SGD(0.05))
    return KerasEstimator(model=model, numWorkers=workers, epochs=2, batchSize=40, mode=mode, **options)


def frame_of(spark):
    return partitioned_frame(spark, split_rows(classifier_data(40), [25, 15]), SCHEMA)


@pytest.mark.parametrize(("mode", "workers"), MODES)
def test_fit_when_rank_0_hosts_then_equals_one_process(hosted, capsys, mode, workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    # In the other engine its epochs are in the process of the host.
    writes = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: open("steps.txt", "a").write(f"{batch}\n"),
        on_epoch_end=lambda epoch, logs: open("epochs.txt", "a").write(f"{epoch}\n"),
    )
    estimator = estimator_of(mode, workers, callbacks=[look, writes])
    fitted = estimator.fit(frame_of(hosted))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["epochs.txt", "steps.txt"]
    assert (tmp_path / "epochs.txt").read_text() == "0\n1\n"
    if mode == "synchronous":
        # The driver's own object, when all has ended.
        assert seen == fitted.history["loss"]
    expected, _ = fit_one_process(estimator.getModel().model, [classifier_data(40)] * 2, epochs=2)
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)
    shown = capsys.readouterr().out
    assert "rank 0 coordinates this run" in shown and "2/2" in shown


@pytest.mark.slow("a fit; tests/driver/test_replay.py holds how errors travel")
def test_fit_when_rank_0_hosts_and_a_callback_raises_then_the_error_is_whole(hosted, capsys):
    with pytest.raises(WorkerFailure, match="of the user's own") as failed:
        estimator_of("synchronous", 2, callbacks=[callback_that_raises()]).fit(frame_of(hosted))
    assert failed.value.host and "on_epoch_end" in failed.value.traceback
    # The plan was heard before, and what the callback has said itself.
    shown = capsys.readouterr().out
    assert "training rows" in shown and "] said before it fails" in shown


def callback_that_ends_the_coordinator():
    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            import contextlib
            import os
            import signal
            import time

            import psutil

            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if "elephant.driver.coordinator_process" in process.cmdline():
                        os.kill(process.pid, signal.SIGKILL)
            time.sleep(60)

    return Ends()


@pytest.mark.slow("the wiring of Spark; tests/task/test_coordinator_task.py holds the rest")
def test_fit_when_the_coordinator_beside_rank_0_is_killed_then_names_it_and_blames_no_rank(hosted):
    with pytest.raises(TrainingError, match="the coordinator of the run, a process of its own beside rank 0") as failed:
        estimator_of("synchronous", 2, callbacks=[callback_that_ends_the_coordinator()]).fit(frame_of(hosted))
    assert failed.value.retryable and not isinstance(failed.value, WorkerFailure)
