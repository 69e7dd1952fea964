"""The columns that users have, prepared by Spark, against numpy; and schema errors before any job."""

import datetime

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import Vectors

from elephant import KerasEstimator
from elephant.data.columns import to_values
from elephant.errors import DataError, SchemaError
from elephant.modeling.source import model_source
from elephant.spark.choice import ColumnChoice
from elephant.spark.columns import prepare_training

MATRIX = np.array([[1.5, 0.0, -2.0], [0.0, 3.25, 4.0]])


def model_of(*shape, dtype="float32", units=1):
    model = keras.Sequential(
        [keras.layers.Input(shape, dtype=dtype), keras.layers.Flatten(), keras.layers.Dense(units)]
    )
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def table(spark):
    rows = [
        (
            row.tolist(),
            row.tolist(),
            Vectors.dense(row),
            Vectors.sparse(3, np.flatnonzero(row).tolist(), row[row != 0].tolist()),
            [int(value) for value in row],
            *(float(value) for value in row),
            index,
            bool(index),
            float(index),
            datetime.date(2026, 1, 1),
            "text",
            index / 2,
        )
        for index, row in enumerate(MATRIX)
    ]
    schema = (
        "floats array<float>, doubles array<double>, vector VECTOR, sparse VECTOR, longs array<bigint>, "
        "`a.b` double, b float, c double, i int, flag boolean, `decimal` double, day date, text string, weight double"
    )
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import StructField, StructType, _parse_datatype_string

    plain = _parse_datatype_string(schema.replace("VECTOR", "array<double>"))
    fields = [
        StructField(field.name, VectorUDT()) if field.name in ("vector", "sparse") else field for field in plain.fields
    ]
    frame = spark.createDataFrame(rows, StructType(fields)).coalesce(1)
    return frame.withColumn("decimal", frame["decimal"].cast("decimal(10,2)")).cache()


def prepared(table, features, label="i", model=None, **options):
    """Returns the schema and each prepared column as a numpy array, the way a rank would read them."""
    facts = model_source(model or model_of(3)).facts
    schema, columns = prepare_training(
        table.schema, facts, ColumnChoice(features=features, label=label, **options), sparse=()
    )
    return schema, read(table.select(*columns), schema)


def read(selected, schema):
    """Returns the selected columns as arrays by role; what is no array as `to_values` gives it."""
    [batch] = pa.Table.from_batches(selected._collect_as_arrow()).combine_chunks().to_batches()
    return {field.role: to_values(batch.column(field.role), field)[0] for field in schema}


@pytest.mark.parametrize("features", [["floats"], ["doubles"], ["vector"], ["sparse"], ["a.b", "b", "c"]], ids=str)
def test_features_when_prepared_then_are_a_float32_matrix(table, features):
    _, arrays = prepared(table, features)
    assert arrays["features"].dtype == np.float32
    np.testing.assert_array_equal(arrays["features"], MATRIX.astype("float32"))


def test_features_when_the_model_takes_integers_then_stay_integers(table):
    _, arrays = prepared(table, ["longs"], model=model_of(3, dtype="int32"))
    assert arrays["features"].dtype == np.int32
    np.testing.assert_array_equal(arrays["features"], MATRIX.astype("int32"))


@pytest.mark.parametrize(
    ("label", "dtype", "expected"),
    [
        ("i", "int32", [0, 1]),
        ("flag", "int32", [0, 1]),
        ("decimal", "float32", [0.0, 1.0]),
        ("b", "float32", [0.0, 3.25]),
        ("vector", "float32", MATRIX),
        ("doubles", "float32", MATRIX),
    ],
)
def test_labels_when_prepared_then_have_the_type_that_losses_take(table, label, dtype, expected):
    # Labels that are arrays have to be as wide as the output.
    units = 3 if np.ndim(expected) == 2 else 1
    _, arrays = prepared(table, ["floats"], label=label, model=model_of(3, units=units))
    assert arrays["label"].dtype == np.dtype(dtype)
    np.testing.assert_allclose(arrays["label"], expected)


def test_weight_and_indicator_when_prepared_then_keep_their_rows(table):
    _, arrays = prepared(table, ["floats"], weight="weight", validation="flag")
    np.testing.assert_array_equal(arrays["weight"], [0.0, 0.5])
    np.testing.assert_array_equal(arrays["validation"], [False, True])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"featuresCol": "nowhere"}, "featuresCol: expected one of the columns floats, .* Received: 'nowhere'"),
        ({"featuresCol": "text"}, "featuresCol: expected an array .* Received: column 'text' of type string"),
        ({"featuresCol": ["b", "text", "c"]}, "featuresCol: expected a numeric column.* 'text' of type string"),
        ({"featuresCol": ["b", "c"]}, r"expected 3 values for the model's input shape \(3,\). Received: 2 columns"),
        ({"featuresCol": "b"}, r"expected 3 values for the model's input shape \(3,\). Received: 1 columns"),
        ({"labelCol": "text"}, "labelCol: expected .* Received: column 'text' of type string"),
        ({"labelCol": "label"}, "labelCol: expected one of the columns .* Received: 'label'"),
        ({"weightCol": "doubles"}, "weightCol: expected a column of numbers, .* Received: column 'doubles'"),
        ({"validationIndicatorCol": "i"}, "validationIndicatorCol: expected a boolean column. .* 'i' of type int"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fit_when_a_column_cannot_be_used_then_no_job_starts(spark, table, options, message):
    estimator = KerasEstimator(
        **{"model": model_of(3), "featuresCol": "floats", "labelCol": "i", "verbose": 0, **options}
    )
    tracker = spark.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup())
    with pytest.raises(SchemaError, match=message):
        estimator.fit(table)
    assert set(tracker.getJobIdsForGroup()) == before


def test_fit_when_features_are_flat_columns_of_an_image_then_the_model_s_shape_is_given_back(spark):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(24, 16))
    frame = spark.createDataFrame([(row.tolist(), Vectors.dense(row)) for row in images], ["x", "y"])
    model = keras.Sequential([keras.layers.Input((4, 4, 1)), keras.layers.Conv2D(1, 1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    fitted = KerasEstimator(model=model, featuresCol="x", labelCol="y", epochs=20, batchSize=24, verbose=0).fit(frame)
    # An autoencoder whose only weight has to become one.
    assert fitted.model.get_weights()[0].item() == pytest.approx(1.0, abs=0.05)
    row = fitted.transform(frame).first()
    np.testing.assert_allclose(row.prediction, row.x, atol=0.3)


def test_fit_when_labels_are_wider_than_the_output_then_says_so(spark, table):
    with pytest.raises(DataError, match=r"column 'doubles': expected 1 values in every row.* Received: 3 values"):
        KerasEstimator(model=model_of(3), featuresCol="floats", labelCol="doubles", verbose=0).fit(table)
