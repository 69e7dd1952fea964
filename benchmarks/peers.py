"""Ways to train on a table that a Spark user could pick instead: whole programs, from their start to their end.

::

    python benchmarks/peers.py --peers FOLDER --elephas FOLDER     # environments; made when missing: some minutes
    python benchmarks/peers.py --peers FOLDER --only elephant keras torch_distributor

All read the same Parquet table, on the same cores, with the same rows per step over all workers, and train the
118k-parameter network as long. They are written as their documentation has it:

* *elephant*: `local_session` of two executors, `KerasEstimator` on the table's DataFrame;
* *keras*: one process that reads the table with pyarrow, and a ``model.fit`` that is tuned (several steps per call);
* *elephas*: `SparkModel` in synchronous mode on the table's RDD, whose workers average weights once, at the end;
* *torch_distributor*: Spark's `TorchDistributor`, whose processes read half of the table each, and train with
  DistributedDataParallel over Gloo: it has no way to hand on Spark's rows;
* *ray*: `TorchTrainer` of two workers on `ray.data`, with the same network and DistributedDataParallel.

*tabular* has ten numbers a row instead, and compares `xgboost.spark`, 100 trees, with elephant's network of 4,929
parameters. Reported are seconds from the start of the program to the end of its training, seconds until the first epoch
has ended (Elephas and XGBoost tell of their end alone), rows per second of the later epochs, the sum of what its
processes have in memory at most, with shared pages counted once, and accuracy on rows that were held out. Ratios are
elephant's seconds over those of the peer. All sessions have the same settings.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WORKERS, BATCH_SIZE = 2, 64
PIXELS, CLASSES = 784, 10
REQUIREMENTS = ("torch", "ray[train,data]", "xgboost", "pyspark==4.3.*", "pandas", "pyarrow", "scikit-learn")
# The programs of one comparison, and which environment runs each.
IMAGES = {"elephant": "own", "keras": "own", "elephas": "elephas", "torch_distributor": "peers", "ray": "peers"}
TABULAR = {"elephant_tabular": "own", "xgboost": "peers"}
# What `local_session` sets as well.
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "1024m",
    "spark.executor.extraJavaOptions": "-XX:+UseParallelGC",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.sql.shuffle.partitions": str(WORKERS),
}
_BEGAN, _MARK = "BENCHMARK_BEGAN", "BENCHMARK_MARK"
_PROGRAM_S = 1800.0
_LOOK_S = 0.25


class Clock:
    """The ends of epochs, in seconds since the program was started."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def note(self) -> None:
        """An epoch has ended."""
        self.ends.append(now())

    def callback(self) -> Any:
        """Returns a callback of Keras that notes them."""
        import keras

        return keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: self.note())


def now() -> float:
    """Returns the seconds since the program was started."""
    return time.monotonic() - float(os.environ[_BEGAN])


def say(seconds: float, ends: Sequence[float], accuracy: float) -> None:
    """Prints what a program has come to, as its last line."""
    print(json.dumps({"seconds": seconds, "ends": list(ends), "accuracy": float(accuracy)}), flush=True)


