"""Variables and objects that a callback shares with the model, against one process of Keras."""

import importlib
import os
from contextlib import nullcontext
from dataclasses import replace

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, job_for

from elephant.data.schema import RowSpec, TensorSpec
from elephant.driver.driver_turns import SynchronousEpochs
from elephant.errors import UnsupportedError
from elephant.modeling.variables import read_variables
from elephant.monitor.events import CallbacksDue
from elephant.rank.asynchronous.async_callbacks import worker_copies
from elephant.rank.callbacks.shared_state import SharedState
from elephant.testing import fit_local

ROWS = 40


def due(epoch, model):
    """Returns what rank 0 tells of a model at the end of an epoch; None begins training."""
    rows = RowSpec(0, (TensorSpec((6,), "float32"),))
    arrays = read_variables(model)
    return CallbacksDue(
        rank=0,
        epoch=epoch,
        steps=4,
        logs={"loss": 1.0},
        stopped=False,
        learning_rate=0.05,
        iterations=0,
        rows=rows.to_json(),
        row_shapes={},
        arrays=arrays,
    )


def model_with(loss, **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), loss=loss, **options)
    return model


def weighed_by(weight):
    """Returns a loss that a function weighs."""

    def weighed(y_true, y_pred):
        return weight() * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    return weighed


def annealed():
    """Returns a compiled model whose loss has a weight outside of it, that weight, and who sets it."""
    alpha = keras.Variable(0.0, trainable=False, name="alpha")

    def weighted(y_true, y_pred):
        return alpha * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            alpha.assign(0.5 * epoch)

    return model_with(weighted), alpha, Anneal()


def test_variable_outside_of_the_model_when_a_callback_sets_it_then_the_fit_does_as_one_process_does(warm_ranks):
    data = classifier_data(ROWS)
    model, alpha, callback = annealed()
    history, trained = fit_local(
        model,
        data["features"],
        data["label"],
        num_workers=2,
        epochs=3,
        batch_size=5,
        shuffle=False,
        callbacks=[callback],
    )
    halves = np.arange(ROWS).reshape(2, 4, 5).transpose(1, 0, 2).ravel()
    reached = float(alpha.numpy()) if hasattr(alpha, "numpy") else float(alpha)
    alpha.assign(0.0)
    expected = model.fit(
        data["features"][halves],
        data["label"][halves],
        epochs=3,
        batch_size=10,
        shuffle=False,
        verbose=0,
        callbacks=[callback],
    )
    # JAX takes what is outside of the model for a constant.
    assert expected.history["loss"][0] == 0 and (keras.backend.backend() == "jax" or expected.history["loss"][2] > 0.1)
    np.testing.assert_allclose(history["loss"], expected.history["loss"], rtol=1e-5)
    for ours, theirs in zip(trained.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    # What is computed with the loss after the fit has the value that training has ended with.
    assert reached == 1.0


def epochs_of(model, callbacks, **options):
    return SynchronousEpochs(replace(job_for(model, epochs=2), callbacks=tuple(callbacks), **options))


def test_callbacks_when_they_reach_what_the_loss_reaches_then_run_on_the_workers():
    model, alpha, callback = annealed()
    # In one process they have had a model of their own, which is no part of what they reach.
    callback.set_model(model)
    seen, unrelated = [], keras.Variable(1.0)

    class Sees(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(logs)
            unrelated.assign(2.0)

    held = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: alpha.assign_add(1.0))
    turns = epochs_of(model, [callback, Sees(), held, keras.callbacks.CSVLogger("log.csv")])
    assert [type(one).__name__ for one in turns.callbacks] == ["Sees", "CSVLogger"]
    assert turns.job_of_ranks().outside == (alpha,)


def test_callback_when_it_and_the_loss_use_the_same_layer_then_stays_on_the_driver_and_may_not_change_it():
    features = keras.layers.Dense(2)
    features.build((None, 1))

    def perceived(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(features(y_true) - features(y_pred)), axis=-1)

    def scale(factor):
        return keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: features.kernel.assign(features.kernel * factor)
        )

    model = model_with(perceived)
    for factor in (1.0, 2.0):
        turns = epochs_of(model, [scale(factor)])
        assert len(turns.callbacks) == 1 and turns.job_of_ranks().outside == ()
        turns.take_turn(due(None, model))
        with (
            pytest.raises(UnsupportedError, match="a change of the variable 'kernel'") if factor > 1 else nullcontext()
        ):
            turns.take_turn(due(0, model))
        turns.close()


