"""Update rules by name: SGD, Adagrad, Adam and RMSprop, with their wrappers."""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from elephant.errors import ConfigurationError
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers.base import Addition, Descent, Rule
from elephant.parameter_server.optimizers.schedules import power, schedule_of
from elephant.parameter_server.optimizers.wrappers import (
    Decayed,
    NormClipped,
    Unscaled,
    ValueClipped,
    clipping_of,
    without_clipping,
)
from elephant.storage.filesystem import require_safe_library

logger = logging.getLogger(__name__)

_WRAPPERS = ("weight_decay", "clip", "loss_scale")


@dataclass(frozen=True)
class KnownOptimizer:
    """An optimizer of Keras that parameter servers have.

    Args:
        make: Makes the rule from ``learning_rate`` and ``arguments``.
        keras: The class' name in ``keras.optimizers``.
        slots: For each of the rule's slots, the attribute of the Keras optimizer that holds its variables.
    """

    make: Callable[..., Rule]
    keras: str
    slots: Mapping[str, str]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the rule's arguments beside the learning rate; Keras' attributes have the same."""
        return tuple(name for name in inspect.signature(self.make).parameters if name != "learning_rate")


OPTIMIZERS: dict[str, KnownOptimizer] = {}
_Make = TypeVar("_Make", bound=Callable[..., Rule])


def register_rule(name: str, *, keras: str, slots: Mapping[str, str]) -> Callable[[_Make], _Make]:
    """Gives a rule, or the function that makes it, its name in specs and what it is in Keras.

    Args:
        name: As ``"name"`` in the JSON value of ``rule_of``.
        keras: As for `KnownOptimizer`.
        slots: As for `KnownOptimizer`.
    """

    def register(make: _Make) -> _Make:
        OPTIMIZERS[name] = KnownOptimizer(make, keras, slots)
        return make

    return register


class SGD(Descent):
    """Stochastic gradient descent: ``values -= rate * gradient``.

    Robbins and Monro, A Stochastic Approximation Method, 1951.

    >>> weights, rule = np.ones(2, np.float32), SGD(learning_rate=lambda iteration: 0.5)
    >>> rule.update(rule.begin(0), 0, weights, np.array([1, 2], np.float32))
    >>> weights
    array([0.5, 0. ], dtype=float32)
    """

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Takes one step."""
        # A gradient that is not written to is a third less for the memory to carry.
        np.multiply(gradient, scalars, out=scratch)
        np.subtract(values, scratch, out=values)


@dataclass(frozen=True, kw_only=True)
class Momentum(Descent):
    """Gradient descent that keeps a part of its last step.

    Polyak, Some methods of speeding up the convergence of iteration methods, 1964.

    Args:
        learning_rate: As for every rule.
        momentum: The part that is kept, in [0, 1].
    """

    momentum: float

    @property
    def slots(self) -> tuple[str, ...]:
        """The last step."""
        return ("momentum",)

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Takes one step."""
        self._remember(scalars, gradient, slots[0], scratch)
        np.add(values, slots[0], out=values)

    def _remember(self, rate: np.float32, gradient: np.ndarray, momentum: np.ndarray, scaled: np.ndarray) -> None:
        np.multiply(gradient, rate, out=scaled)
        np.multiply(momentum, self.momentum, out=momentum)
        np.subtract(momentum, scaled, out=momentum)


class Nesterov(Momentum):
    """Momentum whose gradient counts as if it were taken one step of momentum ahead.

    Nesterov, A method for solving the convex programming problem with convergence rate O(1/k^2), 1983, in the form of
    Sutskever, Martens, Dahl and Hinton, On the importance of initialization and momentum in deep learning, 2013.
    """

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Takes one step."""
        self._remember(scalars, gradient, slots[0], scratch)
        np.multiply(slots[0], self.momentum, out=gradient)
        np.subtract(gradient, scratch, out=gradient)
        np.add(values, gradient, out=values)


@register_rule("sgd", keras="SGD", slots={"momentum": "momentums"})
def _sgd(*, learning_rate: Any, momentum: float = 0.0, nesterov: bool = False) -> Rule:
    if momentum == 0:
        return SGD(learning_rate=learning_rate)
    return (Nesterov if nesterov else Momentum)(learning_rate=learning_rate, momentum=momentum)


