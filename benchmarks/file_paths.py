"""How fast the executors read files by themselves, against the same files as a DataFrame.

::

    python benchmarks/file_paths.py                 # 200,000 rows of 784 floats: binary tensors, arrays

Both sides end in shards that are ready for training (`data_path.write_shard`), in one barrier task per worker: that
of ``fit(df)`` gets its rows from Spark's JVM, that of ``fit(path)`` reads the Parquet files in the worker. They
take turns; the first turn of each is not counted.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_path import Contender, by_elephant, report_pair, seconds_in_turns, write_shard
from workloads import build_small_mlp, make_images

_WORKERS = 2


def by_path(session: Any, folder: Path) -> Contender:
    """Returns what writes the shards of ``fit(folder)``: the executors read the files."""
    from elephant import Files, KerasEstimator
    from elephant.cluster.file_rows import FileRows
    from elephant.spark.columns import prepare_training
    from elephant.spark.paths import open_files

    estimator = KerasEstimator(model=build_small_mlp())
    facts, choice = estimator.getOrDefault("model").facts, estimator.column_choice()

    def write() -> int:
        # The listing of the files and the reading of their footers, on the driver, is part of it.
        opened = open_files(Files(folder), facts, choice)
        schema, _ = prepare_training(opened.schema, facts, choice)
        rows = FileRows(session, opened.files, schema, number=_WORKERS, seed=None)
        return sum(int(bytes(row["result"])) for row in rows.run(functools.partial(write_shard, schema), barrier=True))

    return write


def write_table(arrays: dict[str, np.ndarray], folder: Path, *, binary: bool) -> None:
    """Writes a Parquet file per worker, with rows of features as raw bytes or as lists."""
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(arrays["y_train"])), _WORKERS)):
        features = np.ascontiguousarray(arrays["x_train"][rows], dtype="<f4")
        values: Any = pa.FixedSizeListArray.from_arrays(features.ravel(), features.shape[1]).cast(
            pa.list_(pa.float32())
        )
        if binary:
            values = pa.array([row.tobytes() for row in features], pa.binary())
        table = pa.table({"features": values, "label": arrays["y_train"][rows]})
        # Floats of images and noise hardly shrink: compressing them is time for both sides alike.
        pq.write_table(
            table, folder / f"{number}.parquet", row_group_size=10_000, use_dictionary=False, compression=None
        )


def measure(session: Any, folder: Path, arrays: dict[str, np.ndarray], repetitions: int, *, binary: bool) -> None:
    """Measures one kind of column on both ways."""
    write_table(arrays, folder, binary=binary)
    contenders = {"elephant": by_path(session, folder), "dataframe": by_elephant(session.read.parquet(str(folder)))}
    rows = len(arrays["y_train"])
    seconds = seconds_in_turns(contenders, rows, repetitions)
    report_pair("path_against_dataframe", folder.name, 4.0 if binary else 1.0, seconds, "dataframe", rows)


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="of the table (200000)")
    parser.add_argument("--repetitions", type=int, default=5, help="of every side (5)")
    options = parser.parse_args()
    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        session = local_session(_WORKERS, conf={"spark.sql.files.maxPartitionBytes": str(4 << 30)})
        try:
            arrays = make_images(options.rows)
            measure(session, Path(name) / "binary", arrays, options.repetitions, binary=True)
            measure(session, Path(name) / "array<float>", arrays, options.repetitions, binary=False)
        finally:
            session.stop()


if __name__ == "__main__":
    main()
