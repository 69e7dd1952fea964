"""Fits whose ranks have parts of a table each, against one process of plain Keras on the same global batches."""

from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from elastic_reference import fit_of_changing_ranks
from keras_reference import global_batches, job_for, largest_difference, split
from tiers import in_tiers

from elephant.errors import CheckpointError, ConfigurationError, UnsupportedError
from elephant.modeling.layers.feature_embeddings import ShardedEmbeddings
from elephant.modeling.layers.sharded_embedding import ShardedEmbedding, sharded_embeddings
from elephant.monitor.events import CallbacksDue
from elephant.rank.job import WEIGHTS
from elephant.tables.stored import StoredTable
from elephant.tables.table import ROWS

RANDOM = np.random.default_rng(0)
DATA = {
    "features": RANDOM.integers(0, 30, (31, 3)).astype("float32"),
    "label": RANDOM.normal(size=31).astype("float32"),
}
BATCH, EPOCHS = 4, 2


def model_of(embedding, optimizer=None):
    keras.utils.set_random_seed(5)
    ids = keras.Input((3,))
    # Two lookups of one table in each step.
    joined = keras.layers.Concatenate()([embedding(ids[:, :1]), embedding(ids[:, 1:])[:, :1]])
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(joined)))
    model.compile(keras.optimizers.SGD(0.1) if optimizer is None else optimizer, "mse")
    return model


def sharded(rule="sgd", **options):
    return ShardedEmbedding(30, 4, optimizer=rule, learning_rate=0.1, seed=3, name="user", **options)


def plain():
    """Returns Keras' own layer with the first rows of the sharded one."""
    embedding = keras.layers.Embedding(30, 4)
    embedding.build((None, 1))
    embedding.embeddings.assign(sharded().table_spec.initial_rows())
    return embedding


def reference(embedding, parts, batches=None):
    """Trains by plain Keras on the batches of all ranks; returns the weights of the other layers, and all rows."""
    model = model_of(embedding)
    batches = list(global_batches(parts, BATCH, EPOCHS)) if batches is None else batches
    pairs = ((batch["features"], batch["label"]) for batch in batches)
    model.fit(pairs, epochs=EPOCHS, steps_per_epoch=len(batches) // EPOCHS, shuffle=False, verbose=0)
    dense = [keras.ops.convert_to_numpy(one) for one in model.layers[-1].weights]
    if isinstance(embedding, ShardedEmbedding):
        return [*dense, embedding.table_variables[0].numpy()]
    return [*dense, keras.ops.convert_to_numpy(embedding.embeddings)]


def values_of(array):
    """Returns an array of a state, or of a result, or what it refers to."""
    stored = StoredTable.from_array(array)
    return array if stored is None else stored.opened().part()


def trained(recording):
    """Returns the same of a fit, whose variables have the anchor before, and those of the optimizer between."""
    dense = [one for one in recording.variables[:3] if one.ndim]
    return [*dense, next(one for one in map(values_of, recording.variables) if one.shape == (30, 4))]


@pytest.mark.parametrize(
    "sizes",
    in_tiers([(31,), (17, 14), (13, 0, 18)], fast=["(13, 0, 18)"], slow="fewer ranks; tests/modeling has the layer"),
)
def test_fit_when_ranks_have_parts_of_a_table_then_equals_keras_on_all_rows(rank_pool, sizes):
    parts = split(DATA, sizes)
    recordings = rank_pool.fit(job_for(model_of(sharded()), epochs=EPOCHS, batch_size=BATCH, shuffle=False), parts)
    assert largest_difference(trained(recordings[0]), reference(plain(), parts)) < 1e-5


@pytest.mark.parametrize(
    "rule",
    in_tiers(["adagrad", "rowwise_adagrad", "lazy_adam"], fast=["lazy_adam"], slow="a rule; tests/tables has all"),
)
def test_fit_when_run_twice_then_has_the_same_bits_and_equals_one_process(rank_pool, rule):
    parts = split(DATA, (17, 14))
    job = job_for(model_of(sharded(rule)), epochs=EPOCHS, batch_size=BATCH, shuffle=False)
    one, other = (rank_pool.fit(job, parts)[0] for _ in range(2))
    for array, again in zip(one.variables, other.variables, strict=True):
        np.testing.assert_array_equal(array, again)
    assert largest_difference(trained(other), reference(sharded(rule), parts)) < 2e-5


@pytest.mark.slow("a fit; test_divided_optimizer.py has what the option does")
def test_fit_when_the_optimizer_of_the_other_layers_is_divided_too_then_has_the_same_bits(rank_pool):
    options = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False}
    fits = (
        job_for(model_of(sharded(), keras.optimizers.Adam()), shard_optimizer=one, **options) for one in (False, True)
    )
    whole, divided = (rank_pool.fit(job, split(DATA, (17, 14)))[0].variables for job in fits)
    for array, other in zip(whole, divided, strict=True):
        np.testing.assert_array_equal(array, other)


