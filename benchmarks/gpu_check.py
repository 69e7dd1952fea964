"""A check of this machine's GPUs, without Spark and network: ``make gpu-check``.

It needs Keras, one of its backends, and cloudpickle or PySpark. Its ranks are real processes, which share one device.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from elephant.backends import BACKENDS
from elephant.backends.gradient_averager import GradientAverager
from elephant.cluster.gpu_plan import HOSTS, ResourcePlan
from elephant.collective.api import current_collective
from elephant.config import FitConfig, Timeouts
from elephant.driver.launcher import LocalLauncher
from elephant.driver.run import function_spec, pickled_call, unpickled
from elephant.driver.run_ranks import attempt_here, results_of, run_ranks
from elephant.errors import WorkerFailure
from elephant.monitor.progress import Progress
from elephant.task.gpu_devices import Device, devices_of_task, host_gpus, listed_devices
from elephant.testing import fit_local, run_local

OK, MISS, SKIPPED = "ok", "MISS", "skipped"
TOLERANCE, GROWTH_MIB = 1e-4, 2048
# Nine rows in batches of four: 4 + 1 rows of rank 0, and 4 rows of rank 1, which is idle in the second step.
ROWS, BATCH, EPOCHS = 9, 4, 3
# TensorFloat-32 rounds to ten bits. PyTorch leaves it out of products by itself.
_EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}

_NCCL = "NCCL against the host path"


@dataclass(frozen=True)
class Row:
    """Outcome of one check."""

    name: str
    expected: str
    received: str
    status: str


def network(width: int = 16, inputs: int = 6) -> Any:
    """Returns a compiled network with the same weights in every process, on every device."""
    import keras

    layers = [keras.layers.Dense(width, "tanh"), keras.layers.Dense(width, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((inputs,)), *layers])
    random = np.random.default_rng(1)
    model.set_weights([0.1 * random.normal(size=weight.shape) for weight in model.weights])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def rows_of(count: int, inputs: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and labels."""
    x = np.random.default_rng(2).normal(size=(count, inputs)).astype("float32")
    return x, x.sum(axis=1)


def trained_alone() -> list[np.ndarray]:
    """Returns the weights of one process that trains on the steps of two ranks."""
    x, y = rows_of(ROWS)
    model = network()
    for _ in range(EPOCHS):
        for places in ([0, 1, 2, 3, 5, 6, 7, 8], [4]):
            model.train_on_batch(x[places], y[places])
    return [np.asarray(weight) for weight in model.get_weights()]


def seen_devices() -> tuple[str, bool, int]:
    """Returns the device of this rank as CUDA has it, whether the framework sees one, and the MiB it has taken."""
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    before = used_mib(visible)
    import keras

    from elephant.backends import current

    keras.ops.convert_to_numpy(keras.ops.ones((8, 8)) @ keras.ops.ones((8, 8)))
    return visible, bool(current().sees_gpu()), used_mib(visible) - before


def used_mib(device: str) -> int:
    """Returns the memory of a device that is in use."""
    query = ["nvidia-smi", "-i", device, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0])


def overflowed() -> tuple[int, float]:
    """Returns the applied steps and the loss scale of this rank; rank 1 overflows in the second step."""
    import keras

    import elephant

    keras.config.set_dtype_policy("mixed_float16")
    model = network()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**12)
    elephant.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse")
    x, y = rows_of(BATCH)
    for step in range(4):
        model.train_on_batch(x, y + 6e4 * (step == 1 and elephant.collective.rank() == 1))
    applied = keras.ops.convert_to_numpy(optimizer.inner_optimizer.iterations)
    return int(applied), float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))


def allocate_too_much() -> None:
    """Allocates 1 PiB on rank 1."""
    import keras

    from elephant import collective

    if collective.rank() == 1:
        keras.ops.convert_to_numpy(keras.ops.ones((2**24, 2**24)))
    collective.barrier()


def timed_steps(width: int, steps: int = 20) -> tuple[int, float]:
    """Returns the parameters of a network and the median milliseconds of a step."""
    import keras

    import elephant

    model = network(width)
    elephant.DistributedOptimizer(model.optimizer)
    x, y = rows_of(32)
    times = []
    for _ in range(steps + 3):
        began = time.perf_counter()
        model.train_on_batch(x, y)
        keras.ops.convert_to_numpy(model.trainable_variables[-1])
        times.append(time.perf_counter() - began)
    return model.count_params(), 1e3 * float(np.median(times[3:]))


