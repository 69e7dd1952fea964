"""What the exchange of gradients adds to a step of Keras on each backend, and what DistributedDataParallel adds.

::

    python benchmarks/backends.py --torch FOLDER    # FOLDER is where pip has put PyTorch

Two ranks of elephant, a core each, and two processes of ``model.fit`` that know nothing of each other take turns, an
epoch each, with the same rows per step and process. What the ranks take longer is what elephant adds, its reading of
rows included. On PyTorch the same is done with PyTorch's own loop, alone and in DistributedDataParallel over Gloo. The
medians have the milliseconds of a step, by the clock and by processor time.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from pathlib import Path

from parity import fit_torch
from report import Measurement, report
from steps import Contender, speeds
from team import seats
from training import Training, plain_environment

_BACKENDS = ("tensorflow", "jax", "torch")
_SMALL = Training(workload="mlp_118k", rows=9600, batch_size=32, epochs=0)
_LARGE = Training(workload="mlp_24m", rows=640, batch_size=32, epochs=0)
_CLOCKS = {"clock": "ms_per_step", "processor_time": "cpu_ms_per_step"}
# Milliseconds of processor time that the exchange may add to the small model's step on JAX.
_JAX_TARGET = 1.2


def measure(training: Training, backends: list[str], repetitions: int) -> None:
    """Reports what the exchange adds to the step of a model, on each backend."""
    contenders = {}
    for backend in backends:
        contenders[f"{backend}_ranks"] = Contender.of_ranks(seats(2), training, backend)
        contenders[f"{backend}_alone"] = Contender.of_plain(2, training, backend=backend)
    if "torch" in backends and training is _SMALL:
        alone = functools.partial(fit_torch, exchanges=False)
        contenders["ddp"] = Contender(fit_torch, seats(2), training, plain_environment("torch"))
        contenders["loop"] = Contender(alone, seats(2), training, plain_environment("torch"))
    _, medians = speeds(contenders, repetitions)
    told = {name: value for name, value in medians.items() if name.endswith("ms_per_step")}
    case = {"workload": training.workload, "batch_size": training.batch_size, "ranks": 2}
    for backend in backends:
        for clock, unit in _CLOCKS.items():
            added = medians[f"{backend}_ranks_{unit}"] - medians[f"{backend}_alone_{unit}"]
            own = {name: value for name, value in told.items() if name.startswith((backend, "ddp", "loop"))}
            is_bound = backend == "jax" and training is _SMALL and clock == "processor_time"
            measured = [("exchange_adds_ms", added, _JAX_TARGET if is_bound else None)]
            measured.append(
                ("ranks_step_over_alone", medians[f"{backend}_ranks_{unit}"] / medians[f"{backend}_alone_{unit}"], None)
            )
            if backend == "torch" and "ddp" in contenders:
                measured.append(
                    ("exchange_against_ddp", added / (medians[f"ddp_{unit}"] - medians[f"loop_{unit}"]), 1.0)
                )
            for name, value, target in measured:
                report(
                    Measurement(
                        measure=name,
                        case={**case, "backend": backend, "by": clock},
                        ratio=value,
                        target=target,
                        at_least=False,
                        medians=own,
                        repetitions=repetitions,
                    )
                )


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=_BACKENDS, default=list(_BACKENDS))
    parser.add_argument("--repetitions", type=int, default=5, help="epochs of each side (5)")
    parser.add_argument("--torch", type=Path, metavar="FOLDER", help="where PyTorch is, if not in this environment")
    options = parser.parse_args()
    if options.torch is not None:
        sys.path.append(str(options.torch.resolve()))
    backends = [name for name in options.only if importlib.util.find_spec(name) is not None]
    for name in set(options.only).difference(backends):
        print(f"{name}: expected it to be importable; left out", file=sys.stderr)
    for training in (_SMALL, _LARGE):
        measure(training, backends, options.repetitions)


if __name__ == "__main__":
    main()
