"""What asynchronous training costs in accuracy when workers really compute at the same time.

::

    python benchmarks/convergence.py                                     # everything
    python benchmarks/convergence.py --optimizers adam --algorithms downpour sum --schedules rotating

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
import tensorflow as tf
from report import Measurement, report
from servers import RUN_ID, running
from sklearn.datasets import load_digits

from elephant.modeling.translation import translate
from elephant.parameter_server.client import ParameterServers
from elephant.parameter_server.control import Control
from elephant.parameter_server.layout import Layout

WORKERS = 4
BATCH_SIZE = 32
SEEDS = (0, 1, 2, 3, 4)
HELD_OUT = 0.2
# Moving rate of elastic averaging, over all workers (Zhang, Choromanska, LeCun 2015 take 0.9).
ELASTICITY = 0.9 / WORKERS

OPTIMIZERS: Mapping[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.003),
}
# A loss of accuracy that is still good enough, by whether gradients are pushed at every step.
TARGETS = {True: 0.01, False: 0.03}


@dataclass(frozen=True)
class Case:
    """How workers and server train.

    Args:
        algorithm: Of `elephant.training.algorithms`.
        frequency: Steps between two exchanges, ``"batch"`` or ``"epoch"``.
    """

    algorithm: str
    frequency: int | str

    @property
    def pushes_gradients(self) -> bool:
        """Whether the server's optimizer applies every step's gradient."""
        return self.frequency == "batch"

    def scale(self, steps: int) -> float:
        """Returns what the worker multiplies the difference of a window of so many steps by."""
        return {"downpour": 1 / WORKERS, "adag": 1 / steps}.get(self.algorithm, 1.0)

    def suits(self, optimizer: str) -> bool:
        """Returns whether workers take this optimizer: elastic momentum needs one that has some."""
        return self.algorithm != "eamsgd" or optimizer == "nesterov"


CASES = (
    Case("downpour", "batch"),
    Case("dynsgd", "batch"),
    *(
        Case(algorithm, frequency)
        for algorithm in ("downpour", "dynsgd", "adag", "aeasgd", "eamsgd", "sum")
        for frequency in (5, 10, "epoch")
    ),
)


@dataclass(frozen=True)
class Digits:
    """Rows for one seed: float32 images of 64 values in [0, 1], labels from 0 to 9."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @classmethod
    def split(cls, seed: int) -> Digits:
        """Returns the rows, and those held out, in an order of the seed's."""
        digits = load_digits()
        order = np.random.default_rng(seed).permutation(len(digits.target))
        x, y = (digits.data[order] / 16).astype(np.float32), digits.target[order].astype(np.int32)
        kept = round(len(y) * (1 - HELD_OUT))
        return cls(x[:kept], y[:kept], x[kept:], y[kept:])

    def windows(self, part: int, parts: int, seed: int, epochs: int, steps: int | str) -> list[list[np.ndarray]]:
        """Returns the indices of every batch of one worker, over all epochs, as lists of as many as a window has."""
        rows = np.arange(part, len(self.y_train), parts)
        rng = np.random.default_rng((seed, part, parts))
        batches = []
        for _ in range(epochs):
            order = rng.permutation(rows)
            batches += [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
        width = len(batches) // epochs if steps == "epoch" else 1 if steps == "batch" else int(steps)
        return [batches[start : start + width] for start in range(0, len(batches), width)]


class Learner:
    """A Keras model with an optimizer of its own, whose weights are read and set as one flat vector.

    Args:
        make_optimizer: Returns the optimizer.
    """

    def __init__(self, make_optimizer: Callable[[], keras.optimizers.Optimizer]) -> None:
        layers = keras.layers
        self.model = keras.Sequential([layers.Input((64,)), layers.Dense(128, "relu"), layers.Dense(10, "softmax")])
        self.optimizer = make_optimizer()
        self.optimizer.build(self.model.trainable_variables)
        self._variables = self.model.trainable_variables
        self.layout = Layout([(variable.path, variable.shape) for variable in self._variables])
        self._fresh = [variable.numpy() for variable in self.optimizer.variables]
        self._loss = keras.losses.SparseCategoricalCrossentropy()
        self._gradients = tf.function(self._gradients_of, reduce_retracing=True)
        self._step = tf.function(self._train, reduce_retracing=True)

    def reset(self, flat: np.ndarray) -> None:
        """Sets the weights, and the optimizer as if it had never been used."""
        self.set(flat)
        for variable, value in zip(self.optimizer.variables, self._fresh, strict=True):
            variable.assign(value)

    def set(self, flat: np.ndarray) -> None:
        """Sets the weights."""
        for variable, view in zip(self._variables, self.layout.views(flat), strict=True):
            variable.assign(view)

    def get(self) -> np.ndarray:
        """Returns the weights."""
        return self.layout.pack([variable.numpy() for variable in self._variables])

    def gradient(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Returns the gradient of the loss of some rows."""
        return self.layout.pack([gradient.numpy() for gradient in self._gradients(x, y)])

    def train(self, x: np.ndarray, y: np.ndarray) -> None:
        """Takes one step on some rows with its own optimizer."""
        self._step(x, y)

    def accuracy(self, flat: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
        """Returns the share of rows that such weights classify well."""
        self.set(flat)
        return float(np.mean(np.argmax(self.model(x).numpy(), axis=1) == y))

    def _gradients_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss(y, self.model(x, training=True))
        return tape.gradient(loss, [variable.value for variable in self._variables])

    def _train(self, x: Any, y: Any) -> None:
        self.optimizer.apply(self._gradients_of(x, y), self._variables)


class Worker:
    """One worker, whose exchanges happen when it is told to.

    Args:
        case: What it does.
        learner: Its model, reset.
        client: Its connection.
        digits: The rows.
        windows: Its batches.
    """

    def __init__(
        self, case: Case, learner: Learner, client: ParameterServers, digits: Digits, windows: Sequence[Any]
    ) -> None:
        self._case, self._learner, self._client, self._digits = case, learner, client, digits
        self._windows = iter(windows)
        self._weights = learner.get()
        self._update: np.ndarray | None = None
        self._step = 0

    def pull_and_compute(self) -> bool:
        """Pulls, and computes what will be pushed; returns False when there is no batch left."""
        window = next(self._windows, None)
        if window is None:
            return False
        if self._case.algorithm in ("aeasgd", "eamsgd"):
            self._pull_after(window)
        else:
            self._pull_before(window)
        self._step += len(window)
        return True

    def push(self) -> None:
        """Pushes what was computed, if anything was."""
        if self._update is not None:
            self._client.push(self._update, step=self._step)
            self._update = None

    def _pull_before(self, window: Sequence[np.ndarray]) -> None:
        self._client.pull(self._weights)
        self._learner.set(self._weights)
        if self._case.pushes_gradients:
            (rows,) = window
            self._update = self._learner.gradient(*self._rows(rows))
        else:
            self._train(window)
            self._update = (self._learner.get() - self._weights) * np.float32(self._case.scale(len(window)))

    def _pull_after(self, window: Sequence[np.ndarray]) -> None:
        self._train(window)
        own = self._learner.get()
        self._client.pull(self._weights)
        self._update = np.float32(ELASTICITY) * (own - self._weights)
        self._learner.set(own - self._update)

    def _train(self, window: Sequence[np.ndarray]) -> None:
        for rows in window:
            self._learner.train(*self._rows(rows))

    def _rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._digits.x_train[rows], self._digits.y_train[rows]


def rotating(workers: Sequence[Worker]) -> None:
    """Each worker pushes what it computed on the weights of its last turn, and pulls the next ones."""
    going = True
    while going:
        going = False
        for worker in workers:
            worker.push()
            going = worker.pull_and_compute() or going


def together(workers: Sequence[Worker]) -> None:
    """All pull, then all push."""
    going = [True]
    while any(going):
        going = [worker.pull_and_compute() for worker in workers]
        for worker in workers:
            worker.push()


SCHEDULES: Mapping[str, Callable[[Sequence[Worker]], None]] = {"rotating": rotating, "together": together}


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
        rule = self._rule if case.pushes_gradients else {"name": "add"}
        divide = case.algorithm == "dynsgd"
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
            control = Control(place.addresses, token=place.token, run_id=RUN_ID, layout=layout)
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
    kind = "plain_sums" if case.algorithm == "sum" else "gradients" if case.pushes_gradients else "windows"
    return Measurement(
        measure=f"accuracy_lost_with_{kind}",
        case={"algorithm": case.algorithm, "frequency": case.frequency, "workers": WORKERS, **setting},
        ratio=max(losses),
        target=None if case.algorithm == "sum" else TARGETS[case.pushes_gradients],
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
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args()
    cases = [case for case in CASES if case.algorithm in options.algorithms]
    for optimizer in options.optimizers:
        measure(optimizer, options.epochs, cases, options.schedules, options.seeds)


if __name__ == "__main__":
    main()
