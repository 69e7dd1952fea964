"""The columns that users have, prepared by Spark, against numpy; and schema errors before any job."""

import datetime
import math
import re
from decimal import Decimal

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.mllib.linalg import Vectors as OldVectors
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StructField,
    StructType,
    _parse_datatype_string,
)
from tables import every_case
from tiers import in_tiers

from elephant import KerasEstimator
from elephant.data.casting import prepared_batch
from elephant.data.schema import DENSE, RAGGED
from elephant.data.shard import ShardWriter
from elephant.data.to_numpy import to_values
from elephant.errors import ConfigurationError, DataError, SchemaError
from elephant.modeling.model_info import VALUE, InputInfo, ModelInfo, OutputInfo
from elephant.modeling.model_spec import model_source
from elephant.spark.columns.column_selection import ColumnSelection
from elephant.spark.columns.column_types import raw_input_schema, selected_columns, training_schema
from elephant.spark.training_data import rows_of_frame

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
    plain = _parse_datatype_string(schema.replace("VECTOR", "array<double>"))
    fields = [
        StructField(field.name, VectorUDT()) if field.name in ("vector", "sparse") else field for field in plain.fields
    ]
    frame = spark.createDataFrame(rows, StructType(fields)).coalesce(1)
    return frame.withColumn("decimal", frame["decimal"].cast("decimal(10,2)")).cache()


def prepared(table, features, label="i", model=None, **options):
    """Returns the schema and each prepared column as a numpy array, the way a rank would read them."""
    facts = model_source(model or model_of(3)).info
    schema = training_schema(table.schema, facts, ColumnSelection(features=features, label=label, **options))
    return schema, read(table, schema)


def read(frame, schema):
    """Returns the prepared columns as arrays by role; what is no array as `to_values` gives it."""
    selected = frame.select(*selected_columns(frame.schema, schema))
    [batch] = pa.Table.from_batches(selected._collect_as_arrow()).combine_chunks().to_batches()
    batch = prepared_batch(batch, schema)
    return {field.role: to_values(batch.column(field.role), field)[0] for field in schema}


FEATURES = [["floats"], ["doubles"], ["vector"], ["sparse"], ["a.b", "b", "c"]]


@pytest.mark.parametrize(
    "features", in_tiers(FEATURES, fast=["['sparse']", "['a.b', 'b', 'c']"], slow="another type of column")
)
def test_features_when_prepared_then_are_a_float32_matrix(table, features):
    _, arrays = prepared(table, features)
    assert arrays["features"].dtype == np.float32
    np.testing.assert_array_equal(arrays["features"], MATRIX.astype("float32"))


def test_features_when_the_model_takes_integers_then_stay_integers(table):
    _, arrays = prepared(table, ["longs"], model=model_of(3, dtype="int32"))
    assert arrays["features"].dtype == np.int32
    np.testing.assert_array_equal(arrays["features"], MATRIX.astype("int32"))


LONG = 2**53 + 1
IDS = [16_777_217, 2**53 - 1, -3]


@pytest.mark.parametrize("kind", ["dense vector", "sparse vector", "double", "decimal", "mixed", "wide"])
def test_ids_when_the_model_takes_integers_then_are_those_of_the_rows(spark, kind):
    sparse = Vectors.sparse(3, {0: float(IDS[0]), 1: float(IDS[1]), 2: float(IDS[2])})
    made = {
        "dense vector": ([(Vectors.dense(IDS),)], StructType([StructField("id", VectorUDT())]), ["id"], IDS),
        "sparse vector": ([(sparse,)], StructType([StructField("id", VectorUDT())]), ["id"], IDS),
        "double": ([([one + 0.0 for one in IDS],)], "id array<double>", ["id"], IDS),
        "decimal": (
            [([Decimal(LONG), Decimal(-LONG), Decimal("7.9")],)],
            "id array<decimal(38,1)>",
            ["id"],
            [LONG, -LONG, 7],
        ),
        "mixed": ([(LONG, 7.9, True)], "a long, b double, c boolean", ["a", "b", "c"], [LONG, 7, 1]),
        "wide": ([(Decimal(LONG), 7.9, True)], "a decimal(20,0), b double, c boolean", ["a", "b", "c"], [LONG, 7, 1]),
    }
    rows, schema, features, expected = made[kind]
    frame = spark.createDataFrame(rows, schema).withColumn("label", F.lit(1.0)).coalesce(1)
    _, arrays = prepared(frame, features, label="label", model=model_of(3, dtype="int64"))
    assert arrays["features"].tolist() == [expected]


