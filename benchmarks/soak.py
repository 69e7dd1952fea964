"""Fits in which something is killed every few seconds: what they give, how fast they are, and what they leave.

::

    python benchmarks/soak.py                                   # as make soak: 20 minutes at most
    python benchmarks/soak.py --minutes 3 --every 8 --seed 5    # the same kills at the same seconds again

Two executors of this machine train, first undisturbed, then with kills (SIGKILL) at random moments: of a training
process, a Python worker of Spark or their daemon, an executor's JVM, a server that training processes are forked from.
A synchronous fit, with dropout, batch normalization and
Adam, has to end with the same bits; an asynchronous one, whose weights are sums that float32 holds exactly, with the
exact sum of all batches. Prints a line of JSON for each mode: the share of the undisturbed rows per second, the kills
by kind, and how far the memory of the driver and the executors has grown; and fails where weights differ, or where
processes, files in /dev/shm or folders are left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from report import Measurement, report
from session_processes import part_of, session_processes

_ROWS, _FEATURES, _BATCH = 4096, 16, 32
_KINDS = ("training", "python_workers", "executor_jvms", "fork_servers")
_SERVER = "elephant.task.forkserver"
_LEFT_WITHIN_S = 30.0
_DEADLINE_S = 3600.0
_MARK = "ELEPHANT_SOAK"
# Of all minutes, an undisturbed fit of one of the modes.
_SHARE = 0.15


def write_rows(folder: Path) -> np.ndarray:
    """Writes the rows as two Parquet files; returns their features, small whole numbers."""
    rng = np.random.default_rng(7)
    features = rng.integers(-8, 9, (_ROWS, _FEATURES)).astype(np.float32)
    labels = np.full(_ROWS, -1e9, np.float32)
    targets = np.tanh(features @ rng.normal(0, 0.1, _FEATURES)).astype(np.float32)
    for number, rows in enumerate(np.array_split(np.arange(_ROWS), 2)):
        offsets = np.arange(0, rows.size * _FEATURES + 1, _FEATURES, dtype=np.int32)
        columns = {
            "features": pa.ListArray.from_arrays(offsets, features[rows].ravel()),
            "label": labels[rows],
            "target": targets[rows],
        }
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")
    return features


def synchronous_model() -> Any:
    """Returns a model of which a fit has all that must come back: slots, moving averages, random generators."""
    import keras

    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Input((_FEATURES,)),
        keras.layers.Dense(64, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.001), "mse", metrics=["mae"])
    return model


def counting_model() -> Any:
    """Returns a model whose gradient is the mean of a batch's features: sums of them are exact in any order."""
    import keras

    layers = [keras.layers.Input((_FEATURES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.25), "mae")
    return model


class Killer(threading.Thread):
    """Kills a process of the session every few seconds, chosen by a seed, until it is stopped.

    Attributes:
        kills: How many of each kind.
    """

    def __init__(self, every_s: float, seed: int) -> None:
        super().__init__(name="killer", daemon=True)
        self._every_s, self._random, self._done = every_s, random.Random(seed), threading.Event()
        self.kills: Counter[str] = Counter()

    def run(self) -> None:
        """Waits, kills, and waits again."""
        while not self._done.wait(self._every_s * self._random.uniform(0.5, 1.5)):
            kind, choice = self._random.choice(_KINDS), self._random.random()
            found = [one for one in session_processes() if _is_of(one, kind)]
            if found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[int(choice * len(found))].kill()
                    self.kills[kind] += 1

    def stop(self) -> None:
        """Ends the kills."""
        self._done.set()
        self.join()


def _is_of(process: psutil.Process, kind: str) -> bool:
    try:
        if _SERVER not in process.cmdline():
            return part_of(process) == kind
        # What a server has forked has the server's command line.
        parent = process.parent()
        is_forked = parent is not None and _SERVER in parent.cmdline()
        return kind == ("training" if is_forked else "fork_servers")
    except psutil.Error:
        return False


def resident_bytes() -> dict[str, int]:
    """Returns the memory of the driver, and of each executor on average, without what they have started."""
    parts: dict[str, list[int]] = {"driver": [], "executor_jvms": []}
    for process in session_processes():
        with contextlib.suppress(psutil.Error):
            parts.get(part_of(process), []).append(process.memory_info().rss)
    return {part: sum(sizes) // max(len(sizes), 1) for part, sizes in parts.items()}


class Soak:
    """One mode: the undisturbed fit, the disturbed one, and what they are compared by.

    Args:
        frame: The rows.
        features: Of the rows, where the weights are sums of them; None compares with the undisturbed fit.
        options: Arguments of the program.
    """

    def __init__(self, mode: str, frame: Any, features: np.ndarray | None, options: argparse.Namespace) -> None:
        self._mode, self._frame, self._features, self._options = mode, frame, features, options

    def _fit(self, epochs: int) -> tuple[Any, float]:
        from elephant import KerasEstimator

        counts = self._features is not None
        estimator = KerasEstimator(
            model=counting_model() if counts else synchronous_model(),
            labelCol="label" if counts else "target",
            mode=self._mode,
            numWorkers=2,
            epochs=epochs,
            batchSize=_BATCH,
            checkpointSeconds=self._options.checkpoint_seconds,
            maxRestarts=10_000,
            verbose=self._options.verbose,
        )
        began = time.monotonic()
        fitted = estimator.fit(self._frame)
        return fitted, time.monotonic() - began

    def run(self) -> bool:
        """Fits twice, prints the comparison, and returns whether the weights are what they have to be."""
        options = self._options
        # One to warm up, and two to learn how long an epoch takes.
        _, few_s = (self._fit(2), self._fit(2))[1]
        _, many_s = self._fit(42)
        epochs = max(int(options.minutes * 60 * _SHARE / ((many_s - few_s) / 40)), 40)
        before = resident_bytes()
        plain, plain_s = self._fit(epochs)
        killer = Killer(options.every, options.seed)
        killer.start()
        try:
            disturbed, disturbed_s = self._fit(epochs)
        finally:
            killer.stop()
        after, weights = resident_bytes(), disturbed.model.get_weights()
        if self._features is None:
            expected = plain.model.get_weights()
        else:
            # Each row was in one full batch in each epoch.
            total = -0.25 * epochs * self._features.astype(np.float64).sum(axis=0) / _BATCH
            expected = [total.reshape(-1, 1).astype(np.float32)]
        equal = all(np.array_equal(one, other) for one, other in zip(weights, expected, strict=True))
        report(
            Measurement(
                measure="soak",
                case={"mode": self._mode, "epochs": epochs, "every_s": options.every, "seed": options.seed},
                ratio=plain_s / disturbed_s,
                target=0.7,
                at_least=True,
                medians={
                    "undisturbed_s": plain_s,
                    "disturbed_s": disturbed_s,
                    "weights_as_expected": float(equal),
                    "restarts": float(disturbed.training_statistics.get("restarts", 0)),
                    **{f"kills_of_{kind}": float(killer.kills[kind]) for kind in _KINDS},
                    **{f"{part}_grown_mb": (after[part] - before[part]) / 2**20 for part in before},
                },
                repetitions=1,
            )
        )
        return equal


def leftovers(mark: str, files: set[str]) -> list[str]:
    """Returns what a session has left whose driver has ended: processes, and files in folders for temporary ones.

    Args:
        mark: In the environment of the session's processes.
        files: That were there before.
    """
    deadline = time.monotonic() + _LEFT_WITHIN_S
    while True:
        left = [f"process {one.pid}: {command[:100]}" for one, command in _marked_processes(mark)]
        left += sorted(_files() - files)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _marked_processes(mark: str) -> list[tuple[psutil.Process, str]]:
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get(_MARK) == mark and one.status() != psutil.STATUS_ZOMBIE:
                found.append((one, " ".join(one.cmdline())))
    return found


def _files() -> set[str]:
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return {str(path) for folder in folders if folder.is_dir() for path in folder.glob("*elephant*")}


def run_in_session(options: argparse.Namespace) -> bool:
    """Runs the modes in one session; returns whether all weights are what they have to be."""
    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="soak-rows-") as name:
        features = write_rows(Path(name))
        # Spark gives up executors and tasks that are lost too often.
        conf = {"spark.deploy.maxExecutorRetries": "-1", "spark.task.maxFailures": "10000"}
        session = local_session(2, conf=conf)
        try:
            frame = session.read.parquet(name)
            sums = {"synchronous": None}
            # Each runs, whatever the one before has given.
            equal = [Soak(mode, frame, sums.get(mode, features), options).run() for mode in options.modes]
            return all(equal)
        finally:
            session.stop()


def main() -> None:
    """Runs both modes in one session, and looks for what it has left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the whole run, about (20)")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills, on average (15)")
    parser.add_argument("--checkpoint-seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=["synchronous", "asynchronous"])
    parser.add_argument("--verbose", type=int, default=0)
    parser.add_argument("--in-session", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_session:
        raise SystemExit(0 if run_in_session(options) else 1)
    mark, files = secrets.token_hex(8), _files()
    # A driver of its own: some things go with its end.
    command = [sys.executable, __file__, "--in-session", *sys.argv[1:]]
    ended = subprocess.run(command, env={**os.environ, _MARK: mark}, timeout=_DEADLINE_S).returncode
    left = leftovers(mark, files)
    for one in left:
        print(f"left behind: {one}")
    raise SystemExit(1 if ended or left else 0)


if __name__ == "__main__":
    main()
