"""``transform``, ``evaluate`` and ``predict`` on files: the columns as Spark reads them, the numbers as Keras does."""

import datetime
import decimal
import os
import pathlib
import signal
import threading
import time

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from process_tree import processes_of
from pyspark.errors import PySparkException
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql.types import StructField, StructType, _parse_datatype_string

from elephant import Files, KerasModel
from elephant.errors import ConfigurationError, DataError, SchemaError

TYPES = (
    "id int, byte tinyint, short smallint, long bigint, d double, flag boolean, `a.b` decimal(12,3), day date, "
    "at timestamp, local timestamp_ntz, text string, texts array<string>, raw binary, marks map<string,int>, "
    "inner struct<x:int,y:array<struct<z:decimal(6,2)>>>, features array<float>, vector VECTOR, "
    "pair struct<x:int,z:double>, part string"
)
ROWS = 60


def row_of(index, rng):
    moment = datetime.datetime(2026, 1, 1, 12, 30, 15, 123456) + datetime.timedelta(days=index)
    values = rng.normal(size=4).astype("float32")
    present = index % 5 != 0
    return (
        index,
        index % 100,
        -index,
        2**40 + index,
        index / 7,
        bool(index % 3) if present else None,
        decimal.Decimal(index * 1001) / 1000,
        moment.date() if present else None,
        moment,
        moment if present else None,
        f"text {index} ä" if present else None,
        ["a", None, f"b{index}"],
        bytes([index, 0, 255]),
        {"one": index, "none": None} if present else None,
        (index, [(decimal.Decimal(index) / 4,), None] if present else None),
        values.tolist(),
        Vectors.dense(values[:3]) if index % 2 else Vectors.sparse(9, [1], [float(values[0])]),
        (index, index / 4),
        ["x", "y z", None][index % 3],
    )


def schema_of(text):
    plain = _parse_datatype_string(text.replace("VECTOR", "array<double>"))
    return StructType([StructField(f.name, VectorUDT()) if f.name == "vector" else f for f in plain.fields])


def classifier():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def regression(inputs=3):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.layers.Input((inputs,)), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def scored(model):
    return KerasModel(model).setFeaturesCol("x").setLabelCol("y")


