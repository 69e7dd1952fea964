"""Metrics that are fed one number a batch, or give several at once: of several ranks they are those of one process."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_reference import classifier_data
from model_jobs import batches_of, job_of, split_columns
from own_step import OwnStep
from tiers import in_tiers

from elephant.rank.metrics.metric_sums import MetricSums, results_of

BATCH, EPOCHS = 10, 2


class Counts(keras.metrics.Metric):
    """Counts the rows, and those of a label above zero, and gives both and their ratio."""

    def __init__(self, name="counts", **options):
        super().__init__(name=name, **options)
        self.seen = self.add_weight(name="seen", initializer="zeros")
        self.above = self.add_weight(name="above", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))
        self.above.assign_add(ops.sum(ops.cast(y_true > 0, "float32")))

    def result(self):
        return {"seen": self.seen + 0.0, "ratio": self.above / ops.maximum(self.seen, 1.0)}


def mean_error(y_true, y_pred):
    return ops.mean(ops.abs(ops.reshape(y_true, (-1, 1)) - ops.reshape(y_pred, (-1, 1))))


class Tracked(keras.Model):
    """Computes its loss itself, and keeps it in a tracker."""

    def __init__(self, **options):
        super().__init__(**options)
        self.tracker = keras.metrics.Mean("tracked")
        self.dense = layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean(ops.square(y_pred - ops.reshape(y, (-1, 1))))
        self.tracker.update_state(loss)
        return loss


class Stepped(OwnStep):
    """Has a step of its own, which feeds a tracker once a batch that is called as Keras' own one."""

    def __init__(self, **options):
        super().__init__(**options)
        self.tracker = keras.metrics.Mean("loss")
        self.dense = layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def step(self, data, update):
        def error():
            return ops.mean(ops.square(self.dense(data[0]) - ops.reshape(data[1], (-1, 1))))

        loss = update(error, self.trainable_variables, self.optimizer)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "last": loss}


def two_outputs():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [layers.Dense(1, name="a")(inputs), layers.Dense(3, "softmax", name="b")(inputs)])
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    model.compile(keras.optimizers.SGD(1e-3), [keras.losses.MeanSquaredError(reduction="sum"), ignoring])
    return model


def with_metrics():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Counts(), mean_error])
    return model


def of_class(kind, loss=None):
    def build():
        model = kind()
        model.compile(keras.optimizers.SGD(0.01), loss)
        model(np.zeros((1, 6), "float32"))
        return model

    return build


BUILDERS = {
    "metrics": with_metrics,
    "losses of outputs": two_outputs,
    "a loss of its own": of_class(Tracked),
    "a step of its own": of_class(Stepped, "mse"),
}
# The first rank, which reports, runs out of rows, and the second has none.
SIZES = (13, 0, 25)


def seeded(build):
    def built():
        keras.utils.set_random_seed(0)
        return build()

    return built


def columns_for(name, rows):
    columns = classifier_data(rows)
    values = columns["label"]
    classes = np.digitize(values, [-1.0, 1.0]).astype("int64")
    return columns["features"], (values, classes) if name == "losses of outputs" else values


@pytest.mark.parametrize("name", in_tiers({name: name for name in BUILDERS}, fast=["metrics"], slow="same rule"))
def test_history_when_ranks_have_other_parts_of_batches_then_equals_one_process(rank_pool, name, by_value):
    build = seeded(BUILDERS[name])
    job, columns = job_of(build, *columns_for(name, sum(SIZES)), epochs=EPOCHS, batch_size=BATCH, shuffle=False)
    epochs = rank_pool.fit(job, split_columns(columns, SIZES))[0].epochs
    batches = list(batches_of(job, columns, SIZES))
    tuples = (batch[:2] for _ in range(EPOCHS) for batch in batches)
    reference = build().fit(tuples, epochs=EPOCHS, steps_per_epoch=len(batches), shuffle=False, verbose=0).history
    for metric, values in reference.items():
        np.testing.assert_allclose([logs[metric] for logs in epochs], values, rtol=2e-5, err_msg=metric)


def test_sums_when_batches_are_of_different_sizes_then_a_number_of_a_batch_counts_as_its_rows():
    model = seeded(with_metrics)()
    x, y = columns_for("metrics", 64)
    parts = []
    for start, stop in ((0, 1), (1, 64)):
        sums = MetricSums(model)
        sums.add((x[start:stop], y[start:stop], None), stop - start)
        parts.append(sums.part)
    schema = job_of(model, x, y)[0].schema
    results = results_of(model, schema, {"features": (6,)}, parts)
    errors = np.abs(y - np.ravel(model.predict(x, verbose=0)))
    assert results["mean_error"] == pytest.approx(errors.mean(), rel=1e-5)
    assert results["seen"] == 64 and results["ratio"] == pytest.approx(np.mean(y > 0))


def test_sums_when_keras_goes_on_from_the_batch_before_then_each_row_counts_once():
    model = seeded(with_metrics)()
    x, y = columns_for("metrics", 60)
    ahead, begin_anew = model.test_on_batch, model.reset_metrics

    def test_on_batch(*batch, **options):
        # As in Keras 3.12, which does not begin anew by itself.
        model.reset_metrics = lambda: None
        try:
            return ahead(*batch, **options)
        finally:
            model.reset_metrics = begin_anew

    model.test_on_batch = test_on_batch
    sums = MetricSums(model)
    for start in range(0, 60, 20):
        sums.add((x[start : start + 20], y[start : start + 20], None), 20)
    results = results_of(model, job_of(model, x, y)[0].schema, {"features": (6,)}, [sums.part])
    errors = np.abs(y - np.ravel(model.predict(x, verbose=0)))
    assert results["mean_error"] == pytest.approx(errors.mean(), rel=1e-5)
    assert results["seen"] == 60


def test_metrics_when_parts_of_other_sizes_give_another_number_then_are_named():
    def largest(y_true, y_pred):
        return ops.max(y_pred)

    def root(y_true, y_pred):
        return ops.sqrt(ops.mean(ops.square(ops.reshape(y_true, (-1, 1)) - y_pred)))

    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[largest, root, mean_error, Counts()])
    x, y = columns_for("metrics", 12)
    y[8:] += 9.0
    sums = MetricSums(model)
    sums.try_out((x, y, None), [(x[:8], y[:8], None), (x[8:], y[8:], None)])
    assert sums.part.not_sums == ("largest", "root")
