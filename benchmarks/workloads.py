"""The models and the rows that the benchmarks train: MNIST from its files, or made images of the same form."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = 10
SIDE = 28
PIXELS = SIDE * SIDE
# Of a row of text, and that there are.
TOKENS, VOCABULARY = 80, 2000
_IDX_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class Workload:
    """A model, and the shape of its rows.

    Args:
        build: Returns the compiled model, always with the same initial weights.
        row_shape: Shape of one input row; the first of the ``PIXELS`` elements fill it.
        tokens: Of how many tokens its rows are sequences, which pixels are made into; zero for pixels.
    """

    build: Callable[[], Any]
    row_shape: tuple[int, ...]
    tokens: int = 0

    @property
    def dtype(self) -> str:
        """Type of an element of a row."""
        return "int32" if self.tokens else "float32"

    def rows_of(self, images: np.ndarray) -> np.ndarray:
        """Returns images of shape (rows, ``PIXELS``) as rows of this workload, flat."""
        rows = images[:, : math.prod(self.row_shape)]
        return (np.floor(rows * 10).astype(np.int32) % self.tokens) if self.tokens else rows


def _perceptron(*units: int) -> Any:
    import keras

    keras.utils.set_random_seed(7)
    hidden = [keras.layers.Dense(count, "relu") for count in units]
    return _compiled([keras.layers.Input((PIXELS,)), *hidden, keras.layers.Dense(CLASSES, "softmax")])


def build_small_mlp() -> Any:
    """Returns 784-128-128-10: 118,282 parameters."""
    return _perceptron(128, 128)


def build_middle_mlp() -> Any:
    """Returns 784-1024-1024-512-10: 2,383,370 parameters."""
    return _perceptron(1024, 1024, 512)


def build_medium_mlp() -> Any:
    """Returns 784-2048-2048-2048-10: 10,020,874 parameters."""
    return _perceptron(2048, 2048, 2048)


def build_large_mlp() -> Any:
    """Returns 784-4096-4096-1024-10: 24,202,250 parameters."""
    return _perceptron(4096, 4096, 1024)


def build_deep_mlp() -> Any:
    """Returns 784, eight layers of 1800, 10: 24,123,610 parameters, no layer with more than a seventh of them."""
    return _perceptron(*[1800] * 8)


def build_cnn() -> Any:
    """Returns two convolutions and two dense layers: 399,022 parameters."""
    import keras

    keras.utils.set_random_seed(7)
    layers = keras.layers
    return _compiled(
        [
            layers.Input((SIDE, SIDE, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(236, "relu"),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def build_lstm() -> Any:
    """Returns an embedding of 2,000 tokens, a recurrent layer and a dense one: 164,650 parameters."""
    import keras

    keras.utils.set_random_seed(7)
    layers = keras.layers
    return _compiled(
        [
            layers.Input((TOKENS,)),
            layers.Embedding(VOCABULARY, 64),
            layers.LSTM(64),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def _compiled(layers: list[Any]) -> Any:
    import keras

    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.001), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


WORKLOADS: Mapping[str, Workload] = {
    "mlp_118k": Workload(build_small_mlp, (PIXELS,)),
    "mlp_2m": Workload(build_middle_mlp, (PIXELS,)),
    "mlp_10m": Workload(build_medium_mlp, (PIXELS,)),
    "mlp_24m": Workload(build_large_mlp, (PIXELS,)),
    "mlp_24m_deep": Workload(build_deep_mlp, (PIXELS,)),
    "cnn_400k": Workload(build_cnn, (SIDE, SIDE, 1)),
    "lstm_text": Workload(build_lstm, (TOKENS,), VOCABULARY),
}


def read_mnist(folder: Path) -> dict[str, np.ndarray]:
    """Returns MNIST from its IDX files, plain or .gz: float32 images of 784 values in [0, 1], int32 labels."""
    arrays = {}
    for name, file_name in _IDX_FILES.items():
        plain, packed = folder / file_name, folder / f"{file_name}.gz"
        content = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
        values = np.frombuffer(content, np.uint8, offset=16 if name.startswith("x") else 8)
        if name.startswith("x"):
            arrays[name] = values.reshape(-1, PIXELS).astype(np.float32) / 255.0
        else:
            arrays[name] = values.astype(np.int32)
    return arrays


def make_images(rows: int) -> dict[str, np.ndarray]:
    """Returns images of ten patterns under noise, in the form of `read_mnist`; a fifth more of them to test on."""
    rng = np.random.default_rng(1)
    patterns = rng.uniform(0, 1, (CLASSES, PIXELS)).astype(np.float32)
    arrays = {}
    for part, count in (("train", rows), ("test", rows // 5)):
        labels = rng.integers(0, CLASSES, count).astype(np.int32)
        noise = rng.normal(0, 2.0, (count, PIXELS)).astype(np.float32)
        arrays[f"x_{part}"], arrays[f"y_{part}"] = patterns[labels] + noise, labels
    return arrays
