"""How fast rows of a Parquet table become shards that are ready for training.

::

    python benchmarks/data_path.py                  # 200,000 rows of 784 floats
    python benchmarks/data_path.py --only array     # arrays against Elephas' way and pyarrow; or vector, or path

Elephant's side is what a fit does: its prepared columns (`elephant.spark.training_data`), written by `ShardWriter`
in one barrier task per worker. Elephas' side is what its workers do before they train: rows through
``rdd.mapPartitions``, made to arrays by ``np.asarray``; the repartition before it, which pickles all rows once
more, is left out. pyarrow's side reads the same files in the workers, without the JVM, and writes the same
shards. The last comparison is within elephant: tables that the workers read by their path, against the
same tables as DataFrames. All take turns; the first turn of each is not counted. One more turn of each tells the
memory of the processes of the executors.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fit import write_parquet
from report import Measurement, median_ratio, report
from session_processes import MemoryWatch
from workloads import PIXELS, build_small_mlp, make_images

_WORKERS = 2
# Of the table that is read by its path, whose row groups are dealt out to the workers.
_ROWS_OF_GROUP = 10_000

# Makes shards, or arrays, of all rows, and returns how many rows these are.
Contender = Callable[[], int]


def write_shard(schema: Any, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, bytes]]:
    """Writes one task's rows as a fit does it; the task yields its place and how many rows these are."""
    from pyspark import TaskContext

    from elephant.data.shard import ShardWriter
    from elephant.storage.filesystem import local_folder

    with tempfile.TemporaryDirectory(dir=local_folder()) as folder:
        with ShardWriter(Path(folder) / "shard", schema) as writer:
            for batch in batches:
                writer.write(batch)
            summary = writer.finish()
        yield TaskContext.get().partitionId(), str(summary.num_rows).encode()


def by_elephant(frame: Any) -> Contender:
    """Returns what makes shards of a DataFrame as ``fit`` on it does."""
    estimator = untrained()
    return lambda: shards_of(rows_of(frame, estimator))


def by_path(folder: Path) -> Contender:
    """Returns what makes shards of a folder of files as ``fit`` on its path does: the workers read them."""
    from elephant import Files
    from elephant.spark.params import column_selection, fit_config
    from elephant.spark.training_data import rows_of_files

    estimator = untrained()
    info = estimator.getModel().source.info
    choice, config = column_selection(estimator), fit_config(estimator)
    # Listing the files and reading their footers, on the driver, is part of it.
    return lambda: shards_of(rows_of_files(Files(folder), info, choice, config, preprocessed=False))


def untrained() -> Any:
    """Returns an estimator for the columns ``features`` and ``label``."""
    from elephant import KerasEstimator

    return KerasEstimator(model=build_small_mlp(), numWorkers=_WORKERS)


def rows_of(frame: Any, estimator: Any) -> Any:
    """Returns the prepared columns of a DataFrame, as the estimator's ``fit`` makes them."""
    from elephant.spark.params import column_selection
    from elephant.spark.training_data import rows_of_frame

    info = estimator.getModel().source.info
    return rows_of_frame(frame, info, column_selection(estimator), preprocessed=False)


def shards_of(rows: Any) -> int:
    """Writes the shards of a fit's rows, and returns how many rows there are."""
    done = rows.source.run(functools.partial(write_shard, rows.schema), barrier=True)
    return sum(int(bytes(row["result"])) for row in done)


def by_elephas(frame: Any) -> Contender:
    """Returns what makes the frame's rows arrays, as Elephas' workers do it."""

    def arrays_of(pairs: Iterator[tuple[Any, Any]]) -> Iterator[int]:
        kept = list(pairs)
        features = np.asarray([features for features, _ in kept])
        np.asarray([label for _, label in kept])
        yield len(features)

    is_array = frame.schema["features"].dataType.typeName() == "array"

    def pair_of(row: Any) -> tuple[Any, Any]:
        return (row.features if is_array else row.features.toArray()), row.label

    return lambda: sum(frame.rdd.map(pair_of).mapPartitions(arrays_of).collect())


def by_pyarrow(session: Any, frame: Any, folder: Path) -> Contender:
    """Returns what reads the table's files in the workers, one file each, and writes the same shards."""
    schema = rows_of(frame, untrained()).schema
    files = sorted(str(path) for path in folder.glob("*.parquet"))

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from elephant.cluster.spark_job import result_row

        for batch in batches:
            for place in batch.column(0).to_pylist():
                table = pq.ParquetFile(files[place])
                rows = table.iter_batches(batch_size=10_000, columns=["features", "label"])
                yield from itertools.starmap(result_row, write_shard(schema, rows))

    places = session.range(0, len(files), 1, len(files))
    return lambda: sum(
        int(bytes(row["result"])) for row in places.mapInArrow(read, "rank int, result binary").collect()
    )


