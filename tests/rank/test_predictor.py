"""What a model makes of batches of sequences, compared with Keras on each row alone; rows of a batch."""

import keras
import numpy as np
import pytest

from elephant.data.ragged import RaggedArray
from elephant.data.schema import RAGGED, DataSchema, Field
from elephant.data.shard import Shard
from elephant.rank.input.tensors import Tensors
from elephant.rank.predictor import Predictor

LAYERS = keras.layers
FIELD = Field("features", ("steps",), "float32", RAGGED, (None, 1))


def outputs_of(model, lengths):
    """Returns one array per row and output."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = RaggedArray(offsets, (np.arange(1.0, sum(lengths) + 1, dtype="float32")[:, np.newaxis],))
    tensors = Tensors(Shard(None, DataSchema((FIELD,)), {"features": (1,)}))
    given = Predictor(model).outputs(tensors, [FIELD], [rows], (0, 1))
    return [
        [part.buffers[0][start:stop] for start, stop in zip(part.offsets[:-1], part.offsets[1:], strict=True)]
        if isinstance(part, RaggedArray)
        else list(part)
        for part in given
    ]


@pytest.mark.parametrize("lengths", [(1, 2), (1, 3), (0, 0)], ids=["others", "as long as the output", "empty"])
def test_outputs_when_one_is_of_one_length_then_that_is_whole_in_any_batch(lengths):
    steps = keras.Input((None, 1))
    doubled = keras.layers.Rescaling(2.0)(steps)
    largest = keras.layers.RepeatVector(3)(keras.layers.GlobalMaxPooling1D()(steps))
    each, whole = outputs_of(keras.Model(steps, (doubled, largest)), lengths)
    rows = np.split(np.arange(1.0, sum(lengths) + 1), np.cumsum(lengths)[:-1])
    for row, single, repeated in zip(rows, each, whole, strict=True):
        np.testing.assert_array_equal(single, 2 * row[:, np.newaxis])
        np.testing.assert_array_equal(repeated, np.full((3, 1), row.max(initial=0)))


def test_outputs_when_a_process_predicts_with_many_models_then_tensorflow_does_not_warn_of_retracing(caplog):
    steps = keras.Input((None, 1))
    for factor in range(12):
        scaled = keras.layers.Rescaling(float(factor))(steps)
        ((first,), _) = outputs_of(keras.Model(steps, (scaled, keras.layers.GlobalMaxPooling1D()(steps))), [1])
        assert first.tolist() == [[factor]]
    assert "retracing" not in caplog.text


def nested():
    images = keras.Input((64, 64, 3))
    wide = keras.Sequential([keras.Input((64, 64, 3)), LAYERS.Conv2D(64, 3, padding="same")])
    return keras.Model(images, LAYERS.GlobalMaxPooling2D()(wide(images)))


def used_twice():
    one, other, layer = keras.Input((3,)), keras.Input((3,)), LAYERS.Dense(4)
    return keras.Model([one, other], LAYERS.Add()([layer(one), layer(other)]))


def of_sparse():
    numbers = keras.Input((1_000_000,), sparse=True)
    return keras.Model(numbers, LAYERS.Dense(1)(numbers))


SPARSE = pytest.mark.skipif(keras.config.backend() == "torch", reason="Keras has no sparse tensors on torch")


class OwnModel(keras.Model):
    """Knows neither its inputs nor what its layers give."""


@pytest.mark.parametrize(
    ("build", "rows"),
    [
        (lambda: keras.Sequential([keras.Input((10,)), LAYERS.Dense(4)]), 8192),
        (lambda: keras.Sequential([keras.Input((784,)), LAYERS.Dense(10)]), (16 << 20) // (784 * 4)),
        (lambda: keras.Sequential([keras.Input((10_000,)), LAYERS.Dense(100)]), 1024),
        (lambda: keras.Sequential([keras.Input((None,)), LAYERS.Embedding(9, 3)]), 1024),
        (nested, 256),
        (used_twice, 8192),
        pytest.param(of_sparse, 8192, marks=SPARSE),
        (OwnModel, 1024),
        (lambda: keras.Sequential([keras.Input((2000, 2000, 3)), LAYERS.Flatten()]), 32),
    ],
    ids=["ten columns", "images", "wide rows", "sequences", "nested", "used twice", "sparse", "own", "huge"],
)
def test_rows_of_batch_when_rows_are_small_or_large_then_their_bytes_tell_how_many(build, rows):
    assert Predictor(build()).rows_of_batch == rows