def on_devices_and_host(width: int, steps: int = 20) -> tuple[float, float, float]:
    """Returns how far sums on devices are from those on the host, and milliseconds of a step of each."""
    import keras

    from elephant.backends import current
    from elephant.backends.device_reducer import DeviceReducer

    collective = current_collective()
    rank, size = collective.rank, collective.world_size
    config = FitConfig(num_workers=size, gpu_transport="nccl")
    current().join_devices(collective, config, "127.0.0.1")
    averager = GradientAverager(collective, lambda: 2 * (rank + 1) / (size * (size + 1)))
    current().reduce_on_devices(averager, config)
    reducer = averager.kernel
    if not isinstance(reducer, DeviceReducer):
        raise TypeError(f"expected gradients to be reduced on devices. Received: {reducer!r}.")
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in ((width, width), (width,))]
    random = np.random.default_rng(rank)
    gradients = [keras.ops.convert_to_tensor(random.normal(size=one.shape).astype("float32")) for one in variables]

    def on_devices() -> list[Any]:
        return reducer.average(gradients, variables)

    def through_host() -> list[Any]:
        averages = averager.average(0, list(map(keras.ops.convert_to_numpy, gradients)), variables)
        return list(map(keras.ops.convert_to_tensor, averages))

    def timed(average: Callable[[], list[Any]]) -> float:
        times = []
        for _ in range(steps + 3):
            began = time.perf_counter()
            # A few bytes, for which the device has to be done.
            keras.ops.convert_to_numpy(average()[-1])
            times.append(time.perf_counter() - began)
        return 1e3 * float(np.median(times[3:]))

    try:
        pairs = zip(on_devices(), through_host(), strict=True)
        apart = max(float(keras.ops.max(keras.ops.abs(one - other))) for one, other in pairs)
        times = timed(on_devices), timed(through_host)
        collective.barrier()
    finally:
        averager.close()
    return apart, *times


