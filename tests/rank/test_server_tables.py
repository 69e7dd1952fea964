"""Asynchronous fits of models whose tables parameter servers keep: exact for one worker, and never counted twice."""

import dataclasses

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import global_batches, job_for
from rank_pool import WorkerError
from tiers import in_tiers

from elephant.modeling.layers.sharded_embedding import ShardedEmbedding
from elephant.parameter_server.tables import TablesWanted
from elephant.tables.table import ROWS

RANDOM = np.random.default_rng(0)
DATA = {
    "features": RANDOM.integers(0, 30, (31, 3)).astype("float32"),
    "label": RANDOM.normal(size=31).astype("float32"),
}
BATCH, EPOCHS = 4, 2
SENT = TablesWanted(places=[None])


def model_of(embedding):
    keras.utils.set_random_seed(5)
    ids = keras.Input((3,))
    # Two lookups of one table in each step.
    joined = keras.layers.Concatenate(axis=1)([embedding(ids[:, :1]), embedding(ids[:, 1:])])
    hidden = keras.layers.Dense(8, "tanh")(keras.layers.Flatten()(joined))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def sharded(rule="sgd"):
    return ShardedEmbedding(30, 4, optimizer=rule, learning_rate=0.1, seed=3, name="user")


def one_process(model):
    batches = list(global_batches([DATA], BATCH, EPOCHS))
    pairs = ((batch["features"], batch["label"]) for batch in batches)
    model.fit(pairs, epochs=EPOCHS, steps_per_epoch=len(batches) // EPOCHS, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(weight) for weight in model.trainable_weights if weight.shape]


def plain():
    """Returns Keras' own layer with the first rows of the sharded one."""
    embedding = keras.layers.Embedding(30, 4)
    embedding.build((None, 1))
    embedding.embeddings.assign(sharded().table_spec.initial_rows())
    return embedding


WAYS = {"one server": ("asynchronous", 1), "three": ("asynchronous", 3), "hogwild": ("hogwild", 2)}


@pytest.mark.parametrize("way", in_tiers(WAYS, fast=["three"], slow="another number of servers, or without locks"))
def test_rows_when_servers_keep_a_table_then_equal_keras_on_the_same_batches(rank_pool, way):
    mode, servers = way
    job = job_for(model_of(sharded()), mode=mode, epochs=EPOCHS, batch_size=BATCH, shuffle=False)
    with AsynchronousFit(rank_pool, job, [DATA], parameter_servers=servers) as fit:
        fit.train(0)
        dense, fetched = fit.weights(), fit.control.fetch(SENT)
    embedding = plain()
    expected = one_process(model_of(embedding))
    rows = keras.ops.convert_to_numpy(embedding.embeddings)
    np.testing.assert_allclose(fetched.tables[0][ROWS], rows, atol=1e-5)
    others = [one for one in expected if one.shape != rows.shape]
    for own, other in zip([one for one in dense if one.shape], others, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


@pytest.mark.slow("a rule; tests/tables has all")
def test_slots_when_servers_keep_a_table_then_are_those_of_all_steps(rank_pool):
    job = job_for(model_of(sharded("lazy_adam")), mode="asynchronous", epochs=EPOCHS, batch_size=BATCH, shuffle=False)
    with AsynchronousFit(rank_pool, job, [DATA], parameter_servers=2) as fit:
        fit.train(0)
        table = fit.control.fetch(SENT).tables[0]
    layer = sharded("lazy_adam")
    one_process(model_of(layer))
    assert table["updates"].item() == EPOCHS * 8
    for variable in layer.table_variables:
        np.testing.assert_allclose(table[variable.name], variable.numpy(), atol=1e-5)


ROWS_OF_WORKERS, LONG = (31, 17), 60


def counting_model():
    """Returns a model whose rows' gradients are how often a batch names them, whatever the weights are."""
    ids = keras.Input((3,))
    embedding = ShardedEmbedding(
        30, 4, optimizer="sgd", learning_rate=1.0, embeddings_initializer="zeros", seed=3, name="user"
    )
    output = keras.layers.Lambda(lambda rows: keras.ops.sum(rows, axis=(1, 2)), output_shape=())(embedding(ids))
    model = keras.Model(ids, output)

    def loss(labels, outputs):
        return outputs * keras.ops.cast(keras.ops.shape(outputs)[0], "float32")

    model.compile(keras.optimizers.SGD(1.0), loss)
    return model


@pytest.mark.slow(
    "two fits; tests/parameter_server/test_server_tables.py counts rows, test_asynchronous_checkpoints.py goes on"
)
@pytest.mark.usefixtures("by_value")
def test_rows_when_a_fit_goes_on_from_mid_flight_then_each_has_every_batch_once(rank_pool):
    random = np.random.default_rng(1)
    parts = [
        {"features": random.integers(0, 30, (rows, 3)).astype("float32"), "label": np.zeros(rows, "float32")}
        for rows in ROWS_OF_WORKERS
    ]
    steps = [-(-rows // 4) for rows in ROWS_OF_WORKERS]
    job = job_for(counting_model, mode="asynchronous", num_workers=2, epochs=LONG, batch_size=4, seed=1)
    with AsynchronousFit(rank_pool, job, parts, parameter_servers=1) as fit:
        for partition in range(2):
            fit.begin(partition, attempt=40)
        for partition in range(2):
            fit.wait_for_step(partition, 2 * steps[partition])
        state = fit.checkpoint()
        for partition in range(2):
            rank_pool.kill(partition)
    assert state.arrays[f"model/user/{ROWS}"].any() and state.step
    with AsynchronousFit(rank_pool, dataclasses.replace(job, state=state), parts, parameter_servers=1) as fit:
        fit.train_all()
        rows = fit.control.fetch(SENT).tables[0][ROWS]
    counts = np.bincount(np.concatenate([part["features"].ravel() for part in parts]).astype(int), minlength=30)
    np.testing.assert_array_equal(rows, -LONG * np.repeat(counts[:, None], 4, axis=1))


def test_table_when_the_loss_is_scaled_then_is_refused(rank_pool):
    model = model_of(sharded())
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with AsynchronousFit(rank_pool, job_for(model, mode="asynchronous", batch_size=BATCH), [DATA]) as fit:
        fit.begin(0)
        with pytest.raises(WorkerError, match="expected an optimizer that does not scale the loss"):
            fit.pool.result(0)


def test_fit_when_an_id_is_none_of_the_table_then_the_error_is_that_and_not_the_frameworks(rank_pool):
    columns = {**DATA, "features": np.where(np.arange(31)[:, None] == 20, 99.0, DATA["features"]).astype("float32")}
    with AsynchronousFit(
        rank_pool, job_for(model_of(sharded()), mode="asynchronous", batch_size=BATCH), [columns]
    ) as fit:
        fit.begin(0)
        with pytest.raises(WorkerError, match=r"^DataError: user: expected ids from 0 to 29\. Received: 99"):
            fit.pool.result(0)


@pytest.mark.usefixtures("by_value")
def test_worker_when_its_model_has_another_table_than_the_drivers_then_it_is_an_error(rank_pool):
    job = job_for(model_of(sharded()), mode="asynchronous", epochs=1, batch_size=BATCH)
    other = job_for(model_of(sharded("adagrad")), mode="asynchronous", epochs=1, batch_size=BATCH)
    with AsynchronousFit(rank_pool, job, [DATA]) as fit:
        fit.begin(0, job=other)
        with pytest.raises(WorkerError, match="expected the tables of the driver's model"):
            fit.pool.result(0)