def arrays_of(files: Sequence[Path], part: int = 0, parts: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Returns features (rows, columns) and labels of Parquet files, or of each of so many parts of them in turn."""
    import pyarrow.parquet as pq

    table = pq.ParquetDataset([str(file) for file in files[part::parts]]).read()
    if "features" in table.column_names:
        column = table.column("features").combine_chunks()
        features = column.flatten().to_numpy().reshape(len(column), -1)
    else:
        features = np.stack([table.column(name).to_numpy() for name in table.column_names if name != "label"], axis=1)
    return features.astype(np.float32), table.column("label").to_numpy().astype(np.int64)


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the files to train on, and those that are held out."""
    return sorted((folder / "train").glob("*.parquet")), sorted((folder / "test").glob("*.parquet"))


def plain_session(executors: int = WORKERS) -> Any:
    """Returns a session of so many executors, as a program without elephant starts it."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local-cluster[{executors},1,1024]")
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


# The programs. Each is given the folder of the table, and a number of epochs.


def elephant(folder: Path, epochs: int) -> None:
    """elephant, on images."""
    from workloads import build_small_mlp

    _elephant(folder, epochs, build_small_mlp(), "features")


def elephant_tabular(folder: Path, epochs: int) -> None:
    """elephant, on ten columns."""
    from inference import build_for_columns

    files, _ = files_of(folder)
    _elephant(folder, epochs, build_for_columns(), [f"c{place}" for place in range(10)], batch_size=1024)


def _elephant(folder: Path, epochs: int, model: Any, features: Any, batch_size: int = BATCH_SIZE) -> None:
    from elephant import KerasEstimator
    from elephant.cluster.local import local_session

    session, clock = local_session(WORKERS), Clock()
    estimator = KerasEstimator(
        model=model,
        featuresCol=features,
        numWorkers=WORKERS,
        epochs=epochs,
        batchSize=batch_size,
        driverCallbacks=[clock.callback()],
        verbose=0,
    )
    fitted = estimator.fit(session.read.parquet(str(folder / "train")))
    seconds = now()
    x, y = arrays_of(files_of(folder)[1])
    accuracy = (fitted.model.predict(x, verbose=0).argmax(axis=1) == y).mean()
    session.stop()
    say(seconds, clock.ends, accuracy)


def keras(folder: Path, epochs: int) -> None:
    """One process of plain Keras."""
    from training import STEPS_PER_EXECUTION
    from workloads import build_small_mlp

    train, test = files_of(folder)
    (x, y), clock, model = arrays_of(train), Clock(), build_small_mlp()
    model.steps_per_execution = STEPS_PER_EXECUTION
    model.fit(x, y, batch_size=WORKERS * BATCH_SIZE, epochs=epochs, callbacks=[clock.callback()], verbose=0)
    seconds = now()
    x, y = arrays_of(test)
    say(seconds, clock.ends, (model.predict(x, verbose=0).argmax(axis=1) == y).mean())


def elephas(folder: Path, epochs: int) -> None:
    """Elephas, whose workers train for themselves, and average what they have come to."""
    from elephas.spark_model import SparkModel
    from workloads import build_small_mlp

    session, clock = plain_session(), Clock()
    frame = session.read.parquet(str(folder / "train"))
    rows = frame.rdd.map(lambda row: (np.array(row["features"], np.float32), row["label"]))
    model = SparkModel(build_small_mlp(), frequency="epoch", mode="synchronous", num_workers=WORKERS)
    model.fit(rows, epochs=epochs, batch_size=BATCH_SIZE, verbose=0, validation_split=0.0)
    # It tells of the end alone.
    clock.note()
    x, y = arrays_of(files_of(folder)[1])
    accuracy = (model.master_network.predict(x, verbose=0).argmax(axis=1) == y).mean()
    session.stop()
    say(clock.ends[-1], clock.ends, accuracy)


def torch_distributor(folder: Path, epochs: int) -> None:
    """Spark's way to PyTorch."""
    from pyspark.ml.torch.distributor import TorchDistributor

    session = plain_session()
    distributor = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=False)
    ends, state = distributor.run(_train_with_ddp, str(folder), epochs, float(os.environ[_BEGAN]))
    say(now(), ends, _torch_accuracy(state, *arrays_of(files_of(folder)[1])))
    session.stop()


