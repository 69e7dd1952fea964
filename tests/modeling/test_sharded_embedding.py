"""The layer in one process: plain Keras trains it, saves it and loads it."""

import keras
import numpy as np
import pytest
from tiers import in_tiers

from elephant.backends import current
from elephant.errors import ConfigurationError, DataError
from elephant.modeling.layers.sharded_embedding import ShardedEmbedding, hashed, sharded_embeddings
from elephant.modeling.model_spec import model_source
from elephant.modeling.variable_paths import read_by_path, state_paths
from elephant.tables.table import ROWS

RANDOM = np.random.default_rng(0)
IDS, TARGETS = RANDOM.integers(0, 30, (24, 3)).astype("int32"), RANDOM.normal(size=(24, 1)).astype("float32")


def model_of(embedding, optimizer="sgd"):
    keras.utils.set_random_seed(5)
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids))))
    model.compile({"sgd": keras.optimizers.SGD(0.1), "adam": keras.optimizers.Adam(0.1)}[optimizer], "mse")
    return model


def table_of(model, name=ROWS):
    (layer,) = sharded_embeddings(model)
    return next(one for one in layer.table_variables if one.name == name).numpy()


def test_layer_when_trained_by_sgd_then_equals_an_embedding_of_keras():
    sharded, plain = ShardedEmbedding(30, 4, optimizer="sgd", learning_rate=0.1), keras.layers.Embedding(30, 4)
    models = [model_of(sharded), model_of(plain)]
    plain.embeddings.assign(sharded.table_spec.initial_rows())
    losses = [one.fit(IDS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"] for one in models]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(table_of(models[0]), keras.ops.convert_to_numpy(plain.embeddings), atol=1e-6)


def test_table_when_two_features_share_it_then_a_step_updates_each_row_once_with_the_sum():
    layer = ShardedEmbedding(9, 2, optimizer="rowwise_adagrad", learning_rate=0.1)
    first, second = keras.Input((1,), dtype="int32"), keras.Input((2,), dtype="int32")
    outputs = keras.ops.sum(layer(first), axis=(1, 2)) + 3 * keras.ops.sum(layer(second), axis=(1, 2))
    model = keras.Model([first, second], outputs)
    model.compile("sgd", lambda y, outputs: outputs)
    before = table_of(model)
    model.train_on_batch([np.array([[4]]), np.array([[4, 1]])], np.zeros(1))
    moved = before - table_of(model)
    # Gradients of 4 and 3; the mean of the squares of a row's two equal values is the square.
    expected = {4: 0.1 * 4 / np.sqrt(0.1 + 16), 1: 0.1 * 3 / np.sqrt(0.1 + 9)}
    np.testing.assert_allclose(moved[[4, 1]], [[expected[4]] * 2, [expected[1]] * 2], rtol=1e-4)
    assert not np.delete(moved, [1, 4], axis=0).any()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_when_combined_then_leave_out_what_is_masked_and_send_back_the_combination_s_gradient(combiner):
    layer = ShardedEmbedding(9, 2, optimizer="sgd", learning_rate=1.0, combiner=combiner, mask_value=-1)
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, keras.ops.sum(layer(ids), axis=1))
    model.compile("sgd", lambda y, outputs: outputs)
    rows, bags = table_of(model), np.array([[2, -1, 2], [5, 6, 7], [-1, -1, -1]], "int32")
    shares = np.array([[0, 0, 2, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 0], [0] * 9], np.float32)
    if combiner != "sum":
        shares /= np.array([[2], [3], [1]], np.float32) ** (1.0 if combiner == "mean" else 0.5)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer(bags)), shares @ rows, rtol=1e-5)
    model.train_on_batch(bags, np.zeros(3))
    np.testing.assert_allclose(rows - table_of(model), np.repeat(shares.mean(axis=0)[:, None], 2, axis=1), atol=1e-6)


def test_layer_when_frozen_or_called_without_a_gradient_then_its_table_stays():
    layer = ShardedEmbedding(30, 4)
    layer.trainable = False
    model = model_of(layer)
    before = table_of(model)
    model.fit(IDS, TARGETS, verbose=0)
    model.evaluate(IDS, TARGETS, verbose=0)
    model.predict(IDS, verbose=0)
    np.testing.assert_array_equal(table_of(model), before)


