"""What can be reduced, and how: dtypes, operations, and the two steps of a mean."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from elephant.errors import ConfigurationError

_COMBINE = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}
OPERATIONS = tuple(_COMBINE)
_HALVES = ("float16", "bfloat16")
_NAMES = (*_HALVES, "float32", "float64", "int32", "int64")


@dataclass(frozen=True)
class ReduceOp:
    """One reduction over the ranks, as two steps that a transport applies to pieces of arrays.

    Args:
        op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.
        world_size: How many ranks bring a value.
    """

    op: str
    world_size: int

    @property
    def is_linear(self) -> bool:
        """Whether it adds, so that what a codec loses can be made up for in a later one."""
        return self.op in ("sum", "mean")

    def combine(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        """Writes the reduction of two partial results; ``out`` may be either of them."""
        _COMBINE[self.op](left, right, out=out)

    def finish(self, values: np.ndarray) -> None:
        """Turns the combination of all ranks' values into the result, in place."""
        if self.op == "mean":
            np.divide(values, self.world_size, out=values)


@functools.lru_cache(maxsize=64)
def name_of(dtype: np.dtype) -> str:
    """Returns the dtype's name, which numpy takes microseconds to make."""
    return dtype.name if dtype.isnative else dtype.str


def is_half(dtype: np.dtype) -> bool:
    """Whether values of the dtype are reduced in float32. bfloat16 is known by its name: numpy has no kind for it."""
    return dtype.itemsize == 2 and name_of(dtype) in _HALVES


def is_reducible(dtype: np.dtype) -> bool:
    """Whether ``allreduce_`` takes arrays of the dtype.

    >>> is_reducible(np.dtype("float32")), is_reducible(np.dtype(">f4")), is_reducible(np.dtype("uint8"))
    (True, False, False)
    """
    return name_of(dtype) in _NAMES


def check_reduction(dtype: np.dtype, op: str) -> None:
    """Raises ConfigurationError unless values of the dtype can be reduced by the operation."""
    if op not in _COMBINE:
        raise ConfigurationError(f"op: expected one of {', '.join(_COMBINE)}. Received: {op!r}.")
    if not is_reducible(dtype):
        raise ConfigurationError(f"array: expected dtype {', '.join(_NAMES)}. Received: {dtype}.")
    if op == "mean" and dtype.kind == "i":
        raise ConfigurationError(f"op: expected sum, min or max for integers. Received: 'mean' for {dtype}.")
