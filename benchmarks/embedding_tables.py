"""A step of a ranking model whose tables are divided over ranks: its seconds and its bytes.

::

    python benchmarks/embedding_tables.py              # 26 tables of 100,000 x 16, two workers, 1,024 rows each
    python benchmarks/embedding_tables.py --tables 4 --rows 10000 --steps 6
    python benchmarks/embedding_tables.py --separate   # an elephant.ShardedEmbedding for each table
    python benchmarks/embedding_tables.py --asynchronous  # parameter servers have the tables

Clicks are generated: ids by Zipf's law, as those of users and items are. Prints two lines of JSON. Seconds: a step of
plain Keras, with dense Adam in one process that has all cores and the rows of all workers, over a step of two workers
with `elephant.ShardedEmbeddings`, the layer for many tables, and lazy Adam; beside it, as ``slices_step_s``, two
workers with the layer of Keras. Bytes: those of ids, rows and gradients that a rank sends to others in a step, over
those of the slices that a rank with Keras' layer sends to each other one: a number of eight bytes and a row for each id
of its batch. Medians of seconds are over epochs.

With ``--asynchronous`` it prints one line: the seconds alone, of workers at their own pace on Spark, two servers beside
the driver; a step of plain Keras, which has the rows of all workers, over one of a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from report import Measurement, report

_TARGETS = {"seconds": 3.0, "bytes": 0.3}
_DENSE = 13


def clicks(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Returns the columns of ids and of numbers together, and the clicks."""
    random = np.random.default_rng(options.seed)
    count = options.workers * options.batch * options.steps
    # Some ids are most of the rows; which, is scattered over the table.
    ids = (random.zipf(1.2, (count, options.tables)) - 1) % options.rows * 7919 % options.rows
    x = np.concatenate([ids, random.normal(size=(count, _DENSE))], axis=1).astype(np.float32)
    return x, random.integers(0, 2, count).astype(np.float32)


