"""A synchronous fit that goes on from any of its checkpoints ends as one that was never interrupted."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops
from keras_reference import classifier_data, job_for, largest_difference, regression_model, split, two_groups
from own_step import OwnStep
from rank_pool import fit_here
from tiers import in_tiers

from elephant import LearningRateWarmup
from elephant.backends.keras_private import optimized_variables
from elephant.checkpoint.state import joined
from elephant.collective import communicator
from elephant.data.schema import RowSpec, TensorSpec
from elephant.errors import ConfigurationError, RowsMovedError
from elephant.modeling.model_spec import KerasSettings
from elephant.modeling.variables import (
    FLOAT16,
    optimizers_of,
    random_generators,
    read_values,
    read_variables,
    seeded,
    shared_generator,
)
from elephant.rank.checkpoints import CheckpointCallback, restore
from elephant.rank.job import prepared_model

pytestmark = pytest.mark.usefixtures("by_value")

EPOCHS = 3
SIX = RowSpec(0, (TensorSpec((6,), "float32"),))


def dropout_model(optimizer):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Input((6,)),
        keras.layers.Dense(8, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.4),
        keras.layers.GaussianNoise(0.2, seed=5),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def adapted_model(optimizer):
    """Returns a model with a frozen base, in which two layers have adapters of low rank."""
    model = dropout_model("sgd")
    for layer in model.layers:
        layer.trainable = False
    for layer in (model.layers[0], model.layers[-1]):
        layer.trainable = True
        layer.enable_lora(2)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


class TwoOptimizers(OwnStep):
    """A model with a train_step of its own, each of whose layers has an optimizer of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden, self.head = keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)

    def call(self, inputs):
        return self.head(self.hidden(inputs))

    def compile(self, hidden_optimizer, head_optimizer):
        super().compile()
        self.hidden_optimizer, self.head_optimizer = hidden_optimizer, head_optimizer

    def step(self, data, update):
        features, label = data[:2]

        def error():
            return ops.mean(ops.square(self(features, training=True)[:, 0] - ops.reshape(label, [-1])))

        for layer, optimizer in ((self.hidden, self.hidden_optimizer), (self.head, self.head_optimizer)):
            loss = update(error, layer.trainable_variables, optimizer)
        return {"loss": loss}


def two_optimizers():
    model = TwoOptimizers()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9))
    return model


class Remembering(keras.callbacks.Callback):
    """Sets a learning rate that follows from all that it has seen."""

    def on_train_begin(self, logs=None):
        self.seen, self.sums = 0, np.zeros(2)

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1
        self.sums = self.sums + [logs["loss"], self.seen]
        self.model.optimizer.learning_rate = 0.01 / float(1 + self.sums.sum())

    def get_state(self):
        return {"seen": self.seen, "more": {"sums": self.sums}}

    def set_state(self, state):
        self.seen, self.sums = state["seen"], state["more"]["sums"]


def schedule():
    return keras.optimizers.schedules.CosineDecay(0.001, 40, warmup_target=0.01, warmup_steps=7)


CASES = {
    "validation, and epochs that end in the middle of a pass": lambda: {
        "model": dropout_model(keras.optimizers.Adam(0.01)),
        "steps_per_epoch": 4,
        "validation_fraction": 0.2,
    },
    "accumulated, and averaged weights swapped in": lambda: {
        "model": dropout_model(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.5)
        ),
        "callbacks": [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    },
    "a frozen base with adapters": lambda: {"model": adapted_model(keras.optimizers.Adam(0.01))},
    "an optimizer for each group of variables, and warm-up": lambda: {
        "model": dropout_model(two_groups()),
        "callbacks": [LearningRateWarmup(epochs=3)],
        "scale_learning_rate": True,
    },
    "a schedule, and weights averaged every two steps": lambda: {
        "model": regression_model(keras.optimizers.SGD(schedule(), momentum=0.9)),
        "frequency": 2,
    },
    "a rate that falls on plateaus": lambda: {
        "model": regression_model(keras.optimizers.SGD(0.01)),
        "callbacks": [
            keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0),
            keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=10.0, restore_best_weights=True),
        ],
    },
    "compressed, with what it has left over": lambda: {
        "model": dropout_model(keras.optimizers.SGD(0.01, momentum=0.9)),
        "compression": "topk:0.3",
    },
    "weights averaged every two steps, compressed": lambda: {
        "model": regression_model(keras.optimizers.Adam(0.01)),
        "frequency": 2,
        "compression": "int8:feedback",
    },
    "a callback of the user's": lambda: {
        "model": regression_model(keras.optimizers.SGD(0.01)),
        "callbacks": [keras.callbacks.TerminateOnNaN(), Remembering()],
    },
}


