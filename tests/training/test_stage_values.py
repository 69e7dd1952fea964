"""Values of stages against those of the whole model that Keras loads, in threads."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops
from rank_threads import run_threads
from tiers import in_tiers

from elephant.backends.keras_private import has_value
from elephant.errors import UnsupportedError
from elephant.modeling.model_spec import model_source
from elephant.modeling.variable_paths import generator_paths, state_paths
from elephant.training.pipeline import ModelPipeline
from elephant.training.stage_values import load_stage

WITH_LOOKUP = keras.config.backend() == "tensorflow"


def nested():
    """Returns a model of two inputs with a backbone, words, normalizations and dropout, without values of its own."""
    inner = keras.Sequential(
        [layers.Input((8,)), layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dense(8, name="inside")],
        name="backbone",
    )
    numbers, words = keras.Input((6,), name="numbers"), keras.Input((2,), dtype="int64", name="words")
    # Only TensorFlow looks words up inside of a step.
    found = layers.IntegerLookup(name="lookup")(words) if WITH_LOOKUP else words
    embedded = layers.Flatten()(layers.Embedding(9, 4, name="table")(found))
    scaled = layers.Normalization(name="scaled")(numbers)
    joined = layers.Concatenate()([scaled, embedded])
    x = layers.Dropout(0.3, seed=5)(inner(layers.Dense(8, "tanh", name="first")(joined)))
    frozen = layers.Dense(4, trainable=False, name="frozen")(x)
    return keras.Model([numbers, words], layers.Dense(3, name="head")(frozen), name="whole")


OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True, use_ema=True),
    # One of its variables has no name of its own.
    "Nadam, scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.01), initial_scale=64.0),
}


def rows():
    rng = np.random.default_rng(3)
    return [rng.normal(size=(16, 6)).astype("float32"), rng.integers(1, 6, (16, 2))], rng.normal(size=(16, 3))


def trained(optimizer):
    model = nested()
    if WITH_LOOKUP:
        model.get_layer("lookup").adapt(np.arange(1, 6))
    model.get_layer("scaled").adapt(rows()[0][0])
    model.compile(optimizer(), "mse", metrics=["mae"])
    model.fit(*rows(), epochs=2, verbose=0)
    return model


def staged(spec, stages, communicator):
    """Returns the state of the whole model on rank 0, its weights in their order, and what the stages predict."""
    model = spec.build_structure()
    load = functools.partial(load_stage, spec, model)
    pipeline = ModelPipeline(model, stages=stages, micro_batches=2, communicator=communicator, load=load)
    state, weights = pipeline.state(), list(pipeline.weights())
    return state, weights, pipeline.predict_on_batch(rows()[0] if pipeline.place.is_first else None)


def in_new_thread(function):
    """Calls a function where Keras numbers names from the beginning, as in a rank's process."""
    return run_threads(1, lambda _: function())[0]


def require_equal(found, model, copy):
    """Compares what stages have with a model, and with its copy, which knows what is not saved, such as seeds."""
    state, weights, predicted = found
    paths = state_paths(copy) | {f"random/0/{path}": one for path, one in generator_paths(copy).items()}
    assert {*state} == {*paths}
    for path, variable in paths.items():
        np.testing.assert_array_equal(state[path], ops.convert_to_numpy(variable), err_msg=path)
    for value, variable in zip(weights, model.weights, strict=True):
        np.testing.assert_array_equal(value, ops.convert_to_numpy(variable))
    np.testing.assert_allclose(predicted, model.predict_on_batch(rows()[0]), atol=1e-6)


@pytest.mark.parametrize("name", in_tiers({name: name for name in OPTIMIZERS}, fast=["Adam"], slow="another optimizer"))
def test_stages_when_read_from_an_archive_then_have_the_values_that_the_whole_model_was_saved_with(name):
    model = trained(OPTIMIZERS[name])
    spec = model_source(model)
    found = run_threads(3, functools.partial(staged, spec, ["first", "inside"]))
    require_equal(found[0], model, in_new_thread(spec.build))
    assert [weights for _, weights, _ in found[1:]] == [[], []]


def test_stages_when_an_optimizer_has_been_used_whose_state_has_no_paths_then_are_refused():
    model = trained(lambda: keras.optimizers.Adafactor(0.01))
    with pytest.raises(UnsupportedError, match=r"Received: Adafactor that has been used\. Compile the model anew"):
        run_threads(3, functools.partial(staged, model_source(model), ["first", "inside"]))


def built():
    """Compiles as users do: the optimizer, and a metric with variables, are made inside of the function."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(8, name="one"), layers.Dense(3, name="two")])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    return model


def test_stages_when_a_function_builds_the_model_then_begin_with_the_weights_of_the_whole_one():
    spec = model_source(built)
    structures = [in_new_thread(spec.build_structure) for _ in range(2)]
    waiting = [has_value(variable) for variable in structures[0].weights]

    def live(communicator):
        model = structures[communicator.rank]
        pipeline = ModelPipeline(model, stages=2, micro_batches=2, communicator=communicator)
        weights = list(pipeline.weights())
        pipeline.train_on_batch(*((rows()[0][0], rows()[1]) if pipeline.place.is_first else ()))
        return weights, pipeline.results()

    weights, results = run_threads(2, live)[0]
    whole = in_new_thread(built)
    assert waiting == [False] * 4
    for value, variable in zip(weights, whole.weights, strict=True):
        np.testing.assert_array_equal(value, ops.convert_to_numpy(variable))
    expected = whole.evaluate(rows()[0][0], rows()[1], verbose=0, return_dict=True)
    assert results == pytest.approx(expected, rel=1e-5)
