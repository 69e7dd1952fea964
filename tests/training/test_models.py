"""Models of every kind, in both engines, against one process of plain Keras on the same global batches."""

import keras
import model_zoo
import numpy as np
import pytest
from keras_reference import largest_difference
from model_jobs import job_of, split_columns, train_plainly, weights_of
from pyspark import cloudpickle
from worker_pool import AsynchronousFit

TOLERANCE = 1e-6
SIZES = (13, 9)

every_kind = pytest.mark.parametrize("kind", [*model_zoo.SAVED, *model_zoo.BUILT], ids=lambda kind: kind.__name__)


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


def trained_plainly(kind, job, columns, sizes, optimizer="adam"):
    return train_plainly(model_zoo.made(kind, optimizer)[0], job, columns, sizes)


@every_kind
def test_weights_when_trained_by_two_ranks_then_equal_one_process(rank_pool, kind):
    job, columns = job_of_kind(kind, epochs=2, batch_size=4, shuffle=False)
    recordings = rank_pool.fit(job, split_columns(columns, SIZES))
    expected = weights_of(trained_plainly(kind, job, columns, SIZES))
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
    assert np.isfinite(list(recordings[0].epochs[-1].values())).all()


@every_kind
def test_weights_when_trained_by_one_asynchronous_worker_then_equal_one_process(worker_pool, kind):
    # Servers apply gradients of embeddings to all rows, which is the same for SGD alone.
    optimizer = "sgd" if kind in model_zoo.SLICED else "adam"
    job, columns = job_of_kind(kind, optimizer, mode="asynchronous", epochs=2, batch_size=5, shuffle=False)
    with AsynchronousFit(worker_pool, job, [columns]) as fit:
        fit.train(0)
        weights = fit.weights()
    reference = trained_plainly(kind, job, columns, (model_zoo.ROWS,), optimizer)
    expected = [np.array(keras.ops.convert_to_numpy(weight)) for weight in reference.trainable_weights]
    assert largest_difference(weights, expected) <= TOLERANCE
