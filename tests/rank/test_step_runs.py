"""Steps that one call takes: each once, of one weight, unless somebody looks at them."""

import time

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, global_batches, job_for, largest_difference, split
from tiers import in_tiers

from elephant.backends import current
from elephant.backends.gradient_averager import GradientAverager
from elephant.collective.communicator import LocalCommunicator
from elephant.data.epoch_plan import EpochPlan
from elephant.errors import DataError
from elephant.monitor.events import RankEpoch
from elephant.rank.keras_fit import FitCallbacks, StepRuns, fit_from
from elephant.rank.rank_progress import RankWeight, StepCounter
from elephant.rank.traced_step import average_gradients, steps_in_runs

RUNS = pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="only TensorFlow's loop takes runs of steps")


def small_model(**options):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], **options)
    return model


class Heard(keras.callbacks.Callback):
    """Keeps what weight and which steps it has heard of."""

    def __init__(self, share):
        super().__init__()
        self.share, self.begun, self.ended = share, [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append((batch, self.share(), self.share.is_idle))

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append((batch, self.share()))


def runs_of(plan, rank, *, epochs, seconds_per_step, first=(0, 0), pause=0):
    """Returns the runs of steps, (epoch, first, count, known rows), and the callback that has heard of them."""
    model, share, taken = keras.Sequential([keras.layers.Dense(1)]), RankWeight(plan, rank, first), []
    share.pause = pause
    model.compile("sgd", "mse")

    def steps(iterator, count, rows):
        taken.append((share.epoch, share.step, count, rows))
        time.sleep(count * seconds_per_step)
        return {"loss": 0.0}

    heard = Heard(share)
    runs = StepRuns([StepCounter(share), heard], model, epochs, steps, share)
    # What Keras' own list tells callbacks.
    assert heard.params == {"verbose": 0, "epochs": epochs, "steps": plan.steps}
    assert model.steps_per_execution == plan.steps
    model.make_train_function()
    runs.on_train_begin()
    # Keras' own evaluation reads it.
    assert model.steps_per_execution == 1
    for epoch in range(first[0], epochs):
        runs.on_epoch_begin(epoch)
        runs.on_train_batch_begin(0)
        model.train_function(iter(()))
        runs.on_train_batch_end(plan.steps - 1)
        assert share.step == plan.steps - 1
    return taken, heard


@pytest.mark.parametrize("steps_per_epoch", [None, 70, 23])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_runs_when_ranks_are_uneven_then_have_each_step_once_and_one_weight_each(rank, steps_per_epoch):
    plan = EpochPlan((103, 150, 0), (0, 0, 0), 4, steps_per_epoch)
    taken, heard = runs_of(plan, rank, epochs=3, seconds_per_step=0.0)
    numbers = [plan.number(epoch, step) for epoch, first, count, _ in taken for step in range(first, first + count)]
    assert numbers == list(range(3 * plan.steps))
    for epoch, first, count, _ in taken:
        run = [plan.number(epoch, step) for step in range(first, first + count)]
        assert len({tuple(plan.rows_at(peer, number) for peer in range(3)) for number in run}) == 1
    assert max(count for _, _, count, _ in taken) > 8
    assert [(batch, weight) for batch, weight, _ in heard.begun] == [
        (first, plan.share_at(rank, plan.number(epoch, first))) for epoch, first, _, _ in taken
    ]
    assert [batch for batch, _ in heard.ended] == [first + count - 1 for _, first, count, _ in taken]


def test_runs_when_a_fit_begins_within_an_epoch_and_somebody_wants_to_look_then_begin_and_end_there():
    plan = EpochPlan((400,), (0,), 4)
    taken, _ = runs_of(plan, 0, epochs=3, seconds_per_step=0.0, first=(1, 37), pause=90)
    steps = [(epoch, step) for epoch, first, count, _ in taken for step in range(first, first + count)]
    assert steps == [(1, step) for step in range(37, 100)] + [(2, step) for step in range(100)]
    assert all(first + count <= 90 or first >= 90 for _, first, count, _ in taken)
    assert max(count for _, _, count, _ in taken) > 8


def test_runs_when_steps_take_long_then_are_one_step_each():
    plan = EpochPlan((40,), (0,), 4)
    taken, _ = runs_of(plan, 0, epochs=1, seconds_per_step=0.06)
    assert [count for _, _, count, _ in taken] == [1] * 10


@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(80, None), (40, 52), (79, None), (38, 52)])
def test_runs_when_a_fit_has_many_whole_batches_then_the_steps_know_their_rows(epochs, steps_per_epoch):
    plan = EpochPlan((102, 34), (0, 0), 4, steps_per_epoch)
    taken, _ = runs_of(plan, 0, epochs=epochs, seconds_per_step=0.0)
    many = epochs in (80, 40)
    for epoch, first, _, known in taken:
        rows = plan.rows_at(0, plan.number(epoch, first))
        assert known == (4 if many and rows == 4 else None)
    assert {known for _, _, _, known in runs_of(plan, 1, epochs=epochs, seconds_per_step=0.0)[0]} == {None}


