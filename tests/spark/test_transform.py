"""``transform`` keeps every row with its own prediction, for any partitioning and any columns."""

import datetime
import decimal

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from spark_frames import partitioned_frame

from elephant.errors import SchemaError
from elephant.modeling.model_spec import model_source
from elephant.spark.model import KerasModel
from elephant.spark.transform import has_arrow_udfs


def model_with(loss, layer, inputs=4):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((inputs,)), layer])
    model.compile("sgd", loss)
    return model


def fitted_of(model):
    return KerasModel(model_source(model))


def data(rows):
    return np.random.default_rng(7).normal(size=(rows, 4)).astype("float32")


def rows_of(values):
    return [(index, row.tolist()) for index, row in enumerate(values)]


def test_transform_when_partitions_are_uneven_or_empty_then_every_row_keeps_its_prediction(spark):
    sizes = (0, 0, 7, 1, 0, 30)
    values = data(sum(sizes))
    rows, parts = rows_of(values), []
    for size in sizes:
        parts.append([rows.pop() for _ in range(size)])
    frame = partitioned_frame(spark, parts, "id int, features array<double>")
    model = model_with("mse", keras.layers.Dense(1))
    predicted = fitted_of(model).transform(frame).orderBy("id").collect()
    expected = model.predict(values, verbose=0)[:, 0]
    np.testing.assert_allclose([row.prediction for row in predicted], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([row.features for row in predicted], values)


def test_transform_when_rows_exceed_the_batch_then_all_are_predicted(spark):
    values = data(37)
    frame = partitioned_frame(spark, [rows_of(values)], "id int, features array<float>")
    model = model_with("mse", keras.layers.Dense(1))
    rows = fitted_of(model).setInferenceBatchSize(5).transform(frame).collect()
    np.testing.assert_allclose([row.prediction for row in rows], model.predict(values, verbose=0)[:, 0], rtol=1e-5)


def test_transform_when_columns_are_of_all_kinds_then_they_pass_unchanged(spark):
    values = data(3)
    rows = [
        (
            index,
            Vectors.dense(row.tolist()),
            Vectors.sparse(5, [1], [float(index)]),
            None if index else "text",
            {"key": [1, 2]},
            datetime.datetime(2026, 1, 1, 12, index),
            datetime.date(2026, 1, 1),
            decimal.Decimal("1.50"),
            bytearray(b"\0\1"),
            (index, "nested"),
        )
        for index, row in enumerate(values)
    ]
    names = ["id", "features", "sparse", "text", "map", "time", "day", "price", "bytes", "nested"]
    frame = spark.createDataFrame(rows, names).repartition(2)
    before = {row.id: row for row in frame.collect()}
    predicted = fitted_of(model_with("mse", keras.layers.Dense(1))).transform(frame)
    assert predicted.columns == [*names, "prediction"]
    for row in predicted.collect():
        assert row[:-1] == tuple(before[row.id])


def test_transform_when_the_loss_is_over_classes_then_gives_class_and_probability(spark):
    values = data(20)
    model = model_with(keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.layers.Dense(3))
    output = model.predict(values, verbose=0).astype("float64")
    expected = np.exp(output) / np.exp(output).sum(axis=1, keepdims=True)
    frame = partitioned_frame(spark, [rows_of(values)], "id int, features array<double>")
    rows = fitted_of(model).transform(frame).orderBy("id").collect()
    np.testing.assert_allclose([row.probability.toArray() for row in rows], expected, rtol=1e-5)
    assert [row.prediction for row in rows] == expected.argmax(axis=1).tolist()


def test_transform_when_there_are_several_outputs_then_gives_an_array(spark):
    values = data(5)
    model = model_with("mse", keras.layers.Dense(2))
    frame = partitioned_frame(spark, [rows_of(values)], "id int, features array<double>")
    rows = fitted_of(model).transform(frame).orderBy("id").collect()
    np.testing.assert_allclose([row.prediction for row in rows], model.predict(values, verbose=0), rtol=1e-5)


def test_transform_when_the_prediction_column_is_there_then_says_so(spark):
    frame = spark.createDataFrame([([0.0] * 4, 1.0)], ["features", "prediction"])
    fitted = fitted_of(model_with("mse", keras.layers.Dense(1)))
    with pytest.raises(SchemaError, match="without a column 'prediction'.*set predictionCol"):
        fitted.transform(frame)
    assert fitted.setPredictionCol("guess").transform(frame).columns == ["features", "prediction", "guess"]


def test_transform_when_features_are_missing_then_says_so(spark):
    frame = spark.createDataFrame([(1.0,)], ["x"])
    with pytest.raises(SchemaError, match="featuresCol: expected one of the columns x. Received: 'features'"):
        fitted_of(model_with("mse", keras.layers.Dense(1))).transform(frame)


def test_transform_when_names_have_dots_or_repeat_then_columns_keep_them(spark):
    frame = spark.createDataFrame([(1.0, 2.0, [0.5] * 4, 3.0)], ["a.b", "same", "features", "x`y"])
    frame = frame.select("*", frame["same"])
    predicted = fitted_of(model_with("mse", keras.layers.Dense(1))).transform(frame)
    assert predicted.columns == ["a.b", "same", "features", "x`y", "same", "prediction"]
    assert tuple(predicted.first())[:5] == (1.0, 2.0, [0.5] * 4, 3.0, 2.0)


def test_transform_when_its_result_is_selected_from_then_knows_the_frame_s_own_columns_and_its_alias(spark):
    frame = spark.createDataFrame(rows_of(data(4)), "id int, features array<double>")
    fitted = fitted_of(model_with("mse", keras.layers.Dense(1)))
    if not has_arrow_udfs(frame):
        pytest.skip("before PySpark 4.1 rows come back from Python with columns of their own")
    predicted = fitted.transform(frame)
    assert sorted(row.id for row in predicted.select(frame["id"]).collect()) == [0, 1, 2, 3]
    predicted = fitted.transform(frame.alias("t"))
    assert predicted.select("t.id", "prediction").count() == 4
    assert predicted.columns == ["id", "features", "prediction"]


@pytest.mark.parametrize("name", ["Prediction", "PROBABILITY"])
def test_transform_when_an_output_column_is_there_in_another_case_then_says_so(spark, name):
    frame = spark.createDataFrame([([0.0] * 4, 1.0)], ["features", name])
    model = model_with("sparse_categorical_crossentropy", keras.layers.Dense(3, "softmax"))
    with pytest.raises(SchemaError, match=f"without a column '{name.lower()}'"):
        fitted_of(model).transform(frame)
