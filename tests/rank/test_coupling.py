"""Losses that are no mean over the rows of a batch are exact over the ranks, or found out before any step."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_reference import classifier_data, global_batches, job_for, largest_difference, split
from rank_pool import RankError
from tables import every_case
from tiers import in_tiers

from elephant.backends.gradient_averager import GradientAverager
from elephant.collective.communicator import LocalCommunicator
from elephant.errors import UnsupportedError
from elephant.rank.trials.coupling import ELEMENTS, ROWS, SUM, RankLosses
from elephant.rank.trials.loss_trial import may_couple_rows, try_out

losses = keras.losses


def model_of(loss, activation="sigmoid"):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, activation)])
    model.compile("sgd", loss)
    return model


def rows_of(labels, rows=20):
    rng = np.random.default_rng(2)
    given = {
        "classes": rng.integers(0, 3, rows),
        "one hot": np.eye(3, dtype="float32")[rng.integers(0, 3, rows)],
        "values": rng.normal(size=(rows, 3)).astype("float32"),
        "several": rng.integers(0, 2, (rows, 3)).astype("float32"),
        "signs": np.sign(rng.normal(size=(rows, 3))).astype("float32"),
    }
    return rng.normal(size=(rows, 6)).astype("float32"), given[labels], None


def total(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


def masked_mean(y_true, y_pred):
    counts = ops.cast(y_true > 0, "float32")
    return ops.sum(counts * ops.square(y_true - y_pred)) / ops.sum(counts)


def over_pairs(y_true, y_pred):
    return ops.mean(ops.square(y_pred[:, None] - y_pred[None]) * ops.sum(ops.abs(y_true[:, None] - y_true[None])))


def by_row(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred) ** 3, axis=-1)


def mean_of_all(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred) ** 3)


def tried(model, rows, **options):
    """Returns the kinds of a model's losses, as found on some rows."""
    known = RankLosses(model, GradientAverager(LocalCommunicator(), lambda: 1.0))
    try_out(known, model, rows, **options)
    return [loss.kind for loss in known.losses]


