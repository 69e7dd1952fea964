"""Fits of models with sharded tables on executors, and what is done with the trained tables."""

import json
import os
import signal
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_reference import global_batches, split
from spark_frames import partitioned_frame, split_rows
from tiers import in_tiers

import elephant
from elephant import KerasEstimator, KerasModel, ShardedEmbedding
from elephant.errors import CheckpointError, ConfigurationError, UnsupportedError

SIZES = (17, 14)
RANDOM = np.random.default_rng(0)
DATA = {
    "features": RANDOM.integers(0, 30, (31, 2)).astype("float32"),
    "label": RANDOM.normal(size=31).astype("float32"),
}
BATCH, EPOCHS = 4, 2


def model_of(embedding=None, path=None):
    keras.utils.set_random_seed(5)
    embedding = embedding or ShardedEmbedding(30, 4, optimizer="sgd", learning_rate=0.1, seed=3, name="user", path=path)
    ids = keras.Input((2,))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids))))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def plain_fit(epochs):
    plain = keras.layers.Embedding(30, 4)
    plain.build((None, 2))
    plain.embeddings.assign(ShardedEmbedding(30, 4, seed=3).table_spec.initial_rows())
    model, batches = model_of(plain), list(global_batches(split(DATA, SIZES), BATCH, epochs))
    pairs = ((batch["features"], batch["label"]) for batch in batches)
    model.fit(pairs, epochs=epochs, steps_per_epoch=len(batches) // epochs, shuffle=False, verbose=0)
    return model, plain


def build_model():
    return model_of()


@pytest.fixture(scope="module")
def frame(spark):
    return partitioned_frame(spark, split_rows(DATA, SIZES), "features array<double>, label double")


@pytest.fixture(scope="module")
def expected():
    """Predictions and rows of one process of plain Keras, on the batches of both workers."""
    model, plain = plain_fit(EPOCHS)
    return model.predict(DATA["features"], verbose=0), keras.ops.convert_to_numpy(plain.embeddings)


def estimator_of(model, **options):
    given = {"numWorkers": 2, "epochs": EPOCHS, "batchSize": BATCH, "shuffle": False, "verbose": 0, **options}
    return KerasEstimator(model, **given)


def predictions(fitted, frame):
    rows = fitted.transform(frame).orderBy("prediction").select("prediction").collect()
    return np.array([row.prediction for row in rows])


@pytest.mark.usefixtures("by_value")
@pytest.mark.parametrize(
    "model",
    in_tiers(
        {
            "a model": lambda path: model_of(),
            "a function": lambda path: build_model,
            "a model with a path": lambda path: model_of(path=path),
        },
        fast=["a model"],
        slow="another fit; tests/rank/test_divided_tables.py has a path, test_given_models.py a function",
    ),
)
def test_fit_when_workers_have_parts_of_a_table_then_all_that_is_done_with_the_model_has_the_whole(
    spark, frame, expected, model, tmp_path
):
    fitted = estimator_of(model(str(tmp_path / "tables"))).fit(frame)
    outputs, rows = expected
    np.testing.assert_allclose(fitted.table("user").numpy(), rows, atol=1e-5)
    np.testing.assert_allclose(predictions(fitted, frame), np.sort(outputs[:, 0]), atol=1e-5)
    listed = {row.id: row.embedding for row in fitted.table("user").toDF().collect()}
    np.testing.assert_allclose([listed[place] for place in range(30)], rows, atol=1e-5)
    fitted.save(str(tmp_path / "saved"))
    loaded = KerasModel.load(str(tmp_path / "saved"), trusted=True)
    np.testing.assert_array_equal(loaded.table("user").numpy(), fitted.table("user").numpy())
    assert loaded.evaluate(frame)["loss"] == pytest.approx(np.mean((outputs[:, 0] - DATA["label"]) ** 2), rel=1e-4)
    with pytest.raises(ConfigurationError, match=r"table: expected the name .* model has user\. Received: 'item'"):
        fitted.table("item")
    with pytest.raises(UnsupportedError, match="export: expected layers that Keras can export"):
        fitted.export(str(tmp_path / "exported"))


@pytest.mark.slow("four fits; the test above has one with a path")
def test_fits_when_tables_have_a_path_then_go_on_with_other_numbers_of_workers_and_leave_what_is_needed(
    frame, expected, tmp_path
):
    tables, kept = tmp_path / "tables", str(tmp_path / "kept")
    first = estimator_of(model_of(path=str(tables)), epochs=1).fit(frame)
    # Rows in two files; nothing is left of a state.
    assert sorted(name.split(".", 1)[1] for name in os.listdir(tables)) == [
        f"result.0.embeddings.{part}-of-2.npy" for part in range(2)
    ]
    again = estimator_of(first, epochs=1, numWorkers=1).fit(frame)
    assert again.table("user").numpy().shape == (30, 4)
    for epochs in range(1, EPOCHS + 1):
        fitted = estimator_of(model_of(path=str(tables)), epochs=epochs, checkpointPath=kept, resume=True).fit(frame)
    np.testing.assert_allclose(fitted.table("user").numpy(), expected[1], atol=1e-5)
    np.testing.assert_allclose(
        first.table("user").numpy(), keras.ops.convert_to_numpy(plain_fit(1)[1].embeddings), atol=1e-5
    )
    needed = {
        json.loads(json.loads(path.read_text())["body"])["facts"]["tables"]["name"]
        for path in Path(kept).glob("*.json")
    }
    states = {name.rsplit(".", 4)[0] for name in os.listdir(tables) if ".result." not in name}
    assert states == needed and len(needed) == EPOCHS
    for path in tables.iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match=r"expected .*result\.0\.embeddings\.0-of-2\.npy, in which a worker"):
        fitted.table("user").numpy()


