"""`SparkModel`'s arguments: what is known, what is not, and what does not go together. No Spark."""

import enum
import inspect
import re

import keras
import pytest

from elephant import KerasEstimator, LearningRateWarmup, SparkMLlibModel, SparkModel, load_spark_model
from elephant.backends import current
from elephant.config import Timeouts
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.spark.params import check_fit
from elephant.spark.rdd.model import OPTIONS


def model_of(optimizer="sgd"):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


class Mode(str, enum.Enum):
    """Elephas' way to name a mode."""

    HOGWILD = "hogwild"


def test_arguments_when_unknown_then_the_error_lists_the_known_ones():
    with pytest.raises(
        TypeError, match=r"SparkModel has no argument 'foo'. Known: model, mode, .*learning_rate.*"
    ) as told:
        SparkModel(model_of(), foo="bar")
    assert all(name in str(told.value) for name in OPTIONS)
    with pytest.raises(TypeError, match="SparkMLlibModel has no argument 'learning_rat'. Did you mean 'learning_rate'"):
        SparkMLlibModel(model_of(), learning_rat=0.1)
    with pytest.raises(TypeError, match="'parameter_server_mode'. Elephant has one protocol .*: leave it out."):
        SparkModel(model_of(), parameter_server_mode="http")
    with pytest.raises(TypeError, match="no param 'validation_fraction'. Did you mean 'validationFraction'"):
        KerasEstimator(model=model_of(), validation_fraction=0.1)
    with pytest.raises(TypeError, match="Pass validation_split to fit"):
        SparkModel(model_of(), validation_fraction=0.1)
    with pytest.raises(TypeError, match=r"SparkModel.fit has no argument 'epoch'. Did you mean 'epochs'\?"):
        SparkModel(model_of()).fit(None, epoch=3)


def test_options_when_listed_then_are_those_of_the_estimator_without_what_has_an_argument_of_its_own():
    named = {*inspect.signature(SparkModel).parameters, *inspect.signature(SparkModel.fit).parameters}
    assert set(OPTIONS) & named == {"class_weight", "shuffle", "steps_per_epoch"}
    assert not set(OPTIONS) & {"asynchronous", "validation_fraction"}
    # Of the estimator: columns, and preprocessing of them, an RDD has none of.
    of_the_estimator = {
        re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", name)
        for name in inspect.signature(KerasEstimator).parameters
        if "Col" not in name and "reprocessing" not in name
    }
    elsewhere = {"model", "custom_objects", "callbacks", "validation_fraction", "inference_batch_size", "unknown"}
    # What is said of predictions before there is a model.
    elsewhere |= {"inference_use_gpu"}
    # Of the estimator alone.
    elsewhere |= {"driver_callbacks", "events_path"}
    assert of_the_estimator - elsewhere - named <= set(OPTIONS)


@pytest.mark.parametrize("weights", [{0: -1.0}, {"spam": 2.0}, {0: float("nan")}, [1.0, 2.0]])
def test_class_weight_when_it_is_no_dictionary_of_weights_then_says_so_before_the_fit(weights):
    with pytest.raises(ConfigurationError, match="class_weight: "):
        SparkModel(model_of(), class_weight=weights)


def test_class_weight_when_saved_and_loaded_then_is_kept(tmp_path):
    path = str(tmp_path / "model.keras")
    SparkModel(model_of(), class_weight={0: 1.0, 3: 2.5}).save(path)
    assert load_spark_model(path).get_config()["class_weight"] == {0: 1.0, 3: 2.5}
    SparkModel(model_of(), class_weight="balanced").save(path)
    assert load_spark_model(path).get_config()["class_weight"] == "balanced"


def test_words_when_members_of_an_enumeration_then_are_their_values():
    assert SparkModel(model_of(), mode=Mode.HOGWILD).get_config()["mode"] == "hogwild"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mode": "parallel"}, ConfigurationError, "mode: expected one of synchronous, asynchronous, hogwild"),
        ({"frequency": "hour"}, ConfigurationError, "frequency: expected 'batch', 'epoch' or an integer"),
        (
            {"num_workers": 0},
            ConfigurationError,
            "num_workers: expected an integer of at least 1, or None. Received: 0",
        ),
        ({"num_workers": "http"}, ConfigurationError, "num_workers: expected an integer .* Received: 'http'"),
        ({"batch_size": 0}, ConfigurationError, "batch_size: expected an integer of at least 1"),
        ({"algorithm": "adag"}, ConfigurationError, "algorithm: expected mode='asynchronous' or 'hogwild'"),
        (
            {"mode": "hogwild", "sync_batch_norm": True},
            ConfigurationError,
            "sync_batch_norm: expected mode='synchronous'",
        ),
    ],
    ids=str,
)
def test_options_when_they_cannot_work_then_the_constructor_says_why(options, error, text):
    with pytest.raises(error, match=text):
        SparkModel(model_of(), **options)


def test_timeouts_when_given_by_name_then_are_those_of_the_fit():
    config = SparkModel(model_of(), timeouts={"slots_s": 5.0})._config(epochs=1, batch_size=1, num_workers=1)
    assert config.timeouts == Timeouts(slots_s=5.0)
    with pytest.raises(ConfigurationError, match="timeouts: expected elephant.config.Timeouts, or seconds by the name"):
        SparkModel(model_of(), timeouts={"slots": 5.0})


def test_port_when_there_is_no_server_then_is_not_minded():
    assert SparkModel(model_of(), port=4000).port == 4000
    with pytest.raises(ConfigurationError, match="port: expected 0, or a port"):
        SparkModel(model_of(), mode="asynchronous", port=70000)


def test_model_when_it_is_replaced_or_not_compiled_then_is_checked():
    first, second = model_of(), model_of()
    trained = SparkModel(first)
    trained.master_network = second
    assert trained.model is second
    for refused in (keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]), 5):
        with pytest.raises(ConfigurationError, match="model: expected a compiled"):
            trained.model = refused
        with pytest.raises(ConfigurationError, match="model: expected a compiled"):
            SparkModel(refused)
    assert trained.model is second


def test_fit_when_options_model_and_callbacks_do_not_go_together_then_says_so():
    schedule = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    trained = SparkModel(model_of(schedule), mode="asynchronous", learning_rate=0.1)
    facts = trained._live.source().info
    with pytest.raises(ConfigurationError, match="learning_rate: expected a model compiled with a constant"):
        check_fit(trained._config(epochs=1, batch_size=1, num_workers=1), facts, [])
    if not current().has_nccl:
        on_devices = SparkModel(model_of(), gpu_transport="nccl")
        with pytest.raises(UnsupportedError, match="gpuTransport: expected 'auto' or 'host'.* to jax or torch"):
            check_fit(on_devices._config(epochs=1, batch_size=1, num_workers=1), facts, [])
    plain = SparkModel(model_of(), mode="asynchronous")
    with pytest.raises(UnsupportedError, match="LearningRateWarmup"):
        check_fit(
            plain._config(epochs=1, batch_size=1, num_workers=1), plain._live.source().info, [LearningRateWarmup(2)]
        )
