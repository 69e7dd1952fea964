"""The job that `spark-submit` runs, submitted with the real one to executors in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from elephant.cluster.java import ensure_java

pytestmark = pytest.mark.spark

REPOSITORY = Path(__file__).resolve().parent.parent.parent
JOB = REPOSITORY / "spark_jobs" / "train.py"
CHANCE = 0.5
SUBMIT_TIMEOUT_S = 150

CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "1024m",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
}

PREDICT = """
import json, sys
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from elephant import KerasModel

if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    fitted = KerasModel.load(sys.argv[1])
    predictions = fitted.transform(session.read.parquet(sys.argv[2]))
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predictions)
    print(json.dumps({"accuracy": accuracy, "history": fitted.history}))
    session.stop()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of `spark-submit`: a SPARK_HOME of its own, because `local-cluster` writes to its work folder."""
    home = tmp_path_factory.mktemp("spark-home")
    installed = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    for entry in installed.iterdir():
        if entry.name not in ("conf", "work"):
            (home / entry.name).symlink_to(entry)
    (home / "conf").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_HOME", os.environ.get("JAVA_HOME", ""))
        java = ensure_java(maximum=17 if pyspark.__version__.startswith("3.5") else None)
    return {
        **os.environ,
        "JAVA_HOME": str(java.path),
        "SPARK_HOME": str(home),
        "SPARK_CONF_DIR": str(home / "conf"),
        "SPARK_LOCAL_DIRS": str(home / "local"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two classes that a small model can tell apart, as one Parquet file, and that model."""
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    features = rng.normal(size=(400, 5)).astype("float32") + labels[:, None] * 2.0 - 1.0
    offsets = np.arange(0, features.size + 1, 5, dtype=np.int32)
    columns = {
        "features": pa.ListArray.from_arrays(offsets, features.ravel().astype("float32")),
        "label": pa.array(labels.astype("int32")),
    }
    pq.write_table(pa.table(columns), folder / "data.parquet")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.save(folder / "model.keras")
    return folder


def submit(environment, script, *arguments, master="local-cluster[2,1,1024]"):
    """Runs one script with `spark-submit` and returns the completed process."""
    confs = [part for name, value in CONF.items() for part in ("--conf", f"{name}={value}")]
    command = [f"{environment['SPARK_HOME']}/bin/spark-submit", "--master", master, *confs, str(script)]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env=environment,
        cwd=environment["SPARK_HOME"],
        capture_output=True,
        text=True,
        timeout=SUBMIT_TIMEOUT_S,
    )


def complaints(done):
    """Returns the job's own lines about its failure; `spark-submit` puts them into its standard output."""
    assert "Traceback" not in done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("train.py: ")]


@pytest.fixture(scope="module")
def trained(environment, inputs):
    """A job that was submitted and has ended, and where it was told to write its model."""
    output = inputs / "fitted"
    options = ["--num-workers", 2, "--epochs", 4, "--batch-size", 16, "--validation-fraction", 0.1, "--seed", 3]
    done = submit(
        environment, JOB, "--data", inputs / "data.parquet", "--model", inputs / "model.keras", "--output", output,
        *options,
    )  # fmt: skip
    return done, output


@pytest.mark.timeout(170)
def test_job_when_submitted_then_exits_with_0_and_prints_the_history(trained):
    done, _ = trained
    assert done.returncode == 0, done.stderr
    history = json.loads(done.stdout.splitlines()[-1])
    lengths = {name: len(values) for name, values in history.items()}
    assert lengths == dict.fromkeys(["loss", "accuracy", "val_loss", "val_accuracy"], 4)


@pytest.mark.timeout(170)
def test_model_when_loaded_after_the_job_then_predicts_above_chance(environment, inputs, trained, tmp_path):
    done, output = trained
    script = tmp_path / "predict.py"
    script.write_text(PREDICT)
    loaded = submit(environment, script, output, inputs / "data.parquet", master="local[1]")
    assert loaded.returncode == 0, loaded.stderr
    said = json.loads(loaded.stdout.splitlines()[-1])
    assert said["history"] == json.loads(done.stdout.splitlines()[-1])
    assert said["accuracy"] > CHANCE + 0.3


@pytest.mark.timeout(170)
def test_job_when_a_column_is_missing_then_exits_with_1_and_one_line(environment, inputs, tmp_path):
    output = tmp_path / "fitted"
    done = submit(
        environment, JOB, "--data", inputs / "data.parquet", "--model", inputs / "model.keras", "--output", output,
        "--features-col", "pixels", master="local[1]",
    )  # fmt: skip
    assert done.returncode == 1
    expected = ["train.py: featuresCol: expected one of the columns features, label. Received: 'pixels'."]
    assert complaints(done) == expected
    assert not output.exists()


@pytest.mark.timeout(170)
def test_job_when_a_model_is_there_already_then_exits_with_1_before_training(environment, inputs, tmp_path):
    output = tmp_path / "fitted"
    (output / "metadata").mkdir(parents=True)
    (output / "metadata" / "part-00000").write_text("{}\n")
    done = submit(
        environment, JOB, "--data", inputs / "data.parquet", "--model", inputs / "model.keras", "--output", output,
        master="local[1]",
    )  # fmt: skip
    assert done.returncode == 1
    (complaint,) = complaints(done)
    assert complaint.startswith(f"train.py: --output: expected a path without a saved model. Received: {output}.")
