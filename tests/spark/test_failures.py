"""What a user sees when something fails in mid-training, and that nothing is left afterwards."""

import dataclasses
import os
import signal
import threading
import time

import keras
import psutil
import pytest
from keras_reference import classifier_data, regression_model
from process_tree import executor_of, task_of
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.cluster.executors import running_executors
from elephant.config import Timeouts
from elephant.errors import JobCancelledError, TrainingError, WorkerFailure

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


def executor_above(process_id):
    """Returns the Java process of the executor that a training process belongs to, and Spark's id of it."""
    java = executor_of(process_id)
    command = java.cmdline()
    return java, command[command.index("--executor-id") + 1]


def test_fit_when_a_callback_raises_then_the_error_is_that_rank_s_and_what_all_print_is_shown(spark, capsys):
    class Boom(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            import logging
            import os

            import elephant

            print(f"rank {elephant.collective.rank()} prints")
            logging.getLogger("mine").warning("logs in epoch %d", epoch)
            if epoch == 0:
                # What nobody can read, or show, must not end a fit.
                os.write(1, b"\xff\xfe\x00\x1b[2J broken\n")
                os.write(2, b"long " * 500_000 + b"\n")
                for line in range(2000):
                    print("flood", line)

        def on_train_batch_end(self, batch, logs=None):
            if self.params["steps"] == 10 and self.model.optimizer.iterations == 14:
                raise ValueError("boom in step 14")

    with pytest.raises(WorkerFailure) as failure:
        KerasEstimator(
            model=regression_model("sgd"), numWorkers=2, epochs=2, batchSize=4, callbacks=[Boom()], verbose=2
        ).fit(frame_of(spark))
    error = failure.value
    assert error.rank in (0, 1) and error.host == "127.0.0.1" and error.executor.isdigit() and error.step == 14
    assert error.summary == "ValueError: boom in step 14"
    assert 'raise ValueError("boom in step 14")' in error.traceback
    assert "logs in epoch 1" in error.log_tail
    shown = capsys.readouterr().out
    for rank in (0, 1):
        assert f"[rank {rank}, 127.0.0.1] rank {rank} prints" in shown
        assert f"[rank {rank}, 127.0.0.1] logs in epoch 0" in shown
    assert "lines are left out: it prints more than can be shown" in shown
    assert "\x1b" not in shown and len(shown) < 100_000


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


def test_fit_when_a_row_cannot_be_computed_then_ends_with_spark_s_words_and_takes_no_executor(spark):
    rows = frame_of(spark).selectExpr("features", "if(label > 0 AND rand() >= 0, raise_error('bad row'), label) label")
    before = {executor.name for executor in running_executors(spark)}
    with pytest.raises(TrainingError, match="bad row"):
        KerasEstimator(model=regression_model("sgd"), numWorkers=2, verbose=0).fit(rows)
    # The task of one rank has failed while the other one's waited for it, or was about to.
    again = KerasEstimator(model=regression_model("sgd"), numWorkers=2, verbose=0).fit(frame_of(spark))
    assert len(again.history["loss"]) == 1
    assert {executor.name for executor in running_executors(spark)} == before


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


@pytest.mark.parametrize("end", ["its Spark task", "its executor"])
def test_fit_when_what_runs_a_rank_is_killed_then_names_that_rank_in_seconds(spark, tmp_path, end):
    killed, executors = [], []

    def kill(ids):
        java, executor = executor_above(ids[0])
        executors.append(executor)
        (java if end == "its executor" else task_of(ids[0])).kill()
        killed.append(time.monotonic())

    watcher = when_training(tmp_path, kill)
    with pytest.raises(WorkerFailure, match="ended without a word, and so did its Spark task") as failure:
        long_fit(spark, tmp_path)
    assert time.monotonic() - killed[0] < 15
    watcher.join()
    assert [failure.value.executor] == executors and failure.value.step >= 1
    if end == "its executor":
        again = KerasEstimator(model=regression_model("sgd"), numWorkers=2, verbose=0).fit(frame_of(spark))
        assert len(again.history["loss"]) == 1


def test_fit_when_a_training_process_freezes_then_the_driver_gives_up(spark, tmp_path):
    class Impatient(KerasEstimator):
        def fit_config(self):
            return dataclasses.replace(super().fit_config(), timeouts=Timeouts(heartbeat_s=4.0))

    # A frozen process cannot let go by itself: that none is left is for the fixture to see.
    watcher = when_training(tmp_path, lambda ids: os.kill(ids[1], signal.SIGSTOP))
    with pytest.raises(WorkerFailure, match="nothing was heard from it for 4 s"):
        long_fit(spark, tmp_path, estimator=Impatient)
    watcher.join()


MODES = {
    "synchronous": {},
    "asynchronous": {"mode": "asynchronous"},
    "servers on executors": {"mode": "asynchronous", "serverPlacement": "executors"},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_fit_when_its_job_group_is_cancelled_then_says_so_and_leaves_nothing(spark, tmp_path, options):
    ended = []

    def cancel(ids):
        spark.sparkContext.cancelJobGroup("nightly")
        _, left = psutil.wait_procs([psutil.Process(number) for number in ids], timeout=30)
        ended.append(not left)

    spark.sparkContext.setJobGroup("nightly", "a fit that somebody cancels")
    watcher = when_training(tmp_path, cancel)
    try:
        with pytest.raises(JobCancelledError, match="cancelled job group nightly"):
            long_fit(spark, tmp_path, **options)
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    watcher.join()
    assert ended == [True]


def test_fit_when_interrupted_with_servers_on_executors_then_ends_and_leaves_nothing(spark, tmp_path):
    watcher = when_training(tmp_path, lambda ids: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        long_fit(spark, tmp_path, **MODES["servers on executors"])
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