@pytest.mark.parametrize(("ansi", "value"), [(False, 1e30), (True, math.nan)])
def test_numbers_when_no_integer_of_the_model_holds_them_then_the_error_names_column_and_row(spark, ansi, value):
    def refused(features):
        with pytest.raises(DataError, match=f"{features[0]}.*expected numbers from .* Received: .* in row 1 of the"):
            prepared(frame, features, label="label", model=model_of(2, dtype="int32"))

    rows = [
        (1.0, 2.0, [3.0, 4.0], Vectors.dense([5.0, 6.0]), 0.0),
        (1.0, value, [3.0, value], Vectors.dense([5.0, value]), 0.0),
    ]
    fields = [StructField(name, DoubleType()) for name in "ab"]
    fields += [StructField("array", ArrayType(DoubleType())), StructField("vector", VectorUDT())]
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        frame = spark.createDataFrame(rows, StructType([*fields, StructField("label", DoubleType())])).coalesce(1)
        for features in (["a", "b"], ["array"], ["vector"]):
            refused(features)
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")


@pytest.mark.parametrize("ansi", [True, False], ids=["ansi", "not ansi"])
def test_decimals_when_no_integer_holds_them_then_the_error_names_the_column(spark, ansi):
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        frame = spark.createDataFrame([(Decimal(2**63), 1.0)], "wide decimal(38,0), label double")
        with pytest.raises(Exception, match=f"column 'wide': expected numbers that an integer holds, .*{2**63}"):
            prepared(frame, "wide", label="label", model=model_of(1, dtype="int64"))
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")


@pytest.mark.parametrize(
    ("label", "dtype", "expected"),
    [
        ("i", "int32", [0, 1]),
        ("flag", "int32", [0, 1]),
        ("decimal", "float32", [0.0, 1.0]),
        ("b", "float32", [0.0, 3.25]),
        ("vector", "float32", MATRIX),
        ("doubles", "float32", MATRIX),
        (["a.b", "b", "c"], "float32", MATRIX),
    ],
)
def test_labels_when_prepared_then_have_the_type_that_losses_take(table, label, dtype, expected):
    # Labels that are arrays have to be as wide as the output.
    units = 3 if np.ndim(expected) == 2 else 1
    _, arrays = prepared(table, ["floats"], label=label, model=model_of(3, units=units))
    assert arrays["label"].dtype == np.dtype(dtype)
    np.testing.assert_allclose(arrays["label"], expected)


def test_labels_when_an_output_has_several_columns_then_they_make_one_vector(table):
    labels = {"kind": ["a.b", "b", "c"], "age": "i"}
    schema, arrays = prepared(table, "floats", label=labels, model=two_outputs())
    by_column = {field.columns: arrays[field.role] for field in schema.labels}
    assert set(by_column) == {("i",), ("a.b", "b", "c")}
    np.testing.assert_allclose(by_column["i",], [0, 1])
    np.testing.assert_allclose(by_column["a.b", "b", "c"], MATRIX)
    # Class numbers of a sequence, one for each element.
    sequence = keras.Sequential([keras.layers.Input((3, 2)), keras.layers.Dense(4, "softmax")])
    sequence.compile("sgd", "sparse_categorical_crossentropy")
    choice = ColumnSelection(features="floats", label=["i", "flag", "b"])
    assert training_schema(table.schema, model_source(sequence).info, choice).labels[0].dtype == "float32"
    choice = ColumnSelection(features="floats", label=["i", "flag", "i"])
    schema = training_schema(table.schema, model_source(sequence).info, choice)
    assert (schema.labels[0].dtype, schema.labels[0].shape) == ("int32", (3,))


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
        ({"featuresCol": "b"}, r"expected 3 values for the model's input shape \(3,\). Received: 1 column \(b\)"),
        ({"labelCol": "text"}, "labelCol: expected .* Received: column 'text' of type string"),
        ({"labelCol": "label"}, "labelCol: expected one of the columns .* Received: 'label'"),
        ({"labelCol": ["b", "text"]}, "labelCol: expected a numeric column.* 'text' of type string"),
        ({"labelCol": ["b", "c"]}, r"expected 1 value for a label .* shape is \(1,\). Received: 2 columns \(b, c\)"),
        ({"labelCol": ["b", "c"], "preprocessing": print}, "labelCol: expected one column for a label, because prepro"),
        ({"weightCol": "doubles"}, "weightCol: expected a column of numbers, .* Received: column 'doubles'"),
        (
            {"validationIndicatorCol": "text"},
            "validationIndicatorCol: expected a column of booleans, .* of type string",
        ),
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


