"""A model as a function of columns in SQL, several outputs as columns, and evaluation, on real executors."""

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)
from pyspark.sql.types import DoubleType
from spark_frames import partitioned_frame

import elephant
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.model_spec import model_source
from elephant.spark.model import KerasModel

SIZES = (0, 7, 1, 22)


def values():
    return np.random.default_rng(7).normal(size=(sum(SIZES), 4)).astype("float32")


def frame_of(spark, *columns, schema):
    rows = [(index, *parts) for index, parts in enumerate(zip(*columns, strict=True))]
    bounds = np.cumsum([0, *SIZES])
    parts = [rows[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    return partitioned_frame(spark, parts, schema)


def regression():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def forked():
    keras.utils.set_random_seed(4)
    one, two = keras.Input((3,), name="one"), keras.Input((1,), name="two")
    both = keras.layers.Concatenate()([one, two])
    outputs = {
        "kind": keras.layers.Dense(3, "softmax", name="kind")(both),
        "price": keras.layers.Dense(1, name="price")(both),
        "box": keras.layers.Dense(2, name="box")(both),
    }
    model = keras.Model({"one": one, "two": two}, outputs)
    losses = {"kind": "sparse_categorical_crossentropy", "price": "mse", "box": "mse"}
    model.compile("sgd", losses, metrics={"kind": ["accuracy"], "price": ["mae"]})
    return model


def test_predict_udf_when_registered_then_sql_scores_columns_of_any_type(spark, tmp_path):
    model, x = regression(), values()
    expected = model.predict(x, verbose=0)[:, 0]
    rows = [(index, row.tolist(), Vectors.dense(row.tolist()), *row.tolist()) for index, row in enumerate(x)]
    frame = spark.createDataFrame(rows, ["id", "doubles", "vector", "a", "b", "c", "d"]).repartition(3)
    frame = frame.withColumn("floats", F.col("doubles").cast("array<float>"))
    path = str(tmp_path / "model.keras")
    model.save(path)
    spark.udf.register("score", elephant.predict_udf(path))
    frame.createOrReplaceTempView("rows_to_score")
    scored = spark.sql(
        "SELECT id, score(doubles) p, score(floats) q, score(vector) r, score(a, b, c, d) s FROM rows_to_score"
        " WHERE score(doubles) > -1000 ORDER BY id"
    )
    assert scored.schema["p"].dataType == DoubleType()
    for row, value in zip(scored.collect(), expected, strict=True):
        np.testing.assert_allclose(row[1:], value, rtol=1e-5, atol=1e-6)


def test_predict_udf_when_in_an_aggregate_then_is_computed_in_it(spark):
    model, x = regression(), values()
    frame = frame_of(spark, x.tolist(), schema="id int, features array<double>")
    score = elephant.predict_udf(model)
    [row] = frame.agg(F.avg(score("features")).alias("mean"), F.max(score("features")).alias("most")).collect()
    expected = model.predict(x, verbose=0)[:, 0]
    np.testing.assert_allclose([row["mean"], row["most"]], [expected.mean(), expected.max()], rtol=1e-5)
    grouped = frame.groupBy((F.col("id") % 2).alias("odd")).agg(F.sum(score("features")).alias("total")).collect()
    totals = {row["odd"]: row["total"] for row in grouped}
    np.testing.assert_allclose([totals[0], totals[1]], [expected[::2].sum(), expected[1::2].sum()], rtol=1e-5)


@pytest.mark.slow("tests/spark/test_predict_task.py holds inputs and outputs by name")
def test_predict_udf_when_inputs_and_outputs_are_several_then_takes_them_in_order_and_gives_a_struct(spark):
    model, x = forked(), values()
    fitted = KerasModel(model_source(model))
    frame = frame_of(spark, x[:, :3].tolist(), x[:, 3].tolist(), schema="id int, left array<float>, right float")
    expected = model.predict({"one": x[:, :3], "two": x[:, 3:]}, verbose=0)
    # A dictionary's inputs and outputs are in the order of their names.
    scored = frame.select("id", elephant.predict_udf(fitted)("left", "right").alias("out")).select("id", "out.*")
    rows = scored.orderBy("id").collect()
    np.testing.assert_allclose([row.price for row in rows], expected["price"][:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([row.box for row in rows], expected["box"], rtol=1e-5, atol=1e-6)
    fitted.setInputCols({"one": "left", "two": "right"}).setInferenceBatchSize(5)
    predicted = fitted.transform(frame).orderBy("id")
    assert set(predicted.columns[3:]) == {"probability_kind", "prediction_kind", "prediction_price", "prediction_box"}
    rows = predicted.collect()
    np.testing.assert_allclose([r.probability_kind.toArray() for r in rows], expected["kind"], rtol=1e-5, atol=1e-6)
    assert [row.prediction_kind for row in rows] == expected["kind"].argmax(axis=1).tolist()
    np.testing.assert_allclose([row.prediction_box for row in rows], expected["box"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([row.prediction_price for row in rows], expected["price"][:, 0], rtol=1e-5, atol=1e-6)


def test_evaluate_when_rows_are_on_executors_then_equals_one_process(spark):
    model, x = forked(), values()
    labels = {
        "kind": np.arange(len(x)) % 3,
        "price": x.sum(axis=1),
        "box": x[:, :2] * 2,
    }
    frame = frame_of(
        spark,
        x[:, :3].tolist(),
        x[:, 3].tolist(),
        labels["kind"].tolist(),
        labels["price"].tolist(),
        labels["box"].tolist(),
        schema="id int, left array<float>, right float, kind int, price float, box array<float>",
    )
    fitted = KerasModel(model_source(model)).setInputCols({"one": "left", "two": "right"})
    fitted.setLabelCols({"kind": "kind", "price": "price", "box": "box"})
    expected = model.evaluate(
        {"one": x[:, :3], "two": x[:, 3:]}, labels, batch_size=len(x), verbose=0, return_dict=True
    )
    assert fitted.evaluate(frame) == pytest.approx(expected, rel=2e-5)


def test_predict_udf_when_given_something_else_then_says_what_it_takes():
    with pytest.raises(ConfigurationError, match="expected a KerasModel, a keras.Model or a path. Received: builtins"):
        elephant.predict_udf(3)
    with pytest.raises(ConfigurationError, match="where there is none"):
        elephant.predict_udf("nowhere.keras")
    fitted = KerasModel(model_source(regression())).setPreprocessing(lambda batch: batch["x"])
    with pytest.raises(UnsupportedError, match="without a preprocessing function"):
        elephant.predict_udf(fitted)
