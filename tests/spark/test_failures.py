"""What a user sees when something fails in mid-training, and that nothing is left afterwards."""

import dataclasses
import os
import signal
import threading
import time

import keras
import pytest
from keras_reference import classifier_data, regression_model
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.config import Timeouts
from elephant.errors import WorkerFailure

SCHEMA = "features array<double>, label double"


def frame_of(spark, sizes=(40, 40)):
    return partitioned_frame(spark, split_rows(classifier_data(sum(sizes)), sizes), SCHEMA)


def slow_callback(marker=None):
    """Returns a callback that makes a fit last, and writes its process' id once training has begun."""

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import os
            import time

            if marker is not None:
                with open(os.path.join(marker, str(os.getpid())), "w"):
                    pass
            time.sleep(0.1)

    return Slow()


def when_training(marker, action, ranks=2):
    """Calls ``action`` with the ranks' process ids, in a thread, once all of them train."""

    def watch():
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            ids = sorted(int(name) for name in os.listdir(marker))
            if len(ids) == ranks:
                action(ids)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch, name="fault", daemon=True)
    thread.start()
    return thread


def long_fit(spark, marker, estimator=KerasEstimator, **options):
    return estimator(
        model=regression_model("sgd"),
        numWorkers=2,
        epochs=1000,
        batchSize=8,
        callbacks=[slow_callback(str(marker))],
        verbose=0,
        **options,
    ).fit(frame_of(spark))


def test_fit_when_a_callback_raises_in_step_3_then_the_error_is_that_rank_s(spark):
    class Boom(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise ValueError("boom in step 3")

    with pytest.raises(WorkerFailure) as failure:
        KerasEstimator(
            model=regression_model("sgd"), numWorkers=2, epochs=2, batchSize=4, callbacks=[Boom()], verbose=0
        ).fit(frame_of(spark))
    assert failure.value.rank in (0, 1) and failure.value.host == "127.0.0.1"
    assert failure.value.summary == "ValueError: boom in step 3"
    assert 'raise ValueError("boom in step 3")' in failure.value.traceback


def test_fit_when_a_layer_fails_on_one_rank_then_the_error_is_not_its_peer_s(spark):
    frame = partitioned_frame(
        spark,
        [[([0.0, 1.0], 0)] * 8, [([1.0, 0.0], 7)] * 8],
        "features array<double>, label int",
    )
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(WorkerFailure, match="label value of 7 which is outside the valid range") as failure:
        KerasEstimator(model=model, numWorkers=2, batchSize=4, verbose=0).fit(frame)
    assert failure.value.rank == 1


def test_fit_when_a_training_process_is_killed_then_fails_in_seconds(spark, tmp_path):
    killed = []

    def kill(ids):
        os.kill(ids[0], signal.SIGKILL)
        killed.append(time.monotonic())

    watcher = when_training(tmp_path, kill)
    with pytest.raises(WorkerFailure, match=r"killed \(signal 9\)"):
        long_fit(spark, tmp_path)
    watcher.join()
    assert time.monotonic() - killed[0] < 20


def test_fit_when_a_training_process_freezes_then_the_driver_gives_up(spark, tmp_path):
    class Impatient(KerasEstimator):
        def fit_config(self):
            return dataclasses.replace(super().fit_config(), timeouts=Timeouts(heartbeat_s=4.0))

    # A frozen process cannot let go by itself: that none is left is for the fixture to see.
    watcher = when_training(tmp_path, lambda ids: os.kill(ids[1], signal.SIGSTOP))
    with pytest.raises(WorkerFailure, match="nothing was heard from it for 4 s"):
        long_fit(spark, tmp_path, estimator=Impatient)
    watcher.join()


def test_fit_when_interrupted_then_ends_and_another_fit_works(spark, tmp_path):
    watcher = when_training(tmp_path, lambda ids: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        long_fit(spark, tmp_path)
    watcher.join()
    again = KerasEstimator(model=regression_model("sgd"), numWorkers=2, verbose=0).fit(frame_of(spark))
    assert len(again.history["loss"]) == 1


def test_fit_when_code_is_missing_on_the_executors_then_says_how_to_ship_it(spark, tmp_path, monkeypatch):
    (tmp_path / "only_on_the_driver.py").write_text(
        "import keras\nclass Here(keras.callbacks.Callback):\n    pass\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import only_on_the_driver

    from elephant.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="No module named 'only_on_the_driver'.*--py-files"):
        KerasEstimator(model=regression_model("sgd"), callbacks=[only_on_the_driver.Here()], verbose=0).fit(
            frame_of(spark)
        )


def test_fits_when_two_run_at_once_then_both_are_right(spark):
    fitted, errors = {}, []
    # Built here: Keras draws initial weights from one seed of the process, which two threads would share.
    models = {name: regression_model(keras.optimizers.SGD(rate)) for name, rate in (("still", 1e-9), ("moving", 0.5))}

    def run(name):
        try:
            fitted[name] = KerasEstimator(model=models[name], numWorkers=1, batchSize=80, verbose=0).fit(
                frame_of(spark)
            )
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == []
    start = regression_model("sgd").get_weights()[0]
    assert abs(fitted["still"].model.get_weights()[0] - start).max() < 1e-6
    assert abs(fitted["moving"].model.get_weights()[0] - start).max() > 1e-3