class Checks:
    """Rows of the table, one method for each or two."""

    def __init__(self, devices: list[Device]) -> None:
        self._devices = devices
        # Variables that are set last: so both ranks get the same device, which a fit would refuse.
        self._env = {**_EXACT, "CUDA_VISIBLE_DEVICES": devices[0].visible if devices else "-1"}
        self._env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
        self.rows: list[Row] = []

    def run(self) -> None:
        """Makes all checks; an error is a miss."""
        gpu_only = {"visibility": self._visibility, "collision": self._collision}
        for name, check in gpu_only.items():
            if self._devices:
                self._guarded(name, check)
            else:
                self._add(name, "a GPU", "skipped: ranks compute on the processor", SKIPPED)
        self._guarded(_NCCL, self._nccl)
        # This process leaves the device to its ranks.
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        others = {
            "uneven rows": self._exactness,
            "mixed precision": self._overflow,
            "out of memory": self._memory,
            "step": self._speed,
        }
        for name, check in others.items():
            self._guarded(name, check)

    def _guarded(self, name: str, check: Callable[[], None]) -> None:
        try:
            check()
        except Exception as error:
            self._add(name, "no error", f"{type(error).__name__}: {error}"[:500], MISS)

    def _add(self, name: str, expected: str, received: str, status: str | bool) -> None:
        status = (OK if status else MISS) if isinstance(status, bool) else status
        self.rows.append(Row(name, expected, received, status))

    def _planned(self, count: int, function: Callable[..., Any] = seen_devices, arguments: tuple[Any, ...] = ()) -> Any:
        """Returns the results of a function by rank; ranks get devices as those of a fit do."""
        plan = ResourcePlan(devices=HOSTS, required=True, slots_needed=count)
        spec = function_spec(pickled_call(function, arguments, {}), plan, Timeouts(), {}, False)
        progress = Progress(num_workers=count, epochs=0, verbose=0)
        result = functools.partial(results_of, count)
        attempt_on = functools.partial(attempt_here, LocalLauncher, spec, progress, result=result)
        results = run_ranks([()] * count, spec, progress, attempt_on)
        return [unpickled(result, rank) for rank, result in enumerate(results)]

    def _visibility(self) -> None:
        seen = self._planned(len(self._devices))
        wanted = [(device.visible, True) for device in self._devices]
        received = [(visible, sees) for visible, sees, _ in seen]
        self._add("visibility", str(wanted), str(received), received == wanted)
        grown = max(mib for _, _, mib in seen)
        self._add("memory growth", f"<= {GROWTH_MIB} MiB", f"{grown} MiB", grown <= GROWTH_MIB)

    def _collision(self) -> None:
        try:
            self._planned(len(self._devices) + 1)
        except Exception as error:
            received = str(error)
        else:
            received = "no error"
        self._add(
            "a rank too many", "refused: a GPU for each rank", received[:300], "expected a GPU for each" in received
        )

    def _nccl(self) -> None:
        expected, backend = "the same sums to 1e-5, and a figure", os.environ["KERAS_BACKEND"]
        if not self._devices:
            self._add(_NCCL, expected, "skipped: ranks compute on the processor", SKIPPED)
        elif not BACKENDS[backend].has_nccl:
            self._add(_NCCL, expected, f"skipped: gradients of {backend} go through the host", SKIPPED)
        elif len(self._devices) < 2:
            self._add(_NCCL, expected, "skipped: it needs two GPUs, and there is one", SKIPPED)
        else:
            apart, on_devices, on_host = map(max, zip(*self._planned(2, on_devices_and_host, (4900,)), strict=True))
            received = f"{apart:.2g}; {on_devices:.1f} ms, {on_host:.1f} ms through the host"
            self._add(_NCCL, expected, received, apart <= 1e-5)

    def _exactness(self) -> None:
        x, y = rows_of(ROWS)
        _, trained = fit_local(network, x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, env=self._env)
        [alone] = run_local(trained_alone, num_workers=1, env=self._env)
        largest = max(float(np.abs(one - other).max()) for one, other in zip(trained.get_weights(), alone, strict=True))
        self._add(
            "uneven rows, 2 ranks against 1", f"weights within {TOLERANCE:g}", f"{largest:.2g}", largest <= TOLERANCE
        )

    def _overflow(self) -> None:
        first, second = run_local(overflowed, env=self._env)
        expected = "3 of 4 steps applied and one scale, on both ranks"
        self._add("mixed precision", expected, f"{first}, {second}", first == second == (3, 2.0**11))

    def _memory(self) -> None:
        try:
            run_local(allocate_too_much, env=self._env)
        except WorkerFailure as error:
            received = str(error)
        else:
            received = "no error"
        words = r"out of memory|can't allocate|unable to allocate|RESOURCE_EXHAUSTED"
        named = "rank 1" in received and re.search(words, received, re.IGNORECASE)
        self._add("out of memory", "an error that names rank 1 and memory", received[:300], bool(named))

    def _speed(self) -> None:
        results = run_local(timed_steps, (4900 if self._devices else 64,), env=self._env)
        count, slowest = results[0][0], max(time for _, time in results)
        self._add(f"step, {count:,} parameters", "a figure", f"{slowest:.1f} ms through the host", OK)


def as_table(rows: list[Row]) -> str:
    """Returns a line for each row, and more where a text is long."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("check", "expected", "received", ""):
        table.add_column(title)
    for row in rows:
        table.add_row(*map(Text, (row.name, row.expected, row.received, row.status)))
    output = io.StringIO()
    Console(file=output, width=140, force_terminal=False, force_jupyter=False).print(table)
    return output.getvalue()


def main(arguments: list[str] | None = None) -> int:
    """Makes the checks and prints them; returns 1 where one misses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu leaves out what needs a GPU")
    parser.add_argument("--backend", choices=sorted(BACKENDS), help="the first one installed")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    given = parser.parse_args(arguments)
    installed = [name for name in BACKENDS if importlib.util.find_spec(name)]
    os.environ["KERAS_BACKEND"] = given.backend or os.environ.get("KERAS_BACKEND") or (installed or ["tensorflow"])[0]
    devices: list[Device] = []
    if given.device == "gpu":
        devices = list(devices_of_task(ResourcePlan(devices=HOSTS), [], os.environ).shareable)
    checks = Checks(devices)
    if given.device == "cpu":
        checks.rows.append(Row("devices", "GPUs of nvidia-smi", "skipped: --device cpu", SKIPPED))
    else:
        listed = len(listed_devices(host_gpus()))
        received = ", ".join(device.identity for device in devices) or "none"
        checks.rows.append(Row("devices", f"some of {listed} of nvidia-smi", received, OK if devices else MISS))
    if devices or given.device == "cpu":
        checks.run()
    sys.stdout.write(json.dumps([asdict(row) for row in checks.rows]) + "\n" if given.json else as_table(checks.rows))
    return 1 if any(row.status == MISS for row in checks.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
