"""A fit of a model in stages, whose ranks are threads, against one process of plain Keras."""

import pickle
import signal
import time
from dataclasses import replace

import keras
import numpy as np
import pytest
from keras_reference import (
    VICTIM,
    Signals,
    classifier_data,
    fit_one_process,
    global_batches,
    job_for,
    largest_difference,
    split,
)
from pyspark import cloudpickle
from rank_pool import RankError, Recording, places_of
from rank_threads import run_threads

from elephant.data.epoch_plan import random_state
from elephant.data.schema import SCALAR, Field
from elephant.data.shard import Shard
from elephant.errors import UnsupportedError
from elephant.rank.job import epoch_plan
from elephant.rank.staged import train_staged, with_weights_on_disk
from elephant.rank.synchronous import train_rank
from elephant.storage.filesystem import WORK_FOLDER

pytestmark = pytest.mark.usefixtures("by_value")

PATIENCE_S = 8.0


def deep_model(optimizer=None, loss="mse", **compiled):
    """Returns a model of four layers, of which one is regularized, whose first weights are always the same."""
    layers = [keras.layers.Dense(8, "tanh", name=f"hidden{number}") for number in range(2)]
    layers += [keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01), name="regular")]
    model = keras.Sequential([keras.layers.Input((6,)), *layers, keras.layers.Dense(1, name="head")])
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=weight.shape, scale=0.4) for weight in model.get_weights()])
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, **{"metrics": ["mae"], **compiled})
    return model


def staged_job(model, *, num_ranks, **options):
    shared = {"epochs": 2, "batch_size": 8, "shuffle": False, "pipeline_stages": ["regular"], "micro_batches": 3}
    return job_for(model, num_workers=num_ranks, **{**shared, **options})


def fit_in_stages(job, parts, folder):
    """Trains ranks in threads; returns their recordings.

    Args:
        parts: Columns of each rank.
    """
    places = places_of(job, parts, folder)
    block = cloudpickle.dumps(job)

    def live(world):
        own, place, recording = pickle.loads(block), places[world.rank], Recording()
        shard = Shard(None if place["shard"] is None else folder / str(world.rank), own.schema, place["row_shapes"])
        plan = epoch_plan(own, place["num_rows"], place["num_marked"])
        train = train_rank if own.config.pipeline_stages is None else train_staged
        train(own, shard, plan, world, recording)
        return recording

    return run_threads(len(parts), live)


def of_replicas(parts, num_replicas):
    """Returns the rows of each replica: those of its ranks, by rank."""
    return [
        {name: np.concatenate([part[name] for part in parts[replica::num_replicas]]) for name in parts[0]}
        for replica in range(num_replicas)
    ]


