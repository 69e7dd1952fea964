"""Metrics that are built before the first step: TensorFlow traces it once where it can, and the numbers are Keras'."""

import keras
import numpy as np
import pytest
from keras_reference import two_groups

from elephant.modeling.variables import build_metrics, optimizer_slots, optimizers_of, rated_optimizers

tf = pytest.importorskip("tensorflow")

ROWS = 12


def sequential(metrics):
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")]), metrics


def functional(metrics):
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3, "softmax")(inputs)), metrics


def two_outputs(metrics):
    inputs = keras.Input((4,))
    outputs = {"a": keras.layers.Dense(3, "softmax")(inputs), "b": keras.layers.Dense(1, "sigmoid")(inputs)}
    return keras.Model(inputs, outputs), {"a": metrics, "b": ["accuracy"]}


class OwnOutputs(keras.Sequential):
    """Its metrics see something else than its layers give."""

    def call(self, *args, **kwargs):
        return super().call(*args, **kwargs)[:, :1]


def own(metrics):
    return OwnOutputs([keras.layers.Input((4,)), keras.layers.Dense(3, "sigmoid")]), metrics


def compiled(make):
    keras.utils.set_random_seed(3)
    model, metrics = make(["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)] if make is not own else ["acc"])
    losses = {"a": "sparse_categorical_crossentropy", "b": "binary_crossentropy"}
    loss = losses if make is two_outputs else losses["b" if make is own else "a"]
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics)
    model.optimizer.build(model.trainable_variables)
    return model


def batches_of(make):
    rng = np.random.default_rng(0)
    labels = {"a": rng.integers(0, 3, ROWS), "b": rng.integers(0, 2, (ROWS, 1))}
    y = labels if make is two_outputs else labels["b" if make is own else "a"]
    return tf.data.Dataset.from_tensor_slices((rng.normal(size=(ROWS, 4)).astype("float32"), y)).batch(4)


@pytest.mark.parametrize(
    ("make", "traces"),
    [(sequential, 1), (functional, 1), (two_outputs, 2), (own, 2)],
    ids=["sequential", "functional", "two outputs", "own outputs"],
)
def test_metrics_when_built_before_the_first_step_then_counts_are_those_of_keras(make, traces):
    model, plain, batches = compiled(make), compiled(make), batches_of(make)
    traced, step = [], model.train_step
    model.train_step = lambda data: traced.append(1) or step(data)
    build_metrics(model, batches)
    history = model.fit(batches, epochs=2, verbose=0, shuffle=False).history
    expected = plain.fit(batches, epochs=2, verbose=0, shuffle=False).history
    assert len(traced) == traces
    assert list(history) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


def test_optimizers_when_one_has_one_for_each_group_of_variables_then_their_rates_and_counts_are_no_slots():
    model, _ = sequential(None)
    model.compile(two_groups(), "mse")
    model.optimizer.build(model.trainable_variables)
    whole = model.optimizer
    model.first_part = whole.optimizers[0]
    assert optimizers_of(model) == [whole] and rated_optimizers(model) == whole.optimizers
    # Adam's two slots of the kernel, and the momentum of the bias.
    assert sorted(tuple(slot.shape) for slot in optimizer_slots(model)) == [(3,), (4, 3), (4, 3)]


def test_metrics_when_there_are_no_labels_or_metrics_then_nothing_is_built():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    build_metrics(model, tf.data.Dataset.from_tensors((np.zeros((2, 4)), np.zeros((2, 4)))))
    model.compile("sgd", "mse", metrics=["mae"])
    build_metrics(model, tf.data.Dataset.from_tensors((np.zeros((2, 4)),)))
    build_metrics(model, iter([]))
    assert len(model.metrics_variables) == 2