def of_configs():
    """Two features of one table of the form of Keras RS."""
    form = {"vocabulary_size": 30, "embedding_dim": 4, "initializer": "uniform", "combiner": "sum"}
    table = SimpleNamespace(name="user", optimizer=keras.optimizers.SGD(0.1), **form)
    features = (
        SimpleNamespace(name="one", table=table, input_shape=(None, ids), output_shape=(None, 4)) for ids in (1, 2)
    )
    keras.utils.set_random_seed(5)
    ids = keras.Input((3,))
    rows = ShardedEmbeddings(list(features), seed=3)([ids[:, :1], ids[:, 1:]])
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.slow("a fit; tests/modeling has the layer, and the test above the same tables")
def test_fit_when_tables_are_those_of_keras_rs_then_divides_them_and_equals_one_process(rank_pool):
    parts = split(DATA, (17, 14))
    recordings = rank_pool.fit(job_for(of_configs(), epochs=EPOCHS, batch_size=BATCH, shuffle=False), parts)
    model, batches = of_configs(), list(global_batches(parts, BATCH, EPOCHS))
    pairs = ((batch["features"], batch["label"]) for batch in batches)
    model.fit(pairs, epochs=EPOCHS, steps_per_epoch=len(batches) // EPOCHS, shuffle=False, verbose=0)
    (layer,) = sharded_embeddings(model)
    dense = [keras.ops.convert_to_numpy(one) for one in model.layers[-1].weights]
    assert largest_difference(trained(recordings[0]), [*dense, layer.table_variables[0].numpy()]) < 1e-5


@pytest.mark.parametrize("has_path", [False, True])
@pytest.mark.parametrize("world", in_tiers([1, 2, 3], fast=[3], slow="another number of ranks"))
def test_fit_when_it_goes_on_with_other_ranks_then_begins_with_the_whole_table(rank_pool, tmp_path, world, has_path):
    path = tmp_path if has_path else None
    options = {"batch_size": BATCH, "shuffle": False, "checkpoint_path": "unused"}
    first = rank_pool.fit(
        job_for(model_of(sharded("lazy_adam", path=path)), epochs=1, **options), split(DATA, (17, 14))
    )[0]
    state = first.states[-1]
    table = values_of(state.arrays[f"model/user/{ROWS}"])
    assert values_of(state.arrays["model/user/updates"]).item() == 5 and table.shape == (30, 4)
    assert has_path == (state.arrays[f"model/user/{ROWS}"] is not table)
    assert not has_path or state.facts["tables"]["finite"] is True
    np.testing.assert_array_equal(table, trained(first)[-1])
    job = job_for(model_of(sharded("lazy_adam", path=path)), epochs=1, **options)
    again = rank_pool.fit(replace(job, state=state), split(DATA, (31, *(0,) * (world - 1))))[0]
    np.testing.assert_array_equal(trained(again)[-1], table)


@pytest.mark.slow("three fits; the test above goes on with other ranks, and test_elastic.py changes their number")
@pytest.mark.parametrize("has_path", [False, True])
def test_fit_when_its_ranks_become_more_and_fewer_within_epochs_then_equals_keras_on_all_rows(
    rank_pool, tmp_path, has_path
):
    model = model_of(sharded(path=tmp_path if has_path else None))
    recording, batches = fit_of_changing_ranks(rank_pool, model, DATA, batch_size=BATCH, epochs=EPOCHS)
    assert largest_difference(trained(recording), reference(plain(), None, batches)) < 1e-5


def test_fit_when_it_validates_on_one_rank_alone_then_no_rank_waits_for_another(rank_pool):
    columns = {**DATA, "validation": np.arange(31) >= 25}
    parts = split(columns, (20, 11))
    job = job_for(model_of(sharded()), epochs=EPOCHS, batch_size=BATCH, shuffle=False, indicated=True)
    recordings = rank_pool.fit(job, parts)
    rows = [{name: part[name][~part["validation"]] for name in DATA} for part in parts]
    assert largest_difference(trained(recordings[0]), reference(sharded(), rows)) < 1e-5


@pytest.mark.parametrize("sizes", [(17, 14), (31,)])
def test_fit_when_an_id_is_none_of_the_table_then_the_error_is_that_and_not_the_frameworks(rank_pool, sizes):
    columns = {**DATA, "features": np.where(np.arange(31)[:, None] == 20, 99.0, DATA["features"]).astype("float32")}
    with pytest.raises(Exception, match=r"rank \d: \('DataError', 'user: expected ids from 0 to 29\. Received: 99"):
        rank_pool.fit(job_for(model_of(sharded()), epochs=1, batch_size=BATCH), split(columns, sizes))


WAYS = [
    {"frequency": "epoch"},
    {"frequency": 2},
    {"mode": "asynchronous", "frequency": 3},
    {"mode": "gossip"},
    {"aggregation": "server"},
]


@pytest.mark.parametrize("options", WAYS, ids=lambda given: str(given))
def test_job_when_gradients_are_not_exchanged_in_every_step_then_is_refused(options):
    with pytest.raises(UnsupportedError, match=r"expected gradients .* in every step.* ShardedEmbedding 'user'"):
        job_for(model_of(sharded()), **options)


# Each process has a file system of this kind to itself.
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("memory://tables", r"one folder that all workers see\. .* rank \d does not see what rank \d has written"),
        ("/dev/null/tables", r"path='/dev/null/tables'.*every worker can write .* Received: NotADirectoryError"),
    ],
)
def test_fit_when_workers_have_not_one_folder_for_tables_then_says_so_before_the_first_step(rank_pool, path, text):
    job = job_for(model_of(sharded(path=path)), epochs=1, batch_size=BATCH)
    with pytest.raises(Exception, match=text) as failed:
        rank_pool.fit(job, split(DATA, (17, 14)))
    assert "in require_folders" in str(failed.value)


