"""What strangers cost a fit: thousands of connections of eight kinds at each of its ports, while it trains.

::

    python benchmarks/hostile.py                                       # all fits, five pairs: one and a half hours
    python benchmarks/hostile.py --fits synchronous tables --pairs 2 --connections 2000

A fit on Spark executors of this machine runs alone, and then with strangers, pair by pair. Strangers are a process of
their own, which connects to each port that the fit listens on: the driver's channel or that of the coordinator beside
rank 0, the ranks' ports, those of their tables and of gossip, and those of parameter servers. They say nothing,
garbage, a byte now and then, half a handshake, a recorded proof, a proof of another token, or a frame of all lengths
that there are; or they reset the connection (``tests/support/strangers.py``). Their connections are spread over the
seconds of the fit that ran alone. Their work is on the same processors, so that the ratio of times is above that of
strangers elsewhere.

* ``synchronous``: two workers.
* ``asynchronous``: two workers, and servers beside the driver. It adds its pushes in another order each time.
* ``gossip``: two workers that exchange weights. What a step adds is exact, and their halves of it are rounded.
* ``tables``: two workers, each with a half of a ``ShardedEmbedding``.
* ``coordinator``: two workers, and the coordinator beside rank 0.
* ``servers``: one worker, and a server on an executor. What a step adds is exact, in any order.

Prints one line of JSON per pair: seconds between the first step and the end of training, alone and with strangers; how
many connections were made; how far the weights of both are apart (zero where neither order nor halves matter);
descriptors and memory (MB) of the driver, ranks and servers before the strangers, and at their end. Then a line per fit
with the median of the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from process_tree import processes_of
from spark_frames import partitioned_frame
from strangers import listening_addresses

if TYPE_CHECKING:
    from keras import Model
    from keras.callbacks import Callback
    from pyspark.sql import DataFrame, SparkSession

_STRANGERS = Path(__file__).resolve().parent.parent / "tests" / "support" / "strangers.py"
ROWS, FEATURES, BATCH = 8192, 64, 64
_COORDINATOR = "spark.elephant.coordinator"
_PROGRAMS = ("rank", "parameter_server", "driver.coordinator_process")


@dataclass
class Use:
    """What a process holds: descriptors, and resident memory in MB."""

    descriptors: int
    memory_mb: float

    @classmethod
    def of(cls, process: psutil.Process) -> Use:
        """Returns what a process holds now."""
        return cls(process.num_fds(), round(process.memory_info().rss / 1e6, 1))


@dataclass
class Outcome:
    """One fit, and the strangers at its ports."""

    seconds: float = 0.0
    ports: int = 0
    connections: int = 0
    before: dict[str, Use] = field(default_factory=dict)
    after: dict[str, Use] = field(default_factory=dict)
    weights: list[np.ndarray] = field(default_factory=list)


def telling_of_steps(folder: str) -> Callback:
    """Returns a callback that says in files when a worker has made its first step, and when it has ended its last."""
    import keras

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            import os

            path = f"{folder}/{os.getpid()}"
            if not os.path.exists(path):
                open(path, "w").close()

        def on_train_end(self, logs: Any = None) -> None:
            import os

            open(f"{folder}/{os.getpid()}.ended", "w").close()

    return Steps()


def perceptron() -> Model:
    """Returns a model whose step takes some milliseconds."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((FEATURES,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.001), "mse")
    return model


def counting() -> Model:
    """Returns a model whose weights are exact sums, as of `tests/support/counting_model.py`."""
    import keras

    layers = [keras.layers.Input((FEATURES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.25), "mae")
    return model


def with_table() -> Model:
    """Returns a model that looks rows of a table up."""
    import keras

    from elephant import ShardedEmbedding

    keras.utils.set_random_seed(0)
    ids = keras.Input((FEATURES,))
    rows = ShardedEmbedding(1000, 16, name="rows")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(rows)))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


