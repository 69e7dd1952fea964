"""A fit on more rows than memory: an executor, its Python worker and its training process under one limit.

::

    sudo python benchmarks/limited_memory.py                 # 10 GB of rows, a limit of 2 GB; 20 GB of disk
    sudo python benchmarks/limited_memory.py --rows 500000   # a sixth of it

The kernel enforces the limit: a control group of the memory controller (version 1), into which the executor goes before
it has work. Its page cache counts too. The driver is outside. The ratio is that of the table's bytes to the limit, for
fits that end, and that have learned the labels. Rows come from a DataFrame, and from the path.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from report import Measurement, report
from session_processes import MemoryWatch
from workloads import PIXELS

_CONTROLLER = Path("/sys/fs/cgroup/memory")
_FILES = 40
_BATCH_SIZE = 512
_HEAP_MB = 512
# Of the mean squared error in the second epoch: labels are sums of 784 products, of variance 65.
_LOSS_AT_MOST = 0.1


def write_table(folder: Path, rows: int) -> int:
    """Writes rows of noise, and labels that are linear in it; returns the bytes of all files."""
    random = np.random.default_rng(0)
    weights = random.normal(size=PIXELS).astype("f4")
    for number in range(_FILES):
        features = random.random((rows // _FILES, PIXELS), dtype="f4") - 0.5
        offsets = np.arange(0, features.size + 1, PIXELS, dtype=np.int32)
        lists = pa.ListArray.from_arrays(offsets, features.ravel())
        table = pa.table({"features": lists, "label": features @ weights})
        pq.write_table(table, folder / f"part-{number}.parquet", compression=None, use_dictionary=False)
    return sum(path.stat().st_size for path in folder.iterdir())


@contextlib.contextmanager
def limited(processes: list[psutil.Process], limit: int) -> Iterator[None]:
    """Puts processes, and with them all that they will start, under one limit of memory."""
    group = _CONTROLLER / f"elephant-benchmark-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(f"{group}: expected root, and the memory controller of version 1. Received: {error}") from None
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        for process in processes:
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            # What has ended meanwhile is not there to be moved.
            with contextlib.suppress(ProcessLookupError):
                (_CONTROLLER / "cgroup.procs").write_text(member)
        group.rmdir()


def fit(data: Any) -> list[float]:
    """Returns the loss of each of two epochs."""
    import keras

    from elephant import KerasEstimator

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((PIXELS,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    estimator = KerasEstimator(model=model, numWorkers=1, batchSize=_BATCH_SIZE, epochs=2, verbose=0)
    return list(estimator.fit(data).history["loss"])


def executors_of(driver: psutil.Process) -> list[psutil.Process]:
    """Returns the executors of the driver's local cluster."""
    found = []
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                found.append(process)
    return found


def measure(session: Any, folder: Path, size: int, options: argparse.Namespace) -> None:
    """Fits from a DataFrame and from the path under the limit."""
    executors = executors_of(psutil.Process())
    with limited(executors, options.limit):
        for source, data in (("DataFrame", session.read.parquet(str(folder))), ("path", str(folder))):
            began = time.monotonic()
            with MemoryWatch() as memory:
                losses = fit(data)
            if losses[-1] > _LOSS_AT_MOST:
                raise SystemExit(f"fit: expected a loss of at most {_LOSS_AT_MOST}. Received: {losses}.")
            report(
                Measurement(
                    measure="rows_over_memory_limit",
                    case={"rows": options.rows, "from": source, "epochs": len(losses)},
                    ratio=size / options.limit,
                    target=5.0,
                    at_least=True,
                    medians={
                        "seconds": time.monotonic() - began,
                        **{f"{kind}_mib": value for kind, value in memory.mib.items()},
                    },
                    repetitions=1,
                )
            )


def main() -> None:
    """Writes the table, and fits on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_200_000, help="of 784 floats (3200000)")
    parser.add_argument("--limit", type=int, default=2_000_000_000, help="bytes of memory (2000000000)")
    options = parser.parse_args()
    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        size = write_table(Path(name), options.rows)
        session = local_session(1, executor_memory_mb=_HEAP_MB)
        try:
            session.range(1).count()
            measure(session, Path(name), size, options)
        finally:
            session.stop()


if __name__ == "__main__":
    main()
