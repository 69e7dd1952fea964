"""The driver of an asynchronous fit goes on from its checkpoint: who was ahead stays ahead, callbacks remember."""

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
from keras_reference import job_for, regression_model

from elephant.checkpoint.manager import CheckpointManager, CheckpointWriter
from elephant.config import AsynchronousOptions
from elephant.data.schema import RowSpec, TensorSpec
from elephant.driver.driver_epochs import DriverEpochs, pending_parts
from elephant.driver.server_model import ServerModel
from elephant.monitor.events import EpochPart, Started, StateSaved, StepEnded
from elephant.parameter_server.control_client import FetchedModel, ServerState
from elephant.storage.folder import folder_at

ROWS = RowSpec(0, (TensorSpec((6,), "float32"),))
LOSSES = {0: (4.0, 9.0, 3.0, 7.0), 1: (8.0, 8.0, 8.0, 1.0)}


class Servers:
    """What the driver asks of the servers; all weights and slots are the number of updates."""

    def __init__(self, model):
        self.layout, self.updates, self.rates = model.layout, 0, []
        self.num_slots, self.iterations = len(model.slots()[0]), model.slots()[1]

    def keep(self, wanted=None):
        vector = np.full(self.layout.num_values, float(self.updates), np.float32)
        fetched = FetchedModel(
            values=vector,
            slots=(vector,) * self.num_slots,
            iterations=self.iterations + self.updates,
            state=np.empty(0),
        )
        return ServerState(fetched=fetched, ledgers=({0: (self.updates, 0, 0), 1: (1, 0, 0)},))

    def fetch(self, wanted=None):
        return self.keep().fetched

    def set_rate(self, rate):
        self.rates.append(rate)

    def stop(self):
        raise AssertionError("nobody has asked to stop")


def part_of(rank, epoch):
    loss = LOSSES[rank][epoch]
    return EpochPart(
        rank=rank,
        epoch=epoch,
        rows=10,
        val_rows=0,
        steps=2,
        wait_s=0.0,
        logs={"loss": loss},
        row_shapes={"features": [6]},
        arrays=(np.array([10 * loss, 10.0]), np.empty(0)),
    )


def job(callbacks, **options):
    model = regression_model(keras.optimizers.SGD(0.1, momentum=0.5))
    options = {"mode": "asynchronous", "num_workers": 2, "epochs": 4, "batch_size": 5, **options}
    return job_for(model, checkpoint_path="kept", callbacks=callbacks, **options)


def plateau():
    return keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=2, min_delta=100.0)


def driven(work, parts, checkpoint_writer=None, shown=None):
    """Returns the logs of the epochs that are complete with these parts, the servers, and the driver's model."""
    model = ServerModel(work, ROWS)
    servers = Servers(model)
    epochs = DriverEpochs(work, model, servers, checkpoint_writer, show=None if shown is None else shown.append)
    epochs.begin()
    logs = []
    for part in parts:
        servers.updates += 1
        logs += [event.logs for event in epochs.add(part)]
    return logs, servers, model


def test_driver_when_it_goes_on_then_has_all_epochs_and_the_rate_that_callbacks_had_set(tmp_path):
    ahead = [part_of(0, 0), part_of(0, 1), part_of(0, 2), part_of(1, 0)]
    behind = [part_of(1, 1), part_of(0, 3), part_of(1, 2), part_of(1, 3)]
    whole, servers, _ = driven(job([plateau()]), ahead + behind)
    assert [logs["loss"] for logs in whole] == pytest.approx([6.0, 8.5, 5.5, 4.0])
    assert servers.rates == pytest.approx([0.05])

    with contextlib.closing(CheckpointWriter(CheckpointManager(folder_at(str(tmp_path))))) as checkpoint_writer:
        before, _, _ = driven(job([plateau()]), ahead, checkpoint_writer, shown := [])
    # Users hear of the checkpoint, and nobody of the weights in it.
    assert shown == [StateSaved(rank=0, epochs=1, history={}, facts={}, names=[])]
    state = CheckpointManager(folder_at(str(tmp_path))).latest().state
    assert (state.epochs, len(before), state.facts["stopped"]) == (1, 1, False)
    assert state.history["loss"] == pytest.approx([6.0])

    again = dataclasses.replace(job([plateau()]), state=state)
    # A worker that had ended an epoch tells of it once more.
    after, servers, _ = driven(again, [part_of(0, 2), *behind])
    assert [logs["loss"] for logs in after] == pytest.approx([8.5, 5.5, 4.0])
    assert servers.rates == pytest.approx([0.05])
    restored = ServerModel(again, ROWS)
    (momentum,), iterations = restored.slots()
    for vector in (restored.weights(), momentum):
        for view in restored.layout.views(vector):
            np.testing.assert_array_equal(view, 4.0)
    assert iterations == 4
    assert restored.ledgers(1) == [{0: [4, 0, 0], 1: [1, 0, 0]}]
    # Of servers that are more than they were, each has what all of them had.
    assert restored.ledgers(2) == [{0: [4, 0, 0], 1: [1, 0, 0]}] * 2


