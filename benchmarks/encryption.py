"""What encryption costs: allreduce, training steps, and whole fits, each over the same without it.

::

    sudo python benchmarks/encryption.py                  # everything; root makes the network namespaces
    python benchmarks/encryption.py --only loopback fit
    sudo python benchmarks/encryption.py --only link steps --megabits 1000

*loopback*: an allreduce of 4 MB between two ranks over TCP on this machine, where the processors are the limit.
*link*: the same over a link of a limited rate between two network namespaces, where the link is.
*steps*: rows per second of training over that link, on the whole: 2.4 million weights, and what `parity.py` trains.
*host*: rows per second of what `parity.py` trains on two ranks of one host, whose gradients are in shared memory.
*fit*: a fit of two workers, in processes of its own, from the start of the program to its end.

Contenders take turns. Prints one line of JSON per comparison; ratios are times with encryption over those without.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from links import seats_on
from namespaces import linked_namespaces
from parity import TRAININGS
from report import Measurement, median_ratio, report
from steps import Contender, speeds
from team import Member, Seat, Team, lasted, seats
from training import TIMEOUT_S, Training

VALUES = 1_000_000
# Operations of a turn, whose mean counts.
OPERATIONS = 10
LOOPBACK = ("127.0.0.1", "127.0.0.1")
CONTENDERS = {"plain": False, "encrypted": True}
_FIT_S = 600.0


def serve_reductions(member: Member, encryption: bool, hosts: Sequence[str]) -> None:
    """The work of a rank that sums `VALUES` values, some times a turn."""
    from elephant.collective import form_collective
    from elephant.net import Listener
    from elephant.net.tls import new_token

    with Listener.bind(hosts[member.rank]) as listener:
        addresses, tokens = zip(*member.exchange((listener.address, new_token(encryption=encryption))), strict=True)
        collective = form_collective(
            member.rank, addresses, listener, tokens[0], "benchmark", TIMEOUT_S, transport="tcp"
        )
    array = np.ones(VALUES, np.float32)
    with collective:
        for _ in member.turns():
            array[...] = 1
            member.reply(member.timed(lambda: [collective.allreduce_(array, "mean") for _ in range(OPERATIONS)]))
            if not (array == 1).all():
                raise SystemExit(f"expected means of ones. Received: {array}.")


def compare_reductions(
    places: Sequence[Seat], hosts: Sequence[str], measure: str, target: float | None, repetitions: int
) -> None:
    """Prints the time of an allreduce with encryption over that without."""
    with contextlib.ExitStack() as stack:
        teams = {
            name: stack.enter_context(Team(serve_reductions, places, encryption, hosts))
            for name, encryption in CONTENDERS.items()
        }
        for team in teams.values():
            team.exchange()
        took: dict[str, list[float]] = {name: [] for name in teams}
        for repetition in range(repetitions + 1):
            for name, team in teams.items():
                team.ask("reduce")
                seconds = lasted(team.timed()) / OPERATIONS
                if repetition:
                    took[name].append(seconds)
    report(
        Measurement(
            measure=measure,
            case={"bytes": 4 * VALUES, "ranks": 2},
            ratio=median_ratio(took["encrypted"], took["plain"]),
            target=target,
            at_least=False,
            medians={f"{name}_ms": statistics.median(values) * 1000 for name, values in took.items()},
            repetitions=repetitions,
        )
    )


def measure_loopback(options: argparse.Namespace) -> None:
    """An allreduce where nothing but the processors limits it."""
    compare_reductions(seats(2), LOOPBACK, "encrypted_allreduce_on_loopback", None, options.repetitions)


def measure_link(options: argparse.Namespace) -> None:
    """An allreduce over a link."""
    with linked_namespaces(options.megabits * 1e6) as ends:
        compare_reductions(
            seats_on(ends),
            tuple(end.address for end in ends),
            f"encrypted_allreduce_on_{options.megabits}_megabits",
            1.35 if options.megabits == 10_000 else None,
            options.repetitions,
        )


def compare_training(
    training: Training, places: Sequence[Seat], measure: str, repetitions: int, target: float | None = None
) -> None:
    """Prints the time of training on two ranks with encryption over that without."""
    contenders = {
        name: Contender.of_ranks(places, replace(training, options={"encryption": encryption}))
        for name, encryption in CONTENDERS.items()
    }
    speed, medians = speeds(contenders, repetitions)
    report(
        Measurement(
            measure=measure,
            case={"workload": training.workload, "batch_size": training.batch_size, "ranks": 2},
            ratio=median_ratio(speed["plain"].rows_per_s, speed["encrypted"].rows_per_s),
            target=target,
            at_least=False,
            medians=medians,
            repetitions=repetitions,
        )
    )


def measure_steps(options: argparse.Namespace) -> None:
    """Training over a link."""
    with linked_namespaces(options.megabits * 1e6) as ends:
        hosts = tuple(end.address for end in ends)
        middle = Training(workload="mlp_2m", rows=1024, batch_size=64, epochs=0)
        for training, target in ((middle, None), *((training, 1.1) for training in TRAININGS.values())):
            measure = f"encrypted_training_on_{options.megabits}_megabits"
            compare_training(replace(training, hosts=hosts), seats_on(ends), measure, options.repetitions, target)


def measure_host(options: argparse.Namespace) -> None:
    """Training on one host, as in the comparisons with the native way."""
    for training in TRAININGS.values():
        compare_training(training, seats(2), "encrypted_training_on_one_host", options.repetitions, 1.1)


def fit(encryption: bool) -> None:
    """Fits a small model on Spark, whose executors are of this machine; the program of *fit*."""
    import keras

    from elephant import KerasEstimator
    from elephant.cluster.local import local_session

    spark = local_session(2)
    generator = np.random.default_rng(0)
    rows = [([float(value) for value in row], float(row.sum())) for row in generator.normal(size=(4000, 20))]
    frame = spark.createDataFrame(rows, "features array<double>, label double").repartition(2)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    KerasEstimator(model, numWorkers=2, epochs=5, encryption=encryption, verbose=0).fit(frame)
    spark.stop()


def measure_fit(options: argparse.Namespace) -> None:
    """Whole fits, each in processes of its own."""
    took: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.fits):
        for name in CONTENDERS:
            began = time.monotonic()
            command = [sys.executable, __file__, "--program", name]
            subprocess.run(command, check=True, timeout=_FIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            took[name].append(time.monotonic() - began)
    report(
        Measurement(
            measure="encrypted_fit",
            case={"workers": 2, "epochs": 5},
            ratio=median_ratio(took["encrypted"], took["plain"]),
            target=1.1,
            at_least=False,
            medians={f"{name}_s": statistics.median(values) for name, values in took.items()},
            repetitions=options.fits,
        )
    )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "loopback": measure_loopback,
    "link": measure_link,
    "steps": measure_steps,
    "host": measure_host,
    "fit": measure_fit,
}


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--fits", type=int, default=3, help="whole fits of each contender (3)")
    parser.add_argument("--megabits", type=int, default=10_000, help="rate of the link (10000)")
    parser.add_argument("--program", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        fit(CONTENDERS[options.program])
        return
    for name in options.only:
        PARTS[name](options)


if __name__ == "__main__":
    main()
