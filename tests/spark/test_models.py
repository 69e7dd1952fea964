"""What Keras users train, from a DataFrame to a model that has learned, against one process of plain Keras."""

import datetime
import zipfile

import keras
import model_zoo
import numpy as np
import pytest
from keras import layers
from keras_reference import largest_difference
from model_jobs import job_of, train_plainly, weights_of
from pyspark import cloudpickle
from pyspark.ml.linalg import Vectors
from spark_frames import partitioned_frame

from elephant import KerasEstimator, KerasModel, predict_udf
from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import model_source

TOLERANCE = 1e-5
SIZES = (18, 12)
ROWS = sum(SIZES)


def parted(rows):
    return [rows[: SIZES[0]], rows[SIZES[0] :]]


def structured_model(numbers):
    keras.utils.set_random_seed(2)
    normalization = layers.Normalization()
    normalization.adapt(numbers)
    given = {
        "numbers": keras.Input((3,), name="number_input"),
        "colour": keras.Input((1,), dtype="string", name="colour_input"),
        "bought": keras.Input((20,), name="bought_input"),
    }
    colours = layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")(given["colour"])
    both = layers.Concatenate()([normalization(given["numbers"]), colours, given["bought"]])
    hidden = layers.Dense(16, "relu")(both)
    outputs = {"spent": layers.Dense(1)(hidden), "kind": layers.Dense(3, "softmax")(hidden)}
    model = keras.Model(given, outputs)
    model.compile(
        keras.optimizers.Adam(0.02),
        {"spent": "mse", "kind": "sparse_categorical_crossentropy"},
        loss_weights={"spent": 0.5, "kind": 1.0},
        weighted_metrics={"kind": ["accuracy"], "spent": []},
    )
    return model


@pytest.mark.slow("a fit per kind of model; tests/rank/test_models.py trains all kinds")
def test_mixed_columns_when_fitted_from_a_path_then_equal_one_process(spark, tmp_path):
    rng = np.random.default_rng(0)
    age, member, kind = rng.uniform(18, 80, ROWS), rng.random(ROWS) > 0.5, rng.integers(0, 3, ROWS)
    since = [datetime.date(1965, 1, 1) + datetime.timedelta(int(days)) for days in rng.integers(0, 9000, ROWS)]
    colour = [("red", "green", "blue")[place] for place in kind]
    bought = rng.integers(1, 5, (ROWS, 20)) * (rng.random((ROWS, 20)) > 0.9)
    spent, trust = bought[:, :5].sum(axis=1) + 2.0 * member, rng.uniform(0.5, 2, ROWS)
    vectors = [Vectors.sparse(20, np.flatnonzero(row).tolist(), row[row > 0].tolist()) for row in bought]
    columns = (age.tolist(), since, member.tolist(), colour, vectors, spent.tolist(), kind.tolist(), trust.tolist())
    names = ["age", "since", "is.member", "Colour", "bought", "spent", "kind", "trust"]
    frame = partitioned_frame(spark, parted(list(zip(*columns, strict=True))), names)
    days = [(day - datetime.date(1970, 1, 1)).days for day in since]
    numbers = np.stack([age, days, member], axis=1).astype("float32")
    structured_model(numbers).save(tmp_path / "model.keras")
    options = {
        "featuresCol": {"numbers": ["age", "since", "is.member"], "colour": "colour", "bought": "bought"},
        "labelCol": {"spent": "spent", "kind": "kind"},
        "weightCol": {"spent": "trust", "kind": "trust"},
        **{"numWorkers": 2, "epochs": 2, "batchSize": 8, "shuffle": False, "verbose": 0},
    }
    KerasEstimator(model=str(tmp_path / "model.keras"), **options).save(str(tmp_path / "estimator"))
    fitted = KerasEstimator.load(str(tmp_path / "estimator")).fit(frame)
    inputs = {"numbers": numbers, "colour": np.array([[c] for c in colour], object), "bought": bought.astype("float32")}
    weights = {"spent": trust.astype("float32"), "kind": trust.astype("float32")}
    labels = {"spent": spent.astype("float32"), "kind": kind.astype("int32")}
    job, by_role = job_of(structured_model(numbers), inputs, labels, weights, epochs=2, batch_size=8)
    expected = weights_of(train_plainly(structured_model(numbers), job, by_role, SIZES))
    assert largest_difference(weights_of(structured_model(numbers)), expected) > 100 * TOLERANCE
    assert largest_difference(weights_of(fitted.model), expected) <= TOLERANCE
    assert int(fitted.model.optimizer.iterations) == 2 * 3


