"""Arguments of SparkModel: which are known, and what an unknown one is told. No Spark runs here."""

import inspect

import keras
import pytest

from elephant import SparkModel
from elephant.spark.rdd_options import OPTIONS


def compiled():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_options_when_listed_then_leave_out_what_has_an_argument_of_its_own():
    named = {*inspect.signature(SparkModel).parameters, *inspect.signature(SparkModel.fit).parameters}
    assert set(OPTIONS) & named == {"class_weight", "shuffle", "steps_per_epoch"}
    assert "asynchronous" not in OPTIONS


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ({"epochs": 3}, "no argument 'epochs'"),
        ({"validation_fraction": 0.1}, "Pass validation_split to fit"),
        ({"parameter_server_mode": "http"}, "one protocol between workers and servers"),
        ({"batchsize": 8}, "Did you mean 'batch_size'"),
        ({"foo": "bar"}, "Known: model, mode, frequency, num_workers, batch_size, custom_objects, port, algorithm"),
    ],
)
def test_spark_model_when_an_argument_is_not_known_then_the_error_says_what_is(argument, told):
    with pytest.raises(TypeError, match=told):
        SparkModel(compiled(), **argument)
