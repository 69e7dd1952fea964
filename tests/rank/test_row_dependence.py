"""Rows that meet in a model's call are found before any step; usual architectures are let pass."""

import logging

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_reference import largest_difference

from elephant.backends.gradient_averager import GradientAverager
from elephant.collective.communicator import LocalCommunicator
from elephant.errors import UnsupportedError
from elephant.rank.trials.coupling import RankLosses
from elephant.rank.trials.loss_trial import may_couple_rows, try_out

ROWS = 32


def tried(model, x, y, **options):
    """Tries a model out; returns whether there was a reason to."""
    known = RankLosses(model, GradientAverager(LocalCommunicator(), lambda: 1.0))
    if not may_couple_rows(model):
        return False
    try_out(known, model, (x, y, None), **options)
    return True


def values_of(variables):
    return [np.array(ops.convert_to_numpy(variable)) for variable in variables]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


class Adds(layers.Layer):
    """Adds a loss in training alone."""

    def __init__(self, loss, **options):
        super().__init__(**options)
        self.loss_of = loss

    def call(self, inputs, training=False):
        if training:
            self.add_loss(0.1 * self.loss_of(inputs))
        return inputs


class Centers(layers.Layer):
    """Takes the mean of the rows off in training, as a normalization of the user's does, and its own mean else."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), trainable=False, initializer="zeros")

    def call(self, inputs, training=False):
        if not training:
            return inputs - self.mean
        mean = ops.mean(inputs, axis=0)
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return inputs - mean


class Sampling(layers.Layer):
    """Draws as a variational autoencoder does, and adds the divergence."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, inputs):
        mean, log_variance = ops.split(inputs, 2, axis=-1)
        drawn = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        self.add_loss(-0.5 * ops.mean(1 + log_variance - mean**2 - ops.exp(log_variance)))
        return mean + ops.exp(0.5 * log_variance) * drawn


class Drops(layers.Layer):
    """Drops whole rows, with draws that no generator of its own makes."""

    def call(self, inputs, training=False):
        if not training:
            return inputs
        kept = keras.random.uniform((ops.shape(inputs)[0], 1)) > 0.3
        self.add_loss(ops.mean(ops.where(kept, inputs, 0.0) ** 2))
        return ops.where(kept, inputs, 0.0)