@pytest.mark.slow("a fit per kind of model; tests/rank/test_models.py trains all kinds")
def test_vae_when_there_is_no_label_then_learns_and_is_saved_and_loaded(spark, tmp_path):
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(ROWS, 2)) @ rng.normal(size=(2, 6)) * 3).astype("float32")
    frame = partitioned_frame(spark, parted([(row.tolist(),) for row in rows]), "features array<float>")
    options = {"numWorkers": 2, "epochs": 2, "batchSize": 8, "shuffle": False, "verbose": 0}
    cloudpickle.register_pickle_by_value(model_zoo)
    try:
        fitted = KerasEstimator(model=model_zoo.vae_model, labelCol=None, **options).fit(frame)
        fitted.write().overwrite().save(str(tmp_path / "model"))
    finally:
        cloudpickle.unregister_pickle_by_value(model_zoo)
    with pytest.raises(ConfigurationError, match=r"model: expected a class with a call method.*fitted.model.PART"):
        fitted.transform(frame)
    job, columns = job_of(model_zoo.vae_model, rows, epochs=2, batch_size=8)
    expected = weights_of(train_plainly(model_zoo.vae_model(), job, columns, SIZES))
    assert largest_difference(weights_of(model_zoo.vae_model()), expected) > 100 * TOLERANCE
    for model in (fitted.model, KerasModel.load(str(tmp_path / "model"), trusted=True).model):
        assert largest_difference(weights_of(model), expected) <= TOLERANCE


def test_evaluate_when_no_fit_has_said_what_the_model_is_compared_with_then_asks_for_it(spark):
    model = keras.Sequential([layers.Input((1,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    given = KerasModel(model_source(model)).setFeaturesCol("x")
    frame = spark.createDataFrame([(1.0, 3.0), (2.0, 4.0)], ["x", "y"])
    with pytest.raises(ConfigurationError, match="labelCol: expected the column .* no fit has returned.*setLabelCol"):
        given.evaluate(frame)


def test_model_when_its_path_leads_nowhere_then_says_so(spark, tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"model: expected the path of a saved model. Received: '.*none.keras'"
    ):
        KerasEstimator(model=str(tmp_path / "none.keras"))
    with pytest.raises(ConfigurationError, match=r"model: expected a path .* \.h5\. .* pass KerasModel\.load\(path\)"):
        KerasEstimator(model=str(tmp_path / "model"))
    with zipfile.ZipFile(tmp_path / "empty.keras", "w"):
        pass
    with pytest.raises(ConfigurationError, match=r"cannot load.* as customObjects={'Name': Name}"):
        KerasEstimator(model=str(tmp_path / "empty.keras"))


@pytest.mark.slow(
    "a fit; tests/modeling/test_trained_weights.py holds what is kept, test_servable_model.py what predicts"
)
def test_low_rank_model_when_fitted_and_saved_then_every_way_predicts_with_what_it_has_learned(spark, tmp_path):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.Adam(0.05), "mse")
    x = np.random.default_rng(5).normal(size=(40, 4)).astype("float32")
    frame = spark.createDataFrame([(row.tolist(), float(row.sum())) for row in x], "x array<float>, y float")
    options = {"featuresCol": "x", "labelCol": "y", "numWorkers": 2, "batchSize": 10, "epochs": 2}
    fitted = KerasEstimator(model=model, **options).fit(frame)
    learned = fitted.model.predict(x, verbose=0)[:, 0]
    assert np.abs(learned - model.predict(x, verbose=0)[:, 0]).max() > 0.1
    fitted.save(str(tmp_path / "folder"))
    with pytest.warns(UserWarning, match=r"expected a model of which a file of Keras keeps all weights"):
        fitted.save(str(tmp_path / "model.keras"))
    one_process = fitted.model.evaluate(x, x.sum(axis=1), verbose=0)
    given = KerasModel(fitted.model).setFeaturesCol("x").setLabelCol("y")
    loaded = KerasModel.load(str(tmp_path / "folder")).model
    np.testing.assert_allclose(loaded.predict(x, verbose=0)[:, 0], learned, atol=1e-6)
    assert given.evaluate(frame)["loss"] == pytest.approx(one_process, rel=1e-5)
    rows = fitted.transform(frame).select("prediction", predict_udf(fitted)("x")).collect()
    np.testing.assert_allclose(np.array(rows), np.stack([learned, learned], axis=1), atol=1e-6)


@pytest.mark.slow("a fit; test_column_selection.py holds what such labels become")
def test_sequences_of_classes_when_ctc_compares_them_then_ragged_ones_equal_one_process(spark):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([layers.Input((8, 4)), layers.Dense(6, "tanh"), layers.Dense(5)])
    model.compile(keras.optimizers.SGD(0.05), keras.losses.CTC())
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 8, 4)).astype("float32"), rng.integers(1, 5, (32, 3)).astype("int32")
    lengths = rng.integers(1, 4, 32)
    y[np.arange(3) >= lengths[:, np.newaxis]] = 0
    ragged = [y[place, :length].tolist() for place, length in enumerate(lengths)]
    frame = spark.createDataFrame(list(zip(x.tolist(), ragged, strict=True)), "x array<array<float>>, y array<int>")
    options = {"featuresCol": "x", "labelCol": "y", "numWorkers": 2, "batchSize": 16, "epochs": 2, "shuffle": False}
    fitted = KerasEstimator(model=model, **options).fit(frame)
    losses = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0).history["loss"]
    assert largest_difference(fitted.model.get_weights(), model.get_weights()) < TOLERANCE
    assert fitted.history["loss"] == pytest.approx(losses, rel=1e-5)
    loss = fitted.evaluate(frame)["loss"]
    assert loss == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-5)
