"""What servers begin with and leave, as the driver's model has it."""

import random

import keras
import numpy as np
import pytest
from keras_reference import job_for, regression_model

from elephant.data.schema import RowSpec, TensorSpec
from elephant.driver.server_model import ServerModel
from elephant.errors import UnsupportedError
from elephant.parameter_server.control_client import FetchedModel

tf = pytest.importorskip("tensorflow")

SIX = RowSpec(0, (TensorSpec((6,), "float32"),))


def normalising_model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def test_model_when_servers_have_changed_everything_then_takes_it_and_gives_it_back():
    served = ServerModel(job_for(normalising_model(), mode="asynchronous", learning_rate=0.5), SIX)
    slots, iterations = served.slots()
    assert (served.rule["name"], served.rule["learning_rate"], iterations, len(slots)) == ("adam", 0.5, 0, 2)
    rng = np.random.default_rng(1)
    kernels = [rng.normal(size=variable.shape) for variable in served.model.trainable_variables]
    values = served.layout.pack(kernels)
    moments = [served.layout.pack([np.abs(kernel) + index for kernel in kernels]) for index in range(2)]
    state = np.arange(8.0)
    served.take(FetchedModel(values=values, slots=tuple(moments), iterations=12, state=state))
    np.testing.assert_array_equal(served.weights(), values)
    np.testing.assert_array_equal(served.state(), state)
    taken, iterations = served.slots()
    assert iterations == int(served.model.optimizer.iterations) == 12
    for vector, wanted in zip(taken, moments, strict=True):
        np.testing.assert_array_equal(vector, wanted)
    np.testing.assert_array_equal(served.model.layers[1].moving_variance, state[4:])


def test_model_when_workers_have_optimizers_of_their_own_then_servers_add_and_keep_no_slots():
    served = ServerModel(job_for(normalising_model(), mode="asynchronous", frequency=4), SIX)
    assert (served.rule, served.slots()) == ({"name": "add"}, ([], 0))
    served.take(FetchedModel(values=served.weights() + 1, slots=(), iterations=30, state=served.state()))
    assert int(served.model.optimizer.iterations) == 0


def test_model_when_built_then_follows_the_seed_and_disturbs_nobody():
    def drawn():
        return random.random(), np.random.random(), float(tf.random.uniform(())), float(keras.random.uniform(()))

    def unbuilt():
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def weights(seed):
        return ServerModel(job_for(unbuilt, mode="asynchronous", seed=seed), SIX).weights()

    keras.utils.set_random_seed(5)
    before = [drawn(), drawn()]
    job = job_for(regression_model("sgd"), mode="asynchronous", seed=3)
    keras.utils.set_random_seed(5)
    after = [drawn()]
    ServerModel(job, SIX)
    assert [*after, drawn()] == before
    np.testing.assert_array_equal(weights(1), weights(1))
    assert np.abs(weights(1) - weights(2)).max() > 0.01


def test_model_when_its_optimizer_has_no_rule_then_says_what_to_do():
    job = job_for(regression_model(keras.optimizers.Lion()), mode="asynchronous")
    with pytest.raises(UnsupportedError, match="optimizer: expected one of SGD.*frequency=k"):
        ServerModel(job, SIX)
    ServerModel(job_for(regression_model(keras.optimizers.Lion()), mode="asynchronous", frequency="epoch"), SIX)