def ranking_model(options: argparse.Namespace, kind: str) -> Any:
    """Returns a compiled model: tables of a kind, and layers on their rows and the numbers."""
    import keras

    import elephant

    keras.utils.set_random_seed(0)
    given = keras.Input((options.tables + _DENSE,))
    columns = [given[:, place : place + 1] for place in range(options.tables)]
    if kind == "sharded" and not options.separate:
        rows = elephant.ShardedEmbeddings([feature(options, place) for place in range(options.tables)], seed=0)(columns)
    else:
        rows = []
        for place, column in enumerate(columns):
            if kind == "sharded":
                table = elephant.ShardedEmbedding(options.rows, options.width, optimizer="lazy_adam", seed=place)
            else:
                table = keras.layers.Embedding(options.rows, options.width)
            rows.append(keras.layers.Flatten()(table(column)))
    hidden = keras.layers.Concatenate()([*rows, given[:, options.tables :]])
    for units in (64, 32):
        hidden = keras.layers.Dense(units, "relu")(hidden)
    model = keras.Model(given, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy")
    return model


def feature(options: argparse.Namespace, place: int) -> Any:
    """Returns a feature with a table of its own, in the form of Keras RS."""
    form = {"vocabulary_size": options.rows, "embedding_dim": options.width}
    table = SimpleNamespace(name=f"table_{place}", initializer="uniform", optimizer="adam", combiner="sum", **form)
    shapes = {"input_shape": (None, 1), "output_shape": (None, options.width)}
    return SimpleNamespace(name=f"feature_{place}", table=table, **shapes)


def counting(folder: str) -> Any:
    """Returns a callback that writes down seconds of epochs, and bytes that were sent."""
    import keras

    class Counting(keras.callbacks.EarlyStopping):
        """It stops nothing. What may do so is on all ranks, and not on the driver, for which they would wait."""

        def on_train_begin(self, logs: Any = None) -> None:
            super().on_train_begin(logs)
            self.seconds: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.monotonic()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            self.seconds.append(time.monotonic() - self.began)

        def on_train_end(self, logs: Any = None) -> None:
            super().on_train_end(logs)
            from elephant.modeling.layers.sharded_embedding import sharded_embeddings

            layers = sharded_embeddings(self.model)
            facts = {
                "seconds": self.seconds,
                "tables": layers[0].tables.bytes_sent if layers and hasattr(layers[0].tables, "bytes_sent") else 0,
            }
            (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(facts))

    return Counting("loss", patience=10_000)


def fitted(options: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Trains on two workers of this machine; returns what each has written down."""
    import elephant.testing

    x, y = clicks(options)
    with tempfile.TemporaryDirectory(prefix="embedding-tables-") as folder:
        elephant.testing.fit_local(
            ranking_model(options, kind),
            x,
            y,
            num_workers=options.workers,
            batch_size=options.batch,
            epochs=options.epochs,
            shuffle=False,
            callbacks=[counting(folder)],
        )
        return [json.loads(path.read_text()) for path in Path(folder).iterdir()]


def step_times(folder: str) -> Any:
    """Returns a callback of workers that writes down when each of their steps has ended."""
    import keras

    class StepTimes(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.monotonic())
            (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(self.ends))

    return StepTimes()


def asynchronous_step_s(options: argparse.Namespace) -> float:
    """Returns the median of a step's seconds, of the slowest of the workers of an asynchronous fit on Spark."""
    from elephant import KerasEstimator
    from elephant.cluster.local import local_session

    x, y = clicks(options)
    spark = local_session(options.workers)
    try:
        rows = [(features.tolist(), float(label)) for features, label in zip(x, y, strict=True)]
        frame = spark.createDataFrame(rows, "features array<float>, label float").repartition(options.workers)
        with tempfile.TemporaryDirectory(prefix="embedding-tables-") as folder:
            KerasEstimator(
                ranking_model(options, "sharded"),
                mode="asynchronous",
                parameterServers=2,
                numWorkers=options.workers,
                batchSize=options.batch,
                epochs=options.epochs,
                callbacks=[step_times(folder)],
                verbose=0,
            ).fit(frame)
            ends = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    finally:
        spark.stop()
    return max(statistics.median(np.diff(one[options.steps :]).tolist()) for one in ends)


def plain(options: argparse.Namespace) -> list[float]:
    """Returns seconds of epochs of plain Keras, in this process, with the rows of all workers in each step."""
    model, (x, y), seconds = ranking_model(options, "plain"), clicks(options), []
    model.steps_per_execution = options.steps
    for _ in range(options.epochs):
        began = time.monotonic()
        model.fit(x, y, batch_size=options.workers * options.batch, shuffle=False, verbose=0)
        seconds.append(time.monotonic() - began)
    return seconds


def step_of(seconds: Sequence[float], steps: int) -> float:
    """Returns the median of seconds of a step, without the first epoch, in which it is traced."""
    return statistics.median(seconds[1:]) / steps


def main() -> None:
    """Measures both, in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1024, help="rows of a worker in a step")
    parser.add_argument("--steps", type=int, default=10, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=6, help="the first one does not count (6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--separate", action="store_true", help="a layer for each table, each with a lookup of its own")
    parser.add_argument("--asynchronous", action="store_true", help="tables at parameter servers")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        print(json.dumps(plain(options)))
        return
    # Keras' process is done, and its memory free, when the workers begin.
    command = [sys.executable, __file__, *sys.argv[1:], "--plain"]
    of_keras = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    names = ("workers", "tables", "rows", "width", "batch", "steps", "epochs", "separate", "asynchronous")
    case = {name: getattr(options, name) for name in names}
    plain_s = step_of(of_keras, options.steps)
    medians, sharded = {"keras_step_s": plain_s}, []
    if options.asynchronous:
        step_s = asynchronous_step_s(options)
    else:
        sharded, slices = fitted(options, "sharded"), fitted(options, "slices")
        step_s = max(step_of(rank["seconds"], options.steps) for rank in sharded)
        medians["slices_step_s"] = max(step_of(rank["seconds"], options.steps) for rank in slices)
    steps = options.steps * options.epochs
    report(
        Measurement(
            measure="embedding_tables_seconds",
            case=case,
            ratio=plain_s / step_s,
            target=_TARGETS["seconds"],
            at_least=True,
            medians={**medians, "sharded_step_s": step_s},
            repetitions=options.epochs - 1,
        )
    )
    if options.asynchronous:
        return
    of_tables = max(rank["tables"] for rank in sharded) / steps
    of_slices = (options.workers - 1) * options.batch * options.tables * (8 + 4 * options.width)
    report(
        Measurement(
            measure="embedding_tables_bytes",
            case=case,
            ratio=of_tables / of_slices,
            target=_TARGETS["bytes"],
            at_least=False,
            medians={"tables_bytes": of_tables, "slices_bytes": of_slices},
            repetitions=steps,
        )
    )


if __name__ == "__main__":
    main()
