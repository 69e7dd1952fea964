"""Workers that learn handwritten digits from one server, in an order that is forced upon them.

What they compute is Keras', what they push is that of `elephant.algorithms`, and what they exchange goes
through connections of their own to a real server; only their turns are this module's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from elephant.config import AsynchronousOptions, FitConfig
from elephant.modeling.variables import layout_of, read_weights, write_weights
from elephant.parameter_server.client import ParameterServerClient

WORKERS = 4
BATCH_SIZE = 32
HELD_OUT = 0.2


@dataclass(frozen=True)
class Case:
    """How workers and server train.

    Args:
        algorithm: Of `elephant.algorithms`.
        frequency: Steps between two exchanges, ``"batch"`` or ``"epoch"``.
    """

    algorithm: str
    frequency: int | str

    @property
    def config(self) -> FitConfig:
        """The fit that trains like this."""
        return FitConfig(
            mode="asynchronous",
            num_workers=WORKERS,
            frequency=self.frequency,
            asynchronous=AsynchronousOptions(algorithm=self.algorithm),
        )

    @property
    def target(self) -> float | None:
        """A loss of accuracy that is still good enough; None where nothing is promised."""
        if self.algorithm == "sum":
            return None
        return 0.01 if self.frequency == "batch" else 0.03

    def suits(self, optimizer: str) -> bool:
        """Returns whether workers take this optimizer: elastic momentum needs one that has some."""
        return self.algorithm != "eamsgd" or optimizer == "nesterov"


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
        windows = []
        for _ in range(epochs):
            order = rng.permutation(rows)
            batches = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
            # The end of an epoch cuts a window short.
            width = len(batches) if steps == "epoch" else 1 if steps == "batch" else int(steps)
            windows += [batches[start : start + width] for start in range(0, len(batches), width)]
        return windows


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
        self.layout = layout_of(self.model)
        self._fresh = [variable.numpy() for variable in self.optimizer.variables]
        self._loss = keras.losses.SparseCategoricalCrossentropy()
        rows = (tf.TensorSpec((None, 64), tf.float32), tf.TensorSpec((None,), tf.int32))
        self._gradients = tf.function(self._gradients_of, input_signature=rows)
        self._step = tf.function(self._train, input_signature=rows)

    def reset(self, flat: np.ndarray) -> None:
        """Sets the weights, and the optimizer as if it had never been used."""
        self.set(flat)
        for variable, value in zip(self.optimizer.variables, self._fresh, strict=True):
            variable.assign(value)

    def set(self, flat: np.ndarray) -> None:
        """Sets the weights."""
        write_weights(self.model, self.layout, flat)

    def get(self) -> np.ndarray:
        """Returns the weights."""
        return read_weights(self.model, self.layout)

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
        self, case: Case, learner: Learner, client: ParameterServerClient, digits: Digits, windows: Sequence[Any]
    ) -> None:
        self._case, self._learner, self._client, self._digits = case, learner, client, digits
        self._windows = iter(windows)
        self._weights = learner.get()
        self._algorithm = None if case.config.pushes_gradients else case.config.new_algorithm()
        self._update: np.ndarray | None = None
        self._step = 0

    def pull_and_compute(self) -> bool:
        """Pulls, and computes what will be pushed; returns False when there is no batch left."""
        window = next(self._windows, None)
        if window is None:
            return False
        if self._case.config.asynchronous.is_elastic:
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
        if self._algorithm is None:
            (rows,) = window
            self._update = self._learner.gradient(*self._rows(rows))
        else:
            self._train(window)
            self._update = self._algorithm.update(self._learner.get(), self._weights, len(window))

    def _pull_after(self, window: Sequence[np.ndarray]) -> None:
        self._train(window)
        own = self._learner.get()
        self._client.pull(self._weights)
        self._update = self._algorithm.update(own.copy(), self._weights, len(window))
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