@pytest.mark.slow("a process ends; tests/rank/test_divided_tables.py has the state that a fit goes on with")
@pytest.mark.usefixtures("by_value")
@pytest.mark.parametrize("has_path", [False, True])
def test_fit_when_a_worker_is_killed_then_goes_on_with_the_table_of_its_last_state(
    spark, frame, expected, tmp_path, has_path
):
    mark = str(tmp_path / "killed")

    class Killed(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if self.epoch == 1 and batch == 2 and not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    model = model_of(path=str(tmp_path / "tables") if has_path else None)
    # Nor is a weight lost with the worker that updates it.
    fitted = estimator_of(model, maxRestarts=1, callbacks=[Killed()], shardOptimizer=has_path).fit(frame)
    assert os.path.exists(mark) and fitted.training_statistics["restarts"] == 1
    np.testing.assert_allclose(fitted.table("user").numpy(), expected[1], atol=1e-5)
    assert not has_path or all(".result." in name for name in os.listdir(tmp_path / "tables"))


@pytest.mark.slow("a second fit; tests/rank/test_divided_tables.py has other numbers of ranks")
def test_fit_when_resumed_from_a_folder_then_has_the_table_of_one_that_was_not_interrupted(
    spark, frame, expected, tmp_path
):
    estimator_of(model_of(), epochs=1, checkpointPath=str(tmp_path)).fit(frame)
    fitted = estimator_of(model_of(), checkpointPath=str(tmp_path), resume=True).fit(frame)
    np.testing.assert_allclose(fitted.table("user").numpy(), expected[1], atol=1e-5)
    # All is done: the model comes from the folder.
    again = estimator_of(model_of(), checkpointPath=str(tmp_path), resume=True).fit(frame)
    np.testing.assert_array_equal(again.table("user").numpy(), fitted.table("user").numpy())


@pytest.mark.slow("a job; tests/modeling has the layer in one process")
@pytest.mark.usefixtures("by_value")
def test_loop_of_one_s_own_when_it_trains_a_sharded_embedding_on_several_ranks_then_is_refused(spark):
    def train():
        model = model_of()
        model.optimizer = elephant.DistributedOptimizer(model.optimizer)
        model.fit(DATA["features"], DATA["label"], verbose=0)

    with pytest.raises(Exception, match="expected a ShardedEmbedding in a synchronous fit"):
        elephant.run(train, num_workers=2, verbose=0)


def counting_model(path=None):
    """Returns a model whose rows' gradients are how often a batch names them, whatever the weights are."""

    def loss(labels, outputs):
        return outputs * keras.ops.cast(keras.ops.shape(outputs)[0], "float32")

    embedding = ShardedEmbedding(
        30, 4, optimizer="sgd", learning_rate=1.0, embeddings_initializer="zeros", name="user", path=path
    )
    ids = keras.Input((2,))
    model = keras.Model(ids, keras.ops.sum(embedding(ids), axis=(1, 2)))
    model.compile(keras.optimizers.SGD(1.0), loss)
    return model


COUNTS = np.bincount(DATA["features"].ravel().astype(int), minlength=30)


@pytest.mark.slow("a process ends; tests/rank/test_server_tables.py has a fit whose workers are killed")
@pytest.mark.usefixtures("by_value")
@pytest.mark.parametrize("placement", ["driver", "executors"])
def test_asynchronous_fit_when_a_worker_is_killed_then_each_row_has_every_batch_once(spark, frame, tmp_path, placement):
    mark, tables = str(tmp_path / "killed"), tmp_path / "tables"

    class Killed(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2 and not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    on_executors = placement == "executors"
    estimator = estimator_of(
        counting_model(str(tables) if on_executors else None), mode="asynchronous", callbacks=[Killed()],
        serverPlacement=placement, parameterServers=1, numWorkers=1 if on_executors else 2,
        # Where Spark deals rows out anew, they may come to a second attempt in another order, but for their hashes.
        shuffle=True,
    )  # fmt: skip
    fitted = estimator.fit(frame)
    rows = -EPOCHS * np.repeat(COUNTS[:, None], 4, axis=1)
    assert os.path.exists(mark)
    np.testing.assert_array_equal(fitted.table("user").numpy(), rows)
    listed = {row.id: row.embedding for row in fitted.table("user").toDF().collect()}
    np.testing.assert_array_equal([listed[place] for place in range(30)], rows)
    expected = [rows[list(ids.astype(int))].sum() for ids in DATA["features"]]
    np.testing.assert_array_equal(predictions(fitted, frame)[:, 0], np.sort(expected))
    assert not on_executors or [name.split(".", 1)[1] for name in os.listdir(tables)] == [
        "result.0.embeddings.0-of-1.npy"
    ]


@pytest.mark.slow("three fits; tests/rank/test_server_tables.py has a state in mid-flight")
@pytest.mark.usefixtures("by_value")
def test_asynchronous_fit_when_it_goes_on_then_has_the_table_of_its_folder_and_leaves_what_is_needed(frame, tmp_path):
    tables, kept = tmp_path / "tables", str(tmp_path / "kept")
    for epochs, workers in ((1, 2), (2, 2), (3, 1)):
        fitted = estimator_of(
            counting_model(str(tables)), mode="asynchronous", epochs=epochs, numWorkers=workers, checkpointPath=kept,
            resume=True,
        ).fit(frame)  # fmt: skip
        np.testing.assert_array_equal(fitted.table("user").numpy(), -epochs * np.repeat(COUNTS[:, None], 4, axis=1))
    needed = {
        json.loads(json.loads(path.read_text())["body"])["facts"]["tables"]["name"]
        for path in Path(kept).glob("*.json")
    }
    states = {name.rsplit(".", 4)[0] for name in os.listdir(tables) if ".result." not in name}
    assert states == needed and needed
