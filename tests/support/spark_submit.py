"""What tests of jobs give to `spark-submit`, and how they read what it says."""

import json
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

JOBS = Path(__file__).resolve().parents[2] / "spark_jobs"
ROWS = 400
FEATURES = 5
EPOCHS = 4
# Of one process, which needs no executor.
ONE = ("--master", "local[1]")
SUBMIT_TIMEOUT_S = 420.0

# What users have: a model and a callback in a file of their own, which no machine of the cluster knows.
CODE = """
import os
import signal
from pathlib import Path

import keras


class Doubled(keras.layers.Dense):
    def call(self, inputs):
        return super().call(2 * inputs)


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((5,)), Doubled(2, activation="softmax")])
    model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class KilledOnce(keras.callbacks.Callback):
    # As the kernel kills a process when memory is short: in the third epoch, of the first fit alone.
    def __init__(self, marker):
        super().__init__()
        self.marker = Path(marker)

    def on_train_batch_end(self, batch, logs=None):
        pass  # looks at batches, and so runs on the workers

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def killed_once():
    return KilledOnce(os.environ["MARKER_OF_THE_KILLED"])
"""


def write_inputs(folder):
    """Writes two classes that a small model can tell apart, as Parquet, and a model's file and the code above."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, ROWS)
    features = (rng.normal(size=(ROWS, FEATURES)) + labels[:, None] * 2.0 - 1.0).astype("float32")
    offsets = np.arange(0, features.size + 1, FEATURES, dtype=np.int32)
    columns = {
        "id": pa.array(np.arange(ROWS)),
        "features": pa.ListArray.from_arrays(offsets, features.ravel()),
        "label": pa.array(labels.astype("int32")),
    }
    pq.write_table(pa.table(columns), folder / "data.parquet")
    (folder / "net_of_user.py").write_text(CODE)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.save(folder / "model.keras")


def submit(cluster, job, *words, options=(), variables=None):
    """Submits a job, and waits for its end; returns a `subprocess.CompletedProcess`."""
    script = JOBS / f"{job}.py"
    return cluster.submit(script, *words, options=options, variables=variables, timeout_s=SUBMIT_TIMEOUT_S)


def last_line(done):
    """Returns what a job that ended well has printed last, which is JSON."""
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1], parse_constant=pytest.fail)


def complaint(done, job):
    """Returns the one line in which a job says why it failed; ``spark-submit`` puts it into its standard output."""
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    lines = [line for line in said.splitlines() if line.startswith(f"{job}.py: ")]
    assert len(lines) == 1, said
    return lines[0]