def _train_with_ddp(folder: str, epochs: int, began: float) -> tuple[list[float], Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = (torch.from_numpy(array) for array in arrays_of(files_of(Path(folder))[0], rank, size))
    # All ranks take as many steps, or they would wait for each other for ever.
    count = torch.tensor(len(y))
    dist.all_reduce(count, dist.ReduceOp.MIN)
    model = DistributedDataParallel(_torch_model())
    ends = []
    for _ in _torch_epochs(model, epochs, lambda: _batches(x, y, int(count))):
        ends.append(time.monotonic() - began)
    dist.destroy_process_group()
    return ends, {name: value.numpy() for name, value in model.module.state_dict().items()}


def _batches(x: Any, y: Any, count: int) -> Any:
    import torch

    for rows in torch.randperm(len(y))[:count].split(BATCH_SIZE):
        yield x[rows], y[rows]


def _torch_model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def _torch_epochs(model: Any, epochs: int, batches: Callable[[], Any]) -> Any:
    import torch

    optimizer, loss_of = torch.optim.Adam(model.parameters(), 0.001, eps=1e-7), torch.nn.CrossEntropyLoss()
    for epoch in range(epochs):
        for features, labels in batches():
            optimizer.zero_grad()
            loss_of(model(features), labels).backward()
            optimizer.step()
        yield epoch


def _torch_accuracy(state: Mapping[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    import torch

    model = _torch_model()
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    with torch.no_grad():
        return float((model(torch.from_numpy(x)).argmax(1).numpy() == y).mean())


def ray(folder: Path, epochs: int) -> None:
    """Ray Train, on Ray Data."""
    import ray as of_ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    # Its workers hold a processor each, and its readers want some too: these are numbers, and no cores.
    of_ray.init(num_cpus=2 * WORKERS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    dataset = of_ray.data.read_parquet(str(folder / "train"))
    results = folder / "ray-results"
    trainer = TorchTrainer(
        _train_with_ray,
        train_loop_config={"epochs": epochs, "began": float(os.environ[_BEGAN]), "results": str(results)},
        datasets={"train": dataset},
        scaling_config=ScalingConfig(num_workers=WORKERS),
    )
    trainer.fit()
    seconds = now()
    with np.load(f"{results}.npz") as archive:
        state = dict(archive)
    ends = state.pop("ends").tolist()
    say(seconds, ends, _torch_accuracy(state, *arrays_of(files_of(folder)[1])))
    of_ray.shutdown()


def _train_with_ray(config: Mapping[str, Any]) -> None:
    import torch
    from ray import train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    torch.manual_seed(7)
    model, shard, ends = prepare_model(_torch_model()), train.get_dataset_shard("train"), []

    def batches() -> Any:
        rows = shard.iter_torch_batches(batch_size=BATCH_SIZE, local_shuffle_buffer_size=10_000, drop_last=True)
        for batch in rows:
            yield batch["features"].float(), batch["label"].long()

    for _ in _torch_epochs(model, config["epochs"], batches):
        ends.append(time.monotonic() - config["began"])
    if train.get_context().get_world_rank() == 0:
        state = {name: value.numpy() for name, value in model.module.state_dict().items()}
        np.savez(config["results"], ends=np.array(ends), **state)


def xgboost(folder: Path, epochs: int) -> None:
    """XGBoost on Spark, a hundred trees."""
    from pyspark.sql.functions import col
    from xgboost.spark import SparkXGBClassifier

    session, clock = plain_session(), Clock()
    train, test = (session.read.parquet(str(folder / name)) for name in ("train", "test"))
    columns = [name for name in train.columns if name != "label"]
    booster = SparkXGBClassifier(features_col=columns, label_col="label", num_workers=WORKERS, n_estimators=100)
    fitted = booster.fit(train)
    clock.note()
    accuracy = fitted.transform(test).where(col("prediction") == col("label")).count() / test.count()
    session.stop()
    say(clock.ends[-1], clock.ends, accuracy)


PROGRAMS: Mapping[str, Callable[[Path, int], None]] = {
    program.__name__: program
    for program in (elephant, keras, elephas, torch_distributor, ray, elephant_tabular, xgboost)
}


# What runs them.


class PeakMemory:
    """The most memory that all processes of a program have together, as long as the block runs."""

    def __init__(self, mark: str) -> None:
        self._entry = f"{_MARK}={mark}".encode()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.mib = 0.0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.mib = max(self.mib, sum(map(self._share, Path("/proc").glob("[0-9]*"))) / 1024)

    def _share(self, process: Path) -> int:
        """Returns what a process of the program has, in KiB, of shared pages its part; nothing of other processes."""
        try:
            if self._entry not in (process / "environ").read_bytes().split(b"\0"):
                return 0
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def run(name: str, python: Path, folder: Path, epochs: int, rows: int) -> dict[str, float]:
    """Runs a program; returns its figures by name."""
    from elephant.cluster.local import ensure_java

    ensure_java()
    mark, began = uuid.uuid4().hex, time.monotonic()
    variables = {**os.environ, _BEGAN: str(began), _MARK: mark, "PYSPARK_PYTHON": str(python), "PYTHONUNBUFFERED": "1"}
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "SPARK_LOCAL_IP": "127.0.0.1"}
    # What executors import of this file they find beside it; packages of one environment are not for another.
    variables["PYTHONPATH"] = str(Path(__file__).resolve().parent)
    command = [str(python), __file__, "--as", name, str(folder), "--epochs", str(epochs)]
    with PeakMemory(mark) as memory, tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, env=variables, timeout=_PROGRAM_S)
        if done.returncode:
            errors.seek(0)
            raise SystemExit(f"{name}: expected a program that ends well. Received:\n{errors.read()[-3000:]}")
    # Threads of some print when it is over.
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith('{"')]
    if not lines:
        raise SystemExit(f"{name}: expected a line of JSON. Received:\n{done.stdout.decode()[-3000:]}")
    said = json.loads(lines[-1])
    ends = said["ends"]
    later = {"rows_per_s": rows * (len(ends) - 1) / (ends[-1] - ends[0])} if len(ends) > 1 else {}
    return {
        "seconds": said["seconds"],
        "first_s": ends[0],
        "memory_mib": memory.mib,
        "accuracy": said["accuracy"],
        **later,
    }


def environment(folder: Path | None) -> Path | None:
    """Returns the Python of an environment with the peers, which is made first where there is none."""
    if folder is None:
        return None
    python, finished = folder / "bin" / "python", folder / "peers-are-installed"
    if not finished.exists():
        print(f"installing {' '.join(REQUIREMENTS)} into {folder}: some minutes", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=False)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True, stdout=sys.stderr)
        finished.touch()
    return python


