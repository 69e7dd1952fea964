"""How long it takes from the call of ``fit`` to the first training step, against importing and building alone.

::

    python benchmarks/first_step.py                 # two workers on a local cluster of two executors

Spark is warm: a fit has run before, and its Python workers are there. Of two workers the later one's step
counts. The other side is a process of its own that imports Keras and TensorFlow and builds the compiled model; it
has all cores to itself. Both are timed by the clock that all processes share, and take turns. The end of the first
step is told beside its beginning: between the two TensorFlow traces the step.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from report import Measurement, median_ratio, report

_DEADLINE_S = 300
_BATCH_SIZE = 64
_PARTS = ("begins", "ends")

# Seconds until the first step begins, and until it ends.
FirstStep = dict[str, float]


def make_clock(folder: Path) -> Any:
    """Returns a callback that writes down when its process' first step begins and ends."""
    import keras

    class FirstStepClock(keras.callbacks.Callback):
        """Writes a file for each of the two moments."""

        def _write(self, part: str) -> None:
            (folder / f"{part}-{os.getpid()}").write_text(str(time.monotonic()))

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                self._write("begins")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                self._write("ends")

    return FirstStepClock()


def fit_distributed(frame: Any, workers: int, *more: Any, between: Callable[[], None] | None = None) -> FirstStep:
    """Returns what one `KerasEstimator.fit` takes to its first step.

    Args:
        more: Callbacks that it has besides.
        between: What the program does between the estimator and its fit.
    """
    from workloads import build_small_mlp

    from elephant import KerasEstimator

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        folder = Path(name)
        estimator = KerasEstimator(
            model=build_small_mlp(),
            numWorkers=workers,
            batchSize=_BATCH_SIZE,
            callbacks=[make_clock(folder), *more],
            verbose=0,
        )
        if between is not None:
            between()
        began = time.monotonic()
        estimator.fit(frame)
        moments = {part: [float(file.read_text()) for file in folder.glob(f"{part}-*")] for part in _PARTS}
    if any(len(values) != workers for values in moments.values()):
        raise SystemExit(f"fit: expected {workers} first steps. Received: {moments}.")
    return {part: max(values) - began for part, values in moments.items()}


def build_alone() -> FirstStep:
    """Returns the same of a new process with plain Keras: until it could call ``fit``, and to its first step's end."""
    began = time.monotonic()
    command = [sys.executable, __file__, "--alone"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_DEADLINE_S)
    said = json.loads(done.stdout.splitlines()[-1])
    return {part: said[part] - began for part in _PARTS}


def alone() -> None:
    """The new process of `build_alone`."""
    from workloads import build_small_mlp

    model = build_small_mlp()
    built = time.monotonic()
    import numpy as np

    images, labels = np.zeros((_BATCH_SIZE, 784), np.float32), np.zeros(_BATCH_SIZE, np.int32)
    model.fit(images, labels, batch_size=_BATCH_SIZE, verbose=0)
    print(json.dumps({"begins": built, "ends": time.monotonic()}))


def measure(options: argparse.Namespace) -> tuple[list[FirstStep], list[FirstStep]]:
    """Returns what both sides took in each repetition."""
    from fit import write_parquet
    from workloads import make_images

    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as folder:
        write_parquet(make_images(options.rows), Path(folder), options.workers)
        session = local_session(options.workers)
        try:
            frame = session.read.parquet(folder)
            fit_distributed(frame, options.workers)
            build_alone()
            turns = [(fit_distributed(frame, options.workers), build_alone()) for _ in range(options.repetitions)]
        finally:
            session.stop()
    return [ours for ours, _ in turns], [theirs for _, theirs in turns]


def main() -> None:
    """Measures both sides, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="of the table (10000)")
    parser.add_argument("--workers", type=int, default=2, help="executors and workers (2)")
    parser.add_argument("--repetitions", type=int, default=7, help="of both sides (7)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone()
        return
    ours, theirs = measure(options)
    for part, target in zip(_PARTS, (2.0, None), strict=True):
        distributed, one = ([each[part] for each in side] for side in (ours, theirs))
        report(
            Measurement(
                measure=f"first_step_{part}",
                case={"workload": "mlp_118k", "rows": options.rows, "workers": options.workers},
                ratio=median_ratio(distributed, one),
                target=target,
                at_least=False,
                medians={"fit_s": statistics.median(distributed), "alone_s": statistics.median(one)},
                repetitions=options.repetitions,
            )
        )


if __name__ == "__main__":
    main()
