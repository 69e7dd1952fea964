"""What a whole fit costs on this machine, against one process of plain Keras on the same rows.

::

    python benchmarks/fit.py                          # made images
    python benchmarks/fit.py --mnist FOLDER           # the four IDX files of MNIST, plain or .gz

The one process is tuned: it takes several steps per call of the runtime, on arrays in memory, with all cores and
batches of all workers' rows. What each side pays, as seconds on the clock and as processor seconds of all processes
(driver, JVMs, Python workers, training processes):

*fit*: a fit in a session that has fitted before, from the call of ``fit`` to its return, reading the Parquet table
with it; against the call of ``model.fit`` alone, in a process that has imported Keras and has the arrays.
*first fit*: the first fit of a running session, whose executors import Keras meanwhile, and whose driver has it;
against a process from its start to the end of ``model.fit``, with its own import and the reading of its arrays.
*script*: a program from its start to its end, which imports Keras, starts Spark, fits and stops Spark; against the
same process. Its processor time is counted until Spark stops.

Reported beside them: what a fit takes beyond its steps, and the accuracy on the test images.
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
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from report import Measurement, median_ratio, report
from session_processes import cpu_by_part
from training import STEPS_PER_EXECUTION
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
    estimator = _estimator(options)
    before, began = cpu_by_part(), time.monotonic()
    fitted = estimator.fit(frame)
    seconds, cpu = time.monotonic() - began, cpu_by_part()
    cpu.subtract(before)
    parts = {f"{part}_cpu_s": value for part, value in cpu.items()}
    steps = max(sum(epoch["seconds"] for epoch in fitted.summary.ranks if epoch["rank"] == 0), 0.0)
    accuracy = test_accuracy(fitted.model, arrays)
    return {"seconds": seconds, "beyond_steps_s": seconds - steps, "cpu_s": cpu.total(), "accuracy": accuracy, **parts}


def _estimator(options: argparse.Namespace) -> Any:
    from elephant import KerasEstimator

    return KerasEstimator(
        model=build_small_mlp(),
        numWorkers=options.workers,
        epochs=options.epochs,
        batchSize=options.batch_size,
        verbose=0,
    )


def run_script(kind: str, path: Path, options: argparse.Namespace) -> Figures:
    """Returns what a new program of this file takes from its start to its end, and what it says itself."""
    command = [
        *(sys.executable, __file__, kind, str(path), "--workers", str(options.workers)),
        *("--epochs", str(options.epochs), "--batch-size", str(options.batch_size)),
    ]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_DEADLINE_S)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    said: Figures = json.loads(done.stdout.splitlines()[-1])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": seconds - said.pop("test_seconds", 0.0),
        # Of a session, not all processes are this one's.
        "cpu_s": said.pop("cpu_s", cpu) - said.pop("test_cpu_s", 0.0),
        **said,
    }


def alone(arrays_file: Path, options: argparse.Namespace) -> None:
    """A program of plain Keras; it takes batches of all workers' rows."""
    with np.load(arrays_file) as archive:
        arrays = {name: archive[name] for name in archive.files}
    model = build_small_mlp()
    model.steps_per_execution = STEPS_PER_EXECUTION
    began, cpu = time.monotonic(), time.process_time()
    batch_size = options.batch_size * options.workers
    model.fit(arrays["x_train"], arrays["y_train"], epochs=options.epochs, batch_size=batch_size, verbose=0)
    fitted, fitted_cpu = time.monotonic(), time.process_time()
    answer = {"fit_seconds": fitted - began, "fit_cpu_s": fitted_cpu - cpu, "accuracy": test_accuracy(model, arrays)}
    answer |= {"test_cpu_s": time.process_time() - fitted_cpu, "test_seconds": time.monotonic() - fitted}
    print(json.dumps(answer))


def script(table: Path, options: argparse.Namespace) -> None:
    """A program that starts Spark, fits, and stops Spark."""
    from elephant.cluster.local import local_session

    session = local_session(options.workers)
    try:
        _estimator(options).fit(session.read.parquet(str(table)))
        cpu = cpu_by_part().total()
    finally:
        session.stop()
    print(json.dumps({"cpu_s": cpu}))


def test_accuracy(model: Any, arrays: dict[str, np.ndarray]) -> float:
    """Returns the share of test images that the model classifies rightly."""
    predicted = model.predict(arrays["x_test"], batch_size=1024, verbose=0).argmax(axis=1)
    return float((predicted == arrays["y_test"]).mean())


Turn = dict[str, Figures]


def measure(arrays: dict[str, np.ndarray], options: argparse.Namespace) -> list[Turn]:
    """Returns what all sides took in each repetition: a session's first and second fit, a script, the one process."""
    from elephant.cluster.local import local_session

    turns = []
    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        folder = Path(name)
        table, archive = folder / "table", folder / "arrays.npz"
        table.mkdir()
        write_parquet(arrays, table, options.workers)
        np.savez(archive, **arrays)
        for _ in range(options.repetitions):
            session = local_session(options.workers)
            try:
                frame = session.read.parquet(str(table))
                fits = {name: fit_distributed(frame, arrays, options) for name in ("first_fit", "fit")}
            finally:
                session.stop()
            others = {
                "script": run_script("--script", table, options),
                "process": run_script("--alone", archive, options),
            }
            turns.append({**fits, **others})
    return turns


def report_all(turns: list[Turn], options: argparse.Namespace) -> None:
    """Prints the comparisons."""
    case = {"workers": options.workers, "epochs": options.epochs, "data": "MNIST" if options.mnist else "made"}

    def medians_of(side: str) -> Figures:
        figures = [turn[side] for turn in turns]
        return {f"{side}_{name}": _median(figures, name) for name in figures[0]}

    def ratio_of(ours: str, name: str, theirs: str) -> float:
        return median_ratio([turn[ours][name] for turn in turns], [turn["process"][theirs] for turn in turns])

    comparisons: list[tuple[str, str, float, float | None]] = []
    for side, alone_s, alone_cpu_s, most in (
        ("fit", "fit_seconds", "fit_cpu_s", 0.75),
        ("first_fit", "seconds", "cpu_s", None),
        ("script", "seconds", "cpu_s", None),
    ):
        comparisons.append((f"{side}_seconds", side, ratio_of(side, "seconds", alone_s), most))
        comparisons.append((f"{side}_cpu_seconds", side, ratio_of(side, "cpu_s", alone_cpu_s), None))
    beyond = _median([turn["fit"] for turn in turns], "beyond_steps_s")
    lost = statistics.median(turn["process"]["accuracy"] - turn["fit"]["accuracy"] for turn in turns)
    comparisons += [("fit_seconds_beyond_steps", "fit", beyond, 2.0), ("fit_accuracy_lost", "fit", lost, 0.003)]
    for name, side, ratio, target in comparisons:
        report(
            Measurement(
                measure=name,
                case=case,
                ratio=ratio,
                target=target,
                at_least=False,
                medians={**medians_of(side), **medians_of("process")},
                repetitions=len(turns),
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
    parser.add_argument("--script", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone is not None:
        alone(options.alone, options)
        return
    if options.script is not None:
        script(options.script, options)
        return
    arrays = make_images(_ROWS) if options.mnist is None else read_mnist(options.mnist)
    report_all(measure(arrays, options), options)


if __name__ == "__main__":
    main()