def fitted(rank_pool, job, parts):
    # Compression is for ranks of different hosts.
    recordings = rank_pool.fit(job, parts, transport="auto" if job.config.compression is None else "tcp")
    history = {name: [logs[name] for logs in recordings[0].epochs if name in logs] for name in recordings[0].epochs[0]}
    return recordings[0], history


FAST = ["a schedule, and weights averaged every two steps"]


@pytest.mark.parametrize("case", in_tiers(CASES, fast=FAST, slow="three fits per case"))
def test_fit_when_it_goes_on_from_any_step_then_ends_with_the_same_bits_as_one_that_was_not_interrupted(
    rank_pool, case
):
    # Always due: there is a state after each step after which ranks are equal.
    options = {"epochs": EPOCHS, "batch_size": 4, "seed": 3, "checkpoint_path": "kept", "checkpoint_seconds": 1e-9}
    options |= case()
    parts = split(classifier_data(40), (23, 17))
    job = job_for(options.pop("model"), **options)
    whole, history = fitted(rank_pool, job, parts)
    at_ends = [state for state in whole.states if not state.step]
    assert [state.epochs for state in at_ends] == list(range(1, len(whole.epochs) + 1))
    assert len(whole.epochs) >= 2
    within = [state for state in whole.states if state.step]
    every = options.get("frequency", 1)
    steps = options.get("steps_per_epoch", 6)
    assert [(state.epochs, state.step) for state in within] == [
        (epoch, step) for epoch in range(len(at_ends)) for step in range(every, steps, every)
    ]
    # Spark may deliver rows in another order when it computes them again.
    delivered = [{name: values[::-1] for name, values in part.items()} for part in parts]
    # Each takes a fit: the end of an epoch, and a step late in one, when the smaller rank has used all its rows.
    for state in (at_ends[0], within[2 * len(within) // 3 - 1]):
        again, rest = fitted(rank_pool, dataclasses.replace(job, state=state), delivered)
        assert largest_difference(again.variables, whole.variables) == 0
        after = joined(state.history, rest)
        assert {name: after[name] for name in history} == history


def test_fit_when_its_one_rank_goes_on_from_any_checkpoint_then_ends_as_one_that_was_not_interrupted():
    options = {"epochs": EPOCHS, "batch_size": 4, "seed": 3, "checkpoint_path": "kept", "validation_fraction": 0.2}
    job = job_for(dropout_model(keras.optimizers.Adam(0.01)), **options)
    columns = classifier_data(31)
    whole = fit_here(job, columns)
    assert [state.epochs for state in whole.states] == [1, 2, 3]
    delivered = {name: values[::-1] for name, values in columns.items()}
    # The first one is tried with several ranks.
    again = fit_here(dataclasses.replace(job, state=whole.states[1]), delivered)
    assert largest_difference(again.variables, whole.variables) <= 1e-6
    assert again.epochs == [pytest.approx(logs, rel=1e-5) for logs in whole.epochs[2:]]


def test_fit_when_it_is_to_go_on_within_an_epoch_with_other_rows_then_is_refused():
    options = {"epochs": 2, "batch_size": 4, "checkpoint_path": "kept", "checkpoint_seconds": 1e-9}
    columns = classifier_data(20)
    for shuffle in (True, False):
        job = job_for(regression_model("sgd"), shuffle=shuffle, **options)
        states = fit_here(job, columns).states
        within, at_end = (next(state for state in states if bool(state.step) is inside) for inside in (True, False))
        others = {name: np.concatenate([values[:-1], values[:1]]) for name, values in columns.items()}
        swapped = {name: values[::-1] for name, values in columns.items()}
        for moved in (others,) if shuffle else (others, swapped):
            with pytest.raises(RowsMovedError, match="rank 0 had in the first 1 steps of the epoch, which were 20"):
                fit_here(dataclasses.replace(job, state=within), moved)
        # The next epoch may have any.
        assert len(fit_here(dataclasses.replace(job, state=at_end), others).epochs) == 1


@pytest.mark.slow("four fits")
def test_fit_when_it_goes_on_with_other_ranks_or_workers_then_keeps_weights_and_scales_the_rate(rank_pool):
    columns = classifier_data(36)
    options = {"epochs": 2, "batch_size": 6, "shuffle": False, "checkpoint_path": "kept", "scale_learning_rate": True}
    job = job_for(regression_model(keras.optimizers.SGD(0.01, momentum=0.9)), **options)
    before, _ = fitted(rank_pool, job, split(columns, (20, 16)))
    state = before.states[0]
    # No epoch is left: what there is comes back as it was, but for the rate.
    done = dataclasses.replace(job.config, epochs=1)
    values = state.variables
    rates = [index for index, value in enumerate(values) if value.shape == () and value == np.float32(0.02)]
    assert len(rates) == 1
    # As many ranks of one worker count as one.
    of_one_worker = dataclasses.replace(done, batch_size=12, gpus_per_worker=2)
    for workers, config, sizes in ((3, done, (16, 10, 10)), (1, of_one_worker, (20, 16))):
        recordings = rank_pool.fit(dataclasses.replace(job, config=config, state=state), split(columns, sizes))
        for index, (value, expected) in enumerate(zip(recordings[0].variables, values, strict=True)):
            np.testing.assert_allclose(value, expected * workers / 2 if index in rates else expected, rtol=1e-6)
    again, _ = fitted(rank_pool, dataclasses.replace(job, state=state), split(columns, (16, 10, 10)))
    assert len(again.epochs) == 1 and again.states[-1].facts["num_workers"] == 3


class Kept(list):
    """Takes the states of a fit."""

    keep = list.append
    is_free = True
    state_wanted = False


def test_state_when_mixed_precision_has_added_a_loss_scale_then_keeps_it():
    job = job_for(regression_model("sgd"), epochs=2, checkpoint_path="kept", mixed_precision=True)

    def lowered():
        model = prepared_model(job, SIX, num_ranks=1, policy=FLOAT16)
        return model, model.optimizer

    model, scaling = lowered()
    scaling.dynamic_scale.assign(64.0)
    scaling.step_counter.assign(3)
    state, one = state_of(job, model), communicator.LocalCommunicator()
    old = in_first_format(state, model)
    old.arrays.update({"scale/0": np.int64(3), "scale/1": np.float32(64.0)})
    for kept in (state, old):
        again, other = lowered()
        assert float(other.dynamic_scale) == 2.0**15
        restore(again, dataclasses.replace(job, state=kept), one)
        assert (float(other.dynamic_scale), int(other.step_counter)) == (64.0, 3)
        # On a machine without GPUs there is no such scale, and nothing to give it to.
        restore(prepared_model(job, SIX, num_ranks=1), dataclasses.replace(job, state=kept), one)


def state_of(job, model):
    """Returns the state that a fit of one rank would keep."""
    states, one = Kept(), communicator.LocalCommunicator()
    keeping = CheckpointCallback(job, one, states, own=(), rows=SIX)
    keeping.set_model(model)
    keeping.on_epoch_end(0, {"loss": 1.0})
    return states[0]


def in_first_format(state, model):
    """Returns a state as elephant 0.1.0 kept it before arrays had paths: by their places."""
    first, *others = optimizers_of(model)
    numbers = [ops.convert_to_numpy(one).astype("int64") for one in random_generators(model)]
    groups = {"model": read_variables(model)}
    groups |= {f"optimizer/{index}": read_values(one.variables) for index, one in enumerate(others)}
    groups["local/0"] = [value for one in optimizers_of(model) for value in read_values(one.variables)]
    places = {id(variable): place for place, variable in enumerate(model.weights)}
    facts = {name: value for name, value in state.facts.items() if name != "variables"}
    facts["optimizers"] = [[places[id(one)] for one in optimized_variables(other)] for other in others]
    arrays = {f"{kind}/{place}": one for kind, values in groups.items() for place, one in enumerate(values)}
    arrays["random/0"] = np.concatenate([[1, 7, 8], *numbers])
    return dataclasses.replace(state, arrays=arrays, facts=facts)


OLD = {
    "dropout": lambda: dropout_model(keras.optimizers.Adam(0.01)),
    "loss scaling": lambda: dropout_model(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    ),
    "an optimizer for each group of variables": lambda: dropout_model(two_groups()),
    "two optimizers": lambda: two_optimizers,
}


@pytest.fixture
def settings_of_its_own():
    """Gives this process its Keras settings back, which building a job's model changes."""
    with KerasSettings.current().applied():
        yield


@pytest.mark.usefixtures("settings_of_its_own")
@pytest.mark.parametrize("case", OLD)
def test_state_when_of_this_or_the_first_format_then_all_of_it_is_given_back(case):
    job = job_for(OLD[case](), epochs=2, checkpoint_path="kept")

    def prepared():
        return prepared_model(job, SIX, num_ranks=1)

    def everything(model):
        of_optimizers = [one for optimizer in optimizers_of(model) for one in optimizer.variables]
        return [*model.weights, *of_optimizers, *random_generators(model)]

    model = prepared()
    if case == "two optimizers":
        for layer, optimizer in ((model.hidden, model.hidden_optimizer), (model.head, model.head_optimizer)):
            optimizer.build(layer.trainable_variables)
    for place, variable in enumerate(everything(model)):
        variable.assign(np.full(variable.shape, place + 1))
    state = state_of(job, model)
    old = in_first_format(state, model)
    for kept in (state, old):
        again = prepared()
        with seeded(1):
            restore(again, dataclasses.replace(job, state=kept), communicator.LocalCommunicator())
            if kept is old:
                assert ops.convert_to_numpy(shared_generator()).tolist() == [7, 8]
        for value, expected in zip(read_values(everything(again)), read_values(everything(model)), strict=True):
            np.testing.assert_array_equal(value, expected)
        # What it keeps next is of this format, and the same.
        next_one = state_of(job, again)
        for name, array in state.arrays.items():
            if name.startswith(("model/", "optimizer")):
                np.testing.assert_array_equal(next_one.arrays[name], array)


@pytest.mark.usefixtures("settings_of_its_own")
def test_state_when_of_another_model_then_is_refused():
    job = job_for(regression_model("adam"), epochs=2, checkpoint_path="kept")
    model = prepared_model(job, SIX, num_ranks=1)
    state = state_of(job, model)
    other = dropout_model("adam")
    another_optimizer = regression_model("adadelta")
    for kept, taking, text in (
        (state, other, "one without: model/batch_norm.*/gamma.*go on with the model"),
        (in_first_format(state, model), other, "expected the [0-9]+ variables that the checkpoint has.*go on with"),
        # Its variables have the same shapes.
        (state, another_optimizer, "model: expected to be compiled with Adam, with .* Received: Adadelta"),
    ):
        going_on = job_for(taking, epochs=2, checkpoint_path="kept")
        prepared = prepared_model(going_on, SIX, num_ranks=1)
        with pytest.raises(ConfigurationError, match=text):
            restore(prepared, dataclasses.replace(going_on, state=kept), communicator.LocalCommunicator())


def test_fit_when_a_callback_stops_it_then_the_state_says_so(rank_pool):
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=10.0)
    options = {"epochs": 9, "batch_size": 6, "checkpoint_path": "kept", "checkpoint_epochs": 5, "callbacks": [stop]}
    recording, _ = fitted(rank_pool, job_for(regression_model("sgd"), **options), split(classifier_data(20), (12, 8)))
    (state,) = recording.states
    assert state.facts["stopped"] and state.epochs == len(recording.epochs) < 5
