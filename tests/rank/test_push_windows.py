"""Windows of steps: workers driven one after the other, against a simulation that trains with plain Keras."""

import dataclasses

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import classifier_data, job_for, largest_difference, split
from tiers import in_tiers

from elephant.config import AsynchronousOptions, ConfigurationError, FitConfig
from elephant.errors import UnsupportedError
from elephant.rank.asynchronous.worker_fit import check_model

SIZES, BATCH, EPOCHS = (14, 9), 2, 2


def model_for(momentum=0.0):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((6,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05, momentum=momentum, nesterov=momentum > 0), "mse")
    return model


def flat(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()]).astype(np.float64)


def give(model, values):
    shapes = [weight.shape for weight in model.get_weights()]
    bounds = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    parts = [values[a:b].reshape(shape) for a, b, shape in zip(bounds[:-1], bounds[1:], shapes, strict=True)]
    model.set_weights([part.astype("float32") for part in parts])


class Simulation:
    """The servers' weights, and one worker after the other: Keras' train_on_batch, and the papers' formulas."""

    def __init__(self, algorithm, every, momentum):
        self.algorithm, self.every, self.momentum = algorithm, every, momentum
        self.center = flat(model_for())

    def train(self, columns):
        """Trains one worker from the center on, alone, so that nothing it pushes is stale."""
        model = model_for(self.momentum)
        rows = len(columns["features"])
        starts = list(range(0, rows, BATCH))
        give(model, self.center)
        for _epoch in range(EPOCHS):
            if self.algorithm not in ("aeasgd", "eamsgd"):
                give(model, self.center)
            began, steps = flat(model), 0
            for index, start in enumerate(starts):
                batch = slice(start, min(start + BATCH, rows))
                model.train_on_batch(columns["features"][batch], columns["label"][batch])
                steps += 1
                if (index + 1) % (self.every or len(starts)) == 0 or index + 1 == len(starts):
                    self.exchange(model, began, steps)
                    began, steps = flat(model), 0

    def exchange(self, model, began, steps):
        local = flat(model)
        if self.algorithm in ("aeasgd", "eamsgd"):
            elastic = 0.45 * (local - self.center)
            self.center = self.center + elastic
            give(model, local - elastic)
            return
        scale = {"downpour": 1 / len(SIZES), "dynsgd": 1.0, "adag": 1 / steps, "sum": 1.0}[self.algorithm]
        self.center = self.center + scale * (local - began)
        give(model, self.center)


# Each algorithm, and each kind of window with some of them.
WINDOWS = [("downpour", 3), ("dynsgd", 1), ("adag", "epoch"), ("aeasgd", 1), ("eamsgd", 3), ("sum", "epoch")]


@pytest.mark.parametrize(
    "case",
    in_tiers(
        {f"{algorithm}-{frequency}": (algorithm, frequency) for algorithm, frequency in WINDOWS},
        fast=["downpour-3", "aeasgd-1", "sum-epoch"],
        slow="another factor, which the test of all algorithms below has",
    ),
)
def test_weights_when_two_workers_take_turns_then_equal_the_simulation(rank_pool, case):
    algorithm, frequency = case
    momentum = 0.9 if algorithm == "eamsgd" else 0.0
    parts = split(classifier_data(sum(SIZES)), SIZES)
    options = AsynchronousOptions(algorithm=algorithm)
    job = job_for(
        model_for(momentum),
        mode="asynchronous",
        num_workers=2,
        epochs=EPOCHS,
        batch_size=BATCH,
        shuffle=False,
        frequency=frequency,
        asynchronous=options,
    )
    simulation = Simulation(algorithm, None if frequency == "epoch" else frequency, momentum)
    with AsynchronousFit(rank_pool, job, parts) as fit:
        for partition, columns in enumerate(parts):
            fit.train(partition, index=0)
            simulation.train(columns)
        trained = np.concatenate([weight.ravel() for weight in fit.weights()])
    np.testing.assert_allclose(trained, simulation.center, atol=2e-6)
    assert np.abs(trained - flat(model_for())).max() > 1e-2


def test_pushes_when_another_worker_was_faster_then_dynsgd_divides_them():
    # What the division itself does is tested with the server; here: that the fit asks for it.
    assert (
        FitConfig(mode="asynchronous", asynchronous=AsynchronousOptions(algorithm="dynsgd"))
        .new_algorithm()
        .divides_by_staleness
    )
    assert not FitConfig(mode="asynchronous").new_algorithm().divides_by_staleness


def test_validation_when_averaging_is_elastic_then_is_of_the_center_and_training_goes_on_from_the_own(rank_pool):
    columns = classifier_data(15)
    columns["validation"] = np.arange(15) % 5 == 0
    options = AsynchronousOptions(algorithm="aeasgd:0.25")
    job = job_for(
        model_for(),
        mode="asynchronous",
        epochs=2,
        batch_size=4,
        shuffle=False,
        frequency=2,
        indicated=True,
        asynchronous=options,
    )
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        recording = fit.train(0)
        trained = fit.weights()
    marked = columns["validation"]
    center = model_for()
    center.set_weights(trained)
    expected = center.evaluate(columns["features"][marked], columns["label"][marked], verbose=0)
    sums = recording.parts[-1].arrays[1]
    assert sums[0] / sums[1] == pytest.approx(expected, rel=1e-5)
    local, middle = model_for(), flat(model_for())
    kept = {name: values[~marked] for name, values in columns.items()}
    for _epoch in range(2):
        for index, start in enumerate(range(0, 12, 4)):
            local.train_on_batch(kept["features"][start : start + 4], kept["label"][start : start + 4])
            if index in (1, 2):
                elastic = 0.25 * (flat(local) - middle)
                middle = middle + elastic
                give(local, flat(local) - elastic)
    give(center, middle)
    assert largest_difference(trained, center.get_weights()) <= 2e-6


