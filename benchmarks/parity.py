"""elephant against the native way: ``model.fit``, tuned, PyTorch's DistributedDataParallel, compiled, and one rank.

::

    python benchmarks/parity.py --torch FOLDER           # everything; FOLDER is where pip has put PyTorch
    sudo python benchmarks/parity.py --only namespaces   # training or namespaces; root for the namespaces

Same machine, rows, batches and layers on all sides, which take turns, an epoch each. A rank, and a process that it is
compared with, has a core (more ranks than cores share them); ``model.fit`` is measured on one core, and, with the rows
per step of all ranks, on all. It is measured as most people write it, on arrays; with several steps per call of the
runtime; and with these and a `tf.data.Dataset`: of the last two, the quicker one counts as tuned. What the exchange
costs is told by as many tuned processes of ``model.fit``, each with a core and rows of its own, that do not talk.
Training on PyTorch indexes tensors in memory, which is faster than its DataLoader, and sums up loss and accuracy as
Keras does; it is measured as it stands and with its step compiled by ``torch.compile``, over Gloo.

In the namespaces each rank is on a host of its own, for what it can see: all gradients cross TCP, and nothing is in
shared memory. There are more ranks than cores, so that the clock says what the cores reach together, and processor
time what a step of a rank costs; neither says what a network costs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exchanges import Gloo
from namespaces import linked_namespaces
from report import Measurement, median_ratio, report
from steps import Contender, Speed, speeds
from team import ANYWHERE, Member, Seat, seats
from training import (
    Epoch,
    Training,
    faults,
    fit_alone,
    fit_from_data,
    fit_tuned,
    plain_environment,
    rows_of,
)
from workloads import CLASSES, PIXELS, SIDE

RANKS = (2, 4)
HOSTS = (2, 4, 8)
# Such a link is no limit here: what remains is what TCP costs.
_LINK = 10e9
TRAININGS = {
    "mlp_118k": Training(workload="mlp_118k", rows=20_480, batch_size=64, epochs=0),
    "cnn_400k": Training(workload="cnn_400k", rows=4096, batch_size=32, epochs=0),
    "mlp_24m": Training(workload="mlp_24m", rows=1024, batch_size=256, epochs=0),
}
_PARAMETERS = {"mlp_118k": 118_282, "cnn_400k": 399_022, "mlp_24m": 24_202_250}
_UNITS = {"mlp_118k": (128, 128), "mlp_24m": (4096, 4096, 1024)}
# Ways to write and to tune a ``model.fit``.
_TUNED = {"steps": fit_tuned, "data": fit_from_data}
_CORES = len(os.sched_getaffinity(0))


def torch_model(workload: str) -> Any:
    """Returns the network of a workload in PyTorch, without the softmax that its loss brings."""
    from torch import nn

    if workload in _UNITS:
        widths = (PIXELS, *_UNITS[workload])
        hidden = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(widths[-1], CLASSES))
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 236), nn.ReLU(), nn.Linear(236, CLASSES)),
    )


def fit_torch(member: Member, training: Training, exchanges: bool = True, compiled: bool = False) -> None:
    """One process of DistributedDataParallel, or one that trains for itself, an epoch per turn.

    Args:
        exchanges: Whether it averages gradients with the others.
        compiled: Whether its step is compiled, but for the optimizer.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        torch.manual_seed(7)
        model: Any = torch_model(training.workload)
        count = sum(parameter.numel() for parameter in model.parameters())
        if count != _PARAMETERS[training.workload]:
            raise SystemExit(f"{training.workload}: expected the network of Keras. Received: {count} parameters.")
        if member.size > 1 and exchanges:
            Gloo(member, stack)
            model = DistributedDataParallel(model)
        else:
            member.exchange(None)
        optimizer = torch.optim.Adam(model.parameters(), 0.001, eps=1e-7)
        loss_of = torch.nn.CrossEntropyLoss()
        x, y = (torch.from_numpy(array) for array in rows_of(member, training))
        y = y.long()

        def forward(images: Any, labels: Any) -> tuple[Any, Any]:
            outputs = model(images)
            return loss_of(outputs, labels), (outputs.argmax(1) == labels).sum()

        step = torch.compile(forward) if compiled else forward
        for _ in member.turns():
            began, cpu, before = time.monotonic(), time.process_time(), faults()
            losses, hits = torch.zeros(()), torch.zeros((), dtype=torch.int64)
            for rows in torch.randperm(len(y)).split(training.batch_size):
                optimizer.zero_grad()
                loss, right = step(x[rows], y[rows])
                loss.backward()
                optimizer.step()
                losses += loss.detach()
                hits += right
            if not bool(torch.isfinite(losses)):
                raise SystemExit("expected a finite loss of PyTorch. Received: another one.")
            member.reply(Epoch((began, time.monotonic()), time.process_time() - cpu, 0, faults() - before))


def _times(training: Training, count: int) -> Training:
    """Returns the training of one process that does the work of several: their rows, and their batches as one."""
    return replace(training, rows=count * training.rows, batch_size=count * training.batch_size)


def measure_training(options: argparse.Namespace) -> None:
    """One rank and more of them against Keras and PyTorch, on each of the networks."""
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch:
        print("torch: expected PyTorch to be importable, here or with --torch FOLDER; left out", file=sys.stderr)
    for name in options.workloads:
        for count in RANKS if name != "mlp_24m" else RANKS[:1]:
            _measure_ranks(TRAININGS[name], count, has_torch, options.repetitions)


