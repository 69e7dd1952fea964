"""Models travel as values and are equal where they arrive, in a process that has none of the user's code."""

import pickle
import subprocess
import sys
from dataclasses import replace

import keras
import numpy as np
import pytest
from keras_reference import two_groups
from pyspark import cloudpickle
from tables import every_case

from elephant.data.schema import RowSpec, TensorSpec
from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import ModelSpec, model_source
from elephant.modeling.variables import build_variables, read_variables, write_variables


def compiled(*layers, loss="mse", optimizer="adam", **options):
    model = keras.Sequential([keras.layers.Input((3,)), *layers, keras.layers.Dense(2)])
    model.compile(optimizer, loss, **options)
    return model


def test_source_when_pickled_then_builds_a_model_with_the_same_weights_and_settings():
    model = compiled(loss=keras.losses.LogCosh(), metrics=["mae"], weighted_metrics=["mse"], loss_weights=[0.5])
    rebuilt = pickle.loads(pickle.dumps(model_source(model))).build()
    for value, wanted in zip(rebuilt.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, wanted)
    x, y = np.ones((4, 3)), np.zeros((4, 2))
    assert rebuilt.evaluate(x, y, verbose=0, return_dict=True) == model.evaluate(x, y, verbose=0, return_dict=True)
    assert rebuilt.get_compile_config()["loss"] == model.get_compile_config()["loss"]


