"""Batch normalization over the rows of all ranks, against one process on the same global batches."""

import json

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, global_batches, job_for, largest_difference, split
from tiers import in_tiers

from elephant.config import FitConfig
from elephant.errors import ConfigurationError
from elephant.modeling.model_info import ModelInfo

# On PyTorch, another order of the rows in each batch alone changes what one process of Keras gets by up to 4e-5.
TOLERANCE = 1e-4 if keras.config.backend() == "torch" else 2e-5


def dense_model():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8, "tanh"),
        keras.layers.BatchNormalization(momentum=0.8),
        keras.layers.Dense(5),
        keras.layers.BatchNormalization(momentum=0.8, scale=False),
    ]
    model = keras.Sequential([keras.layers.Input((6,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def branched_model():
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((6,))
    images = keras.layers.Conv2D(4, 2)(keras.layers.Reshape((3, 2, 1))(inputs))
    branches = [keras.layers.BatchNormalization(momentum=0.8)(keras.layers.Dense(4, "tanh")(inputs))]
    branches += [keras.layers.GlobalAveragePooling2D()(keras.layers.BatchNormalization(momentum=0.8)(images))]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.add(branches)))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


CASES = {
    "dense": (dense_model, (23, 9, 0), {}),
    "branches, one of images, in buckets": (branched_model, (24, 16), {"bucket_bytes": 64}),
}


@pytest.mark.parametrize("case", in_tiers(CASES, fast=["dense"], slow="another model"))
def test_weights_and_statistics_when_synchronised_then_equal_one_process(rank_pool, case):
    build, sizes, options = case
    parts, model = split(classifier_data(sum(sizes)), sizes), build()
    if options:
        # XLA cannot contain the calls of the host that batch normalization makes: TensorFlow leaves it.
        model.jit_compile = keras.config.backend() == "tensorflow"
    job = job_for(model, epochs=2, batch_size=4, shuffle=False, sync_batch_norm=True, **options)
    recordings = rank_pool.fit(job, parts)
    expected, _ = fit_one_process(build(), list(global_batches(parts, 4, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="Keras refuses synchronized=True elsewhere")
def test_weights_and_statistics_when_one_layer_is_synchronized_by_its_own_word_then_equal_one_process(rank_pool):
    def build():
        keras.utils.set_random_seed(0)
        norm = keras.layers.BatchNormalization(momentum=0.8, synchronized=True)
        hidden = [keras.layers.Dense(8, "tanh"), norm, keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((6,)), *hidden])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    parts = split(classifier_data(32), (23, 9))
    recordings = rank_pool.fit(job_for(build(), epochs=2, batch_size=4, shuffle=False), parts)
    expected, _ = fit_one_process(build(), list(global_batches(parts, 4, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="Keras refuses synchronized=True elsewhere")
def test_synchronization_by_a_layers_own_word_when_ranks_train_alone_then_is_refused():
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.BatchNormalization(synchronized=True)])
    model.compile("sgd", "mse")
    facts = ModelInfo.of(model)
    assert ModelInfo.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    facts.check_normalization(FitConfig(num_workers=2))
    facts.check_normalization(FitConfig(num_workers=1, frequency="epoch"))
    for options in ({"frequency": "epoch"}, {"mode": "asynchronous"}):
        with pytest.raises(ConfigurationError, match=r"model: expected mode='synchronous' and frequency='batch'"):
            facts.check_normalization(FitConfig(num_workers=2, **options))


def test_statistics_when_a_mask_leaves_values_out_then_equal_one_process(rank_pool):
    def build():
        keras.utils.set_random_seed(0)
        layers = [
            keras.layers.Reshape((3, 2)),
            keras.layers.Masking(0.0),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.layers.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    columns = classifier_data(30)
    columns["features"][::3, :2] = 0
    columns["features"][1::4, 4:] = 0
    parts = split(columns, (19, 11))
    recordings = rank_pool.fit(job_for(build(), epochs=2, batch_size=4, shuffle=False, sync_batch_norm=True), parts)
    expected, _ = fit_one_process(build(), list(global_batches(parts, 4, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_synchronisation_when_ranks_train_alone_then_is_refused():
    with pytest.raises(ConfigurationError, match="sync_batch_norm: expected frequency='batch'. Received: .*'epoch'"):
        job_for(dense_model(), sync_batch_norm=True, frequency="epoch")


@pytest.mark.skipif(keras.config.backend() == "torch", reason="Keras on PyTorch takes a difference of squares itself")
def test_variance_when_values_are_far_from_zero_then_keeps_its_digits(rank_pool):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.BatchNormalization(momentum=0.0)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    columns = classifier_data(16)
    columns["features"] = columns["features"] + np.float32(1000)
    columns["label"] = columns["features"].copy()
    job = job_for(model, batch_size=8, shuffle=False, sync_batch_norm=True, label_array=True)
    recordings = rank_pool.fit(job, split(columns, (8, 8)))
    variance = columns["features"].astype("f8").var(axis=0)
    np.testing.assert_allclose(recordings[0].variables[3], variance, rtol=1e-3)
