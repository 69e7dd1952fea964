"""`elephant.adapt` on executors, against the layers' own ``adapt`` on the same rows in one process."""

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from spark_frames import partitioned_frame, rows_of
from tiers import in_tiers

import elephant
from elephant.errors import ConfigurationError, DataError, SchemaError

layers = keras.layers
RNG = np.random.default_rng(7)
ROWS = 250
TEXTS = ["The cat, the DOG!", "a cat; a cat", "", "é É über", "dog dog bird", "Bird? The end."]
TABLE = {
    "number": RNG.normal(50, 10, ROWS),
    "whole": RNG.integers(0, 9, ROWS),
    "word": np.array([f"w{value}" for value in RNG.integers(0, 12, ROWS)]),
    "words": np.array([["x", f"y{value}", "x"] for value in RNG.integers(0, 5, ROWS)]),
    "text": np.array([TEXTS[value] for value in RNG.integers(0, len(TEXTS), ROWS)]),
    "image": RNG.normal(3, 2, (ROWS, 4 * 5 * 2)),
    "steps": RNG.normal(size=(ROWS, 6, 3)),
}
SCHEMA = (
    "number double, whole bigint, word string, words array<string>, text string, image array<double>, "
    "steps array<array<double>>"
)


@pytest.fixture(scope="module")
def frame(spark):
    rows = rows_of(TABLE)
    return partitioned_frame(spark, [rows[:100], [], rows[100:130], rows[130:]], SCHEMA).cache()