@pytest.mark.slow("a fit; tests/data/test_shard.py holds the shapes")
def test_fit_when_features_are_flat_columns_of_an_image_then_the_model_s_shape_is_given_back(spark):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(24, 16))
    frame = spark.createDataFrame([(row.tolist(), Vectors.dense(row)) for row in images], ["x", "y"])
    model = keras.Sequential([keras.layers.Input((4, 4, 1)), keras.layers.Conv2D(1, 1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    before = model.get_weights()[0].item()
    fitted = KerasEstimator(model=model, featuresCol="x", labelCol="y", batchSize=24, verbose=0).fit(frame)
    # An autoencoder of one weight, after one step.
    after = before - 0.5 * 2 * (before - 1) * np.mean(images**2)
    assert fitted.model.get_weights()[0].item() == pytest.approx(after, rel=1e-5)
    row = fitted.transform(frame).first()
    np.testing.assert_allclose(row.prediction, np.multiply(row.x, after), rtol=1e-5, atol=1e-6)


def test_fit_when_labels_are_wider_than_the_output_then_says_so(spark, table):
    with pytest.raises(DataError, match=r"column 'doubles': expected 1 value in every row.* Received: 3 values"):
        KerasEstimator(model=model_of(3), featuresCol="floats", labelCol="doubles", verbose=0).fit(table)


SCALARS = {
    "cast(-3 as tinyint)": -3.0,
    "cast(300 as smallint)": 300.0,
    "70000": 70000.0,
    "9007199254740991L": 9007199254740991.0,
    "cast(1.5 as float)": 1.5,
    "2.5D": 2.5,
    "cast('12.34' as decimal(10,2))": 12.34,
    "true": 1.0,
    "date'1969-12-30'": -2.0,
    "date'2026-11-21'": 20778.0,
    "timestamp'1969-12-31 23:59:58.5 UTC'": -1.5,
    "timestamp'2026-11-21 12:00:00.000001 UTC'": 1795262400.000001,
    # The first is before 1970; the others are hours that some places skip, and have twice.
    "timestamp_ntz'1900-01-01 00:00:01.25'": -2208988798.75,
    "timestamp_ntz'2024-03-10 02:30:00'": 1710037800.0,
    "timestamp_ntz'2024-03-31 02:30:00'": 1711852200.0,
    "timestamp_ntz'2024-11-03 01:30:00'": 1730597400.0,
}


def facts_for(**inputs):
    """Returns the facts of a model with inputs of these shapes and types, and one output without labels."""
    known = tuple(InputInfo(name, shape, dtype) for name, (shape, dtype) in inputs.items())
    output = OutputInfo("output", (1,), VALUE, from_logits=False, label_shape=(1,))
    x = {name: place for place, name in enumerate(inputs)}
    return ModelInfo(known, (output,), x, 0, "float32", scheduled_rate=False, own_step=True)


def inputs_read(frame, facts, columns, sparse=()):
    schema = training_schema(frame.schema, facts, ColumnSelection(features=columns, label=None)).with_sparse(sparse)
    return schema, read(frame, schema)


ZONES = ["UTC", "America/New_York", "Europe/Berlin"]


@pytest.mark.parametrize("zone", in_tiers(ZONES, fast=["America/New_York"], slow="another zone"))
def test_scalars_when_of_any_type_then_are_the_documented_numbers_in_every_time_zone(spark, zone):
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        frame = spark.sql("select " + ", ".join(f"{value} as c{place}" for place, value in enumerate(SCALARS)))
        facts = facts_for(**{f"c{place}": ((1,), "float64") for place in range(len(SCALARS))})
        _, arrays = inputs_read(frame, facts, {name: name for name in frame.columns})
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    for value, array in zip(SCALARS, arrays.values(), strict=True):
        assert array.tolist() == [[SCALARS[value]]], value


def test_columns_when_of_strings_arrays_and_bytes_then_keep_what_rows_hold(spark):
    frame = spark.sql(
        "select 'red' as `a.b`, 'x y' as `a b`, array('p', 'q') as `tick``s`, "
        "array(array(1, 2), array(3, 4)) as UPPER, array(array(array(1.5D))) as deep, "
        "X'0000803F00000040' as raw, array(7, 8, 9) as tokens, 'k' as k"
    )
    facts = facts_for(
        word=((1,), "string"),
        line=((), "string"),
        pair=((2,), "string"),
        matrix=((2, 2), "int32"),
        deep=((1, 1, 1), "float32"),
        raw=((2,), "float32"),
        tokens=((None,), "int32"),
        words=((2,), "string"),
    )
    columns = ["a.b", "a b", "tick`s", "upper", "deep", "raw", "tokens", ["a.b", "k"]]
    schema, values = inputs_read(frame, facts, dict(zip(schema_names(facts), columns, strict=True)))
    read_back = list(values.values())
    texts = [value.buffers[0].tobytes().decode() for value in (*read_back[:3], read_back[-1])]
    assert texts == ["red", "x y", "pq", "redk"]
    assert read_back[2].offsets.tolist() == [0, 1, 2]
    assert (read_back[3].tolist(), read_back[4].tolist(), read_back[5].tolist()) == (
        [[[1, 2], [3, 4]]],
        [[[[1.5]]]],
        [[1.0, 2.0]],
    )
    assert read_back[6].buffers[0].tolist() == [7, 8, 9]
    assert [field.kind for field in schema.inputs] == ["text"] * 3 + ["dense"] * 3 + ["ragged", "text"]


def schema_names(facts):
    return [known.name for known in facts.inputs]


def test_vectors_when_the_first_row_is_sparse_then_stay_sparse_for_a_dense_input(spark):
    rows = [(Vectors.sparse(4, [1], [2.0]), OldVectors.sparse(4, [3], [1.0]), Vectors.dense([1.0, 0.0, 0.0, 2.0]))]
    rows.append((Vectors.dense([1.0, 2.0, 3.0, 4.0]), OldVectors.dense([0.0, 0.0, 0.0, 5.0]), rows[0][0]))
    frame = spark.createDataFrame(rows, ["new", "old", "dense"]).coalesce(1)
    facts = facts_for(**dict.fromkeys(frame.columns, ((4,), "float32")))
    choice = ColumnSelection(features={name: name for name in frame.columns}, label=None)
    rows = rows_of_frame(frame, facts, choice, preprocessed=False)
    source, schema = rows.source, rows.schema
    assert [field.kind for field in schema.inputs] == ["sparse", "sparse", "dense"]
    _, values = inputs_read(frame, facts, choice.features, sparse=["new", "old"])
    new, old, dense = values.values()
    assert (new.buffers[0].tolist(), new.buffers[1].tolist()) == ([1, 0, 1, 2, 3], [2.0, 1.0, 2.0, 3.0, 4.0])
    assert (old.offsets.tolist(), old.buffers[1].tolist()) == ([0, 1, 5], [1.0, 0.0, 0.0, 0.0, 5.0])
    np.testing.assert_array_equal(dense, [[1, 0, 0, 2], [0, 2, 0, 0]])
    assert source.first_row() is not None


def test_first_row_when_python_has_no_such_date_then_is_read(spark):
    columns = "timestamp_seconds(253402300800) AS later", "date_add(DATE'9999-12-31', 366) AS day"
    source = rows_of_frame(
        spark.range(1).selectExpr(*columns).selectExpr("*", "array(later) AS times"),
        facts_for(a=((2,), "float32")),
        ColumnSelection(features={"a": ["later", "day"]}, label=None),
        preprocessed=False,
    ).source
    [[seconds, days]] = source.first_row().column(0).to_pylist()
    assert (seconds, days) == (np.float32(253402300800), 2932896 + 366)


def test_parts_of_structs_when_their_names_with_the_struct_mean_something_else_too_then_are_refused(spark):
    frame = spark.sql("SELECT struct(1 AS x, 2 AS y) AS s, 7 AS `S.X`, struct(3 AS u) AS `s.t`")
    with pytest.raises(SchemaError, match="'s.x' may mean.* Received: 2. Rename one of them"):
        raw_input_schema(frame.schema, ColumnSelection(features=["s"]))
    schema = raw_input_schema(frame.drop("S.X").schema, ColumnSelection(features=["s", "s.t"]))
    [row] = frame.drop("S.X").select(*selected_columns(frame.drop("S.X").schema, schema)).collect()
    assert tuple(row) == (1, 2, 3)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"a": "i"}, "featuresCol: expected a column for each of the model's inputs a, b. .* Add one for 'b'"),
        ({"a": "i", "b": "i", "c": "i"}, "inputs a, b. Received: columns for a, b, c. The model has no input 'c'"),
        (["i"], "featuresCol: expected a column for each .* a, b. Received: 1 columns: i"),
        ({"a": "i", "b": "nowhere"}, "featuresCol: expected one of the columns floats, .* Received: 'nowhere'"),
        ({"a": "i", "b": "text"}, "featuresCol: expected an array .* Received: column 'text' of type string"),
        (
            "i",
            "featuresCol: expected a column for each of the model's inputs a, b. Received: 'i'. Set featuresCol={'a'",
        ),
    ],
    ids=str,
)
def test_inputs_when_columns_do_not_fit_then_the_error_names_what_was_expected(table, inputs, message):
    facts = facts_for(a=((1,), "float32"), b=((1,), "float32"))
    with pytest.raises(SchemaError, match=message):
        training_schema(table.schema, facts, ColumnSelection(features=inputs, label=None))


