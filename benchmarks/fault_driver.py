"""The driver of `faults.py`: each line of its standard input is a run to do, each ``ANSWER`` line says how it ended.

A process of its own, because some faults are its end, and because it may live in another network namespace.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from exact_fits import BATCH, counting_model, synchronous_model
from fault_table import EPOCHS, EXECUTORS, RANKS, RUN_STEPS, STEPS

from elephant import KerasEstimator
from elephant.cluster.executors import running_executors

_EXECUTORS_S = 90.0


def gate(order: dict[str, Any]) -> Any:
    """Returns a callback that waits at the moment for a file ``go``, and leaves a mark at each process' first step.

    Marks are named after the process, and its Spark task's. It waits in the first processes alone: later ones find the
    file. Steps last longer from there on, until another process has made one.
    """
    import keras

    folder, moment, pause_s, memory_bytes = (order[name] for name in ("folder", "moment", "pause_s", "memory_bytes"))
    half, ranks = STEPS // 2, RANKS
    # The driver's callbacks see the ends of an asynchronous fit; its workers see the last step before.
    sees_ends = order["mode"] != "asynchronous"
    ends = {} if sees_ends else {"epoch-end": (1, STEPS - 1), "fit-end": (EPOCHS - 1, STEPS - 1)}

    class Gate(keras.callbacks.Callback):  # type: ignore[misc]
        epoch, stepped = 0, False

        def wait(self) -> None:
            go = os.path.join(folder, "go")
            if not os.path.exists(go):
                self.mark("waits")
            while not os.path.exists(go):
                time.sleep(0.01)

        def mark(self, kind: str) -> None:
            task = os.environ["ELEPHANT_TASK_PROCESS"].split()[0]
            with open(os.path.join(folder, kind, f"{os.getpid()}-{task}"), "w"):
                pass

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if (moment, self.epoch, batch) in (("first-step", 0, 0), ("mid-epoch", 1, half)):
                self.wait()
            if memory_bytes and os.path.exists(os.path.join(folder, "go")):
                np.ones(memory_bytes, np.uint8)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self.stepped:
                self.stepped = True
                self.mark("steps")
            if os.path.exists(os.path.join(folder, "go")) and len(os.listdir(os.path.join(folder, "steps"))) <= ranks:
                time.sleep(pause_s)
            if ends.get(moment) == (self.epoch, batch):
                self.wait()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if sees_ends and moment == "epoch-end" and epoch == 1:
                self.wait()

        def on_train_end(self, logs: Any = None) -> None:
            if sees_ends and moment == "fit-end":
                self.wait()

    return Gate()


def rows_behind_gate(rows: Any, folder: str) -> Any:
    """Returns rows that come when there is a file ``go``; the driver's one question before a fit is answered."""

    def after_gate(batches: Any) -> Any:
        try:
            os.close(os.open(os.path.join(folder, "asked"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.02)
        yield from batches

    return rows.mapInArrow(after_gate, rows.schema)


def sums_behind_gate(order: dict[str, Any]) -> float:
    """Adds up in every rank; waits at the moment as `gate` does."""
    import elephant

    folder, moment, pause_s, memory_bytes = (order[name] for name in ("folder", "moment", "pause_s", "memory_bytes"))
    at = {"first-step": 0, "mid-epoch": RUN_STEPS // 2, "fit-end": RUN_STEPS}.get(moment, -1)
    total = np.zeros(100, np.float32)
    name = f"{os.getpid()}-{os.environ['ELEPHANT_TASK_PROCESS'].split()[0]}"
    for step in range(RUN_STEPS + 1):
        if step == at:
            with open(os.path.join(folder, "waits", name), "w"):
                pass
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.01)
        if step < RUN_STEPS:
            if memory_bytes and os.path.exists(os.path.join(folder, "go")):
                np.ones(memory_bytes, np.uint8)
            total += elephant.collective.allreduce(np.full(100, elephant.collective.rank() + 1, np.float32))
            time.sleep(pause_s)
    return float(total[0])


def carry_out(session: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Does one run; returns its weights, or its error."""
    import elephant
    from elephant.config import Timeouts

    deadline = time.monotonic() + _EXECUTORS_S
    while len(running_executors(session)) < order["executors"] and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"BEGINS {order}", file=sys.stderr, flush=True)
    try:
        if order["mode"] == "run":
            timeouts = Timeouts(**order["timeouts"])
            totals = elephant.run(
                sums_behind_gate, (order,), num_workers=RANKS, spark=session, verbose=0, timeouts=timeouts
            )
            return {"weights": [totals], "statistics": {}}
        rows = session.read.parquet(order["rows"])
        if order["moment"] == "meeting":
            rows = rows_behind_gate(rows, order["folder"])
        counts = order["mode"] == "asynchronous"
        fitted = KerasEstimator(
            model=counting_model() if counts else synchronous_model(),
            labelCol="label" if counts else "target",
            mode="asynchronous" if counts else "synchronous",
            numWorkers=RANKS,
            epochs=EPOCHS,
            batchSize=BATCH,
            maxRestarts=2 if order["mode"] == "restarts" else 0,
            callbacks=[gate(order)],
            timeouts=order["timeouts"],
            verbose=2,
            **({"snapshotSeconds": 0.3} if counts else {}),
        ).fit(rows)
    except Exception as error:
        known = {name: getattr(error, name, None) for name in ("rank", "host", "executor", "step")}
        return {"error": str(error), "class": type(error).__name__, **known}
    statistics = fitted.training_statistics
    counted = {name: value for name, value in statistics.items() if isinstance(value, int | float)}
    recoveries = statistics.get("recoveries", [])
    return {
        "weights": [weight.tolist() for weight in fitted.model.get_weights()],
        "statistics": counted,
        "resumed_at": [one["resumed_at"] for one in recoveries if "resumed_at" in one],
    }


def make_session(local_folder: str) -> Any:
    """Returns a session of the cluster that the environment names, or of executors of this machine."""
    if "SPARK_CONF_DIR" in os.environ:
        from pyspark.sql import SparkSession

        return SparkSession.builder.getOrCreate()
    from elephant.cluster.local import local_session

    conf = {
        "spark.local.dir": local_folder,
        "spark.deploy.maxExecutorRetries": "-1",
        # Spark gives up an executor that it does not hear in seconds; its defaults are made of minutes.
        "spark.executor.heartbeatInterval": "2s",
        "spark.storage.blockManagerHeartbeatTimeoutMs": "12s",
        "spark.network.timeoutInterval": "2s",
    }
    return local_session(EXECUTORS, conf=conf)


def main() -> None:
    """Serves until its standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    session = make_session(sys.argv[1])
    session.sparkContext.parallelize(range(EXECUTORS), EXECUTORS).map(str).collect()
    _answer({"ready": True, "temporary": tempfile.gettempdir()})
    for line in sys.stdin:
        _answer(carry_out(session, json.loads(line)))
    session.stop()


def _answer(value: dict[str, Any]) -> None:
    # In a file of its own there is no line of others in between.
    with open(Path(sys.argv[2]), "a", encoding="utf-8") as file:
        file.write(json.dumps({**value, "at": time.time()}) + "\n")


if __name__ == "__main__":
    main()
