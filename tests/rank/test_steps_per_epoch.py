"""Epochs of a given number of steps, in which passes over uneven ranks begin and end: against one process."""

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import (
    classifier_data,
    fit_one_process,
    global_batches,
    job_for,
    largest_difference,
    regression_model,
    split,
)
from tiers import in_tiers

from elephant.data.epoch_plan import EpochPlan, row_order
from elephant.rank.job import epoch_plan
from elephant.testing import fit_local

TOLERANCE = 1e-5


def batches_of(parts, batch_size, steps, order=None):
    """Returns the global batches of so many steps: pass after pass, whatever the epochs."""
    per_pass = max(-(-len(part["features"]) // batch_size) for part in parts)
    return list(global_batches(parts, batch_size, -(-steps // per_pass), order))[:steps]


def shuffled(epoch, rank, rows):
    return row_order(11, epoch, rank, rows, shuffle=True)


# A pass has five steps, or four: epochs of less than one, and of parts of three.
CASES = {"3 uneven": (3, (23, 8)), "7 one empty": (7, (19, 0, 11))}


@pytest.mark.parametrize("case", in_tiers(CASES, fast=["7 one empty"], slow="other sizes"))
def test_weights_and_history_when_epochs_have_so_many_steps_then_equal_one_process(rank_pool, case):
    steps, sizes = case
    columns = classifier_data(sum(sizes))
    columns["weight"] = np.random.default_rng(3).uniform(0, 2, sum(sizes)).astype("float32")
    parts = split(columns, sizes)
    model = regression_model(keras.optimizers.Adam(0.01), metrics=["mae"])
    # Rows that are held in memory are the same rows.
    options = {"cache": "memory", "steps_per_epoch": steps}
    job = job_for(model, epochs=4, batch_size=5, seed=11, weighted=True, **options)
    recordings = rank_pool.fit(job, parts)
    expected, history = fit_one_process(model, batches_of(parts, 5, 4 * steps, shuffled), epochs=4)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
    for epoch, logs in enumerate(recordings[0].epochs):
        for name, values in history.items():
            assert logs[name] == pytest.approx(values[epoch], abs=1e-5), (epoch, name)


def test_moving_statistics_when_a_rank_idles_in_mid_epoch_then_count_its_rows_alone(rank_pool):
    columns = classifier_data(24)
    columns["label"] = columns["features"].copy()
    parts = split(columns, (16, 8))
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.BatchNormalization(momentum=0.5)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    # Batches of 8: rank 1 idles in the second step of each pass, the middle one of three.
    job = job_for(model, epochs=1, batch_size=8, shuffle=False, label_array=True, steps_per_epoch=3)
    recordings = rank_pool.fit(job, parts)
    first, second = parts[0]["features"][:8].mean(axis=0), parts[0]["features"][8:].mean(axis=0)
    of_rank_0 = ((0.5 * first) * 0.5 + 0.5 * second) * 0.5 + 0.5 * first
    own = parts[1]["features"].mean(axis=0)
    of_rank_1 = 0.5 * own * 0.5 + 0.5 * own
    expected = of_rank_0 * 24 / 40 + of_rank_1 * 16 / 40
    np.testing.assert_allclose(recordings[0].variables[2], expected, atol=1e-6)


def test_weights_when_ranks_average_them_over_the_end_of_a_pass_then_idle_steps_change_nothing(rank_pool):
    sizes, batch_size, steps, epochs = (14, 5), 3, 7, 2
    columns = classifier_data(sum(sizes))
    parts = split(columns, sizes)
    model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9))
    job = job_for(model, epochs=epochs, batch_size=batch_size, shuffle=False, frequency=2, steps_per_epoch=steps)
    recordings = rank_pool.fit(job, parts)
    expected = local_steps(model, parts, batch_size, steps, epochs, every=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def local_steps(model, parts, batch_size, steps, epochs, every):
    """Returns the weights of ranks that train alone and average, by plain Keras: ranks without rows do nothing."""
    per_pass = max(-(-len(part["features"]) // batch_size) for part in parts)
    ranks = []
    for _ in parts:
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
        copy.compile_from_config(model.get_compile_config())
        ranks.append(copy)
    for epoch in range(epochs):
        rows = [0] * len(parts)
        for step in range(steps):
            place = (epoch * steps + step) % per_pass * batch_size
            for rank, part in enumerate(parts):
                x, y = (part[name][place : place + batch_size] for name in ("features", "label"))
                if len(x):
                    ranks[rank].train_on_batch(x, y)
                    rows[rank] += len(x)
            if (step + 1) % every == 0 or step + 1 == steps:
                weights = [np.array(rank.get_weights(), dtype=object) for rank in ranks]
                average = sum(count / sum(rows) * own for count, own in zip(rows, weights, strict=True))
                for rank in ranks:
                    rank.set_weights(list(average))
                rows = [0] * len(parts)
    return ranks[0].get_weights()


def test_worker_when_asynchronous_then_epochs_go_on_in_its_rows_and_count_them(rank_pool):
    columns = classifier_data(22)
    # Equal rows in any order: batches by content are compared by their sums.
    job = job_for(
        regression_model(keras.optimizers.SGD(0.05)),
        mode="asynchronous",
        epochs=3,
        batch_size=5,
        shuffle=False,
        steps_per_epoch=4,
    )
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        recording = fit.train(0)
        trained = fit.weights()
    expected, history = fit_one_process(job.model.build(), batches_of([columns], 5, 12), epochs=3)
    assert largest_difference(trained, expected) <= TOLERANCE
    # 22 rows in batches of 5: a pass is five steps, the last of 2 rows.
    assert [(part.epoch, part.rows, part.steps) for part in recording.parts] == [(0, 20, 4), (1, 17, 4), (2, 17, 4)]


def test_worker_when_interrupted_then_its_successor_goes_on_in_the_middle_of_a_pass(rank_pool):
    columns = classifier_data(22)
    job = job_for(
        regression_model(keras.optimizers.SGD(0.05)),
        mode="asynchronous",
        epochs=3,
        batch_size=5,
        shuffle=False,
        steps_per_epoch=4,
    )
    short = job_for(
        regression_model(keras.optimizers.SGD(0.05)),
        mode="asynchronous",
        epochs=2,
        batch_size=5,
        shuffle=False,
        steps_per_epoch=4,
    )
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        fit.train(0, job=short)
        recording = fit.train(0, attempt=1)
        trained = fit.weights()
    expected, _ = fit_one_process(job.model.build(), batches_of([columns], 5, 12), epochs=3)
    assert largest_difference(trained, expected) <= TOLERANCE
    assert [(part.epoch, part.rows) for part in recording.parts] == [(1, 0), (2, 17)]


def test_plan_when_an_epoch_spans_passes_then_shares_are_those_of_the_steps_in_the_pass():
    plan = EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2, steps_per_epoch=4)
    assert plan.pass_steps == 3 and plan.steps == 4
    rows = [[plan.rows_at(rank, plan.number(1, step)) for step in range(4)] for rank in range(2)]
    assert rows == [[2, 1, 2, 2], [0, 0, 2, 0]]
    assert plan.rows_between(0, 4, 8) == 7 and plan.rows_between(1, 4, 8) == 2
    assert plan.share_between(0, 4, 8) == pytest.approx(7 / 9)


def test_plan_when_made_of_the_options_of_a_fit_then_follows_them():
    job = job_for(regression_model("sgd"), batch_size=6, gpus_per_worker=2, steps_per_epoch=7, validation_fraction=0.25)
    plan = epoch_plan(job, [12, 8], [0, 0])
    assert (plan.training_rows, plan.validation_rows) == ((9, 6), (3, 2))
    assert (plan.batch_size, plan.steps, plan.pass_steps) == (3, 7, 3)
    marked = job_for(regression_model("sgd"), batch_size=3, indicated=True)
    plan = epoch_plan(marked, [12, 8], [5, 0])
    assert (plan.training_rows, plan.validation_rows, plan.steps) == ((7, 8), (5, 0), 3)


@pytest.fixture
def limits():
    """Limits of Keras on the driver, which ranks know from there alone."""
    if not hasattr(keras.config, "set_max_epochs"):
        pytest.skip("this Keras has no limits")
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(2)
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


def test_fit_when_keras_limits_epochs_and_steps_then_does_as_one_process(limits, warm_ranks):
    data, order = classifier_data(40), np.arange(40).reshape(2, 4, 5).transpose(1, 0, 2).ravel()
    model = regression_model(keras.optimizers.SGD(0.05))
    options = {"epochs": 5, "shuffle": False}
    with pytest.warns(UserWarning, match=r"limits the fit to 2 of 5 epochs"):
        history, trained = fit_local(model, data["features"], data["label"], batch_size=5, **options)
    expected = model.fit(data["features"][order], data["label"][order], batch_size=10, verbose=0, **options)
    assert len(expected.history["loss"]) == 2
    np.testing.assert_allclose(history["loss"], expected.history["loss"], rtol=1e-5)
    assert largest_difference(trained.get_weights(), model.get_weights()) <= TOLERANCE


def test_plan_when_steps_are_limited_then_epochs_and_validations_have_no_more(limits):
    job = job_for(regression_model("sgd"), batch_size=2, validation_fraction=0.5)
    plan = epoch_plan(job, [20, 4], [0, 0])
    assert plan.pass_steps == 5 and plan.steps == 2
    assert [plan.validation_steps(rank) for rank in range(2)] == [2, 1]
    assert [plan.rows_at(0, plan.number(1, step)) for step in range(2)] == [2, 2]
