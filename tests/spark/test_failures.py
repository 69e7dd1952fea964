"""What a user sees when something fails in mid-training, and that nothing is left afterwards.

Synchronous fits and `elephant.run` are the same barrier stage: what is the same for both is
in `test_run`, whose ranks import no Keras.
"""

import os
import signal
import threading
import time

import keras
import numpy as np
import psutil
import pytest
from keras_reference import classifier_data, regression_model
from process_tree import executor_of
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.cluster.executors import running_executors
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


def long_fit(spark, marker, **options):
    return KerasEstimator(
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

            total = elephant.collective.allreduce(np.array([10 + elephant.collective.rank()]))
            print(f"rank {elephant.collective.rank()} of {elephant.collective.world_size()} prints {total[0]}")
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
        assert f"[rank {rank}, 127.0.0.1] rank {rank} of 2 prints 21" in shown
    # Both do, and the first one's is shown.
    assert ", 127.0.0.1] logs in epoch 0\n" in shown
    assert "lines are left out: it prints more than can be shown" in shown
    assert "\x1b" not in shown and len(shown) < 100_000


@pytest.mark.slow("two fits")
def test_fit_when_a_row_cannot_be_computed_then_ends_with_spark_s_words_and_takes_no_executor(spark):
    rows = frame_of(spark).selectExpr("features", "if(label > 0 AND rand() >= 0, raise_error('bad row'), label) label")
    before = {executor.name for executor in running_executors(spark)}
    with pytest.raises(TrainingError, match="bad row"):
        KerasEstimator(model=regression_model("sgd"), numWorkers=2, verbose=0).fit(rows)
    # The task of one rank has failed while the other one's waited for it, or was about to.
    again = KerasEstimator(model=regression_model("sgd"), numWorkers=2, verbose=0).fit(frame_of(spark))
    assert len(again.history["loss"]) == 1
    assert {executor.name for executor in running_executors(spark)} == before


@pytest.mark.slow("two fits; test_run_when_the_spark_task_of_a_rank_is_killed holds the naming, this one its step")
def test_fit_when_an_executor_is_killed_then_names_its_rank_and_step_and_another_fit_works(spark, tmp_path):
    killed, executors = [], []

    def kill(ids):
        java, executor = executor_above(ids[0])
        executors.append(executor)
        java.kill()
        killed.append(time.monotonic())

    watcher = when_training(tmp_path, kill)
    with pytest.raises(
        WorkerFailure, match="its process and its Spark task were lost without an error report"
    ) as failure:
        long_fit(spark, tmp_path)
    assert time.monotonic() - killed[0] < 40
    watcher.join()
    assert [failure.value.executor] == executors and failure.value.step >= 1
    again = KerasEstimator(model=regression_model("sgd"), numWorkers=2, verbose=0).fit(frame_of(spark))
    assert len(again.history["loss"]) == 1


ON_EXECUTORS = {"mode": "asynchronous", "serverPlacement": "executors"}


@pytest.mark.slow(
    "a fit; test_run_when_its_job_is_cancelled holds what is said, this one that servers in tasks end, too"
)
def test_asynchronous_fit_when_its_job_group_is_cancelled_then_says_so_and_leaves_nothing(spark, tmp_path):
    ended = []

    def cancel(ids):
        spark.sparkContext.cancelJobGroup("nightly")
        _, left = psutil.wait_procs([psutil.Process(number) for number in ids], timeout=30)
        ended.append(not left)

    spark.sparkContext.setJobGroup("nightly", "a fit that somebody cancels")
    watcher = when_training(tmp_path, cancel)
    try:
        with pytest.raises(JobCancelledError, match="cancelled job group nightly"):
            long_fit(spark, tmp_path, **ON_EXECUTORS)
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    watcher.join()
    assert ended == [True]


@pytest.mark.slow("test_run_when_interrupted holds it without a fit; this one that servers in tasks end, too")
def test_fit_when_interrupted_with_servers_on_executors_then_ends_and_leaves_nothing(spark, tmp_path):
    watcher = when_training(tmp_path, lambda ids: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        long_fit(spark, tmp_path, **ON_EXECUTORS)
    watcher.join()
