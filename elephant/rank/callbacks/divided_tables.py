"""Tables of a model's ShardedEmbedding layers, of which each rank of a fit has a part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from elephant.collective.communicator import Communicator
from elephant.errors import ConfigurationError
from elephant.modeling.layers.sharded_embedding import sharded_embeddings
from elephant.net.stream import Listener
from elephant.tables.rank_tables import RankTables


@dataclass(frozen=True)
class TableEndpoint:
    """Place at which a rank serves its parts of tables.

    Args:
        host: Address of this rank, which the others reach.
        token: The run's secret.
        run_id: The run.
        wait_s: Seconds that a rank may keep the others waiting.
    """

    host: str
    token: bytes = field(repr=False)
    run_id: str
    wait_s: float


class TableUpdates(keras.callbacks.Callback):
    """Has a table's last gradients applied before anything looks at the model: others may wait for this rank's."""

    def __init__(self, tables: RankTables) -> None:
        super().__init__()
        self._tables = tables

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._tables.flush()


@contextlib.contextmanager
def divided_tables(
    model: keras.Model, communicator: Communicator, endpoint: TableEndpoint | None
) -> Iterator[RankTables | None]:
    """Divides the tables of a model over the ranks for the time of a ``with`` block; all ranks call it.

    Gives them, or None where the model has none, or one rank has all. At the end of the block each rank waits until
    nobody needs its parts any more, unless something was raised.

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
    if not layers or communicator.world_size == 1 or endpoint is None:
        yield None
        return
    # A function that builds the model may have drawn another one on each rank.
    seeds = communicator.broadcast_object([layer.seed for layer in layers])
    tables = RankTables(
        [replace(layer.table_spec, seed=seed) for layer, seed in zip(layers, seeds, strict=True)],
        [layer.own_arrays() for layer in layers],
        rank=communicator.rank,
        world_size=communicator.world_size,
        listener=Listener.bind(endpoint.host),
        token=endpoint.token,
        run_id=endpoint.run_id,
        wait_s=endpoint.wait_s,
    )
    try:
        tables.connect(communicator.allgather_object(tables.address))
        for place, layer in enumerate(layers):
            layer.divide(tables, place)
        yield tables
        tables.leave()
    except Exception as error:
        # A framework may raise an error of its own in the place of the one of a call.
        if tables.error is not None and tables.error is not error:
            raise tables.error from error
        raise
    finally:
        for layer in layers:
            layer.divide(None)
        tables.close()