@pytest.mark.parametrize("rule", in_tiers(["adagrad", "lazy_adam"], fast=["lazy_adam"], slow="a rule with fewer slots"))
def test_model_when_saved_and_loaded_then_goes_on_as_the_one_that_was_not(tmp_path, rule):
    model = model_of(ShardedEmbedding(30, 4, optimizer=rule, learning_rate=0.1), "adam")
    model.fit(IDS, TARGETS, batch_size=8, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    for one in (model, loaded):
        one.fit(IDS, TARGETS, batch_size=8, shuffle=False, verbose=0)
    for name, value in read_by_path(state_paths(model)).items():
        np.testing.assert_allclose(read_by_path(state_paths(loaded))[name], value, atol=1e-6, err_msg=name)


def test_archive_when_a_table_is_as_it_was_drawn_then_has_its_seed_alone():
    fresh, trained = (model_of(ShardedEmbedding(50_000, 4, seed=3)) for _ in range(2))
    trained.train_on_batch(IDS, TARGETS)
    sizes = [len(model_source(one).archive) for one in (fresh, trained)]
    assert sizes[0] < 100_000 < 4 * 50_000 * 4 < sizes[1]
    np.testing.assert_array_equal(table_of(model_source(fresh).build()), table_of(fresh))


def test_source_when_built_again_then_has_the_trained_table():
    model = model_of(ShardedEmbedding(30, 4))
    model.fit(IDS, TARGETS, verbose=0)
    np.testing.assert_array_equal(table_of(model_source(model).build()), table_of(model))


def test_state_when_it_has_a_table_then_names_its_rows_and_slots_by_the_layer():
    model = model_of(ShardedEmbedding(30, 4, optimizer="lazy_adam", name="user"))
    tables = {path: one.shape for path, one in state_paths(model).items() if "user" in path and "anchor" not in path}
    slots = {"momentum": (30, 4), "velocity": (30, 4), "updates": (1, 1), "embeddings": (30, 4)}
    assert tables == {f"model/user/{name}": shape for name, shape in slots.items()}


def test_ids_when_hashed_then_have_the_same_bucket_in_every_process_and_width():
    ids = np.array([0, 1, -1, 2**62, 12345678901])
    assert hashed(ids, 10**6).tolist() == hashed(ids.copy(), 10**6).tolist()
    assert hashed(np.array([0, 1, -1], np.int32), 10**6).tolist() == hashed(ids[:3], 10**6).tolist()
    assert hashed(np.array([b"a", b"\xc3\xa4"]), 99).tolist() == hashed(np.array(["a", "\u00e4"]), 99).tolist()
    counts = np.bincount(hashed(np.arange(100_000), 10), minlength=10)
    assert counts.min() > 9_000


@pytest.mark.skipif(current().count_dtype != "float32", reason="this backend has integers of 64 bits")
def test_ids_of_64_bits_when_the_backend_cuts_them_off_then_are_refused():
    with pytest.raises(ConfigurationError, match="expected ids of 32 bits on JAX"):
        ShardedEmbedding(num_hash_buckets=50, output_dim=2)(keras.Input((2,), dtype="int64"))


@pytest.mark.skipif(not current().takes_strings, reason="this backend has no strings")
def test_strings_when_hashed_then_are_looked_up():
    layer = ShardedEmbedding(num_hash_buckets=50, output_dim=2, combiner="sum", mask_value="")
    words = keras.Input((2,), dtype="string")
    model = keras.Model(words, layer(words))
    found = model(keras.ops.convert_to_tensor([["cat", ""], ["cat", "dog"], ["", ""]]))
    rows = layer.table_spec.initial_rows()[hashed(np.array(["cat", "dog"]), 50)]
    np.testing.assert_allclose(found, [rows[0], rows[0] + rows[1], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (np.array([[3, 30]]), r"user: expected ids from 0 to 29\. Received: 30"),
        (np.array([[-1, 31, 32]]), r"Received: -1 and 2 more"),
        (np.array([[0.5]], np.float32), r"expected whole numbers as ids\. Received: 0\.5"),
    ],
)
def test_ids_when_no_row_has_them_then_says_which(ids, said):
    layer = ShardedEmbedding(30, 2, name="user")
    with pytest.raises(DataError, match=said):
        layer.known(ids)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"output_dim": 2}, "either input_dim or num_hash_buckets"),
        ({"input_dim": 3, "num_hash_buckets": 3, "output_dim": 2}, "either input_dim or num_hash_buckets"),
        ({"input_dim": 3}, "output_dim: expected a whole number"),
        ({"input_dim": 0, "output_dim": 2}, "input_dim: expected a whole number"),
        ({"input_dim": 3, "output_dim": 2, "optimizer": "adam"}, "optimizer: expected one of sgd, adagrad"),
        ({"input_dim": 3, "output_dim": 2, "learning_rate": 0}, "learning_rate: expected a number above zero"),
        ({"input_dim": 3, "output_dim": 2, "combiner": "max"}, "combiner: expected None, 'sum', 'mean' or 'sqrtn'"),
        ({"input_dim": 3, "output_dim": 2, "embeddings_initializer": "he_normal"}, "embeddings_initializer"),
    ],
)
def test_layer_when_an_argument_cannot_be_used_then_says_what_was_expected(arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        ShardedEmbedding(**arguments).table_spec  # noqa: B018  (made now at the latest)
