"""The forms in which users give a model: each is the same model, with what it was compiled with and has learned."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from tiers import in_tiers

from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import model_source
from elephant.spark.saving.model_files import source_of


def trained_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in ("age", "size")})
    optimizer = keras.optimizers.Adam(0.01)
    losses, weights = {"age": "mse", "size": "mae"}, {"age": 0.25, "size": 2.0}
    model.compile(optimizer, losses, loss_weights=weights, weighted_metrics={"age": ["mae"]}, steps_per_execution=2)
    labels = {name: np.ones(8, "float32") for name in ("age", "size")}
    model.fit(np.ones((8, 3), "float32"), labels, batch_size=4, epochs=2, verbose=0)
    return model


def given_as(form, model, folder):
    if form == "function":
        return trained_model
    if form == "fitted":
        return SimpleNamespace(source=model_source(model))
    if form.startswith("model"):
        if form == "model that was saved as .h5":
            model.save(folder / "model.h5")
        return model
    path = folder / f"model{form.removeprefix('path of ')}"
    model.save(path)
    return path if form.startswith("path of") else str(path)


FORMS = ["model", "model that was saved as .h5", "function", ".keras", ".h5", "path of .keras", "fitted"]


@pytest.mark.parametrize("form", in_tiers(FORMS, fast=["model", ".keras"], slow="a form of these"))
def test_model_when_given_in_any_form_then_goes_on_where_it_was(tmp_path, form):
    model = trained_model()
    source = source_of(given_as(form, model, tmp_path))
    built = source.build()
    for mine, theirs in zip([*built.weights], [*model.weights], strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    # Keras keeps neither in .h5.
    if form != ".h5":
        for mine, theirs in zip(built.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
        assert built.steps_per_execution == 2
    rows, labels = np.ones((2, 3), "float32"), {name: np.zeros(2, "float32") for name in ("age", "size")}
    weights = np.array([1.0, 3.0], "float32")
    expected = model.evaluate(rows, labels, sample_weight=weights, return_dict=True, verbose=0)
    assert built.evaluate(rows, labels, sample_weight=weights, return_dict=True, verbose=0) == pytest.approx(expected)
    assert [output.name for output in source.info.outputs] == ["age", "size"]


def test_model_when_there_is_no_file_or_no_model_then_says_what_was_expected(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"model: expected the path of a saved model. Received: '.*none.keras'"
    ):
        source_of(tmp_path / "none.keras")
    with pytest.raises(ConfigurationError, match="model: expected a compiled keras.Model, .* Received: builtins.int"):
        source_of(3)