def test_learning_rate_when_the_driver_sets_it_then_reaches_the_workers_own_optimizer(rank_pool):
    columns = classifier_data(12)
    job = job_for(
        model_for(), mode="asynchronous", epochs=1, batch_size=4, shuffle=False, frequency=1,
        asynchronous=AsynchronousOptions(algorithm="sum"),
    )  # fmt: skip
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        fit.control.set_rate(0.0)
        fit.train(0)
        trained = fit.weights()
    # A rate of zero, from the first pull on: nothing moves.
    assert largest_difference(trained, model_for().get_weights()) == 0


def test_deltas_when_not_finite_then_are_refused_and_the_worker_goes_on_from_the_servers_weights(rank_pool):
    columns = classifier_data(12)
    columns["label"][5] = np.inf
    job = job_for(model_for(), mode="asynchronous", epochs=1, batch_size=4, shuffle=False, frequency=1)
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        fit.train(0)
        trained, counted = fit.weights(), fit.control.statistics()
    assert counted["refused"] == 1
    assert counted["updates"] == 2
    reference = model_for()
    for start in (0, 8):
        reference.train_on_batch(columns["features"][start : start + 4], columns["label"][start : start + 4])
    assert largest_difference(trained, reference.get_weights()) <= 2e-6


def test_schedule_when_a_worker_is_run_again_then_goes_on_where_it_was(rank_pool):
    columns = classifier_data(16)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.05, 0.0])), "mse")
    job = job_for(model, mode="asynchronous", epochs=1, batch_size=4, shuffle=False, frequency=2)
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        fit.train(0)
        trained = fit.weights()
        longer = dataclasses.replace(job, config=dataclasses.replace(job.config, epochs=2))
        fit.train(0, attempt=1, job=longer)
        again, counted = fit.weights(), fit.control.statistics()
    assert counted["positions"] in ({"0": 8}, {0: 8})
    # The schedule has come to a rate of zero in the first attempt, and is still there in the second.
    assert largest_difference(again, trained) == 0


@pytest.mark.parametrize("optimizer", ["adam", keras.optimizers.SGD(0.1)], ids=["adam", "sgd without momentum"])
def test_eamsgd_when_the_optimizer_has_no_momentum_then_says_what_to_use(rank_pool, optimizer):
    model = model_for()
    model.compile(optimizer, "mse")
    job = job_for(model, mode="asynchronous", asynchronous=AsynchronousOptions(algorithm="eamsgd"))
    with pytest.raises(UnsupportedError, match="keras.optimizers.SGD with momentum.*Received: (Adam|SGD without)"):
        AsynchronousFit(rank_pool, job, [classifier_data(4)])


def test_algorithms_when_asked_then_scale_moves_as_their_papers_say():
    local, center = np.array([3.0, 5.0], np.float32), np.array([1.0, 1.0], np.float32)
    expected = {"downpour": 0.25, "dynsgd": 1.0, "adag": 1 / 8, "sum": 1.0, "aeasgd": 0.225, "eamsgd": 0.225}
    for name, scale in expected.items():
        config = FitConfig(
            mode="asynchronous", num_workers=4, frequency=8, asynchronous=AsynchronousOptions(algorithm=name)
        )
        update = config.new_algorithm().update(local.copy(), center, 8)
        np.testing.assert_allclose(update, scale * (local - center), rtol=1e-6)
        assert update.dtype == np.float32


def test_background_exchange_when_weights_travel_then_is_refused_by_name():
    for options in ({"frequency": 4}, {"algorithm": "aeasgd"}):
        frequency = options.pop("frequency", "batch")
        asynchronous = AsynchronousOptions(background_exchange=True, **options)
        config = FitConfig(mode="asynchronous", frequency=frequency, asynchronous=asynchronous)
        with pytest.raises((UnsupportedError, ConfigurationError), match="background_exchange"):
            config.check_background_exchange()
    options = AsynchronousOptions(background_exchange=True)
    FitConfig(mode="asynchronous", asynchronous=options).check_background_exchange()


def test_compression_when_it_needs_all_ranks_in_step_then_is_refused_before_anything_starts():
    with pytest.raises(UnsupportedError, match="topk"):
        check_model(None, FitConfig(mode="asynchronous", compression="topk"))


def test_sum_when_several_workers_take_several_steps_then_the_user_is_advised():
    options = AsynchronousOptions(algorithm="sum")
    config = FitConfig(mode="asynchronous", num_workers=4, frequency=8, asynchronous=options)
    assert "0.77 to 0.86" in str(config.new_algorithm().advice(8))
    assert config.new_algorithm().advice("batch") is None
    assert FitConfig(mode="asynchronous", num_workers=4).new_algorithm().advice(8) is None
    assert FitConfig(mode="asynchronous", asynchronous=options).new_algorithm().advice(8) is None
