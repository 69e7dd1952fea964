"""Fits whose ranks have a part of the optimizer's state each: the bits of fits in which each has all of it."""

import gc
import json
import os
from dataclasses import replace

import keras
import numpy as np
import pytest
from elastic_reference import fit_of_changing_ranks
from keras_reference import (
    classifier_data,
    fit_one_process,
    global_batches,
    job_for,
    largest_difference,
    split,
    two_groups,
)
from own_step import OwnStep
from tiers import in_tiers

from elephant.errors import UnsupportedError
from elephant.monitor.events import CallbacksDue
from elephant.rank.callbacks.divided_optimizer import require_divided_callbacks
from elephant.rank.job import WEIGHTS

OPTIONS = {"epochs": 2, "batch_size": 4, "shuffle": False}
DATA = classifier_data(31)
SIZES = (13, 0, 18)
optimizers = keras.optimizers
RULES = {
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(optimizers.schedules.ExponentialDecay(0.01, 3, 0.9)),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True, clipvalue=0.1),
    "adagrad": lambda: optimizers.Adagrad(0.05, weight_decay=0.01, clipnorm=0.5),
    "adadelta": lambda: optimizers.Adadelta(0.5),
    "nadam": lambda: optimizers.Nadam(0.01),
    "lion": lambda: optimizers.Lion(0.001),
    # Norms of each variable.
    "lamb": lambda: optimizers.Lamb(0.01),
    "accumulating": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    # Norms of all gradients.
    "global_clipnorm": lambda: optimizers.Adam(0.01, global_clipnorm=0.3, loss_scale_factor=24.0),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01, global_clipnorm=0.3), initial_scale=8.0, dynamic_growth_steps=3
    ),
}
FAST = ["adam", "global_clipnorm"]


class Slots(keras.callbacks.Callback):
    """Writes down how many bytes of slots a rank's optimizer has, and how many of all that there are."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def on_train_batch_end(self, batch, logs=None):
        gc.collect()
        own = {id(one): one for one in self.model.optimizer.variables}
        there = [one for one in gc.get_objects() if type(one) is keras.Variable]
        slots = [one for one in there if one.path.startswith(f"{self.model.optimizer.name}/")]
        numbers = [[int(np.prod(one.shape)) * 4 for one in kept if one.shape != ()] for kept in (own.values(), slots)]
        (self._folder / str(os.getpid())).write_text(json.dumps([sum(kept) for kept in numbers]))


class Unused(keras.layers.Layer):
    """A layer with a large weight on which nothing depends."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(50, 50), name="unused")

    def call(self, inputs):
        return inputs


def usual_layers():
    return [keras.layers.Dense(8, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]


def model_of(optimizer=None, *, layers=None, **compiled):
    keras.utils.set_random_seed(0)
    inner = usual_layers() if layers is None else layers()
    model = keras.Sequential([keras.layers.Input((6,)), *inner])
    model.compile(optimizers.Adam(0.01) if optimizer is None else optimizer, "mse", metrics=["mae"], **compiled)
    return model


def fits(rank_pool, model_source, sizes=SIZES, *, transport="auto", **options):
    """Returns rank 0's recordings of a fit without the option, and of one with it."""
    parts = split(DATA, sizes)
    jobs = [job_for(model_source(), **OPTIONS, **options, shard_optimizer=is_divided) for is_divided in (False, True)]
    return [rank_pool.fit(job, parts, transport)[0] for job in jobs]


def assert_same_bits(arrays, others):
    assert len(arrays) == len(others)
    for array, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(array, other, strict=True)


@pytest.mark.parametrize(
    "rule", in_tiers(RULES, fast=FAST, slow="another rule; those in make test have what rules may have")
)
def test_fit_when_the_optimizer_is_divided_then_has_the_same_bits(rank_pool, rule):
    whole, divided = fits(rank_pool, lambda: model_of(rule()))
    assert_same_bits(divided.variables, whole.variables)
    assert divided.epochs == whole.epochs


@pytest.mark.slow(
    "fits of one to three ranks; the bits above are those of fits that equal one process in test_synchronous.py"
)
@pytest.mark.parametrize("sizes", [(31,), (17, 14), SIZES], ids=str)
def test_fit_when_the_optimizer_is_divided_then_equals_one_process(rank_pool, sizes):
    parts = split(DATA, sizes)
    recording = rank_pool.fit(job_for(model_of(), **OPTIONS, shard_optimizer=True), parts)[0]
    weights, history = fit_one_process(model_of(), list(global_batches(parts, 4, 2)), 2)
    assert largest_difference(recording.variables[: len(weights)], weights) < 1e-5
    assert [epoch["loss"] for epoch in recording.epochs] == pytest.approx(history["loss"], abs=1e-5)


def frozen_layers():
    return [
        keras.layers.Dense(8, "tanh", trainable=False),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2, seed=1),
        keras.layers.Dense(1),
    ]


