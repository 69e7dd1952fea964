"""Trains on rows that are written first, and tells how much memory either took: a process that a test starts.

    python memory_process.py FOLDER ROWS COLUMNS EPOCHS MODE

Prints a line of JSON: bytes of the rows, MB that writing and training took at most above what was there before.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa

from elephant.config import FitConfig
from elephant.data import shuffling
from elephant.data.epoch_plan import EpochPlan
from elephant.data.schema import DENSE, SCALAR, DataSchema, Field
from elephant.data.shard import Shard, ShardWriter
from elephant.rank.input.feed import BatchFeed

BATCH_ROWS = 1000
# It leaves no rows over: JAX would compile another program for them, which takes 5 MB.
BATCH_SIZE = 250


def memory(name):
    """Returns a figure of /proc/self/status in MB."""
    return int(re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def peak_above_start(work):
    """Returns what a function returns, and the MB by which memory grew while it ran, at its highest."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    result = work()
    return result, memory("VmHWM") - before


def record_batches(rows, columns):
    labels = np.arange(BATCH_ROWS, dtype="float32") / BATCH_ROWS
    features = np.random.default_rng(0).normal(size=(BATCH_ROWS, columns)).astype("float32")
    features[:, 0] = labels
    batch = pa.RecordBatch.from_arrays(
        [pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), columns), pa.array(labels)],
        ["features", "label"],
    )
    for _ in range(rows // BATCH_ROWS):
        yield batch


def trained(folder, schema, summary, model, epochs, mode):
    shard = Shard(folder, schema, summary.row_shapes)
    shard.unlink()
    kept = summary.num_rows // 10
    plan = EpochPlan(training_rows=(summary.num_rows - kept,), validation_rows=(kept,), batch_size=BATCH_SIZE)
    feed = BatchFeed(shard, plan, FitConfig(batch_size=BATCH_SIZE, seed=1, validation_fraction=0.1, mode=mode), 0)
    model.fit(feed.training_batches(), epochs=epochs, steps_per_epoch=plan.steps, shuffle=False, verbose=0)
    model.evaluate(feed.validation_batches(), steps=plan.validation_steps(0), verbose=0)
    return shard.num_bytes


def main(folder, rows, columns, epochs, mode):
    schema = DataSchema(
        inputs=(Field("features", ("x",), "float32", DENSE, (columns,)),),
        labels=(Field("label", ("y",), "float32", SCALAR),),
    )
    # Fewer rows count as many than in a user's fit, where the test would need gigabytes.
    shuffling.WHOLE_BYTES = min(shuffling.WHOLE_BYTES, rows * columns * 2)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((columns,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), "mse")

    def write(name, count):
        with ShardWriter(folder / name, schema) as writer:
            for batch in record_batches(count, columns):
                writer.write(batch)
            return writer.finish()

    # What TensorFlow loads and reserves with the first rows is no matter of how many there are.
    trained(folder / "few", schema, write("few", 20 * BATCH_ROWS), model, 1, mode)
    summary, writing = peak_above_start(lambda: write("many", rows))
    num_bytes, training = peak_above_start(lambda: trained(folder / "many", schema, summary, model, epochs, mode))
    left = [path.name for path in folder.iterdir()]
    print(json.dumps({"num_bytes": num_bytes, "writing": writing, "training": training, "left": left}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as place:
        main(Path(place), *(int(text) for text in sys.argv[2:5]), sys.argv[5])
