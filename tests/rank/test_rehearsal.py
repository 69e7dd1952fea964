"""Rehearsals of a model's own step: what its gradients are of the rows, and that nothing has changed afterwards."""

import keras
import numpy as np
import pytest
from keras import ops
from own_step import OwnStep

from elephant.backends.gradient_averager import GradientAverager
from elephant.backends.gradient_kinds import GradientInfo, Notes, places_of
from elephant.backends.lookups import BY_BATCH, Places
from elephant.collective.communicator import LocalCommunicator
from elephant.errors import UnsupportedError
from elephant.modeling.variables import read_variables
from elephant.rank.traced_step import average_gradients
from elephant.rank.trials.coupling import RankLosses
from elephant.rank.trials.rehearsal import gradient_names, rehearse

ROWS = 24


def errors(model, rows, labels):
    return ops.square(model(rows, training=True)[:, 0] - labels)


def centered(values):
    return ops.mean(ops.square(values - ops.mean(values)))


def noise(rows):
    return keras.random.normal(ops.shape(rows))


# What a step makes of the rows of a batch, by what its gradients then are.
MEANS = {
    "mean": lambda model, rows, labels: ops.mean(errors(model, rows, labels)),
    "mean beside a penalty": lambda model, rows, labels: (
        ops.mean(errors(model, rows, labels)) + 0.1 * ops.sum(ops.square(model.hidden.kernel))
    ),
    "noise": lambda model, rows, labels: ops.mean(errors(model, rows + noise(rows), labels)),
}
SUMS = {
    "sum": lambda model, rows, labels: ops.sum(errors(model, rows, labels)),
    "a part of the sum": lambda model, rows, labels: ops.sum(errors(model, rows, labels)) / 64,
    "sum of noise": lambda model, rows, labels: ops.sum(errors(model, rows + noise(rows), labels)),
}
OTHERS = {
    "root": lambda model, rows, labels: ops.sqrt(ops.mean(errors(model, rows, labels))),
    "pairs of rows": lambda model, rows, labels: centered(errors(model, rows, labels)),
    "sum beside a penalty": lambda model, rows, labels: (
        ops.sum(errors(model, rows, labels)) + 0.1 * ops.sum(ops.square(model.hidden.kernel))
    ),
    "mean of some rows": lambda model, rows, labels: (
        ops.sum(errors(model, rows, labels) * ops.cast(labels > 0, "float32"))
        / ops.sum(ops.cast(labels > 0, "float32"))
    ),
}


class Regressor(OwnStep):
    """A regression with batch normalization and dropout, and a loss that is given."""

    def __init__(self, loss, draws=None):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)
        self.normalization, self.dropout = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
        self.tracker = keras.metrics.Mean("loss")
        self.steps = 0
        self.loss_of, self.draws = loss, draws

    def call(self, rows, training=False):
        return self.out(self.dropout(self.normalization(self.hidden(rows), training=training), training=training))

    @property
    def metrics(self):
        return [self.tracker]

    def step(self, data, update):
        rows, labels = data[:2]
        self.steps += 1
        if self.draws is not None:
            rows = rows + ops.convert_to_tensor(self.draws(ops.shape(rows)), "float32")
        value = update(lambda: self.loss_of(self, rows, labels), self.trainable_variables, self.optimizer)
        self.tracker.update_state(value)
        return {"loss": self.tracker.result()}


def compiled(loss, draws=None, optimizer=None, compiled_loss=None):
    keras.utils.set_random_seed(1)
    model = Regressor(loss, draws)
    model.compile(optimizer or keras.optimizers.SGD(0.1), compiled_loss)
    model(np.zeros((1, 6), "float32"))
    model.optimizer.build(model.trainable_variables)
    return model


def rehearsed(loss, rows=ROWS, allowed=False, **options):
    """Returns what was found, and the model."""
    model = compiled(loss, **options)
    averager = GradientAverager(LocalCommunicator(), lambda: 1.0)
    average_gradients(model, averager)
    RankLosses(model, averager)
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=rows).astype("float32"), None
    found = rehearse(model, averager, batch, allowed=allowed)
    averager.close()
    return found, model