def test_callback_when_the_loss_reads_it_then_runs_on_the_workers():
    class Weight(keras.callbacks.Callback):
        alpha = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            self.alpha = 0.5 * epoch

    weight = Weight()
    model = model_with(weighed_by(lambda: weight.alpha), run_eagerly=True)
    assert epochs_of(model, [weight]).callbacks == []


class Switch:
    """Something of the user's that is no variable."""

    alpha = 0.0

    def set(self, value):
        self.alpha = value


factor = 1.0


def set_factor(value):
    global factor
    factor = value


def changes_of(kind):
    """Returns a loss, and a function that changes what it reads."""
    numbers, switch, cell = {"alpha": 0.0}, Switch(), 0.0

    def set_cell(value):
        nonlocal cell
        cell = value

    return {
        "dictionary": (weighed_by(lambda: numbers["alpha"]), lambda value: numbers.update(alpha=value)),
        "object": (weighed_by(lambda: switch.alpha), switch.set),
        "class": (weighed_by(lambda: Switch.alpha), lambda value: setattr(Switch, "alpha", value)),
        "closure": (weighed_by(lambda: cell), set_cell),
        "global": (weighed_by(lambda: factor), set_factor),
    }[kind]


@pytest.mark.parametrize("kind", ["dictionary", "object", "class", "closure", "global"])
def test_object_of_the_loss_when_a_callback_on_the_driver_changes_it_then_says_that_workers_have_copies(kind):
    loss, change = changes_of(kind)
    model, told = model_with(loss), []
    reads = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: told.append(change))
    writes = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: change(2.0 + epoch))
    for callback in (reads, writes):
        turns = epochs_of(model, [callback])
        turns.take_turn(due(None, model))
        if callback is reads:
            turns.take_turn(due(0, model))
            assert told == [change]
        else:
            with pytest.raises(UnsupportedError, match="Received: a change of .*, of which the workers have copies"):
                turns.take_turn(due(0, model))
        turns.close()
    Switch.alpha = 0.0


def test_variable_of_the_given_model_when_a_callback_changes_it_by_another_way_then_says_to_use_its_model():
    model = model_with("mse")
    kernel = model.layers[-1].kernel
    turns = epochs_of(model, [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: kernel.assign(kernel * 0.5))])
    turns.take_turn(due(None, model))
    with pytest.raises(UnsupportedError, match="a change of the variable 'kernel'.*reach the model as self.model"):
        turns.take_turn(due(0, model))
    turns.close()

    class Halves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel.assign(kernel * 0.5)

    with pytest.raises(UnsupportedError, match="expected Halves, .*, to reach the model as self.model"):
        epochs_of(model, [Halves()])


def test_callback_when_it_shares_a_variable_and_cannot_run_on_every_worker_then_is_refused():
    model, alpha, callback = annealed()

    class Saves(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            alpha.assign(1.0)

    with pytest.raises(
        UnsupportedError, match="expected Anneal, which runs on the driver, to share no variable.*'alpha'"
    ):
        epochs_of(model, [], driver_callbacks=(callback,))
    with pytest.raises(UnsupportedError, match="expected Saves, which runs on rank 0, to share no variable"):
        epochs_of(model, [Saves("m.keras")])


def test_worker_copies_when_callbacks_share_variables_then_those_of_epochs_begins_are_there_and_others_refused():
    model, alpha, callback = annealed()
    source = job_for(model).model
    (copied,) = worker_copies([callback], SharedState([callback], source, []))
    assert type(copied) is type(callback)
    ends = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: alpha.assign(1.0))
    with pytest.raises(UnsupportedError, match="Set it in on_epoch_begin, or use mode='synchronous'"):
        worker_copies([ends], SharedState([ends], source, []))


MODULE = """
import keras

alpha = keras.Variable(0.0, trainable=False)


def loss(y_true, y_pred):
    return alpha * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


class Anneal(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        alpha.assign(0.5 * epoch)
"""


@pytest.mark.slow("processes of its own; the first test shares a variable, and has it back")
def test_variable_when_it_is_in_a_module_then_the_one_of_the_module_is_shared_and_comes_back(
    tmp_path, monkeypatch, warm_ranks
):
    (tmp_path / "annealing_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("annealing_module")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    callback, data = module.Anneal(), classifier_data(ROWS)
    history, _ = fit_local(
        model_with(module.loss),
        data["features"],
        data["label"],
        num_workers=2,
        epochs=3,
        batch_size=20,
        callbacks=[callback],
    )
    assert history["loss"][0] == 0 and (keras.backend.backend() == "jax" or history["loss"][2] > 0.1)
    assert float(keras.ops.convert_to_numpy(module.alpha)) == 1.0
