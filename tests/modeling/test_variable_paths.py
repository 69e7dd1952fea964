"""Paths of variables are those of the model, however often a process has built it, and wherever from."""

import re

import keras
import numpy as np
import pytest
from keras import layers, ops

from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import model_source
from elephant.modeling.variable_paths import (
    StateReader,
    assign_state,
    generator_paths,
    optimizer_paths,
    paths_in_order,
    read_by_path,
    state_paths,
    variable_paths,
)
from elephant.modeling.variables import FLOAT16, lower_precision, read_variables, state_variables


@keras.saving.register_keras_serializable("tests")
class PathBlock(layers.Layer):
    """A layer with two weights without names, and inner layers of which one is named after it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.narrow, self.wide = layers.Dense(3), layers.Dense(6, name=f"{self.name}_wide")
        self.drop = layers.Dropout(0.5)

    def build(self, shape):
        self.scales = [self.add_weight(shape=(6,), initializer="ones") for _ in range(2)]
        self.narrow.build(shape)
        self.wide.build((None, 3))

    def call(self, x, training=False):
        return self.drop(self.wide(self.narrow(x)), training=training) * self.scales[0] + self.scales[1]


def model_of(optimizer="adam"):
    inner = keras.Sequential([layers.Input((6,)), layers.Dense(6), layers.Dense(6, name="block_4")])
    inputs = keras.Input((6,))
    shared = layers.Dense(6)
    x = shared(PathBlock()(PathBlock()(shared(inner(inputs)))))
    model = keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization()(x)))
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    return model


OF_BLOCK = ["variable", "variable_1", "dense/kernel", "dense/bias", "path_block_wide/kernel", "path_block_wide/bias"]


def test_paths_when_layers_are_numbered_by_the_process_then_are_those_of_the_model():
    model = model_of()
    expected = {f"sequential/{path}" for path in ("dense/kernel", "dense/bias", "block_4/kernel", "block_4/bias")}
    expected |= {"dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"}
    expected |= {f"path_block/{path}" for path in OF_BLOCK}
    expected |= {f"path_block_1/{path.replace('block_', 'block_1_')}" for path in OF_BLOCK}
    expected |= {f"batch_normalization/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")}
    assert variable_paths(model).keys() - generator_paths(model).keys() == expected
    assert [*generator_paths(model)] == [f"path_block{end}/dropout/seed_generator_state" for end in ("", "_1")]
    assert [id(one) for one in variable_paths(model).values()] == [id(one) for one in model.variables]
    again = model_of()
    assert again.layers[-1].name != model.layers[-1].name
    # In an archive the names are fixed, and inner layers are built before outer ones.
    for other in (again, model_source(again).build()):
        assert [*state_paths(other)] == [*state_paths(model)]
        assert [*generator_paths(other)] == [*generator_paths(model)]


def test_paths_when_two_variables_have_one_name_then_differ():
    class Twice(layers.Layer):
        def build(self, shape):
            self.first, self.second = layers.Dense(2, name="same"), layers.Dense(2, name="same")
            self.third = layers.Dense(2, name="same_1")
            for layer in (self.first, self.second, self.third):
                layer.build(shape)

        def call(self, x):
            return self.first(x) + self.second(x) + self.third(x)

    model = keras.Sequential([layers.Input((2,)), Twice(name="twice")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    paths = variable_paths(model)
    assert [path for path in paths if "kernel" in path] == [f"twice/same{end}/kernel" for end in ("", "_1", "_1_1")]
    slots = optimizer_paths(model.optimizer, paths)
    assert {path for path in slots if "kernel" in path} == {
        f"optimizer/twice/same{end}/kernel/momentum" for end in ("", "_1", "_1_1")
    }
    # Each is that of its weight.
    model.optimizer.apply(
        [ops.full(one.shape, float(place)) for place, one in enumerate(paths.values())], [*paths.values()]
    )
    for place, path in enumerate(paths):
        np.testing.assert_allclose(ops.convert_to_numpy(slots[f"optimizer/{path}/momentum"]), -0.1 * place, rtol=1e-6)


def test_paths_when_optimizers_hold_others_then_name_what_these_hold():
    by_name = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.05, momentum=0.9))
    by_name[".*kernel"] = keras.optimizers.Adam(0.01, use_ema=True)
    found = optimizer_paths(
        (model := model_of(keras.optimizers.MultiOptimizer(by_name))).optimizer, variable_paths(model)
    )
    assert [id(one) for one in found.values()] == [id(one) for one in model.optimizer.variables]
    of_kernel = {path.rpartition("/")[2] for path in found if path.startswith("optimizer/dense/kernel/")}
    assert of_kernel == {"momentum", "velocity", "average"}
    assert {f"optimizer/iteration{end}" for end in ("", "_1", "_2")} <= found.keys()
    scaled = model_of(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)))
    paths = state_paths(scaled)
    assert {"scale/dynamic_scale", "scale/step_counter", "optimizer/dense/kernel/velocity"} <= paths.keys()
    assert [id(paths[path]) for path in paths_in_order(scaled)] == [id(one) for one in state_variables(scaled)]


def test_state_when_assigned_then_is_what_was_read_with_or_without_a_scale():
    model, other = model_of(), model_of()
    for place, variable in enumerate(state_variables(model)):
        variable.assign(np.full(variable.shape, place))
    # Mixed precision puts a scale around the optimizer, which a state without one leaves as it is.
    lower_precision(other, FLOAT16)
    assign_state(state_paths(other), read_by_path(state_paths(model)), remedy="")
    for value, expected in zip(read_variables(other), read_variables(model), strict=True):
        np.testing.assert_array_equal(value, expected)
    other.optimizer.dynamic_scale.assign(8.0)
    state = read_by_path(state_paths(other))
    assert state["scale/dynamic_scale"] == 8.0
    assign_state(state_paths(model), state, remedy="")


def test_frozen_weights_when_read_again_then_are_the_same_arrays_until_something_assigns_to_one():
    base = keras.Sequential([layers.Dense(4, name="dense"), layers.BatchNormalization(name="norm")], name="base")
    model = keras.Sequential([layers.Input((3,)), base, layers.Dense(2, name="head")])
    base.trainable = False
    model.layers[-1].enable_lora(2)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    never_trained = ["base/dense/kernel", "base/dense/bias", "base/norm/gamma", "base/norm/beta", "head/kernel"]
    reader, factors = StateReader(), {"head/bias", "head/lora_kernel_a", "head/lora_kernel_b"}
    first, frozen = reader.read(model)
    assert sorted(frozen) == sorted(f"model/{path}" for path in never_trained)
    assert {path for path in first if path.startswith("optimizer/head/")} == {
        f"optimizer/{path}/{slot}" for path in factors for slot in ("momentum", "velocity")
    }
    model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
    again, frozen = reader.read(model)
    assert [again[path] is first[path] for path in again] == [path in frozen for path in first]
    for path, value in read_by_path(state_paths(model)).items():
        np.testing.assert_array_equal(again[path], value)
    base.layers[0].kernel.assign(base.layers[0].kernel * -0.0)
    changed, frozen = reader.read(model)
    assert "model/base/dense/kernel" not in frozen and len(frozen) == 4
    np.testing.assert_array_equal(changed["model/base/dense/kernel"], np.zeros((3, 4)))
    # What has changed once may do so again.
    base.layers[0].kernel.assign(first["model/base/dense/kernel"])
    assert reader.read(model)[1] == frozen


def test_state_when_of_another_model_then_says_what_is_missing_too_many_or_of_another_shape():
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2, name="head")])
    state = {"model/head/bias": np.ones(4), "model/dense/kernel": np.ones(2), "random/0/x": np.ones(2)}
    before = model.get_weights()
    message = (
        "model: expected a state with the 2 variables that the model and its optimizer have. Received: one without: "
        "model/head/kernel; with more: model/dense/kernel; with others: model/head/bias of shape (4,), not (2,). Do so."
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        assign_state({f"model/{path}": one for path, one in variable_paths(model).items()}, state, remedy="Do so.")
    for value, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    many = {f"model/w{number}": np.zeros(1) for number in range(8)}
    with pytest.raises(ConfigurationError, match="model/w3, model/w4 and 3 more"):
        assign_state({}, many, remedy="")