def test_columns_when_a_value_is_null_then_the_error_names_the_column(spark):
    frame = spark.sql("select cast(null as string) as word, array('a', null) as pair")
    for name, shape, message in (
        ("word", (), "column 'word': expected a value"),
        ("pair", (2,), "column 'pair', elem"),
    ):
        with pytest.raises(DataError, match=message):
            inputs_read(frame, facts_for(a=(shape, "string")), {"a": name})


def two_outputs(**options):
    inputs = keras.Input((3,))
    outputs = {"age": keras.layers.Dense(1)(inputs), "kind": keras.layers.Dense(3)(inputs)}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", **{"loss": {"age": "mse", "kind": "mse"}, **options})
    return model


@pytest.mark.parametrize(
    ("compiled", "options", "message"),
    [
        ({}, {}, "labelCol: expected a column for each of the model's outputs age, kind. Received: 'i'"),
        ({}, {"labelCol": {"age": "i"}}, "outputs age, kind. Received: columns for age. Add one for 'kind'"),
        ({}, {"labelCol": ["i", "text"]}, "labelCol: expected a label of numbers. .* column 'text' .*StringIndexer"),
        (
            {},
            {"labelCol": ["i", "floats"], "weightCol": {"age": "weight"}},
            "weightCol: expected a column for each of the model's outputs age, kind",
        ),
        (
            {"loss": {"age": "mse", "kind": None}, "metrics": {"kind": ["mae"]}},
            {"labelCol": {"age": "i"}},
            "Add one for 'kind'",
        ),
        ({}, {"labelCol": ["i", "floats"], "classWeight": {0: 1.0}}, "classWeight: expected a model with one output"),
        (
            {"loss": {"age": "mse", "kind": None}},
            {"weightCol": "weight", "classWeight": {0: 1.0}},
            "classWeight: expected a fit without weightCol",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_fit_when_labels_do_not_fit_the_outputs_then_says_what_was_expected(table, compiled, options, message):
    known = {"featuresCol": "floats", "verbose": 0, "labelCol": "i"}
    with pytest.raises((SchemaError, ConfigurationError), match=message):
        KerasEstimator(model=two_outputs(**compiled), **{**known, **options}).fit(table)


FEATURES = StructField("x", ArrayType(FloatType()))
SPARK_TYPES = {
    "int": IntegerType(),
    "float": FloatType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
    "array<int>": ArrayType(IntegerType()),
    "array<float>": ArrayType(FloatType()),
    "array<array<int>>": ArrayType(ArrayType(IntegerType())),
}
SPARSE_LOSS, ONE_HOT_LOSS = "sparse_categorical_crossentropy", "categorical_crossentropy"
LABELS = {
    "classes": (SPARSE_LOSS, (3,), "int", [0, 2, 1], None),
    "classes as doubles": (SPARSE_LOSS, (3,), "double", [0.0, 2.0, 1.0], None),
    "classes in arrays": (SPARSE_LOSS, (3,), "array<int>", [[0], [2], [1]], None),
    "a class of each element": (SPARSE_LOSS, (2, 3), "array<int>", [[0, 1], [2, 2], [1, 0]], None),
    "the same, deeper": (SPARSE_LOSS, (2, 3), "array<array<int>>", [[[0], [1]], [[2], [2]], [[1], [0]]], None),
    "a class too many": (SPARSE_LOSS, (3,), "int", [0, 3, 1], "column 'y': expected class numbers from 0 to 2"),
    "a class below zero": (SPARSE_LOSS, (3,), "int", [0, -1, 1], "expected class numbers .* Received: -1 in row 1 "),
    "an ignored class": (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), (3,), "int", [0, -1, 1], None),
    "one-hot for classes": (
        SPARSE_LOSS, (3,), "array<int>", [[0, 0, 1]] * 3, "Received: 3 values .* one-hot labels are for categorical_",
    ),
    "one class of several elements": (SPARSE_LOSS, (2, 3), "int", [0, 1, 2], r"expected class numbers of shape \(2,\)"),
    "one-hot": (ONE_HOT_LOSS, (3,), "array<int>", [[0, 0, 1]] * 3, None),
    "soft": (ONE_HOT_LOSS, (3,), "array<float>", [[0.5, 0.25, 0.25]] * 3, None),
    "classes for one-hot": (ONE_HOT_LOSS, (3,), "int", [0, 2, 1], "labels of the output's shape .* with sparse_cat"),
    "one-hot of two": (ONE_HOT_LOSS, (3,), "array<int>", [[0, 1]] * 3, "3 values in .* Received: 2 .* shape of"),
    "binary": ("binary_crossentropy", (1,), "boolean", [True, False, True], None),
    "binary and soft": ("binary_crossentropy", (1,), "float", [0.5, 0.0, 1.0], None),
    "signs for binary": ("binary_crossentropy", (1,), "int", [1, -1, 1], "from 0 to 1.* Received: -1 in row 1 "),
    "one for several": ("binary_crossentropy", (3,), "int", [1, 0, 1], "expected labels of the output's shape"),
    "numbers for binary": ("binary_crossentropy", (1,), "float", [1.0, 0.5, 1.5], "0 to 1.* Received: 1.5 in row 2"),
    "signs for hinge": ("hinge", (1,), "int", [1, -1, 1], None),
    "numbers": ("mse", (1,), "float", [10.0, -7.0, 2.0], None),
    "numbers for vectors": ("mse", (4,), "float", [10.0, -7.0, 2.0], "labels of the output's shape .* one unit; "),
    "numbers for vectors, by class": (keras.losses.Huber(), (4,), "int", [0, 1, 2], "labels of the output's shape "),
    "of a shape of one's own": (lambda y, p: keras.ops.mean((p - y[:, None]) ** 2, -1), (4,), "int", [0, 1, 2], None),
}  # fmt: skip


def test_labels_when_one_unit_tells_classes_apart_then_are_refused_since_the_loss_would_be_zero():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", ONE_HOT_LOSS)
    schema = StructType([StructField("x", ArrayType(FloatType())), StructField("y", IntegerType())])
    with pytest.raises(SchemaError, match="a unit for each class. .* Compile the model with binary_crossentropy"):
        training_schema(schema, ModelInfo.of(model), ColumnSelection(features="x", label="y"))


def trains(model, labels):
    try:
        return bool(np.isfinite(model.train_on_batch(np.ones((len(labels), 4)), labels)))
    except (ValueError, tf.errors.InvalidArgumentError):
        return False


@every_case(("loss", "shape", "kind", "labels", "message"), LABELS.values(), ids=LABELS)
def test_labels_when_keras_cannot_train_on_them_then_are_refused_in_words_and_others_never(
    tmp_path_factory, loss, shape, kind, labels, message
):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(math.prod(shape)), keras.layers.Reshape(shape)]
    )
    model.add(keras.layers.Activation("softmax" if shape[-1] > 1 else "sigmoid"))
    model.compile("sgd", loss)
    # Of signs Keras makes a loss without a least value.
    assert trains(model, np.array(labels)) == (message is None or "0 to 1" in message)
    columns = StructType([FEATURES, StructField("y", SPARK_TYPES[kind])])
    batch = pa.RecordBatch.from_pydict({"x": pa.array([[1.0] * 4] * 3, pa.list_(pa.float32())), "y": pa.array(labels)})
    choice = ColumnSelection(features="x", label="y")
    try:
        schema = training_schema(columns, ModelInfo.of(model), choice)
        with ShardWriter(tmp_path_factory.mktemp("shard") / "rows", schema) as writer:
            writer.write(prepared_batch(batch, schema))
    except DataError as error:
        assert message is not None and re.search(message, str(error)), str(error)
    else:
        assert message is None


