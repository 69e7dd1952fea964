"""Python on the pages runs: on the README and the tutorials' index as it stands there, elsewhere but for `_WORDS`."""

import re
from contextlib import nullcontext
from pathlib import Path

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.java_gateway import ensure_callback_server_started

import elephant
from elephant.backends import VARIABLE, current
from elephant.config import Timeouts
from elephant.driver.local_ranks import run_here
from elephant.errors import ClusterError, UnsupportedError
from elephant.monitor.progress import Progress

ROOT = Path(__file__).parents[2]
README, TUTORIALS = ROOT / "README.md", ROOT / "docs" / "tutorials"
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Fewer workers, epochs and folds than on a cluster; folders of this machine; the session of the tests.
_WORDS = [
    (r"(num_?[wW]orkers)=4", r"\1=2"),
    (r"epochs=\d+", "epochs=1"),
    (r"\bfolds=\d+", "folds=2"),
    (r"\b((?:n_|max_)?trials)=\d+", r"\1=1"),
    (r"(?<=\")(hdfs://|s3a://)?/?(?=(data|models|serving|checkpoints|arriving|cats)/?)", "{folder}/"),
    (r"s3://bucket/", "{folder}/data/"),
    (r"^\.\.\.$", "stream.query.processAllAvailable()"),
]
# What cannot run here, and why; or the error with which it ends here.
_ELSEWHERE = {
    ("callbacks.md", 2): "has a run of MLflow; tests/spark/test_mlflow.py does the same in a store of its own",
    ("callbacks.md", 3): "as the block before it",
    ("callbacks.md", 4): "needs Weights & Biases; tests/trackers runs its callback",
    ("callbacks.md", 5): "needs Comet; tests/trackers runs its callback",
    ("connect.md", 0): "needs a server of Spark Connect; tests/spark_connect runs the same on one",
    ("databricks.md", 0): "needs Databricks; its words are those of other pages",
    ("databricks.md", 1): "as the block before it",
    ("files.md", 1): "needs the jars of Delta Lake and Iceberg; tests/spark/test_lakehouse.py runs the same with them",
    ("from_horovod.md", 1): "needs executors with GPUs; tests/spark/test_gpus.py runs the same on invented ones",
    ("from_horovod.md", 2): "as the block before it",
    ("gpus.md", 0): ClusterError,
    ("gpus.md", 1): "needs executors with GPUs; tests/spark/test_gpus.py runs the same on invented ones",
    ("laptop.md", 0): "a session of its own; tests/cluster starts such ones",
    ("laptop.md", 1): "a session of its own; tests/cluster starts such ones",
    ("models.md", 4): "needs Keras RS; tests/modeling/test_feature_embeddings.py has classes with its attributes",
    ("scheduled_jobs.md", 0): "needs Airflow",
    ("scheduled_jobs.md", 1): "opens a run of MLflow; tests/spark/test_mlflow.py has runs in a store of its own",
    ("parallelism.md", 2): "parts of a program on several ranks; tests/training/test_stage_memory.py runs them",
    ("parallelism.md", 4): None if current().divides_models else UnsupportedError,
}
# Pages about what several workers do with each other; elsewhere one shows as much.
_OF_SEVERAL = ["modes", "parallelism"]
# What a page prints, where running does not prove it yet.
_PRINTED = {"exactness": "equal within 1e-04: yes"}
# Of the session, which other tests have as well.
_SET = ["spark.elephant.coordinator"]
# Registries of the process would keep what this page adds to them.
_ALONE = ["development.md"]


def blocks_of(page):
    return BLOCK.findall(page.read_text())


WITH_BLOCKS = [page for page in PAGES if blocks_of(page)]


@pytest.fixture(scope="module", autouse=True)
def spark_calls_back(spark):
    """PySpark listens to its JVM from the first stream of a session on: begun here, as it stays."""
    ensure_callback_server_started(spark.sparkContext._gateway)


@pytest.fixture(autouse=True)
def settings(spark):
    yield
    for name in _SET:
        spark.conf.unset(name)


