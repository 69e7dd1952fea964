"""A synchronous fit that goes on from any of its checkpoints ends as one that was never interrupted."""

import dataclasses
import sys

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, job_for, largest_difference, regression_model, split
from pyspark import cloudpickle

from elephant import LearningRateWarmup
from elephant.checkpoint.state import joined

EPOCHS = 3


@pytest.fixture(autouse=True)
def by_value():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def dropout_model(optimizer):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Input((6,)),
        keras.layers.Dense(8, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.4),
        keras.layers.GaussianNoise(0.2, seed=5),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def schedule():
    return keras.optimizers.schedules.CosineDecay(0.001, 40, warmup_target=0.01, warmup_steps=7)


CASES = {
    "adam": lambda: {"model": dropout_model(keras.optimizers.Adam(0.01))},
    "momentum and a schedule": lambda: {"model": dropout_model(keras.optimizers.SGD(schedule(), momentum=0.9))},
    "accumulated and averaged": lambda: {
        "model": dropout_model(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.5)
        )
    },
    "loss scaling": lambda: {
        "model": dropout_model(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), dynamic_growth_steps=5))
    },
    "epochs that end in the middle of a pass": lambda: {
        "model": dropout_model(keras.optimizers.Adam(0.01)),
        "steps_per_epoch": 4,
    },
    "weights averaged every two steps": lambda: {
        "model": regression_model(keras.optimizers.SGD(0.01, momentum=0.9)),
        "frequency": 2,
    },
    "weights averaged every epoch": lambda: {
        "model": regression_model(keras.optimizers.Adam(0.01)),
        "frequency": "epoch",
    },
    "validation": lambda: {"model": dropout_model(keras.optimizers.Adam(0.01)), "validation_fraction": 0.2},
    "warm-up": lambda: {
        "model": dropout_model(keras.optimizers.SGD(0.01)),
        "callbacks": [LearningRateWarmup(epochs=3)],
        "scale_learning_rate": True,
    },
    "a rate that falls on plateaus": lambda: {
        "model": dropout_model(keras.optimizers.SGD(0.01)),
        "callbacks": [
            keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0),
            keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=10.0, restore_best_weights=True),
        ],
    },
    "averaged weights swapped in": lambda: {
        "model": dropout_model(keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.8)),
        "callbacks": [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    },
}


def fitted(rank_pool, job, parts):
    recordings = rank_pool.fit(job, parts)
    history = {name: [logs[name] for logs in recordings[0].epochs if name in logs] for name in recordings[0].epochs[0]}
    return recordings[0], history


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fit_when_it_goes_on_from_a_checkpoint_then_ends_as_one_that_was_not_interrupted(rank_pool, case):
    options = {"epochs": EPOCHS, "batch_size": 4, "seed": 3, "checkpoint_path": "kept", **case()}
    parts = split(classifier_data(40), (23, 17))
    job = job_for(options.pop("model"), **options)
    whole, history = fitted(rank_pool, job, parts)
    assert len(whole.states) == len(whole.epochs) >= 2
    assert [state.epochs for state in whole.states] == list(range(1, len(whole.epochs) + 1))
    # Any of them will do; each takes a fit.
    for state in whole.states[:1]:
        # Spark may deliver rows in another order when it computes them again.
        delivered = [{name: values[::-1] for name, values in part.items()} for part in parts]
        again, rest = fitted(rank_pool, dataclasses.replace(job, state=state), delivered)
        assert largest_difference(again.variables, whole.variables) <= 1e-6, state.epochs
        after = joined(state.history, rest)
        assert set(after) == set(history)
        for name, values in history.items():
            np.testing.assert_allclose(after[name], values, rtol=1e-5)
