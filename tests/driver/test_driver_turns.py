"""Callbacks on the driver of a synchronous fit: which ones, what they see and ask for, and what a checkpoint keeps."""

import json
import threading

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, job_for, regression_model

from elephant.checkpoint.state import FitState
from elephant.data.schema import RowSpec, TensorSpec
from elephant.driver.driver_turns import SynchronousEpochs
from elephant.errors import UnsupportedError
from elephant.modeling.variables import read_variables
from elephant.monitor.events import CallbacksDue, EpochEnded
from elephant.rank.callbacks.callback_rules import Place, place_of
from elephant.rank.job import NUMBERS, WEIGHTS
from elephant.testing import fit_local

ROWS = RowSpec(0, (TensorSpec((6,), "float32"),))


class Halves(keras.callbacks.Callback):
    """Puts a number into the logs, by which another one decides."""

    def on_epoch_end(self, epoch, logs=None):
        logs["half"] = logs["loss"] / 2 if epoch == 0 else 1e3


class Meddles(keras.callbacks.Callback):
    """Looks at epochs alone, changes weights and the learning rate, and stops; what it has seen stays with it."""

    def __init__(self):
        super().__init__()
        # Cannot be pickled: nothing of it may travel.
        self.lock = threading.Lock()
        self.seen = []

    def on_train_begin(self, logs=None):
        self.model.optimizer.learning_rate = 0.02
        self.seen.append("train begins")

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(("begins", epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(("ends", epoch, logs["loss"], float(np.sum(self.model.get_weights()[0]))))
        if epoch == 0:
            self.model.set_weights([value * 0.5 for value in self.model.get_weights()])
        if epoch == 1:
            self.model.optimizer.learning_rate = 0.3
        self.model.stop_training = epoch == 2

    def on_train_end(self, logs=None):
        self.seen.append("train ends")


def flat(seen):
    return [list(one) if isinstance(one, tuple) else [one] for one in seen]


def test_callbacks_when_they_run_on_the_driver_then_do_to_a_fit_what_they_do_in_one_process(tmp_path, warm_ranks):
    # What a TensorBoard callback writes, it writes with TensorFlow.
    context = pytest.importorskip("tensorflow.python.eager.context")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensors = pytest.importorskip("tensorboard.util.tensor_util")
    data, model = classifier_data(40), regression_model(keras.optimizers.Adam(0.1))
    path = str(tmp_path / "log.csv")

    def callbacks():
        return [Meddles(), keras.callbacks.CSVLogger(path), keras.callbacks.ModelCheckpoint(str(tmp_path / "m.keras"))]

    ours, devices = callbacks(), []
    # A GPU of the driver is for ranks.
    ours.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: devices.append(context.context().device_name)))
    ours.append(keras.callbacks.TensorBoard(str(tmp_path / "board")))
    history, trained = fit_local(model, data["features"], data["label"], epochs=5, batch_size=20, callbacks=ours)
    logged = [line.split(",") for line in open(path).read().splitlines()]
    board = events.EventAccumulator(str(tmp_path / "board" / "train")).Reload()
    drawn = [float(tensors.make_ndarray(one.tensor_proto)) for one in board.Tensors("epoch_loss")]
    np.testing.assert_allclose(drawn, history["loss"], rtol=1e-6)
    saved = keras.models.load_model(tmp_path / "m.keras")

    copy, theirs = keras.models.clone_model(model), callbacks()
    copy.set_weights(model.get_weights())
    copy.compile_from_config(model.get_compile_config())
    expected = copy.fit(
        data["features"], data["label"], batch_size=40, shuffle=False, epochs=5, verbose=0, callbacks=theirs
    )
    assert len(history["loss"]) == 3 and all(name.endswith("CPU:0") for name in devices)
    np.testing.assert_allclose(history["loss"], expected.history["loss"], rtol=1e-5)
    for value, wanted in zip(trained.get_weights(), copy.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-6)
    assert [one[:2] for one in flat(ours[0].seen)] == [one[:2] for one in flat(theirs[0].seen)]
    numbers = [[one[2:] for one in flat(meddles.seen) if len(one) == 4] for meddles in (ours[0], theirs[0])]
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-5, atol=1e-6)
    assert [line[0] for line in logged] == ["epoch", "0", "1", "2"]
    np.testing.assert_allclose([float(line[1]) for line in logged[1:]], expected.history["loss"], rtol=1e-5)
    for value, wanted in zip(saved.get_weights(), copy.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-6)
    assert int(saved.optimizer.iterations) == 3


