"""``fit`` on files that the executors read: the same rows as a DataFrame of them gives, each once."""

import datetime
import decimal

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counting_model import counted, counting_data, counting_model, weights_of
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql.types import StructField, StructType, _parse_datatype_string
from tiers import in_tiers

from elephant import Files, KerasEstimator
from elephant.data.casting import prepared_batches
from elephant.data.ragged import RaggedArray
from elephant.data.to_numpy import to_values
from elephant.errors import ConfigurationError, DataError, SchemaError
from elephant.modeling.model_spec import model_source
from elephant.spark.columns.column_selection import ColumnSelection
from elephant.spark.columns.column_types import selected_columns, training_schema
from elephant.spark.file_formats import open_files

TYPES = (
    "byte tinyint, short smallint, i int, long bigint, f float, d double, flag boolean, `a.b` decimal(12,3), day date, "
    "at timestamp, local timestamp_ntz, text string, texts array<string>, floats array<float>, doubles array<double>, "
    "longs array<bigint>, decimals array<decimal(6,2)>, matrix array<array<double>>, raw binary, "
    "weight double, marked boolean, vector VECTOR, sparse VECTOR"
)


def row_of(index, rng):
    values = np.round(rng.normal(size=3), 3)
    first, second, _ = values.tolist()
    moment = datetime.datetime(2026, 1, 1, 12, 30, 15, 123456) + datetime.timedelta(days=index)
    return (
        index % 100,
        index,
        index - 5,
        2**40 + index,
        first,
        second,
        bool(index % 3),
        decimal.Decimal(index * 1001) / 1000,
        moment.date(),
        moment,
        moment,
        f"text {index} ä",
        ["a", f"b{index}"],
        values.astype("float32").tolist(),
        values.tolist(),
        [index, 2, 3],
        [decimal.Decimal(index) / 4] * 3,
        [values.tolist(), [1.0, 2.0, 3.0]],
        values.astype("<f4").tobytes(),
        float(index) / 7,
        bool(index % 2),
        Vectors.dense(values) if index % 2 else Vectors.sparse(3, [1], [second]),
        Vectors.sparse(3, [index % 3], [first]),
    )


@pytest.fixture(scope="module")
def folder(spark, tmp_path_factory):
    """Files of 41, 1 and 20 rows with every type of column, written by Spark, in row groups of a few rows."""
    plain = _parse_datatype_string(TYPES.replace("VECTOR", "array<double>"))
    schema = StructType(
        [StructField(f.name, VectorUDT()) if f.name in ("vector", "sparse") else f for f in plain.fields]
    )
    rng = np.random.default_rng(0)
    rows = [row_of(index, rng) for index in range(62)]
    path = tmp_path_factory.mktemp("files") / "rows"
    for part in (rows[:41], rows[41:42], rows[42:]):
        frame = spark.createDataFrame(part, schema).coalesce(1)
        frame.write.mode("append").option("parquet.block.size", "2048").parquet(str(path))
    return path