def test_source_when_all_is_of_keras_then_no_second_copy_of_weights_and_optimizer_is_made(monkeypatch):
    model = compiled(keras.layers.BatchNormalization(), keras.layers.Embedding(4, 2), keras.layers.Flatten())
    model.fit(np.ones((8, 3)), np.zeros((8, 2)), verbose=0)
    with monkeypatch.context() as patched:
        patched.setattr(ModelSpec, "build", lambda spec: pytest.fail("the whole model was built"))
        source = model_source(model)
    for value, wanted in zip(read_variables(source.build()), read_variables(model), strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_source_when_its_structure_was_built_then_names_are_those_of_a_first_model():
    names = []

    def build():
        metric = keras.metrics.AUC()
        names.append(metric.name)
        return compiled(loss="binary_crossentropy", metrics=[metric])

    source = model_source(build)
    source.build_structure()
    source.build()
    assert names[1] == names[2] != names[0]


def test_source_when_the_user_s_model_trains_on_then_stays_as_it_was():
    model = compiled()
    source, before = model_source(model), model.get_weights()
    model.fit(np.ones((8, 3)), np.zeros((8, 2)), verbose=0)
    for value, wanted in zip(source.build().get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_source_when_trained_variables_are_given_then_keeps_them_with_the_optimizer_s():
    model = compiled()
    source = model_source(model)
    model.fit(np.ones((8, 3)), np.zeros((8, 2)), verbose=0)
    rebuilt = source.with_variables(read_variables(model), (3,)).build()
    for value, wanted in zip(read_variables(rebuilt), read_variables(model), strict=True):
        np.testing.assert_array_equal(value, wanted)


@pytest.mark.filterwarnings("error::UserWarning")
def test_source_when_each_group_of_variables_has_an_optimizer_then_keeps_what_all_of_them_have():
    model = compiled(optimizer=two_groups())
    assert model_source(model).info.several_rates
    model.fit(np.ones((8, 3)), np.zeros((8, 2)), verbose=0)
    values = read_variables(model)
    assert len(values) == 2 + 2 + (2 + 2) + (2 + 1)
    for rebuilt in (model_source(model).build(), model_source(model).with_variables(values, None).build()):
        for value, wanted in zip(read_variables(rebuilt), values, strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_source_when_a_layer_is_registered_here_then_builds_where_it_is_not(tmp_path):
    code = """
import keras, sys
from pyspark import cloudpickle
from elephant.modeling.model_spec import model_source

@keras.saving.register_keras_serializable(package="mine")
class Twice(keras.layers.Layer):
    def call(self, inputs):
        return inputs * 2.0

@keras.saving.register_keras_serializable(package="mine")
def odd_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

model = keras.Sequential([keras.layers.Input((3,)), Twice(), keras.layers.Dense(2, kernel_initializer="ones")])
model.compile("sgd", odd_loss)
open(sys.argv[1], "wb").write(cloudpickle.dumps(model_source(model)))
"""
    path = tmp_path / "source.pkl"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=100, capture_output=True)
    model = cloudpickle.loads(path.read_bytes()).build()
    np.testing.assert_array_equal(model.predict(np.ones((1, 3)), verbose=0), [[6.0, 6.0]])
    assert model.evaluate(np.ones((1, 3)), np.zeros((1, 2)), verbose=0) == pytest.approx(6.0)


def test_source_when_another_backend_has_saved_it_then_compiles_as_this_one_does_by_itself():
    by_itself = compiled().jit_compile
    source = model_source(compiled(jit_compile=not by_itself))
    here, other = source.settings.backend, "jax" if keras.config.backend() != "jax" else "tensorflow"
    for saved_on, expected in ((here, not by_itself), (other, by_itself)):
        built = replace(source, settings=replace(source.settings, backend=saved_on)).build()
        assert (built.jit_compile, type(built.optimizer).__name__) == (expected, "Adam")


def test_source_when_copied_then_keeps_its_id_and_trained_ones_get_another():
    model = compiled()
    source = model_source(model)
    build_variables(model, None)
    assert pickle.loads(pickle.dumps(source)).source_id == source.source_id
    assert source.with_variables(read_variables(model), (3,)).source_id != source.source_id
    assert model_source(model).source_id != source.source_id


def test_write_variables_when_shapes_differ_then_says_what_was_expected():
    model = compiled()
    build_variables(model, None)
    with pytest.raises(ConfigurationError, match=r"expected 8 variables of shapes \[\(3, 2\).*Received: 1 "):
        write_variables(model, [np.zeros((3, 2))])


def test_source_when_keras_would_lose_an_option_then_refuses_rather_than_train_another_loss():
    with pytest.raises(ConfigurationError, match=r"keep delta=2.0 of Huber.*gave back 1.0"):
        model_source(compiled(loss=keras.losses.Huber(delta=2.0)))
    assert model_source(lambda: compiled(loss=keras.losses.Huber(delta=2.0))).build().loss._fn_kwargs == {"delta": 2.0}


def test_source_when_a_loss_is_a_lambda_then_keras_does_not_warn_of_it_but_where_the_user_saves(recwarn, tmp_path):
    model = compiled(loss=lambda true, predicted: keras.ops.mean((true - predicted) ** 2))
    model_source(model)
    assert not [str(one.message) for one in recwarn if "lambda" in str(one.message)]
    with pytest.warns(UserWarning, match="lambda"):
        model.save(tmp_path / "own.keras")


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.CategoricalFocalCrossentropy(alpha=(0.2, 0.8)),
        keras.losses.BinaryFocalCrossentropy(alpha=np.float64(0.3)),
        keras.losses.CategoricalCrossentropy(label_smoothing=np.float32(0.1)),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_source_when_keras_keeps_an_option_in_another_form_then_takes_the_model(loss):
    assert model_source(compiled(loss=loss)).archive


def outputs_of(nest, loss, **options):
    inputs = keras.layers.Input((3,))
    tensors = {"a": keras.layers.Dense(2, name="a")(inputs), "b": keras.layers.Dense(1, name="b")(inputs)}
    model = keras.Model(inputs, nest(tensors))
    model.compile("sgd", loss, **options)
    return model


WRONGLY_COMPILED = {
    "metrics for weights": (lambda: compiled(loss_weights=["mae"]), "numbers as loss_weights.* Received: 'mae'"),
    "more weights than losses": (lambda: compiled(loss_weights=[1.0, 2.0]), "must match the number of losses"),
    "no such metric": (lambda: compiled(metrics=["acuracy"]), "acuracy"),
    "no such loss": (lambda: compiled(loss="meen_squared_error"), "meen_squared_error"),
    "a metric of no output": (lambda: outputs_of(dict, "mse", metrics={"a": "mae", "c": "mae"}), "metrics"),
    "weights of no output": (
        lambda: outputs_of(dict, {"a": "mse", "b": "mse"}, loss_weights={"a": 1.0}),
        "loss_weights",
    ),
}


@pytest.mark.parametrize("case", WRONGLY_COMPILED)
@pytest.mark.parametrize("form", ["a model", "a function"])
def test_source_when_keras_would_refuse_the_first_step_then_says_so_at_once(case, form):
    make, said = WRONGLY_COMPILED[case]
    with pytest.raises(ConfigurationError, match=said):
        model_source(make if form == "a function" else make())


def nested(tensors):
    return {"both": [tensors["a"], tensors["b"]]}


RIGHTLY_COMPILED = {
    "weights by name": (dict, {"loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 1.0, "b": np.float32(0.5)}}),
    "one loss": (dict, {"loss": "mse", "metrics": {"b": ["mae", keras.metrics.MeanSquaredError()]}}),
    "no loss of an output": (dict, {"loss": {"a": "mse", "b": None}, "weighted_metrics": [["accuracy"], ["mae"]]}),
    "lists": (dict, {"loss": ["mse", keras.losses.Huber()], "loss_weights": [1, 2], "metrics": [[], ["acc"]]}),
    "one output": (lambda tensors: tensors["a"], {"loss": "mse", "loss_weights": 2.0, "metrics": ["accuracy"]}),
    "one by name": (lambda tensors: tensors["a"], {"loss": {"a": "mse"}, "metrics": {"a": "mae"}}),
    "one in a list": (lambda tensors: [tensors["b"]], {"loss": ["mse"], "metrics": [["mae"]]}),
    "a list by name": (lambda tensors: list(tensors.values()), {"loss": {"a": "mse", "b": "mae"}}),
    "nested": (nested, {"loss": {"both": ["mse", "mae"]}, "metrics": {"both": [["mae"], ["mse"]]}}),
}


@every_case("case", RIGHTLY_COMPILED)
def test_source_when_keras_takes_what_it_is_compiled_with_then_takes_it_too_and_builds_nothing(case):
    nest, options = RIGHTLY_COMPILED[case]
    model = outputs_of(nest, **options)
    model_source(model)
    assert not model._compile_loss.built and not (model._compile_metrics and model._compile_metrics.built)
    model.fit(np.ones((4, 3)), nest({"a": np.zeros((4, 2)), "b": np.zeros((4, 1))}), verbose=0)


def test_source_when_the_policy_changes_after_construction_then_builds_under_its_own():
    policy = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_float16")
        model = compiled(optimizer=keras.optimizers.Adam(0.1))
        early = model_source(model)
    finally:
        keras.config.set_dtype_policy(policy)
    for source in (early, model_source(model)):
        rebuilt = source.build()
        assert isinstance(rebuilt.optimizer, keras.optimizers.LossScaleOptimizer)
        build_variables(model, None)
        again = source.with_variables(read_variables(model), (3,)).build()
        assert len(read_variables(again)) == len(read_variables(model))
    assert keras.config.dtype_policy().name == policy.name


def test_source_when_layers_have_low_rank_factors_then_carries_them_and_what_was_trained():
    model = compiled(keras.layers.Dense(3), optimizer=keras.optimizers.SGD(0.1))
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    y = x[:, :2]
    model.fit(x, y, epochs=2, verbose=0)
    source = model_source(model)
    for weight, kept in zip(model.weights, source.build().weights, strict=True):
        np.testing.assert_array_equal(weight, kept)
    copy = source.build()
    for one in (model, copy):
        one.fit(x, y, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(copy.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    again = source.with_variables(read_variables(copy), RowSpec(0, (TensorSpec((3,), "float32"),))).build()
    for weight, kept in zip(copy.weights, again.weights, strict=True):
        np.testing.assert_array_equal(weight, kept)


def test_source_when_keras_cannot_save_a_layer_then_says_what_to_do_also_with_registered_classes():
    class Given(keras.layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, inputs):
            return inputs

    keras.saving.get_custom_objects()["test_source>Registered"] = keras.layers.Dense
    try:
        with pytest.raises(ConfigurationError, match=r"Keras cannot save [\s\S]* Pass a function that builds"):
            model_source(compiled(Given(object())))
    finally:
        del keras.saving.get_custom_objects()["test_source>Registered"]
