"""Embeddings that a model looks up at places of its own, as the published transformers do, against one process."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_reference import global_batches, job_for, largest_difference, split
from tiers import in_tiers

# Dense gradients of the same models differ by up to 4e-6 where Adam divides by small moments.
TOLERANCE = 1e-5
LENGTH, VOCABULARY = 6, 20


class TokenAndPosition(layers.Layer):
    """Of the published text transformer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = layers.Embedding(VOCABULARY, 4), layers.Embedding(LENGTH, 4)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(0, ops.shape(x)[-1]))


class PatchEncoder(layers.Layer):
    """Of the published vision transformer: its positions are made once, outside of the step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.projection, self.embedding = layers.Dense(4), layers.Embedding(LENGTH, 4)
        self.positions = np.arange(LENGTH)[None]

    def call(self, x):
        # Pixels up to 20 would saturate the attention. Gradients of its keys are then as small as their rounding, of
        # which Adam makes steps: ranks' parts, averaged in one process of plain PyTorch, differed by the same 5e-5.
        pixels = ops.cast(x, "float32")[..., None] / VOCABULARY
        return self.projection(pixels) + self.embedding(ops.convert_to_tensor(self.positions))


class ColumnEmbedding(layers.Layer):
    """Of the published transformer for tables; it reads its table twice, once for what the batch names."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(VOCABULARY + LENGTH, 4)

    def call(self, x):
        return self.table(x) + self.table(ops.arange(VOCABULARY, VOCABULARY + LENGTH))


class TiledPositions(layers.Layer):
    """One process looks each place up once for every row of its batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.positions = layers.Embedding(LENGTH, 4)

    def call(self, x):
        return self.positions(ops.broadcast_to(ops.arange(LENGTH), ops.shape(x))) * ops.cast(x, "float32")[..., None]


class SameWord(layers.Layer):
    """All rows of the batch name the same word, each once."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(VOCABULARY, 4)

    def call(self, x):
        return self.table(x[:, :1] * 0) * ops.cast(x, "float32")[..., None] / VOCABULARY


class RelativeBias(layers.Layer):
    """Of the published shifted windows: a table that is read at constant places, most of them several times."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        places = np.arange(LENGTH)
        self.distances = (places[:, None] - places + LENGTH - 1).reshape(-1)

    def build(self, shape):
        self.table = self.add_weight(shape=(2 * LENGTH - 1, 4), initializer="glorot_uniform", name="table")

    def call(self, x):
        biases = ops.reshape(ops.take(self.table, self.distances, axis=0), (LENGTH, LENGTH, 4))
        return ops.einsum("bk,qkd->bqd", ops.cast(x, "float32") / VOCABULARY, biases)


class BucketBias(layers.Layer):
    """Of the published text-to-text transformer: distances fall into buckets, which are found in the step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.buckets = layers.Embedding(4, 4)

    def call(self, x):
        places = ops.arange(ops.shape(x)[1])
        distances = ops.minimum(ops.abs(places[:, None] - places), 3)
        return ops.einsum("bk,qkd->bqd", ops.cast(x, "float32") / VOCABULARY, self.buckets(distances))


EMBEDDINGS = {
    "text": TokenAndPosition,
    "patches": PatchEncoder,
    "columns": ColumnEmbedding,
    "tiled": TiledPositions,
    "same": SameWord,
    "relative": RelativeBias,
    "buckets": BucketBias,
}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
}
SIZES = {"two": (13, 8), "three": (9, 2, 5), "one row each": (1, 1)}


# Without biases: the gradient of a key's is zero but for rounding, of which optimizers that divide by it make steps.
def build(embedding, optimizer, run_eagerly=False):
    keras.utils.set_random_seed(0)
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = EMBEDDINGS[embedding]()(inputs)
    if embedding == "text":
        x = x + layers.MultiHeadAttention(2, 2, use_bias=False)(x, x)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    model.compile(OPTIMIZERS[optimizer](), "mse", run_eagerly=run_eagerly)
    return model


IN_GRAPHS = [
    ("text", "adam", "two"),
    ("columns", "adamw", "three"),
    ("tiled", "rmsprop", "three"),
    ("relative", "adam", "two"),
    ("buckets", "lion", "three"),
    ("tiled", "adam", "one row each"),
    # Its places are a constant as the relative ones are, which also name a row twice.
    ("patches", "adam", "two"),
]
CASES = {" ".join(case): (*case, False) for case in IN_GRAPHS}
# Without a graph a step does not tell where its places come from.
for case in [("columns", "adamw", "three"), ("same", "adam", "one row each")]:
    CASES[f"{' '.join(case)}, eagerly"] = (*case, True)
FAST = ["text adam two", "relative adam two", "tiled adam one row each"]


@pytest.mark.parametrize("case", in_tiers(CASES, fast=FAST, slow="places of the other kinds"))
def test_weights_when_places_are_the_model_s_own_then_equal_one_process(rank_pool, case):
    embedding, optimizer, sizes, run_eagerly = case
    rng = np.random.default_rng(5)
    rows = sum(SIZES[sizes])
    columns = {
        "features": rng.integers(0, VOCABULARY, (rows, LENGTH)).astype("int32"),
        "label": rng.normal(size=rows).astype("float32"),
    }
    parts = split(columns, SIZES[sizes])
    job = job_for(
        lambda: build(embedding, optimizer, run_eagerly), epochs=2, batch_size=4, shuffle=False, dtype="int32"
    )
    recordings = rank_pool.fit(job, parts)
    reference, batches = build(embedding, optimizer, run_eagerly), list(global_batches(parts, 4, 2))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    reference.fit(tuples, epochs=2, steps_per_epoch=len(batches) // 2, shuffle=False, verbose=0)
    expected = reference.get_weights()
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
