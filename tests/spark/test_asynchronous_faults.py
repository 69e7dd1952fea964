"""What is lost in an asynchronous fit is replaced, what fails ends it, and nothing counts twice or is left behind."""

import contextlib
import os
import signal
import socket
import threading
import time

import keras
import numpy as np
import psutil
import pytest
from counting_model import counted, counting_data, counting_model, weights_of
from process_tree import executor_of, processes_of, ranks_in, task_of
from servers import until
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator
from elephant.errors import ServerFailedError

SCHEMA = "features array<double>, label double"
ROWS, EPOCHS = 64, 4
WAIT_S = 90


def frame_of(spark):
    return partitioned_frame(spark, split_rows(counting_data(ROWS), (ROWS // 2, ROWS // 2)), SCHEMA)


def slow_callback(marker, count):
    """Returns a callback that writes its process' id once training has begun, and awaits so many, also those to come.

    Workers do not wait for each other: one could have finished before the other begins, or before it is to be lost.
    """

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import os
            import time

            with open(os.path.join(marker, str(os.getpid())), "w"):
                pass
            for _ in range(600):
                if len(os.listdir(marker)) >= count:
                    break
                time.sleep(0.1)
            time.sleep(0.02)

    return Slow()


def estimator_of(**options):
    return KerasEstimator(
        **{
            "model": counting_model(),
            "mode": "asynchronous",
            "numWorkers": 2,
            "epochs": EPOCHS,
            "batchSize": 8,
            "verbose": 2,
            **options,
        }
    )


@contextlib.contextmanager
def when_training(marker, *actions):
    """Calls actions in a thread: the first with the ids of both workers, once they train, each later with new ones.

    Fails where one of them came to nothing.
    """
    known, done = set(), []

    def watch():
        deadline = time.monotonic() + WAIT_S
        for action in actions:
            while len(new := {int(name) for name in os.listdir(marker)} - known) < (1 if known else 2):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            known.update(new)
            action(sorted(new))
            done.append(action)

    thread = threading.Thread(target=watch, name="fault", daemon=True)
    thread.start()
    yield
    thread.join()
    assert len(done) == len(actions)


def assert_exact(fitted):
    np.testing.assert_array_equal(weights_of(fitted), counted(counting_data(ROWS), batch_size=8, epochs=EPOCHS))


def kill_server():
    """Kills the one server, and returns the one that takes its place."""
    (lost,) = processes_of("elephant.parameter_server")
    lost.send_signal(signal.SIGKILL)
    until(lambda: set(processes_of("elephant.parameter_server")) - {lost}, "a server in its place")
    (found,) = set(processes_of("elephant.parameter_server")) - {lost}
    return found


def listening_ports(process):
    return [one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_fit_when_a_worker_is_killed_then_spark_replaces_it_and_every_batch_counts_once(spark, tmp_path, capsys):
    with when_training(tmp_path, lambda workers: os.kill(workers[0], signal.SIGKILL)):
        fitted = estimator_of(callbacks=[slow_callback(str(tmp_path), 3)]).fit(frame_of(spark))
    assert_exact(fitted)
    assert fitted.training_statistics["worker_retries"] == 1
    assert len(fitted.history["loss"]) == EPOCHS
    shown = capsys.readouterr().out
    assert "was lost: its process was killed (signal 9)" in shown and "goes on, on 127.0.0.1" in shown


@pytest.mark.slow("the same without encryption is above; tests/parameter_server/test_faults.py loses encrypted servers")
def test_fit_when_encrypted_and_a_worker_and_the_server_are_killed_then_every_batch_counts_once(spark, tmp_path):
    def kill_both(workers):
        kill_server()
        os.kill(workers[0], signal.SIGKILL)

    with when_training(tmp_path, kill_both):
        callbacks = [slow_callback(str(tmp_path), 3)]
        fitted = estimator_of(callbacks=callbacks, encryption=True, snapshotSeconds=0.2).fit(frame_of(spark))
    assert_exact(fitted)
    assert fitted.training_statistics["worker_retries"] == 1


@pytest.mark.slow("a fit that loses much; tests/rank/test_resume.py and tests/task/test_process.py hold the parts")
def test_fit_when_server_task_process_and_executor_are_lost_then_all_come_back_and_every_batch_counts_once(
    spark, tmp_path, capsys
):
    port = free_port()

    def lose_server_task_and_process(workers):
        server = kill_server()
        until(lambda: port in listening_ports(server), "the server on its port")
        os.kill(workers[1], signal.SIGSTOP)
        task_of(workers[0]).kill()

    def lose_executor(workers):
        executor_of(workers[0]).kill()

    with when_training(tmp_path, lose_server_task_and_process, lose_executor):
        fitted = estimator_of(
            callbacks=[slow_callback(str(tmp_path), 5)], timeouts={"heartbeat_s": 4.0}, snapshotSeconds=0.3, port=port
        ).fit(frame_of(spark))
    assert_exact(fitted)
    counts = fitted.training_statistics
    assert (counts["server_restarts"], counts["worker_retries"]) == (1, 3)
    shown = capsys.readouterr().out
    assert "parameter server 0 was lost: it has been started again" in shown
    assert "was lost: its process was frozen: it gave no sign of life for 4 s" in shown
    assert "goes on, on 127.0.0.1" in shown


@pytest.mark.slow("a fit")
def test_fit_when_a_server_in_a_task_is_killed_then_it_comes_back_and_with_its_task_the_fit_ends_in_seconds(
    spark, tmp_path
):
    killed = []

    def kill_server_and_then_its_host(workers):
        server = kill_server()
        killed.append(time.monotonic())
        server.parent().kill()

    with (
        when_training(tmp_path, kill_server_and_then_its_host),
        pytest.raises(ServerFailedError, match="parameter server 0 failed: its task, or the executor, is lost"),
    ):
        estimator_of(
            callbacks=[slow_callback(str(tmp_path), 2)], serverPlacement="executors", snapshotSeconds=0.3, epochs=1000
        ).fit(frame_of(spark))
    assert time.monotonic() - killed[0] < 30


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
    fitted = estimator_of(timeouts={"heartbeat_s": 4.0}).fit(frame)
    thread.join()
    assert_exact(fitted)
    assert fitted.training_statistics["worker_retries"] == 1
    assert "nothing was heard from its Spark task for 4 s. Spark runs it again" in capsys.readouterr().out
    # The attempt that was ended is no failure of its task, of which Spark allows few.
    tracker = spark.sparkContext.statusTracker()
    stages = tracker.getJobInfo(max(tracker.getJobIdsForGroup())).stageIds
    assert [tracker.getStageInfo(stage).numFailedTasks for stage in stages] == [0] * len(stages)


@pytest.mark.slow("two fits; test_run_when_two_run_at_once holds it without a fit")
def test_fits_when_two_run_at_once_then_one_is_exact_and_the_other_leaves_out_updates_that_are_not_finite(spark):
    spoilt, fitted = counting_data(ROWS), {}
    spoilt["features"][0, 0] = np.nan
    options = {"numWorkers": 1, "shuffle": False, "verbose": 0}

    def fit_spoilt_rows():
        frame = partitioned_frame(spark, split_rows(spoilt, (ROWS,)), SCHEMA)
        fitted["spoilt"] = estimator_of(epochs=2, **options).fit(frame)

    thread = threading.Thread(target=fit_spoilt_rows)
    with pytest.warns(UserWarning, match="Received: 2 with NaN or infinities.*14 were applied"):
        thread.start()
        fitted["exact"] = estimator_of(**options).fit(frame_of(spark))
        thread.join(timeout=WAIT_S)
    assert_exact(fitted["exact"])
    assert (fitted["exact"].training_statistics["refused"], fitted["spoilt"].training_statistics["refused"]) == (0, 2)
    assert np.isfinite(weights_of(fitted["spoilt"])).all()
