"""Asynchronous fits that go on from what servers kept in mid-flight: every batch counts once, and none is left out."""

import dataclasses

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import job_for
from tiers import in_tiers

from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState
from elephant.config import AsynchronousOptions
from elephant.storage.folder import folder_at

pytestmark = pytest.mark.usefixtures("by_value")

ROWS = (31, 17)
EPOCHS = 60


def linear_model():
    """Returns a model whose gradient is the sum of a batch's rows, whatever its weights: pushes of whole numbers."""

    def loss(labels, outputs):
        return outputs[:, 0] * keras.ops.cast(keras.ops.shape(outputs)[0], "float32")

    layers = [keras.layers.Input((80,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(1.0), loss)
    return model


def whole_numbers(rows, seed):
    features = np.random.default_rng(seed).integers(-9, 10, (rows, 80)).astype("float32")
    return {"features": features, "label": np.zeros(rows, "float32")}


KINDS = {
    "gradients, two servers": ({}, 2),
    "windows": ({"frequency": 3, "asynchronous": AsynchronousOptions(algorithm="sum")}, 1),
}


@pytest.mark.parametrize("kind", in_tiers(KINDS, fast=["gradients, two servers"], slow="another kind of push"))
def test_weights_when_a_fit_goes_on_from_mid_flight_then_are_the_exact_sum_of_all_batches(rank_pool, tmp_path, kind):
    options, servers = kind
    parts = [whole_numbers(rows, seed) for seed, rows in enumerate(ROWS)]
    steps = [-(-rows // 4) for rows in ROWS]
    job = job_for(linear_model, mode="asynchronous", num_workers=2, epochs=EPOCHS, batch_size=4, seed=1, **options)
    with AsynchronousFit(rank_pool, job, parts, parameter_servers=servers) as fit:
        for partition in range(2):
            fit.begin(partition, attempt=40)
        for partition in range(2):
            fit.wait_for_step(partition, 2 * steps[partition])
        # Pushes go on meanwhile.
        state = fit.checkpoint()
        for partition in range(2):
            rank_pool.kill(partition)
    CheckpointManager(folder_at(str(tmp_path))).save(state)
    state = CheckpointManager(folder_at(str(tmp_path))).latest().state
    positions = [min(ledger[str(partition)][0] for ledger in state.facts["ledgers"]) for partition in range(2)]
    assert 2 <= state.epochs < EPOCHS and 0 < state.step == sum(positions) - state.epochs * sum(steps)
    again = dataclasses.replace(job, state=state)
    with AsynchronousFit(rank_pool, again, parts, parameter_servers=servers) as fit:
        # Another application of Spark counts its attempts from zero.
        recordings = fit.train_all()
        (trained,) = fit.weights()
    total = sum(part["features"].sum(axis=0, dtype=np.float64) for part in parts)
    np.testing.assert_array_equal(trained[:, 0], -EPOCHS * total)
    for recording, position, count in zip(recordings, positions, steps, strict=True):
        assert sum(part.steps for part in recording.parts) == EPOCHS * count - position
        assert recording.parts[0].epoch in (position // count, position // count - 1)
        assert recording.parts[-1].epoch == EPOCHS - 1


def test_workers_when_there_were_others_before_then_begin_with_the_epoch(rank_pool):
    parts = [whole_numbers(20, 3), whole_numbers(0, 4)]
    job = job_for(linear_model, mode="asynchronous", num_workers=2, epochs=5, batch_size=4)
    job = dataclasses.replace(job, state=FitState(epochs=3))
    with AsynchronousFit(rank_pool, job, parts) as fit:
        recordings = fit.train_all()
        (trained,) = fit.weights()
    np.testing.assert_array_equal(trained[:, 0], -2 * parts[0]["features"].sum(axis=0, dtype=np.float64))
    assert [[part.epoch for part in recording.parts] for recording in recordings] == [[3, 4], [3, 4]]
