"""Scaling of the learning rate, and its warm-up, against plain Keras and against arithmetic."""

import keras
import numpy as np
import pytest
from keras_reference import (
    classifier_data,
    fit_one_process,
    global_batches,
    job_for,
    largest_difference,
    regression_model,
    split,
    two_groups,
)

from elephant.data.schema import RowSpec, TensorSpec
from elephant.errors import ConfigurationError
from elephant.rank.job import prepared_model
from elephant.training.warmup import LearningRateWarmup

SIX = RowSpec(0, (TensorSpec((6,), "float32"),))


class Rates(keras.callbacks.Callback):
    """Notes the learning rate of every step."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def rates_of(warmup, epochs, steps=4, **options):
    model = regression_model(keras.optimizers.SGD(0.8))
    noted, columns = Rates(), classifier_data(8 * steps)
    callbacks = [warmup, noted, *options.pop("callbacks", [])]
    model.fit(
        columns["features"], columns["label"], batch_size=8, epochs=epochs, callbacks=callbacks, verbose=0, **options
    )
    return noted.rates, float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def rate_of(**options):
    job = job_for(regression_model(keras.optimizers.SGD(0.02)), **options)
    model = prepared_model(job, SIX, num_ranks=4)
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def test_rate_when_the_fit_gives_one_then_replaces_the_model_s():
    assert rate_of() == pytest.approx(0.02)
    assert rate_of(learning_rate=0.5) == pytest.approx(0.5)


def test_rate_when_scaled_then_gpus_of_one_worker_count_as_one():
    assert rate_of(scale_learning_rate=True) == pytest.approx(0.08)
    assert rate_of(scale_learning_rate=True, learning_rate=0.5, gpus_per_worker=2) == pytest.approx(1.0)


def test_rates_when_each_group_of_variables_has_its_own_then_all_are_scaled_and_warmed_up():
    job = job_for(regression_model(two_groups()), scale_learning_rate=True)
    model = prepared_model(job, SIX, num_ranks=4)

    def rates():
        return {type(one).__name__: float(one.learning_rate.numpy()) for one in model.optimizer.optimizers}

    assert rates() == pytest.approx({"Adam": 0.04, "SGD": 0.2})
    noted, columns = [], classifier_data(16)
    note = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: noted.append(rates()))
    callbacks = [LearningRateWarmup(1, initial=0.5), note]
    model.fit(columns["features"], columns["label"], batch_size=8, callbacks=callbacks, verbose=0)
    assert noted[0] == pytest.approx({"Adam": 0.02, "SGD": 0.1})
    assert noted[1] == pytest.approx({"Adam": 0.03, "SGD": 0.15})
    assert rates() == pytest.approx({"Adam": 0.04, "SGD": 0.2})


def test_rate_when_warmed_up_then_grows_in_a_straight_line_and_stays():
    rates, final = rates_of(LearningRateWarmup(2, initial=0.25), epochs=3)
    line = [0.8 * (0.25 + 0.75 * step / 8) for step in range(8)]
    np.testing.assert_allclose(rates, [*line, *[0.8] * 4], rtol=1e-6)
    assert final == pytest.approx(0.8)


def test_rate_when_there_is_one_rank_then_warm_up_changes_nothing():
    rates, _ = rates_of(LearningRateWarmup(2), epochs=2)
    np.testing.assert_allclose(rates, [0.8] * 8)


def test_rate_when_another_callback_lowers_it_after_the_warm_up_then_stays_low():
    class Halve(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.optimizer.learning_rate = 0.4

    rates, _ = rates_of(LearningRateWarmup(1, initial=0.5), epochs=2, callbacks=[Halve()])
    np.testing.assert_allclose(rates[4:], [0.4] * 4, rtol=1e-6)


def test_ranks_when_they_warm_up_then_start_from_the_rate_before_scaling(rank_pool):
    parts = split(classifier_data(40), (20, 20))
    model = regression_model(keras.optimizers.SGD(0.02))
    job = job_for(
        model, epochs=2, batch_size=5, shuffle=False, scale_learning_rate=True, callbacks=[LearningRateWarmup(1)]
    )
    recordings = rank_pool.fit(job, parts)
    reference = regression_model(keras.optimizers.SGD(0.04))
    rates = [0.04 * (0.5 + 0.5 * step / 4) for step in range(4)] + [0.04] * 4
    for batch, rate in zip(global_batches(parts, 5, 2), rates, strict=True):
        reference.optimizer.learning_rate = rate
        reference.train_on_batch(batch["features"], batch["label"])
    expected = reference.get_weights()
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5


@pytest.mark.slow("workers of several GPUs; the arithmetic of test_ranks_when_they_warm_up")
def test_ranks_of_one_worker_when_they_warm_up_then_count_as_one(rank_pool):
    parts = split(classifier_data(40), (20, 20))
    model = regression_model(keras.optimizers.SGD(0.04))
    options = {"epochs": 2, "batch_size": 10, "shuffle": False, "gpus_per_worker": 2, "scale_learning_rate": True}
    recordings = rank_pool.fit(job_for(model, callbacks=[LearningRateWarmup(1)], **options), parts)
    alone = regression_model(keras.optimizers.SGD(0.04))
    expected, _ = fit_one_process(alone, list(global_batches(parts, 5, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5


@pytest.mark.parametrize(
    ("options", "text"), [({"epochs": 0}, "epochs"), ({"initial": 0.0}, "initial"), ({"initial": 2}, "initial")]
)
def test_warm_up_when_a_value_is_out_of_range_then_raises(options, text):
    with pytest.raises(ConfigurationError, match=f"{text}: expected"):
        LearningRateWarmup(**options)


def test_warm_up_when_the_rate_follows_a_schedule_then_raises():
    model = regression_model(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)))
    columns = classifier_data(8)
    with pytest.raises(ConfigurationError, match="expected an optimizer with a constant learning rate"):
        model.fit(columns["features"], columns["label"], callbacks=[LearningRateWarmup(1)], verbose=0)
