"""Learning rates that change with the number of updates, as Keras computes them: in float32."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import float32

from elephant.errors import ConfigurationError
from elephant.parameter_server.optimizers.base import Schedule


def schedule_of(spec: float | Mapping[str, Any] | None) -> Schedule:
    """Returns the learning rate that a JSON value describes, as a function of the updates applied before.

    Args:
        spec: A number, which is the rate of all updates, or ``{"schedule": name, ...}`` with the
            arguments of the class of that name.

    Raises:
        ConfigurationError: It describes none.

    >>> schedule_of(0.5)(100)
    0.5
    >>> schedule_of({"schedule": "piecewise_constant_decay", "boundaries": [10], "values": [1.0, 0.25]})(11)
    0.25
    """
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        value = float(float32(spec))
        return lambda iteration: value
    options = dict(spec) if isinstance(spec, Mapping) else {}
    name = options.pop("schedule", None)
    if name not in _SCHEDULES:
        raise ConfigurationError(
            f"learning_rate: expected a number, or a schedule of {', '.join(SCHEDULES)}. Received: {spec!r}."
        )
    try:
        return _SCHEDULES[name](**options)
    except TypeError as error:
        raise ConfigurationError(
            f"learning_rate: expected arguments of {name}. Received: {spec!r} ({error})."
        ) from error


def power(base: float32, exponent: float32) -> float32:
    """Returns base to the exponent, rounded once: float32's own power is an ulp off more often.

    >>> power(np.float32(0.5), np.float32(2))
    np.float32(0.25)
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        return float32(np.power(np.float64(base), np.float64(exponent)))


class Changing(ABC):
    """A learning rate as a function of the number of updates applied before."""

    def __call__(self, iteration: int) -> float:
        """Returns the rate."""
        return float(self.value(float32(iteration)))

    @abstractmethod
    def value(self, step: float32) -> float32:
        """Returns the rate."""


