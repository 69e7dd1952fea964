"""Fits whose gradients travel compressed: ranks that count as hosts of their own, against one process."""

import keras
import numpy as np
import pytest
from keras_reference import StopOnOneRank, fit_one_process, global_batches, job_for, split
from sklearn.datasets import load_digits
from tiers import in_tiers

EPOCHS, BATCH = 12, 32
# How much lower the accuracy on the test rows may be than without compression. Casts are in tests/compression.
MARGINS = {"int8:feedback": 0.015, "topk": 0.04, "powersgd": 0.015}


def digits():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype("float32"), labels[order].astype("float32")
    train = {"features": images[:1400], "label": labels[:1400]}
    return train, images[1400:], labels[1400:]


def start(shapes):
    """Returns Glorot's uniform weights, and biases of zero, that are the same on every backend.

    Backends draw differently from one seed, and the start decides what top-k costs a model this small: from six of
    them between 0.02 and 0.07 of accuracy, but from each of them the same on TensorFlow as on JAX.
    """
    rng = np.random.default_rng(0)
    limits = [np.sqrt(6 / sum(shape)) if len(shape) == 2 else 0 for shape in shapes]
    return [rng.uniform(-limit, limit, shape) for limit, shape in zip(limits, shapes, strict=True)]


def classifier():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential([keras.layers.Input((64,)), *layers])
    model.set_weights(start([weight.shape for weight in model.get_weights()]))
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy")
    return model


def accuracy(weights, images, labels):
    model = classifier()
    model.set_weights(weights)
    return float((model.predict(images, verbose=0).argmax(axis=1) == labels).mean())


@pytest.fixture(scope="module")
def reference():
    """Accuracy of one process on the global batches, and of a model that is not trained."""
    train, images, labels = digits()
    parts = split(train, (700, 700))
    weights, _ = fit_one_process(classifier(), list(global_batches(parts, BATCH, EPOCHS)), epochs=EPOCHS)
    return accuracy(weights, images, labels), accuracy(classifier().get_weights(), images, labels)


@pytest.mark.parametrize(
    "compression", in_tiers([*MARGINS], fast=["int8:feedback"], slow="tests/compression holds each of them")
)
def test_accuracy_when_gradients_are_compressed_then_is_that_of_one_process(rank_pool, reference, compression):
    train, images, labels = digits()
    job = job_for(classifier(), epochs=EPOCHS, batch_size=BATCH, shuffle=False, compression=compression)
    recordings = rank_pool.fit(job, split(train, (700, 700)), transport="tcp")
    trained, untrained = reference
    assert trained > 0.93 > 0.5 > untrained
    got = accuracy(recordings[0].variables[: len(classifier().weights)], images, labels)
    assert got >= trained - MARGINS[compression]


@pytest.mark.slow("two fits of twelve epochs")
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((900, 500, 0), {"compression": "topk", "bucket_bytes": 4096}),
        ((900, 500), {"compression": "int8:feedback", "frequency": 4}),
    ],
    ids=["buckets, an idle rank", "local steps"],
)
def test_fit_when_compressed_in_buckets_with_idle_ranks_and_local_steps_then_trains(rank_pool, sizes, options):
    train, images, labels = digits()
    job = job_for(classifier(), epochs=EPOCHS, batch_size=BATCH, shuffle=False, **options)
    recordings = rank_pool.fit(job, split(train, sizes), transport="tcp")
    got = accuracy(recordings[0].variables[: len(classifier().weights)], images, labels)
    assert got >= 0.88


def test_stop_when_gradients_are_compressed_then_the_request_arrives(rank_pool, tmp_path):
    stop = StopOnOneRank(str(tmp_path / "claim"), 2)
    train, _, _ = digits()
    # One percent of the values: a flag among them would be lost.
    job = job_for(classifier(), epochs=3, batch_size=BATCH, compression="topk", callbacks=[stop])
    recordings = rank_pool.fit(job, split(train, (700, 700)), transport="tcp")
    assert len(recordings[0].epochs) == 1
