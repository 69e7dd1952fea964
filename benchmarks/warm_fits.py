"""What waiting processes are worth: the second fit of a session against its first, a tuning against one process.

::

    python benchmarks/warm_fits.py                       # all of it
    python benchmarks/warm_fits.py --only second first memory
    python benchmarks/warm_fits.py --only small tuning functions

*second*: from the call of ``fit`` to the beginning, and to the end, of the first training step, of the second fit of a
session over the first one, each session new (two executors, a table of 10,000 rows; Spark has run a Python job before);
and the same of a third one, when the JVM has compiled more of what Spark does.
*first*: the same of the first fit, over one with ``spark.elephant.warmWorkers=0``, in sessions that take turns; to the
beginning of its first step, over a plain process' import of Keras and 1.5 times the second fit; and, where 30 s lie
between the estimator and its fit, over the second fit: of looking at the table, as people do, or of nothing at all.
*memory*: what a waiting process has of its own (USS) and resident in all (RSS); and what a rank has of its own at the
end of training, forked over fresh.
*tuning*: a `CrossValidator` of six fits of the digits and the last one on all rows, two workers, over the same fits and
evaluations in one process of plain Keras, from its start to its end; processor time of all processes, and the clock.
*small*: the second fit of the digits in a session, one epoch, two workers, over the second one of a process of plain
Keras with as many rows per step, from the call of ``fit`` to its return; the clock, and all processor time.
*functions*: the first call of `elephant.run` in a session, of a function that returns its rank, on 32 workers (16 slots
of each executor), over a barrier job of 32 tasks as Spark itself runs it; and the second ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import psutil
from report import Measurement, median_ratio, report
from session_processes import cpu_by_part, fork_servers

_DEADLINE_S = 900
_FUNCTION_RANKS = 32
_WORKERS = 2
_EPOCHS = 30
_BATCH_SIZE = 32
_FOLDS = 3
# Between an estimator and its fit: a user reads and prepares.
_BETWEEN_S = 30.0
_BETWEEN = ("looking", "nothing")
_RATES = (0.003, 0.001)


def sessions(repetitions: int, warm: str | int, between: str = "") -> list[dict[str, float]]:
    """Returns what the first and the second fit take to their first step in so many sessions, each in a new process.

    Args:
        between: What fills the 30 s between the first estimator and its fit, if there are any: `_BETWEEN`.
    """
    found = []
    for _ in range(repetitions):
        command = [sys.executable, __file__, "--session", str(warm), "--between", between]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_DEADLINE_S)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def make_scale(folder: Path) -> Any:
    """Returns a callback that writes down the memory that its process has of its own, in MiB."""
    import keras

    class Scale(keras.callbacks.Callback):
        """Writes a file when training ends."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Looks at batches, and so runs on the workers."""

        def on_train_end(self, logs: Any = None) -> None:
            (folder / f"uss-{os.getpid()}").write_text(str(psutil.Process().memory_full_info().uss / 2**20))

    return Scale()