OWN_INPUT = {
    "class numbers": ((4,), 3, "softmax", "sparse_categorical_crossentropy", r"labels have shape \(\)"),
    "values": ((4,), 1, None, "mse", r"labels have shape \(1,\).*'x'\) has shape \(4,\). Received: none. Set labelCol"),
    "autoencoder": ((4,), 4, None, "mse", None),
    "own loss": ((4,), 1, None, lambda y_true, y_pred: y_pred, None),
}


@every_case("name", OWN_INPUT)
def test_model_without_labels_when_it_cannot_give_its_input_back_then_is_refused(name):
    shape, units, activation, loss, message = OWN_INPUT[name]
    model = keras.Sequential([keras.layers.Input(shape), keras.layers.Dense(units, activation)])
    model.compile("sgd", loss)
    columns, choice = StructType([FEATURES]), ColumnSelection(features="x", label=None)
    if message is None:
        assert training_schema(columns, ModelInfo.of(model), choice).inputs_as_labels
        return
    with pytest.raises(SchemaError, match=message):
        training_schema(columns, ModelInfo.of(model), choice)


def test_labels_when_rows_have_weights_then_binary_ones_may_be_anything():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy")
    columns = StructType([FEATURES, StructField("y", SPARK_TYPES["int"])])
    choice = ColumnSelection(features="x", label="y", weight="y")
    assert training_schema(columns, ModelInfo.of(model), choice).labels[0].num_classes is None


