"""What it costs that rows lie in a memory-mapped shard, and not in an array in memory.

::

    python benchmarks/shard_epochs.py               # both comparisons
    python benchmarks/shard_epochs.py --only take   # rows in a new order, against numpy's indexing
    python benchmarks/shard_epochs.py --only fit    # an epoch of fit, against model.fit

Rows are taken from the shard as the feed of a fit takes them, some megabytes at a time, and a batch at a time
besides, against numpy's indexing of the same rows in memory. An epoch of ``fit`` is one rank's with all that it
does, against a ``model.fit`` that shuffles arrays in memory; each has a core. All take turns, and the first turn, in
which pages are mapped and the step is traced, is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from report import Measurement, median_ratio, report
from steps import Contender, speeds
from team import seats
from training import Training, schema_of, shard_of
from workloads import PIXELS, make_images

# As many as one worker mixes row by row over its whole shard, and no more: 640 MiB.
_TAKEN_ROWS = 200_000
_TRAINED_ROWS = 60_000
_BATCH_SIZE = 64
# Of the rows that the feed of a fit reads at once.
_RUN_BYTES = 8 << 20


def measure_take(repetitions: int) -> None:
    """A later epoch of all rows in a new order: the shard's rate over that of indexing the arrays in memory."""
    from elephant.data.epoch_plan import row_order

    images = make_images(_TAKEN_ROWS)
    x, y = images["x_train"], images["y_train"]
    shard = shard_of(schema_of(Training(workload="mlp_118k", rows=_TAKEN_ROWS, batch_size=_BATCH_SIZE, epochs=0)), x, y)

    def from_shard(rows: np.ndarray) -> int:
        return sum(array.nbytes for array in shard.take(rows))

    def from_memory(rows: np.ndarray) -> int:
        return x[rows].nbytes + y[rows].nbytes

    for at_once in (_BATCH_SIZE, _RUN_BYTES // (PIXELS * 4)):
        seconds: dict[Callable[[np.ndarray], int], list[float]] = {from_shard: [], from_memory: []}
        for epoch in range(1 + repetitions):
            order = row_order(0, epoch, 0, _TAKEN_ROWS, shuffle=True)
            for take, taken in seconds.items():
                began = time.monotonic()
                moved = sum(take(order[start : start + at_once]) for start in range(0, _TAKEN_ROWS, at_once))
                ended = time.monotonic()
                if moved != x.nbytes + y.nbytes:
                    raise SystemExit(f"take: expected {x.nbytes + y.nbytes} bytes. Received: {moved}.")
                if epoch:
                    taken.append(ended - began)
        _report_take(at_once, seconds[from_shard], seconds[from_memory])
    shard.close()


def _report_take(at_once: int, shard: list[float], memory: list[float]) -> None:
    report(
        Measurement(
            measure="shard_rows_against_memory",
            case={"rows": _TAKEN_ROWS, "floats": PIXELS, "rows_at_once": at_once},
            ratio=median_ratio(memory, shard),
            target=0.8,
            at_least=True,
            medians={
                "shard_rows_per_s": _TAKEN_ROWS / statistics.median(shard),
                "memory_rows_per_s": _TAKEN_ROWS / statistics.median(memory),
            },
            repetitions=len(shard),
        )
    )


def measure_fit(repetitions: int) -> None:
    """An epoch of one worker's fit from its shard, against ``model.fit`` on the same rows in memory."""
    training = Training(workload="mlp_118k", rows=_TRAINED_ROWS, batch_size=_BATCH_SIZE, epochs=0)
    speed, medians = speeds(
        {"shard": Contender.of_ranks(seats(1), training), "memory": Contender.of_plain(1, training)}, repetitions
    )
    report(
        Measurement(
            measure="shard_epoch_against_memory",
            case={"workload": "mlp_118k", "rows": _TRAINED_ROWS, "batch_size": _BATCH_SIZE, "workers": 1},
            ratio=speed["shard"].gain_over(speed["memory"]),
            target=0.95,
            at_least=True,
            medians=medians,
            repetitions=repetitions,
        )
    )


PARTS: dict[str, Callable[[int], None]] = {"take": measure_take, "fit": measure_fit}


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    for name in options.only:
        PARTS[name](options.repetitions)


if __name__ == "__main__":
    main()