def seconds_in_turns(contenders: Mapping[str, Contender], rows: int, repetitions: int) -> dict[str, list[float]]:
    """Returns what each contender took in each turn but the first."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(1 + repetitions):
        for name, contender in contenders.items():
            began = time.monotonic()
            made = contender()
            ended = time.monotonic()
            if made != rows:
                raise SystemExit(f"{name}: expected {rows} rows. Received: {made}.")
            if turn:
                seconds[name].append(ended - began)
    return seconds


def write_binary_parquet(arrays: dict[str, np.ndarray], folder: Path, files: int) -> None:
    """Writes the training rows as so many Parquet files, each image as the bytes of its float32 values."""
    for number, rows in enumerate(np.array_split(np.arange(len(arrays["y_train"])), files)):
        images = np.ascontiguousarray(arrays["x_train"][rows], "<f4")
        ends = np.arange(len(images) + 1, dtype=np.int32) * images[0].nbytes
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(images)]
        features = pa.Array.from_buffers(pa.binary(), len(images), buffers)
        table = pa.table({"features": features, "label": arrays["y_train"][rows]})
        # Noise does not shrink: to compress it takes time, of both sides alike.
        options = {"row_group_size": _ROWS_OF_GROUP, "use_dictionary": False, "compression": None}
        pq.write_table(table, folder / f"part-{number}.parquet", **options)


def memory_of(contenders: Mapping[str, Contender]) -> dict[str, float]:
    """Returns the most MiB of any Python worker and executor's JVM, by contender, without shared pages."""
    found: dict[str, float] = {}
    for name, contender in contenders.items():
        with MemoryWatch() as memory:
            contender()
        found |= {f"{name}_{kind}_mib": memory.mib[kind] for kind in ("python_workers", "executor_jvms")}
    return found


def report_pair(
    measure: str,
    column: str,
    target: float,
    seconds: Mapping[str, list[float]],
    peer: str,
    rows: int,
    memory: Mapping[str, float] | None = None,
) -> None:
    """Prints how many times the peer's rows per second elephant's are."""
    ours, theirs = seconds["elephant"], seconds[peer]
    medians = {f"{name}_rows_per_s": rows / statistics.median(values) for name, values in seconds.items()}
    report(
        Measurement(
            measure=measure,
            case={"column": column, "rows": rows, "floats": PIXELS, "workers": _WORKERS},
            ratio=median_ratio(theirs, ours),
            target=target,
            at_least=True,
            medians={**medians, **(memory or {})},
            repetitions=len(ours),
        )
    )


def measure_arrays(session: Any, folder: Path, options: argparse.Namespace) -> None:
    """A column of arrays of floats: against Elephas' way, and against pyarrow in the workers."""
    frame = session.read.parquet(str(folder))
    contenders = {
        "elephant": by_elephant(frame),
        "elephas": by_elephas(frame),
        "pyarrow": by_pyarrow(session, frame, folder),
    }
    seconds = seconds_in_turns(contenders, options.rows, options.repetitions)
    report_pair("shards_against_elephas", "array<float>", 4.0, seconds, "elephas", options.rows)
    report_pair("shards_against_pyarrow", "array<float>", 1.2, seconds, "pyarrow", options.rows, memory_of(contenders))


def measure_vectors(session: Any, folder: Path, options: argparse.Namespace) -> None:
    """A column of ml vectors, which Spark keeps as doubles, against Elephas' way."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions

    vectors = folder.with_name("vectors")
    table = session.read.parquet(str(folder))
    wide = functions.col("features").cast("array<double>")
    table.select(array_to_vector(wide).alias("features"), "label").write.parquet(str(vectors))
    frame = session.read.parquet(str(vectors))
    contenders = {"elephant": by_elephant(frame), "elephas": by_elephas(frame)}
    seconds = seconds_in_turns(contenders, options.rows, options.repetitions)
    report_pair("shards_against_elephas", "ml vector", 3.5, seconds, "elephas", options.rows)


def measure_path(session: Any, folder: Path, options: argparse.Namespace) -> None:
    """What the workers make shards of when they read the table by themselves, against the same table as a DataFrame."""
    raw = folder.with_name("raw")
    raw.mkdir()
    write_binary_parquet(make_images(options.rows), raw, _WORKERS)
    for table, column, target in ((raw, "binary", 4.0), (folder, "array<float>", 1.0)):
        frame = session.read.parquet(str(table))
        contenders = {"elephant": by_path(table), "frame": by_elephant(frame)}
        if table is folder:
            contenders["pyarrow"] = by_pyarrow(session, frame, folder)
        seconds = seconds_in_turns(contenders, options.rows, options.repetitions)
        report_pair("path_against_frame", column, target, seconds, "frame", options.rows, memory_of(contenders))


PARTS: dict[str, Callable[[Any, Path, argparse.Namespace], None]] = {
    "array": measure_arrays,
    "vector": measure_vectors,
    "path": measure_path,
}


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", type=int, default=200_000, help="of the table (200000)")
    parser.add_argument("--repetitions", type=int, default=5, help="of every side (5)")
    options = parser.parse_args()
    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        folder = Path(name) / "arrays"
        folder.mkdir()
        write_parquet(make_images(options.rows), folder, _WORKERS)
        # A partition per file, and so per worker: nothing is shuffled, on any side.
        session = local_session(_WORKERS, conf={"spark.sql.files.maxPartitionBytes": str(4 << 30)})
        try:
            for part in options.only:
                PARTS[part](session, folder, options)
        finally:
            session.stop()


if __name__ == "__main__":
    main()