class Random(keras.layers.Layer):
    """Draws at every call, counts the calls, and adds a loss."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = self.add_weight(shape=(), trainable=False, initializer="zeros")
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        self.add_loss(ops.mean(keras.random.normal(ops.shape(inputs), seed=self.seed_generator) ** 2))
        return inputs


COUPLED = {
    "mean over a mask": (masked_mean, "values"),
    "pairs": (over_pairs, "values"),
    "dice": (losses.Dice(), "several"),
    "tversky": (losses.Tversky(), "several"),
    "along the rows": (losses.CosineSimilarity(axis=0), "values"),
}
APART = {
    "own values by row": (by_row, "values"),
    "own mean": (mean_of_all, "values"),
    "dice by row": (losses.Dice(axis=(1,)), "one hot"),
    "keras function": (losses.mean_squared_error, "values"),
    "keras name": ("squared_hinge", "signs"),
    "keras object": (losses.CategoricalCrossentropy(label_smoothing=0.1), "one hot"),
    "huber": (losses.Huber(delta=0.3), "values"),
    "focal": (losses.CategoricalFocalCrossentropy(), "one hot"),
    "cosine": (losses.CosineSimilarity(), "values"),
    "kl": (losses.KLDivergence(), "one hot"),
}


@every_case("name", COUPLED)
def test_loss_when_it_couples_rows_then_is_refused_with_the_difference_or_warned_of(name):
    loss, labels = COUPLED[name]
    model = model_of(loss)
    assert may_couple_rows(model)
    with pytest.raises(UnsupportedError, match=r"loss: expected the mean over the rows.*allowBatchCoupledLoss=True"):
        tried(model, rows_of(labels))
    with pytest.warns(UserWarning, match="loss: expected the mean over the rows"):
        tried(model, rows_of(labels), allowed=True)


class Meeting(layers.Layer):
    """Makes each row of all rows, or adds a loss of each row, which Keras adds up."""

    def __init__(self, adds=False, **options):
        super().__init__(**options)
        self.adds = adds

    def call(self, inputs):
        if self.adds:
            self.add_loss(ops.sum(inputs**2, axis=-1))
        return inputs if self.adds else inputs - ops.mean(inputs, axis=0)


@every_case("adds", [True, False])
def test_loss_when_rows_meet_in_a_layer_then_the_error_says_where_and_not_to_change_a_loss_of_keras(adds):
    model = keras.Sequential([layers.Input((6,)), Meeting(adds), layers.Dense(3)])
    model.compile("sgd", "mse")
    said = r"add_loss\(keras.ops.mean\(loss\)\)" if adds else "rows meet in the model's call or in a layer"
    with pytest.raises(UnsupportedError, match=said):
        tried(model, rows_of("values"))


@every_case("name", APART)
def test_loss_when_rows_count_alone_then_is_taken(name):
    loss, labels = APART[name]
    tried(model_of(loss), rows_of(labels))


def test_loss_when_it_is_a_sum_beside_a_regularizer_and_others_then_is_told_from_them():
    inputs = layers.Input((6,))
    outputs = [layers.Dense(3, kernel_regularizer="l2")(inputs) for _ in range(3)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", [total, by_row, "mse"], loss_weights=[0.5, 2.0, 1.0])
    x, y, _ = rows_of("values")
    assert tried(model, (x, [y, y, y], None)) == [SUM, ELEMENTS, ELEMENTS]


def test_keras_losses_of_single_rows_when_compiled_then_need_no_try():
    names = [*(name for name in APART if name.startswith("keras")), "huber", "focal", "cosine", "kl"]
    assert not any(may_couple_rows(model_of(APART[name][0])) for name in names)
    assert not may_couple_rows(model_of(losses.SparseCategoricalCrossentropy(ignore_class=1)))


def test_model_when_tried_out_then_has_the_state_it_had():
    model = keras.Sequential([layers.Input((6,)), Random(), layers.Dense(3)])
    model.compile("sgd", total, metrics=["mae"])
    before = [ops.convert_to_numpy(variable) for variable in model.variables]
    tried(model, rows_of("values"))
    assert largest_difference([ops.convert_to_numpy(variable) for variable in model.variables], before) == 0


def test_loss_when_it_cannot_be_tried_out_then_is_left_to_the_fit():
    random = keras.Sequential([keras.layers.Input((6,)), Random(), keras.layers.Dense(3)])
    random.compile("sgd", "mse")
    tried(random, rows_of("values"))
    assert tried(model_of(total), rows_of("values", rows=1)) == []
    tried(model_of(total), (np.zeros((4, 6)), np.zeros((4, 2)), None))
    x, y, _ = rows_of("values")
    tried(model_of(total), (x * np.nan, y, None))


def test_loss_of_an_own_mean_when_its_output_carries_a_mask_then_counts_as_keras_has_it():
    tokens = keras.Input((5,), dtype="int32")
    model = keras.Model(tokens, layers.LSTM(2, return_sequences=True)(layers.Embedding(9, 3, mask_zero=True)(tokens)))
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3, (9, 5)), rng.normal(size=(9, 5, 2)).astype("float32"), None
    for loss, kind in ((by_row, ELEMENTS), (mean_of_all, ROWS)):
        model.compile("sgd", loss)
        assert tried(model, rows) == [kind]


def test_metrics_when_they_do_not_add_up_then_are_warned_of_by_name():
    def largest(y_true, y_pred):
        return ops.max(y_pred)

    def error(y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred))

    model = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[largest, error, keras.metrics.PearsonCorrelation(axis=0), "cosine_similarity"])
    assert may_couple_rows(model)
    x, y, _ = rows_of("values")
    with pytest.warns(UserWarning, match="Received: largest, pearson_correlation. Of several workers"):
        tried(model, (x, y[:, :1], None))


def test_fit_when_the_loss_couples_rows_then_fails_before_a_step_unless_allowed(rank_pool):
    def spread(y_true, y_pred):
        return keras.ops.var(y_true - y_pred)

    def build():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), spread)
        return model

    parts = split(classifier_data(16), (9, 7))
    with pytest.raises(RankError, match="expected the mean over the rows"):
        rank_pool.fit(job_for(build, batch_size=4), parts)
    recordings = rank_pool.fit(job_for(build, batch_size=4, allow_batch_coupled_loss=True), parts)
    assert recordings[0].epochs


class AddsInTraining(layers.Layer):
    def call(self, inputs, training=False):
        if training:
            self.add_loss(0.1 * keras.ops.sum(inputs))
        return inputs


def meeting(between):
    """Returns what builds a model with a layer or a function in it."""

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        model = keras.Model(inputs, keras.layers.Dense(1)(between(keras.layers.Dense(4, "tanh")(inputs))))
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    return build


class Summing(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum(ops.square(y - y_pred))


def test_loss_when_compute_loss_returns_a_sum_then_the_error_says_to_return_a_mean():
    inputs = layers.Input((6,))
    model = Summing(inputs, layers.Dense(3)(inputs))
    model.compile("sgd", "mse")
    said = r"or a compiled loss that is their sum, .* Return a mean from compute_loss: keras.ops.mean\(loss\)"
    with pytest.raises(UnsupportedError, match=said):
        tried(model, rows_of("values"))


def with_loss(loss):
    """Returns what builds a model of one layer with a loss."""

    def build():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3), loss)
        return model

    return build


def root_mean_square(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def mean_of_kept(y_true, y_pred):
    kept = keras.ops.cast(y_true > -50, "float32")
    return keras.ops.sum(kept * keras.ops.square(y_true - y_pred)) / (keras.ops.sum(kept) + 1e-6)


def data_with_masks_late(rows):
    columns = classifier_data(rows)
    columns["label"][40::3] = -99
    return columns


FOUND = {
    "operation": (meeting(lambda h: h - keras.ops.mean(h, axis=0)), classifier_data, 4),
    "training alone": (meeting(lambda h: AddsInTraining()(h)), classifier_data, 4),
    "one row a rank": (with_loss(root_mean_square), classifier_data, 1),
    "masks late": (with_loss(mean_of_kept), data_with_masks_late, 8),
}


@every_case("name", FOUND)
def test_fit_when_rows_meet_where_first_rows_and_inference_do_not_tell_then_fails_before_a_step(rank_pool, name):
    build, data, batch_size = FOUND[name]
    with pytest.raises(RankError, match=r"allowBatchCoupledLoss=True"):
        rank_pool.fit(job_for(build, batch_size=batch_size), split(data(120), (70, 50)))


def test_fit_when_rows_that_a_loss_counts_otherwise_are_rare_then_fails_when_it_meets_them(rank_pool):
    columns = classifier_data(2000)
    columns["label"][1321] = -99
    job = job_for(with_loss(mean_of_kept), batch_size=4, epochs=20, shuffle=False)
    with pytest.raises(RankError, match="loss: expected the mean over the rows"):
        rank_pool.fit(job, split(columns, (1000, 1000)))


def test_fit_without_a_compiled_loss_when_layers_have_regularizers_then_equals_one_process(rank_pool):
    def build():
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(4, "tanh", activity_regularizer="l2", kernel_regularizer="l2")
        model = keras.Sequential([keras.layers.Input((6,)), dense, keras.layers.ActivityRegularization(l1=0.1)])
        model.compile(keras.optimizers.Adam(0.01))
        return model

    parts = split(classifier_data(22), (11, 3, 8))
    recordings = rank_pool.fit(job_for(build, epochs=2, batch_size=4, shuffle=False), parts)
    reference, batches = build(), list(global_batches(parts, 4, 2))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    history = reference.fit(tuples, epochs=2, steps_per_epoch=3, shuffle=False, verbose=0).history
    expected = reference.get_weights()
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5
    assert np.allclose([epoch["loss"] for epoch in recordings[0].epochs], history["loss"], rtol=1e-5)


def summed():
    """Returns a model with a loss of its own that is a sum, and a regularizer, which is to count once."""

    def squares(y_true, y_pred):
        return keras.ops.sum(keras.ops.square(y_pred - y_true))

    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
    model = keras.Sequential([keras.layers.Input((6,)), dense])
    model.compile(keras.optimizers.SGD(1e-3), squares)
    return model


def summed_by_keras():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, kernel_regularizer="l2")])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(reduction="sum"))
    return model


def tagger(loss, mask=True):
    """Returns what builds a model that has classes of six tokens, of which zero is a padding."""

    def build():
        keras.utils.set_random_seed(0)
        tokens = keras.Input((6,), dtype="int32")
        embedded = keras.layers.Embedding(5, 4, mask_zero=mask)(tokens)
        model = keras.Model(tokens, keras.layers.Dense(3, "softmax")(embedded))
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        return model

    return build


def tokens_of(rows):
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 7, rows)
    tokens = rng.integers(1, 5, (rows, 6)) * (np.arange(6) < lengths[:, None])
    labels = rng.integers(0, 3, (rows, 6))
    # The first batch of the first rank has nothing that counts.
    tokens[:4], labels[:4] = 0, 1
    return {"features": tokens.astype("int32"), "label": labels}


def weighted_rows(rows):
    weights = np.random.default_rng(4).uniform(0, 3, rows).astype("float32")
    return classifier_data(rows) | {"weight": weights}


OF_TOKENS = {"dtype": "int32", "label_dtype": "int64", "label_array": True}
# The mean over weights: tests/rank/test_weights.py.
EXACT = {
    "own sum": (summed, classifier_data, {}),
    "weighted sum": (summed_by_keras, weighted_rows, {"weighted": True}),
    "mask": (tagger("sparse_categorical_crossentropy"), tokens_of, OF_TOKENS),
    "ignored class": (tagger(losses.SparseCategoricalCrossentropy(ignore_class=1), mask=False), tokens_of, OF_TOKENS),
}


@pytest.mark.parametrize(
    "name", in_tiers({name: name for name in EXACT}, fast=["own sum", "mask"], slow="counts rows as one of these")
)
def test_weights_and_loss_when_ranks_count_different_elements_then_equal_one_process(rank_pool, name):
    build, data, options = EXACT[name]
    # The second rank has no rows in two of three steps.
    parts = split(data(22), (11, 3, 8))
    recordings = rank_pool.fit(job_for(build, epochs=2, batch_size=4, shuffle=False, **options), parts)
    reference, batches = build(), list(global_batches(parts, 4, 2))
    kept = [role for role in ("features", "label", "weight") if role in batches[0]]
    tuples = (tuple(batch[role] for role in kept) for batch in batches)
    history = reference.fit(tuples, epochs=2, steps_per_epoch=3, shuffle=False, verbose=0).history
    expected = reference.get_weights()
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5
    assert np.allclose([epoch["loss"] for epoch in recordings[0].epochs], history["loss"], rtol=1e-5)
