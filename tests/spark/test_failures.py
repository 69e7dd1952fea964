"""What a user sees when something fails in mid-training, and that nothing is left afterwards.

Synchronous fits and `elephant.run` are the same barrier stage: what is the same for both is
in `test_run`, whose ranks import no Keras.
"""

import contextlib
import os
import signal
import threading
import time

import keras
import psutil
import pytest
from keras_reference import classifier_data, regression_model
from process_tree import executor_of, ranks_in, task_of
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


@pytest.mark.slow("a silence; tests/monitor/test_task_allgather.py holds it without Spark")
def test_fit_when_a_task_freezes_before_the_ranks_have_met_then_names_its_rank(spark, tmp_path, local_folder):
    def without_end(batches):
        import time

        for _ in batches:
            time.sleep(600)
        yield from ()

    frozen = []

    def freeze():
        deadline = time.monotonic() + 90
        while len(ranks := ranks_in(local_folder)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        frozen.append(task_of(ranks[0].pid))
        frozen[0].suspend()

    thread = threading.Thread(target=freeze, name="fault", daemon=True)
    thread.start()
    timeouts = {"heartbeat_s": 4.0}
    estimator = KerasEstimator(model=regression_model("sgd"), numWorkers=2, timeouts=timeouts, verbose=0)
    with pytest.raises(WorkerFailure, match="from its Spark task for 4 s: its Python worker is frozen") as failure:
        estimator.fit(frame_of(spark).mapInArrow(without_end, SCHEMA))
    thread.join()
    assert failure.value.executor and failure.value.retryable
    # Its rank's process does not wait for it, whether Spark ends it or not.
    psutil.wait_procs(ranks_in(local_folder), timeout=20)
    assert ranks_in(local_folder) == []
    with contextlib.suppress(psutil.NoSuchProcess):
        frozen[0].kill()


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
    # Both do, and the first one's is shown.
    assert ", 127.0.0.1] logs in epoch 0\n" in shown
    assert "lines are left out: it prints more than can be shown" in shown
    assert "\x1b" not in shown and len(shown) < 100_000


@pytest.mark.slow("test_run_when_a_peer_hides_its_loss holds it without TensorFlow's own errors")
def test_fit_when_a_layer_fails_on_one_rank_then_the_error_is_not_its_peer_s(spark):
    if keras.config.backend() == "jax":
        pytest.skip("JAX takes NaN for a row that an embedding does not have")
    rows = [[([0, 1], 0.0)] * 8, [([1, 7], 1.0)] * 8]
    frame = partitioned_frame(spark, rows, "features array<int>, label double")
    inputs = keras.layers.Input((2,), dtype="int32")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 1)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(embedded))
    model.compile("sgd", "mse")
    with pytest.raises(WorkerFailure, match=r"= 7 is not in \[0, 5\)|index out of range") as failure:
        KerasEstimator(model=model, numWorkers=2, batchSize=4, verbose=0).fit(frame)
    assert failure.value.rank == 1


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


MODES = {
    "asynchronous": {"mode": "asynchronous"},
    "servers on executors": {"mode": "asynchronous", "serverPlacement": "executors"},
}


@pytest.mark.slow("a fit per placement; test_run_when_its_job_is_cancelled holds what is said")
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_asynchronous_fit_when_its_job_group_is_cancelled_then_says_so_and_leaves_nothing(spark, tmp_path, options):
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


@pytest.mark.slow("test_run_when_interrupted holds it without a fit; this one that servers in tasks end, too")
def test_fit_when_interrupted_with_servers_on_executors_then_ends_and_leaves_nothing(spark, tmp_path):
    watcher = when_training(tmp_path, lambda ids: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        long_fit(spark, tmp_path, **MODES["servers on executors"])
    watcher.join()
