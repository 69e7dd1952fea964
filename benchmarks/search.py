"""Trials of a search against one fit: seconds of 20 trials, and how often Spark computes the rows.

::

    python benchmarks/search.py                        # 20 trials of 5 epochs of the digits, two at the same time
    python benchmarks/search.py --trials 8 --epochs 2

Two executors of this machine, one worker for each trial. Prints a line of JSON with the seconds of the search over
those of one fit times trials / parallelism, medians, and in ``medians`` the largest number of times that a partition of
the source was computed in a search. No trial is pruned. Fails where that is more than one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from report import Measurement, report

_TARGET = 3.0


def digits(session: Any, marks: Path) -> Any:
    """Returns the digits in four partitions, each of which leaves a mark when it is computed."""
    from sklearn.datasets import load_digits

    found = load_digits()
    rows = [(row.tolist(), int(label)) for row, label in zip(found.data / 16.0, found.target, strict=True)]
    schema = "features array<double>, label int"
    return session.createDataFrame(rows, schema).repartition(4).mapInPandas(_marking(str(marks)), schema)


def _marking(folder: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def rows(frames: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        place = 0 if context is None else context.partitionId()
        with open(os.path.join(folder, f"{place}-{uuid.uuid4()}"), "w"):
            pass
        yield from frames

    return rows


def estimator(options: argparse.Namespace) -> Any:
    """Returns the estimator of all trials."""
    import keras

    from elephant import KerasEstimator

    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return KerasEstimator(
        model=model, numWorkers=1, epochs=options.epochs, batchSize=32, validationFraction=0.2, verbose=0
    )


def main() -> None:
    """Measures fits and searches in turns, in one session."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    import optuna

    import elephant
    from elephant.cluster.local import local_session

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {"learningRate": optuna.distributions.FloatDistribution(1e-4, 0.1, log=True), "batchSize": [32, 64]}
    session = local_session(options.parallelism)
    fits, searches, reads = list[float](), list[float](), list[int]()
    try:
        with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as folder:
            # Processes that fits of this session share begin here.
            estimator(options).fit(digits(session, Path(folder)))
            for turn in range(options.repetitions):
                marks = Path(folder) / str(turn)
                marks.mkdir()
                frame = digits(session, marks)
                began = time.monotonic()
                estimator(options).fit(frame)
                fits.append(time.monotonic() - began)
                for mark in marks.iterdir():
                    mark.unlink()
                sampler = optuna.samplers.RandomSampler(seed=turn)
                study = optuna.create_study(direction="maximize", sampler=sampler, pruner=optuna.pruners.NopPruner())
                began = time.monotonic()
                elephant.search(
                    estimator(options),
                    frame,
                    space,
                    metric="val_accuracy",
                    trials=options.trials,
                    parallelism=options.parallelism,
                    study=study,
                )
                searches.append(time.monotonic() - began)
                reads.append(max(Counter(mark.name.split("-")[0] for mark in marks.iterdir()).values()))
    finally:
        session.stop()
    fair = np.array(fits) * options.trials / options.parallelism
    report(
        Measurement(
            measure="search_over_one_fit",
            case={name: getattr(options, name) for name in ("trials", "epochs", "parallelism")},
            ratio=statistics.median((np.array(searches) / fair).tolist()),
            target=_TARGET,
            at_least=False,
            medians={
                "fit_s": statistics.median(fits),
                "search_s": statistics.median(searches),
                "most_reads": float(max(reads)),
            },
            repetitions=options.repetitions,
        )
    )
    if max(reads) > 1:
        raise SystemExit("Spark has computed the rows more than once in a search")


if __name__ == "__main__":
    main()
