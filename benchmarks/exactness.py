"""Weights after passes over a table whose rows do not divide by the workers, against one process in float64.

::

    python benchmarks/exactness.py --peers FOLDER     # the environment of peers.py; made when missing: some minutes
    python benchmarks/exactness.py                    # without the peers

Four workers, one full batch a pass, plain gradient descent: nothing but the rows that count, and how much each of them
does, makes a difference. The table has 1,797 handwritten digits in four Parquet files of 700, 600, 400 and 97 rows. The
network has 2,410 parameters, and all begin with the same ones. The right weights come from numpy, in float64. The
programs are written as documentation has it:

* *keras*: one process, ``model.fit`` on all rows;
* *elephant*: `KerasEstimator` on the DataFrame of the files;
* *sampler*: Spark's `TorchDistributor`, DistributedDataParallel, and PyTorch's `DistributedSampler`, which gives each
  process as many rows, and some rows twice;
* *files*: the same where each process reads a file of its own, as with one partition each: DistributedDataParallel
  weights them alike;
* *ray*: Ray Train on `ray.data`, which gives each worker as many rows, and leaves some out.

Prints a line of JSON each: the largest difference of a weight over the largest weight, and how many rows a pass
counted. Elephas is not here: its workers take steps of their own, and leave out partitions that are not larger than a
batch, so that there is no one process that they should be equal to.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pyarrow as pa
import pyarrow.parquet as pq

WORKERS, PARTS = 4, (700, 600, 400, 97)
_UNITS, _RATE = (64, 32, 10), 0.5
_PROGRAM_S = 600.0

Weights = list[np.ndarray]


def first_weights() -> Weights:
    """Returns the kernels and biases that all begin with, in Keras' order and shapes."""
    rng, weights = np.random.default_rng(5), []
    for inputs, outputs in itertools.pairwise(_UNITS):
        weights += [rng.normal(0, inputs**-0.5, (inputs, outputs)).astype(np.float32), np.zeros(outputs, np.float32)]
    return weights


def descended(x: np.ndarray, y: np.ndarray, passes: int) -> Weights:
    """Returns the weights of one process in float64: full-batch gradient descent on the mean cross-entropy."""
    kernel, bias, out_kernel, out_bias = (each.astype(np.float64) for each in first_weights())
    x, wanted = x.astype(np.float64), np.eye(_UNITS[-1])[y]
    for _ in range(passes):
        hidden = np.tanh(x @ kernel + bias)
        scores = hidden @ out_kernel + out_bias
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        error = (chances - wanted) / len(x)
        back = (error @ out_kernel.T) * (1 - hidden**2)
        out_kernel -= _RATE * hidden.T @ error
        out_bias -= _RATE * error.sum(axis=0)
        kernel -= _RATE * x.T @ back
        bias -= _RATE * back.sum(axis=0)
    return [kernel, bias, out_kernel, out_bias]


def difference(weights: Weights, right: Weights) -> float:
    """Returns the largest difference of a weight over the largest weight."""
    largest = max(np.abs(each).max() for each in right)
    return float(max(np.abs(one - other).max() for one, other in zip(weights, right, strict=True)) / largest)


# The programs. Each gets the folder of the files and a number of passes; returns the weights, and the rows of a pass.


def keras(folder: Path, passes: int) -> tuple[Weights, int]:
    """One process of plain Keras."""
    x, y = peers.arrays_of(peers.files_of(folder)[0])
    model = _keras_model()
    model.fit(x, y, batch_size=len(x), epochs=passes, shuffle=False, verbose=0)
    return model.get_weights(), len(x)


def elephant(folder: Path, passes: int) -> tuple[Weights, int]:
    """elephant, on the files' DataFrame."""
    from elephant import KerasEstimator
    from elephant.cluster.local import local_session

    session = local_session(WORKERS)
    estimator = KerasEstimator(model=_keras_model(), numWorkers=WORKERS, epochs=passes, batchSize=max(PARTS), verbose=0)
    fitted = estimator.fit(session.read.parquet(str(folder / "train")))
    rows = sum(rank["rows"] for rank in fitted.summary.by_rank) // passes
    session.stop()
    return fitted.model.get_weights(), rows


def _keras_model() -> Any:
    import keras

    layers = [
        keras.Input((_UNITS[0],)),
        keras.layers.Dense(_UNITS[1], "tanh"),
        keras.layers.Dense(_UNITS[2], "softmax"),
    ]
    model = keras.Sequential(layers)
    model.set_weights(first_weights())
    model.compile(keras.optimizers.SGD(_RATE), "sparse_categorical_crossentropy")
    return model


def sampler(folder: Path, passes: int) -> tuple[Weights, int]:
    """DistributedDataParallel with PyTorch's sampler."""
    return _distributed(folder, passes, _sampled_batches)


def files(folder: Path, passes: int) -> tuple[Weights, int]:
    """DistributedDataParallel, a file a process."""
    return _distributed(folder, passes, _own_batches)