def test_callback_when_it_raises_on_the_driver_then_the_fit_ends_with_its_own_error(warm_ranks):
    class PrunedError(Exception):
        """As trackers raise them: no error of a worker."""

    def prune(epoch, logs):
        raise PrunedError(epoch)

    data = classifier_data(8)
    with pytest.raises(PrunedError, match="0"):
        fit_local(
            regression_model("sgd"),
            data["features"],
            data["label"],
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=prune)],
        )
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("elephant")]


class OfEpochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        """Looks at epochs alone."""


class OfBatches(OfEpochs):
    def on_test_batch_end(self, batch, logs=None):
        """Looks at batches too."""


class OfTracker(OfBatches):
    """A callback of a package that logs to a run of the user's."""

    __module__ = "mlflow.keras.callback"


class Uploading(keras.callbacks.ModelCheckpoint):
    """A callback of such a package, with an event of batches for those who ask for it."""

    __module__ = "wandb.integration.keras.callbacks.model_checkpoint"

    def on_train_batch_end(self, batch, logs=None):
        """Nothing, at this frequency."""


ON_DRIVER = {
    "a logger of Keras": (keras.callbacks.CSVLogger("log.csv"), True),
    "functions on epochs": (keras.callbacks.LambdaCallback(on_epoch_end=print), True),
    "functions on batches": (keras.callbacks.LambdaCallback(on_train_batch_end=print), False),
    "a model every epoch": (keras.callbacks.ModelCheckpoint("m.keras"), True),
    "a model every 5 batches": (keras.callbacks.ModelCheckpoint("m.keras", save_freq=5), False),
    "a board of epochs": (keras.callbacks.TensorBoard("logs"), True),
    "a board of batches": (keras.callbacks.TensorBoard("logs", update_freq=3), False),
    # Profiles are TensorFlow's.
    **(
        {"a profile": (keras.callbacks.TensorBoard("logs", profile_batch=3), False)}
        if keras.config.backend() == "tensorflow"
        else {}
    ),
    "the end of a fit": (keras.callbacks.EarlyStopping(), False),
    "the learning rate": (keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate), False),
    "a class of epochs": (OfEpochs(), True),
    "a class of batches": (OfBatches(), False),
    "a tracker's": (OfTracker(), True),
    "a tracker's model every epoch": (Uploading("m.keras"), True),
    "a tracker's model every 5 batches": (Uploading("m.keras", save_freq=5), False),
}


@pytest.mark.parametrize("kind", ON_DRIVER)
def test_callback_when_it_looks_at_epochs_alone_and_decides_nothing_then_runs_on_the_driver(kind):
    callback, expected = ON_DRIVER[kind]
    assert (place_of(callback) is Place.DRIVER) == expected


def due(epoch, model=None, **fields):
    return CallbacksDue(
        rank=0,
        epoch=epoch,
        steps=4,
        logs=fields.get("logs", {"loss": 1.0}),
        stopped=fields.get("stopped", False),
        learning_rate=0.25,
        iterations=7,
        rows=json.loads(json.dumps(ROWS.to_json())),
        row_shapes={},
        arrays=() if model is None else read_variables(model),
    )


