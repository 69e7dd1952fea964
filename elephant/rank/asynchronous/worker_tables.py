"""Tables of a model's ShardedEmbedding layers, whose rows are at the parameter servers of an asynchronous fit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import keras
import numpy as np

from elephant.errors import ConfigurationError, UnsupportedError
from elephant.rank.callbacks.divided_tables import trainable_tables
from elephant.tables.rank_tables import Tables
from elephant.tables.stack import TableContribution, stacks_of
from elephant.tables.table import TablePart

if TYPE_CHECKING:
    from elephant.parameter_server.client import ParameterServerClient


class WorkerTables(Tables):
    """Tables as a worker sees them: it looks rows up at the servers, and their gradients go with those of its step.

    So a step's rows are updated exactly once, as its weights are, whoever is lost meanwhile.

    Args:
        servers: They have the rows.
        num_servers: How many there are.

    Attributes:
        waited_s: Seconds so far in which lookups waited for rows.
    """

    updates_before_lookups = False

    def __init__(self, servers: ParameterServerClient, num_servers: int) -> None:
        super().__init__(servers.table_specs, stacks_of(servers.table_specs, num_servers))
        self._servers = servers
        self.waited_s = 0.0

    def begin(self) -> None:
        """Forgets what was not pushed."""
        self.error = None
        self.taken()

    def taken(self) -> TableContribution | None:
        """Returns the sums of the gradients of the step, and takes them away; None where none have come."""
        with self._using:
            return self._taken()

    def flush(self) -> None:
        """Does nothing: what waits goes with the push of the step."""

    def _rows_of(self, numbers: Sequence[np.ndarray], contribution: TableContribution | None) -> list[np.ndarray]:
        began = time.monotonic()
        try:
            return self._servers.look_up(numbers)
        finally:
            self.waited_s += time.monotonic() - began

    def _update(self, contribution: TableContribution) -> None:
        raise NotImplementedError("a contribution goes with the push of its step")

    def _whole(self, table: int, name: str) -> np.ndarray:
        raise UnsupportedError(
            "ShardedEmbedding: expected no look at a whole table by a worker of an asynchronous fit, which has none of "
            f"its rows. Received: one at {name!r}, as by a callback. Look at the model at the end of an epoch, on the "
            "driver."
        )

    def _part_here(self, table: int) -> TablePart:
        raise NotImplementedError("a worker has no part of a table")


@contextlib.contextmanager
def tables_of_servers(
    model: keras.Model, servers: ParameterServerClient, num_servers: int
) -> Iterator[WorkerTables | None]:
    """Has a model look rows up at the servers for the time of a ``with`` block; None where it has no tables.

    Raises:
        ConfigurationError: The model has other tables than the driver's, or its optimizer scales the loss.
    """
    layers = trainable_tables(model)
    if not layers:
        yield None
        return
    specs = [layer.table_spec for layer in layers]
    own, expected = ([replace(spec, seed=0) for spec in given] for given in (specs, servers.table_specs))
    if own != expected:
        raise ConfigurationError(
            f"model: expected the tables of the driver's model, {expected}. Received: {own}. Build the same model on "
            "the driver and on executors."
        )
    tables = WorkerTables(servers, num_servers)
    for place, layer in enumerate(layers):
        layer.divide(tables, place)
    try:
        yield tables
    finally:
        for layer in layers:
            layer.divide(None)
