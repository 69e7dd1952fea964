"""Models of every kind, in both engines, against one process of plain Keras on the same global batches."""

import keras
import model_zoo
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit, row_spec
from keras_reference import largest_difference
from model_jobs import batches_of, fit_on, job_of, rows_of, split_columns, train_plainly, weights_of
from pyspark import cloudpickle
from rank_pool import fit_here
from tiers import in_tiers

from elephant.driver.driver_epochs import EpochSummaries
from elephant.driver.server_model import ServerModel

TOLERANCE = 1e-6
# The second rank has full batches, and one less: in the last step it has no row of its own. No rank has a batch of one
# row, for which PyTorch has no gradients of some convolutions.
SIZES = (14, 8)
ROWS = sum(SIZES)

# One rank trains another one with weights of classes, below.
KINDS = [kind for kind in (*model_zoo.SAVED, *model_zoo.BUILT) if kind is not model_zoo.binary_with_class_weights]
BY_RANKS = ["dictionaries", "text", "sparse_input", "own_loss"]
# What workers push and report depends on inputs, outputs, sequences and weights of classes, and on whose step it is.
BY_WORKERS = ["dictionaries"]
OF_WORKERS = [*BY_WORKERS, "masked_rnn", "one_hot_with_class_weights", "nested", "sparse_input", "frozen", "vae"]
# What these are made of is not of how many ranks there are: one takes all rows.
BY_ONE = ["nested", "partly_compared", "series_rnn", "sparse_rows", "autoencoder", "twin_autoencoder", "custom"]
ANOTHER = "another kind of model"


@pytest.fixture(autouse=True)
def models_travel_by_value():
    cloudpickle.register_pickle_by_value(model_zoo)
    yield
    cloudpickle.unregister_pickle_by_value(model_zoo)


def job_of_kind(kind, optimizer="adam", **options):
    """Returns the job and its columns; a model that Keras cannot save is given as a function."""
    model, columns = model_zoo.made(kind, optimizer)
    return job_of(
        (lambda: model_zoo.made(kind, optimizer)[0]) if kind in model_zoo.BUILT else model, **columns, **options
    )


def skip_what_the_backend_lacks(kind):
    backend = keras.config.backend()
    if kind is model_zoo.text and backend != "tensorflow":
        pytest.skip("Keras takes strings on TensorFlow alone")
    if kind is model_zoo.sparse_input and backend == "torch":
        pytest.skip("Keras on PyTorch has no sparse inputs")
    if kind is model_zoo.vae and backend != "tensorflow":
        pytest.skip("Keras' fit takes no model without a call on JAX and PyTorch")


def trained_plainly(kind, job, columns, sizes, optimizer="adam"):
    return train_plainly(model_zoo.made(kind, optimizer)[0], job, columns, sizes)


@pytest.mark.parametrize("kind", in_tiers(KINDS, fast=BY_RANKS, slow=ANOTHER))
def test_weights_when_trained_by_ranks_then_equal_one_process(rank_pool, kind):
    skip_what_the_backend_lacks(kind)
    job, columns = job_of_kind(kind, epochs=2, batch_size=4, shuffle=False)
    sizes = (ROWS,) if kind.__name__ in BY_ONE else SIZES
    of_rank_0 = fit_here(job, columns) if len(sizes) == 1 else rank_pool.fit(job, split_columns(columns, sizes))[0]
    expected = weights_of(trained_plainly(kind, job, columns, sizes))
    assert largest_difference(of_rank_0.variables[: len(expected)], expected) <= TOLERANCE
    assert np.isfinite(list(of_rank_0.epochs[-1].values())).all()


@pytest.mark.parametrize(
    "kind", in_tiers([kind for kind in KINDS if kind.__name__ in OF_WORKERS], fast=BY_WORKERS, slow=ANOTHER)
)
def test_weights_when_trained_by_one_asynchronous_worker_then_equal_one_process(rank_pool, kind):
    skip_what_the_backend_lacks(kind)
    # Servers apply gradients of embeddings to all rows, which is the same for SGD alone.
    optimizer = "sgd" if kind in model_zoo.SLICED else "adam"
    job, columns = job_of_kind(kind, optimizer, mode="asynchronous", epochs=2, batch_size=5, shuffle=False)
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        parts = fit.train(0).parts
        weights = fit.weights()
    reference = trained_plainly(kind, job, columns, (model_zoo.ROWS,), optimizer)
    expected = [np.array(keras.ops.convert_to_numpy(weight)) for weight in reference.trainable_weights]
    assert largest_difference(weights, expected) <= TOLERANCE
    # Of one worker, what the driver puts together is what Keras has logged.
    summaries = EpochSummaries(ServerModel(job, row_spec(job.schema, columns)).model, job.schema, 1)
    for part in parts:
        assert summaries.add(part) == pytest.approx(part.logs, rel=1e-5)


def test_logs_when_there_are_several_outputs_then_equal_one_process(rank_pool):
    kind = model_zoo.dictionaries
    job, columns = job_of_kind(kind, epochs=1, batch_size=4, shuffle=False)
    columns = rows_of(columns, slice(0, 16))
    recordings = rank_pool.fit(job, split_columns(columns, (8, 8)))
    history = fit_on(list(batches_of(job, columns, (8, 8))), model_zoo.made(kind)[0])
    assert recordings[0].epochs == [pytest.approx({name: value for name, [value] in history.items()}, rel=1e-5)]
    assert len(history) > 3


def test_weights_when_one_rank_has_class_weights_then_equal_one_process():
    kind = model_zoo.binary_with_class_weights
    job, columns = job_of_kind(kind, epochs=2, batch_size=4, shuffle=False)
    expected = weights_of(trained_plainly(kind, job, columns, (ROWS,)))
    assert largest_difference(fit_here(job, columns).variables[: len(expected)], expected) <= TOLERANCE


def test_validation_when_classes_have_weights_then_is_without_them(rank_pool):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy")
    # Rows that are all alike: the weight is all that training and validation differ in.
    columns = {"x": np.ones((ROWS, 2), "float32"), "y": np.zeros(ROWS, "int32")}
    options = {"epochs": 1, "batch_size": 4, "validation_fraction": 0.25}
    job, by_role = job_of(model, **columns, class_weight={0: 7.0, 1: 1.0}, **options)
    logs = rank_pool.fit(job, split_columns(by_role, SIZES))[0].epochs[-1]
    loss = model.evaluate(columns["x"], columns["y"], verbose=0)
    assert logs["loss"] == pytest.approx(7 * loss, rel=1e-5)
    assert logs["val_loss"] == pytest.approx(loss, rel=1e-5)