def table_of(rows=50, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype("float32")
    return pa.table({"id": np.arange(rows), "x": list(x), "y": x.sum(axis=1) + np.float32(1)})


def written(folder, table, cuts=(0, 5, 31, 31), row_group_size=4):
    """Writes a table as several files, of which one has no rows."""
    folder.mkdir(parents=True)
    for number, (start, stop) in enumerate(zip(cuts, (*cuts[1:], len(table)), strict=True)):
        pq.write_table(table.slice(start, stop - start), folder / f"{number}.parquet", row_group_size=row_group_size)
    return table


def features_of(table):
    return np.array(table["x"].to_pylist(), "float32")


def ids_of(frame):
    return sorted(row.id for row in frame.select("id").collect())


def test_transform_when_given_a_path_then_has_the_table_as_spark_reads_it_and_predictions(spark, tmp_path):
    rng = np.random.default_rng(0)
    rows = [row_of(index, rng) for index in range(ROWS)]
    path, model = str(tmp_path / "rows"), classifier()
    frame = spark.createDataFrame(rows, schema_of(TYPES))
    frame.repartition(3, "id").write.partitionBy("part").option("parquet.block.size", "2048").parquet(path)
    table, fitted = spark.read.parquet(path), KerasModel(model)
    predicted = fitted.transform(path)
    # Nullability and kinds of vectors included.
    assert predicted.schema.fields[:-3] == table.schema.fields
    assert [(f.name, f.dataType.simpleString()) for f in predicted.schema.fields[-3:]] == [
        ("rawPrediction", "vector"),
        ("probability", "vector"),
        ("prediction", "double"),
    ]
    got = sorted(predicted.collect(), key=lambda row: row.id)
    assert [tuple(row)[:-3] for row in got] == [tuple(row) for row in table.orderBy("id").collect()]
    expected = model.predict(np.array([row[15] for row in rows], "float32"), verbose=0)
    np.testing.assert_allclose([row.probability.toArray() for row in got], expected, rtol=1e-5)
    assert [row.prediction for row in got] == expected.argmax(axis=1).tolist()
    assert [row.rawPrediction for row in got] == [row.probability for row in got]
    # A part of a struct is read whether the struct is kept or not.
    one = regression(1)
    parts = KerasModel(one).setFeaturesCol("pair").setPreprocessing(lambda batch: batch["pair"]["x"])
    expected = one.predict(np.arange(ROWS, dtype="float32")[:, np.newaxis], verbose=0)[:, 0]
    for columns in (["PART", "id"], ["pair", "id"]):
        frame = parts.transform(path, columns=columns)
        assert frame.columns == [columns[0].lower(), "id", "prediction"]
        np.testing.assert_allclose([row.prediction for row in frame.orderBy("id").collect()], expected, rtol=1e-5)


def test_transform_when_other_writers_have_types_that_spark_has_not_then_has_those_that_hold_them(spark, tmp_path):
    moments = pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC"))
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.uint32()),
            "large": pa.array([2**63, None], pa.uint64()),
            "kind": pa.array(["a", "b"]).dictionary_encode(),
            "half": pa.array([0.5, 1.5], pa.float16()),
            "x": pa.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], pa.list_(pa.float32(), 3)),
            "at": moments,
            "marks": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.uint8())),
            "avoid": pa.array([{"void": True}, None], pa.struct([("void", pa.bool_())])),
            "time": pa.array([1, 2], pa.time64("us")),
        }
    )
    path, model = tmp_path / "rows.parquet", regression()
    pq.write_table(table, path)
    fitted = KerasModel(model).setFeaturesCol("x")
    with pytest.raises(SchemaError, match="column 'time' of a type that it has not. Name those to keep"):
        fitted.transform(path)
    names = table.column_names[:-1]
    frame = fitted.transform(path, columns=names)
    types = [field.dataType.simpleString() for field in frame.schema.fields[:-2]]
    assert types == ["bigint", "decimal(20,0)", "string", "float", "array<float>", "timestamp", "map<string,smallint>"]
    first, second = sorted(frame.collect(), key=lambda row: row.id)
    assert tuple(first)[:5] == (1, decimal.Decimal(2**63), "a", 0.5, [1.0, 2.0, 3.0])
    assert (first.at.timestamp(), first.marks) == (pytest.approx(1_700_000_000.123456, abs=1e-6), {"a": 1})
    assert (second.large, second.at, second.marks) == (None, None, None)
    expected = model.predict(features_of(table), verbose=0)[:, 0]
    np.testing.assert_allclose([first.prediction, second.prediction], expected, rtol=1e-5)