def test_driver_when_a_layer_is_frozen_then_its_checkpoints_share_a_file_with_it(tmp_path):
    model = regression_model(keras.optimizers.SGD(0.1, momentum=0.5))
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    work = dataclasses.replace(job([]), model=job_for(model).model)
    with contextlib.closing(CheckpointWriter(CheckpointManager(folder_at(str(tmp_path))))) as checkpoint_writer:
        driven(work, [part_of(rank, epoch) for epoch in range(2) for rank in range(2)], checkpoint_writer)
    (frozen_file,) = tmp_path.glob("*.frozen.npz")
    with np.load(frozen_file) as arrays:
        assert sorted(arrays.files) == ["model/dense/bias", "model/dense/kernel"]
    state = CheckpointManager(folder_at(str(tmp_path))).latest().state
    assert state.epochs == 2
    np.testing.assert_array_equal(state.arrays["model/dense/kernel"], model.get_weights()[0])
    np.testing.assert_array_equal(state.arrays["model/dense_1/kernel"], np.full((8, 1), 4.0))


@pytest.mark.parametrize("change", [{"num_workers": 1}, {"batch_size": 10}], ids=str)
def test_driver_when_workers_or_batches_are_others_then_nothing_is_said_of_what_was_pushed(tmp_path, change):
    with contextlib.closing(CheckpointWriter(CheckpointManager(folder_at(str(tmp_path))))) as checkpoint_writer:
        driven(job([]), [part_of(0, 0), part_of(0, 1), part_of(1, 0)], checkpoint_writer)
    state = CheckpointManager(folder_at(str(tmp_path))).latest().state
    again = dataclasses.replace(job([], **change), state=state)
    assert ServerModel(again, ROWS).ledgers(1) == [{}] and pending_parts(again) == []
    workers = range(again.config.num_workers)
    logs, _, _ = driven(again, [part_of(rank, epoch) for epoch in range(2) for rank in workers])
    assert [one["loss"] for one in logs] == pytest.approx([9.0 if len(workers) == 1 else 8.5])


@pytest.mark.parametrize("frequency", ["batch", 2])
def test_rate_when_a_callback_multiplies_it_at_begins_of_epochs_and_the_fit_goes_on_then_is_that_of_a_whole_fit(
    tmp_path, frequency
):
    def halving():
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        return job([scheduler], frequency=frequency)

    parts = [part_of(rank, epoch) for epoch in range(4) for rank in range(2)]
    whole, servers, _ = driven(halving(), parts)
    assert servers.rates == pytest.approx([0.05, 0.025, 0.0125, 0.00625])
    rates = [logs["learning_rate"] for logs in whole]
    with contextlib.closing(CheckpointWriter(CheckpointManager(folder_at(str(tmp_path))))) as checkpoint_writer:
        driven(halving(), parts[:4], checkpoint_writer)
    state = CheckpointManager(folder_at(str(tmp_path))).latest().state
    again, servers, _ = driven(dataclasses.replace(halving(), state=state), parts[4:])
    assert [logs["learning_rate"] for logs in again] == pytest.approx(rates[2:])
    # Workers with optimizers of their own have the compiled rate.
    assert servers.rates == pytest.approx([0.00625] if frequency == "batch" else [0.0125, 0.00625])


class Pushed(Servers):
    """Servers whose log of pushes a test writes: the last step of each partition, at each server."""

    def __init__(self, model):
        super().__init__(model)
        self.positions = [{}, {}]

    def keep(self, wanted=None):
        ledgers = tuple({rank: (step, 0, 0) for rank, step in one.items()} for one in self.positions)
        return dataclasses.replace(super().keep(), ledgers=ledgers)

    def stop(self):
        """Workers hear of it."""

    def open_epochs(self, count):
        """Nobody waits."""


class States:
    """The states that were kept."""

    def __init__(self):
        self.all = []

    def keep(self, state):
        self.all.append(state)


def started(rank, rows):
    return Started(rank=rank, host="h", device="CPU", threads=1, training_rows=rows, validation_rows=0)


def places_of_states(epochs, servers, states, *positions):
    """Returns the places of states that are made where servers have these positions, and the driver looks twice."""
    servers.positions, before = list(positions), len(states.all)
    epochs.note(StepEnded(rank=0, epoch=0, step=1, steps=2, logs={}))
    for _ in range(2):
        epochs.keep_up()
    return [(state.epochs, state.step) for state in states.all[before:]]