def test_turn_when_callbacks_need_numbers_alone_then_see_rate_and_steps_of_rank_0_and_no_weights():
    seen = []
    board = keras.callbacks.CSVLogger("unused.csv")
    board.on_train_begin = board.on_train_end = lambda logs=None: None
    board.on_epoch_end = lambda epoch, logs: seen.append(
        (float(board.model.optimizer.learning_rate), int(board.model.optimizer.iterations))
    )
    turns = SynchronousEpochs(job_for(regression_model("sgd"), callbacks=[board, keras.callbacks.EarlyStopping()]))
    there = turns.job_of_ranks()
    assert turns.told == there.driver_reads == NUMBERS
    assert turns.places() == "callbacks: CSVLogger on the driver; EarlyStopping on the workers"
    assert [type(one) for one in there.callbacks] == [keras.callbacks.Callback, keras.callbacks.EarlyStopping]
    assert turns.take_turn(due(None)).arrays == ()
    assert (board.params["steps"], board.params["epochs"]) == (4, 1)
    turns.take_turn(due(0))
    assert seen == [(0.25, 7)]


def test_epoch_when_workers_have_stopped_then_no_other_one_begins_on_the_driver():
    begun = []
    turns = SynchronousEpochs(
        job_for(
            regression_model("sgd"),
            epochs=5,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))],
        )
    )
    assert turns.told == WEIGHTS
    turns.take_turn(due(None))
    turns.take_turn(due(0))
    turns.take_turn(due(1, stopped=True))
    assert begun == [0, 1]


