"""Fits in both modes, end to end, against one process: the clock, processor time, accuracy on the same number of rows.

::

    python benchmarks/modes.py                              # 2, 4 and 8 workers
    python benchmarks/modes.py --workers 2 --slow 3         # and once more with a worker that takes 3 times as long
    python benchmarks/modes.py --mnist FOLDER --epochs 5    # the four IDX files of MNIST, plain or .gz

Each fit is the second of its kind in a session, from the call of ``fit`` to its return: it has executors that have
imported Keras, and reads a Parquet table. More workers than cores share them, so that their number shows what a mode
costs and does to accuracy, and not how fast it would be on as many cores. One worker is made slow by a callback that
sleeps behind each of its batches, as long as the batch took times the factor.

The one process has imported Keras, and has its arrays in memory; it takes several steps per call of the runtime, with
all cores. All sides train as many epochs, with the same rows per step over all workers where they take steps together,
and with a worker's rows per step where each goes at its own pace.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from fit import test_accuracy, write_parquet
from report import Measurement, median_ratio, report
from session_processes import cpu_by_part
from training import STEPS_PER_EXECUTION
from workloads import build_small_mlp, make_images, read_mnist

_ROWS, _BATCH_SIZE = 60_000, 64
_MODES: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {"mode": "synchronous"},
    "asynchronous, every step": {"mode": "asynchronous", "frequency": "batch"},
    "asynchronous, every 10 steps": {"mode": "asynchronous", "frequency": 10},
}

Figures = dict[str, float]


def slow_down(factor: float, mark: Path) -> Any:
    """Returns a callback that makes one worker take so many times as long for each of its batches.

    Args:
        mark: A file that is not there; the worker that makes it is the slow one.
    """
    import keras

    class Slow(keras.callbacks.Callback):
        """Sleeps behind each batch of the worker that was the first to begin."""

        def on_train_begin(self, logs: Any = None) -> None:
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                self._sleeps = True
            except FileExistsError:
                self._sleeps = False

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._began = time.monotonic()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self._sleeps:
                time.sleep((factor - 1) * (time.monotonic() - self._began))

    return Slow()


def fit_on_spark(frame: Any, arrays: Any, options: argparse.Namespace, **more: Any) -> Figures:
    """Returns what one fit takes, and its accuracy on the test images."""
    from elephant import KerasEstimator

    estimator = KerasEstimator(
        model=build_small_mlp(), epochs=options.epochs, batchSize=_BATCH_SIZE, verbose=0, seed=options.epochs, **more
    )
    before, began = cpu_by_part(), time.monotonic()
    fitted = estimator.fit(frame)
    seconds, cpu = time.monotonic() - began, cpu_by_part()
    cpu.subtract(before)
    return {"seconds": seconds, "cpu_s": cpu.total(), "accuracy": test_accuracy(fitted.model, arrays)}


def fit_alone(arrays: Any, batch_size: int, epochs: int) -> Figures:
    """Returns the same of ``model.fit`` in this process."""
    model = build_small_mlp()
    model.steps_per_execution = STEPS_PER_EXECUTION
    began, cpu = time.monotonic(), time.process_time()
    model.fit(arrays["x_train"], arrays["y_train"], epochs=epochs, batch_size=batch_size, verbose=0)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    return {"seconds": seconds, "cpu_s": cpu, "accuracy": test_accuracy(model, arrays)}


def measure(workers: int, factor: float | None, arrays: Any, options: argparse.Namespace) -> None:
    """Prints how each mode stands to one process, with so many workers."""
    from elephant.cluster.local import local_session

    together, alone = workers * _BATCH_SIZE, _BATCH_SIZE
    told: dict[str, list[Figures]] = {name: [] for name in _MODES}
    one: dict[int, list[Figures]] = {together: [], alone: []}
    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        folder = Path(name)
        (folder / "table").mkdir()
        write_parquet(arrays, folder / "table", workers)
        session = local_session(workers, executor_memory_mb=512)
        try:
            frame = session.read.parquet(str(folder / "table"))
            for turn in range(-1, options.repetitions):
                for number, (mode, chosen) in enumerate(_MODES.items()):
                    slow = [] if factor is None else [slow_down(factor, folder / f"slow-{turn}-{number}")]
                    figures = fit_on_spark(frame, arrays, options, numWorkers=workers, callbacks=slow, **chosen)
                    if turn >= 0:
                        told[mode].append(figures)
                for batch_size in one if turn >= 0 else ():
                    one[batch_size].append(fit_alone(arrays, batch_size, options.epochs))
        finally:
            session.stop()
    for mode, turns in told.items():
        others = one[together if mode == "synchronous" else alone]
        sides = {"fit": turns, "one_process": others}
        report(
            Measurement(
                measure="mode_against_one_process",
                case={"mode": mode, "workers": workers, "epochs": options.epochs, "slow": factor or 1},
                ratio=median_ratio([turn["seconds"] for turn in turns], [turn["seconds"] for turn in others]),
                target=None,
                at_least=False,
                medians={
                    f"{side}_{what}": statistics.median(turn[what] for turn in of)
                    for side, of in sides.items()
                    for what in of[0]
                },
                repetitions=options.repetitions,
            )
        )


def main(words: Sequence[str] | None = None) -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="folder with the four IDX files; made images without it")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--slow", type=float, help="measure also with a worker that takes so many times as long")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the rows (3)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each fit (3)")
    options = parser.parse_args(words)
    arrays = make_images(_ROWS) if options.mnist is None else read_mnist(options.mnist)
    for workers in options.workers:
        for factor in (None, options.slow) if options.slow else (None,):
            measure(workers, factor, arrays, options)


if __name__ == "__main__":
    main()
