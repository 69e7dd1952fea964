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

# That executors read at a time.
_BATCH_ROWS = 1 << 14


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
        return self.table.part(0, 1) if isinstance(self.table, StoredTable) else self.table

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
        # A task for each file: from an object store it is copied as a whole.
        parts = session.range(0, self.table.parts, 1, self.table.parts)
        return parts.mapInArrow(_RowsOf(self.table), "id bigint, embedding array<float>")

    def __repr__(self) -> str:
        rows, width = self.table.shape
        return f"<EmbeddingTable {self.name!r}, {rows:,} rows of {width}>"


@dataclass(frozen=True)
class _RowsOf:
    """Reads files of a table on executors."""

    table: StoredTable

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in (part for batch in batches for part in batch.column(0).to_pylist()):
            rows = self.table.file(part)
            for first in range(0, len(rows), _BATCH_ROWS):
                block = np.array(rows[first : first + _BATCH_ROWS])
                ids = (first + np.arange(len(block))) * self.table.parts + part
                yield from _with_ids(ids, block).to_batches()


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