def input_model(*shapes, dtype="float32"):
    inputs = [keras.layers.Input(shape, dtype=dtype, name=f"in{n}") for n, shape in enumerate(shapes)]
    parts = [keras.layers.Flatten()(keras.ops.cast(one, "float32")) for one in inputs]
    joined = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    model = keras.Model(inputs if len(inputs) > 1 else inputs[0], keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    return model


def string_model():
    inputs = keras.layers.Input((1,), dtype="string")
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    model = keras.Sequential(
        [inputs, lookup, keras.layers.Embedding(4, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return model


CHOICES = {
    "numbers of all types make one vector": (
        (11,),
        {"features": ["byte", "short", "i", "long", "f", "d", "flag", "a.b", "day", "at", "local"], "label": "d"},
    ),
    "floats": ((3,), {"features": "floats", "label": "flag", "weight": "weight", "validation": "marked"}),
    "doubles": ((3,), {"features": "doubles", "label": "i"}),
    "longs": ((3,), {"features": "longs", "label": "long"}),
    "decimals": ((3,), {"features": "decimals", "label": "a.b"}),
    "matrix": ((2, 3), {"features": "matrix", "label": "at"}),
    "raw": ((3,), {"features": "raw", "label": "day"}),
    "vector": ((3,), {"features": "vector", "label": "short"}),
    "any length": ((None,), {"features": "doubles", "label": "d"}),
}


def arrays_of(batches, schema):
    """Returns what the shards hold, by role: arrays, or offsets and buffers."""
    table = pa.Table.from_batches(batches).combine_chunks()
    found = {}
    for field in schema:
        values, shape = to_values(table.column(field.role).chunk(0), field)
        found[field.role] = (shape, [values.offsets, *values.buffers] if isinstance(values, RaggedArray) else [values])
    return found


def assert_same_rows(frame, path, model, choice, sparse=()):
    """The prepared DataFrame's rows and those read from the files are equal, to the bit and in order."""
    facts = model_source(model).info
    schema = training_schema(frame.schema, facts, choice).with_sparse(sparse)
    selected = frame.select(*selected_columns(frame.schema, schema))
    expected = arrays_of(prepared_batches(selected._collect_as_arrow(), schema), schema)
    opened = open_files(Files(path), facts, choice)
    assert training_schema(opened.schema, facts, choice).with_sparse(sparse) == schema
    parts = opened.files.deal(3, seed=None)
    read = (batch for part in parts for batch in opened.files.read(part, schema.columns))
    got = arrays_of(prepared_batches(read, schema), schema)
    for role, (shape, arrays) in expected.items():
        assert got[role][0] == shape
        for values, wanted in zip(got[role][1], arrays, strict=True):
            np.testing.assert_array_equal(values, wanted, err_msg=role)


@pytest.fixture(scope="module")
def frame(spark, folder):
    # In the order of the files' names, as the workers read them; Spark takes large files first.
    names = sorted(str(path) for path in folder.glob("*.parquet"))
    frames = [spark.read.parquet(name).coalesce(1) for name in names]
    joined = frames[0]
    for more in frames[1:]:
        joined = joined.union(more)
    return joined.cache()


FAST = ["numbers of all types make one vector", "matrix", "vector"]


@pytest.mark.parametrize("chosen", in_tiers(CHOICES, fast=FAST, slow="another type of column"))
def test_columns_when_read_from_files_then_equal_those_of_a_dataframe(frame, folder, chosen):
    shape, choice = chosen
    shape = shape if choice["features"] != "any length" else (None,)
    model = input_model(shape) if None not in shape else sequence_model()
    assert_same_rows(frame, folder, model, ColumnSelection(**choice))


def sequence_model():
    model = keras.Sequential([keras.layers.Input((None,)), keras.layers.Reshape((-1, 1)), keras.layers.SimpleRNN(1)])
    model.compile("sgd", "mse")
    return model


def test_columns_when_there_are_several_inputs_then_equal_those_of_a_dataframe(frame, folder):
    choice = ColumnSelection(features={"in0": "vector", "in1": ["i", "f"]}, label="d")
    assert_same_rows(frame, folder, input_model((3,), (2,)), choice)


def test_columns_when_with_sparse_or_as_strings_then_equal_those_of_a_dataframe(frame, folder):
    choice = ColumnSelection(features="sparse", label="d")
    assert_same_rows(frame, folder, input_model((3,)), choice, sparse=["sparse"])
    assert_same_rows(frame, folder, string_model(), ColumnSelection(features="text", label="d"))


def counting_files(folder, name="rows.parquet", rows=48):
    """Returns the columns that are written to two files of uneven row groups."""
    columns = counting_data(rows)
    table = pa.table({"features": list(columns["features"]), "label": columns["label"]})
    folder.mkdir(exist_ok=True)
    pq.write_table(table.slice(0, 5), folder / f"0-{name}", row_group_size=2)
    pq.write_table(table.slice(5), folder / f"1-{name}", row_group_size=40)
    return columns


def test_fit_when_given_a_folder_then_every_row_counts_once(spark, tmp_path):
    columns = counting_files(tmp_path / "rows")
    estimator = KerasEstimator(model=counting_model(), numWorkers=3, batchSize=16, verbose=0)
    # Parts of sixteen rows each: one step of 48.
    fitted = estimator.fit(tmp_path / "rows", {estimator.epochs: 2})
    # One row more or less would be 0.005 at least.
    np.testing.assert_allclose(weights_of(fitted), counted(columns, batch_size=48, epochs=2), atol=1e-6)


# Whoever reads records imports TensorFlow: one worker does.
@pytest.mark.slow("a fit; tests/data and tests/cluster/test_tfrecord_source.py hold what records become")
def test_asynchronous_fit_when_files_hold_records_then_every_record_counts_once(spark, tmp_path):
    import tensorflow as tf

    columns = counting_data(48)
    for number, rows in enumerate((slice(0, 40), slice(40, 48))):
        path = str(tmp_path / f"rows-{number}.tfrecord.gz")
        with tf.io.TFRecordWriter(path, options="GZIP") as writer:
            for features, label in zip(columns["features"][rows], columns["label"][rows], strict=True):
                parts = {"features": features, "label": [label]}
                lists = {name: tf.train.FloatList(value=values) for name, values in parts.items()}
                feature = {name: tf.train.Feature(float_list=values) for name, values in lists.items()}
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    options = {"mode": "asynchronous", "numWorkers": 1, "batchSize": 8, "verbose": 0}
    fitted = KerasEstimator(model=counting_model(), **options).fit(tmp_path)
    np.testing.assert_array_equal(weights_of(fitted), counted(columns, batch_size=8, epochs=1))


@pytest.mark.slow("a fit; tests/data/test_delta.py holds which files are its")
def test_fit_when_given_a_delta_table_with_weights_and_held_out_rows_then_every_row_of_it_counts_once(spark, tmp_path):
    deltalake = pytest.importorskip("deltalake")
    columns = counting_data(64)
    held, weight = np.arange(64) % 4 == 3, np.where(np.arange(64) < 20, 0.5, 2.0).astype("float32")
    table = pa.table({"features": list(columns["features"]), "label": columns["label"], "held": held, "weight": weight})
    # Rows that are no longer of the table, and files of several sizes that are.
    deltalake.write_deltalake(str(tmp_path), table.slice(0, 9))
    deltalake.write_deltalake(str(tmp_path), table.slice(0, 20), mode="overwrite")
    deltalake.write_deltalake(str(tmp_path), table.slice(20), mode="append")
    options = {"weightCol": "weight", "validationIndicatorCol": "held", "numWorkers": 3, "batchSize": 64, "verbose": 0}
    fitted = KerasEstimator(model=counting_model(), **options).fit(tmp_path)
    weighted = {"features": (columns["features"] * weight[:, np.newaxis])[~held]}
    np.testing.assert_allclose(weights_of(fitted), counted(weighted, batch_size=48, epochs=1), atol=1e-6)
    model = counting_model()
    model.set_weights(fitted.model.get_weights())
    expected = model.evaluate(columns["features"][held], columns["label"][held], sample_weight=weight[held], verbose=0)
    np.testing.assert_allclose(fitted.history["val_loss"], [expected], rtol=1e-6)


@pytest.mark.slow("a fit that starts")
def test_fit_when_a_file_goes_after_it_was_listed_then_says_so(spark, tmp_path, monkeypatch):
    counting_files(tmp_path / "rows")

    def listed_then_lost(*args):
        opened = open_files(*args)
        (tmp_path / "rows" / "1-rows.parquet").unlink()
        return opened

    monkeypatch.setattr("elephant.spark.training_data.open_files", listed_then_lost)
    estimator = KerasEstimator(model=counting_model(), numWorkers=2, verbose=0)
    with pytest.raises(
        DataError, match="1-rows.parquet: expected the file that the driver has seen. Received: no such"
    ):
        estimator.fit(tmp_path / "rows")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("nowhere", "path: expected a file or a folder. Received: .*nowhere'"),
        ("empty", "path: expected files with rows. Received: .*empty', a folder without any"),
        (
            "other",
            r"path: expected Parquet or TFRecord files, by their names. Received: .*notes.log'. .*elephant.Files",
        ),
        (
            "text",
            r"path: expected Parquet .* Received: .*x.csv.gz'\. Pass the DataFrame .*: spark\.read\.csv\(path, head",
        ),
        (Files("rows", schema="x float"), "schema: expected TFRecord files. Received: parquet files"),
        (Files("rows", format="delta"), "path: expected "),
    ],
    ids=["nothing", "empty", "other files", "what Spark reads", "schema", "no table"],
)
def test_fit_when_a_path_cannot_be_used_then_says_why(spark, tmp_path, files, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.log").write_text("notes")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "x.csv.gz").write_text("no archive, which nobody opens")
    counting_files(tmp_path / "rows")
    if isinstance(files, Files):
        files = Files(tmp_path / files.path, files.format, files.schema)
    else:
        files = str(tmp_path / files)
    with pytest.raises(ConfigurationError, match=message):
        KerasEstimator(model=counting_model(), verbose=0).fit(files)


def test_fit_when_a_column_of_files_cannot_be_used_then_says_what_it_says_of_a_dataframe(spark, tmp_path):
    counting_files(tmp_path / "rows")
    with pytest.raises(SchemaError, match="labelCol: expected one of the columns features, label. Received: 'nowhere'"):
        KerasEstimator(model=counting_model(), labelCol="nowhere", verbose=0).fit(tmp_path / "rows")


def test_files_when_the_format_is_unknown_then_says_which_there_are():
    with pytest.raises(ConfigurationError, match="format: expected one of parquet, delta, tfrecord. Received: 'orc'"):
        Files("rows", format="orc")