def deep_layers():
    return [*(keras.layers.Dense(40, "tanh") for _ in range(6)), keras.layers.Dense(1)]


MODELS = {
    "frozen and normalized": lambda: model_of(layers=frozen_layers),
    "fewer variables than ranks": lambda: model_of(
        layers=lambda: [keras.layers.Dense(1, use_bias=False)], optimizer=optimizers.Nadam(0.01)
    ),
    "no gradient on a rank": lambda: model_of(layers=lambda: [Unused(), keras.layers.Dense(1)]),
    "mixed": lambda: model_of(layers=lambda: [keras.layers.Dense(8, dtype="mixed_bfloat16"), keras.layers.Dense(1)]),
    "eager": lambda: model_of(run_eagerly=True),
    "compiled": lambda: model_of(jit_compile=keras.config.backend() == "tensorflow" or "auto"),
}


@pytest.mark.parametrize(
    "source",
    in_tiers(
        MODELS,
        fast=["fewer variables than ranks"],
        slow="another model; tests/rank has its parts",
    ),
)
def test_fit_when_a_model_has_odd_variables_or_steps_then_has_the_same_bits(rank_pool, source):
    whole, divided = fits(rank_pool, source)
    assert_same_bits(divided.variables, whole.variables)


@pytest.mark.slow("two fits over TCP; test_overlap.py has buckets, and tests/collective every way to other ranks")
@pytest.mark.parametrize("compression", [None, "int8"])
def test_fit_when_ranks_are_on_several_hosts_then_has_the_same_bits(rank_pool, compression):
    more = {"bucket_bytes": 64, "compression": compression}
    whole, divided = fits(rank_pool, model_of, transport="tcp", **more)
    assert_same_bits(divided.variables, whole.variables)


@pytest.mark.slow("two fits that walk through all objects in memory; others of this file hold the bits")
def test_fit_when_the_optimizer_is_divided_then_each_rank_has_a_part_of_the_bytes(rank_pool, tmp_path):
    job = job_for(model_of(layers=deep_layers), callbacks=[Slots(tmp_path)], **OPTIONS)
    found = {}
    for is_divided in (False, True):
        one = replace(job, config=job.config.changed(shard_optimizer=is_divided))
        rank_pool.fit(one, split(DATA, SIZES))
        found[is_divided] = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
        for path in tmp_path.iterdir():
            path.unlink()
    weights = [1120, *[6560] * 5, 164]
    whole = 2 * sum(weights)
    assert found[False] == [[whole, whole]] * 3
    own, there = zip(*found[True], strict=True)
    assert sum(own) == whole and max(own) < 1.2 * whole / 3
    assert own == there, "slots of other ranks are still in memory"


def test_fit_when_callbacks_on_the_driver_look_at_weights_then_they_get_all_of_the_optimizer(rank_pool):
    seen = {}
    for is_divided in (False, True):
        job = replace(job_for(model_of(), **OPTIONS, shard_optimizer=is_divided), driver_reads=WEIGHTS)
        sent = rank_pool.fit(job, split(DATA, SIZES))[0].sent
        seen[is_divided] = [event.arrays for event in sent if isinstance(event, CallbacksDue)]
    assert len(seen[True]) == len(seen[False]) == 1 + OPTIONS["epochs"]
    for divided, whole in zip(seen[True], seen[False], strict=True):
        assert_same_bits(divided, whole)


RESUMED = {"batch_size": 4, "shuffle": False, "checkpoint_path": "unused"}


