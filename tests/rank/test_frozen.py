"""Of a model with a frozen base, ranks exchange the gradients of its adapters, and states have the base once."""

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, global_batches, job_for, largest_difference, split

from elephant.collective import api

pytestmark = pytest.mark.usefixtures("by_value")

EPOCHS, BATCH, WIDTH, RANK = 2, 4, 500, 4
SIZES = (13, 9)
# Kernels of a width of 10,000, in which the two layers below have 100 million frozen numbers.
LARGE = 10_000


def adapted_model(optimizer):
    """Returns a model of two frozen layers and a head, of which the wide one has adapters of rank 4."""
    keras.utils.set_random_seed(0)
    wide = keras.layers.Dense(WIDTH, use_bias=False, name="wide")
    layers = [keras.layers.Dense(WIDTH, "tanh", trainable=False, name="narrow"), wide, keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    wide.enable_lora(RANK)
    model.compile(optimizer, "mse")
    return model


def num_trained(width):
    return 2 * RANK * width + width + 1


class SentBytes(keras.callbacks.Callback):
    """Logs the bytes that a rank has sent in a step, the first one left out."""

    def on_train_begin(self, logs=None):
        self.sent = []

    def on_train_batch_end(self, batch, logs=None):
        self.sent.append(api.current_collective().bytes_sent)

    def on_epoch_end(self, epoch, logs=None):
        logs["sent"] = float(np.diff(self.sent).max())


class Assigns(keras.callbacks.Callback):
    """Assigns to a frozen weight at the begin of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            bias = self.model.get_layer("narrow").bias
            bias.assign(bias + 1.0)


def test_ranks_when_a_base_is_frozen_then_send_the_adapters_gradients_alone_and_equal_one_process(rank_pool):
    model, parts = adapted_model(keras.optimizers.SGD(0.01, momentum=0.9)), split(classifier_data(22), SIZES)
    job = job_for(model, epochs=EPOCHS, batch_size=BATCH, shuffle=False, callbacks=[SentBytes()])
    recordings = rank_pool.fit(job, parts, transport="tcp")
    # Two ranks send each gradient once; many ranks send it nearly twice.
    sent = recordings[0].epochs[-1]["sent"]
    assert 4 * num_trained(WIDTH) <= sent < 4 * num_trained(WIDTH) + 1024
    assert 2 * (4 * num_trained(LARGE) + 1024) < 2**20 < 4 * LARGE**2
    batches = list(global_batches(parts, BATCH, EPOCHS))
    weights, _ = fit_one_process(model, batches, EPOCHS)
    assert largest_difference(recordings[0].variables[: len(weights)], weights) <= 1e-6
    # The optimizer has moments of what is trained, its count and its rate.
    num_kept = sum(value.size for value in recordings[0].variables[len(weights) :])
    assert num_kept == num_trained(WIDTH) + 2


def test_states_when_a_base_is_frozen_then_have_it_once_unless_something_assigns_to_it(rank_pool):
    model, parts = adapted_model(keras.optimizers.Adam(0.01)), split(classifier_data(22), SIZES)
    options = {"epochs": 3, "batch_size": BATCH, "checkpoint_path": "kept", "callbacks": [Assigns()]}
    first, *others = rank_pool.fit(job_for(model, **options), parts)[0].states
    names = {path: f"model/{path}" for path in ("narrow/kernel", "narrow/bias", "wide/kernel")}
    assert sorted(first.frozen) == sorted(names.values())
    for path, name in names.items():
        layer, _, kind = path.partition("/")
        of_model = {one.name: one for one in model.get_layer(layer).weights}[kind]
        np.testing.assert_array_equal(first.arrays[name], keras.ops.convert_to_numpy(of_model))
    for state in others:
        assert sorted(state.frozen) == [names["narrow/kernel"], names["wide/kernel"]]
        assert all(state.arrays[name] is first.arrays[name] for name in state.frozen)
        np.testing.assert_array_equal(state.arrays[names["narrow/bias"]], first.arrays[names["narrow/bias"]] + 1)