@register_rule("adagrad", keras="Adagrad", slots={"accumulator": "_accumulators"})
@dataclass(frozen=True, kw_only=True)
class Adagrad(Descent):
    """Divides each weight's step by the root of the sum of its squared gradients.

    Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, 2011.

    Args:
        learning_rate: As for every rule.
        initial_accumulator_value: Where the sums begin.
        epsilon: Added to the sum, under the root.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    @property
    def slots(self) -> tuple[str, ...]:
        """The sum of squared gradients."""
        return ("accumulator",)

    def init(self, num_values: int) -> tuple[np.ndarray, ...]:
        """Returns one vector full of the initial value."""
        return (np.full(num_values, self.initial_accumulator_value, np.float32),)

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Takes one step."""
        (accumulator,) = slots
        np.square(gradient, out=scratch)
        np.add(accumulator, scratch, out=accumulator)
        np.add(accumulator, self.epsilon, out=scratch)
        np.sqrt(scratch, out=scratch)
        np.multiply(gradient, scalars, out=gradient)
        np.divide(gradient, scratch, out=gradient)
        np.subtract(values, gradient, out=values)


@functools.cache
def one_pass_adam() -> Callable[..., None] | None:
    """Returns native/adam.c, which has the bits of numpy's passes; None where it was not built or cannot be loaded."""
    path = next(Path(__file__).with_name("native").glob("adam*.so"), None)
    if path is None:
        return None
    try:
        require_safe_library(path)
        update: Callable[..., None] = ctypes.CDLL(str(path)).elephant_adam
    except (OSError, AttributeError) as error:
        logger.warning("Adam is applied by numpy, in more time: expected a library in %s. Received: %s", path, error)
        return None
    vector = np.ctypeslib.ndpointer(np.float32, ndim=1, flags=("C_CONTIGUOUS", "ALIGNED"))
    update.restype, update.argtypes = None, [ctypes.c_int64, *[vector] * 4, *[ctypes.c_float] * 4]  # type: ignore[attr-defined]
    return update


_ADAM_SLOTS = {"momentum": "_momentums", "velocity": "_velocities", "velocity_hat": "_velocity_hats"}