def import_alone() -> float:
    """Returns what a new process takes to import Keras."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import keras"], stderr=subprocess.DEVNULL, check=True, timeout=_DEADLINE_S)
    return time.monotonic() - began


def session(warm: str | int, between: str) -> None:
    """The new process of `sessions`."""
    from first_step import fit_distributed
    from fit import write_parquet
    from workloads import make_images

    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        write_parquet(make_images(10_000), folder / "rows", _WORKERS)
        spark = local_session(_WORKERS, conf={"spark.elephant.warmWorkers": str(warm)})
        try:
            frame = spark.read.parquet(str(folder / "rows"))
            spark.range(0, _WORKERS, 1, _WORKERS).mapInArrow(lambda batches: batches, "id long").collect()
            first = fit_distributed(
                frame, _WORKERS, between=functools.partial(_spend, frame, between) if between else None
            )
            second = fit_distributed(frame, _WORKERS, make_scale(folder))
            third = fit_distributed(frame, _WORKERS)
            of_ranks = [float(file.read_text()) for file in folder.glob("uss-*")]
            below = {process.pid for process in psutil.Process().children(recursive=True)}
            servers = fork_servers(below)
            memory = [server.memory_full_info() for server in servers]
        finally:
            spark.stop()
    mega = 2**20
    print(
        json.dumps(
            {
                **{f"first_{part}_s": seconds for part, seconds in first.items()},
                **{f"second_{part}_s": seconds for part, seconds in second.items()},
                **{f"third_{part}_s": seconds for part, seconds in third.items()},
                "rank_uss_mb": max(of_ranks),
                "waiting": len(servers),
                "rss_mb": max((one.rss for one in memory), default=0) / mega,
                "uss_mb": max((one.uss for one in memory), default=0) / mega,
            }
        )
    )


def _spend(frame: Any, on: str) -> None:
    """Lets 30 s pass, in which the program looks at its table, or does nothing."""
    until = time.monotonic() + _BETWEEN_S
    if on == "looking":
        frame.groupBy("label").count().orderBy("label").collect()
        frame.describe("label").collect()
        frame.limit(5).toPandas()
    time.sleep(max(until - time.monotonic(), 0.0))


def functions(side: str) -> None:
    """The new process of `compare_functions`: two jobs of a session, each of which brings back the ranks."""
    import elephant
    from elephant.cluster.local import local_session

    spark = local_session(_WORKERS, conf={"spark.master": f"local-cluster[2,{_FUNCTION_RANKS // 2},1024]"})
    try:
        # Spark's SQL has begun, as in a program that has read something.
        spark.range(10).count()
        seconds = []
        for _ in range(2):
            began = time.monotonic()
            if side == "run":
                ranks = elephant.run(_own_rank, num_workers=_FUNCTION_RANKS, spark=spark, verbose=0)
            else:
                tasks = spark.sparkContext.parallelize(range(_FUNCTION_RANKS), _FUNCTION_RANKS).barrier()
                ranks = tasks.mapPartitions(_own_task).collect()
            seconds.append(time.monotonic() - began)
            if sorted(ranks) != list(range(_FUNCTION_RANKS)):
                raise ValueError(f"expected all {_FUNCTION_RANKS} ranks. Received: {ranks}")
    finally:
        spark.stop()
    print(json.dumps(seconds))


def _own_rank() -> int:
    import elephant

    return elephant.collective.rank()


def _own_task(_: Any) -> Any:
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    context.barrier()
    yield context.partitionId()


def compare_functions(repetitions: int) -> None:
    """Prints `elephant.run` against a barrier job, each in sessions of its own, which take turns."""
    found: dict[str, list[list[float]]] = {"barrier": [], "run": []}
    for _ in range(repetitions):
        for side, calls in found.items():
            command = [sys.executable, __file__, "--functions", side]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_DEADLINE_S)
            calls.append(json.loads(done.stdout.splitlines()[-1]))
    targets = {"first_run_over_barrier_job": 1.3, "second_run_over_barrier_job": None}
    for place, (measure, target) in enumerate(targets.items()):
        ours, theirs = ([call[place] for call in found[side]] for side in ("run", "barrier"))
        medians = {"run_s": statistics.median(ours), "barrier_s": statistics.median(theirs)}
        _report(measure, median_ratio(ours, theirs), target, medians, repetitions, workers=_FUNCTION_RANKS)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the 1,797 images of scikit-learn's digits, (rows, 64) in [0, 1], and their labels."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return (loaded.data / 16.0).astype(np.float32), loaded.target.astype(np.int64)


def digits_model() -> Any:
    """Returns the compiled model of `examples/digits.py`."""
    import keras

    keras.utils.set_random_seed(7)
    layers = [keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(_RATES[0]), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def small(side: str) -> None:
    """The new process of `compare_small`: seconds and processor seconds of the second of two fits of one epoch."""
    images, labels = digits()
    if side == "alone":
        # Compiled anew, as by a program that makes its model for each fit.
        for _ in range(2):
            model = digits_model()
            cpu_before, began = time.process_time(), time.monotonic()
            model.fit(images, labels, epochs=1, batch_size=_WORKERS * _BATCH_SIZE, verbose=0)
            seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_before
        print(json.dumps({"seconds": seconds, "cpu_s": cpu_s}))
        return
    from elephant import KerasEstimator
    from elephant.cluster.local import local_session

    spark = local_session(_WORKERS)
    try:
        frame = _digits_frame(spark)
        for _ in range(2):
            options = {"numWorkers": _WORKERS, "epochs": 1, "batchSize": _BATCH_SIZE, "verbose": 0}
            estimator = KerasEstimator(model=digits_model(), **options)
            before, began = cpu_by_part(), time.monotonic()
            estimator.fit(frame)
            seconds, cpu = time.monotonic() - began, cpu_by_part()
            cpu.subtract(before)
        parts = {f"{part}_cpu_s": value for part, value in cpu.items()}
    finally:
        spark.stop()
    print(json.dumps({"seconds": seconds, "cpu_s": cpu.total(), **parts}))


def compare_small(repetitions: int) -> None:
    """Prints the second small fit of a session against that of a process, which take turns."""
    found: dict[str, list[dict[str, float]]] = {"alone": [], "session": []}
    for _ in range(repetitions):
        for side, fits in found.items():
            command = [sys.executable, __file__, "--small", side]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_DEADLINE_S)
            fits.append(json.loads(done.stdout.splitlines()[-1]))
    _report_clocks("small_fit", {"seconds": 2.0, "cpu_s": 3.5}, found["session"], found["alone"])


def _digits_frame(spark: Any) -> Any:
    images, labels = digits()
    rows = [(image.tolist(), int(label)) for image, label in zip(images, labels, strict=True)]
    frame = spark.createDataFrame(rows, "features array<float>, label int").cache()
    frame.count()
    return frame


def tune_distributed(frame: Any) -> dict[str, float]:
    """Returns seconds and processor seconds of one cross-validation over executors."""
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    from elephant import KerasEstimator

    estimator = KerasEstimator(
        model=digits_model(), numWorkers=_WORKERS, epochs=_EPOCHS, batchSize=_BATCH_SIZE, verbose=0
    )
    grid = ParamGridBuilder().addGrid(estimator.learningRate, list(_RATES)).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    tuning = CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=_FOLDS, seed=1)
    before, began = cpu_by_part(), time.monotonic()
    tuned = tuning.fit(frame)
    seconds, cpu = time.monotonic() - began, cpu_by_part()
    cpu.subtract(before)
    parts = {f"{part}_cpu_s": value for part, value in cpu.items()}
    return {"seconds": seconds, "cpu_s": cpu.total(), "accuracy": max(tuned.avgMetrics), **parts}


def tune_alone() -> dict[str, float]:
    """Returns the same of one process of plain Keras."""
    import resource

    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, __file__, "--alone"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_DEADLINE_S)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu, "accuracy": json.loads(done.stdout.splitlines()[-1])["accuracy"]}


def alone() -> None:
    """The new process of `tune_alone`: the fits of a cross-validation, and the last one on all rows."""
    images, labels = digits()
    fold_of = np.random.default_rng(1).integers(0, _FOLDS, len(labels))

    def fitted(rate: float, rows: np.ndarray) -> Any:
        model = digits_model()
        model.optimizer.learning_rate = rate
        model.fit(images[rows], labels[rows], epochs=_EPOCHS, batch_size=_WORKERS * _BATCH_SIZE, verbose=0)
        return model

    means = []
    for rate in _RATES:
        scores = []
        for fold in range(_FOLDS):
            model = fitted(rate, fold_of != fold)
            predicted = model.predict(images[fold_of == fold], batch_size=1024, verbose=0).argmax(axis=1)
            scores.append(float((predicted == labels[fold_of == fold]).mean()))
        means.append(statistics.mean(scores))
    fitted(_RATES[int(np.argmax(means))], np.ones(len(labels), bool))
    print(json.dumps({"accuracy": max(means)}))


def report_second(found: list[dict[str, float]]) -> None:
    """Prints the second fit, and the third, against the first one."""
    for fit in ("second", "third"):
        for part in ("begins", "ends"):
            names = (f"first_{part}_s", f"{fit}_{part}_s")
            ratio = statistics.median(one[names[1]] / one[names[0]] for one in found)
            medians = {name: statistics.median(one[name] for one in found) for name in names}
            _report(f"{fit}_fit_over_first_step_{part}", ratio, 0.2, medians, len(found))


def report_memory(warm: list[dict[str, float]], cold: list[dict[str, float]]) -> None:
    """Prints the memory of forked ranks against fresh ones, and that of a waiting process."""
    ours, theirs = ([one["rank_uss_mb"] for one in side] for side in (warm, cold))
    medians = {name: statistics.median(one[name] for one in warm) for name in ("rss_mb", "uss_mb", "waiting")}
    medians |= {"forked_rank_uss_mb": statistics.median(ours), "fresh_rank_uss_mb": statistics.median(theirs)}
    _report("forked_rank_memory_over_fresh", median_ratio(ours, theirs), None, medians, len(warm))


def report_first(
    warm: list[dict[str, float]],
    cold: list[dict[str, float]],
    later: Mapping[str, list[dict[str, float]]],
    imports: list[float],
) -> None:
    """Prints the first fit against one without waiting processes, and against the import of Keras and the second fit.

    Args:
        later: Sessions whose first fit comes some seconds after its estimator, by what these are spent on.
        imports: Seconds of the import, a number of each session.
    """
    ours, theirs = ([one["first_ends_s"] for one in side] for side in (warm, cold))
    medians = {"warm_s": statistics.median(ours), "cold_s": statistics.median(theirs)}
    _report("first_fit_over_fresh", median_ratio(ours, theirs), 1.0, medians, len(warm))
    allowed = [seconds + 1.5 * one["second_begins_s"] for one, seconds in zip(warm, imports, strict=True)]
    for measure, side, seconds, target in (
        ("first_fit_over_import_and_second", warm, allowed, 1.0),
        *(
            (f"first_fit_after_30_s_of_{between}_over_second", side, [one["second_begins_s"] for one in side], 2.0)
            for between, side in later.items()
        ),
    ):
        first = [one["first_begins_s"] for one in side]
        medians = {"first_s": statistics.median(first), "import_s": statistics.median(imports)}
        medians["second_s"] = statistics.median(one["second_begins_s"] for one in side)
        _report(measure, median_ratio(first, seconds), target, medians, len(side))


def tuning(repetitions: int) -> None:
    """Prints the tuning against one process."""
    from elephant.cluster.local import local_session

    ours, theirs = [], []
    for _ in range(repetitions):
        # A session of its own each time: its first fit is part of it.
        spark = local_session(_WORKERS)
        try:
            ours.append(tune_distributed(_digits_frame(spark)))
        finally:
            spark.stop()
        theirs.append(tune_alone())
    _report_clocks("tuning", {"cpu_s": 1.5, "seconds": 1.2}, ours, theirs)


def _report_clocks(
    kind: str, targets: dict[str, float], ours: list[dict[str, float]], theirs: list[dict[str, float]]
) -> None:
    for name, target in targets.items():
        medians = {key: statistics.median(one.get(key, 0.0) for one in ours) for key in ours[0]}
        medians |= {f"alone_{key}": statistics.median(one[key] for one in theirs) for key in theirs[0]}
        ratio = median_ratio([one[name] for one in ours], [one[name] for one in theirs])
        _report(f"{kind}_{name}_over_one_process", ratio, target, medians, len(ours))


def _report(
    measure: str,
    ratio: float,
    target: float | None,
    medians: dict[str, float],
    repetitions: int,
    workers: int = _WORKERS,
) -> None:
    report(
        Measurement(
            measure=measure,
            case={"workers": workers},
            ratio=ratio,
            target=target,
            at_least=False,
            medians=medians,
            repetitions=repetitions,
        )
    )


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("second", "first", "memory", "small", "tuning", "functions")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="what to measure (all)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each (5)")
    parser.add_argument("--session", help=argparse.SUPPRESS)
    parser.add_argument("--functions", choices=("run", "barrier"), help=argparse.SUPPRESS)
    parser.add_argument("--small", choices=("session", "alone"), help=argparse.SUPPRESS)
    parser.add_argument("--between", choices=("", *_BETWEEN), default="", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone()
        return
    if options.small:
        small(options.small)
        return
    if options.functions:
        functions(options.functions)
        return
    if options.session:
        session(options.session, options.between)
        return
    if set(options.only) & {"second", "first", "memory"}:
        warm, cold, imports = [], [], []
        later: dict[str, list[dict[str, float]]] = {between: [] for between in _BETWEEN}
        for _ in range(options.repetitions):
            warm += sessions(1, "auto")
            if {"first", "memory"} & set(options.only):
                cold += sessions(1, 0)
            if "first" in options.only:
                imports.append(import_alone())
                for between, found in later.items():
                    found += sessions(1, "auto", between)
        if "second" in options.only:
            report_second(warm)
        if "first" in options.only:
            report_first(warm, cold, later, imports)
        if "memory" in options.only:
            report_memory(warm, cold)
    if "small" in options.only:
        compare_small(options.repetitions)
    if "tuning" in options.only:
        tuning(options.repetitions)
    if "functions" in options.only:
        compare_functions(options.repetitions)


if __name__ == "__main__":
    main()
