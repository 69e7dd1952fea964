"""Fits that are lost and go on, in a real cluster: the result is that of one process that nobody disturbed."""

import os
import signal
import threading
import time

import keras
import psutil
import pytest
from keras_reference import (
    classifier_data,
    fit_one_process,
    global_batches,
    largest_difference,
    regression_model,
    split,
)
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.errors import ConfigurationError

SIZES = (20, 14)
SCHEMA = "features array<double>, label double"


def frame_of(spark):
    return partitioned_frame(spark, split_rows(classifier_data(sum(SIZES)), SIZES), SCHEMA)


def model():
    return regression_model(keras.optimizers.Adam(0.01))


def estimator(epochs, **options):
    return KerasEstimator(model=model(), numWorkers=2, epochs=epochs, batchSize=5, shuffle=False, verbose=1, **options)


def undisturbed(epochs):
    parts = split(classifier_data(sum(SIZES)), SIZES)
    return fit_one_process(model(), list(global_batches(parts, 5, epochs)), epochs)


def require_undisturbed(fitted, epochs):
    weights, history = undisturbed(epochs)
    assert largest_difference(fitted.model.get_weights(), weights) <= 1e-5
    assert fitted.history["loss"] == pytest.approx(history["loss"], rel=1e-4)


def waiting_callback(folder):
    """Returns a callback that writes its process' id in the third epoch, and waits there, in the first attempt."""

    class Wait(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            import os
            import time

            import elephant

            go = os.path.join(folder, "go")
            if self.epoch == 2 and batch == 1 and not os.path.exists(go):
                name = f"{os.getpid()}-{elephant.collective.rank()}"
                open(os.path.join(folder, name), "w").close()
                while not os.path.exists(go):
                    time.sleep(0.05)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    return Wait()


def once_waiting(folder, action):
    """Calls ``action`` with the process id of rank 1, in a thread, when both ranks wait; then lets them go."""

    def watch():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            names = [name for name in os.listdir(folder) if "-" in name]
            if len(names) == 2:
                action(next(int(name.split("-")[0]) for name in names if name.endswith("-1")))
                (folder / "go").touch()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch, name="fault", daemon=True)
    thread.start()
    return thread


def executor_of(process_id):
    return next(
        parent
        for parent in psutil.Process(process_id).parents()
        if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in " ".join(parent.cmdline())
    )


def test_fit_when_a_training_process_is_killed_then_goes_on_and_equals_one_process(spark, tmp_path, capsys):
    path, folder = tmp_path / "kept", tmp_path / "ranks"
    folder.mkdir()
    watcher = once_waiting(folder, lambda process: os.kill(process, signal.SIGKILL))
    options = {"checkpointPath": path, "maxRestarts": 1, "callbacks": [waiting_callback(str(folder))]}
    fitted = estimator(4, **options).fit(frame_of(spark))
    watcher.join()
    require_undisturbed(fitted, 4)
    assert fitted.training_statistics == {"restarts": 1}
    printed = capsys.readouterr().out
    assert "starts again (1 of 1): rank 1" in printed and "going on after epoch 2 of 4" in printed
    assert len(list(path.glob("*.json"))) == 2

    # The same folder: not for a fit that begins anew, nor for another one; and nothing is left to train.
    with pytest.raises(ConfigurationError, match="has one of epoch 4. Pass resume=True"):
        estimator(4, checkpointPath=path).fit(frame_of(spark))
    with pytest.raises(ConfigurationError, match="seed: expected 0, with which the checkpoints"):
        estimator(4, checkpointPath=path, resume=True, seed=1).fit(frame_of(spark))
    require_undisturbed(estimator(4, checkpointPath=path, resume=True).fit(frame_of(spark)), 4)
    assert "nothing is left to train: 4 epochs are done" in capsys.readouterr().out
    require_undisturbed(estimator(5, checkpointPath=path, resume=True).fit(frame_of(spark)), 5)