def ray(folder: Path, passes: int) -> tuple[Weights, int]:
    """Ray Train on Ray Data."""
    import ray as of_ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    of_ray.init(num_cpus=2 * WORKERS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    trainer = TorchTrainer(
        _train_with_ray,
        train_loop_config={"passes": passes, "results": str(folder)},
        datasets={"train": of_ray.data.read_parquet(str(folder / "train"))},
        scaling_config=ScalingConfig(num_workers=WORKERS),
    )
    trainer.fit()
    of_ray.shutdown()
    with np.load(folder / "rank-0.npz") as archive:
        weights = [archive[f"arr_{place}"] for place in range(4)]
    return weights, sum(int(path.read_text()) for path in folder.glob("rows-*"))


def _train_with_ray(config: Mapping[str, Any]) -> None:
    from ray import train
    from ray.train.torch import prepare_model

    shard, rank = train.get_dataset_shard("train"), train.get_context().get_world_rank()

    def batches(_: int) -> Any:
        for batch in shard.iter_torch_batches(batch_size=sum(PARTS)):
            yield batch["features"].float(), batch["label"].long()

    weights, rows = _torch_passes(prepare_model(_torch_model()), config["passes"], batches)
    folder = Path(config["results"])
    (folder / f"rows-{rank}").write_text(str(rows))
    if rank == 0:
        np.savez(folder / "rank-0.npz", *weights)


def _distributed(folder: Path, passes: int, batches_of: Callable[..., Any]) -> tuple[Weights, int]:
    from pyspark.ml.torch.distributor import TorchDistributor

    session = peers.plain_session(WORKERS)
    distributor = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=False)
    weights, rows = distributor.run(_train_with_ddp, str(folder), passes, batches_of)
    session.stop()
    return weights, rows


def _train_with_ddp(folder: str, passes: int, batches_of: Callable[..., Any]) -> tuple[Weights, int]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = batches_of(peers.files_of(Path(folder))[0], dist.get_rank(), dist.get_world_size())
    weights, rows = _torch_passes(DistributedDataParallel(_torch_model()), passes, batches)
    total = torch.tensor(rows)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return weights, int(total)


def _sampled_batches(paths: Sequence[Path], rank: int, size: int) -> Callable[[int], Any]:
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rows = TensorDataset(*map(torch.from_numpy, peers.arrays_of(paths)))
    chosen = DistributedSampler(rows, size, rank)

    def batches(number: int) -> Any:
        chosen.set_epoch(number)
        return DataLoader(rows, batch_size=sum(PARTS), sampler=chosen)

    return batches


def _own_batches(paths: Sequence[Path], rank: int, size: int) -> Callable[[int], Any]:
    import torch

    x, y = map(torch.from_numpy, peers.arrays_of(paths, rank, size))
    return lambda _: [(x, y)]


def _torch_model() -> Any:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(*_UNITS[:2]), nn.Tanh(), nn.Linear(*_UNITS[1:]))
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), first_weights(), strict=True):
            parameter.copy_(torch.from_numpy(values.T))
    return model


def _torch_passes(model: Any, passes: int, batches: Callable[[int], Any]) -> tuple[Weights, int]:
    """Trains; returns the weights in Keras' shapes, and the rows of this process in a pass."""
    import torch

    optimizer, loss_of, rows = torch.optim.SGD(model.parameters(), _RATE), torch.nn.CrossEntropyLoss(), 0
    for number in range(passes):
        rows = 0
        for features, labels in batches(number):
            optimizer.zero_grad()
            loss_of(model(features), labels).backward()
            optimizer.step()
            rows += len(labels)
    return [parameter.detach().numpy().T for parameter in model.module.parameters()], rows


PROGRAMS: Mapping[str, Callable[[Path, int], tuple[Weights, int]]] = {
    program.__name__: program for program in (keras, elephant, sampler, files, ray)
}
_OF_PEERS = ("sampler", "files", "ray")


def run(name: str, python: Path, folder: Path, passes: int) -> tuple[Weights, int]:
    """Runs a program in its environment; returns what it returns."""
    from elephant.cluster.local import ensure_java

    ensure_java()
    variables = {**os.environ, "PYSPARK_PYTHON": str(python), "PYTHONPATH": str(Path(__file__).resolve().parent)}
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [str(python), __file__, "--as", name, str(folder), "--passes", str(passes)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=_PROGRAM_S)
    if done.returncode:
        raise SystemExit(f"{name}: expected a program that ends well. Received:\n{done.stderr[-3000:]}")
    with np.load(folder / f"{name}.npz") as archive:
        return [archive[f"arr_{place}"] for place in range(4)], int(archive["rows"])


def write_table(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Writes the digits as files of so many rows; returns features and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)
    ends = np.cumsum(PARTS)
    (folder / "train").mkdir()
    for number, (begin, end) in enumerate(itertools.pairwise((0, *ends))):
        columns = {"features": pa.array(list(images[begin:end])), "label": labels[begin:end]}
        pq.write_table(pa.table(columns), folder / "train" / f"part-{number}.parquet")
    return images, labels


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="environment with PyTorch and Ray")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--passes", type=int, default=20, help="over the rows (20)")
    # One figure a program comes of rounding and rows, not of time: a repetition would give it again.
    parser.add_argument("--repetitions", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--as", nargs=2, dest="program", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program is not None:
        name, folder = options.program[0], Path(options.program[1])
        weights, rows = PROGRAMS[name](folder, options.passes)
        np.savez(folder / f"{name}.npz", *weights, rows=rows)
        return
    from report import Measurement, report

    other = peers.environment(options.peers)
    with tempfile.TemporaryDirectory(prefix="elephant-benchmark-") as name:
        folder = Path(name)
        x, y = write_table(folder)
        right = descended(x, y, options.passes)
        for program in options.only:
            python = other if program in _OF_PEERS else Path(sys.executable)
            if python is None:
                continue
            weights, rows = run(program, python, folder, options.passes)
            case = {
                "program": program,
                "workers": 1 if program == "keras" else WORKERS,
                "rows": len(x),
                "counted": rows,
            }
            report(
                Measurement(
                    measure="difference_from_one_process",
                    case={**case, "passes": options.passes},
                    ratio=difference(weights, right),
                    target=1e-5 if program in ("keras", "elephant") else None,
                    at_least=False,
                    medians={},
                    repetitions=1,
                )
            )


if __name__ == "__main__":
    main()