def _measure_ranks(training: Training, count: int, has_torch: bool, repetitions: int) -> None:
    """So many ranks, and one; all processes of both sides are there at the same time, and take turns."""
    torch = {"ddp": False, "compiled": True} if has_torch else {}
    contenders = {
        "keras_1": Contender.of_plain(1, training),
        **{f"{way}_1": Contender.of_plain(1, training, work) for way, work in _TUNED.items()},
        **{f"silent_{way}": Contender.of_plain(count, training, work) for way, work in _TUNED.items()},
    }
    for number in (1, count):
        contenders[f"ranks_{number}"] = Contender.of_ranks(seats(number), training)
        for kind, compiled in torch.items():
            work = functools.partial(fit_torch, compiled=compiled)
            contenders[f"{kind}_{number}"] = Contender(work, seats(number), training, plain_environment())
    for way, fit in {"keras": fit_alone, **_TUNED}.items():
        contenders[f"{way}_all"] = Contender(fit, [ANYWHERE], _times(training, count), plain_environment())
    speed, medians = speeds(contenders, repetitions)

    def on_core(ours: str, *theirs: str) -> float:
        return min(speed[ours].gain_over(speed[other]) for other in theirs)

    def on_all(ours: str, *theirs: str) -> float:
        return min(median_ratio(speed[ours].rows_per_s, speed[other].rows_per_s) for other in theirs)

    ours, tuned_1, tuned = f"ranks_{count}", [f"{way}_1" for way in _TUNED], [f"{way}_all" for way in _TUNED]
    silent = [f"silent_{way}" for way in _TUNED]
    compared = [
        ("ranks_against_tuned_model_fit_on_all_cores", count, on_all(ours, *tuned), ours, *tuned),
        ("ranks_against_model_fit_on_all_cores", count, on_all(ours, "keras_all"), ours, "keras_all"),
        ("ranks_against_silent_processes", count, on_core(ours, *silent), ours, *silent),
        ("ranks_against_one_rank", count, _clock(speed[ours], speed["ranks_1"], count), ours, "ranks_1"),
    ]
    if count == RANKS[0]:
        compared += [
            ("rank_against_tuned_model_fit", 1, on_core("ranks_1", *tuned_1), "ranks_1", *tuned_1),
            ("rank_against_model_fit", 1, on_core("ranks_1", "keras_1"), "ranks_1", "keras_1"),
        ]
    for kind, against in {"ddp": "ranks_against_ddp", "compiled": "ranks_against_compiled_ddp"}.items():
        if kind in torch:
            other, one = f"{kind}_{count}", f"{kind}_1"
            compared += [
                (against, count, on_core(ours, other), ours, other),
                (f"{kind}_against_one_process", count, _clock(speed[other], speed[one], count), other, one),
            ]
    case = {"workload": training.workload, "batch_size": training.batch_size, "cores": _CORES}
    for measure, number, ratio, *names in compared:
        of_both = {key: value for key, value in medians.items() if key.rsplit("_rows", 1)[0] in names}
        _report(measure, {**case, "ranks": number}, ratio, of_both, repetitions)


def measure_namespaces(options: argparse.Namespace) -> None:
    """Ranks on hosts of their own, for what they can see, against one rank: the same rows for each of them."""
    training = Training(workload="cnn_400k", rows=1024, batch_size=32, epochs=0)
    with contextlib.ExitStack() as stack:
        contenders = {"ranks_1": Contender.of_ranks(seats(1), training)}
        hosts = stack.enter_context(linked_namespaces(_LINK, max(HOSTS)))
        for count in HOSTS:
            places = [Seat(seat.core, host.entered) for seat, host in zip(seats(count), hosts[:count], strict=True)]
            addresses = tuple(host.address for host in hosts[:count])
            contenders[f"ranks_{count}"] = Contender.of_ranks(places, replace(training, hosts=addresses))
        speed, medians = speeds(contenders, options.repetitions)
    for count in HOSTS:
        ours, one = speed[f"ranks_{count}"], speed["ranks_1"]
        case = {"workload": training.workload, "batch_size": 32, "ranks": count, "cores": _CORES}
        cpu = median_ratio(ours.rows_per_cpu_s, one.rows_per_cpu_s) / count
        own = {name: value for name, value in medians.items() if name.startswith((f"ranks_{count}_", "ranks_1_"))}
        _report("weak_scaling_by_processor_time", case, cpu, own, options.repetitions)
        _report("weak_scaling_by_clock", case, _clock(ours, one, count), own, options.repetitions)


def _clock(several: Speed, one: Speed, count: int) -> float:
    """Returns the rate of several processes over what the cores that they have would reach at the rate of one."""
    return median_ratio(several.rows_per_s, one.rows_per_s) / min(count, _CORES)


def _report(
    measure: str, case: Mapping[str, Any], ratio: float, medians: Mapping[str, float], repetitions: int
) -> None:
    report(
        Measurement(
            measure=measure,
            case=case,
            ratio=ratio,
            target=None,
            at_least=True,
            medians=medians,
            repetitions=repetitions,
        )
    )


PARTS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "training": measure_training,
    "namespaces": measure_namespaces,
}


def main(words: Sequence[str] | None = None) -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=5, help="epochs of each side (5)")
    parser.add_argument("--workloads", nargs="+", choices=TRAININGS, default=list(TRAININGS), help="of training")
    parser.add_argument("--torch", type=Path, metavar="FOLDER", help="where PyTorch is, if not in this environment")
    options = parser.parse_args(words)
    if options.torch is not None:
        # Last: what else is there takes nobody's place. Processes that are started from here have the same path.
        sys.path.append(str(options.torch.resolve()))
    for name in options.only:
        PARTS[name](options)


if __name__ == "__main__":
    main()
