"""What asynchronous training costs in accuracy when workers really compute at the same time.

::

    python benchmarks/convergence.py                                                  # all algorithms and optimizers
    python benchmarks/convergence.py --optimizers adam --algorithms downpour sum --schedules rotating together

A fast machine that runs workers freely hides staleness: most of the time one of them exchanges while the others wait
for a core. Here the order of exchanges is forced. Four workers with a connection each to one real server take turns:

* ``rotating``: between a worker's pull and its push, each of the others has pushed once, always; staleness is 3.
* ``together``: all pull the same weights, then all push; staleness is 0, 1, 2 and 3.

The rows are UCI's digits as scikit-learn carries them, a fifth of them held out; seed by seed, split, initial weights
and order of rows differ. One process trains on the same rows for as many epochs with the same batch size and optimizer,
from the same weights. What counts is the seed with the largest loss of accuracy. Prints one line of JSON per case.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from concurrency import SCHEDULES, WORKERS, Case, Digits, Learner, Worker
from report import Measurement, report
from servers import RUN_ID, running

from elephant.modeling.optimizer_translation import translate
from elephant.parameter_server.control_client import ControlClient

SEEDS = 5

OPTIMIZERS: Mapping[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.003),
}


CASES = (
    Case("downpour", "batch"),
    Case("dynsgd", "batch"),
    Case("aeasgd", "batch"),
    Case("eamsgd", "batch"),
    *(
        Case(algorithm, frequency)
        for algorithm in ("downpour", "dynsgd", "adag", "aeasgd", "eamsgd", "sum")
        for frequency in (5, 10, "epoch")
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What one training led to.

    Args:
        accuracy: On the rows held out.
        staleness: The mean number of pushes between a worker's pull and its push.
    """

    accuracy: float
    staleness: float


class Study:
    """Trainings with one optimizer.

    Args:
        optimizer: Name of one in `OPTIMIZERS`.
        epochs: Passes over the rows.
    """

    def __init__(self, optimizer: str, epochs: int) -> None:
        self._epochs = epochs
        self._learners = [Learner(OPTIMIZERS[optimizer]) for _ in range(WORKERS)]
        self._rule = translate(self._learners[0].optimizer, self._learners[0].layout)

    def initial(self, seed: int) -> np.ndarray:
        """Returns the weights from which all trainings of a seed begin."""
        layout = self._learners[0].layout
        rng = np.random.default_rng((seed, 1))
        # Glorot's uniform one, as Keras' dense layers begin.
        arrays = [
            rng.uniform(-1, 1, each.shape) * (6 / sum(each.shape)) ** 0.5
            if len(each.shape) == 2
            else np.zeros(each.shape)
            for each in layout.segments
        ]
        return layout.pack([array.astype(np.float32) for array in arrays])

    def alone(self, seed: int) -> Outcome:
        """One process."""
        digits, learner = Digits.split(seed), self._learners[0]
        learner.reset(self.initial(seed))
        for (rows,) in digits.windows(0, 1, seed, self._epochs, "batch"):
            learner.train(digits.x_train[rows], digits.y_train[rows])
        return Outcome(learner.accuracy(learner.get(), digits.x_test, digits.y_test), 0.0)

    def concurrent(self, case: Case, schedule: str, seed: int) -> Outcome:
        """Four workers and a server."""
        digits, initial = Digits.split(seed), self.initial(seed)
        rule = self._rule if case.config.pushes_gradients else {"name": "add"}
        divide = case.config.new_algorithm().divides_by_staleness
        layout = self._learners[0].layout
        with running(layout, rule, clients=WORKERS, values=initial, divide_by_staleness=divide) as place:
            workers, clients = [], []
            for rank, learner in enumerate(self._learners):
                learner.reset(initial)
                clients.append(place.client(rank))
                windows = digits.windows(rank, WORKERS, seed, self._epochs, case.frequency)
                workers.append(Worker(case, learner, clients[-1], digits, windows))
            SCHEDULES[schedule](workers)
            for client in clients:
                client.close(finished=True)
            control = ControlClient(place.addresses, token=place.token, run_id=RUN_ID, layout=layout)
            weights, counted = control.fetch().values, control.statistics()["staleness"]
            control.close()
        accuracy = self._learners[0].accuracy(weights, digits.x_test, digits.y_test)
        pushes = sum(counted.values())
        return Outcome(accuracy, sum(int(stale) * count for stale, count in counted.items()) / pushes)


def measure(optimizer: str, epochs: int, cases: Sequence[Case], schedules: Sequence[str], seeds: Sequence[int]) -> None:
    """Measures some cases, and prints them."""
    study = Study(optimizer, epochs)
    alone = [study.alone(seed) for seed in seeds]
    for case, schedule in itertools.product(cases, schedules):
        if case.suits(optimizer):
            found = [study.concurrent(case, schedule, seed) for seed in seeds]
            report(lost(case, {"optimizer": optimizer, "epochs": epochs, "schedule": schedule}, found, alone))


def lost(case: Case, setting: Mapping[str, Any], found: Sequence[Outcome], alone: Sequence[Outcome]) -> Measurement:
    """Returns the line of one case."""
    losses = [one.accuracy - four.accuracy for one, four in zip(alone, found, strict=True)]
    kind = "plain_sums" if case.algorithm == "sum" else "every_step" if case.frequency == "batch" else "windows"
    return Measurement(
        measure=f"accuracy_lost_with_{kind}",
        case={"algorithm": case.algorithm, "frequency": case.frequency, "workers": WORKERS, **setting},
        ratio=max(losses),
        target=case.target,
        at_least=False,
        medians={
            "one_process": statistics.median(each.accuracy for each in alone),
            "one_process_worst": min(each.accuracy for each in alone),
            "accuracy": statistics.median(each.accuracy for each in found),
            "accuracy_worst": min(each.accuracy for each in found),
            "loss_median": statistics.median(losses),
            "staleness": statistics.mean(each.staleness for each in found),
        },
        repetitions=len(found),
    )


def main() -> None:
    """Measures what the arguments ask for."""
    algorithms = sorted({case.algorithm for case in CASES})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--algorithms", nargs="+", choices=algorithms, default=algorithms)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["rotating"])
    parser.add_argument("--epochs", nargs="+", type=int, default=[30, 60])
    parser.add_argument("--repetitions", type=int, default=SEEDS, help="seeds, from zero on")
    options = parser.parse_args()
    cases = [case for case in CASES if case.algorithm in options.algorithms]
    for optimizer, epochs in itertools.product(options.optimizers, options.epochs):
        measure(optimizer, epochs, cases, options.schedules, range(options.repetitions))


if __name__ == "__main__":
    main()