@pytest.mark.slow("fits of many pages; what each shows has tests of its own")
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("page", [page for page in WITH_BLOCKS if page.name not in _ALONE], ids=lambda page: page.stem)
def test_page_when_its_blocks_run_in_turn_then_none_fails(page, spark, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = given_names(spark, tmp_path, page.stem)
    words = _WORDS if page.stem in _OF_SEVERAL else [(r"numWorkers=\d+", "numWorkers=1"), *_WORDS]
    for number, block in enumerate(blocks_of(page)):
        expected = _ELSEWHERE.get((page.name, number))
        if isinstance(expected, str):
            continue
        for pattern, word in words:
            block = re.sub(pattern, word.replace("{folder}", str(tmp_path)), block, flags=re.MULTILINE)
        program = compile(block, f"{page.name}, block {number}", "exec")
        with nullcontext() if expected is None else pytest.raises(expected):
            exec(program, names)  # noqa: S102  (the page's own words)
    assert _PRINTED.get(page.stem, "") in capsys.readouterr().out


def test_pages_when_they_hold_python_then_a_test_here_runs_them():
    pages = [path for path in ROOT.rglob("*.md") if path.relative_to(ROOT).parts[0][0] != "." and blocks_of(path)]
    assert sorted(pages) == sorted([README, TUTORIALS / "index.md", *WITH_BLOCKS])


@pytest.mark.slow("a fit; tests/spark holds what it calls")
def test_readme_when_pasted_then_prints_what_it_shows(spark, monkeypatch, capsys, tmp_path):
    first, program = blocks_of(README)
    shown = README.read_text().split(program)[1].split("```\n")[2]
    # What starts a session is in tests/cluster, and examples/digits.py is an application of its own (test_commands.py).
    monkeypatch.setattr("elephant.cluster.local.local_session", lambda executors: spark)
    names = {"__name__": "__main__"}
    exec(compile(program, "README.md", "exec"), names)  # noqa: S102  (the page's own words)
    said = capsys.readouterr().out
    for line in (line for line in shown.splitlines() if re.match(r" *[a-z]+ {2,}[a-z]|\|label|\+-", line)):
        assert line in said, said
    for text in (shown, said):
        assert float(re.search(r"'accuracy': (0\.\d+)", text)[1]) > 0.9
    assert len(re.findall(r"^\| +\d\| +\d\.0\|$", said, re.MULTILINE)) == 3
    # Its first lines, on the same model and rows, with workers for which there are slots.
    for written, here in (("numWorkers=4", "numWorkers=2"), ("epochs=10", "epochs=1"), ("/data", str(tmp_path))):
        assert written in first
        first = first.replace(written, here)
    exec(compile(first, "README.md", "exec"), {**names, "df": names["train"]})  # noqa: S102
    assert spark.read.parquet(str(tmp_path / "scores")).count() == names["train"].count()


def test_session_of_tutorials_without_java_when_compared_then_is_the_one_of_the_readme():
    (session,) = blocks_of(TUTORIALS / "index.md")
    known, shown = ({line.partition("  #")[0] for line in text.splitlines()} for text in (README.read_text(), session))
    assert shown <= known
    for lesson in TUTORIALS.glob("*.py"):
        found = re.findall(r"^builder = .*\nspark = builder.getOrCreate\(\)$", lesson.read_text(), re.MULTILINE)
        assert len(found) == 1, lesson


@pytest.mark.slow("may be the first to import Keras; tests/compression and test_algorithms.py register such things")
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("name", _ALONE)
def test_page_of_extensions_when_its_blocks_run_alone_then_none_fails(name):
    imports = """
from collections.abc import Mapping
from dataclasses import dataclass
from elephant.algorithms import Algorithm, register_algorithm
from elephant.cluster.checks.registry import *
from elephant.cluster.checks.registry import CheckResult, Phase, WARNING, check, check_result
from elephant.cluster.session import is_true
from elephant.monitor.events import Event
from elephant.parameter_server.optimizers.rules import Descent, register_rule
from elephant.spark.file_formats import FileListing, Opened, file_format
from typing import ClassVar
"""
    program = imports + "\n".join(blocks_of(ROOT / "docs" / name))
    # That of the processes of `verify`, on another page: the same server forks them.
    environment = {VARIABLE: keras.config.backend(), "PYTHONWARNINGS": "ignore"}
    progress = Progress(num_workers=1, epochs=0, verbose=0)
    given = (program, {"__name__": "__main__"})
    run_here(exec, given, {}, num_workers=1, progress=progress, timeouts=Timeouts(), env=environment)


def given_names(spark, folder, page):
    """Returns what a reader of the page has already: a session, a compiled model, tables."""
    random = np.random.default_rng(0)
    x = random.random((40, 8))
    y = (x.sum(axis=1) > 4).astype(int)
    table = [(i, row.tolist(), row.tolist(), int(label)) for i, (row, label) in enumerate(zip(x, y, strict=True))]
    frame = spark.createDataFrame(table, "id long, features array<double>, pixels array<double>, label int").coalesce(2)
    names = {
        "__name__": "__main__",
        "spark": spark,
        "elephant": elephant,
        "keras": keras,
        "np": np,
        "pd": pd,
        **{name: getattr(elephant, name) for name in ("KerasEstimator", "KerasModel", "SparkModel")},
        **dict.fromkeys(("df", "train", "test", "train_df", "test_df", "expensive"), frame),
        "pandas_df": pd.DataFrame({"features": list(x), "label": y}),
        "model": classifier(8),
    }
    return {**names, **_HERE.get(page, lambda *given: {})(spark, folder, frame, names)}


def classifier(width, classes=2, activation="softmax"):
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(classes, activation)])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def for_callbacks(spark, folder, frame, names):
    import keras_tuner

    model = names["model"]
    estimator = elephant.KerasEstimator(model, validationFraction=0.5, verbose=0)
    return {
        "estimator": estimator,
        "build_model": lambda units: classifier(8, classes=units),
        "keras_tuner": keras_tuner,
    }