def test_fit_when_a_label_is_none_of_the_classes_then_the_driver_says_which(spark):
    frame = spark.createDataFrame([([1.0, 2.0, 3.0], index) for index in range(4)], ["x", "y"]).coalesce(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", SPARSE_LOSS)
    with pytest.raises(DataError, match="column 'y': expected class numbers from 0 to 2.* Received: 3 in row 3 of"):
        KerasEstimator(model=model, featuresCol="x", labelCol="y", verbose=0).fit(frame)


def test_labels_when_ctc_compares_sequences_of_classes_then_have_any_length():
    model = keras.Sequential([keras.Input((8, 4)), keras.layers.Dense(5)])
    model.compile("sgd", keras.losses.CTC())
    kinds = {"x": ArrayType(ArrayType(DoubleType())), "y": ArrayType(IntegerType()), "a": LongType(), "b": LongType()}
    columns, facts = StructType([StructField(name, kind) for name, kind in kinds.items()]), model_source(model).info
    (label,) = training_schema(columns, facts, ColumnSelection(features="x", label="y")).labels
    assert (label.kind, label.dtype, label.shape, label.num_classes) == (RAGGED, "int32", (None,), None)
    (label,) = training_schema(columns, facts, ColumnSelection(features="x", label=["a", "b"])).labels
    assert (label.kind, label.dtype, label.columns) == (DENSE, "int32", ("a", "b"))