@register_rule("adam", keras="Adam", slots=_ADAM_SLOTS)
@dataclass(frozen=True, kw_only=True)
class Adam(Descent):
    """Scales each weight's step by moving averages of its gradients and of their squares.

    Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, in the form before section 2.1, whose epsilon
    stands beside the root. AMSGrad: Reddi, Kale and Kumar, On the Convergence of Adam and Beyond, 2018.

    Args:
        learning_rate: As for every rule.
        beta_1: What the average gradient keeps of itself in one update.
        beta_2: What the average square keeps of itself in one update.
        epsilon: Added to the root of the average square.
        amsgrad: Whether the greatest average square so far stands in for the average square.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The average gradient, the average square, and the greatest of those for AMSGrad."""
        return ("momentum", "velocity") + ("velocity_hat",) * self.amsgrad

    def begin(self, iteration: int, rate: float | None = None) -> Any:
        """Returns the rate, corrected for averages that began at zero."""
        one, learning_rate = np.float32(1), super().begin(iteration, rate)
        unseen_1 = power(np.float32(self.beta_1), np.float32(iteration + 1))
        unseen_2 = power(np.float32(self.beta_2), np.float32(iteration + 1))
        return learning_rate * np.sqrt(one - unseen_2) / (one - unseen_1)

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Takes one step."""
        momentum, velocity = slots[:2]
        in_one_pass = None if self.amsgrad else one_pass_adam()
        if in_one_pass is not None:
            new_1, new_2 = 1 - self.beta_1, 1 - self.beta_2
            in_one_pass(len(values), values, gradient, momentum, velocity, scalars, new_1, new_2, self.epsilon)
            return
        np.subtract(gradient, momentum, out=scratch)
        np.multiply(scratch, 1 - self.beta_1, out=scratch)
        np.add(momentum, scratch, out=momentum)
        np.square(gradient, out=gradient)
        np.subtract(gradient, velocity, out=gradient)
        np.multiply(gradient, 1 - self.beta_2, out=gradient)
        np.add(velocity, gradient, out=velocity)
        if self.amsgrad:
            np.maximum(slots[2], velocity, out=slots[2])
        np.sqrt(slots[-1], out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.multiply(momentum, scalars, out=gradient)
        np.divide(gradient, scratch, out=gradient)
        np.subtract(values, gradient, out=values)


@register_rule("adamw", keras="AdamW", slots=_ADAM_SLOTS)
class AdamW(Adam):
    """Adam beside a weight decay that does not pass through its averages: the rule's ``"weight_decay"``.

    Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """


_RMSPROP_SLOTS = {"velocity": "_velocities", "average_gradient": "_average_gradients", "momentum": "_momentums"}


@register_rule("rmsprop", keras="RMSprop", slots=_RMSPROP_SLOTS)
@dataclass(frozen=True, kw_only=True)
class RMSprop(Descent):
    """Divides each weight's step by the root of a moving average of its squared gradients.

    Hinton, Neural Networks for Machine Learning, lecture 6e, 2012. Centered: by an estimate of the gradient's
    variance, as in Graves, Generating Sequences With Recurrent Neural Networks, 2013.

    Args:
        learning_rate: As for every rule.
        rho: What an average keeps of itself in one update.
        momentum: What the last step adds to this one; none where it is zero.
        epsilon: Added to the average, under the root.
        centered: Whether the square of the average gradient is subtracted.
    """

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The average of squared gradients, that of gradients if centered, and the last step if there is momentum."""
        return ("velocity",) + ("average_gradient",) * self.centered + ("momentum",) * (self.momentum > 0)

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Takes one step."""
        velocity = slots[0]
        np.square(gradient, out=scratch)
        self._average(velocity, scratch, scratch)
        if self.centered:
            self._average(slots[1], gradient, scratch)
            np.square(slots[1], out=scratch)
            np.subtract(velocity, scratch, out=scratch)
            np.add(scratch, self.epsilon, out=scratch)
        else:
            np.add(velocity, self.epsilon, out=scratch)
        np.sqrt(scratch, out=scratch)
        np.multiply(gradient, scalars, out=gradient)
        np.divide(gradient, scratch, out=gradient)
        if self.momentum > 0:
            np.multiply(slots[-1], self.momentum, out=slots[-1])
            np.add(slots[-1], gradient, out=slots[-1])
            gradient = slots[-1]
        np.subtract(values, gradient, out=values)

    def _average(self, average: np.ndarray, new: np.ndarray, scratch: np.ndarray) -> None:
        np.multiply(new, 1 - self.rho, out=scratch)
        np.multiply(average, self.rho, out=average)
        np.add(average, scratch, out=average)


def rule_of(spec: Mapping[str, Any], layout: Layout) -> Rule:
    """Returns the rule that a JSON value describes.

    Args:
        spec: ``{"name": "add"}``, or the ``"name"`` of an optimizer, its ``"learning_rate"`` (a number, or a schedule
            as for ``schedule_of``) and the arguments of its class. For all optimizers also:
            ``"weight_decay"``: ``{"rate": 0.01, "excluded": [[start, stop], ...]}``, where the pairs
            are what does not decay in the vector of all variables; ``"clip"``: ``{"norm": 1.0}`` for each
            variable, ``{"global_norm": 1.0}`` or ``{"value": 0.5}``; ``"loss_scale"``: what gradients are divided by.

    Raises:
        ConfigurationError: There is no such name, or no such option.

    >>> rule_of({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}, Layout([("a", (3,))])).slots
    ('momentum',)
    """
    spec, norms = without_clipping(spec)
    rule = _bare(spec)
    if spec.get("weight_decay") is not None:
        rule = _built(Decayed, spec, "weight_decay", rule)
    if spec.get("clip") is not None:
        rule = _built(_value_clipped, spec, "clip", rule)
    if spec.get("loss_scale") is not None:
        rule = Unscaled(rule, spec["loss_scale"])
    if norms:
        clipping_of(norms, layout)
        rule = NormClipped(rule, norms)
    return rule


def _bare(spec: Mapping[str, Any]) -> Rule:
    name = spec.get("name")
    if name == "add" and len(spec) == 1:
        return Addition()
    if name not in OPTIMIZERS:
        known = ", ".join(("add", *OPTIMIZERS))
        raise ConfigurationError(f"rule: expected one of {known}, and no options for 'add'. Received: {dict(spec)!r}.")
    options = {key: value for key, value in spec.items() if key not in ("name", "learning_rate", *_WRAPPERS)}
    if not np.float32(options.get("epsilon", 1)) > 0:
        # Where a gradient has always been zero, as between two variables, the weight would become NaN.
        raise ConfigurationError(f"epsilon: expected a float32 above zero. Received: {options['epsilon']!r}.")
    rate = schedule_of(spec.get("learning_rate"))
    try:
        return OPTIMIZERS[name].make(learning_rate=rate, **options)
    except TypeError as error:
        raise ConfigurationError(f"rule: expected options of {name!r}. Received: {dict(spec)!r} ({error}).") from error


def _built(wrapper: Callable[..., Rule], spec: Mapping[str, Any], key: str, rule: Rule) -> Rule:
    try:
        return wrapper(rule, **spec[key])
    except TypeError as error:
        raise ConfigurationError(f"{key}: expected its options. Received: {spec[key]!r} ({error}).") from error


def _value_clipped(rule: Rule, *, value: float) -> Rule:
    return ValueClipped(rule, value)
