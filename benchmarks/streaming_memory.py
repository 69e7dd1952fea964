"""How much memory a stream takes that scores with a loaded model, minute by minute.

::

    python benchmarks/streaming_memory.py --minutes 10     # a micro-batch of 2,000 rows every second, 2 executors

The model is saved, loaded again, and applied by ``transform`` to a stream of Spark's ``rate-micro-batch`` source,
whose result goes nowhere (the ``noop`` format). Each line is the memory of one part of the session in one minute: its
processes' own pages, those shared with nobody, summed over them. The last lines compare the median of the last third
of the minutes with that of the second third: the first third is warm-up. Heaps of Java grow up to their limit, whatever
runs in them; what elephant adds is in the Python workers, and in the processes that predict.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import psutil
from report import Measurement, report
from session_processes import part_of, session_processes

_WORKERS = 2
_SAMPLE_S = 5.0
# At most so many times the memory of the second third in the last one.
_TARGET = 1.05
_HEAP_MB = 512
_FIRST_BATCH_S = 300.0
_MB = 2**20
_WIDTH = 32


def saved_model(folder: Path) -> str:
    """Saves a fitted model of 32 numbers; returns its path."""
    import keras

    from elephant import KerasModel

    layers = keras.layers
    model = keras.Sequential([layers.Input((_WIDTH,)), layers.Dense(256, "relu"), layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    path = str(folder / "model")
    KerasModel(model).write().save(path)
    return path


def started(spark: Any, path: str, folder: Path, rows: int) -> Any:
    """Starts the stream; returns Spark's handle of it."""
    from elephant import KerasModel

    source = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=rows, numPartitions=_WORKERS).load()
    numbers = ", ".join(f"cast((value + {place}) % 97 as float)" for place in range(_WIDTH))
    frame = KerasModel.load(path).transform(source.selectExpr("value", f"array({numbers}) AS features"))
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoints"))
    return writer.trigger(processingTime="1 second").start()


def memory_by_part() -> Counter[str]:
    """Returns the bytes of the session's processes that are shared with no other process, by part."""
    found: Counter[str] = Counter()
    for process in session_processes():
        try:
            found[part_of(process)] += process.memory_full_info().uss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def watched(query: Any, minutes: float) -> list[dict[str, float]]:
    """Prints and returns the medians of each minute, in MB by part, from the first micro-batches on."""
    found: list[dict[str, float]] = []
    begins = time.monotonic() + _FIRST_BATCH_S
    while not (query.lastProgress and query.lastProgress["batchId"] > 0):
        if time.monotonic() > begins or not query.isActive:
            raise RuntimeError(f"Expected a first micro-batch in {_FIRST_BATCH_S} s. Received: {query.exception()}")
        time.sleep(1)
    for minute in range(1, max(round(minutes), 1) + 1):
        ends, samples = time.monotonic() + 60 * minutes / max(round(minutes), 1), []
        while time.monotonic() < ends:
            if query.exception() is not None or not query.isActive:
                raise RuntimeError(f"Expected a stream that runs. Received: {query.exception()}")
            samples.append(memory_by_part())
            time.sleep(_SAMPLE_S)
        parts = {part: statistics.median(one[part] for one in samples) / _MB for part in samples[-1]}
        found.append(parts)
        progress = query.lastProgress
        batch = -1 if progress is None else progress["batchId"]
        print(
            json.dumps({"minute": minute, "batch": batch, **{part: round(mb, 1) for part, mb in parts.items()}}),
            flush=True,
        )
    return found


def compare(minutes: list[dict[str, float]], rows: int, batches: int) -> None:
    """Reports the growth of each part from the second third of the minutes to the last one."""
    third = max(len(minutes) // 3, 1)
    for part in sorted(minutes[-1]):
        middle = statistics.median(one.get(part, 0.0) for one in minutes[-2 * third : -third] or minutes)
        last = statistics.median(one.get(part, 0.0) for one in minutes[-third:])
        of_elephant = part in ("python_workers", "training")
        report(
            Measurement(
                measure="streaming_memory",
                case={"part": part, "minutes": len(minutes), "rows_per_batch": rows},
                ratio=last / middle,
                target=_TARGET if of_elephant else None,
                at_least=False,
                medians={"middle_mb": middle, "last_mb": last, "batches": float(batches)},
                repetitions=1,
            )
        )


def main() -> None:
    """Runs the stream, and prints lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=2000, help="of each micro-batch")
    arguments = parser.parse_args()
    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        spark = local_session(_WORKERS, executor_memory_mb=_HEAP_MB, conf={"spark.driver.memory": f"{_HEAP_MB}m"})
        try:
            query = started(spark, saved_model(Path(name)), Path(name), arguments.rows)
            minutes = watched(query, arguments.minutes)
            batches = query.lastProgress["batchId"]
            query.stop()
            compare(minutes, arguments.rows, batches)
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
