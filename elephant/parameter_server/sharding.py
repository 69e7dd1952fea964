"""Dividing one flat vector over several servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from elephant.errors import ConfigurationError, PositionLost
from elephant.parameter_server.optimizers import without_clipping
from elephant.parameter_server.spec import ServerSpec

T = TypeVar("T")
R = TypeVar("R")


def shard_specs(spec: ServerSpec, count: int) -> list[ServerSpec]:
    """Returns what each of several servers keeps, given what one would: contiguous parts, about equally long.

    The state that is averaged stays with the first.

    Raises:
        ConfigurationError: There are fewer than 16 values for each server, or the rule clips by a norm.

    >>> from elephant.parameter_server.layout import Layout
    >>> whole = ServerSpec(run_id="r", layout=Layout([("a", (100,))]), first_value=0, num_values=112)
    >>> [(part.first_value, part.num_values) for part in shard_specs(whole, 2)]
    [(0, 64), (64, 48)]
    """
    if count > 1 and without_clipping(spec.rule)[1] is not None:
        raise ConfigurationError(
            f"rule: expected one without clipping by a norm, because none of {count} servers sees a whole gradient. "
            f"Received: {spec.rule!r}. Take it out with optimizers.without_clipping, and have workers clip."
        )
    parts = spec.layout.cut(count)
    if any(part.stop == part.start for part in parts):
        raise ConfigurationError(
            f"parameterServers: expected at most one for each 16 of the model's {spec.layout.num_values} values. "
            f"Received: {count}."
        )
    return [
        replace(
            spec,
            first_value=part.start,
            num_values=part.stop - part.start,
            num_state_values=spec.num_state_values if index == 0 else 0,
        )
        for index, part in enumerate(parts)
    ]


class SideBySide:
    """Does the same with each of several servers at a time; with one, in the calling thread.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self._threads = None if count == 1 else ThreadPoolExecutor(count, thread_name_prefix="elephant-shard")

    def call(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Returns what the function returns for each item; raises an error once all calls have ended."""
        if self._threads is None:
            return [function(item) for item in items]
        futures = [self._threads.submit(function, item) for item in items]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            # A lost position is an answer, and matters only where there was no failure.
            raise min(errors, key=lambda error: isinstance(error, PositionLost))
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads, once their calls have ended."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
