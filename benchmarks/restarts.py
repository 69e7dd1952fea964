"""Seconds from the kill of a rank until all ranks take steps again, and what these are spent on.

::

    python benchmarks/restarts.py                                          # 40 kills of each kind
    python benchmarks/restarts.py --kinds training --kills 5 --every 6

Four ranks on two executors of this machine, each with four task slots, so that a task that is lost finds one at hand.
Each fit is killed in every few seconds, at moments that a seed chooses, until there were enough kills: a training
process (``training``), or once a fit an executor's JVM with all that it has started (``executor_jvms``). Prints a line
of JSON for each kind: the 95th percentile of the seconds from a kill until the first step of all ranks together is
told, against its target, and in ``medians`` the percentiles and the median seconds of each phase: noticed, processes
(forked, model built and step traced, ranks connected, or for an executor Spark's next attempt and its rows), state,
model (prepared, state given back), first step. Fails where the weights differ from those of an undisturbed fit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import psutil
from exact_fits import BATCH, synchronous_model, write_rows
from report import Measurement, report
from session_processes import executor_of, is_of, session_processes

_RANKS, _EXECUTORS = 4, 2
_LOOK_S = 0.3
_TARGETS = {"training": 5.0, "executor_jvms": 12.0}
_PHASES = ("noticed_s", "processes_s", "state_s", "model_s", "step_s")


class Killer(threading.Thread):
    """Kills one process of a kind after the other, each when all ranks have taken steps for a while, until stopped.

    Attributes:
        kills: When each was, in seconds since 1970.
    """

    def __init__(self, kind: str, every_s: float, most: int, chosen: random.Random) -> None:
        super().__init__(name="killer", daemon=True)
        self._kind, self._every_s, self._most, self._chosen = kind, every_s, most, chosen
        self._done = threading.Event()
        self.kills: list[float] = []

    def run(self) -> None:
        """Waits, kills, and waits again."""
        while len(self.kills) < self._most and not self._done.wait(self._every_s * self._chosen.uniform(0.7, 1.3)):
            training = busiest([one for one in session_processes() if is_of(one, "training")], _RANKS)
            if self._kind == "training":
                found = training
            else:
                # Others have no ranks.
                used = {executor_of(one) for one in training}
                found = [one for one in session_processes() if is_of(one, self._kind) and one.pid in used]
            if len(training) == _RANKS and found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._chosen.choice(found).kill()
                    self.kills.append(time.time())

    def stop(self) -> None:
        """Ends the kills."""
        self._done.set()
        self.join()


def busiest(processes: list[psutil.Process], most: int) -> list[psutil.Process]:
    """Returns those that train: as many wait for a loss, and do nothing."""

    def seconds() -> dict[psutil.Process, float]:
        found = {}
        for process in processes:
            with contextlib.suppress(psutil.Error):
                found[process] = sum(process.cpu_times()[:2])
        return found

    before = seconds()
    time.sleep(_LOOK_S)
    used = {process: after - before[process] for process, after in seconds().items()}
    return sorted(used, key=lambda process: -used[process])[:most]


def fit(frame: Any, epochs: int, verbose: int) -> Any:
    """Trains; returns the fitted model."""
    from elephant import KerasEstimator

    return KerasEstimator(
        model=synchronous_model(),
        labelCol="target",
        numWorkers=_RANKS,
        epochs=epochs,
        batchSize=BATCH,
        maxRestarts=10_000,
        verbose=verbose,
    ).fit(frame)


def await_executors(session: Any) -> None:
    """Waits until both executors are there: what was killed in a fit before, Spark has started again."""
    while True:
        listed = session.sparkContext._jsc.sc().statusStore().executorList(True)
        names = {listed.apply(place).id() for place in range(listed.size())} - {"driver"}
        if len(names) == _EXECUTORS and all(has_process(name) for name in names):
            return
        time.sleep(_LOOK_S)


def has_process(name: str) -> bool:
    """Returns whether an executor that Spark takes for alive has a process."""
    for one in session_processes():
        with contextlib.suppress(psutil.Error):
            words = one.cmdline()
            if "--executor-id" in words and words[words.index("--executor-id") + 1] == name:
                return True
    return False


def measured(kind: str, frame: Any, epochs: int, options: argparse.Namespace) -> bool:
    """Prints what the kills of a kind have cost; returns whether the weights were the same each time."""
    expected: list[np.ndarray] = fit(frame, epochs, options.verbose).model.get_weights()
    chosen, seconds, steps_again = random.Random(options.seed), list[float](), list[float]()
    parts: dict[str, list[float]] = {phase: [] for phase in _PHASES}
    equal, fits, overlapping = True, 0, 0
    while len(seconds) < options.kills and fits < options.most_fits:
        most = options.kills - len(seconds)
        # Afterwards all ranks are on one executor, and the other one has never run any.
        most = most if kind == "training" else min(most, options.executors_a_fit)
        await_executors(frame.sparkSession)
        killer = Killer(kind, options.every, most, chosen)
        killer.start()
        try:
            fitted = fit(frame, epochs, options.verbose)
        finally:
            killer.stop()
        fits += 1
        equal = equal and all(map(np.array_equal, fitted.model.get_weights(), expected))
        found = fitted.training_statistics.get("recoveries", [])
        for recovery in found:
            before = [kill for kill in killer.kills if kill <= recovery["at"]]
            if not before or "step_s" not in recovery:
                continue
            recovery = {**recovery, "noticed_s": recovery["at"] - max(before)}
            whole = recovery["resumed_at"] - max(before)
            seconds.append(whole)
            steps_again.append(recovery.get("steps_again", 0))
            for phase in _PHASES:
                parts[phase].append(recovery.get(phase, 0.0))
        overlapping += len(killer.kills) - len(found)
    if not seconds:
        raise SystemExit(f"{kind}: no fit of {fits} went on after a kill: longer ones have more --epochs")
    p95 = float(np.percentile(seconds, 95))
    report(
        Measurement(
            measure="restart",
            case={"killed": kind, "ranks": _RANKS, "kills": len(seconds), "seed": options.seed},
            ratio=p95,
            target=_TARGETS[kind],
            at_least=False,
            medians={
                "p50_s": statistics.median(seconds),
                "p95_s": p95,
                "most_s": max(seconds),
                **{phase: statistics.median(values) for phase, values in parts.items()},
                "most_steps_again": max(steps_again),
                "weights_as_expected": float(equal),
                "fits": float(fits),
                "kills_within_another_restart": float(overlapping),
            },
            repetitions=len(seconds),
        )
    )
    return equal


def main() -> None:
    """Runs the kinds in one session."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(_TARGETS), choices=list(_TARGETS))
    parser.add_argument("--kills", type=int, default=40, help="of each kind (40)")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two kills, and to the first one (8)")
    parser.add_argument("--executors-a-fit", type=int, default=1, help="killed in one fit (1)")
    parser.add_argument("--epochs", type=int, default=None, help="of each fit (1000, where executors are killed 60)")
    parser.add_argument("--most-fits", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", type=int, default=0)
    options = parser.parse_args()
    epochs = {kind: options.epochs or (1000 if kind == "training" else 60) for kind in _TARGETS}
    from elephant.cluster.local import local_session

    with tempfile.TemporaryDirectory(prefix="restarts-rows-") as name:
        write_rows(Path(name), parts=_RANKS)
        conf = {
            "spark.master": "local-cluster[2,4,1024]",
            # Spark gives up executors and tasks that are lost too often.
            "spark.deploy.maxExecutorRetries": "-1",
            "spark.task.maxFailures": "10000",
        }
        session = local_session(_EXECUTORS, conf=conf)
        try:
            frame = session.read.parquet(name)
            equal = [measured(kind, frame, epochs[kind], options) for kind in options.kinds]
            if not all(equal):
                raise SystemExit("weights differ from those of an undisturbed fit")
        finally:
            session.stop()


if __name__ == "__main__":
    main()
