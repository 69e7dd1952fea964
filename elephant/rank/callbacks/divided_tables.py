"""Tables of a model's ShardedEmbedding layers, of which each rank of a fit has a part."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from elephant.collective.communicator import Communicator
from elephant.errors import CheckpointError, ConfigurationError
from elephant.modeling.layers.sharded_embedding import ShardedEmbedding, sharded_embeddings
from elephant.net.addresses import Ports
from elephant.net.stream import Listener
from elephant.rank.callbacks.rank_callbacks import any_rank
from elephant.storage.folder import folder_at
from elephant.tables.rank_tables import RankTables, Tables
from elephant.tables.stored import TablePlace, TablePlaces, writing_to


@dataclass(frozen=True)
class TableEndpoint:
    """Place at which a rank serves its parts of tables.

    Args:
        host: Address of this rank, which the others reach.
        token: The run's secret.
        run_id: The run.
        wait_s: Seconds that a rank may keep the others waiting.
        ports: Those that it may listen on.
    """

    host: str
    token: bytes = field(repr=False)
    run_id: str
    wait_s: float
    ports: Ports = None


class TableUpdates(keras.callbacks.Callback):
    """Has a table's last gradients applied before anything looks at the model: others may wait for this rank's."""

    def __init__(self, tables: RankTables) -> None:
        super().__init__()
        self._tables = tables

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._tables.flush()


class FitTables:
    """Tables of a fit's model.

    Args:
        embeddings: The layers.
        communicator: All ranks.
        fit_name: Beginning of the names of files that ranks write.

    Attributes:
        rank_tables: Those of which each rank has a part; None where there are none, or one rank has all.
    """

    def __init__(self, embeddings: Sequence[ShardedEmbedding], communicator: Communicator, fit_name: str) -> None:
        self.rank_tables: RankTables | None = None
        self._embeddings = embeddings
        self._communicator = communicator
        self._places = TablePlaces(paths=[layer.path_of_table for layer in embeddings], fit_name=fit_name)

    def require_folders(self) -> None:
        """Has all ranks write to the folders, and see what the others have written; before any step.

        Raises:
            CheckpointError: A folder cannot be written to, or is another one on another rank.
        """
        communicator = self._communicator
        names = [f"{self._places.name_of('begin')}.{rank}" for rank in range(communicator.world_size)]
        for url in self._places.urls:
            folder, own = folder_at(url), names[communicator.rank]
            try:
                with writing_to(url):
                    folder.write(own, lambda file: file.write(b"here"))
                communicator.barrier()
                missing = [rank for rank, name in enumerate(names) if not folder.has(name)]
                if missing:
                    raise CheckpointError(
                        f"ShardedEmbedding(path={url!r}): expected one folder that all workers see. Received: one in "
                        f"which rank {communicator.rank} does not see what rank {missing[0]} has written. Name a "
                        "folder of a file system that is mounted on all hosts, or of an object store."
                    )
                communicator.barrier()
            finally:
                with contextlib.suppress(OSError):
                    folder.remove(own)

    @contextlib.contextmanager
    def written(self, state: str) -> Iterator[dict[str, Any]]:
        """Writes this rank's parts of tables that have a path; all ranks call it, and meet when they have.

        In the block states refer to what was written. Gives what `elephant.checkpoint` has to know of it; nothing where
        nothing is written.

        Args:
            state: A name that no other state of the fit has.

        Raises:
            CheckpointError: The folder cannot be written to.
        """
        if not self._places.urls:
            yield {}
            return
        with contextlib.ExitStack() as stack:
            here = True
            for tables, places in self._placed(state):
                stack.enter_context(tables.stored_at(places))
                here = here and all(tables.is_finite(table) for table, place in enumerate(places) if place is not None)
            yield self._places.facts_of(state, are_finite=not any_rank(not here, self._communicator))

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Has what reads the model get references to nothing in the place of tables that have a path."""
        with contextlib.ExitStack() as stack:
            for tables, places in self._placed("while-it-trains"):
                stack.enter_context(tables.left_out(places))
            yield

    def _placed(self, state: str) -> list[tuple[Tables, list[TablePlace | None]]]:
        """Returns the tables, with where those of a state are written; None for those that are not."""
        places = self._places.of(state)
        if self.rank_tables is not None:
            return [(self.rank_tables, places)]
        return [(layer.tables, [place]) for layer, place in zip(self._embeddings, places, strict=True)]


def trainable_tables(model: keras.Model) -> list[ShardedEmbedding]:
    """Returns a model's layers whose tables a fit divides.

    Raises:
        ConfigurationError: The model's optimizer scales the loss.
    """
    layers = sharded_embeddings(model)
    if layers and isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            f"{layers[0].name}: expected an optimizer that does not scale the loss, because gradients of a "
            "ShardedEmbedding do not pass through it. Received: a LossScaleOptimizer, as of mixed_float16. Use "
            "mixed_bfloat16 or float32."
        )
    return layers


@contextlib.contextmanager
def divided_tables(
    model: keras.Model, communicator: Communicator, endpoint: TableEndpoint | None
) -> Iterator[FitTables]:
    """Divides the tables of a model over the ranks for the time of a ``with`` block; all ranks call it.

    At the end of the block each rank waits until nobody needs its parts any more, unless something was raised.

    Raises:
        ConfigurationError: The model's optimizer scales the loss.
    """
    layers = trainable_tables(model)
    fit_name = communicator.broadcast_object(secrets.token_hex(6)) if layers else ""
    fit_tables = FitTables(layers, communicator, fit_name)
    fit_tables.require_folders()
    if not layers or communicator.world_size == 1 or endpoint is None:
        with _own_errors(layers):
            yield fit_tables
        return
    # A function that builds the model may have drawn another one on each rank.
    seeds = communicator.broadcast_object([layer.seed for layer in layers])
    tables = RankTables(
        [replace(layer.table_spec, seed=seed) for layer, seed in zip(layers, seeds, strict=True)],
        [layer.own_arrays() for layer in layers],
        rank=communicator.rank,
        world_size=communicator.world_size,
        listener=Listener.bind(endpoint.host, ports=endpoint.ports),
        token=endpoint.token,
        run_id=endpoint.run_id,
        wait_s=endpoint.wait_s,
    )
    try:
        tables.connect(communicator.allgather_object(tables.address))
        for place, layer in enumerate(layers):
            layer.divide(tables, place)
        fit_tables.rank_tables = tables
        with _own_errors(layers):
            yield fit_tables
            tables.leave()
    finally:
        for layer in layers:
            layer.divide(None)
        tables.close()


@contextlib.contextmanager
def _own_errors(layers: Sequence[ShardedEmbedding]) -> Iterator[None]:
    """Raises the error of a table, where the framework has put one of its own in its place."""
    for layer in layers:
        layer.tables.error = None
    try:
        yield
    except Exception as error:
        found = next((layer.tables.error for layer in layers if layer.tables.error is not None), None)
        if found is not None and found is not error:
            raise found from error
        raise
