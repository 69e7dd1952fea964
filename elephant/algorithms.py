"""Algorithms of asynchronous training: what a worker pushes after a window of steps, and how a server counts it.

=========================  ====================================  ==============================================
algorithm                  frequency ``"batch"``                 k steps, or ``"epoch"``
=========================  ====================================  ==============================================
`downpour`                 the gradient, which the server's      the move of the weights, divided by
                           optimizer applies                     the number of workers
`dynsgd`                   the gradient / (staleness + 1)        the move / (staleness + 1)
`adag`                     the gradient                          the move / the window's steps
`aeasgd`, `eamsgd`         elastic averaging at every step       elastic averaging every k steps
`sum`                      the move of each step                 the move
=========================  ====================================  ==============================================

Gossip has algorithms of its own: there is no server to push to.

The options, their help and the checks of a fit come from what is registered here. Nothing is imported: the command
line reads the names too. `elephant.rank.asynchronous.push_strategies` connects an algorithm to Keras.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

A = TypeVar("A", bound="type[Algorithm]")


class Algorithm(ABC):
    """Push of one algorithm at the end of a window of steps.

    Args:
        num_workers: Workers of the fit.
        elasticity: How far workers move towards the servers, and these towards them; None for the usual way.

    Attributes:
        pushes_gradients: Whether, with frequency "batch", the servers' optimizer applies each step's gradient.
        divides_by_staleness: Whether the servers divide every push by its staleness plus one.
        is_elastic: Whether workers keep weights of their own that are drawn towards the servers'.
        needs_momentum: Whether workers must train with SGD that has momentum.
    """

    pushes_gradients = False
    divides_by_staleness = False
    is_elastic = False
    needs_momentum = False

    def __init__(self, num_workers: int, elasticity: float | None = None) -> None:
        self.num_workers = num_workers

    @abstractmethod
    def update(self, local: np.ndarray, center: np.ndarray, steps: int) -> np.ndarray:
        """Returns the update that a worker adds to the servers' weights.

        Args:
            local: The worker's weights, flat float32; may be overwritten.
            center: The servers' weights as the worker last pulled them: for the elastic algorithms
                just now, for the others before the window.
            steps: Steps of the window.
        """

    def advice(self, frequency: str | int) -> str | None:
        """Returns a line for the user where it is not expected to learn well, or None."""
        return None


ALGORITHMS: dict[str, type[Algorithm]] = {}
# Those of gossip, in `elephant.gossip.weights`, of which the first is the usual one.
GOSSIP_ALGORITHMS = ("adpsgd", "sgp")


def parts_of(text: str) -> tuple[str, float | None]:
    """Returns the name and the elasticity of an algorithm as the option ``algorithm`` has it.

    Raises:
        ValueError: What is behind the colon is no number.

    >>> parts_of("aeasgd:0.3"), parts_of("adag")
    (('aeasgd', 0.3), ('adag', None))
    """
    name, colon, elasticity = text.partition(":")
    return name, float(elasticity) if colon else None


def is_algorithm(text: str) -> bool:
    """Returns whether a text names an algorithm, and an elasticity only for one that has it.

    >>> is_algorithm("aeasgd:0.3"), is_algorithm("aeasgd"), is_algorithm("adag:0.3"), is_algorithm("aeasgd:2")
    (True, True, False, False)
    """
    try:
        name, elasticity = parts_of(text)
    except ValueError:
        return False
    if elasticity is None:
        return name in ALGORITHMS or name in GOSSIP_ALGORITHMS
    return name in ALGORITHMS and ALGORITHMS[name].is_elastic and 0 < elasticity < 1


def register_algorithm(name: str) -> Callable[[A], A]:
    """Returns a decorator that makes an algorithm known by a name, as the option ``algorithm`` has it."""

    def register(algorithm: A) -> A:
        ALGORITHMS[name] = algorithm
        return algorithm

    return register


@register_algorithm("downpour")
class Downpour(Algorithm):
    """Moves of the weights, each divided by the number of workers.

    Dean et al. 2012, *Large Scale Distributed Deep Networks*, section 4.1 (Downpour SGD), whose workers
    push every n_push steps. The division makes N moves of one window the average of them.
    """

    pushes_gradients = True

    def update(self, local: np.ndarray, center: np.ndarray, steps: int) -> np.ndarray:
        local -= center
        local *= 1.0 / self.num_workers
        return local


@register_algorithm("adag")
class Adag(Algorithm):
    """Moves of the weights, divided by the number of steps that made them.

    Hermans 2017, *On Scalable Deep Learning and Parallelizing Gradient Descent*, chapter 3
    (accumulated gradient normalization). A window that an epoch cuts short is divided by the steps it had.
    """

    pushes_gradients = True

    def update(self, local: np.ndarray, center: np.ndarray, steps: int) -> np.ndarray:
        local -= center
        local *= 1.0 / steps
        return local


@register_algorithm("dynsgd")
class DynSGD(Algorithm):
    """Moves of the weights, which the server divides by their staleness plus one.

    Jiang et al. 2017, *Heterogeneity-aware Distributed Parameter Servers*, section 5 (DynSGD).
    """

    pushes_gradients = True
    divides_by_staleness = True

    def update(self, local: np.ndarray, center: np.ndarray, steps: int) -> np.ndarray:
        local -= center
        return local


@register_algorithm("aeasgd")
class ElasticAveraging(Algorithm):
    """Draws the worker's weights and the center towards each other.

    Zhang, Choromanska & LeCun 2015, *Deep Learning with Elastic Averaging SGD*, algorithm 1
    (asynchronous EASGD).

    Attributes:
        elasticity: The moving rate alpha, in (0, 1): beta / N with beta = 0.9, as the paper recommends, unless
            another is given.

    >>> ElasticAveraging(num_workers=3).elasticity
    0.3
    """

    is_elastic = True

    def __init__(self, num_workers: int, elasticity: float | None = None) -> None:
        super().__init__(num_workers)
        self.elasticity = 0.9 / num_workers if elasticity is None else float(elasticity)

    def update(self, local: np.ndarray, center: np.ndarray, steps: int) -> np.ndarray:
        local -= center
        local *= self.elasticity
        return local


@register_algorithm("eamsgd")
class ElasticAveragingWithMomentum(ElasticAveraging):
    """Elastic averaging of workers whose own steps have Nesterov momentum: algorithm 2 of the same paper."""

    needs_momentum = True


@register_algorithm("sum")
class Sum(Algorithm):
    """Moves of the weights as they are: what Elephas does. With several steps it does not converge well."""

    def update(self, local: np.ndarray, center: np.ndarray, steps: int) -> np.ndarray:
        local -= center
        return local

    def advice(self, frequency: str | int) -> str | None:
        if frequency in ("batch", 1) or self.num_workers == 1:
            return None
        return (
            f"algorithm='sum' with frequency={frequency!r} adds up what {self.num_workers} workers have each "
            "learned alone: on handwritten digits it stayed at 0.77 to 0.86 where one process reaches 0.955. "
            "algorithm='downpour' or 'dynsgd' scales it."
        )