class Scaled(layers.Layer):
    """A branch that begins with zero: what goes through it cannot be seen at first."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="zeros")

    def call(self, inputs):
        return inputs + self.scale * ops.mean(inputs, axis=0)


def functional(between, *shape, after=True):
    """Returns a model with a function between two layers, and rows for it."""
    inputs = keras.Input(shape or (6,))
    hidden = layers.Dense(5, "tanh")(inputs) if after else inputs
    outputs = layers.Dense(1)(layers.Flatten()(between(hidden)))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model, numbers(*(shape or (6,))), numbers(1, seed=1)


def noisy(between):
    """Returns a function of layers that draw, and normalize, around another one."""

    def build(hidden):
        hidden = layers.Dropout(0.4)(layers.BatchNormalization()(hidden))
        return layers.GaussianNoise(0.3)(between(hidden))

    return build


MEETING = {
    "operation": lambda h: h - ops.mean(h, axis=0),
    "operation among noise": noisy(lambda h: h - 0.1 * ops.mean(h, axis=0)),
    "lambda": layers.Lambda(lambda h: h - ops.mean(h, axis=0)),
    "activation": layers.Dense(4, activation=lambda h: h - ops.mean(h, axis=0)),
    "softmax over rows": layers.Softmax(axis=0),
    "cumulative": lambda h: ops.cumsum(h, axis=0),
    "neighbor": lambda h: h + ops.roll(h, 1, axis=0),
    "all axes": lambda h: h / ops.norm(h),
    "training alone": Centers(),
    "training alone, among noise": noisy(lambda h: Centers()(h)),
    "behind a zero": lambda h: Scaled()(h),
    "added sum": lambda h: Adds(ops.sum)(h),
    "added sum among noise": noisy(lambda h: Adds(lambda x: ops.sum(x**2))(h)),
    "added sum of rows": lambda h: Adds(lambda x: ops.sum(x**2, axis=-1))(h),
    "added variance": lambda h: Adds(lambda x: ops.var(x))(h),
    "added mean of some": lambda h: Adds(lambda x: ops.sum(ops.relu(x)) / ops.sum(ops.cast(x > 0, "float32")))(h),
    "regularizer": layers.Dense(4, activity_regularizer=lambda h: ops.sum(h) ** 2),
}


@pytest.mark.parametrize("name", MEETING)
def test_rows_when_they_meet_in_a_model_then_it_is_refused_and_left_as_it_was(name):
    keras.utils.set_random_seed(0)
    model, x, y = functional(MEETING[name])
    before = values_of(model.variables)
    said = "add_loss" if "added" in name or name == "regularizer" else "rows meet in the model's call or in a layer"
    with pytest.raises(UnsupportedError, match=f"{said}.*allowBatchCoupledLoss=True"):
        tried(model, x, y)
    with pytest.warns(UserWarning, match=said):
        tried(model, x, y, allowed=True)
    assert largest_difference(values_of(model.variables), before) == 0


def normalized(h):
    return layers.BatchNormalization(renorm=True)(layers.BatchNormalization()(h))


def attention(h):
    mixed = layers.MultiHeadAttention(2, 4, dropout=0.2)(h, h)
    h = layers.LayerNormalization()(h + layers.Dropout(0.1)(mixed))
    return h + layers.EinsumDense("abc,cd->abd", (None, 5))(h)


def recurrent(h):
    cell = layers.LSTM(4, return_sequences=True, dropout=0.3, recurrent_dropout=0.2)
    return layers.GRU(3)(layers.Bidirectional(cell)(h))


def squeezed(h):
    weights = layers.Dense(5, "sigmoid")(layers.GlobalAveragePooling1D()(h))
    return h * ops.expand_dims(weights, 1)


def patches(h):
    h = ops.reshape(h, (-1, 2, 2, 5))
    h = ops.transpose(h, (0, 2, 1, 3))[:, 0]
    return ops.concatenate([h, ops.repeat(h[:, :1], 2, axis=1)], axis=1)


def quantized(h):
    codes = ops.convert_to_tensor(numbers(5, seed=3)[:7])
    distances = ops.sum((ops.expand_dims(h, 1) - codes) ** 2, axis=-1)
    return h + ops.matmul(ops.one_hot(ops.argmin(distances, axis=1), 7), codes)


APART = {
    "residual": (lambda h: h + layers.Dense(5, "relu")(h), ()),
    "batch normalization": (noisy(normalized), ()),
    "noise": (noisy(lambda h: ops.tanh(h) * 2.0), ()),
    "lambda": (layers.Lambda(lambda h: h / ops.norm(h, axis=-1, keepdims=True)), ()),
    "user's draws": (lambda h: Drops()(h), ()),
    "sampling": (lambda h: Sampling()(layers.Dense(8)(h)), ()),
    "added mean": (lambda h: Adds(lambda x: ops.mean(x**2))(h), ()),
    "added mean among noise": (noisy(lambda h: Adds(lambda x: ops.mean(x**2))(h)), ()),
    "added constant": (noisy(lambda h: Adds(lambda x: ops.sum(ops.ones((3,))))(h)), ()),
    "regularizer": (lambda h: layers.ActivityRegularization(l2=0.1)(layers.Dense(4, activity_regularizer="l1")(h)), ()),
    "attention": (attention, (7, 6)),
    "recurrent": (recurrent, (7, 6)),
    "squeezed": (squeezed, (7, 6)),
    "patches": (patches, (4, 6)),
    "codes": (quantized, ()),
    "spectral": (lambda h: layers.Lambda(ops.tanh)(layers.SpectralNormalization(layers.Dense(4))(h)), ()),
    "depth": (lambda h: layers.Lambda(ops.tanh)(layers.SpatialDropout1D(0.5)(h)), (7, 6)),
}


@pytest.mark.parametrize("name", APART)
def test_rows_when_each_is_computed_by_itself_then_the_model_passes_and_is_left_as_it_was(name, caplog):
    caplog.set_level(logging.INFO, "elephant")
    keras.utils.set_random_seed(0)
    between, shape = APART[name]
    model, x, y = functional(between, *shape)
    before = values_of(model.variables)
    tried(model, x, y)
    assert not caplog.messages
    assert largest_difference(values_of(model.variables), before) == 0


def test_layers_of_keras_when_they_act_by_row_then_need_no_trial():
    known = [
        keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()]),
        functional(attention, 7, 6)[0],
        functional(recurrent, 7, 6)[0],
        functional(lambda h: ops.tanh(h) + h * 0.5)[0],
        keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=2, alpha=0.35),
    ]
    for model in known:
        model.compile("sgd", "mse")
    assert [may_couple_rows(model) for model in known] == [False] * len(known)


def test_operation_when_it_puts_rows_beside_each_other_then_is_no_elementwise_one():
    inputs = keras.Input((1,))
    model = keras.Model(inputs, ops.subtract(inputs, ops.reshape(inputs, (-1,))))
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="rows meet"):
        tried(model, numbers(1), numbers(ROWS, seed=1))


def test_output_when_rows_meet_in_one_without_a_loss_then_does_not_matter():
    inputs = keras.Input((6,))
    kept = layers.Dense(1, name="kept")(inputs)
    model = keras.Model(inputs, {"kept": kept, "shown": kept - ops.mean(kept, axis=0)})
    model.compile("sgd", {"kept": "mse"})
    assert tried(model, numbers(6), {"kept": numbers(1)})
    model.compile("sgd", {"kept": "mse", "shown": "mse"})
    with pytest.raises(UnsupportedError, match="rows meet"):
        tried(model, numbers(6), {"kept": numbers(1), "shown": numbers(1)})


def test_output_when_it_is_a_mean_over_the_rows_then_its_loss_tells():
    inputs = keras.Input((6,))
    keras.utils.set_random_seed(0)
    for reduce, couples in ((ops.mean, False), (ops.var, True)):
        model = keras.Model(inputs, reduce(layers.Dense(1)(inputs)))
        model.compile("sgd", lambda y_true, y_pred: y_pred)
        if couples:
            with pytest.raises(UnsupportedError, match="loss: expected the mean over the rows"):
                tried(model, numbers(6), numbers(1))
        else:
            assert tried(model, numbers(6), numbers(1))


def test_states_that_go_on_from_batch_to_batch_when_a_model_is_tried_then_are_as_they_were():
    inputs = keras.Input(batch_shape=(ROWS, 4, 2))
    recurrent = layers.LSTM(3, stateful=True)
    model = keras.Model(inputs, layers.Lambda(ops.tanh)(layers.Dense(1)(recurrent(inputs))))
    model.compile("sgd", "mse")
    x, y = numbers(4, 2), numbers(1)
    model(x)
    before = values_of(recurrent.states)
    assert tried(model, x, y)
    assert largest_difference(values_of(recurrent.states), before) == 0


def test_graph_of_a_layer_when_the_model_is_tried_then_is_not_made_and_kept():
    if keras.config.backend() != "tensorflow":
        pytest.skip("graphs of a layer's call are TensorFlow's")
    import tensorflow as tf

    class Compiled(layers.Layer):
        @tf.function
        def call(self, inputs, training=False):
            return self.norm(inputs, training=training)

        def build(self, shape):
            self.norm = layers.BatchNormalization()
            self.norm.build(shape)

    model, x, y = functional(lambda h: Compiled()(h))
    assert tried(model, x, y)
    assert not tf.config.functions_run_eagerly()
    before = ops.convert_to_numpy(model.layers[2].norm.moving_mean)
    model.train_on_batch(x, y)
    assert np.abs(ops.convert_to_numpy(model.layers[2].norm.moving_mean) - before).max() > 0
