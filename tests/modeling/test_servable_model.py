"""A trained model travels to where it predicts without what only training needs."""

import keras
import numpy as np
import pytest
from tiers import in_tiers

from elephant.data.schema import RowSpec, TensorSpec
from elephant.errors import ConfigurationError
from elephant.modeling.fixed_batch import most_rows
from elephant.modeling.model_info import ModelInfo
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
    facts = ModelInfo.of(keras.Sequential([keras.layers.Input((3,), name="pixels"), keras.layers.Dense(1)]))
    assert [(known.name, known.shape) for known in facts.inputs] == [("pixels", (3,))]
    assert [known.shape for known in facts.outputs] == [(1,)] and not facts.scheduled_rate


def of_ten_rows(stateful=False):
    keras.utils.set_random_seed(6)
    inputs = keras.layers.Input(batch_shape=(10, 4, 2))
    parts = [keras.layers.LSTM(3, stateful=stateful)(inputs), keras.ops.reshape(inputs, (10, 8))]
    model = keras.Model(inputs, {"sum": keras.layers.Dense(1, name="sum")(keras.layers.Concatenate()(parts))})
    model.compile("adam", "mse", metrics={"sum": ["mae"]})
    return model, np.random.default_rng(3).normal(size=(20, 4, 2)).astype("float32")


@pytest.mark.parametrize("num_rows", in_tiers([1, 7, 10], fast=[7], slow="another number of rows"))
def test_servable_when_its_batches_have_one_size_then_takes_fewer_rows_too(num_rows):
    model, rows = of_ten_rows()
    labels = rows[:, :, 0].sum(axis=1)
    built = Servable.of(model_source(model)).build()
    assert most_rows(built) == 10
    # The rows of a whole batch, of which the model gives each its own output.
    wanted = keras.ops.convert_to_numpy(model(rows[:10], training=False)["sum"])[:num_rows]
    given = built.predict_on_batch(rows[:num_rows])["sum"]
    np.testing.assert_allclose(given, wanted, atol=1e-6)
    logs = built.test_on_batch(rows[:num_rows], {"sum": labels[:num_rows, None]}, return_dict=True)
    assert logs["loss"] == pytest.approx(np.mean((wanted[:, 0] - labels[:num_rows]) ** 2), rel=1e-5)
    assert logs["mae"] == pytest.approx(np.mean(np.abs(wanted[:, 0] - labels[:num_rows])), rel=1e-5)


def test_servable_when_a_call_has_told_a_number_of_rows_that_it_does_not_need_then_takes_any():
    model, rows = keras.Sequential([keras.layers.Dense(2)]), np.ones((5, 3), "float32")
    model(rows[:2])
    built = Servable.of_model(model).build()
    assert built.inputs[0].shape[0] == 2 and most_rows(built) is None
    assert built.predict_on_batch(rows).shape == (5, 2)


def test_facts_when_batches_go_on_where_others_have_ended_then_say_so():
    assert [ModelInfo.of(of_ten_rows(stateful)[0]).is_stateful for stateful in (False, True)] == [False, True]


def test_source_when_a_model_is_not_compiled_then_predicts_and_is_not_trained():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    model.layers[0].enable_lora(2)
    source = model_source(model, to_train=False)
    rows = np.ones((4, 3), "float32")
    for built in (source.build(), Servable.of(source).build()):
        np.testing.assert_allclose(built.predict_on_batch(rows), model.predict_on_batch(rows), atol=1e-6)
    for one in (model, source):
        with pytest.raises(ConfigurationError, match="expected a compiled model. Received: .* without optimizer"):
            model_source(one)
