"""What a whole fit costs on this machine, against one process of plain Keras on the same rows.

::

    python benchmarks/fit.py                          # images made of noise and ten patterns
    python benchmarks/fit.py --mnist FOLDER           # the four IDX files of MNIST, plain or .gz

Counted is the processor time of all processes: the driver, its JVM, the executors'
JVMs, their Python workers and the training processes, from the call of ``fit`` to its
return; and of the one process from its start to its end, import of Keras included.
Prints one line of JSON per repetition and one with the medians.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

CLASSES = 10
PIXELS = 784
IDX_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


def build_model():
    """Returns the model of both sides: 784-128-128-10, 118,282 parameters, always with the same initial weights."""
    import keras

    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((PIXELS,)),
            layers.Dense(128, "relu"),
            layers.Dense(128, "relu"),
            layers.Dense(CLASSES, "softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.001), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def read_mnist(folder: Path) -> dict[str, np.ndarray]:
    """Returns MNIST from its IDX files: float32 images of 784 values in [0, 1], int32 labels."""
    arrays = {}
    for name, file_name in IDX_FILES.items():
        plain, packed = folder / file_name, folder / f"{file_name}.gz"
        content = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
        values = np.frombuffer(content, np.uint8, offset=16 if name.startswith("x") else 8)
        if name.startswith("x"):
            arrays[name] = values.reshape(-1, PIXELS).astype(np.float32) / 255.0
        else:
            arrays[name] = values.astype(np.int32)
    return arrays


def make_images(rows: int) -> dict[str, np.ndarray]:
    """Returns images of ten patterns under noise, in the form of `read_mnist`; a fifth more of them to test on."""
    rng = np.random.default_rng(1)
    patterns = rng.uniform(0, 1, (CLASSES, PIXELS)).astype(np.float32)
    arrays = {}
    for part, count in (("train", rows), ("test", rows // 5)):
        labels = rng.integers(0, CLASSES, count).astype(np.int32)
        noise = rng.normal(0, 2.0, (count, PIXELS)).astype(np.float32)
        arrays[f"x_{part}"], arrays[f"y_{part}"] = patterns[labels] + noise, labels
    return arrays


def write_parquet(arrays: dict[str, np.ndarray], folder: Path, files: int) -> None:
    """Writes the training rows as so many Parquet files."""
    for number, rows in enumerate(np.array_split(np.arange(len(arrays["y_train"])), files)):
        images = arrays["x_train"][rows]
        offsets = np.arange(0, images.size + 1, PIXELS, dtype=np.int32)
        features = pa.ListArray.from_arrays(offsets, images.ravel())
        table = pa.table({"features": features, "label": arrays["y_train"][rows]})
        pq.write_table(table, folder / f"part-{number}.parquet")


def cpu_seconds() -> float:
    """Returns the processor time of this process and of all that descend from it, those that have ended included."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            # It has ended since it was listed; its parent, read before, counts it from the next reading on.
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def fit_distributed(frame, arrays: dict[str, np.ndarray], options: argparse.Namespace) -> dict[str, float]:
    """Returns seconds, processor seconds and test accuracy of one `KerasEstimator.fit`."""
    from elephant import KerasEstimator

    estimator = KerasEstimator(
        model=build_model(),
        numWorkers=options.workers,
        epochs=options.epochs,
        batchSize=options.batch_size,
        verbose=0,
    )
    cpu_before, began = cpu_seconds(), time.monotonic()
    fitted = estimator.fit(frame)
    took, cpu = time.monotonic() - began, cpu_seconds() - cpu_before
    return {"seconds": took, "cpu_seconds": cpu, "accuracy": test_accuracy(fitted.model, arrays)}


def fit_alone(arrays_file: Path, options: argparse.Namespace) -> dict[str, float]:
    """Returns the same of `keras.Model.fit` in a new process, on batches of all workers' rows."""
    command = [
        *(sys.executable, __file__, "--alone", str(arrays_file)),
        *("--epochs", str(options.epochs), "--batch-size", str(options.batch_size * options.workers)),
    ]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    said = json.loads(done.stdout.splitlines()[-1])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - said["test_cpu_seconds"]
    return {
        "seconds": took - said["test_seconds"],
        "cpu_seconds": cpu,
        "fit_cpu_seconds": said["fit_cpu_seconds"],
        "accuracy": said["accuracy"],
    }


def alone(arrays_file: Path, options: argparse.Namespace) -> None:
    """The new process of `fit_alone`."""
    with np.load(arrays_file) as archive:
        arrays = {name: archive[name] for name in archive.files}
    model = build_model()
    began = time.process_time()
    model.fit(arrays["x_train"], arrays["y_train"], epochs=options.epochs, batch_size=options.batch_size, verbose=0)
    fitted, tested = time.process_time(), time.monotonic()
    answer = {"fit_cpu_seconds": fitted - began, "accuracy": test_accuracy(model, arrays)}
    answer |= {"test_cpu_seconds": time.process_time() - fitted, "test_seconds": time.monotonic() - tested}
    print(json.dumps(answer))


def test_accuracy(model, arrays: dict[str, np.ndarray]) -> float:
    """Returns the share of test images that the model classifies rightly."""
    predicted = model.predict(arrays["x_test"], batch_size=1024, verbose=0).argmax(axis=1)
    return float((predicted == arrays["y_test"]).mean())


def report(elephant: dict[str, float], one_process: dict[str, float], **about: object) -> None:
    """Prints one line: both sides and the ratios between them."""
    ratios = {name: elephant[name] / one_process[name] for name in ("cpu_seconds", "seconds")}
    sides = {"elephant": elephant, "one_process": one_process, "ratio": ratios}
    rounded = {side: {name: round(value, 4) for name, value in values.items()} for side, values in sides.items()}
    print(json.dumps({**about, **rounded}), flush=True)


def main() -> None:
    """Measures both sides, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="folder with the four IDX files; made images without it")
    parser.add_argument("--rows", type=int, default=20_000, help="made images to train on (20000)")
    parser.add_argument("--workers", type=int, default=2, help="executors and workers (2)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the rows (3)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows per worker and step (64)")
    parser.add_argument("--repetitions", type=int, default=3, help="of both sides (3)")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone is not None:
        alone(options.alone, options)
        return

    from elephant.cluster.local import local_session

    arrays = make_images(options.rows) if options.mnist is None else read_mnist(options.mnist)
    results: list[tuple[dict[str, float], dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        folder = Path(name)
        (folder / "table").mkdir()
        write_parquet(arrays, folder / "table", options.workers)
        np.savez(folder / "arrays.npz", **arrays)
        session = local_session(options.workers)
        try:
            frame = session.read.parquet(str(folder / "table"))
            for repetition in range(options.repetitions):
                one_process = fit_alone(folder / "arrays.npz", options)
                results.append((fit_distributed(frame, arrays, options), one_process))
                report(*results[-1], repetition=repetition, rows=len(arrays["y_train"]))
        finally:
            session.stop()
    medians = [
        {name: statistics.median(result[side][name] for result in results) for name in results[0][side]}
        for side in range(2)
    ]
    report(*medians, median_of=len(results), rows=len(arrays["y_train"]), epochs=options.epochs)


if __name__ == "__main__":
    main()
