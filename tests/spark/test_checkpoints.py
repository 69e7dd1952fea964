"""Fits that are lost and go on, in a real cluster: the result is that of one process that nobody disturbed."""

import os
import re
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
from process_tree import executor_of
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator, SparkModel
from elephant.checkpoint.manager import CheckpointManager
from elephant.errors import ConfigurationError, UnsupportedError, WorkerFailure
from elephant.storage.folder import folder_at

SIZES = (20, 14)
SCHEMA = "features array<double>, label double"


def frame_of(spark):
    return partitioned_frame(spark, split_rows(classifier_data(sum(SIZES)), SIZES), SCHEMA)


def model():
    return regression_model(keras.optimizers.Adam(0.01))


def estimator(epochs, **options):
    return KerasEstimator(model=model(), numWorkers=2, epochs=epochs, batchSize=5, shuffle=False, verbose=1, **options)


def parts():
    return split(classifier_data(sum(SIZES)), SIZES)


def undisturbed(epochs):
    return fit_one_process(model(), list(global_batches(parts(), 5, epochs)), epochs)


def require_undisturbed(fitted, epochs):
    weights, history = undisturbed(epochs)
    assert largest_difference(fitted.model.get_weights(), weights) <= 1e-5
    assert fitted.history["loss"] == pytest.approx(history["loss"], rel=1e-4)