def measure(programs: Mapping[str, Path], folder: Path, epochs: int, rows: int, options: argparse.Namespace) -> None:
    """Runs programs in turns, and prints how the first one stands to each of the others."""
    from report import Measurement, median_ratio, report

    turns = [
        {name: run(name, python, folder, epochs, rows) for name, python in programs.items()}
        for _ in range(options.repetitions)
    ]
    first = next(iter(programs))
    for name in programs:
        figures = {
            f"{side}_{what}": statistics.median(turn[side][what] for turn in turns)
            for side in dict.fromkeys((first, name))
            for what in turns[0][side]
        }
        ratio = median_ratio([turn[first]["seconds"] for turn in turns], [turn[name]["seconds"] for turn in turns])
        case = {"peer": name, "rows": rows, "epochs": epochs, "workers": WORKERS}
        report(
            Measurement(
                measure="program_against_peer",
                case=case,
                ratio=ratio,
                target=None,
                at_least=False,
                medians=figures,
                repetitions=options.repetitions,
            )
        )


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="environment with PyTorch, Ray and XGBoost")
    parser.add_argument("--elephas", type=Path, metavar="FOLDER", help="environment with Elephas")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--epochs", type=int, default=5, help="passes over the rows (5)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each program (3)")
    parser.add_argument("--as", nargs=2, dest="program", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program is not None:
        PROGRAMS[options.program[0]](Path(options.program[1]), options.epochs)
        return
    import elephas_peer
    from fit import write_parquet
    from inference import make_columns, write_columns
    from workloads import make_images

    pythons = {
        "own": Path(sys.executable),
        "peers": environment(options.peers),
        "elephas": None if options.elephas is None else elephas_peer.environment(options.elephas),
    }
    kinds = ((IMAGES, make_images, write_parquet, 60_000), (TABULAR, make_columns, write_columns, 500_000))
    for kind, make, write, rows in kinds:
        programs = {name: pythons[of] for name, of in kind.items() if name in options.only and pythons[of] is not None}
        if programs:
            with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
                folder, made = Path(name), make(rows + 10_000)
                for part, places in {"train": slice(0, rows), "test": slice(rows, None)}.items():
                    (folder / part).mkdir()
                    chosen = {of: values[places] for of, values in made.items() if of.endswith("_train")}
                    write(chosen, folder / part, WORKERS)
                measure(programs, folder, options.epochs, rows, options)


if __name__ == "__main__":
    main()
