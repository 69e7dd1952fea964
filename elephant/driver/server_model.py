"""The driver's copy of a model whose weights parameter servers keep: what they begin with, and what they leave."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elephant.checkpoint.state import FitState, require_same_optimizers
from elephant.config import FitConfig
from elephant.data.schema import RowSpec
from elephant.modeling.layers.sharded_embedding import sharded_embeddings
from elephant.modeling.model_info import has_own_step
from elephant.modeling.optimizer_translation import inner_optimizer, restore_slots, slots_of, translate
from elephant.modeling.variable_paths import assign_state, state_paths
from elephant.modeling.variables import (
    OF_CHECKPOINT,
    assign_flat,
    flatten,
    layout_of,
    moving_statistics,
    on_cpu,
    optimizer_names,
    read_variables,
    read_weights,
    seeded,
    write_weights,
)
from elephant.parameter_server.control_client import FetchedModel
from elephant.rank.asynchronous.worker_fit import check_model
from elephant.rank.checkpoints import by_path
from elephant.rank.job import TrainingJob, prepared_model
from elephant.tables.stored import TablePlaces


class ServerModel:
    """A model as the driver of an asynchronous fit knows it.

    It is built as every worker builds it, seeded alike; what the user draws at random on
    the driver is not disturbed.

    Attributes:
        model: The compiled model.
        rows: What one row of its input is.
        layout: The places of its trainable variables in the servers' flat vector.
        table_places: Where servers write its tables.
        rule: How servers apply a push, for `elephant.parameter_server.optimizers.rule_of`.

    Raises:
        ConfigurationError: The model cannot be trained with this algorithm.
        UnsupportedError: The model, its optimizer or its backend cannot be trained with a parameter server.
    """

    @on_cpu()
    def __init__(self, job: TrainingJob, rows: RowSpec) -> None:
        self._config = job.config
        self._state = job.state
        self.rows = rows
        with job.model.settings.applied(), seeded(job.config.seed):
            self.model = prepared_model(job, rows, num_ranks=job.config.num_ranks)
        if job.state is not None:
            require_same_optimizers(job.state.facts, optimizer_names(self.model))
            assign_state(state_paths(self.model), by_path(job.state, self.model).arrays, remedy=OF_CHECKPOINT)
        check_model(self.model, job.config)
        self.layout = layout_of(self.model)
        paths = [layer.path_of_table for layer in sharded_embeddings(self.model)]
        self.table_places = TablePlaces(paths=paths, fit_name=secrets.token_hex(6))
        self.rule: dict[str, Any] = {"name": "add"}
        if job.config.pushes_gradients:
            self.rule = translate(self.model.optimizer, self.layout)

    @property
    def first_epoch(self) -> int:
        """The epoch that the fit begins with, from zero."""
        return 0 if self._state is None else self._state.epochs

    @property
    def pushes_every_step(self) -> bool:
        """True if each batch ends in a push: loss scaling leaves some out, and a train_step of its own may do so."""
        optimizer = self.model.optimizer
        return inner_optimizer(optimizer) is optimizer and not has_own_step(self.model)

    @property
    def optimizer_names(self) -> list[str]:
        """The classes of the model's optimizers."""
        return optimizer_names(self.model)

    def ledgers(self, num_servers: int) -> list[dict[int, list[int]]]:
        """Returns each server's first log of pushes: those before, of a fit that goes on.

        Other workers have other rows, and other batches other numbers: nothing is known then of what was pushed.
        """
        if self._state is None or not has_same_batches(self._state, self._config):
            return [{} for _ in range(num_servers)]
        kept = [{int(key): list(entry) for key, entry in one.items()} for one in self._state.facts["ledgers"]]
        if len(kept) == num_servers:
            return kept
        # What all of them had is what is sure; gossip has none at the end of an epoch.
        return [
            {key: min(one.get(key, [0, 0, 0]) for one in kept) for key in kept[0]} if kept else {}
            for _ in range(num_servers)
        ]

    def positions(self) -> dict[int, int]:
        """Returns the last step of each partition that is in the weights of a fit that goes on, as far as is known."""
        return positions_of(self.ledgers(1))

    def weights(self) -> np.ndarray:
        """Returns the trainable variables as one flat vector."""
        return read_weights(self.model, self.layout)

    def slots(self) -> tuple[list[np.ndarray], int]:
        """Returns the first slots of the servers' rule: its vectors, and the updates applied so far."""
        return slots_of(self.model.optimizer, self.layout) if self._config.pushes_gradients else ([], 0)

    def state(self) -> np.ndarray:
        """Returns the moving statistics, float64: what is averaged over the workers."""
        return flatten(moving_statistics(self.model))

    def tables(self) -> list[dict[str, np.ndarray]]:
        """Returns rows and slots of each table by name, or references to them; nothing of those that are as drawn."""
        return [layer.own_arrays() for layer in sharded_embeddings(self.model)]

    def take(self, fetched: FetchedModel) -> None:
        """Gives the model what the servers keep."""
        write_weights(self.model, self.layout, fetched.values)
        assign_flat(moving_statistics(self.model), fetched.state)
        if self._config.pushes_gradients:
            restore_slots(self.model.optimizer, self.layout, fetched.slots, fetched.iterations)
        for layer, arrays in zip(sharded_embeddings(self.model), fetched.tables, strict=False):
            layer.assign_tables(arrays)

    def variables(self) -> list[np.ndarray]:
        """Returns all variables, as `elephant.modeling.model_spec.ModelSpec.with_variables` takes them."""
        return read_variables(self.model)


def has_same_batches(state: FitState, config: FitConfig) -> bool:
    """Returns whether a worker's batch of some number is the same one to a fit as to that which has left a state."""
    kept = state.facts["fit"]
    same_size = kept.get("batch_size") == config.rank_batch_size and kept.get("cache", config.cache) == config.cache
    return kept["num_workers"] == config.num_ranks and same_size


def positions_of(ledgers: Sequence[Mapping[int, Sequence[int]]]) -> dict[int, int]:
    """Returns the last step of each partition that all servers have; see `ControlClient.keep`.

    >>> positions_of([{0: (4, 0, 0), 1: (2, 0, 0)}, {0: (3, 0, 0)}])
    {0: 3}
    """
    partitions = sorted({partition for ledger in ledgers for partition in ledger})
    positions = {partition: min(ledger.get(partition, (0,))[0] for ledger in ledgers) for partition in partitions}
    return {partition: step for partition, step in positions.items() if step}
