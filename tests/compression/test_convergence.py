"""Training with each compression reaches the accuracy of training without one.

A network of 64-128-64-10 units in plain numpy learns scikit-learn's digits on three ranks; each number is the mean over
three seeds. The margins are stated for users in docs/compression.md.
"""

import functools

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tiers import in_tiers

from elephant.compression import PowerSGD, TopK, reduction_for

RANKS, STEPS, ROWS, SEEDS = 3, 300, 20, (0, 1, 2)


class Network:
    """A multi-layer perceptron whose weights and gradients are flat arrays."""

    def __init__(self, *sizes):
        self.slices, start = [], 0
        for inputs, outputs in zip(sizes, sizes[1:], strict=False):
            self.slices += [(start, (inputs, outputs)), (start + inputs * outputs, (outputs,))]
            start += inputs * outputs + outputs
        self.count = start

    def layers(self, flat):
        views = [flat[start : start + int(np.prod(shape))].reshape(shape) for start, shape in self.slices]
        return list(zip(views[::2], views[1::2], strict=True))

    def first_weights(self, seed):
        generator, flat = np.random.default_rng(seed), np.zeros(self.count, np.float32)
        for kernel, _ in self.layers(flat):
            kernel[:] = generator.normal(size=kernel.shape) * np.sqrt(2 / len(kernel))
        return flat

    def activations(self, weights, rows):
        outputs = [rows]
        for kernel, bias in self.layers(weights):
            outputs.append(np.maximum(outputs[-1] @ kernel + bias, 0))
        outputs[-1] = outputs[-2] @ kernel + bias
        return outputs

    def gradient(self, weights, rows, labels):
        outputs, flat = self.activations(weights, rows), np.empty(self.count, np.float32)
        error = np.exp(outputs[-1] - outputs[-1].max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        layers = zip(self.layers(weights), self.layers(flat), outputs[:-1], strict=True)
        for (kernel, _), (kernel_gradient, bias_gradient), inputs in reversed(list(layers)):
            kernel_gradient[:], bias_gradient[:] = inputs.T @ error, error.sum(axis=0)
            error = (error @ kernel.T) * (inputs > 0)
        return flat


class Descent:
    """Plain stochastic gradient descent."""

    def update(self, weights, gradient):
        weights -= np.float32(0.3) * gradient


class Adam:
    """Kingma & Ba 2015, algorithm 1."""

    def __init__(self, rate=0.001):
        self._rate, self._step, self._mean, self._square = rate, 0, 0, 0

    def update(self, weights, gradient):
        self._step += 1
        self._mean = 0.9 * self._mean + 0.1 * gradient
        self._square = 0.999 * self._square + 0.001 * gradient**2
        mean, square = self._mean / (1 - 0.9**self._step), self._square / (1 - 0.999**self._step)
        weights -= (self._rate * mean / (np.sqrt(square) + 1e-7)).astype(np.float32)


@functools.cache
def digits():
    rows, labels = load_digits(return_X_y=True)
    return train_test_split((rows / 16).astype(np.float32), labels, test_size=0.3, random_state=0)


def accuracy(run_ranks, network, data, make_reduction, make_optimizer):
    """Returns the mean accuracy on the test rows over all seeds."""
    train_rows, test_rows, train_labels, test_labels = data
    results = []
    for seed in SEEDS:

        def train(ring, seed=seed):
            weights, optimizer, reduction = (
                network.first_weights(seed),
                make_optimizer(),
                make_reduction(network.slices),
            )
            generator, own = np.random.default_rng((seed, ring.rank)), np.arange(ring.rank, len(train_rows), RANKS)
            for _ in range(STEPS):
                batch = generator.choice(own, ROWS, replace=False)
                gradient = network.gradient(weights, train_rows[batch], train_labels[batch]) / np.float32(RANKS)
                reduction.reduce_(gradient, ring)
                optimizer.update(weights, gradient)
            return weights

        weights, *others = run_ranks(RANKS, train)
        assert all(other.tobytes() == weights.tobytes() for other in others)
        predicted = network.activations(weights, test_rows)[-1].argmax(axis=1)
        results.append((predicted == test_labels).mean())
    return float(np.mean(results))


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def trained(run_ranks, known):
    """Returns the accuracy with a reduction and an optimizer; that of no compression is found out once."""

    def run(make_reduction, make_optimizer):
        if make_reduction is None and make_optimizer in known:
            return known[make_optimizer]
        make = make_reduction or functools.partial(reduction_for, None)
        result = accuracy(run_ranks, Network(64, 128, 64, 10), digits(), make, make_optimizer)
        if make_reduction is None:
            known[make_optimizer] = result
        return result

    return run


class ForgetfulTopK(TopK):
    """The control: what is not sent is lost."""

    def _reduce(self, flat, exchange):
        self._memory.fill(0)
        super()._reduce(flat, exchange)


class ForgetfulPowerSGD(PowerSGD):
    """The control: what the factors do not hold is lost."""

    def _reduce(self, flat, exchange):
        self._memory.fill(0)
        super()._reduce(flat, exchange)


# By codec and optimizer, how much accuracy it may cost.
MARGINS = {
    "bfloat16 Descent": 0.005,
    "bfloat16 Adam": 0.005,
    "float16 Descent": 0.005,
    "float16 Adam": 0.005,
    "int8 Descent": 0.01,
    "int8 Adam": 0.01,
    "int8:feedback Descent": 0.01,
    "int8:feedback Adam": 0.01,
    "topk Descent": 0.015,
    "topk Adam": 0.04,
    "powersgd Descent": 0.01,
    "powersgd Adam": 0.02,
}
FAST = ["int8 Descent", "topk Descent", "powersgd Descent"]


@pytest.mark.parametrize("case", in_tiers(list(MARGINS), fast=FAST, slow="the other optimizer, or a like codec"))
def test_training_when_compressed_then_reaches_the_accuracy_of_none_within_the_margin(trained, case):
    name, optimizer = case.split()
    optimizer, margin = {"Descent": Descent, "Adam": Adam}[optimizer], MARGINS[case]
    without = trained(None, optimizer)
    assert without > 0.95
    assert trained(functools.partial(reduction_for, name), optimizer) > without - margin


CONTROLS = {"topk": (ForgetfulTopK, 0.015), "powersgd": (functools.partial(ForgetfulPowerSGD, rank=1), 0.04)}


@pytest.mark.parametrize("control", in_tiers(CONTROLS, fast=["topk"], slow="another codec"))
def test_training_when_nothing_is_fed_back_then_falls_behind_none(trained, control):
    forgetful, least = control
    assert trained(forgetful, Descent) < trained(None, Descent) - least


def test_training_when_one_column_dwarfs_the_others_then_int8_needs_its_feedback(run_ranks):
    # The step of a chunk is that of the one column, and the gradients of all others are below half of it.
    train_rows, test_rows, train_labels, test_labels = digits()
    generator = np.random.default_rng(5)
    widened = [
        np.concatenate([rows, generator.normal(size=(len(rows), 1)) * 300], axis=1, dtype=np.float32)
        for rows in (train_rows, test_rows)
    ]
    without, fed_back, forgetful = (
        accuracy(run_ranks, Network(65, 10), (*widened, train_labels, test_labels), make, lambda: Adam(0.01))
        for make in (
            functools.partial(reduction_for, None),
            functools.partial(reduction_for, "int8:feedback"),
            functools.partial(reduction_for, "int8"),
        )
    )
    assert fed_back > without - 0.03
    assert forgetful < fed_back - 0.005
