"""Rows of an embedding layer of a trained model, as an array or as a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import keras
import numpy as np
import pyarrow as pa

from elephant.backends.keras_private import flat_layers
from elephant.data.casting import lists_of
from elephant.errors import ConfigurationError
from elephant.modeling.layers.sharded_embedding import ShardedEmbedding
from elephant.modeling.variables import read_values
from elephant.spark.training_data import active_session, frame_of_arrow
from elephant.tables.stored import StoredTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Of a table that executors read.
_PARTITION_BYTES = 1 << 26


@dataclass(frozen=True, repr=False, eq=False)
class EmbeddingTable:
    """Rows of an embedding layer.

    Args:
        name: The layer's.
        table: The rows, float32 of shape (rows, width): that of id i at place i; or where workers have written them.
    """

    name: str
    table: np.ndarray | StoredTable

    def numpy(self) -> np.ndarray:
        """Returns the rows, float32 of shape (rows, width); of a layer with ``num_hash_buckets``, by bucket.

        Raises:
            CheckpointError: Files that workers have written cannot be read.
        """
        return self.table.opened().part() if isinstance(self.table, StoredTable) else self.table

    def toDF(self) -> DataFrame:
        """Returns a DataFrame of the active session, with the columns ``id``, bigint, and ``embedding``, array<float>.

        Rows that workers have written to a folder are read by the executors.

        Raises:
            ClusterError: There is no active session.

        Examples:
            >>> fitted.table("user").toDF().write.parquet("/data/users")  # doctest: +SKIP
        """
        session = active_session("make the DataFrame", "toDF")
        if not isinstance(self.table, StoredTable):
            return frame_of_arrow(session, _with_ids(np.arange(len(self.table)), self.table))
        rows, width = self.table.shape
        partitions = max(1, -(-rows * width * 4 // _PARTITION_BYTES))
        return session.range(0, rows, 1, partitions).mapInArrow(
            _RowsOf(self.table), "id bigint, embedding array<float>"
        )

    def __repr__(self) -> str:
        rows, width = self.table.shape
        return f"<EmbeddingTable {self.name!r}, {rows:,} rows of {width}>"


@dataclass(frozen=True)
class _RowsOf:
    """Looks rows of a table up on executors."""

    table: StoredTable

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        opened = self.table.opened()
        for batch in batches:
            ids = batch.column(0).to_numpy()
            yield from _with_ids(ids, opened.take(ids)).to_batches()


def _with_ids(ids: np.ndarray, rows: np.ndarray) -> pa.Table:
    return pa.table([pa.array(ids), lists_of(pa.array(rows.ravel()), len(rows))], ["id", "embedding"])


def embedding_table(model: keras.Model, name: str) -> EmbeddingTable:
    """Returns the rows of a model's embedding layer.

    Raises:
        ConfigurationError: The model has no such layer.
    """
    kinds = (ShardedEmbedding, keras.layers.Embedding)
    layers = {layer.name: layer for layer in flat_layers(model) if isinstance(layer, kinds)}
    if name not in layers:
        raise ConfigurationError(
            f"table: expected the name of an embedding layer, of which the model has {', '.join(layers) or 'none'}. "
            f"Received: {name!r}."
        )
    layer = layers[name]
    variable = layer.table_variables[0] if isinstance(layer, ShardedEmbedding) else layer.embeddings
    rows = read_values([variable])[0]
    return EmbeddingTable(name, StoredTable.from_array(rows) or rows)
