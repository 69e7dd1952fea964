"""A trained model travels to where it predicts without what only training needs."""

import keras
import numpy as np
import pytest

from elephant.data.schema import RowSpec, TensorSpec
from elephant.modeling.model_spec import Servable, model_source
from elephant.modeling.variables import read_variables


def trained(units=64):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    data = np.random.default_rng(1).normal(size=(64, 32)).astype("float32")
    model.fit(data, data.sum(axis=1), verbose=0)
    return model, data


def test_servable_when_made_of_an_archive_then_lacks_the_optimizer_s_state_and_predicts_alike():
    model, data = trained(units=2048)
    source = model_source(model)
    servable = Servable.of(source)
    weights = sum(weight.numpy().nbytes for weight in model.weights)
    assert len(source.archive) > 3 * weights
    assert len(servable.archive) < 1.5 * weights
    built = servable.build()
    np.testing.assert_array_equal(built.predict(data, verbose=0), model.predict(data, verbose=0))
    given = model.evaluate(data, data.sum(axis=1), verbose=0, return_dict=True)
    again = built.evaluate(data, data.sum(axis=1), verbose=0, return_dict=True)
    assert again == pytest.approx(given, rel=1e-6)
    assert built.optimizer.variables == [] or len(built.optimizer.variables) == 2


def test_servable_when_a_function_builds_the_model_then_has_its_trained_weights():
    def build():
        model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    model, data = build(), np.random.default_rng(2).normal(size=(32, 4)).astype("float32")
    model.fit(data, data[:, :2], verbose=0)
    rows = RowSpec(0, (TensorSpec((4,), "float32"),))
    source = model_source(build).with_variables(read_variables(model), rows)
    servable = Servable.of(source)
    assert [weight.shape for weight in servable.weights] == [tuple(weight.shape) for weight in model.weights]
    np.testing.assert_array_equal(servable.build().predict(data, verbose=0), model.predict(data, verbose=0))


def test_servable_when_a_model_is_not_compiled_then_predicts_all_the_same():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    data = np.ones((4, 3), "float32")
    built = Servable.of_model(model).build()
    np.testing.assert_array_equal(built.predict(data, verbose=0), model.predict(data, verbose=0))


def test_facts_when_a_model_is_not_compiled_then_are_those_of_its_inputs_and_outputs():
    from elephant.modeling.model_info import ModelInfo

    facts = ModelInfo.of(keras.Sequential([keras.layers.Input((3,), name="pixels"), keras.layers.Dense(1)]))
    assert [(known.name, known.shape) for known in facts.inputs] == [("pixels", (3,))]
    assert [known.shape for known in facts.outputs] == [(1,)] and not facts.scheduled_rate
