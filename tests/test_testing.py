"""Ranks on this machine: functions and fits without Spark, compared with numpy and with one process of Keras."""

import os
import threading

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, regression_model

from elephant import collective
from elephant.errors import ConfigurationError, DataError, UnknownOptionError, WorkerFailure
from elephant.testing import fit_local, run_local

pytestmark = pytest.mark.timeout(180)


def task_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("elephant")]


def test_run_local_when_ranks_reduce_then_each_has_the_sum_and_a_process_of_its_own():
    def reduce(scale, *, offset):
        total = collective.allreduce(np.array([scale * collective.rank() + offset]), op="sum")
        return os.getpid(), collective.world_size(), float(total[0]), os.environ["OWN"]

    results = run_local(reduce, (2.0,), {"offset": 1.0}, num_workers=3, env={"OWN": "1"})
    assert [result[1:] for result in results] == [(3, 9.0, "1")] * 3
    assert len({os.getpid(), *(result[0] for result in results)}) == 4
    assert not task_threads()


def test_run_local_when_a_rank_raises_while_the_others_wait_for_it_then_it_is_named():
    def fail():
        if collective.rank() == 1:
            raise ValueError("mine")
        collective.barrier()

    with pytest.raises(WorkerFailure, match=r"rank 1 on 127.0.0.1 failed: ValueError: mine") as failed:
        run_local(fail)
    assert "in fail" in failed.value.traceback and not task_threads()


def test_run_local_when_a_rank_is_killed_then_it_is_named():
    def end():
        if collective.rank() == 0:
            os.kill(os.getpid(), 9)
        collective.barrier()

    with pytest.raises(WorkerFailure, match=r"rank 0 on 127.0.0.1 failed: .*killed \(signal 9\)"):
        run_local(end)


def test_run_local_when_an_argument_cannot_be_used_then_says_which():
    with pytest.raises(ConfigurationError, match=r"num_workers: expected .* Received: 0"):
        run_local(int, num_workers=0)
    with pytest.raises(ConfigurationError, match=r"args\[0\]: expected something that can be pickled"):
        run_local(print, (threading.Lock(),))


class Rounds(keras.callbacks.Callback):
    """Writes a file for each epoch that a rank has ended."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch, logs=None):
        """Looks at batches, and so runs on the workers."""

    def on_epoch_end(self, epoch, logs=None):
        open(os.path.join(self.folder, f"{collective.rank()}-{epoch}"), "x").close()


def test_fit_local_when_compared_with_one_process_of_keras_then_has_its_weights_and_history(tmp_path, monkeypatch):
    monkeypatch.setenv("ELEPHANT_BUCKET_BYTES", "64")
    data = classifier_data(40)
    model = regression_model(keras.optimizers.Adam(0.5), metrics=["mae"])
    before = model.get_weights()
    history, trained = fit_local(
        model, data["features"], data["label"], epochs=3, batch_size=20, learning_rate=0.05,
        callbacks=[Rounds(str(tmp_path))],
    )  # fmt: skip
    model.optimizer.learning_rate = 0.05
    expected, series = fit_one_process(model, [data] * 3, epochs=3)
    for value, wanted in zip(trained.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)
    for name in ("loss", "mae"):
        np.testing.assert_allclose(history[name], series[name], rtol=1e-5)
    for value, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert sorted(os.listdir(tmp_path)) == [f"{rank}-{epoch}" for rank in range(2) for epoch in range(3)]
    assert not task_threads()


def test_fit_local_when_an_option_is_not_known_then_says_which_are():
    model = regression_model("sgd")
    with pytest.raises(UnknownOptionError, match="fit_local has no argument 'epoch'. Did you mean 'epochs'?"):
        fit_local(model, np.ones((4, 6)), np.ones(4), epoch=3)
    with pytest.raises(UnknownOptionError, match="fit_local has no argument 'max_restarts'"):
        fit_local(model, np.ones((4, 6)), np.ones(4), max_restarts=3)
    with pytest.raises(ConfigurationError, match="frequency: expected 'batch', 'epoch' or an integer"):
        fit_local(model, np.ones((4, 6)), np.ones(4), frequency="step")


def test_fit_local_when_arrays_cannot_be_used_then_says_why():
    model = regression_model("sgd")
    with pytest.raises(DataError, match=r"x, y: expected arrays of the same length. Received: .*4.*3"):
        fit_local(model, np.ones((4, 6)), np.ones(3))
    with pytest.raises(DataError, match=r"label: expected an array of numbers.* Received: <U1"):
        fit_local(model, np.ones((4, 6)), np.array(list("abcd")))