def test_fit_when_a_model_is_in_stages_then_equals_one_process(tmp_path):
    sizes = (9, 0, 14, 20)
    total = sum(sizes)
    rng = np.random.default_rng(3)
    marked = rng.permutation(np.arange(total) < 7)
    columns = {**classifier_data(total), "validation": marked, "weight": rng.uniform(0, 2, total).astype("float32")}
    parts = split(columns, sizes)
    job = staged_job(deep_model(), num_ranks=4, indicated=True, weighted=True)
    recordings = fit_in_stages(job, parts, tmp_path)
    trained = [{name: part[name][~part["validation"]] for name in part} for part in of_replicas(parts, 2)]
    expected, history = fit_one_process(deep_model(), list(global_batches(trained, 8, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5
    for metric, values in history.items():
        np.testing.assert_allclose([logs[metric] for logs in recordings[0].epochs], values, rtol=1e-5)
    model = deep_model()
    model.set_weights(expected)
    x, y, weight = (columns[name][marked] for name in ("features", "label", "weight"))
    found = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    for metric, value in found.items():
        np.testing.assert_allclose(recordings[0].epochs[-1][f"val_{metric}"], value, rtol=1e-4)


@pytest.mark.slow("three fits; tests/training/test_pipeline.py goes on with other cuts")
def test_fit_when_it_goes_on_from_a_checkpoint_with_other_cuts_or_none_then_equals_one_process(tmp_path):
    model, columns = deep_model(), classifier_data(30)
    (tmp_path / "first").mkdir()
    job = staged_job(model, num_ranks=2, checkpoint_path="kept")
    states = fit_in_stages(job, split(columns, (11, 19)), tmp_path / "first")[0].states
    assert [state.epochs for state in states] == [1, 2]
    reference = deep_model()
    history = reference.fit(columns["features"], columns["label"], 8, epochs=3, shuffle=False, verbose=0).history
    expected = [*reference.get_weights(), *(np.array(one) for one in reference.optimizer.variables)]
    for stages, sizes in ((["hidden1", "head"], (10, 0, 20)), (None, (30,))):
        going_on = {"checkpoint_path": "kept", "pipeline_stages": stages, "micro_batches": 8, "epochs": 3}
        job = replace(staged_job(model, num_ranks=len(sizes), **going_on), state=states[0])
        (tmp_path / str(len(sizes))).mkdir()
        found = fit_in_stages(job, split(columns, sizes), tmp_path / str(len(sizes)))[0]
        assert largest_difference(found.variables, expected) <= 1e-5
        np.testing.assert_allclose([logs["mae"] for logs in found.epochs], history["mae"][1:], rtol=1e-4)


def trained_before():
    model = deep_model()
    model.fit(*(classifier_data(16)[name] for name in ("features", "label")), 8, epochs=2, shuffle=False, verbose=0)
    return model


def test_fit_when_no_rank_has_the_whole_model_then_goes_on_with_its_weights_and_its_optimizer(tmp_path, monkeypatch):
    monkeypatch.setenv(WORK_FOLDER, str(tmp_path))
    columns = classifier_data(30)
    job = with_weights_on_disk(staged_job(trained_before(), num_ranks=3, pipeline_stages=3))
    assert len(job.model.archive) < job.model.weights_file.stat().st_size
    found = fit_in_stages(job, split(columns, (10, 0, 20)), tmp_path)[0]
    reference = trained_before()
    reference.fit(columns["features"], columns["label"], 8, epochs=2, shuffle=False, verbose=0)
    assert len(found.variables) == len(reference.weights)
    assert largest_difference(found.variables, reference.get_weights()) <= 1e-5


def test_job_when_somebody_looks_at_the_model_before_the_end_then_keeps_it_whole():
    for options in ({"checkpoint_path": "kept"}, {"callbacks": [Notes()]}):
        job = staged_job(deep_model(), num_ranks=2, **options)
        assert with_weights_on_disk(job) is job


class Notes(keras.callbacks.Callback):
    """Takes notes of what it hears and sees: numbers."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def on_train_batch_end(self, batch, logs=None):
        self.noted.append([batch])

    def on_test_end(self, logs=None):
        self.noted.append([float(logs["loss"])])

    def on_epoch_end(self, epoch, logs=None):
        weights = [float(np.sum(np.array(weight))) for weight in self.model.weights]
        iterations = int(self.model.optimizer.iterations)
        self.noted.append([iterations, float(logs["val_loss"]), *weights])

    def get_state(self):
        return {"noted": np.concatenate(self.noted)}


def deciding():
    """Returns callbacks that decide about training, and one that takes notes of it."""
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    # Far too large in the third epoch.
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.4 if epoch == 2 else rate)
    return [rates, stop, Notes()]


def test_callbacks_when_a_model_is_in_stages_then_see_and_decide_what_they_do_in_one_process(tmp_path):
    model, columns = deep_model(keras.optimizers.SGD(0.05, momentum=0.5)), classifier_data(40)
    columns |= {"label": (columns["label"] > 0).astype("int32"), "validation": np.arange(40) >= 29}
    weights = {0: 1.0, 1: 3.0}
    job = staged_job(
        model,
        num_ranks=2,
        epochs=6,
        callbacks=deciding(),
        indicated=True,
        label_dtype="int32",
        checkpoint_path="kept",
    )
    job = replace(job, class_weight=weights)
    found = fit_in_stages(job, split(columns, (25, 15)), tmp_path)[0]
    reference, callbacks = deep_model(keras.optimizers.SGD(0.05, momentum=0.5)), deciding()
    x, y = columns["features"], columns["label"]
    history = reference.fit(
        x[:29],
        y[:29],
        8,
        epochs=6,
        shuffle=False,
        verbose=0,
        validation_data=(x[29:], y[29:]),
        validation_batch_size=8,
        class_weight=weights,
        callbacks=callbacks,
    ).history
    expected = reference.get_weights()
    assert len(found.epochs) == len(history["loss"]) < 6
    assert largest_difference(found.variables[: len(expected)], expected) <= 1e-5
    for metric, values in history.items():
        np.testing.assert_allclose([logs[metric] for logs in found.epochs], values, rtol=1e-4)
    noted = found.states[-1].arrays[found.states[-1].facts["callbacks"][2]["values"]["noted"]["array"]]
    np.testing.assert_allclose(noted, np.concatenate(callbacks[2].noted), rtol=1e-3)


def two_ends():
    """Returns a model with two outputs, of which one ends in the first stage, and another one's layers add losses."""
    inputs = keras.Input((6,), name="features")
    x = keras.layers.Dense(8, "tanh", name="hidden0", activity_regularizer=keras.regularizers.L2(0.01))(inputs)
    early = keras.layers.Dense(1, name="early")(x)
    y = keras.layers.Dense(8, "tanh", name="hidden1")(x)
    model = keras.Model(inputs, {"early": early, "late": keras.layers.Dense(1, name="late")(y)})
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=weight.shape, scale=0.4) for weight in model.get_weights()])
    # R2Score makes what it counts with when it first counts.
    model.compile("sgd", {"early": "mae", "late": "mse"}, metrics={"late": ["r2_score"], "early": ["mse"]})
    return model


