"""Data, models and the single process of plain Keras that distributed fits are compared with."""

import multiprocessing
import os
import threading
import time
from pathlib import Path

import keras
import numpy as np

from elephant.config import FitConfig
from elephant.data.schema import DENSE, SCALAR, DataSchema, Field
from elephant.modeling.model_spec import model_source
from elephant.rank.job import TrainingJob


def classifier_data(rows, features=6):
    """Returns (rows, features) float32 features and a label that depends on them, with noise."""
    rng = np.random.default_rng(42)
    x = rng.normal(size=(rows, features)).astype("float32")
    y = (x @ rng.normal(size=features) + 0.1 * rng.normal(size=rows)).astype("float32")
    return {"features": x, "label": y}


def regression_model(optimizer, l2=0.0, metrics=None):
    """Returns a compiled model of two layers whose initial weights are always the same."""
    keras.utils.set_random_seed(0)
    regularizer = keras.regularizers.L2(l2) if l2 else None
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, "tanh", kernel_regularizer=regularizer),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", metrics=metrics)
    return model


def two_groups():
    """Returns an optimizer that has one for kernels and another one for biases."""
    by_name = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.05, momentum=0.9))
    by_name[".*kernel"] = keras.optimizers.Adam(0.01)
    return keras.optimizers.MultiOptimizer(by_name)


def job_for(
    model,
    *,
    callbacks=(),
    weighted=False,
    indicated=False,
    label_array=False,
    dtype="float32",
    label_dtype="float32",
    **options,
):
    """Returns the `TrainingJob` of a model on the columns of `classifier_data`."""
    source = model_source(model)
    schema = DataSchema(
        inputs=(
            Field("features", ("features",), dtype, DENSE, source.info.inputs[0].shape if source.info.inputs else None),
        ),
        labels=(Field("label", ("label",), label_dtype, DENSE if label_array else SCALAR),),
        weights=(Field("weight", ("weight",), "float32", SCALAR),) if weighted else (),
        validation=Field("validation", ("validation",), "bool", SCALAR) if indicated else None,
    )
    return TrainingJob(source, tuple(callbacks), FitConfig(**options), schema)


def fit_one_process(model, batches, epochs):
    """Trains a copy of a model with plain `keras.Model.fit` on given batches.

    Returns:
        The weights, and the history as a dictionary of lists.
    """
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile_from_config(model.get_compile_config())
    steps = len(batches) // epochs
    names = [name for name in ("features", "label", "weight") if name in batches[0]]
    tuples = (tuple(batch[name] for name in names) for batch in batches)
    history = copy.fit(tuples, epochs=epochs, steps_per_epoch=steps, verbose=0, shuffle=False)
    return copy.get_weights(), history.history


def split(columns, sizes):
    """Returns the columns' rows as one dictionary of arrays per rank."""
    bounds = np.cumsum([0, *sizes])
    return [
        {name: values[start:stop] for name, values in columns.items()}
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def global_batches(parts, batch_size, epochs, order=None):
    """Yields for each step the rows of all ranks: the k-th batch of every rank that still has one."""
    for epoch in range(epochs):
        for step in range(max(-(-len(part["features"]) // batch_size) for part in parts)):
            rows = [
                (np.arange(len(part["features"])) if order is None else order(epoch, rank, len(part["features"])))[
                    step * batch_size : (step + 1) * batch_size
                ]
                for rank, part in enumerate(parts)
            ]
            yield {
                name: np.concatenate([part[name][chosen] for part, chosen in zip(parts, rows, strict=True)])
                for name in parts[0]
            }


def largest_difference(variables, expected):
    """Returns the largest absolute difference between two lists of arrays of the same shapes."""
    assert [v.shape for v in variables] == [e.shape for e in expected]
    return max(np.abs(v - e).max(initial=0) for v, e in zip(variables, expected, strict=True))


class StopOnOneRank(keras.callbacks.Callback):
    """Asks to stop after one batch, on the rank that is the first to get there.

    Args:
        claim: A file that does not exist yet; who makes it is the one.
        batch: After which batch.
    """

    def __init__(self, claim, batch):
        super().__init__()
        self.claim = claim
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            try:
                open(self.claim, "x").close()
            except FileExistsError:
                return
            self.model.stop_training = True


# Of a pool, whose fault it is.
VICTIM = 1


def is_victim():
    # By the pool's name of its process: TensorFlow traces a step before the ranks know each other.
    return multiprocessing.current_process().name == f"rank-{VICTIM}"


class Signals(keras.callbacks.Callback):
    """Sends a signal to the victim's own process, before its third step."""

    def __init__(self, folder, number):
        super().__init__()
        self.folder, self.number = folder, number

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and is_victim():
            Path(self.folder, "sent").write_text(str(time.monotonic()))
            os.kill(os.getpid(), self.number)


class OnDevices(keras.callbacks.Callback):
    """Raises where gradients are not reduced on devices, or are and should not be."""

    def __init__(self, expected=True):
        super().__init__()
        self.expected = expected

    def on_train_batch_end(self, batch, logs=None):
        found = any(thread.name.startswith("elephant-devices-") for thread in threading.enumerate())
        if found != self.expected:
            raise RuntimeError(f"expected gradients on devices: {self.expected}. Received: {found}.")


def small_model(optimizer):
    """Returns a model with the same weights on every backend."""
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=weight.shape, scale=0.4) for weight in model.get_weights()])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


class Fails(keras.callbacks.Callback):
    """Raises on the victim, before its third step."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and is_victim():
            raise ZeroDivisionError("before the third step")