@dataclass(frozen=True, kw_only=True)
class ExponentialDecay(Changing):
    """``initial_learning_rate * decay_rate ** (iteration / decay_steps)``.

    Args:
        initial_learning_rate: The first rate.
        decay_steps: Updates in which the rate falls by ``decay_rate``.
        decay_rate: A factor.
        staircase: Whether it falls only after each ``decay_steps`` updates.
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False

    def value(self, step: float32) -> float32:
        """Returns the rate."""
        periods = step / float32(self.decay_steps)
        periods = np.floor(periods) if self.staircase else periods
        return float32(self.initial_learning_rate) * power(float32(self.decay_rate), periods)


class InverseTimeDecay(ExponentialDecay):
    """``initial_learning_rate / (1 + decay_rate * iteration / decay_steps)``; arguments as for `ExponentialDecay`."""

    def value(self, step: float32) -> float32:
        """Returns the rate."""
        periods = step / float32(self.decay_steps)
        periods = np.floor(periods) if self.staircase else periods
        return float32(self.initial_learning_rate) / (float32(1) + float32(self.decay_rate) * periods)


@dataclass(frozen=True, kw_only=True)
class PiecewiseConstantDecay:
    """One rate up to and including each boundary, and one after the last.

    Args:
        boundaries: Numbers of updates, growing; fractions are cut off.
        values: One rate more than boundaries.
    """

    boundaries: Sequence[float]
    values: Sequence[float]

    def __call__(self, iteration: int) -> float:
        """Returns the rate."""
        return float(float32(self.values[sum(iteration > int(boundary) for boundary in self.boundaries)]))


@dataclass(frozen=True, kw_only=True)
class PolynomialDecay(Changing):
    """Falls from one rate to another along ``(1 - iteration / decay_steps) ** power``.

    Args:
        initial_learning_rate: The first rate.
        decay_steps: Updates until the last one.
        end_learning_rate: The last rate.
        power: 1 for a straight line.
        cycle: Whether it then begins again, each time from a lower rate, for the next multiple of ``decay_steps``.
    """

    initial_learning_rate: float
    decay_steps: float
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def value(self, step: float32) -> float32:
        """Returns the rate."""
        steps = float32(self.decay_steps)
        if self.cycle:
            steps = steps * (float32(1) if step == 0 else np.ceil(step / float32(self.decay_steps)))
        else:
            step = np.minimum(step, steps)
        end = float32(self.end_learning_rate)
        return (float32(self.initial_learning_rate) - end) * power(float32(1) - step / steps, float32(self.power)) + end


@dataclass(frozen=True, kw_only=True)
class CosineDecay(Changing):
    """Falls along half a cosine, if wanted after a straight warm-up.

    Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017. Warm-up: Goyal et al., Accurate,
    Large Minibatch SGD: Training ImageNet in 1 Hour, 2017.

    Args:
        initial_learning_rate: The first rate.
        decay_steps: Updates of the fall.
        alpha: The last rate as a part of the highest.
        warmup_target: The rate at the end of the warm-up; None for no warm-up.
        warmup_steps: Updates of the warm-up.
    """

    initial_learning_rate: float
    decay_steps: float
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: float = 0

    def value(self, step: float32) -> float32:
        """Returns the rate."""
        first = float32(self.initial_learning_rate)
        if self.warmup_target is None:
            return self._fall(np.minimum(step, float32(self.decay_steps)), first)
        target, warmup = float32(self.warmup_target), float32(self.warmup_steps)
        step = np.minimum(step, float32(self.decay_steps) + warmup)
        if step < warmup:
            return (target - first) * (step / warmup) + first
        return self._fall(step - warmup, target)

    def _fall(self, step: float32, highest: float32) -> float32:
        done = step / float32(self.decay_steps)
        height = float32(0.5) * (float32(1) + cosine(float32(math.pi) * done))
        return highest * (float32(1 - self.alpha) * height + float32(self.alpha))


@dataclass(frozen=True, kw_only=True)
class CosineDecayRestarts(Changing):
    """Falls along half a cosine again and again, each time ``t_mul`` times as long and from ``m_mul`` times the height.

    Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

    Args:
        initial_learning_rate: The first rate.
        first_decay_steps: Updates of the first fall.
        t_mul: Length of each fall as a multiple of the one before.
        m_mul: Height of each fall as a multiple of the one before.
        alpha: The lowest rate as a part of the first.
    """

    initial_learning_rate: float
    first_decay_steps: float
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0

    def value(self, step: float32) -> float32:
        """Returns the rate."""
        one, alpha = float32(1), float32(self.alpha)
        restarts, done = self._place(step / float32(self.first_decay_steps))
        height = float32(0.5) * power(float32(self.m_mul), restarts) * (one + cosine(float32(math.pi) * done))
        return float32(self.initial_learning_rate) * ((one - alpha) * height + alpha)

    def _place(self, done: float32) -> tuple[float32, float32]:
        """Returns the number of restarts, and the part of the present fall that is done."""
        one, factor = float32(1), float32(self.t_mul)
        if factor == one:
            return np.floor(done), done - np.floor(done)
        restarts = np.floor(logarithm(one - done * (one - factor)) / logarithm(factor))
        length = power(factor, restarts)
        return restarts, (done - (one - length) / (one - factor)) / length


def cosine(angle: float32) -> float32:
    """Returns the cosine, rounded once.

    >>> cosine(np.float32(0))
    np.float32(1.0)
    """
    return float32(np.cos(np.float64(angle)))


def logarithm(value: float32) -> float32:
    """Returns the natural logarithm, rounded once.

    >>> logarithm(np.float32(1))
    np.float32(0.0)
    """
    return float32(np.log(np.float64(value)))


_SCHEDULES: dict[str, Any] = {
    "exponential_decay": ExponentialDecay,
    "inverse_time_decay": InverseTimeDecay,
    "piecewise_constant_decay": PiecewiseConstantDecay,
    "polynomial_decay": PolynomialDecay,
    "cosine_decay": CosineDecay,
    "cosine_decay_restarts": CosineDecayRestarts,
}
SCHEDULES = tuple(_SCHEDULES)