class Counts(keras.callbacks.Callback):
    """Remembers how many epochs it has seen."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_epoch_end(self, epoch, logs=None):
        self.count += 1

    def get_state(self):
        return {"count": self.count, "marks": np.arange(self.count)}

    def set_state(self, state):
        self.count = state["count"] * 10 + len(state["marks"])


def test_state_when_a_fit_goes_on_then_callbacks_on_the_driver_have_theirs_and_workers_keep_their_own():
    stopping, counts, added = keras.callbacks.EarlyStopping("loss"), Counts(), Counts()
    job = job_for(regression_model("sgd"), epochs=5, callbacks=[stopping, counts])
    job = type(job)(**{**vars(job), "driver_callbacks": (added,)})
    turns = SynchronousEpochs(job)
    turns.take_turn(due(None))
    turns.take_turn(due(0))
    of_ranks = FitState(
        epochs=1, facts={"callbacks": [{"class": "EarlyStopping", "values": {}}, {"class": "Callback", "values": {}}]}
    )
    state = turns.with_states(of_ranks)
    assert [one["class"] for one in state.facts["callbacks"]] == ["EarlyStopping", "Counts", "Counts"]
    later = [Counts(), Counts()]
    again = type(job)(**{**vars(job), "callbacks": (stopping, later[0]), "driver_callbacks": (later[1],)})
    turns = SynchronousEpochs(type(again)(**{**vars(again), "state": state}))
    turns.take_turn(due(None))
    assert [one.count for one in later] == [11, 11]


def test_rate_when_a_callback_halves_it_at_begins_of_epochs_and_the_fit_goes_on_then_is_halved_once_for_each():
    class Halving(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.5 * self.model.optimizer.learning_rate

    def turns_of(state=None):
        job = job_for(regression_model("sgd"), epochs=3, callbacks=[Halving()])
        return SynchronousEpochs(type(job)(**{**vars(job), "state": state}))

    def kept(epochs):
        return turns.with_states(FitState(epochs=epochs, facts={"callbacks": [{"class": "Callback", "values": {}}]}))

    turns = turns_of()
    # Each time, rank 0 tells its own rate first.
    assert [turns.take_turn(due(epoch)).learning_rate for epoch in (None, 0)] == [0.125, 0.125]
    state = kept(1)
    for epoch in (1, 2):
        turns.take_turn(due(epoch))
    # The last one's end begins none.
    assert [one.facts["begun"] for one in (state, kept(3))] == [True, False]
    again = turns_of(state)
    assert [again.take_turn(due(epoch)).learning_rate for epoch in (None, 1)] == [None, 0.125]


def test_epochs_when_the_driver_hears_of_them_at_the_end_then_loggers_see_all_and_a_wish_to_stop_is_warned_of():
    seen, lambdas = [], keras.callbacks.LambdaCallback
    model = regression_model("sgd")

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    looks = OfEpochs()
    job = job_for(
        model, epochs=2, callbacks=[looks, lambdas(on_epoch_end=lambda epoch, logs: seen.append((epoch, dict(logs))))]
    )
    turns = SynchronousEpochs(type(job)(**{**vars(job), "driver_callbacks": (Stops(),)}), replayed=True)
    there = turns.job_of_ranks()
    # What may look at weights has to see them while they are there.
    assert turns.told is None and type(there.callbacks[0]) is OfEpochs
    trained = [value + 1.0 for value in read_variables(model)]
    epochs = [EpochEnded(rank=0, epoch=epoch, logs={"loss": 2.0 - epoch}) for epoch in range(2)]
    with pytest.warns(UserWarning, match="executors do not reach the driver"):
        after = turns.end(trained, ROWS, epochs)
    turns.close()
    assert seen == [(0, {"loss": 2.0}), (1, {"loss": 1.0})]
    for value, wanted in zip(after, trained, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_callbacks_when_they_decide_by_numbers_of_one_of_the_user_s_or_by_the_model_s_metrics_then_do_as_in_one_process(
    tmp_path, warm_ranks
):
    data, model = classifier_data(40), regression_model(keras.optimizers.SGD(0.01), metrics=["mae"])
    best = keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor="mae", save_best_only=True)
    stop = keras.callbacks.EarlyStopping("half", mode="min", patience=1, restore_best_weights=True)
    history, trained = fit_local(
        model, data["features"], data["label"], epochs=6, batch_size=20, callbacks=[best, Halves(), stop]
    )
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile_from_config(model.get_compile_config())
    stop = keras.callbacks.EarlyStopping("half", mode="min", patience=1, restore_best_weights=True)
    expected = copy.fit(
        data["features"], data["label"], batch_size=40, epochs=6, shuffle=False, verbose=0, callbacks=[Halves(), stop]
    )
    assert len(history["loss"]) == len(expected.history["loss"]) == 2
    np.testing.assert_allclose(history["half"], expected.history["half"], rtol=1e-5)
    for value, wanted in zip(trained.get_weights(), copy.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-6)
    assert best.best == pytest.approx(min(history["mae"]))


def test_turn_when_a_callback_sets_the_rate_of_another_optimizer_then_says_that_it_does_not_travel():
    class Two(keras.Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.dense, self.other = keras.layers.Dense(1), keras.optimizers.SGD(0.5)

        def call(self, rows):
            return self.dense(rows)

    def build():
        model = Two()
        model.compile("sgd", "mse")
        return model

    class Sets(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.other.learning_rate = 0.1

    turns = SynchronousEpochs(job_for(build, callbacks=[Sets()]))
    turns.take_turn(due(None))
    with pytest.raises(UnsupportedError, match="another rate of another optimizer"):
        turns.take_turn(due(0))
    turns.close()


def test_callback_when_two_fits_have_it_at_once_then_the_second_has_a_copy():
    counts = Counts()
    first, second = (SynchronousEpochs(job_for(regression_model("sgd"), callbacks=[counts])) for _ in range(2))
    first.take_turn(due(None))
    second.take_turn(due(None))
    second.take_turn(due(0))
    assert counts.count == 0 and first.callbacks == [counts]
    first.close()
    second.close()
    third = SynchronousEpochs(job_for(regression_model("sgd"), callbacks=[counts]))
    third.take_turn(due(None))
    assert third.callbacks == [counts]
    third.close()


def test_driver_callback_when_it_decides_and_the_driver_hears_of_epochs_at_the_end_then_is_refused():
    job = job_for(regression_model("sgd"))
    job = type(job)(**{**vars(job), "driver_callbacks": (keras.callbacks.EarlyStopping(),)})
    with pytest.raises(UnsupportedError, match="EarlyStopping looks at weights or decides"):
        SynchronousEpochs(job, replayed=True)
