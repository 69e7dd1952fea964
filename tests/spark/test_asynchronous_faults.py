"""What is lost in an asynchronous fit is replaced, what fails ends it, and nothing counts twice or is left behind."""

import contextlib
import os
import signal
import socket
import threading
import time

import keras
import numpy as np
import pytest
from counting_model import counted, counting_data, counting_model, weights_of
from process_tree import executor_of, processes_of, ranks_in, task_of
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.cluster.spark_job import SparkJob, end_attempt
from elephant.errors import ClusterError, ServerFailedError, WorkerFailure

SCHEMA = "features array<double>, label double"
ROWS, EPOCHS = 64, 8
WAIT_S = 90
# Spark's default of spark.task.maxFailures.
MOST_FAILURES = 4


def frame_of(spark):
    return partitioned_frame(spark, split_rows(counting_data(ROWS), (ROWS // 2, ROWS // 2)), SCHEMA)


def slow_callback(marker=None):
    """Returns a callback that makes a fit last; it writes its process' id once training has begun, and awaits another.

    Workers do not wait for each other: one could have finished before the other begins.
    """

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import os
            import time

            if marker is not None:
                with open(os.path.join(marker, str(os.getpid())), "w"):
                    pass
                for _ in range(600):
                    if len(os.listdir(marker)) >= 2:
                        break
                    time.sleep(0.1)
            time.sleep(0.1)

    return Slow()


def estimator_of(marker, **options):
    return KerasEstimator(
        **{
            "model": counting_model(),
            "mode": "asynchronous",
            "numWorkers": 2,
            "epochs": EPOCHS,
            "batchSize": 8,
            "callbacks": [slow_callback(str(marker))],
            "verbose": 2,
            **options,
        }
    )


@contextlib.contextmanager
def when_training(marker, action):
    """Calls ``action`` with the workers' process ids, in a thread, once both train; fails where it came to nothing."""
    done = []

    def watch():
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            workers = sorted(int(name) for name in os.listdir(marker))
            if len(workers) >= 2:
                action(workers)
                done.append(time.monotonic())
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch, name="fault", daemon=True)
    thread.start()
    yield done
    thread.join()
    assert done


def assert_exact(fitted):
    np.testing.assert_array_equal(weights_of(fitted), counted(counting_data(ROWS), batch_size=8, epochs=EPOCHS))


def kill_server(workers):
    (server,) = processes_of("elephant.parameter_server")
    server.send_signal(signal.SIGKILL)


def test_fit_when_a_worker_is_killed_then_spark_replaces_it_and_every_batch_counts_once(spark, tmp_path, capsys):
    with when_training(tmp_path, lambda workers: os.kill(workers[0], signal.SIGKILL)):
        fitted = estimator_of(tmp_path).fit(frame_of(spark))
    assert_exact(fitted)
    assert fitted.training_statistics["worker_retries"] == 1
    assert len(fitted.history["loss"]) == EPOCHS
    shown = capsys.readouterr().out
    assert "was lost: its process was killed (signal 9)" in shown and "goes on, on 127.0.0.1" in shown


@pytest.mark.slow("a fit; tests/rank/test_rounds.py loses a worker without Spark")
def test_fit_in_rounds_when_a_worker_is_killed_then_spark_replaces_it_and_the_others_wait(spark, tmp_path):
    with when_training(tmp_path, lambda workers: os.kill(workers[0], signal.SIGKILL)):
        fitted = estimator_of(tmp_path, mode="synchronous", aggregation="server").fit(frame_of(spark))
    # A step is of the rows of both workers, as in one process.
    steps_of_both = counted(counting_data(ROWS), batch_size=16, epochs=EPOCHS)
    np.testing.assert_array_equal(weights_of(fitted), steps_of_both)
    statistics = fitted.training_statistics
    assert (statistics["worker_retries"], statistics["updates"]) == (1, EPOCHS * ROWS // 16)
    assert set(statistics["staleness"]) <= {"0"} and len(fitted.history["loss"]) == EPOCHS


@pytest.mark.slow("a fit per loss; test_fit_when_a_worker_is_killed holds the rule")
def test_fit_when_an_executor_is_killed_then_its_worker_goes_on_elsewhere_and_every_batch_counts_once(
    spark, tmp_path, capsys
):
    def kill_executor(workers):
        executor_of(workers[0]).kill()

    with when_training(tmp_path, kill_executor):
        fitted = estimator_of(tmp_path).fit(frame_of(spark))
    assert_exact(fitted)
    assert fitted.training_statistics["worker_retries"] == 1
    assert "goes on, on 127.0.0.1" in capsys.readouterr().out


@pytest.mark.slow("a fit per loss; test_fit_when_a_worker_is_killed holds the rule")
def test_fit_when_the_task_of_a_worker_is_killed_then_spark_replaces_it_and_every_batch_counts_once(spark, tmp_path):
    with when_training(tmp_path, lambda workers: task_of(workers[0]).kill()):
        fitted = estimator_of(tmp_path).fit(frame_of(spark))
    assert_exact(fitted)
    assert fitted.training_statistics["worker_retries"] == 1


@pytest.mark.slow("a fit per placement; tests/rank/test_resume.py kills a server without Spark")
@pytest.mark.parametrize("placement", ["driver", "executors"])
def test_fit_when_the_server_is_killed_then_it_comes_back_and_every_batch_counts_once(
    spark, tmp_path, capsys, placement
):
    with when_training(tmp_path, kill_server):
        fitted = estimator_of(tmp_path, snapshotSeconds=0.3, serverPlacement=placement).fit(frame_of(spark))
    assert_exact(fitted)
    assert fitted.training_statistics["server_restarts"] == 1
    assert "parameter server 0 was lost: it has been started again" in capsys.readouterr().out


@pytest.mark.slow("a fit")
def test_fit_when_a_task_that_hosts_a_server_is_killed_then_ends_in_seconds(spark, tmp_path):
    killed = []

    def kill_host(workers):
        (server,) = processes_of("elephant.parameter_server")
        killed.append(time.monotonic())
        server.parent().kill()

    with (
        when_training(tmp_path, kill_host),
        pytest.raises(ServerFailedError, match="parameter server 0 failed: its task, or the executor, is lost"),
    ):
        estimator_of(tmp_path, serverPlacement="executors", epochs=1000).fit(frame_of(spark))
    assert time.monotonic() - killed[0] < 30


@pytest.mark.slow("a fit; tests/task/test_process.py freezes a process without Spark")
def test_fit_when_a_worker_freezes_then_its_task_replaces_it(spark, tmp_path, capsys):
    with when_training(tmp_path, lambda workers: os.kill(workers[1], signal.SIGSTOP)):
        fitted = estimator_of(tmp_path, timeouts={"heartbeat_s": 4.0}).fit(frame_of(spark))
    assert_exact(fitted)
    assert fitted.training_statistics["worker_retries"] == 1
    assert "was lost: its process was frozen: it gave no sign of life for 4 s" in capsys.readouterr().out


@pytest.mark.slow("a fit, and the grace after it")
def test_fit_when_the_task_of_a_worker_freezes_then_ends_without_it_and_every_batch_counts_once(spark, tmp_path):
    with when_training(tmp_path, lambda workers: task_of(workers[0]).suspend()):
        fitted = estimator_of(tmp_path).fit(frame_of(spark))
    assert_exact(fitted)


@pytest.mark.slow("a fit; tests/driver/test_async_coordinator.py holds it without Spark")
def test_fit_when_a_task_freezes_before_its_worker_has_its_rows_then_spark_runs_it_again(
    spark, tmp_path, local_folder, capsys
):
    shared_lock = str(tmp_path / "gate")

    def after_gate(batches):
        import os
        import time

        try:
            # The driver asks for one row before the fit.
            os.close(os.open(f"{shared_lock}.asked", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            while not os.path.exists(shared_lock):
                time.sleep(0.05)
        yield from batches

    def freeze():
        deadline = time.monotonic() + WAIT_S
        while len(workers := ranks_in(local_folder)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        task_of(workers[0].pid).suspend()
        (tmp_path / "gate").touch()

    thread = threading.Thread(target=freeze, name="fault", daemon=True)
    thread.start()
    frame = frame_of(spark).mapInArrow(after_gate, SCHEMA)
    fitted = estimator_of("", timeouts={"heartbeat_s": 4.0}, callbacks=[]).fit(frame)
    thread.join()
    assert_exact(fitted)
    assert fitted.training_statistics["worker_retries"] == 1
    assert "nothing was heard from its Spark task for 4 s. Spark runs it again" in capsys.readouterr().out


@pytest.mark.slow("a fit; tests/rank/test_async_callbacks.py holds it without Spark")
def test_fit_when_a_callback_raises_on_a_worker_then_ends_in_seconds_with_its_traceback(spark, tmp_path):
    class Boom(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise ValueError("boom in step 2")

    with pytest.raises(WorkerFailure) as failure:
        estimator_of(tmp_path, epochs=1000, callbacks=[slow_callback(str(tmp_path)), Boom()]).fit(frame_of(spark))
    began = max(os.stat(tmp_path / name).st_ctime for name in os.listdir(tmp_path))
    assert time.time() - began < 30
    assert failure.value.rank in (0, 1) and failure.value.summary == "ValueError: boom in step 2"
    assert 'raise ValueError("boom in step 2")' in failure.value.traceback


@pytest.mark.slow("a fit; tests/rank/test_asynchronous.py holds it without Spark")
def test_fit_when_some_updates_are_not_finite_then_warns_that_they_were_left_out(spark):
    columns = counting_data(ROWS)
    columns["features"][0, 0] = np.nan
    frame = partitioned_frame(spark, split_rows(columns, (ROWS,)), SCHEMA)
    with pytest.warns(UserWarning, match="Received: 2 with NaN or infinities.*14 were applied"):
        fitted = estimator_of("", numWorkers=1, epochs=2, shuffle=False, callbacks=[]).fit(frame)
    assert fitted.training_statistics["refused"] == 2
    assert np.isfinite(weights_of(fitted)).all()


@pytest.mark.slow("five attempts, one after the other")
def test_attempts_when_they_are_ended_then_are_no_failures_of_their_task(spark, tmp_path):
    folder = str(tmp_path)

    def wait_unless_tried_often(batches):
        import os
        import time

        from pyspark import TaskContext

        with open(os.path.join(folder, str(TaskContext.get().taskAttemptId())), "w"):
            pass
        rows = list(batches)
        while len(os.listdir(folder)) <= MOST_FAILURES:
            time.sleep(0.1)
        yield from rows

    job = SparkJob(spark, "ended", spark.range(0, 1, 1, 1).mapInArrow(wait_unless_tried_often, "id long").collect)
    ended, deadline = set(), time.monotonic() + WAIT_S
    while job.running and time.monotonic() < deadline:
        for name in set(os.listdir(folder)) - ended:
            if len(ended) < MOST_FAILURES:
                end_attempt(spark, int(name))
                ended.add(name)
        time.sleep(0.2)
    job.cancel()
    assert job.error is None
    assert len(os.listdir(folder)) == MOST_FAILURES + 1 and len(job.rows) == 1


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.mark.slow("three fits")
def test_fit_when_interrupted_then_the_same_port_works_again_and_meanwhile_is_refused(spark, tmp_path):
    port, refused = free_port(), []

    def meet_and_interrupt(workers):
        began = time.monotonic()
        try:
            estimator_of(tmp_path, port=port).fit(frame_of(spark))
        except ClusterError as error:
            refused.append((str(error), time.monotonic() - began))
        os.kill(os.getpid(), signal.SIGINT)

    with when_training(tmp_path, meet_and_interrupt), pytest.raises(KeyboardInterrupt):
        estimator_of(tmp_path, port=port, epochs=1000).fit(frame_of(spark))
    ((text, _),) = refused
    assert f"127.0.0.1:{port}" in text and "port=0" in text
    fitted = estimator_of(tmp_path, port=port, callbacks=[]).fit(frame_of(spark))
    assert_exact(fitted)


@pytest.mark.slow("two fits; test_run_when_two_run_at_once holds it without a fit")
def test_fits_when_two_run_at_once_then_both_are_exact(spark):
    fitted, errors = {}, []

    def run(epochs):
        try:
            fitted[epochs] = estimator_of("", numWorkers=1, epochs=epochs, callbacks=[], verbose=0).fit(frame_of(spark))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(epochs,)) for epochs in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=WAIT_S)
    assert errors == []
    for epochs in (1, 3):
        wanted = counted(counting_data(ROWS), batch_size=8, epochs=epochs)
        np.testing.assert_array_equal(weights_of(fitted[epochs]), wanted)
