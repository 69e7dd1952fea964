"""Rows of an embedding layer of a trained model, as an array or as a DataFrame."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, repr=False, eq=False)
class EmbeddingTable:
    """Rows of an embedding layer.

    Args:
        name: The layer's.
        rows: float32 of shape (rows, width): that of id i at place i.
    """

    name: str
    rows: np.ndarray

    def numpy(self) -> np.ndarray:
        """Returns the rows, float32 of shape (rows, width); of a layer with ``num_hash_buckets``, by bucket."""
        return self.rows

    def toDF(self) -> DataFrame:
        """Returns a DataFrame of the active session, with the columns ``id``, bigint, and ``embedding``, array<float>.

        Raises:
            ClusterError: There is no active session.

        Examples:
            >>> fitted.table("user").toDF().write.parquet("/data/users")  # doctest: +SKIP
        """
        columns = [pa.array(np.arange(len(self.rows))), lists_of(pa.array(self.rows.ravel()), len(self.rows))]
        return frame_of_arrow(active_session("make the DataFrame", "toDF"), pa.table(columns, ["id", "embedding"]))

    def __repr__(self) -> str:
        return f"<EmbeddingTable {self.name!r}, {len(self.rows):,} rows of {self.rows.shape[1]}>"


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
    return EmbeddingTable(name, read_values([variable])[0])
