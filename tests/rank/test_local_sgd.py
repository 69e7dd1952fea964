"""Local SGD: ranks train alone and average their weights, against one process that plays all ranks in turn."""

import keras
import numpy as np
import pytest
from keras_reference import (
    StopOnOneRank,
    classifier_data,
    fit_one_process,
    global_batches,
    job_for,
    largest_difference,
    split,
)
from tables import every_case
from tiers import in_tiers

from elephant.errors import ConfigurationError

TOLERANCE = 1e-5
BATCH = 4


def small_model(optimizer, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


def play_local_sgd(build, parts, every, epochs):
    """Returns the weights after every rank has trained alone for ``every`` steps between weighted averages."""
    models = [build() for _ in parts]
    steps = max(-(-len(part["features"]) // BATCH) for part in parts)
    for _ in range(epochs):
        rows = np.zeros(len(parts))
        for step in range(steps):
            for rank, (model, part) in enumerate(zip(models, parts, strict=True)):
                chosen = slice(step * BATCH, (step + 1) * BATCH)
                if len(part["features"][chosen]):
                    model.train_on_batch(part["features"][chosen], part["label"][chosen])
                    rows[rank] += len(part["features"][chosen])
            if (step + 1) % every == 0 or step + 1 == steps:
                shares = rows / rows.sum()
                weights = [model.get_weights() for model in models]
                average = [
                    sum(share * value for share, value in zip(shares, values, strict=True))
                    for values in zip(*weights, strict=True)
                ]
                for model in models:
                    model.set_weights(average)
                rows[:] = 0
    return models[0].get_weights()


# How often ranks average, and their rows: one without any, a last window that is shorter.
WINDOWS = {"3 uneven": (3, (29, 9, 0)), "epoch uneven": ("epoch", (29, 9))}


@pytest.mark.parametrize("case", in_tiers(WINDOWS, fast=["3 uneven"], slow="another frequency"))
def test_weights_when_ranks_train_alone_then_equal_the_weighted_average(rank_pool, case):
    frequency, sizes = case

    def build():
        return small_model(keras.optimizers.SGD(0.05, momentum=0.9))

    parts = split(classifier_data(sum(sizes)), sizes)
    job = job_for(build(), epochs=2, batch_size=BATCH, shuffle=False, frequency=frequency)
    recordings = rank_pool.fit(job, parts)
    every = frequency if isinstance(frequency, int) else 10**6
    expected = play_local_sgd(build, parts, every, epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_weights_when_averaged_at_every_step_of_plain_sgd_then_equal_one_process(rank_pool):
    parts = split(classifier_data(40), (20, 20))
    model = small_model(keras.optimizers.SGD(0.05))
    recordings = rank_pool.fit(job_for(model, epochs=2, batch_size=BATCH, shuffle=False, frequency=1), parts)
    expected, history = fit_one_process(model, list(global_batches(parts, BATCH, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_compiled_loops_when_ranks_train_alone_then_give_the_same(rank_pool):
    options = {"jit_compile": True}
    if keras.config.backend() != "torch":  # where Keras takes one step at a time
        options["steps_per_execution"] = 2
    parts = split(classifier_data(48), (24, 24))

    def build():
        return small_model(keras.optimizers.SGD(0.05, momentum=0.9))

    compiled = small_model(keras.optimizers.SGD(0.05, momentum=0.9), **options)
    recordings = rank_pool.fit(job_for(compiled, epochs=2, batch_size=BATCH, shuffle=False, frequency=3), parts)
    expected = play_local_sgd(build, parts, 3, epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_stop_when_one_rank_asks_then_all_stop_at_the_next_average(rank_pool, tmp_path):
    stop = StopOnOneRank(str(tmp_path / "claim"), 1)
    parts = split(classifier_data(80), (40, 40))
    model = small_model(keras.optimizers.SGD(0.05))
    job = job_for(model, epochs=5, batch_size=BATCH, shuffle=False, frequency=3, callbacks=[stop])
    recordings = rank_pool.fit(job, parts)
    assert len(recordings[0].epochs) == 1
    first_steps = [{name: values[:12] for name, values in part.items()} for part in parts]
    expected = play_local_sgd(lambda: small_model(keras.optimizers.SGD(0.05)), first_steps, 3, epochs=1)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


@every_case("frequency", [0, -1, True, 1.5, "step", None])
def test_frequency_when_it_is_none_of_the_known_then_raises(frequency):
    with pytest.raises(ConfigurationError, match=r"frequency: expected 'batch', 'epoch' or an integer of at least 1"):
        job_for(small_model("sgd"), frequency=frequency)
