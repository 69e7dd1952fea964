"""Configurations of Keras RS, by what has their attributes; and its own, where it is installed."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import pytest

from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.layers.feature_embeddings import ShardedEmbeddings
from elephant.modeling.layers.sharded_embedding import ShardedEmbedding, sharded_embeddings
from elephant.tables.rank_tables import LocalTables


@dataclass(order=True)
class TableConfig:
    """That of Keras RS 0.4."""

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = field(default_factory=lambda: keras.initializers.VarianceScaling(mode="fan_out"))
    optimizer: Any = "adam"
    combiner: str = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256


@dataclass(order=True)
class FeatureConfig:
    """That of Keras RS 0.4."""

    name: str
    table: TableConfig
    input_shape: Any
    output_shape: Any


ITEMS = TableConfig("items", 50, 4, "uniform", keras.optimizers.SGD(0.5), "sum")
USERS = TableConfig("users", 20, 3)
CLICKED = FeatureConfig("clicked", ITEMS, (8,), (8, 4))
SEEN = FeatureConfig("seen", ITEMS, (8, 3), (8, 4))
USER = FeatureConfig("user", USERS, (8, 1), (8, 3))
CONFIGS = {"items": [SEEN, CLICKED], "user": USER}
RANDOM = np.random.default_rng(0)
IDS = {
    "items": [RANDOM.integers(0, 50, (6, 3)).astype("int32"), RANDOM.integers(0, 50, 6).astype("int32")],
    "user": RANDOM.integers(0, 20, (6, 1)).astype("int32"),
}
TARGETS = RANDOM.normal(size=(6, 1)).astype("float32")


def inputs_of_model():
    of = {"dtype": "int32"}
    return {"items": [keras.Input((3,), **of), keras.Input((), **of)], "user": keras.Input((1,), **of, name="user")}


def model_of(layer):
    inputs = inputs_of_model()
    found = layer(inputs)
    joined = keras.layers.Concatenate()([*found["items"], found["user"]])
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    return model


def looked_up(layer, ids):
    return keras.tree.map_structure(keras.ops.convert_to_numpy, layer(ids))


def changed(feature=USER, **table_settings):
    return replace(feature, table=replace(feature.table, **table_settings))


def test_features_when_looked_up_then_have_rows_of_their_tables_in_the_structure_of_the_configs():
    layer = ShardedEmbeddings(CONFIGS, seed=3)
    items, users = (one.table_spec.initial_rows() for one in sorted(layer.embeddings, key=lambda one: one.name))
    found = looked_up(layer, IDS)
    np.testing.assert_allclose(found["items"][0], items[IDS["items"][0]].sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(found["items"][1], items[IDS["items"][1]])
    np.testing.assert_array_equal(found["user"], users[IDS["user"][:, 0]])
    symbolic = layer(inputs_of_model())
    assert [one.shape for one in keras.tree.flatten(symbolic)] == [(None, 4), (None, 4), (None, 3)]
    shapes = layer.compute_output_shape({"items": [(6, 3), (6,)], "user": (6, 1)})
    assert shapes == {"items": [(6, 4), (6, 4)], "user": (6, 3)}


def test_feature_when_it_is_the_only_one_then_needs_no_structure():
    layer = ShardedEmbeddings(CLICKED, seed=3)
    np.testing.assert_array_equal(looked_up(layer, np.array([7])), layer.embeddings[0].table_spec.initial_rows()[[7]])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_configs_when_they_are_those_of_keras_rs_then_give_what_its_layer_gives(combiner):
    layers = pytest.importorskip("keras_rs", reason="Keras RS is not installed").layers
    items = layers.TableConfig("items", 50, 4, optimizer=keras.optimizers.SGD(0.5), combiner=combiner)
    clicked = layers.FeatureConfig("clicked", items, (6,), (6, 4))
    seen = layers.FeatureConfig("seen", items, (6, 3), (6, 4))
    user = layers.FeatureConfig("user", layers.TableConfig("users", 20, 3), (6, 1), (6, 3))
    configs = {"items": [seen, clicked], "user": user}
    theirs, ours = layers.DistributedEmbedding(configs), ShardedEmbeddings(configs)
    expected = looked_up(theirs, IDS)
    rows = theirs.get_embedding_tables()
    for one in ours.embeddings:
        one.assign_tables({"embeddings": keras.ops.convert_to_numpy(rows[one.name])})
    for found, wanted in zip(*map(keras.tree.flatten, (looked_up(ours, IDS), expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_tables_when_features_share_them_then_each_is_one_layer_of_the_model_by_its_name():
    model = model_of(ShardedEmbeddings(CONFIGS))
    layers = {one.name: one for one in sharded_embeddings(model)}
    assert sorted(layers) == ["items", "users"]
    specs = {name: (one.table_spec.num_rows, one.table_spec.rule) for name, one in layers.items()}
    assert specs == {"items": (50, "sgd"), "users": (20, "lazy_adam")}
    # A copy of a table's configuration is the same table.
    assert len(ShardedEmbeddings([SEEN, changed(CLICKED)]).embeddings) == 1


def test_model_when_trained_then_equals_embeddings_of_keras():
    keras.utils.set_random_seed(5)
    layer = ShardedEmbeddings({"items": [SEEN, CLICKED], "user": changed(optimizer=ITEMS.optimizer)}, seed=3)
    items, users = keras.layers.Embedding(50, 4, name="items"), keras.layers.Embedding(20, 3, name="users")
    inputs = inputs_of_model()
    rows = [keras.ops.sum(items(inputs["items"][0]), axis=1), items(inputs["items"][1]), users(inputs["user"])[:, 0]]
    plain = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    model = model_of(layer)
    plain.layers[-1].set_weights(model.layers[-1].get_weights())
    pairs = list(zip((items, users), sorted(layer.embeddings, key=lambda one: one.name), strict=True))
    for embedding, sharded in pairs:
        embedding.embeddings.assign(sharded.table_spec.initial_rows())
    for one in (model, plain):
        one.compile(keras.optimizers.SGD(0.5), "mse")
        one.fit(IDS, TARGETS, batch_size=3, epochs=2, shuffle=False, verbose=0)
    for embedding, sharded in pairs:
        rows = keras.ops.convert_to_numpy(embedding.embeddings)
        np.testing.assert_allclose(sharded.table_variables[0].numpy(), rows, atol=1e-5)


def test_model_when_saved_and_loaded_then_has_the_trained_tables_and_configs(tmp_path):
    model = model_of(ShardedEmbeddings(CONFIGS, mask_value=-1, name="features"))
    model.fit(IDS, TARGETS, batch_size=3, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    assert loaded.get_layer("features").get_config() == model.get_layer("features").get_config()
    again = keras.models.clone_model(model)
    assert [one.seed for one in sharded_embeddings(again)] == [one.seed for one in sharded_embeddings(model)]


def test_tables_when_the_layer_has_a_path_then_each_has_it_in_a_loaded_model_too():
    layer = ShardedEmbeddings(CONFIGS, path="s3://models/tables")
    for one in (layer, ShardedEmbeddings.from_config(layer.get_config())):
        assert [table.path_of_table for table in one.embeddings] == ["s3://models/tables"] * 2
    with pytest.raises(ConfigurationError, match=r"path: expected an absolute path or a URL.* Received: 'tables'"):
        ShardedEmbedding(5, 2, path="tables")


def test_ids_when_they_are_padded_then_the_mask_value_does_not_count():
    layer = ShardedEmbeddings(FeatureConfig("seen", replace(ITEMS, combiner="mean"), (8, 3), (8, 4)), mask_value=-1)
    rows = layer.embeddings[0].table_spec.initial_rows()
    found = looked_up(layer, np.array([[4, 9, -1]]))
    np.testing.assert_allclose(found, rows[[4, 9]].mean(axis=0, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "rule", "rate"),
    [
        ("sgd", "sgd", 0.01),
        ("Adagrad", "adagrad", 0.001),
        ("adam", "lazy_adam", 0.001),
        (keras.optimizers.SGD(0.3), "sgd", 0.3),
        (keras.optimizers.Adagrad(0.07, name="mine"), "adagrad", 0.07),
        (keras.optimizers.Adam(2e-5), "lazy_adam", 2e-5),
    ],
)
def test_optimizer_when_a_table_has_it_then_is_its_rule_with_its_learning_rate(optimizer, rule, rate):
    (layer,) = ShardedEmbeddings(changed(optimizer=optimizer)).embeddings
    assert (layer.optimizer, layer.learning_rate) == (rule, rate)


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [
        (USERS.initializer, ("truncated_normal", (0.0, 1 / math.sqrt(3) / 0.8796256610342398))),
        ("uniform", ("uniform", (-0.05, 0.05))),
        (keras.initializers.TruncatedNormal(0.5, 0.1), ("truncated_normal", (0.5, 0.1))),
        ("glorot_uniform", ("uniform", (-math.sqrt(6 / 23), math.sqrt(6 / 23)))),
        (
            keras.initializers.VarianceScaling(2.0, "fan_in", "untruncated_normal"),
            ("normal", (0.0, math.sqrt(0.1))),
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_initializer_when_it_asks_for_the_shape_then_has_that_of_the_table(initializer, expected):
    (layer,) = ShardedEmbeddings(changed(initializer=initializer)).embeddings
    assert layer.table_spec.draw == expected[0]
    np.testing.assert_allclose(layer.table_spec.drawn, expected[1])


def test_rows_when_drawn_by_variance_scaling_then_have_the_moments_of_keras():
    given = keras.initializers.VarianceScaling(mode="fan_out")
    (layer,) = ShardedEmbeddings(changed(vocabulary_size=20_000, initializer=given), seed=1).embeddings
    rows, drawn = layer.table_spec.initial_rows(), np.asarray(given((20_000, 3)))
    np.testing.assert_allclose([rows.mean(), rows.std()], [0.0, drawn.std()], atol=0.01)
    # Keras on PyTorch leaves one of some hundred thousand values beyond two deviations.
    largest, limit = (np.quantile(np.abs(one), 0.999) for one in (rows, drawn))
    assert largest == pytest.approx(limit, rel=0.01) and np.abs(rows).max() < 1.01 * limit


def schedule():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        (changed(optimizer="ftrl"), r"table 'users': expected an optimizer 'sgd', .* Received: 'ftrl'\. Use one"),
        (changed(optimizer=keras.optimizers.Ftrl()), r"expected an optimizer 'sgd'.* Received: <keras"),
        (changed(optimizer=keras.optimizers.SGD(0.1, momentum=0.9)), r"Received: SGD with momentum=0\.9\. Leave"),
        (changed(optimizer=keras.optimizers.Adam(0.1, clipnorm=1.0)), r"Received: Adam with clipnorm=1\.0\. Leave"),
        (changed(optimizer=keras.optimizers.AdamW(0.1)), r"expected an optimizer 'sgd'.* Received: <keras"),
        (changed(optimizer=schedule()), "Received: the schedule ExponentialDecay"),
        (changed(combiner="max"), "combiner: expected None, 'sum'"),
        (changed(combiner=None), r"table 'users': expected a combiner .* Received: None"),
        (changed(initializer="orthogonal"), "embeddings_initializer: expected 'uniform'"),
        (changed(vocabulary_size=0), "input_dim: expected a whole number"),
        ([USER, changed(embedding_dim=4)], r"two that differ, both named 'users'"),
        (replace(USER, output_shape=(8, 5)), r"feature 'user': expected an output_shape that ends with 3.*\(8, 5\)"),
        ({"user": 3}, r"feature_configs: expected a keras_rs.layers.FeatureConfig.* Received: 3, without name"),
        (replace(USER, table="users"), r"table of feature 'user': expected a keras_rs.layers.TableConfig"),
        ({}, r"expected at least one feature\. Received: \{\}"),
    ],
)
def test_configs_when_they_cannot_be_used_then_say_what_was_expected(configs, said):
    with pytest.raises(ConfigurationError, match=said):
        ShardedEmbeddings(configs)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ({"user": IDS["user"]}, r"expected ids in the structure of feature_configs, which is .*'seen'.* Received: \{"),
        ({**IDS, "user": IDS["items"][0]}, r"expected ids of shape \(8, 1\) for feature 'user'.* Received: \(6, 3\)"),
        ({**IDS, "user": IDS["user"][:, 0]}, r"expected ids of shape \(8, 1\).* Received: \(6,\)"),
        ({**IDS, "user": IDS["user"][..., None]}, r"expected ids of shape \(rows,\) or \(rows, ids\)"),
    ],
)
def test_ids_when_the_configs_have_another_form_then_say_what_was_expected(ids, said):
    with pytest.raises(ConfigurationError, match=said):
        ShardedEmbeddings(CONFIGS)(ids)


def test_ids_when_they_have_weights_then_are_refused():
    layer = ShardedEmbeddings(CLICKED)
    with pytest.raises(UnsupportedError, match="expected ids without weights"):
        layer(np.array([1]), weights=np.array([0.5], "float32"))
    with pytest.raises(UnsupportedError, match="expected ids without weights"):
        layer(keras.Input((), dtype="int32"), weights=keras.Input(()))


def test_rows_when_a_table_has_them_then_equal_those_of_a_layer_of_its_own():
    (of_configs,) = ShardedEmbeddings(CLICKED, seed=3).embeddings
    own = ShardedEmbedding(50, 4, seed=3)
    np.testing.assert_array_equal(of_configs.table_spec.initial_rows(), own.table_spec.initial_rows())


def test_features_when_their_tables_are_those_of_a_fit_then_a_step_looks_all_up_at_once_and_frozen_ones_stay():
    model = model_of(ShardedEmbeddings(CONFIGS, seed=3))
    embeddings = {one.name: one for one in sharded_embeddings(model)}
    embeddings["users"].trainable = False
    model.compile("sgd", "mse")
    tables, calls = LocalTables([one.table_spec for one in embeddings.values()]), []
    for name in ("look_up", "push"):
        call = getattr(tables, name)
        setattr(tables, name, lambda given, name=name, call=call: calls.append((name, len(given))) or call(given))
    for place, one in enumerate(embeddings.values()):
        one.divide(tables, place)
    before = {name: one.table_variables[0].numpy() for name, one in embeddings.items()}
    model.train_on_batch(IDS, TARGETS)
    # On PyTorch, Keras calls the layer once more, to build the loss.
    assert calls[-2:] == [("look_up", 3), ("push", 2)] and set(calls[:-2]) <= {("look_up", 3)}
    stays = {name: np.array_equal(one.table_variables[0].numpy(), before[name]) for name, one in embeddings.items()}
    assert stays == {"items": False, "users": True}
