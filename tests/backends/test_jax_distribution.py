"""Models whose layers Keras divides among ranks: processors, and Gloo, stand for devices."""

import dataclasses
import importlib.util
import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_reference import (
    VICTIM,
    classifier_data,
    fit_one_process,
    global_batches,
    is_victim,
    job_for,
    largest_difference,
    split,
)
from rank_pool import WORLD, RankError, RankPool

pytestmark = [
    pytest.mark.usefixtures("by_value"),
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed"),
]

# Soon, against the minutes of an operation's own deadline; a busy machine may take its time.
PATIENCE_S = 30.0
DEADLINE_S = 6.0


@pytest.fixture(scope="module")
def forking_pool():
    pool = RankPool("jax")
    # The first test does not wait for imports.
    pool.run(int, [()])
    yield pool
    pool.close()


@pytest.fixture
def pool(forking_pool):
    """Ranks of its own for each test: a process joins the devices of others once."""
    for rank in range(WORLD):
        forking_pool.kill(rank)
    return forking_pool


def divided(**rules):
    """Returns options of a fit of two workers whose kernels are divided along rows or outputs, and biases with them."""
    return {"shape": [1, 2], "axis_names": ["batch", "model"], "layouts": rules}


BY_OUTPUTS = divided(**{".*d1/kernel": [None, "model"], ".*d1/bias": ["model"], ".*d2/kernel": ["model", None]})
# Rows and weights along the same axis: each device has a part of both.
BY_ROWS_TOO = {
    "shape": [2],
    "axis_names": ["batch"],
    "layouts": {".*d1/kernel": ["batch"], ".*d2/kernel": [None, "batch"]},
}


def wide_model():
    layers = [keras.layers.Dense(8, "tanh", name="d1"), keras.layers.Dense(8, name="d2", use_bias=False)]
    layers += [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    rng = np.random.default_rng(0)
    model.set_weights([abs(rng.normal(size=weight.shape, scale=0.4)) for weight in model.get_weights()])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def job_of(distribution, **options):
    shared = {"epochs": 2, "batch_size": 5, "shuffle": False, "num_workers": 2}
    return job_for(wide_model, **{**shared, "distribution": distribution, **options})


class LooksAtWeights(keras.callbacks.Callback):
    """Raises where a rank does not see the whole model, changes it, and has it predict on one rank alone."""

    def on_train_begin(self, logs=None):
        self.model.get_layer("d1").kernel.assign(self.model.get_layer("d1").kernel + 0.25)

    def on_train_batch_end(self, batch, logs=None):
        parts = [self.model.get_layer("d1").kernel, *self.model.optimizer.variables]
        shapes = [variable.value.addressable_data(0).shape for variable in parts]
        assert shapes[0] == (6, 4) and shapes.count((6, 4)) == 3 and (6, 8) not in shapes

    def on_epoch_end(self, epoch, logs=None):
        shapes = [np.array(variable).shape for variable in (*self.model.weights, *self.model.optimizer.variables)]
        assert (6, 8) in shapes and (8, 8) in shapes
        if is_victim():
            assert self.model.predict(np.zeros((3, 6)), verbose=0).shape == (3, 1)


def parts_of(sizes, **more):
    columns = {**classifier_data(sum(sizes)), **more}
    return split(columns, sizes)


def test_weights_when_divided_and_rows_are_uneven_then_equal_one_process(pool):
    sizes = (22, 14)
    marked = np.random.default_rng(1).permutation(np.arange(sum(sizes)) < 5)
    weights = np.random.default_rng(3).uniform(0, 2, sum(sizes)).astype("float32")
    parts = parts_of(sizes, validation=marked, weight=weights)
    job = job_of(BY_OUTPUTS, indicated=True, weighted=True, callbacks=[LooksAtWeights()], checkpoint_path="kept")
    recordings = pool.fit(job, parts)
    model = wide_model()
    model.get_layer("d1").kernel.assign(model.get_layer("d1").kernel + 0.25)
    trained = [{name: part[name][~part["validation"]] for name in part} for part in parts]
    expected, history = fit_one_process(model, list(global_batches(trained, 5, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5
    for metric, values in history.items():
        np.testing.assert_allclose([logs[metric] for logs in recordings[0].epochs], values, rtol=1e-5)
    model.set_weights(expected)
    x, y, weight = (
        np.concatenate([part[name][part["validation"]] for part in parts]) for name in ("features", "label", "weight")
    )
    found = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    for metric, value in found.items():
        np.testing.assert_allclose(recordings[0].epochs[-1][f"val_{metric}"], value, rtol=1e-4)
    kept = recordings[0].states[-1].variables
    assert largest_difference(kept, recordings[0].variables) == 0


@pytest.mark.slow(
    "two fits, whose layers are compiled; test_weights_when_divided_and_rows_are_uneven divides by outputs alone"
)
def test_fit_when_rows_are_divided_too_and_it_goes_on_undivided_then_equals_one_process(pool):
    parts = parts_of((21, 12))
    first = pool.fit(job_of(BY_ROWS_TOO, checkpoint_path="kept"), parts)[0]
    expected, history = fit_one_process(wide_model(), list(global_batches(parts, 5, 2)), epochs=2)
    assert largest_difference(first.variables[: len(expected)], expected) <= 1e-5
    np.testing.assert_allclose([logs["mae"] for logs in first.epochs], history["mae"], rtol=1e-5)
    job = dataclasses.replace(job_of(None, sync_batch_norm=True), state=first.states[0])
    assert largest_difference(pool.fit(job, parts)[0].variables[: len(expected)], expected) <= 1e-5


class SignalsInStep(keras.callbacks.Callback):
    """Sends the victim a signal in its third step, when it has the rows of it, and the other one waits in JAX."""

    def __init__(self, sent, number):
        super().__init__()
        self.sent, self.number = sent, number

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and is_victim():
            self._model.train_function = self.end

    def end(self, state, iterator):
        next(iterator)
        Path(self.sent).write_text(str(time.monotonic()))
        os.kill(os.getpid(), self.number)


def outcome_of(pool, sent, number, **limits):
    job = job_of(BY_OUTPUTS, callbacks=[SignalsInStep(str(sent), number)])
    with pytest.raises(RankError) as failed:
        pool.fit(job, parts_of((20, 20)), **limits)
    return failed.value.outcomes[0], time.monotonic() - float(sent.read_text())


@pytest.mark.slow("a fit that is compiled; test_backends.py kills a rank of JAX's that has no such devices")
def test_fit_when_a_rank_is_killed_in_a_step_then_the_other_names_it_in_seconds(pool, tmp_path):
    (kind, text, _), seconds = outcome_of(pool, tmp_path / "sent", signal.SIGKILL)
    assert kind == "PeerLostError" and f"rank {VICTIM}" in text and "step of a divided model" in text, text
    assert seconds < PATIENCE_S


@pytest.mark.slow("a fit that is compiled; test_fit_when_a_rank_is_killed_in_a_step has the watch")
def test_fit_when_a_rank_freezes_in_a_step_then_the_other_names_it_at_its_deadline(pool, tmp_path):
    (kind, text, _), seconds = outcome_of(pool, tmp_path / "sent", signal.SIGSTOP, collective_s=DEADLINE_S)
    assert kind == "DeadlineExceededError" and f"Ranks that did not arrive: {VICTIM}." in text, text
    assert seconds < DEADLINE_S + PATIENCE_S
