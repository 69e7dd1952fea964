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
from exact_fits import BATCH, counted, counting_model, synchronous_model, write_rows
from leftovers import MARK, kept_files, leftovers
from report import Measurement, report
from session_processes import is_of, part_of, session_processes

_KINDS = ("training", "python_workers", "executor_jvms", "fork_servers")
_DEADLINE_S = 3600.0
# Of all minutes, an undisturbed fit of one of the modes.
_SHARE = 0.15


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
            found = [one for one in session_processes() if is_of(one, kind)]
            if found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[int(choice * len(found))].kill()
                    self.kills[kind] += 1

    def stop(self) -> None:
        """Ends the kills."""
        self._done.set()
        self.join()


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
            batchSize=BATCH,
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
            expected = [counted(self._features, epochs)]
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
    mark, files = secrets.token_hex(8), kept_files()
    # A driver of its own: some things go with its end.
    command = [sys.executable, __file__, "--in-session", *sys.argv[1:]]
    ended = subprocess.run(command, env={**os.environ, MARK: mark}, timeout=_DEADLINE_S).returncode
    left = leftovers(mark, files)
    for one in left:
        print(f"left behind: {one}")
    raise SystemExit(1 if ended or left else 0)


if __name__ == "__main__":
    main()