@pytest.fixture(scope="module")
def states(rank_pool):
    """States after an epoch of three ranks, without the option and with it."""
    jobs = [job_for(model_of(), epochs=1, **RESUMED, shard_optimizer=is_divided) for is_divided in (False, True)]
    return [rank_pool.fit(job, split(DATA, SIZES))[0].states[-1] for job in jobs]


@pytest.mark.parametrize("ranks", in_tiers([1, 2, 3], fast=[2], slow="another number of ranks"))
@pytest.mark.parametrize(
    "is_divided",
    in_tiers({"whole": False, "divided": True}, fast=["divided"], slow="the same states, the other way"),
)
def test_fit_when_it_goes_on_with_others_then_begins_with_the_whole_state(rank_pool, states, ranks, is_divided):
    whole, divided = states
    assert whole.facts == divided.facts and whole.arrays.keys() == divided.arrays.keys()
    assert_same_bits([*map(divided.arrays.get, whole.arrays)], [*whole.arrays.values()])
    job = job_for(model_of(), epochs=2, **RESUMED, shard_optimizer=is_divided)
    parts = split(DATA, {1: (31,), 2: (17, 14), 3: SIZES}[ranks])
    other = replace(job, config=job.config.changed(shard_optimizer=not is_divided))
    again = rank_pool.fit(replace(job, state=divided), parts)[0]
    expected = rank_pool.fit(replace(other, state=whole), parts)[0]
    assert_same_bits(again.variables, expected.variables)


@pytest.mark.slow("three fits; the test above goes on with other ranks, and test_elastic.py changes their number")
def test_fit_when_its_ranks_become_more_and_fewer_within_epochs_then_equals_one_process(rank_pool):
    recording, batches = fit_of_changing_ranks(rank_pool, model_of(), DATA, batch_size=4, shard_optimizer=True)
    weights, _ = fit_one_process(model_of(), batches, 2)
    assert largest_difference(recording.variables[: len(weights)], weights) < 1e-5


class Stepped(OwnStep):
    """A model with a train_step of its own. Not of inputs and outputs: Keras gives its class other bases then."""

    def __init__(self, **options):
        super().__init__(**options)
        self.head = keras.layers.Dense(1)

    def call(self, inputs):
        return self.head(inputs)


def own_step():
    model = Stepped()
    model.compile(optimizers.SGD(0.1), "mse")
    return model


class OwnApply(optimizers.SGD):
    """An optimizer that does something of its own with all gradients."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


REFUSED = {
    "unnamed slots": (
        lambda: model_of(optimizers.Adafactor(0.01)),
        "named after weights, .* Received: Adafactor, with optimizer/",
    ),
    "own step": (lambda: own_step, "expected a model with one optimizer and Keras' own train_step"),
    "groups": (lambda: model_of(two_groups()), r"own apply\(\).* Received: MultiOptimizer"),
    "averages": (lambda: model_of(optimizers.SGD(0.1, use_ema=True)), "Received: SGD with use_ema=True"),
    "sums": (
        lambda: model_of(optimizers.SGD(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2)),
        "expected global_clipnorm or gradient_accumulation_steps",
    ),
}


if keras.config.backend() == "torch":
    REFUSED["compiled"] = (lambda: model_of(jit_compile=True), "expected a model that PyTorch does not compile")


@pytest.mark.parametrize(("source", "text"), REFUSED.values(), ids=REFUSED)
def test_fit_when_a_model_cannot_be_divided_so_then_says_why(rank_pool, source, text):
    with pytest.raises(Exception, match=f"shardOptimizer: .*{text}"):
        rank_pool.fit(job_for(source(), **OPTIONS, shard_optimizer=True), split(DATA, (17, 14)))


def test_callbacks_when_they_save_the_whole_model_then_are_refused():
    weights = keras.callbacks.ModelCheckpoint("x.weights.h5", save_weights_only=True, save_freq=2)
    require_divided_callbacks([weights, keras.callbacks.EarlyStopping()])
    with pytest.raises(UnsupportedError, match="shardOptimizer: .* Received: ModelCheckpoint. Pass save_weights_only"):
        require_divided_callbacks([keras.callbacks.ModelCheckpoint("x.keras", save_freq=2)])
