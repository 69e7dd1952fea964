"""Mixed precision given to a model that is there already, against a model that Keras made under the policy."""

import keras
import numpy as np
import pytest
from keras import layers
from tiers import in_tiers

from elephant.modeling.model_spec import model_source
from elephant.modeling.variables import (
    lower_precision,
    read_variables,
    restored_optimizer,
    state_variables,
    write_variables,
)

POLICIES = ("mixed_float16", "mixed_bfloat16")


@pytest.fixture
def default_policy():
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


class Blocks(keras.Model):
    """Sublayers in a list, and one that is made when the model is built."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks = [layers.Dense(8, activation="relu"), layers.Dense(8, activation="tanh")]
        self.last = None

    def build(self, shape):
        self.last = layers.Dense(1)
        super().build(shape)

    def call(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.last(inputs)


def dense():
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dense(1)]
    )


def attention():
    inputs = layers.Input((6,))
    steps = layers.Dense(4)(layers.Reshape((6, 1))(inputs))
    mixed = layers.MultiHeadAttention(2, 2)(steps, steps)
    nested = keras.Sequential([layers.Input((6, 4)), layers.LSTM(3, return_sequences=True), layers.Flatten()])
    return keras.Model(inputs, layers.Dense(1)(nested(layers.LayerNormalization()(steps + mixed))))


def convolution():
    inputs = layers.Input((6,))
    image = layers.Conv1D(4, 3, activation="relu")(layers.Reshape((6, 1))(inputs))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(image)))


def made(build, *, optimizer=None):
    keras.utils.set_random_seed(3)
    model = build()
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    model(np.zeros((1, 6), "float32"))
    model.optimizer.build(model.trainable_variables)
    return model


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 6)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def trained(model):
    history = model.fit(*rows(), epochs=3, batch_size=8, shuffle=False, verbose=0)
    return history.history["loss"]


@pytest.mark.parametrize("policy", in_tiers(POLICIES, fast=["mixed_float16"], slow="the same without a scaled loss"))
@pytest.mark.parametrize(
    "build", in_tiers([dense, attention, convolution, Blocks], fast=["dense", "Blocks"], slow="other layers")
)
def test_model_when_its_precision_is_lowered_then_trains_as_one_made_under_the_policy(default_policy, policy, build):
    model = made(build)
    lower_precision(model, policy)
    default_policy(policy)
    reference = made(build)
    default_policy("float32")
    for own, other in zip(model._flatten_layers(), reference._flatten_layers(), strict=True):
        assert own.compute_dtype == other.compute_dtype, own.name
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert type(model.optimizer) is type(reference.optimizer)
    for variable, value in zip(reference.weights, model.weights, strict=True):
        variable.assign(value)
    assert trained(model) == pytest.approx(trained(reference), rel=1e-6)
    for own, other in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
    in_full = made(build)
    trained(in_full)
    weights = zip(model.get_weights(), in_full.get_weights(), strict=True)
    assert max(np.abs(own - other).max() for own, other in weights) > 1e-5


@pytest.mark.parametrize("policy", in_tiers(POLICIES, fast=["mixed_float16"], slow="the same without a scaled loss"))
def test_model_of_an_archive_when_its_precision_is_lowered_then_keeps_its_state(policy):
    original = made(dense)
    trained(original)
    before = read_variables(original)
    model = model_source(original).build()
    lower_precision(model, policy)
    for own, other in zip(read_variables(model), before, strict=True):
        np.testing.assert_array_equal(own, other)
    trained(model)
    after = read_variables(model)
    assert [value.shape for value in after] == [value.shape for value in before]
    # The first steps of a loss scale may overflow, and are left out.
    assert 12 < int(model.optimizer.iterations) <= 24
    write_variables(original, after)
    assert {layer.dtype_policy.name for layer in original._flatten_layers()} == {"float32"}
    assert len(state_variables(original)) == len(after)


def test_layers_and_optimizers_that_the_user_has_chosen_are_left_as_they_are():
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)

    def build():
        return keras.Sequential([layers.Input((6,)), layers.Dense(4, dtype="float64"), layers.Dense(1)])

    model = made(build, optimizer=scaling)
    lower_precision(model, "mixed_float16")
    assert [layer.compute_dtype for layer in model.layers] == ["float64", "float16"]
    assert model.optimizer is scaling
    assert restored_optimizer(scaling) is scaling
    plain = made(dense)
    lower_precision(plain, "mixed_bfloat16")
    assert isinstance(plain.optimizer, keras.optimizers.Adam)
