"""Losses that are no mean over the rows of a batch are told from those that are, before any step."""

import keras
import numpy as np
import pytest
from keras import ops
from keras_reference import classifier_data, job_for, split
from rank_pool import RankError

from elephant.errors import UnsupportedError
from elephant.training.coupling import check_rows_count_alone, may_couple_rows

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


class Random(keras.layers.Layer):
    """Draws at every call, and adds a loss."""

    def call(self, inputs):
        self.add_loss(ops.mean(keras.random.normal(ops.shape(inputs)) ** 2))
        return inputs


COUPLED = {
    "sum": (total, "values"),
    "mean over a mask": (masked_mean, "values"),
    "pairs": (over_pairs, "values"),
    "dice": (losses.Dice(), "several"),
    "tversky": (losses.Tversky(), "several"),
    "ignored class": (losses.SparseCategoricalCrossentropy(ignore_class=1), "classes"),
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


@pytest.mark.parametrize("name", COUPLED)
def test_loss_when_it_couples_rows_then_is_refused_with_the_difference_or_warned_of(name):
    loss, labels = COUPLED[name]
    model = model_of(loss)
    assert may_couple_rows(model)
    with pytest.raises(UnsupportedError, match=r"loss: expected the mean over the rows.*allowBatchCoupledLoss=True"):
        check_rows_count_alone(model, rows_of(labels))
    with pytest.warns(UserWarning, match="loss: expected the mean over the rows"):
        check_rows_count_alone(model, rows_of(labels), allowed=True)


def test_loss_when_it_is_a_sum_then_the_error_says_so():
    with pytest.raises(UnsupportedError, match="It is their sum: divide it"):
        check_rows_count_alone(model_of(total), rows_of("values"))


@pytest.mark.parametrize("name", APART)
def test_loss_when_rows_count_alone_then_is_taken(name):
    loss, labels = APART[name]
    check_rows_count_alone(model_of(loss), rows_of(labels))


def test_keras_losses_of_single_rows_when_compiled_then_need_no_try():
    names = [*(name for name in APART if name.startswith("keras")), "huber", "focal", "cosine", "kl"]
    assert not any(may_couple_rows(model_of(APART[name][0])) for name in names)


def test_loss_when_it_cannot_be_tried_out_then_is_left_to_the_fit():
    random = keras.Sequential([keras.layers.Input((6,)), Random(), keras.layers.Dense(3)])
    random.compile("sgd", "mse")
    check_rows_count_alone(random, rows_of("values"))
    check_rows_count_alone(model_of(total), rows_of("values", rows=1))
    check_rows_count_alone(model_of(total), (np.zeros((4, 6)), np.zeros((4, 2)), None))
    x, y, _ = rows_of("values")
    check_rows_count_alone(model_of(total), (x * np.nan, y, None))


def test_loss_when_an_output_carries_a_mask_then_is_not_compared():
    tokens = keras.Input((5,), dtype="int32")
    embedded = keras.layers.Embedding(9, 3, mask_zero=True)(tokens)
    model = keras.Model(tokens, keras.layers.LSTM(2, return_sequences=True)(embedded))
    model.compile("sgd", by_row)
    rng = np.random.default_rng(0)
    check_rows_count_alone(model, (rng.integers(0, 3, (9, 5)), rng.normal(size=(9, 5, 2)).astype("float32"), None))


def test_fit_when_the_loss_couples_rows_then_fails_before_a_step_unless_allowed(rank_pool):
    def summed(y_true, y_pred):
        return keras.ops.sum(keras.ops.square(y_true - y_pred))

    def build():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), summed)
        return model

    parts = split(classifier_data(16), (9, 7))
    with pytest.raises(RankError, match="It is their sum"):
        rank_pool.fit(job_for(build, batch_size=4), parts)
    recordings = rank_pool.fit(job_for(build, batch_size=4, allow_batch_coupled_loss=True), parts)
    assert recordings[0].epochs
