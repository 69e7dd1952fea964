"""What checkpoints within an epoch cost: rows per second with them over those without, in turns of one session.

::

    python benchmarks/checkpoints.py                             # 24M parameters with Adam, checkpointSeconds=30
    python benchmarks/checkpoints.py --seconds 5 --fit-seconds 40

    python benchmarks/checkpoints.py --notices 5                # seconds from a SIGTERM until the state is a checkpoint

Two executors of this machine train 784-4096-4096-1024-10; a state is 290 MB, which rank 0 copies and sends to the
driver, and the driver checks, sums up and writes to this machine's disk, all on the same cores. Of the seconds of a fit
only those of its steps count, from the second epoch on. Prints a line of JSON with the ratio, and what one checkpoint
costs in seconds of training. With ``--notices``, a training process is asked to end in the middle of an epoch instead,
and the line has the seconds until the manifest of the checkpoint lies in the folder.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import psutil
from fit import write_parquet
from report import Measurement, report
from session_processes import session_processes
from soak import is_of
from workloads import build_large_mlp, make_images

_ROWS = 4096


def model() -> Any:
    """Returns the model of 24M parameters, with Adam."""
    import keras

    made = build_large_mlp()
    made.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
    return made


def rate_of(frame: Any, steps: int, folder: Path | None, options: argparse.Namespace) -> tuple[float, float]:
    """Returns rows per second of all ranks in the second epoch of a fit, and the seconds of its steps.

    Args:
        steps: Of an epoch.
        folder: For checkpoints; None makes none.
    """
    from elephant import KerasEstimator

    kept = {} if folder is None else {"checkpointPath": folder, "checkpointSeconds": options.seconds}
    estimator = KerasEstimator(
        model=model(),
        numWorkers=options.workers,
        epochs=2,
        batchSize=options.batch_size,
        stepsPerEpoch=steps,
        checkpointEpochs=1000,
        verbose=0,
        **kept,
    )
    ranks = [rank for rank in estimator.fit(frame).summary.ranks if rank["epoch"] == 1]
    return sum(rank["rows_per_s"] for rank in ranks), max(rank["rows"] / rank["rows_per_s"] for rank in ranks)


def seconds_to_state(frame: Any, folder: Path, options: argparse.Namespace) -> float:
    """Returns the seconds from a SIGTERM to a training process until a checkpoint of that moment is in a folder."""
    from elephant import KerasEstimator
    from elephant.errors import PreemptedError

    seconds: list[float] = []

    def ask() -> None:
        while len(found := training_processes()) < options.workers:
            time.sleep(0.5)
        # Steps go on, and none is traced any more.
        time.sleep(random.uniform(15.0, 20.0))
        found[0].terminate()
        since = time.monotonic()
        while not list(folder.glob("*.json")):
            time.sleep(0.01)
        seconds.append(time.monotonic() - since)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        KerasEstimator(
            model=model(),
            numWorkers=options.workers,
            epochs=2,
            batchSize=options.batch_size,
            stepsPerEpoch=100_000,
            checkpointPath=folder,
            verbose=0,
        ).fit(frame)
    except PreemptedError:
        asking.join()
    return seconds[0]


def training_processes() -> list[psutil.Process]:
    """Returns those of the session."""
    return [process for process in session_processes() if is_of(process, "training")]


def main() -> None:
    """Measures in turns, and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="checkpointSeconds")
    parser.add_argument("--fit-seconds", type=float, default=100.0, help="seconds of the epoch that is measured, about")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--notices", type=int, default=0, help="fits in which a process is asked to end instead")
    options = parser.parse_args()
    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        folder = Path(name)
        (folder / "table").mkdir()
        write_parquet(make_images(_ROWS), folder / "table", options.workers)
        session = local_session(options.workers)
        try:
            frame = session.read.parquet(str(folder / "table"))
            if options.notices:
                report_notices([seconds_to_state(frame, folder / f"{n}", options) for n in range(options.notices)])
                return
            _, seconds = rate_of(frame, 20, None, options)
            steps = max(int(20 * options.fit_seconds / seconds), 20)
            rates: dict[bool, list[float]] = {False: [], True: []}
            lengths, sizes = [], []
            for turn in range(options.repetitions):
                for keeps in (False, True) if turn % 2 else (True, False):
                    kept = folder / f"kept-{turn}" if keeps else None
                    rate, seconds = rate_of(frame, steps, kept, options)
                    rates[keeps].append(rate)
                    if kept is not None:
                        lengths.append(seconds)
                        sizes.append(max(file.stat().st_size for file in kept.glob("*.state.npz")))
        finally:
            session.stop()
    ratios = [with_them / without for with_them, without in zip(rates[True], rates[False], strict=True)]
    ratio, seconds = statistics.median(ratios), statistics.median(lengths)
    of_one = (1 - ratio) * options.seconds
    report(
        Measurement(
            measure="checkpoints_against_none",
            case={"seconds": options.seconds, "workers": options.workers, "parameters": 24_202_250},
            ratio=ratio,
            target=0.97 if options.seconds == 30 else None,
            at_least=True,
            medians={
                "rows_per_s_with": statistics.median(rates[True]),
                "rows_per_s_without": statistics.median(rates[False]),
                "fit_seconds": seconds,
                "state_bytes": statistics.median(sizes),
                "one_checkpoint_s": of_one,
                "ratio_every_30_s": 1 - of_one / 30,
            },
            repetitions=options.repetitions,
        )
    )


def report_notices(seconds: list[float]) -> None:
    """Prints how long states took that were asked for."""
    report(
        Measurement(
            measure="seconds_from_notice_to_checkpoint",
            case={"parameters": 24_202_250},
            ratio=statistics.median(seconds),
            target=2.0,
            at_least=False,
            medians={"p50_s": statistics.median(seconds), "most_s": max(seconds)},
            repetitions=len(seconds),
        )
    )


if __name__ == "__main__":
    main()