@dataclass(frozen=True)
class Case:
    """One fit: its model, options and setting, and the rows that its model learns of."""

    model: Callable[[], Model]
    options: dict[str, Any] = field(default_factory=dict)
    coordinator: str = "driver"

    @property
    def workers(self) -> int:
        """How many train: a server on an executor takes the place of one."""
        return 1 if "serverPlacement" in self.options else 2

    def frame(self, session: SparkSession) -> DataFrame:
        """Returns rows in two partitions of the same length, kept in memory: all batches are full."""
        rng = np.random.default_rng(0)
        shape = (ROWS, FEATURES)
        if self.model is perceptron:
            x = rng.normal(size=shape)
            labels = x[:, :4].sum(axis=1)
        elif self.model is counting:
            x, labels = rng.integers(-8, 9, shape).astype(np.float64), np.full(ROWS, -1e9)
        else:
            x, labels = rng.integers(0, 1000, shape).astype(np.float64), rng.normal(size=ROWS)
        rows = [(features.tolist(), float(label)) for features, label in zip(x, labels, strict=True)]
        halves = [rows[: ROWS // 2], rows[ROWS // 2 :]]
        frame = partitioned_frame(session, halves, "features array<double>, label double").cache()
        frame.count()
        return frame


CASES = {
    "synchronous": Case(perceptron),
    "asynchronous": Case(perceptron, {"mode": "asynchronous"}),
    "gossip": Case(counting, {"mode": "gossip"}),
    "tables": Case(with_table),
    "coordinator": Case(perceptron, coordinator="executors"),
    "servers": Case(counting, {"mode": "asynchronous", "serverPlacement": "executors"}),
}


def fit(frame: DataFrame, case: Case, epochs: int, connections: int, spread_s: float) -> Outcome:
    """Fits, and has strangers come as soon as all workers have made a step; none where there are to be none."""
    from elephant import KerasEstimator

    outcome, known = Outcome(), set(listening_addresses([os.getpid()]))
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (outcome, Path(folder), case.workers, known, ended, connections, spread_s)
        watcher = threading.Thread(target=_watch, args=arguments, name="watch")
        watcher.start()
        try:
            fitted = KerasEstimator(
                model=case.model(), numWorkers=case.workers, epochs=epochs, batchSize=BATCH, verbose=0, seed=1,
                callbacks=[telling_of_steps(folder)], **case.options,
            ).fit(frame)  # fmt: skip
        finally:
            ended.set()
            watcher.join()
        times = {path.name: path.stat().st_mtime for path in Path(folder).iterdir()}
    begun = min(when for name, when in times.items() if not name.endswith("ended"))
    outcome.seconds = max(times.values()) - begun
    outcome.weights = fitted.model.get_weights()
    return outcome


def _watch(
    outcome: Outcome,
    folder: Path,
    workers: int,
    known: set[Any],
    ended: threading.Event,
    connections: int,
    spread_s: float,
) -> None:
    while len(list(folder.iterdir())) < workers and not ended.wait(0.02):
        pass
    processes = {"driver": psutil.Process()}
    for name in _PROGRAMS:
        for place, process in enumerate(processes_of(f"elephant.{name}")):
            processes[f"{name} {place}"] = process
    addresses = sorted(set(listening_addresses([one.pid for one in processes.values()])) - known)
    outcome.ports = len(addresses)
    outcome.before = {name: Use.of(process) for name, process in processes.items()}
    if not connections:
        return
    command = [sys.executable, str(_STRANGERS), str(connections), str(spread_s)]
    attacking = subprocess.Popen(
        [*command, *(f"{host}:{port}" for host, port in addresses)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not ended.is_set() and not any(path.name.endswith("ended") for path in folder.iterdir()):
        with contextlib.suppress(psutil.Error):
            held = {name: Use.of(process) for name, process in processes.items()}
            # One that is ending holds nothing any more.
            outcome.after = held if all(use.descriptors for use in held.values()) else outcome.after
        ended.wait(0.2)
    # Its input ends, and it tells how many there were.
    outcome.connections = int(attacking.communicate()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--connections", type=int, default=10_000, help="of strangers, to each port")
    parser.add_argument("--epochs", type=int, default=150)
    options = parser.parse_args()
    from elephant.cluster.local import local_session

    session = local_session(2, conf={"spark.sql.shuffle.partitions": "2"})
    for name in options.fits:
        case, ratios = CASES[name], []
        frame = case.frame(session)
        session.conf.set(_COORDINATOR, case.coordinator)
        fit(frame, case, 1, 0, 0.0)
        for pair in range(options.pairs):
            alone = fit(frame, case, options.epochs, 0, 0.0)
            attacked = fit(frame, case, options.epochs, options.connections, 0.8 * alone.seconds)
            ratios.append(attacked.seconds / alone.seconds)
            apart = max(float(np.abs(a - b).max()) for a, b in zip(alone.weights, attacked.weights, strict=True))
            told = {key: value for key, value in asdict(attacked).items() if key not in ("weights", "seconds")}
            times = {"alone_s": round(alone.seconds, 2), "hostile_s": round(attacked.seconds, 2)}
            line = {"fit": name, "pair": pair, **times, "ratio": round(ratios[-1], 3), "weights_apart": apart, **told}
            print(json.dumps(line), flush=True)
        print(json.dumps({"fit": name, "median_ratio": round(statistics.median(ratios), 3)}), flush=True)
    session.stop()


if __name__ == "__main__":
    main()