def waiting_callback(folder, at):
    """Returns a callback that waits in a batch of the third epoch, in the first attempt, with its ids in a file's name.

    These are those of its process and of its Spark task's, and its rank.
    """

    class Wait(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            import os
            import time

            import elephant

            go = os.path.join(folder, "go")
            if self.epoch == 2 and batch == at and not os.path.exists(go):
                task = os.environ["ELEPHANT_TASK_PROCESS"].split()[0]
                name = f"{os.getpid()}-{task}-{elephant.collective.rank()}"
                open(os.path.join(folder, name), "w").close()
                while not os.path.exists(go):
                    time.sleep(0.05)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    return Wait()


def noting_callback():
    """Returns a callback that writes the epochs which have ended to a file of its rank."""

    class Note(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with open("epochs.txt", "a") as file:
                file.write(f"{epoch}\n")

    return Note()


def once_waiting(folder, do):
    """Does something to rank 1, in a thread, when both ranks wait; then lets them go.

    Args:
        do: Takes the ids of its process and of its task's.
    """

    def watch():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            names = [name for name in os.listdir(folder) if "-" in name]
            if len(names) == 2:
                process, task, _ = next(name.split("-") for name in names if name.endswith("-1"))
                do(int(process), int(task))
                (folder / "go").touch()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch, name="fault", daemon=True)
    thread.start()
    return thread


def killed(process, task):
    # The other one goes on when it is gone, or it could still end the epoch.
    rank = psutil.Process(process)
    rank.kill()
    rank.wait(timeout=60)


def asked_to_end(process, task):
    os.kill(task, signal.SIGTERM)
    # The task hands it on in a thread.
    time.sleep(1)


@pytest.mark.slow("a fit that is started twice; tests/rank/test_checkpoints.py holds the parts")
def test_fit_when_a_task_s_process_is_asked_to_end_then_leaves_its_state_and_goes_on_at_no_cost(
    spark, tmp_path, capsys
):
    path, folder = tmp_path / "kept", tmp_path / "ranks"
    folder.mkdir()
    watcher = once_waiting(folder, asked_to_end)
    options = {"checkpointPath": path, "maxRestarts": 1, "callbacks": [waiting_callback(str(folder), 0)]}
    fitted = estimator(4, **options).fit(frame_of(spark))
    watcher.join()
    require_undisturbed(fitted, 4)
    assert fitted.training_statistics["restarts"] == 0
    printed = capsys.readouterr().out
    assert "rank 1 was asked to end (SIGTERM)" in printed and "going on after epoch 2 of 4 and 1 step" in printed


@pytest.mark.slow("a fit that is started twice; tests/rank/test_checkpoints.py and test_recovery hold the parts")
def test_fit_when_a_training_process_is_killed_then_goes_on_and_equals_one_process(
    spark, tmp_path, capsys, monkeypatch
):
    path, folder = tmp_path / "kept", tmp_path / "ranks"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    watcher = once_waiting(folder, killed)
    callbacks = [waiting_callback(str(folder), 2), noting_callback()]
    options = {"checkpointPath": path, "maxRestarts": 1, "callbacks": callbacks}
    # Always due: there is a state after each step.
    fitted = estimator(3, checkpointSeconds=1e-9, **options).fit(frame_of(spark))
    watcher.join()
    require_undisturbed(fitted, 3)
    assert fitted.training_statistics["restarts"] == 1 and len(fitted.training_statistics["recoveries"]) == 1
    printed = capsys.readouterr().out
    assert "starts again (1 of 1): rank 1" in printed and re.search(
        r"going on after epoch 2 of 3 and [12] step", printed
    )
    # That of the end, and the last one within the epoch.
    assert len(list(path.glob("*.json"))) == 2
    # Those of both ranks, which went on with them.
    assert (tmp_path / "epochs.txt").read_text() == "0\n1\n2\n" and not (tmp_path / "rank-1").exists()


@pytest.mark.slow("a fit that loses an executor; tests/monitor/test_meetings.py holds the parts")
def test_fit_when_a_decommissioned_executor_is_killed_then_its_task_alone_is_run_again_and_nothing_is_counted(
    spark, tmp_path, capsys
):
    folder = tmp_path / "ranks"
    folder.mkdir()

    def executor_killed(process, task):
        java = executor_of(process)
        command = java.cmdline()
        jvm = spark.sparkContext._jvm
        why = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("spot", jvm.scala.Option.empty())
        backend = spark.sparkContext._jsc.sc().schedulerBackend()
        assert backend.decommissionExecutor(command[command.index("--executor-id") + 1], why, False, False)
        java.kill()
        java.wait(timeout=60)

    watcher = once_waiting(folder, executor_killed)
    options = {"maxRestarts": 1, "callbacks": [waiting_callback(str(folder), 0)]}
    fitted = estimator(4, **options).fit(frame_of(spark))
    watcher.join()
    require_undisturbed(fitted, 4)
    statistics = fitted.training_statistics
    assert statistics["restarts"] == 0 and [loss["rank"] for loss in statistics["recoveries"]] == [1]
    assert "its process and its Spark task were lost" in capsys.readouterr().out


def test_fit_when_the_user_s_code_fails_then_is_not_started_again(spark, tmp_path):
    log = str(tmp_path / "log")

    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            """Looks at batches, and so runs on the workers."""

        def on_epoch_begin(self, epoch, logs=None):
            import elephant

            if elephant.collective.rank() == 0:
                with open(log, "a") as file:
                    file.write(f"{epoch} ")
            if epoch == 2:
                raise ValueError("a mistake")

    path = tmp_path / "kept"
    with pytest.raises(WorkerFailure, match="a mistake"):
        estimator(4, checkpointPath=path, maxRestarts=3, callbacks=[Broken()]).fit(frame_of(spark))
    assert open(log).read() == "0 1 2 "
    # What was done before is not lost: without the mistake the fit goes on, with a checkpoint every other epoch.
    fitted = estimator(4, checkpointPath=path, resume=True, checkpointEpochs=2).fit(frame_of(spark))
    require_undisturbed(fitted, 4)


@pytest.mark.slow("two fits; tests/rank/test_asynchronous_checkpoints.py holds it without Spark")
def test_asynchronous_fit_when_it_goes_on_then_equals_one_process(spark, tmp_path):
    columns = classifier_data(20)
    frame = partitioned_frame(spark, split_rows(columns, (20,)), SCHEMA)
    batches = list(global_batches([columns], 5, 4))
    weights, history = fit_one_process(model(), batches, 4)
    options = {"model": model(), "mode": "asynchronous", "batchSize": 5, "shuffle": False, "verbose": 0}
    path = f"file://{tmp_path}/kept"
    KerasEstimator(epochs=2, checkpointPath=path, **options).fit(frame)
    fitted = KerasEstimator(epochs=4, checkpointPath=path, resume=True, maxRestarts=1, **options).fit(frame)
    assert largest_difference(fitted.model.get_weights(), weights) <= 1e-5
    assert fitted.history["loss"] == pytest.approx(history["loss"], rel=1e-4)
    assert fitted.training_statistics["restarts"] == 0 and fitted.training_statistics["updates"] == 8


def adapted():
    """Returns a model with a frozen layer and one with an adapter of low rank."""
    built = model()
    built.layers[0].trainable = False
    built.layers[1].enable_lora(1)
    built.compile(keras.optimizers.Adam(0.01), "mse")
    return built


@pytest.mark.slow("two fits; tests/rank/test_frozen.py and tests/checkpoint/test_frozen.py hold the parts")
def test_fit_when_a_base_is_frozen_then_its_checkpoints_share_it_and_one_goes_on_as_one_process(spark, tmp_path):
    options = {"model": adapted(), "numWorkers": 2, "batchSize": 5, "shuffle": False, "checkpointPath": tmp_path}
    weights, history = fit_one_process(options["model"], list(global_batches(parts(), 5, 4)), 4)
    KerasEstimator(epochs=2, **options).fit(frame_of(spark))
    frozen = [place.name for place in tmp_path.glob("*.frozen.npz")]
    assert [name[:14] for name in frozen] == ["epoch-00000001"]
    fitted = KerasEstimator(epochs=4, resume=True, **options).fit(frame_of(spark))
    assert [place.name for place in tmp_path.glob("*.frozen.npz")] == frozen
    assert largest_difference(fitted.model.get_weights(), weights) <= 1e-5
    assert fitted.history["loss"] == pytest.approx(history["loss"], rel=1e-4)
    checkpoint = CheckpointManager(folder_at(str(tmp_path))).latest()
    assert checkpoint.finished and len(checkpoint.state.frozen) == 3
    assert largest_difference(checkpoint.result[: len(weights)], fitted.model.get_weights()) == 0


@pytest.mark.slow("two fits; test_fit_when_the_user_s_code_fails goes on from a checkpoint, too")
def test_spark_model_when_it_goes_on_from_a_checkpoint_then_equals_one_process(spark, tmp_path):
    columns = classifier_data(20)
    pairs = list(zip(columns["features"], columns["label"], strict=True))
    rdd = spark.sparkContext.parallelize(pairs, 1)
    weights, history = fit_one_process(model(), list(global_batches([columns], 5, 3)), 3)
    options = {"num_workers": 1, "batch_size": 5, "shuffle": False, "checkpoint_path": str(tmp_path / "kept")}
    SparkModel(model(), **options).fit(rdd, epochs=2, verbose=0)
    with pytest.raises(ConfigurationError, match="has one of epoch 2"):
        SparkModel(model(), **options).fit(rdd, epochs=3, verbose=0)
    spark_model = SparkModel(model(), resume=True, **options)
    told = spark_model.fit(rdd, epochs=3, verbose=0)
    assert largest_difference(spark_model.model.get_weights(), weights) <= 1e-5
    assert told.history["loss"] == pytest.approx(history["loss"], rel=1e-4)


def test_fit_when_backup_and_restore_is_among_its_callbacks_then_goes_on_and_leaves_nothing_as_in_keras(
    spark, tmp_path
):
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "kept"))
    seen, frame = [], frame_of(spark)

    def note(epoch, logs):
        seen.append(epoch)
        if seen == [0, 1]:
            raise InterruptedError("in the second epoch")

    callbacks = [backup, keras.callbacks.LambdaCallback(on_epoch_end=note)]
    with pytest.raises(InterruptedError):
        estimator(3, callbacks=callbacks).fit(frame)
    assert os.listdir(tmp_path / "kept")
    going_on = estimator(3, callbacks=callbacks)
    fitted = going_on.fit(frame)
    assert seen == [0, 1, 1, 2] and os.listdir(tmp_path / "kept") == []
    require_undisturbed(fitted, 3)
    # Params of the estimator are params of its model, as in all of Spark ML.
    assert fitted.transform(frame, {going_on.predictionCol: "p"}).columns == [*frame.columns, "p"]


def test_backup_and_restore_when_it_contradicts_other_options_then_is_refused(tmp_path):
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    with pytest.raises(ConfigurationError, match="checkpointPath: expected none, or the folder of BackupAndRestore"):
        estimator(1, callbacks=[backup], checkpointPath="/other")
    with pytest.raises(UnsupportedError, match=r"expected BackupAndRestore\(save_freq='epoch'\).*save_freq=10"):
        estimator(1, callbacks=[keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=10)])
    for options in ({"callbacks": [backup, keras.callbacks.BackupAndRestore("other")]}, {"driverCallbacks": [backup]}):
        with pytest.raises(UnsupportedError, match="Pass it in callbacks of a KerasEstimator, once"):
            estimator(1, **options)