def for_compression(spark, folder, frame, names):
    from elephant import collective

    return {"flat": np.zeros(784 * 128 + 128, "float32"), "collective": collective.current_collective()}


def for_embeddings(spark, folder, frame, names):
    rows = [(i % 7, 10**12 + i % 5, f"city {i % 3}", f"brand {i % 4}", i % 2) for i in range(40)]
    columns = "user long, item long, city string, brand string, clicked int"
    return {"clicks": spark.createDataFrame(rows, columns).coalesce(2)}


def for_files(spark, folder, frame, names):
    rows = frame.select("features", "label")
    rows.write.parquet(f"{folder}/arriving")
    rows.write.parquet(f"{folder}/data/train")
    write_records(folder, rows)
    return {"estimator": elephant.KerasEstimator(names["model"], verbose=0), "schema": rows.schema}


def write_records(folder, rows):
    import tensorflow as tf

    (folder / "data" / "records").mkdir()
    with tf.io.TFRecordWriter(f"{folder}/data/records/a.tfrecord") as writer:
        for row in rows.collect():
            feature = {
                "features": tf.train.Feature(float_list=tf.train.FloatList(value=row.features)),
                "label": tf.train.Feature(float_list=tf.train.FloatList(value=[row.label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def for_frames(spark, folder, frame, names):
    frame.select("features", "label").write.parquet(f"{folder}/data/train")
    return {}


def for_inference(spark, folder, frame, names):
    names["model"].save(folder / "digits.keras")
    frame.createOrReplaceTempView("digits")
    for table in ("day=2026-11-28", "test", "rows"):
        frame.select("id", "features", "label").write.parquet(f"{folder}/data/{table}")
    write_records(folder, frame)
    return {}


def for_models(spark, folder, frame, names):
    hidden = [keras.layers.Dense(8, "relu"), keras.layers.Dense(8, "relu")]
    base = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(2, "softmax")])
    (folder / "models").mkdir()
    base.save(folder / "models" / "base.keras")
    image, words = keras.Input((8,), name="image"), keras.Input((8,), name="words")
    both = keras.layers.Concatenate()([image, words])
    outputs = {name: keras.layers.Dense(1, name=name)(both) for name in ("age", "kind")}
    two = keras.Model({"image": image, "words": words}, outputs)
    two.compile("sgd", {"age": "mse", "kind": "mse"})
    kinds = {"MyOptimizer": type("MyOptimizer", (keras.optimizers.SGD,), {}), "MySchedule": MySchedule}
    kinds["MyMetric"] = type("MyMetric", (keras.metrics.MeanSquaredError,), {})
    fitted = elephant.KerasModel(classifier(8))
    return {"model": two, "bent": bent, "my_loss": my_loss, "fitted": fitted, **kinds}


class MySchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of the reader's own."""

    def __call__(self, step):
        return 0.1

    def get_config(self):
        return {}


def bent(x):
    return keras.ops.abs(x)


def my_loss(truth, prediction):
    return keras.ops.mean(keras.ops.square(truth - prediction), axis=-1)


def for_preprocessing(spark, folder, frame, names):
    import tensorflow as tf

    (folder / "cats").mkdir()
    for name in ("tabby", "black"):
        pixels = tf.random.uniform((80, 80, 3), 0, 255, tf.int32)
        (folder / "cats" / f"{name}.jpg").write_bytes(tf.io.encode_jpeg(tf.cast(pixels, tf.uint8)).numpy())
    image = keras.Input((64, 64, 3), name="image")
    flat = keras.layers.Flatten()(image)
    model = keras.Model({"image": image}, keras.layers.Dense(2, "softmax")(flat))
    model.compile("sgd", "sparse_categorical_crossentropy")
    rows = [(3.0, 20.0, "a fine house", b"", "1.jpg"), (5.0, 2.0, "too dear", b"", "2.jpg")]
    houses = spark.createDataFrame(rows, "rooms double, age double, review string, content binary, path string")
    return {"model": model, "path": f"{folder}/cats", "df": houses}


def for_functions(spark, folder, frame, names):
    return {"function": int}


def for_progress(spark, folder, frame, names):
    return {"fitted": elephant.KerasEstimator(names["model"], verbose=0).fit(frame)}


def for_rdds(spark, folder, frame, names):
    from pyspark.mllib.linalg import Matrices, Vectors
    from pyspark.mllib.regression import LabeledPoint

    random = np.random.default_rng(0)
    x, y = random.random((60, 784)).astype("float32"), np.eye(10)[random.integers(0, 10, 60)]
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(10, "softmax")])
    model.compile("sgd", "categorical_crossentropy")
    points = [
        LabeledPoint(int(label.argmax()), Vectors.dense(row.astype(float))) for row, label in zip(x, y, strict=True)
    ]
    context = spark.sparkContext
    (folder / "models").mkdir()
    return {
        **{"x_train": x, "y_train": y, "model": model, "Vectors": Vectors, "Matrices": Matrices},
        **{"points": context.parallelize(points, 2), "row": x[0], "values": x[:2].T.flatten()},
        **{
            "test_rdd": context.parallelize(list(zip(x, y, strict=True)), 2),
            "features_rdd": context.parallelize(list(x), 2),
        },
    }


def for_serving(spark, folder, frame, names):
    return {"pixels": np.ones((1, 8), "float32")}


def for_troubleshooting(spark, folder, frame, names):
    return {"df": spark.createDataFrame([("a", "1.5"), ("b", "2")], "kind string, price string")}


_HERE = {
    "callbacks": for_callbacks,
    "compression": for_compression,
    "dataframes": for_frames,
    "embeddings": for_embeddings,
    "files": for_files,
    "gpus": for_functions,
    "inference": for_inference,
    "models": for_models,
    "preprocessing": for_preprocessing,
    "progress": for_progress,
    "rdds": for_rdds,
    "serving": for_serving,
    "troubleshooting": for_troubleshooting,
    "tuning": lambda *given: {"build_model": lambda units: classifier(8, classes=units)},
}