@pytest.mark.parametrize("loss", MEANS)
def test_gradients_when_they_are_means_then_none_is_a_sum(loss, caplog):
    found, _ = rehearsed(MEANS[loss])
    assert not found.sums
    assert not caplog.records


@pytest.mark.parametrize("rows", [ROWS, 1])
@pytest.mark.parametrize("loss", SUMS)
def test_gradients_when_they_are_sums_then_all_are(loss, rows):
    found, model = rehearsed(SUMS[loss], rows)
    assert {name[1] for name in found.sums} == {id(variable) for variable in model.trainable_variables}
    names = gradient_names(model)
    assert GradientInfo.from_rows(found.to_rows(names), names) == found


@pytest.mark.parametrize("loss", OTHERS)
def test_gradients_when_they_are_neither_then_are_refused_unless_allowed(loss):
    with pytest.raises(UnsupportedError, match=r"train_step: expected .* Received: others, of .*allowBatchCoupledLoss"):
        rehearsed(OTHERS[loss])
    with pytest.warns(UserWarning, match="allowBatchCoupledLoss=True lets it be so"):
        found, model = rehearsed(OTHERS[loss], allowed=True)
    assert id(model.hidden.kernel) not in {name[1] for name in found.sums}


@pytest.mark.parametrize("kinds", ["mean", "sum"])
def test_gradients_when_draws_are_not_of_keras_then_are_told_by_their_length(kinds):
    draws = np.random.default_rng(3)
    found, _ = rehearsed(
        {**MEANS, **SUMS}[kinds], draws=lambda shape: draws.normal(size=[int(length) for length in shape])
    )
    assert bool(found.sums) == (kinds == "sum")


@pytest.mark.parametrize("compiled_loss", ["sum", "mean_with_sample_weight"])
def test_gradients_when_the_step_takes_the_compiled_loss_then_are_the_means_that_ranks_make_of_it(compiled_loss):
    def loss(model, rows, labels):
        weights = ops.cast(labels > 0, "float32") if compiled_loss != "sum" else None
        return model.compute_loss(rows, labels[:, None], model(rows, training=True), weights)

    found, _ = rehearsed(loss, compiled_loss=keras.losses.MeanSquaredError(reduction=compiled_loss))
    assert not found.sums


def test_gradients_when_a_scaled_loss_overflows_then_are_told_all_the_same():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**127)

    def loss(model, rows, labels):
        return model.optimizer.scale_loss(ops.sum(errors(model, rows, labels)))

    found, model = rehearsed(loss, optimizer=optimizer)
    assert found.sums
    assert float(ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 2.0**127


def test_model_when_its_step_was_rehearsed_then_is_as_before():
    found, model = rehearsed(SUMS["sum of noise"])
    drawn = np.random.random(), float(keras.random.uniform(()))
    fresh = compiled(SUMS["sum of noise"])
    assert found.sums
    assert all(np.array_equal(*pair) for pair in zip(read_variables(model), read_variables(fresh), strict=True))
    assert (model.steps, float(model.tracker.total.value)) == (0, 0.0)
    assert drawn == (np.random.random(), float(keras.random.uniform(())))


# Of a batch of three rows, and of its first two and its last: places that the batch names, its own, and both.
BATCH, OWN = [4, 4, 9], [1, 2, 1]
PLACES = {
    "of the batch": (BATCH, BATCH[:2], BATCH[2:], Places((BY_BATCH,))),
    "own": (OWN, OWN, OWN, Places((0,))),
    "own first": (OWN + BATCH, OWN + BATCH[:2], OWN + BATCH[2:], Places((0, BY_BATCH), 3)),
    "own last": (BATCH + OWN, BATCH[:2] + OWN, BATCH[2:] + OWN, Places((BY_BATCH, 0), 3)),
    "told apart": ([4, 9], [4], [4, 9], Places((0,))),
    "unknown": ([4, 4, 9, 1], [4], [9], None),
}


@pytest.mark.parametrize("case", PLACES)
def test_places_when_a_batch_and_its_parts_have_slices_then_tell_their_lookups(case):
    *indices, expected = PLACES[case]
    whole, *parts = [Notes([{(0, 1): (np.array(own), np.ones((len(own), 2)))}]) for own in indices]
    assert places_of(whole, parts, [2, 1]) == ({} if expected is None else {(0, 1): expected})