@pytest.mark.slow("four ranks; the first test has one without rows, tests/training/test_pipeline.py two outputs")
def test_fit_when_a_replica_has_no_rows_and_there_are_two_outputs_then_equals_one_process(tmp_path):
    columns = classifier_data(24)
    x, y = columns["features"], {"early": 2 * columns["label"], "late": columns["label"]}
    marked = np.arange(24) >= 16
    job = staged_job(two_ends(), num_ranks=4, indicated=True, pipeline_stages=["hidden1"])
    schema = replace(
        job.schema, labels=tuple(Field(name, (name,), "float32", SCALAR) for name in y), y={"early": 0, "late": 1}
    )
    parts = split({"features": x, **y, "validation": marked}, (0, 10, 0, 14))
    found = fit_in_stages(replace(job, schema=schema), parts, tmp_path)[0]
    reference = two_ends()
    history = reference.fit(
        x[:16],
        {name: label[:16] for name, label in y.items()},
        8,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x[16:], {name: label[16:] for name, label in y.items()}),
    ).history
    expected = reference.get_weights()
    assert largest_difference(found.variables[: len(expected)], expected) <= 1e-5
    assert set(found.epochs[0]) == set(history)
    for metric, values in history.items():
        np.testing.assert_allclose([logs[metric] for logs in found.epochs], values, rtol=1e-4)


def dropping():
    """Returns a model that drops units in both of its stages."""
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Dropout(0.5, name="drop0")]
    layers += [keras.layers.Dense(4, name="second"), keras.layers.Dropout(0.5, name="drop1")]
    model = keras.Sequential([keras.layers.Input((6,)), *layers, keras.layers.Dense(1, name="head")])
    model.compile("sgd", "mse")
    return model


def test_random_numbers_when_a_model_is_in_stages_then_each_replica_draws_its_own_in_the_order_of_the_whole(tmp_path):
    parts = split(classifier_data(32), (8, 8, 8, 8))
    job = staged_job(dropping(), num_ranks=4, epochs=1, pipeline_stages=["second"], checkpoint_path="kept", seed=5)
    (state,) = fit_in_stages(job, parts, tmp_path)[0].states
    assert not any(name.startswith("random/2/") for name in state.arrays)
    # PyTorch has no integers of 32 bits without a sign.
    states = [
        [state.arrays[f"random/{replica}/drop{place}/seed_generator_state"] % 2**32 for place in range(2)]
        for replica in range(2)
    ]
    # The second number counts draws: three micro-batches in each of two steps. PyTorch's dropout has its own generator.
    draws = 0 if keras.backend.backend() == "torch" else 6
    for place in range(2):
        key, drawn = random_state(5, 1, place).tolist()
        assert states[1][place].tolist() == [key, drawn + draws]
    assert [own[1] for own in states[0]] == [draws, draws] and states[0][0][0] != states[0][1][0]


def test_fit_when_a_stage_is_killed_then_the_others_name_it_in_seconds(rank_pool, tmp_path):
    callbacks = [Signals(str(tmp_path), signal.SIGKILL)]
    job = staged_job(deep_model(), num_ranks=3, batch_size=4, pipeline_stages=["hidden1", "head"], callbacks=callbacks)
    with pytest.raises(RankError) as failed:
        rank_pool.fit(job, split(classifier_data(60), (20, 20, 20)))
    assert time.monotonic() - float((tmp_path / "sent").read_text()) < PATIENCE_S
    for place in (0, 2):
        kind, text, _ = failed.value.outcomes[place]
        assert kind == "PeerLostError" and f"lost rank {VICTIM}" in text and "its process died" in text


def rows_together(labels, outputs):
    return keras.ops.mean(keras.ops.square(outputs - keras.ops.mean(labels)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (deep_model(loss=rows_together), "loss: expected the mean over the rows of a batch"),
        (deep_model(loss=keras.losses.MeanSquaredError(reduction="sum")), "reduction='sum_over_batch_size'"),
    ],
)
def test_fit_when_losses_of_micro_batches_do_not_add_up_then_says_so(model, words, tmp_path):
    with pytest.raises(UnsupportedError, match=words):
        fit_in_stages(staged_job(model, num_ranks=2), split(classifier_data(20), (12, 8)), tmp_path)
