"""Rows and models whose fits have one right result to the bit, however often something is lost on the way.

A synchronous fit equals one that nothing disturbs. An asynchronous one has the sum of all batches, which float32 holds
exactly in any order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS, FEATURES, BATCH = 4096, 16, 32
_RATE = 0.25


def write_rows(folder: Path, parts: int = 2) -> np.ndarray:
    """Writes the rows as Parquet files, one of each worker; returns their features, small whole numbers."""
    rng = np.random.default_rng(7)
    features = rng.integers(-8, 9, (ROWS, FEATURES)).astype(np.float32)
    labels = np.full(ROWS, -1e9, np.float32)
    targets = np.tanh(features @ rng.normal(0, 0.1, FEATURES)).astype(np.float32)
    for number, rows in enumerate(np.array_split(np.arange(ROWS), parts)):
        offsets = np.arange(0, rows.size * FEATURES + 1, FEATURES, dtype=np.int32)
        columns = {
            "features": pa.ListArray.from_arrays(offsets, features[rows].ravel()),
            "label": labels[rows],
            "target": targets[rows],
        }
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")
    return features


def synchronous_model() -> Any:
    """Returns a model of which a fit has all that must come back: slots, moving averages, random generators."""
    import keras

    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Input((FEATURES,)),
        keras.layers.Dense(64, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.001), "mse", metrics=["mae"])
    return model


def counting_model() -> Any:
    """Returns a model whose gradient is the mean of a batch's features: sums of them are exact in any order."""
    import keras

    layers = [keras.layers.Input((FEATURES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(_RATE), "mae")
    return model


def counted(features: np.ndarray, epochs: int) -> np.ndarray:
    """Returns the kernel of the counting model after so many epochs, in each of which a row was in one full batch."""
    total = -_RATE * epochs * features.astype(np.float64).sum(axis=0) / BATCH
    return total.reshape(-1, 1).astype(np.float32)
