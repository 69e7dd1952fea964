"""Part of an optimizer: the variables that a rank updates, for which alone it keeps slots.

ZeRO, stage 1 (Rajbhandari et al. 2020, section 5.1): each rank updates some of the variables, by gradients that all
have averaged, and then gets the values of the others from the ranks that have updated those. A variable belongs to one
rank as a whole, so that rules with a norm of each variable, such as Lamb, do what they do in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from elephant.backends.keras_private import clipping_of, replace_clipping
from elephant.collective.communicator import Communicator


def owners_of(sizes: Sequence[int], world_size: int) -> list[int]:
    """Returns the rank that updates each variable: the largest ones first, each for the rank that has least so far.

    >>> owners_of([10, 500, 20, 300, 100], 2)
    [1, 0, 1, 1, 1]
    """
    loads, owners = [0] * world_size, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


class OptimizerPart:
    """Places of the variables that this rank updates, and the exchange of their values after each update.

    A rank for which no variable is left updates the smallest one as well as its owner does, so that its count of steps
    and its learning rate go on.

    Args:
        variables: The trainable variables, in the model's order.

    Attributes:
        variables: As given.
        updated: Places of those that this rank updates.
        sent: Places of those whose values others get from this rank.
        received: Places of those whose values it gets from others.
    """

    def __init__(self, communicator: Communicator, variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self._communicator = communicator
        self._specs = [(tuple(one.shape), np.dtype(str(one.dtype))) for one in self.variables]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._specs]
        owners = owners_of(sizes, communicator.world_size)
        self._places_of = [
            [place for place, owner in enumerate(owners) if owner == rank] for rank in range(communicator.world_size)
        ]
        self.sent = self._places_of[communicator.rank]
        self.updated = self.sent or [sizes.index(min(sizes))]
        self.received = [place for rank in self._other_ranks for place in self._places_of[rank]]
        self._updated_ids = {id(self.variables[place]) for place in self.updated}

    @property
    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self._communicator.world_size) if rank != self._communicator.rank]

    @property
    def specs_received(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each variable in ``received``."""
        return [self._specs[place] for place in self.received]

    def updates(self, variable: Any) -> bool:
        """Returns whether this rank updates a variable."""
        return id(variable) in self._updated_ids

    def exchange(self, *values: np.ndarray) -> list[np.ndarray]:
        """Returns the values of the variables in ``received``; all ranks call it after each update.

        Args:
            values: Of those in ``sent``.
        """
        flat = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
        blocks = self._communicator.allgather(np.concatenate([np.empty(0, np.uint8), *flat]))
        found = []
        for rank in self._other_ranks:
            start = 0
            for place in self._places_of[rank]:
                shape, dtype = self._specs[place]
                stop = start + math.prod(shape) * dtype.itemsize
                # A copy: a framework may go on using it, and may want it to begin where such arrays do.
                found.append(np.array(blocks[rank][start:stop]).view(dtype).reshape(shape))
                start = stop
        return found


class WholeClipping:
    """Clipping of gradients by the norm of all of them, for an optimizer that gets those of a part.

    Args:
        optimizer: One with a ``global_clipnorm``.
    """

    def __init__(self, optimizer: Any, optimizer_part: OptimizerPart) -> None:
        self._optimizer, self._optimizer_part = optimizer, optimizer_part
        self._clip: Callable[[Sequence[Any]], list[Any]] = clipping_of(optimizer)
        self._pairs: list[tuple[Any, Any]] = []
        replace_clipping(optimizer, self._clip_part)

    def begin(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Takes the gradients of all variables, as the optimizer would get them."""
        self._pairs = [
            (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            # Keras does not count what takes the place of a variable.
            if gradient is not None and not getattr(variable, "overwrite_with_gradient", False)
        ]

    def _clip_part(self, _: Sequence[Any]) -> list[Any]:
        pairs, scale = self._pairs, self._optimizer.loss_scale_factor
        self._pairs = []
        clipped = self._clip([gradient if scale is None else gradient / scale for gradient, _ in pairs])
        return [
            gradient
            for gradient, (_, variable) in zip(clipped, pairs, strict=True)
            if self._optimizer_part.updates(variable)
        ]