@pytest.mark.parametrize("sizes", in_tiers([(31,), (17, 14)], fast=["(17, 14)"], slow="one rank"))
def test_fit_when_callbacks_on_the_driver_look_at_weights_then_tables_with_a_path_are_not_sent(
    rank_pool, tmp_path, sizes
):
    job = replace(job_for(model_of(sharded(path=tmp_path)), epochs=1, batch_size=BATCH), driver_reads=WEIGHTS)
    recording = rank_pool.fit(job, split(DATA, sizes))[0]
    turns = [event for event in recording.sent if isinstance(event, CallbacksDue)]
    assert len(turns) == 2
    for turn in turns:
        (table,) = filter(None, map(StoredTable.from_array, turn.arrays))
        with pytest.raises(CheckpointError, match="while-it-trains"):
            table.opened()
    assert trained(recording)[-1].shape == (30, 4)


def test_fit_when_its_optimizer_scales_the_loss_then_is_refused(rank_pool):
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(Exception, match="expected an optimizer that does not scale the loss"):
        rank_pool.fit(job_for(model_of(sharded(), scaling), epochs=1, batch_size=BATCH), split(DATA, (17, 14)))


def test_job_when_a_callback_gives_weights_back_then_is_refused():
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    with pytest.raises(ConfigurationError, match="restore_best_weights"):
        job_for(model_of(sharded()), callbacks=[stopping])