@RUNS
@pytest.mark.parametrize("looks", [False, True])
def test_steps_when_a_callback_looks_at_batches_then_are_taken_one_by_one(looks):
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: None)] if looks else []
    job = job_for(small_model(), callbacks=callbacks, num_workers=2)
    assert (steps_in_runs(small_model(), job) is None) == looks


@RUNS
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}], ids=str)
def test_steps_when_the_model_says_how_they_are_taken_then_there_are_no_runs(options):
    assert current().steps_function(small_model(**options)) is None


@RUNS
def test_steps_when_the_model_has_a_train_function_of_its_own_then_there_are_no_runs():
    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    model = Own([keras.layers.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert current().steps_function(model) is None


class Traced(keras.Sequential):
    """Tells in its logs whether TensorFlow has rewritten the step, for which it reads the source of the class."""

    def train_step(self, data):
        import tensorflow as tf

        control = tf.__internal__.autograph.control_status_ctx
        logs = super().train_step(data)
        return {**logs, "rewritten": float(control().status.name == "ENABLED")}


def traced_model():
    model = Traced([keras.layers.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@RUNS
def test_step_when_it_is_traced_then_is_not_rewritten_as_in_keras(rank_pool, by_value):
    parts = split(classifier_data(16), (8, 8))
    recordings = rank_pool.fit(job_for(traced_model, epochs=1, batch_size=4), parts)
    assert recordings[0].epochs[0]["rewritten"] == 0.0


@RUNS
def test_steps_when_their_rows_are_known_then_the_graph_is_made_for_them_and_takes_no_others():
    import tensorflow as tf

    seen = []

    class Seeing(keras.Sequential):
        def train_step(self, data):
            seen.append(data[0].shape[0])
            return super().train_step(data)

    def batches(rows):
        signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 1)))
        batch = np.ones((rows, 6), np.float32), np.ones((rows, 1), np.float32)
        return iter(tf.data.Dataset.from_generator(lambda: [batch] * 4, output_signature=signature))

    model = Seeing(small_model().layers)
    model.compile("sgd", "mse")
    steps = current().steps_function(model)
    for known in (None, 4):
        steps(batches(4), 4, known)
        assert set(seen) == {known}
        seen.clear()
    for known in (None, 4):
        steps(batches(4), 2, known)
    assert not seen and int(model.optimizer.iterations.numpy()) == 12
    with pytest.raises(tf.errors.InvalidArgumentError):
        steps(batches(3), 1, 4)


class Places(keras.layers.Layer):
    """Looks each of its own places up once for every row of a batch."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(6, 1)

    def call(self, x):
        return self.table(keras.ops.broadcast_to(keras.ops.arange(6), keras.ops.shape(x)))[..., 0] * x


@RUNS
@pytest.mark.parametrize("has_places", [False, True])
def test_steps_when_places_are_repeated_for_each_row_then_their_graph_leaves_the_rows_open(has_places):
    import tensorflow as tf

    seen = []

    class Seeing(keras.Sequential):
        def train_step(self, data):
            seen.append(data[0].shape[0])
            return super().train_step(data)

    model = Seeing([keras.layers.Input((6,)), *[Places()] * has_places, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    averager = GradientAverager(LocalCommunicator(), lambda: 1.0)
    average_gradients(model, averager)
    batch = np.ones((4, 6), np.float32), np.ones((4, 1), np.float32)
    signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 1)))
    batches = iter(tf.data.Dataset.from_generator(lambda: [batch] * 8, output_signature=signature))
    steps = current().steps_function(model)
    for _ in range(2):
        steps(batches, 4, 4)
    assert seen == ([4, None] if has_places else [4])
    averager.close()


@RUNS
@pytest.mark.parametrize(
    "case",
    in_tiers(
        {"one rank": ((200,), 3), "two ranks": ((201, 137), 3), "forty epochs": ((201, 137), 40)},
        fast=["one rank", "two ranks"],
        slow="many more of the same epochs",
    ),
)
def test_fit_when_steps_are_taken_in_runs_then_equals_one_process_with_each_row_counted_once(rank_pool, case):
    sizes, epochs = case
    parts = split(classifier_data(sum(sizes)), sizes)
    model = small_model()
    expected, history = fit_one_process(model, list(global_batches(parts, 4, epochs)), epochs=epochs)
    job = job_for(model, epochs=epochs, batch_size=4, shuffle=False)
    recordings = rank_pool.fit(job, parts)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5
    for logs, epoch in zip(recordings[0].epochs, range(epochs), strict=True):
        for name in ("loss", "mae"):
            np.testing.assert_allclose(logs[name], history[name][epoch], rtol=1e-4)
    for recording, size in zip(recordings, sizes, strict=True):
        rows = [event.rows for event in recording.sent if isinstance(event, RankEpoch)]
        assert rows == [size] * epochs


class Counted(keras.callbacks.Callback):
    """Keeps the order of all that it has heard of epochs."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def on_train_begin(self, logs=None):
        self.heard.append("begin")

    def on_train_end(self, logs=None):
        self.heard.append("end")

    def on_epoch_begin(self, epoch, logs=None):
        self.heard.append(epoch)


@pytest.mark.parametrize("in_runs", [pytest.param(True, marks=RUNS), False], ids=["in runs", "step by step"])
def test_fit_when_left_at_ends_of_epochs_then_goes_on_with_other_batches_as_one_fit(in_runs):
    model, rng = small_model(), np.random.default_rng(0)
    model.compile(keras.optimizers.Adam(0.05, use_ema=True), "mse", metrics=["mae"])
    batches = [
        {"features": rng.normal(size=(4, 6)).astype("float32"), "label": rng.normal(size=4).astype("float32")}
        for _ in range(12)
    ]
    expected, history = fit_one_process(model, batches, epochs=4)
    plan, counted = EpochPlan((12,), (0,), 4), Counted()
    weight = RankWeight(plan, 0)
    callbacks = [StepCounter(weight), counted]

    def pauses():
        return weight.epoch in (0, 2)

    told = FitCallbacks(callbacks, model, 4, plan.steps, pauses=pauses)
    if in_runs:
        told = StepRuns(callbacks, model, 4, current().steps_function(model), weight, pauses)
    ended = []
    for epoch, last in ((0, 1), (1, 3), (3, 4)):
        parts = batches[3 * epoch : 3 * last]
        rows = keras_rows(parts, in_runs)
        ended.append(fit_from(model, rows, told, epoch, epochs=4, steps=plan.steps))
    assert ended == [False, False, True] and counted.heard == ["begin", 0, 1, 2, 3, "end"]
    assert largest_difference(model.get_weights(), expected) <= 1e-6
    assert model.history.history["mae"] == pytest.approx(history["mae"], rel=1e-5)


def keras_rows(batches, in_runs):
    """Returns batches in a form that Keras takes."""
    tuples = [(batch["features"], batch["label"]) for batch in batches]
    if not in_runs:
        return (batch for batch in tuples)
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(tuple(np.stack(part) for part in zip(*tuples, strict=True)))


@RUNS
def test_fit_when_an_embedding_has_no_row_for_a_number_then_says_which_layer_and_which_numbers_it_takes():
    model = keras.Sequential([keras.layers.Input((1,), dtype="int32"), keras.layers.Embedding(10, 2, name="words")])
    model.compile("sgd", "mse")
    rows = (np.array([[3], [41]]), np.zeros((2, 1, 2)))
    assert np.array_equal(model(np.array([[-1]])), model(np.array([[9]])))
    with pytest.raises(
        DataError, match=r"from 0 to 9 for the layer 'words', an Embedding with input_dim=10\. Received: 41\."
    ) as found:
        fit_from(model, (rows for _ in range(1)), None, 0, epochs=1, steps=1)
    assert found.value.__suppress_context__
    with pytest.raises(TypeError, match="interpreted as an integer"):
        fit_from(model, (rows for _ in range(1)), None, 0, epochs="epochs", steps=1)
