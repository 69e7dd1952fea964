"""What a whole fit costs on this machine, against one process of plain Keras on the same rows.

::

    python benchmarks/fit.py                          # made images
    python benchmarks/fit.py --mnist FOLDER           # the four IDX files of MNIST, plain or .gz

Counted is the processor time of all processes: the driver, its JVM, the executors'
JVMs, their Python workers and the training processes, from the call of ``fit`` to its
return; and of the one process from its start to its end, import of Keras and reading
of the arrays included, its test at the end left out. Prints a line of JSON for the processor
time, one for the time on the clock and one for the accuracy on the test images.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from report import Measurement, median_ratio, report
from session_processes import cpu_by_part
from workloads import PIXELS, build_small_mlp, make_images, read_mnist

_DEADLINE_S = 3600
_ROWS = 60_000

Figures = dict[str, float]


def write_parquet(arrays: dict[str, np.ndarray], folder: Path, files: int) -> None:
    """Writes the training rows as so many Parquet files."""
    for number, rows in enumerate(np.array_split(np.arange(len(arrays["y_train"])), files)):
        images = arrays["x_train"][rows]
        offsets = np.arange(0, images.size + 1, PIXELS, dtype=np.int32)
        features = pa.ListArray.from_arrays(offsets, images.ravel())
        table = pa.table({"features": features, "label": arrays["y_train"][rows]})
        pq.write_table(table, folder / f"part-{number}.parquet")


def fit_distributed(frame: Any, arrays: dict[str, np.ndarray], options: argparse.Namespace) -> Figures:
    """Returns seconds, processor seconds and test accuracy of one `KerasEstimator.fit`."""
    from elephant import KerasEstimator

    estimator = KerasEstimator(
        model=build_small_mlp(),
        numWorkers=options.workers,
        epochs=options.epochs,
        batchSize=options.batch_size,
        verbose=0,
    )
    before, began = cpu_by_part(), time.monotonic()
    fitted = estimator.fit(frame)
    seconds, cpu = time.monotonic() - began, cpu_by_part()
    cpu.subtract(before)
    parts = {f"{part}_cpu_s": value for part, value in cpu.items()}
    return {"seconds": seconds, "cpu_s": cpu.total(), "accuracy": test_accuracy(fitted.model, arrays), **parts}


def fit_alone(arrays_file: Path, options: argparse.Namespace) -> Figures:
    """Returns the same of `keras.Model.fit` in a new process, on batches of all workers' rows."""
    command = [
        *(sys.executable, __file__, "--alone", str(arrays_file)),
        *("--epochs", str(options.epochs), "--batch-size", str(options.batch_size * options.workers)),
    ]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_DEADLINE_S)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    said = json.loads(done.stdout.splitlines()[-1])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": seconds - said["test_seconds"],
        "cpu_s": cpu - said["test_cpu_s"],
        "fit_cpu_s": said["fit_cpu_s"],
        "accuracy": said["accuracy"],
    }


def alone(arrays_file: Path, options: argparse.Namespace) -> None:
    """The new process of `fit_alone`."""
    with np.load(arrays_file) as archive:
        arrays = {name: archive[name] for name in archive.files}
    model = build_small_mlp()
    began = time.process_time()
    model.fit(arrays["x_train"], arrays["y_train"], epochs=options.epochs, batch_size=options.batch_size, verbose=0)
    fitted, tested = time.process_time(), time.monotonic()
    answer = {"fit_cpu_s": fitted - began, "accuracy": test_accuracy(model, arrays)}
    answer |= {"test_cpu_s": time.process_time() - fitted, "test_seconds": time.monotonic() - tested}
    print(json.dumps(answer))


def test_accuracy(model: Any, arrays: dict[str, np.ndarray]) -> float:
    """Returns the share of test images that the model classifies rightly."""
    predicted = model.predict(arrays["x_test"], batch_size=1024, verbose=0).argmax(axis=1)
    return float((predicted == arrays["y_test"]).mean())


def measure(arrays: dict[str, np.ndarray], options: argparse.Namespace) -> list[tuple[Figures, Figures]]:
    """Returns what both sides took in each repetition: the distributed fit, and the one process."""
    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        folder = Path(name)
        (folder / "table").mkdir()
        write_parquet(arrays, folder / "table", options.workers)
        np.savez(folder / "arrays.npz", **arrays)
        session = local_session(options.workers)
        try:
            frame = session.read.parquet(str(folder / "table"))
            return [
                (fit_distributed(frame, arrays, options), fit_alone(folder / "arrays.npz", options))
                for _ in range(options.repetitions)
            ]
        finally:
            session.stop()


def report_all(results: list[tuple[Figures, Figures]], options: argparse.Namespace) -> None:
    """Prints the comparisons."""
    case = {"workers": options.workers, "epochs": options.epochs, "data": "MNIST" if options.mnist else "made"}
    distributed, one = ([result[side] for result in results] for side in (0, 1))
    medians = {f"distributed_{name}": _median(distributed, name) for name in distributed[0]}
    medians |= {f"one_process_{name}": _median(one, name) for name in one[0]}
    medians["distributed_first_cpu_s"] = distributed[0]["cpu_s"]
    medians["distributed_first_seconds"] = distributed[0]["seconds"]

    def ratio_of(name: str) -> float:
        return median_ratio([figures[name] for figures in distributed], [figures[name] for figures in one])

    lost = medians["one_process_accuracy"] - medians["distributed_accuracy"]
    comparisons: list[tuple[str, float, float | None, Callable[[str], bool]]] = [
        ("fit_cpu_seconds", ratio_of("cpu_s"), 1.3, lambda name: "cpu_s" in name),
        ("fit_seconds", ratio_of("seconds"), 0.85, lambda name: name.endswith("seconds")),
        ("fit_accuracy_lost", lost, 0.003, lambda name: name.endswith("accuracy")),
    ]
    for name, ratio, target, belongs in comparisons:
        report(
            Measurement(
                measure=name,
                case=case,
                ratio=ratio,
                target=target,
                at_least=False,
                medians={key: value for key, value in medians.items() if belongs(key)},
                repetitions=len(results),
            )
        )


def _median(figures: list[Figures], name: str) -> float:
    return statistics.median(of.get(name, 0.0) for of in figures)


def main() -> None:
    """Measures both sides, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="folder with the four IDX files; made images without it")
    parser.add_argument("--workers", type=int, default=2, help="executors and workers (2)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the rows (10)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows per worker and step (64)")
    parser.add_argument("--repetitions", type=int, default=5, help="of both sides (5)")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone is not None:
        alone(options.alone, options)
        return
    arrays = make_images(_ROWS) if options.mnist is None else read_mnist(options.mnist)
    report_all(measure(arrays, options), options)


if __name__ == "__main__":
    main()