def assert_equal_state(layer, expected):
    if isinstance(expected, layers.Normalization):
        np.testing.assert_allclose(np.ravel(layer.mean), np.ravel(expected.mean), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(np.ravel(layer.variance), np.ravel(expected.variance), rtol=1e-6, atol=1e-7)
    elif isinstance(expected, layers.Discretization):
        np.testing.assert_allclose(layer.bin_boundaries, expected.bin_boundaries, rtol=1e-6)
    else:
        assert layer.get_vocabulary() == expected.get_vocabulary()
        lookup, other = getattr(layer, "_lookup_layer", layer), getattr(expected, "_lookup_layer", expected)
        if other.output_mode == "tf_idf":
            np.testing.assert_allclose(lookup.idf_weights.numpy(), other.idf_weights.numpy(), rtol=1e-6)


CASES = {
    "mean of a column": (lambda: layers.Normalization(axis=None), "number"),
    "means of columns": (lambda: layers.Normalization(), ["number", "whole"]),
    "means of elements": (lambda: layers.Normalization(), "image"),
    "means of channels": (lambda: layers.Normalization(axis=-1), "steps"),
    "means of steps and channels": (lambda: layers.Normalization(axis=(1, 2)), "steps"),
    "one mean of all": (lambda: layers.Normalization(axis=None), "steps"),
    "bins of many": (lambda: layers.Discretization(num_bins=7, epsilon=0.02), "image"),
    "bins of integers": (lambda: layers.Discretization(num_bins=3), "whole"),
    "most frequent words": (lambda: layers.StringLookup(max_tokens=7, num_oov_indices=2, mask_token="w3"), "word"),
    "words of arrays": (lambda: layers.StringLookup(output_mode="tf_idf"), "words"),
    "integers": (lambda: layers.IntegerLookup(max_tokens=6), "whole"),
    "text": (lambda: layers.TextVectorization(), "text"),
    "pairs of words of a function of one's own": (lambda: pairs_of_words(), "text"),
}


def without_vowels(texts):
    import tensorflow as tf

    return tf.strings.regex_replace(texts, "[aeiou]", "")


def pairs_of_words():
    return layers.TextVectorization(max_tokens=9, standardize=without_vowels, ngrams=2, output_mode="tf_idf")


def rows_for(columns):
    if isinstance(columns, list):
        return np.stack([TABLE[name] for name in columns], axis=1).astype(float)
    return TABLE[columns]


FAST = ["means of columns", "means of elements", "bins of integers", "most frequent words"]


@pytest.mark.parametrize("case", in_tiers(CASES, fast=FAST, slow="another layer, or other columns"))
def test_adapt_when_rows_are_in_partitions_then_learns_what_the_layer_learns_of_all(frame, by_value, case):
    make, columns = case
    expected, layer = make(), make()
    expected.adapt(rows_for(columns))
    elephant.adapt(layer, frame, columns)
    assert_equal_state(layer, expected)
    # A second time, it begins anew.
    elephant.adapt(layer, frame, columns) if columns == "words" else None
    assert_equal_state(layer, expected)


@pytest.mark.slow("two passes over the rows")
def test_adapt_when_equal_counts_are_cut_off_then_takes_the_tokens_that_keras_takes(spark):
    words = ["b", "a", "ä", "c", "B", "aa", "b", "a", "ä", "c", "B", "aa"]
    frame = partitioned_frame(spark, [[(word,) for word in words[:5]], [(word,) for word in words[5:]]], "word string")
    for size in (3, 7):
        expected, layer = layers.StringLookup(max_tokens=size), layers.StringLookup(max_tokens=size)
        expected.adapt(np.array(words))
        elephant.adapt(layer, frame, "word")
        assert layer.get_vocabulary() == expected.get_vocabulary()


def test_adapt_when_given_a_model_then_adapts_the_layers_that_inputs_go_into(frame):
    def model_of():
        picture = keras.Input((4, 5, 2), name="picture")
        numbers = keras.Input((2,), name="numbers")
        word = keras.Input((1,), name="word", dtype="string")
        known = layers.Normalization(mean=1.0, variance=2.0)(numbers)
        inner = layers.Dense(3)(layers.Flatten()(layers.Normalization(axis=-1, name="of_picture")(picture)))
        words = layers.StringLookup(output_mode="multi_hot", max_tokens=6, pad_to_max_tokens=True, name="of_word")
        words = words(word)
        after = layers.Normalization(name="after")(inner)
        joined = layers.Concatenate()([after, layers.Normalization(name="of_numbers")(numbers), known, words])
        return keras.Model([picture, numbers, word], layers.Dense(1)(joined))

    model = model_of()
    columns = {"picture": "image", "numbers": ["number", "whole"], "word": "word"}
    elephant.adapt(model, frame, columns)
    expected = layers.Normalization(axis=-1)
    expected.adapt(TABLE["image"].reshape(ROWS, 4, 5, 2))
    assert_equal_state(model.get_layer("of_picture"), expected)
    expected = layers.Normalization()
    expected.adapt(rows_for(["number", "whole"]))
    assert_equal_state(model.get_layer("of_numbers"), expected)
    expected = layers.StringLookup(output_mode="multi_hot", max_tokens=6)
    expected.adapt(TABLE["word"])
    assert_equal_state(model.get_layer("of_word"), expected)
    np.testing.assert_array_equal(model.get_layer("after").adapt_mean, np.zeros(3))
    with pytest.raises(SchemaError, match="expected columns for each of the inputs picture, numbers, word"):
        elephant.adapt(model, frame, {"picture": "image"})


@pytest.mark.slow("three passes over the rows")
def test_adapt_when_rows_are_vectors_or_differ_in_length_then_counts_their_elements(spark):
    rows = [[1.0, 2.0], [4.0], [], [8.0, 0.0, 5.0]]
    frame = partitioned_frame(spark, [[(row,) for row in rows[:2]], [(row,) for row in rows[2:]]], "steps array<float>")
    expected, layer = layers.Normalization(axis=None), layers.Normalization(axis=None)
    expected.adapt(np.concatenate(rows))
    elephant.adapt(layer, frame, "steps")
    assert_equal_state(layer, expected)
    with pytest.raises(DataError, match="expected rows of one length, because the layer keeps axis 1"):
        elephant.adapt(layers.Normalization(), frame, "steps")
    vectors = spark.createDataFrame([(Vectors.dense(1, 5),), (Vectors.sparse(2, [0], [3.0]),)], ["v"])
    expected, layer = layers.Normalization(), layers.Normalization()
    expected.adapt(np.array([[1.0, 5.0], [3.0, 0.0]]))
    elephant.adapt(layer, vectors, "v")
    assert_equal_state(layer, expected)


@pytest.mark.slow("four passes over the rows")
def test_adapt_when_it_cannot_then_says_why(spark, frame):
    with pytest.raises(ConfigurationError, match="Received: .* which was made with what it needs to know"):
        elephant.adapt(layers.StringLookup(vocabulary=["a"]), frame, "word")
    with pytest.raises(ConfigurationError, match="expected Normalization, .* or a model with such"):
        elephant.adapt(layers.Dense(1), frame, "word")
    with pytest.raises(ConfigurationError, match="in which an input goes directly into"):
        elephant.adapt(keras.Sequential([keras.Input((1,)), layers.Dense(1)]), frame, "number")
    for layer, column in ((layers.StringLookup(), "whole"), (layers.Normalization(), "word")):
        with pytest.raises(SchemaError, match=f"columns: expected .* Received: column '{column}'"):
            elephant.adapt(layer, frame, column)
    with pytest.raises(SchemaError, match="columns: expected one of the columns number, .* Received: 'nothing'"):
        elephant.adapt(layers.StringLookup(), frame, "nothing")
    some = spark.createDataFrame([(1.0, "a"), (None, None)], "number double, word string")
    for layer, column in (
        (layers.Normalization(), "number"),
        (layers.StringLookup(), "word"),
    ):
        with pytest.raises(DataError, match=f"column '{column}': expected a value in every row"):
            elephant.adapt(layer, some, column)
    for layer, column in (
        (layers.Discretization(num_bins=2), "number"),
        (layers.TextVectorization(), "word"),
    ):
        with pytest.raises(DataError, match="expected rows in .* Received: none"):
            elephant.adapt(layer, some.limit(0), column)