def test_evaluate_and_predict_when_given_a_path_then_equal_one_process_in_the_order_of_the_files(spark, tmp_path):
    table, model = written(tmp_path / "rows", table_of()), regression()
    x, y = features_of(table), table["y"].to_numpy()
    fitted = scored(model)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    for path in (tmp_path / "rows", str(tmp_path / "rows"), Files(tmp_path / "rows", format="parquet")):
        assert fitted.evaluate(path) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(fitted.predict(tmp_path / "rows"), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    # A function makes what the model takes of other columns, here of fewer rows than there are slots.
    few, doubled = tmp_path / "rows" / "0.parquet", fitted.copy().setPreprocessing(lambda batch: {"x": 2 * batch["x"]})
    np.testing.assert_allclose(doubled.predict(few), model.predict(2 * x[:5], verbose=0), rtol=1e-5, atol=1e-6)
    expected = model.evaluate(2 * x[:5], y[:5], verbose=0, return_dict=True)
    assert doubled.evaluate(few) == pytest.approx(expected, rel=1e-5)
    rows = doubled.transform(few, columns=["id"]).orderBy("id").collect()
    assert [row.id for row in rows] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose([row.prediction for row in rows], model.predict(2 * x[:5], verbose=0)[:, 0], rtol=1e-5)


def test_frames_of_files_when_put_together_and_written_then_have_each_row_once_with_its_own_prediction(spark, tmp_path):
    table, model = written(tmp_path / "rows", table_of()), regression()
    written(tmp_path / "others", table)
    scored(model).save(str(tmp_path / "model"))
    fitted = KerasModel.load(str(tmp_path / "model"))
    first = fitted.transform(tmp_path / "rows", columns=["id", "x"])
    second = fitted.transform(tmp_path / "others", {fitted.predictionCol: "score"}, columns=["id", "x"])
    assert second.columns == ["id", "x", "score"]
    # Tasks of a union have other numbers than the parts, and one task may have several of those.
    together = first.union(second).coalesce(2)
    together.write.parquet(str(tmp_path / "out"))
    found = pq.read_table(tmp_path / "out").sort_by("id")
    assert found["id"].to_pylist() == sorted([*range(50), *range(50)])
    expected = model.predict(features_of(found), verbose=0)[:, 0]
    np.testing.assert_allclose(found["prediction"].to_numpy(), expected, rtol=1e-5, atol=1e-6)


def test_scoring_when_a_table_has_no_rows_or_changes_then_says_so(spark, tmp_path):
    table = table_of()
    written(tmp_path / "none", table.slice(0, 0), cuts=(0,))
    fitted = scored(regression())
    frame = fitted.transform(tmp_path / "none")
    assert frame.collect() == [] and frame.columns == ["id", "x", "y", "prediction"]
    with pytest.raises(DataError, match="evaluate: expected rows. Received: none"):
        fitted.evaluate(tmp_path / "none")
    with pytest.raises(DataError, match="predict: expected rows. Received: none"):
        fitted.predict(tmp_path / "none")
    written(tmp_path / "rows", table)
    frame = fitted.transform(tmp_path / "rows")
    pq.write_table(table.slice(0, 7), tmp_path / "rows" / "0.parquet")
    with pytest.raises(PySparkException, match=r"0.parquet: expected the [\d,]+ bytes that the driver has seen"):
        frame.collect()
    (tmp_path / "rows" / "0.parquet").unlink()
    with pytest.raises(PySparkException, match="0.parquet: expected the file that the driver has seen. Received: no"):
        frame.collect()


def test_scoring_when_it_cannot_begin_then_says_why_before_any_job(spark, tmp_path):
    written(tmp_path / "rows", table_of())
    fitted, path = scored(regression()), tmp_path / "rows"
    with pytest.raises(SchemaError, match="featuresCol: expected one of the columns id, x, y. Received: 'z'"):
        fitted.copy().setFeaturesCol("z").transform(path)
    with pytest.raises(SchemaError, match="columns: expected one of the columns id, x, y. Received: 'z'"):
        fitted.transform(path, columns=["id", "z"])
    taken = fitted.copy().setPredictionCol("ID")
    with pytest.raises(SchemaError, match="expected a DataFrame without a column 'ID', which it would add"):
        taken.transform(path)
    assert taken.transform(path, columns=["y"]).columns == ["y", "ID"]
    assert fitted.transform(path, columns=[]).columns == ["prediction"]
    with pytest.raises(ConfigurationError, match="columns: expected a list of names. Received: 'id'"):
        fitted.transform(path, columns="id")
    with pytest.raises(ConfigurationError, match="columns: expected a path or elephant.Files"):
        fitted.transform(spark.range(1), columns=["id"])
    with pytest.raises(ConfigurationError, match="path: expected a file or a folder. Received: .*nowhere"):
        fitted.evaluate(tmp_path / "nowhere")
    for call in (fitted.transform, fitted.evaluate, fitted.predict):
        with pytest.raises(TypeError, match="expected a DataFrame of Spark, the path of files, or elephant.Files. Rec"):
            call(7)


@pytest.mark.slow("two jobs; the test of Parquet scores files, tests/data/test_delta.py reads versions")
def test_scoring_when_given_a_delta_table_then_has_the_rows_of_its_version(spark, tmp_path):
    deltalake = pytest.importorskip("deltalake")
    table, path, model = table_of().append_column("k", pa.array(["a", "b"] * 25)), str(tmp_path), regression()
    deltalake.write_deltalake(path, table.slice(0, 9), partition_by=["k"])
    deltalake.write_deltalake(path, table.slice(0, 20), partition_by=["k"], mode="overwrite")
    wider = table.slice(20).append_column("more", pa.array(np.arange(30)))
    deltalake.write_deltalake(path, wider, partition_by=["k"], mode="append", schema_mode="merge")
    rows = scored(model).transform(path).orderBy("id").collect()
    assert [(row.id, row.k, row.more) for row in rows] == [
        (number, "ab"[number % 2], number - 20 if number >= 20 else None) for number in range(50)
    ]
    np.testing.assert_allclose(
        [row.prediction for row in rows], model.predict(features_of(table), verbose=0)[:, 0], rtol=1e-5, atol=1e-6
    )
    expected = model.evaluate(features_of(table), table["y"].to_numpy(), verbose=0, return_dict=True)
    assert scored(model).evaluate(path) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow("TensorFlow reads the records; tests/data/test_file_plan.py holds the order of files")
def test_predict_when_files_hold_records_then_has_their_order(spark, tmp_path):
    import tensorflow as tf

    table, model = table_of(), regression()
    for name, start, stop in (("a", 0, 30), ("b", 30, 31), ("c", 31, 50)):
        with tf.io.TFRecordWriter(str(tmp_path / f"{name}.tfrecord")) as writer:
            for row in table.slice(start, stop - start).to_pylist():
                lists = {"x": tf.train.FloatList(value=row["x"]), "y": tf.train.FloatList(value=[row["y"]])}
                feature = {name: tf.train.Feature(float_list=values) for name, values in lists.items()}
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    expected = model.predict(features_of(table), verbose=0)
    np.testing.assert_allclose(scored(model).predict(tmp_path), expected, rtol=1e-5, atol=1e-6)
    rows = scored(model).transform(tmp_path).collect()
    assert sorted(row.y for row in rows) == sorted(table["y"].to_pylist())


def slowly(folder):
    def preprocess(batch):
        pathlib.Path(folder, f"met-{os.getpid()}").touch()
        deadline = time.monotonic() + 60
        while not pathlib.Path(folder, "go").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return batch

    return preprocess


@pytest.mark.slow("an executor that comes back")
def test_transform_when_an_executor_is_killed_then_every_row_of_the_files_is_written_once(spark, tmp_path):
    table, model, met = written(tmp_path / "rows", table_of()), regression(), tmp_path / "met"
    met.mkdir()
    killed = []

    def kill():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list(met.glob("met-*")):
            time.sleep(0.05)
        victim = processes_of("org.apache.spark.executor.CoarseGrainedExecutorBackend")[0]
        os.kill(victim.pid, signal.SIGKILL)
        killed.append(victim.pid)
        (met / "go").touch()

    thread = threading.Thread(target=kill, name="fault", daemon=True)
    thread.start()
    fitted = scored(model).setPreprocessing(slowly(str(met)))
    fitted.transform(tmp_path / "rows", columns=["id", "x"]).write.parquet(str(tmp_path / "out"))
    thread.join()
    found = pq.read_table(tmp_path / "out").sort_by("id")
    assert killed and found["id"].to_pylist() == list(range(50))
    expected = model.predict(features_of(table), verbose=0)[:, 0]
    np.testing.assert_allclose(found["prediction"].to_numpy(), expected, rtol=1e-5, atol=1e-6)