WISHES = {
    "at their own pace": ({}, [(0, 1)]),
    "in rounds at one server": ({"mode": "synchronous", "aggregation": "server"}, [(0, 1)]),
    # They may be in different rounds.
    "in rounds at two servers": (
        {
            "mode": "synchronous",
            "aggregation": "server",
            "asynchronous": AsynchronousOptions(parameter_servers=2),
        },
        [],
    ),
}


@pytest.mark.parametrize("kind", WISHES)
def test_state_when_somebody_wants_one_then_is_made_at_once_where_it_would_be_exact(kind):
    options, expected = WISHES[kind]
    work, states = job([], **options), States()
    model = ServerModel(work, ROWS)
    servers = Pushed(model)
    epochs = DriverEpochs(work, model, servers, states)
    epochs.begin()
    for rank in range(2):
        epochs.note(started(rank, 10))
    assert places_of_states(epochs, servers, states, {0: 1}, {0: 1}) == []
    epochs.keep_up(is_wanted=True)
    assert [(state.epochs, state.step) for state in states.all] == expected
    assert places_of_states(epochs, servers, states, {0: 1, 1: 1}, {0: 1, 1: 1}) == []
    for rank in range(2):
        epochs.add(part_of(rank, 0))
    assert states.all[-1].epochs == 1


def test_states_when_seconds_have_passed_then_lie_where_workers_are_and_only_where_they_have_moved():
    work = job([plateau()], checkpoint_seconds=1e-9, checkpoint_epochs=100)
    model, states = ServerModel(work, ROWS), States()
    servers = Pushed(model)
    epochs = DriverEpochs(work, model, servers, states)

    def places(*positions):
        return places_of_states(epochs, servers, states, *positions)

    epochs.begin()
    epochs.keep_up()
    # Epochs of two steps and of three.
    epochs.note(started(0, 10))
    epochs.note(started(1, 15))
    assert places({}, {}) == []
    assert places({0: 1}, {0: 1, 1: 1}) == [(0, 1)]
    assert places({0: 1, 1: 1}, {0: 1, 1: 1}) == [(0, 2)]
    assert places({0: 1, 1: 1}, {0: 1, 1: 1}) == []
    epochs.add(part_of(0, 0))
    assert places({0: 3, 1: 2}, {0: 3, 1: 2}) == [(0, 5)]
    assert [one["rank"] for one in states.all[-1].facts["parts"]] == [0] and states.all[-1].facts["begun"]
    # All have ended the epoch, of which the driver is about to hear.
    assert places({0: 3, 1: 3}, {0: 3, 1: 3}) == []
    epochs.keep_up(is_wanted=True)
    epochs.add(part_of(1, 0))
    assert states.all.pop().epochs == 1
    assert places({0: 3, 1: 4}, {0: 4, 1: 4}) == [(1, 2)]
    assert states.all[-1].history["loss"] == pytest.approx([6.0])

    epochs.stop()
    assert places({0: 4, 1: 4}, {0: 4, 1: 4}) == []
    again = dataclasses.replace(work, state=states.all[-1])
    epochs = DriverEpochs(again, ServerModel(again, ROWS), servers, states)
    epochs.begin()
    epochs.note(started(0, 10))
    # Nobody knows yet how long the other one's epochs are.
    assert places({0: 4, 1: 4}, {0: 4, 1: 4}) == []
    epochs.note(started(1, 15))
    assert places({0: 4, 1: 4}, {0: 4, 1: 4}) == [(1, 3)]


class Opened(Servers):
    """Servers of a fit in rounds, and what they were asked for, in its order."""

    def __init__(self, model):
        super().__init__(model)
        self.asked = []

    def open_epochs(self, count):
        self.asked.append(count)

    def set_rate(self, rate):
        self.asked.append(f"rate {rate:g}")

    def keep(self, wanted=None):
        self.asked.append("keep")
        return super().keep()


def test_epochs_when_workers_train_in_rounds_then_each_begins_after_the_callbacks_and_the_checkpoint(tmp_path):
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5**epoch)
    model = regression_model(keras.optimizers.SGD(1.0))
    work = job_for(
        model,
        aggregation="server",
        num_workers=2,
        epochs=2,
        batch_size=5,
        checkpoint_path="kept",
        callbacks=[scheduler],
    )
    driven_model = ServerModel(work, ROWS)
    servers = Opened(driven_model)
    with contextlib.closing(CheckpointWriter(CheckpointManager(folder_at(str(tmp_path))))) as checkpoint_writer:
        epochs = DriverEpochs(work, driven_model, servers, checkpoint_writer)
        epochs.begin()
        for epoch in range(2):
            for rank in range(2):
                epochs.add(part_of(rank, epoch))
    assert servers.asked[:4] == [1, "rate 0.5", "keep", 2] and "keep" in servers.asked[4:]
