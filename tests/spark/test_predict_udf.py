"""A model as a function of columns in SQL, and several outputs as columns, on real executors."""

import keras
import numpy as np
import pandas
import pyarrow as pa
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)
from pyspark.sql.types import ArrayType, DoubleType, FloatType, StringType, StructField, StructType
from spark_frames import partitioned_frame
from tables import every_case

import elephant
from elephant.errors import ConfigurationError, DataError, SchemaError
from elephant.modeling.model_spec import model_source
from elephant.spark.model import KerasModel
from elephant.task.predict_task import VECTOR_TYPE

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


@pytest.mark.slow("tests/task/test_predict_task.py holds inputs and outputs by name")
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
    fitted.setFeaturesCol({"one": "left", "two": "right"}).setInferenceBatchSize(5)
    predicted = fitted.transform(frame).orderBy("id")
    of_kind = {"rawPrediction_kind", "probability_kind", "prediction_kind"}
    assert set(predicted.columns[3:]) == {*of_kind, "prediction_price", "prediction_box"}
    rows = predicted.collect()
    np.testing.assert_allclose([r.probability_kind.toArray() for r in rows], expected["kind"], rtol=1e-5, atol=1e-6)
    assert [row.prediction_kind for row in rows] == expected["kind"].argmax(axis=1).tolist()
    np.testing.assert_allclose([row.prediction_box for row in rows], expected["box"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([row.prediction_price for row in rows], expected["price"][:, 0], rtol=1e-5, atol=1e-6)


def test_predict_udf_when_given_something_else_then_says_what_it_takes():
    with pytest.raises(
        ConfigurationError, match="a keras.Model, a path, or a function that loads a model. Received: b"
    ):
        elephant.predict_udf(3)
    with pytest.raises(ConfigurationError, match="where there is none"):
        elephant.predict_udf("nowhere.keras")
    with pytest.raises(ConfigurationError, match="returnType: expected the type that the UDF returns"):
        elephant.predict_udf(regression)
    with pytest.raises(ConfigurationError, match="batchSize: expected an integer of at least 1"):
        elephant.predict_udf(regression, returnType=DoubleType(), batchSize=0)


def called(udf, *columns):
    """Returns what a UDF gives for one chunk, computed in this process; a Spark without Arrow UDFs hands it pandas."""
    given = columns if hasattr(F, "arrow_udf") else tuple(map(as_pandas, columns))
    (made,) = udf.func(iter([given if len(given) > 1 else given[0]]))
    if isinstance(made, pandas.DataFrame):
        return pa.Table.from_pandas(made).to_pylist()
    return (pa.Array.from_pandas(made) if isinstance(made, pandas.Series) else made).to_pylist()


def as_pandas(column):
    """Returns a column as Spark hands it to a pandas UDF: a struct is a data frame."""
    if pa.types.is_struct(column.type):
        return pa.Table.from_arrays(column.flatten(), [part.name for part in column.type]).to_pandas()
    return column.to_pandas()


def floats(matrix):
    return pa.array(np.asarray(matrix).tolist(), pa.list_(pa.float32()))


FLOATS = ArrayType(FloatType())


@every_case(
    ("kind", "expected"),
    [
        (FLOATS, lambda outputs: None),
        (StructType([StructField("box", FLOATS), StructField("price", FloatType())]), ["box", "price"]),
        (StructType([StructField("kind", ArrayType(DoubleType()))]), ["kind"]),
        (StructType([StructField(name, FLOATS) for name in ("a", "b", "c")]), ["box", "kind", "price"]),
    ],
)
def test_predict_udf_when_executors_load_a_model_then_gives_the_outputs_as_the_type_says(kind, expected):
    x = values()
    left, right = floats(x[:, :3]), pa.array(x[:, 3])
    udf = elephant.predict_udf(forked, returnType=kind, batchSize=7)
    if callable(expected):
        with pytest.raises(SchemaError, match="a struct as returnType for several. Received: a tuple of 3"):
            called(udf, left, right)
        return
    outputs = forked().predict({"one": x[:, :3], "two": x[:, 3:]}, verbose=0)
    rows = called(udf, left, right)
    for field, name in zip(kind.fields, expected, strict=True):
        made = np.array([row[field.name] for row in rows]).reshape(len(x), -1)
        np.testing.assert_allclose(made, outputs[name], rtol=1e-5, atol=1e-6)


PAIR = StructType([StructField("sum", DoubleType()), StructField("parts", ArrayType(DoubleType()))])
FUNCTIONS = {
    "an array": (lambda a, b: a.sum(axis=1) + b, DoubleType(), lambda a, b: (a.sum(axis=1) + b).tolist()),
    "a column": (lambda a, b: (a.sum(axis=1) + b)[:, None], FloatType(), lambda a, b: (a.sum(axis=1) + b).tolist()),
    "rows": (lambda a, b: a * 2, ArrayType(DoubleType()), lambda a, b: (a * 2).tolist()),
    "nested": (
        lambda a, b: np.stack([a, a], axis=1),
        ArrayType(ArrayType(FloatType())),
        lambda a, b: np.stack([a, a], axis=1).tolist(),
    ),
    "lengths that differ": (
        lambda a, b: [row[: int(n)] for row, n in zip(a, b, strict=True)],
        FLOATS,
        lambda a, b: [row[: int(n)].tolist() for row, n in zip(a, b, strict=True)],
    ),
    "words": (lambda a, b: [f"n{n:.0f}" for n in b], StringType(), lambda a, b: [f"n{n:.0f}" for n in b]),
    "a dictionary": (
        lambda a, b: {"parts": a, "sum": b},
        PAIR,
        lambda a, b: [{"sum": n, "parts": row.tolist()} for row, n in zip(a, b, strict=True)],
    ),
    "a tuple": (
        lambda a, b: (b, a),
        PAIR,
        lambda a, b: [{"sum": n, "parts": row.tolist()} for row, n in zip(a, b, strict=True)],
    ),
    "dictionaries": (
        lambda a, b: [{"sum": n, "parts": row} for row, n in zip(a, b, strict=True)],
        PAIR,
        lambda a, b: [{"sum": n, "parts": row.tolist()} for row, n in zip(a, b, strict=True)],
    ),
}


@every_case(("function", "kind", "expected"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_predict_udf_when_executors_load_a_function_then_it_gets_arrays_and_gives_any_form(function, kind, expected):
    a, b = np.arange(15, dtype="float32").reshape(5, 3), np.array([1.0, 0.0, 3.0, 2.0, 1.0])
    sizes = []
    udf = elephant.predict_udf(
        lambda: lambda x, y: sizes.append(len(x)) or function(x, y), returnType=kind, batchSize=2
    )
    assert called(udf, floats(a), pa.array(b)) == expected(a, b)


def test_predict_udf_when_a_function_takes_one_array_then_several_numbers_make_its_rows():
    udf = elephant.predict_udf(lambda: lambda rows: rows.sum(axis=1), returnType=DoubleType())
    assert called(udf, pa.array([1.0, 2.0]), pa.array([10.0, 20.0])) == [11.0, 22.0]


def test_predict_udf_when_a_function_gives_something_else_then_says_what_is_expected():
    def error_of(made, kind=None):
        with pytest.raises(DataError) as caught:
            called(
                elephant.predict_udf(lambda: lambda rows: made, returnType=kind or DoubleType()), pa.array([1.0, 2.0])
            )
        return str(caught.value)

    assert "expected the result to have 2 rows. Received: shape (3,)" in error_of([1, 2, 3])
    assert "one value for each row, as returnType says. Received: shape (2, 2)" in error_of(np.zeros((2, 2)))
    assert "by the names in returnType, sum, parts. Received: 'total'" in error_of({"total": [1, 2]}, PAIR)
    with pytest.raises(ConfigurationError, match="loads a keras.Model or a function on arrays. It returned: int"):
        called(elephant.predict_udf(lambda: 3, returnType=DoubleType()), pa.array([1.0]))


def test_predict_udf_when_a_model_has_preprocessing_then_its_columns_are_the_arguments():
    model, x = regression(), values()
    fitted = KerasModel(model_source(model)).setPreprocessing(
        lambda batch: np.concatenate(
            [batch["vector"] * 2, batch["more"]["a"][:, None], batch["text"][:, None] == "x"], 1
        )
    )
    fitted.setFeaturesCol(["vector", "more", "text"])
    vector = {"type": 1, "size": None, "indices": None}
    vectors = pa.array([{**vector, "values": row} for row in x[:, :2].tolist()], pa.struct(list(VECTOR_TYPE)))
    more = pa.array([{"a": number} for number in x[:, 2].tolist()])
    text = pa.array(["x", "y"] * (len(x) // 2))
    made = np.stack([x[:, 0] * 2, x[:, 1] * 2, x[:, 2], np.tile([1.0, 0.0], len(x) // 2)], axis=1)
    expected = model.predict(made, verbose=0)[:, 0]
    np.testing.assert_allclose(
        called(elephant.predict_udf(fitted), vectors, more, text), expected, rtol=1e-5, atol=1e-6
    )
    with pytest.raises(SchemaError, match="each of the columns vector, more, text, .* Received: 1 arguments"):
        called(elephant.predict_udf(fitted), text)


def test_predictions_when_collected_then_are_keras_own_in_the_order_of_the_rows(spark, tmp_path):
    model, x = forked(), values()
    fitted = KerasModel(model_source(model)).setFeaturesCol({"one": "left", "two": "right"}).setInferenceBatchSize(5)
    frame = frame_of(spark, x[:, :3].tolist(), x[:, 3].tolist(), schema="id int, left array<float>, right float")
    shuffled = frame.orderBy(F.rand(3)).cache()
    places = [row.id for row in shuffled.collect()]
    expected = model.predict({"one": x[places, :3], "two": x[places, 3:]}, verbose=0)
    made = fitted.predict(shuffled)
    assert made.keys() == expected.keys()
    for name, output in expected.items():
        assert (made[name].shape, made[name].dtype) == (output.shape, output.dtype)
        np.testing.assert_allclose(made[name], output, rtol=1e-5, atol=1e-6)
    single = KerasModel(model_source(regression()))
    rows, expected = pandas.DataFrame({"features": list(x)}), regression().predict(x, verbose=0)
    np.testing.assert_allclose(single.predict(rows), expected, rtol=1e-5, atol=1e-6)
    # The loader on real executors, which have none of this process' modules.
    path = str(tmp_path / "model.keras")
    regression().save(path)

    def load():
        import keras

        return keras.saving.load_model(path)

    score = elephant.predict_udf(load, returnType="struct<price: float>", batchSize=4)
    scored = spark.createDataFrame([(row,) for row in x.tolist()], "features array<double>").select(score("features"))
    np.testing.assert_allclose([row[0].price for row in scored.collect()], expected[:, 0], rtol=1e-5, atol=1e-6)
    with pytest.raises(DataError, match="predict: expected rows"):
        single.predict(frame.limit(0).select(F.array(F.lit(1.0)).alias("features")))
    with pytest.raises(
        TypeError, match="predict: expected a DataFrame of Spark, the path .* Received: ndarray.* An array x makes one"
    ):
        single.predict(x)
