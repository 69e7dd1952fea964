"""N ranks against one process of plain Keras on the same global batches."""

import json
import os

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
    regression_model,
    split,
    two_groups,
)
from own_step import OwnStep
from rank_pool import RankError
from tiers import in_tiers

from elephant import collective
from elephant.backends import current
from elephant.data.epoch_plan import random_rows, row_order
from elephant.modeling.variables import random_generators
from elephant.rank.job import reseed

TOLERANCE = 1e-5
XLA = pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="only TensorFlow's step is cut for XLA")

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw, clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5),
    "adam, accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "sgd, moving average": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5),
    "by variable": two_groups,
}
SIZES = {
    "two even": (24, 24),
    "two ragged": (29, 18),
    "three uneven": (23, 8, 14),
    "three, one empty": (19, 0, 11),
    "three, fewer rows than ranks": (1, 0, 1),
}


# Each kind of optimizer, and each kind of division with two of them: what one does the other does not see.
FAST = {
    "sgd, three, fewer rows than ranks": ("sgd", "three, fewer rows than ranks"),
    "momentum, three, one empty": ("momentum", "three, one empty"),
    "adam, three uneven": ("adam", "three uneven"),
    "adamw, clipped, two ragged": ("adamw, clipped", "two ragged"),
    "by variable, two ragged": ("by variable", "two ragged"),
}
PAIRS = {
    **FAST,
    "adam, accumulated, three, one empty": ("adam, accumulated", "three, one empty"),
    "sgd, moving average, two even": ("sgd, moving average", "two even"),
}


@pytest.mark.parametrize("pair", in_tiers(PAIRS, fast=FAST, slow="another pair of optimizer and sizes"))
def test_weights_when_trained_by_n_ranks_then_equal_one_process(rank_pool, pair):
    optimizer, sizes = OPTIMIZERS[pair[0]], SIZES[pair[1]]
    parts = split(classifier_data(sum(sizes)), sizes)
    model = regression_model(optimizer())
    recordings = rank_pool.fit(job_for(model, epochs=3, batch_size=5, shuffle=False), parts)
    expected, _ = fit_one_process(model, list(global_batches(parts, 5, 3)), epochs=3)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_weights_when_shuffled_with_weights_and_l2_then_equal_one_process(rank_pool):
    sizes = (21, 13)
    columns = classifier_data(sum(sizes))
    columns["weight"] = np.random.default_rng(3).uniform(0, 2, sum(sizes)).astype("float32")
    parts = split(columns, sizes)
    model = regression_model(keras.optimizers.Adam(0.01), l2=0.05)
    recordings = rank_pool.fit(job_for(model, epochs=3, batch_size=4, shuffle=True, seed=11, weighted=True), parts)

    def order(epoch, rank, rows):
        return row_order(11, epoch, rank, rows, shuffle=True)

    expected, _ = fit_one_process(model, list(global_batches(parts, 4, 3, order)), epochs=3)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_history_when_ranks_are_uneven_then_equals_one_process(rank_pool):
    sizes = (23, 8, 0)
    columns = classifier_data(sum(sizes))
    columns["label"] = np.eye(3, dtype="float32")[np.arange(sum(sizes)) % 3]
    parts = split(columns, sizes)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, "softmax")])
    # The last one has a value per class.
    metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
    metrics.append(keras.metrics.F1Score())
    model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy", metrics=metrics)
    job = job_for(model, epochs=2, batch_size=5, shuffle=False, label_array=True)
    recordings = rank_pool.fit(job, parts)
    _, history = fit_one_process(model, list(global_batches(parts, 5, 2)), epochs=2)
    assert np.shape(recordings[0].epochs[0]["f1_score"]) == (3,)
    # No checkpoints are asked for.
    assert recordings[0].states == []
    for epoch, logs in enumerate(recordings[0].epochs):
        assert set(logs) == set(history)
        for name, values in history.items():
            np.testing.assert_allclose(logs[name], np.array(values[epoch]), rtol=0, atol=1e-5, err_msg=name)


def test_validation_when_one_rank_has_all_its_rows_then_equals_evaluate_on_them(rank_pool):
    # Not rank 0, which tells of them.
    sizes = (20, 17)
    columns = classifier_data(sum(sizes))
    columns["validation"] = (np.arange(sum(sizes)) >= 20) & (np.arange(sum(sizes)) < 31)
    model = regression_model(keras.optimizers.SGD(0.05), metrics=["mae"])
    recordings = rank_pool.fit(
        job_for(model, epochs=2, batch_size=4, shuffle=False, indicated=True), split(columns, sizes)
    )
    trained = keras.models.clone_model(model)
    trained.compile(loss="mse", metrics=["mae"])
    trained.set_weights(recordings[0].variables[: len(trained.weights)])
    marked = columns["validation"]
    expected = trained.evaluate(columns["features"][marked], columns["label"][marked], verbose=0, return_dict=True)
    last = recordings[0].epochs[-1]
    assert last["val_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert last["val_mae"] == pytest.approx(expected["mae"], rel=1e-5)


def test_test_events_when_ranks_have_other_rows_or_none_then_all_hear_of_one_evaluation_with_the_numbers_of_all(
    rank_pool, tmp_path
):
    class Hears(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            self.heard = [*getattr(self, "heard", []), "begin"]

        def on_test_end(self, logs=None):
            self.heard.append(dict(logs))

        def on_train_end(self, logs=None):
            (tmp_path / f"{collective.rank()}.json").write_text(json.dumps(self.heard))

    sizes = (20, 9, 13)
    columns = classifier_data(sum(sizes))
    # Of the rank in the middle none.
    columns["validation"] = np.isin(np.arange(sum(sizes)), [0, 3, 4, 11, 19, 30, 41])
    metrics = ["mae", keras.metrics.RootMeanSquaredError(name="error")]
    model = regression_model(keras.optimizers.SGD(0.05), metrics=metrics)
    job = job_for(model, epochs=2, batch_size=4, shuffle=False, indicated=True, callbacks=[Hears()])
    recordings = rank_pool.fit(job, split(columns, sizes))
    heard = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert heard[0] == heard[1] == heard[2] and heard[0][0::2] == ["begin", "begin"]
    of_epochs = [{name: epoch[f"val_{name}"] for name in ("loss", "mae", "error")} for epoch in recordings[0].epochs]
    assert heard[0][1::2] == of_epochs
    trained = keras.models.clone_model(model)
    trained.compile(loss="mse", metrics=metrics)
    trained.set_weights(recordings[0].variables[: len(trained.weights)])
    marked = columns["validation"]
    expected = trained.evaluate(columns["features"][marked], columns["label"][marked], verbose=0, return_dict=True)
    assert heard[0][-1] == pytest.approx(expected, rel=1e-5)
    # In Keras' order.
    assert list(recordings[0].epochs[-1]) == [*expected, *(f"val_{name}" for name in expected)]


def test_metrics_when_rows_have_weights_then_equal_one_process_in_training_and_validation(rank_pool):
    sizes = (22, 9)
    columns = classifier_data(sum(sizes))
    columns["label"] = (columns["label"] > 0).astype("float32")
    columns["weight"] = np.random.default_rng(3).uniform(0, 2, sum(sizes)).astype("float32")
    columns["validation"] = np.arange(sum(sizes)) % 3 == 0
    marked = columns["validation"]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, "sigmoid")])
    metrics = {"metrics": ["accuracy"], "weighted_metrics": [keras.metrics.BinaryAccuracy(name="weighted")]}
    # With a rate of zero the weights of the model are the same in all batches.
    model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", **metrics)
    recordings = rank_pool.fit(
        job_for(model, epochs=1, batch_size=4, shuffle=False, weighted=True, indicated=True), split(columns, sizes)
    )
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile("sgd", "binary_crossentropy", **metrics)
    logs = recordings[0].epochs[-1]
    for prefix, rows in (("", ~marked), ("val_", marked)):
        data = (columns["features"][rows], columns["label"][rows])
        expected = copy.evaluate(*data, sample_weight=columns["weight"][rows], verbose=0, return_dict=True)
        plain = copy.evaluate(*data, verbose=0, return_dict=True)
        assert abs(expected["loss"] - plain["loss"]) > 1e-2
        for name, value in expected.items():
            assert logs[prefix + name] == pytest.approx(value, rel=1e-5), prefix + name


def test_embeddings_when_trained_with_adam_then_equal_one_process(rank_pool):
    rng = np.random.default_rng(5)
    columns = {
        "features": rng.integers(0, 40, (33, 4)).astype("int32"),
        "label": rng.normal(size=33).astype("float32"),
    }
    parts = split(columns, (17, 0, 16))
    model = keras.Sequential(
        [
            keras.layers.Input((4,), dtype="int32"),
            keras.layers.Embedding(40, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    # Without XLA, TensorFlow's steps are those of test_lookups.py.
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=keras.config.backend() == "tensorflow" or "auto")
    recordings = rank_pool.fit(job_for(model, epochs=2, batch_size=4, shuffle=False, dtype="int32"), parts)
    expected, _ = fit_one_process(model, list(global_batches(parts, 4, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_embeddings_when_the_gradient_of_a_stand_in_row_is_nan_then_equal_one_process(rank_pool):
    class TimesLogOfSum(keras.layers.Layer):
        """One for all rows, but NaN for the zeros of a stand-in row."""

        def call(self, inputs):
            outputs, numbers = inputs
            return outputs * (1 + 0 * keras.ops.log(keras.ops.sum(keras.ops.cast(numbers, "float32"), -1, True)))

    def build():
        keras.utils.set_random_seed(0)
        numbers = keras.layers.Input((4,), dtype="int32")
        embedded = keras.layers.Flatten()(keras.layers.Embedding(10, 3)(numbers))
        model = keras.Model(numbers, TimesLogOfSum()([keras.layers.Dense(1)(embedded), numbers]))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    rng = np.random.default_rng(5)
    columns = {
        "features": rng.integers(1, 10, (12, 4)).astype("int32"),
        "label": rng.normal(size=12).astype("float32"),
    }
    parts = split(columns, (12, 0))
    stops = [keras.callbacks.TerminateOnNaN()]
    job = job_for(build, epochs=2, batch_size=4, shuffle=False, dtype="int32", callbacks=stops)
    recordings = rank_pool.fit(job, parts)
    assert len(recordings[0].epochs) == 2
    assert all(np.isfinite(logs["loss"]) for logs in recordings[0].epochs)
    reference, batches = build(), list(global_batches(parts, 4, 2))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    reference.fit(tuples, epochs=2, steps_per_epoch=len(batches) // 2, shuffle=False, verbose=0)
    expected = reference.get_weights()
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_weights_when_every_rank_builds_others_then_all_begin_with_those_of_rank_0(rank_pool):
    def build():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
        # Drawn from the system, and so anew on every rank.
        draws = np.random.default_rng()
        model.set_weights([draws.normal(size=weight.shape) for weight in model.get_weights()])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    # Ranks that begin apart stay apart, which the end of the first epoch would show.
    recordings = rank_pool.fit(job_for(build, batch_size=4), split(classifier_data(14), (8, 6)))
    assert len(recordings[0].epochs) == 1


def test_validation_when_a_fraction_is_kept_then_equals_evaluate_on_those_rows(rank_pool):
    sizes = (20, 12, 8)
    columns = classifier_data(sum(sizes))
    parts = split(columns, sizes)
    model = regression_model(keras.optimizers.SGD(0.0), metrics=["mae"])
    job = job_for(model, epochs=1, batch_size=4, shuffle=False, validation_fraction=0.25, seed=3)
    logs = rank_pool.fit(job, parts)[0].epochs[-1]
    # A quarter of the rows of each, by what the plan says.
    places = [random_rows(3, rank, rows, rows // 4) for rank, rows in enumerate(sizes)]
    kept = [{name: values[own] for name, values in part.items()} for part, own in zip(parts, places, strict=True)]
    used = [
        {name: np.delete(values, own, axis=0) for name, values in part.items()}
        for part, own in zip(parts, places, strict=True)
    ]
    for prefix, rows in (("", used), ("val_", kept)):
        features, label = (np.concatenate([part[name] for part in rows]) for name in ("features", "label"))
        expected = model.evaluate(features, label, verbose=0, return_dict=True)
        for name, value in expected.items():
            assert logs[prefix + name] == pytest.approx(value, rel=1e-5), prefix + name


def test_moving_statistics_when_an_epoch_ends_then_are_the_average_weighted_by_rows(rank_pool):
    sizes = (16, 8, 0)
    columns = classifier_data(sum(sizes))
    parts = split(columns, sizes)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.BatchNormalization(momentum=0.5)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    columns["label"] = columns["features"].copy()
    parts = split(columns, sizes)
    recordings = rank_pool.fit(job_for(model, epochs=1, batch_size=8, shuffle=False, label_array=True), parts)
    moving_mean = recordings[0].variables[2]
    first = columns["features"][:16]
    of_rank_0 = 0.25 * 0 + 0.25 * first[:8].mean(axis=0) + 0.5 * first[8:].mean(axis=0)
    of_rank_1 = 0.5 * columns["features"][16:].mean(axis=0)
    np.testing.assert_allclose(moving_mean, of_rank_0 * 16 / 24 + of_rank_1 * 8 / 24, atol=1e-6)


def test_iterates_when_a_rank_has_fewer_rows_then_advance_in_every_step_on_all(rank_pool):
    parts = split(classifier_data(26), (18, 8))
    keras.utils.set_random_seed(0)
    normalized = keras.layers.SpectralNormalization(keras.layers.Dense(4, "tanh"))
    model = keras.Sequential([keras.layers.Input((6,)), normalized, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    recordings = rank_pool.fit(job_for(model, epochs=2, batch_size=4, shuffle=False), parts)
    expected, _ = fit_one_process(model, list(global_batches(parts, 4, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_generators_when_reseeded_then_every_rank_and_seed_has_a_state_of_its_own():
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dropout(0.5)])

    def states(seed, rank):
        reseed(model, seed, rank)
        return [tuple(np.array(variable).tolist()) for variable in random_generators(model)]

    first = states(3, 0)
    # Rank 0 keeps what the model has.
    assert states(4, 0) == first
    drawn = [state for seed, rank in ((3, 1), (3, 2), (4, 1)) for state in states(seed, rank)]
    assert len(set(drawn)) == len(drawn) == 6 and not set(drawn) & set(first)
    assert states(3, 1) == drawn[:2]


def test_fit_when_run_twice_with_a_seed_then_random_layers_repeat_to_the_bit_and_ranks_draw_apart(rank_pool, tmp_path):
    class Tell(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            state = next(v for v in self.model.variables if "seed_generator_state" in v.path)
            (tmp_path / str(collective.rank())).write_text(str(np.array(state).tolist()))

    parts = split(classifier_data(30), (18, 12))
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    job = job_for(model, epochs=2, batch_size=4, seed=5, callbacks=[Tell()])
    first, again = (rank_pool.fit(job, parts)[0].variables for _ in range(2))
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert (tmp_path / "0").read_text() != (tmp_path / "1").read_text()


def test_stop_when_one_rank_asks_in_mid_epoch_then_all_stop_after_that_step(rank_pool, tmp_path):
    stop = StopOnOneRank(str(tmp_path / "claim"), 2)
    columns = classifier_data(60)
    parts = split(columns, (30, 30))
    model = regression_model(keras.optimizers.SGD(0.05))
    recordings = rank_pool.fit(job_for(model, epochs=5, batch_size=3, shuffle=False, callbacks=[stop]), parts)
    assert len(recordings[0].epochs) == 1
    # Steps 0, 1 and 2, as in one process.
    expected, _ = fit_one_process(model, list(global_batches(parts, 3, 1))[:3], epochs=1)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_callbacks_when_they_write_files_then_run_on_rank_0_only():
    from elephant.rank.callbacks.callback_rules import callbacks_of_rank

    everywhere = keras.callbacks.EarlyStopping()
    given = [keras.callbacks.CSVLogger("log"), everywhere, keras.callbacks.ModelCheckpoint("model.keras")]
    assert callbacks_of_rank(given, 0) == given
    assert callbacks_of_rank(given, 1) == [everywhere]


def test_callbacks_when_keras_own_print_what_they_do_then_rank_0_alone_does():
    from elephant.rank.callbacks.callback_rules import callbacks_of_rank

    class Own(keras.callbacks.Callback):
        verbose = 1

    given = [keras.callbacks.EarlyStopping(verbose=1), keras.callbacks.ReduceLROnPlateau(verbose=1), Own()]
    assert [callback.verbose for callback in callbacks_of_rank(given, 0)] == [1, 1, 1]
    assert [callback.verbose for callback in callbacks_of_rank(given, 1)] == [0, 0, 1]


def test_ranks_when_a_callback_lets_weights_drift_apart_then_the_fit_fails(rank_pool, tmp_path):
    claim = str(tmp_path / "claim")

    class Meddle(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            try:
                open(claim, "x").close()
            except FileExistsError:
                return
            self.model.set_weights([weight + 1 for weight in self.model.get_weights()])

    model = regression_model(keras.optimizers.SGD(0.05))
    with pytest.raises(RankError, match="expected equal weights on all ranks after epoch 1"):
        rank_pool.fit(job_for(model, callbacks=[Meddle()], batch_size=4), split(classifier_data(16), (8, 8)))


@XLA
def test_step_when_xla_cannot_compile_a_layer_then_says_so_as_in_one_process(rank_pool):
    # The one sign of XLA that does not measure time: a computation of which it knows nothing.
    class Digits(keras.layers.Layer):
        def call(self, x):
            import tensorflow as tf

            return x + tf.cast(tf.strings.length(tf.strings.as_string(x)), x.dtype)

    model = keras.Sequential([keras.layers.Input((6,)), Digits(), keras.layers.Dense(1)])
    parts = split(classifier_data(16), (8, 8))
    # Without XLA it is computed.
    model(parts[0]["features"])
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(RankError, match="XLA"):
        rank_pool.fit(job_for(model, batch_size=4), parts)


class Freeze(keras.callbacks.Callback):
    """Freezes what is in the way after the first epoch; keeps the first layer's weights of each epoch's end."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.seen = layers, []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(np.array(self.model.layers[0].kernel))
        if epoch == 0:
            for layer in self.model.layers[: self.layers]:
                layer.trainable = False
            self.model.make_train_function(force=True)
        elif epoch == 2 and not np.array_equal(self.seen[0], self.seen[2]):
            raise AssertionError("a frozen layer has gone on")


class FreezeBetweenBatches(Freeze):
    """With it, each step is a call."""

    def on_train_batch_begin(self, batch, logs=None):
        """Nothing."""


@XLA
@pytest.mark.parametrize(
    ("jit_compile", "freeze"),
    [(True, Freeze(1)), (True, FreezeBetweenBatches(2)), (False, Freeze(1))],
    ids=["runs under XLA", "all under XLA", "runs"],
)
def test_fit_when_a_callback_freezes_layers_then_they_stay(rank_pool, by_value, jit_compile, freeze):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    job = job_for(model, epochs=3, batch_size=4, callbacks=[freeze])
    recordings = rank_pool.fit(job, split(classifier_data(16), (8, 8)))
    assert len(recordings[0].epochs) == 3


def test_settings_when_the_driver_computes_in_float64_then_so_do_the_ranks(rank_pool):
    floatx, policy, wide = keras.config.floatx(), keras.config.dtype_policy(), current().is_wide()
    try:
        current().make_wide(True)
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        columns = {name: values.astype("float64") for name, values in classifier_data(31).items()}
        parts = split(columns, (18, 13))
        model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9))
        job = job_for(model, epochs=3, batch_size=5, shuffle=False, dtype="float64", label_dtype="float64")
        recordings = rank_pool.fit(job, parts)
        expected, _ = fit_one_process(model, list(global_batches(parts, 5, 3)), epochs=3)
    finally:
        current().make_wide(wide)
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
    variables = recordings[0].variables[: len(expected)]
    assert {variable.dtype for variable in variables} == {np.dtype("float64")}
    # Elsewhere Keras itself divides a loss by a number of 32 bits.
    assert largest_difference(variables, expected) <= (1e-13 if keras.config.backend() == "tensorflow" else 1e-6)


class AppliesTwice(OwnStep):
    """A model whose train_step applies gradients several times, and returns a loss that no metric tracks."""

    def __init__(self, every=2, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(1)
        self.every = every

    def call(self, inputs):
        return self.dense(inputs)

    def step(self, data, update):
        x, y = data[:2]
        for _ in range(self.every):
            loss = update(
                lambda: keras.ops.mean((self(x, training=True)[:, 0] - y) ** 2),
                self.trainable_variables,
                self.optimizer,
            )
        return {"own_loss": loss}


def test_own_train_step_when_it_applies_twice_and_tracks_nothing_then_equals_one_process(rank_pool, by_value):
    columns = classifier_data(37)
    parts = split(columns, (23, 14))

    def build():
        keras.utils.set_random_seed(1)
        model = AppliesTwice()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        model(np.zeros((1, 6), "float32"))
        return model

    recordings = rank_pool.fit(job_for(build, epochs=2, batch_size=4, shuffle=False), parts)
    reference, batches = build(), list(global_batches(parts, 4, 2))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    history = reference.fit(tuples, epochs=2, steps_per_epoch=len(batches) // 2, verbose=0).history
    assert largest_difference(recordings[0].variables[:2], reference.get_weights()) <= TOLERANCE
    got = [logs["own_loss"] for logs in recordings[0].epochs]
    np.testing.assert_allclose(got, history["own_loss"], rtol=1e-5)


def test_steps_per_execution_when_it_does_not_divide_the_epoch_then_no_row_is_used_twice(rank_pool):
    sizes = (24, 23)
    parts = split(classifier_data(sum(sizes)), sizes)
    model = regression_model(keras.optimizers.SGD(0.05))
    expected, _ = fit_one_process(model, list(global_batches(parts, 4, 2)), epochs=2)
    model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=4)
    recordings = rank_pool.fit(job_for(model, epochs=2, batch_size=4, shuffle=False), parts)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_averaged_weights_when_validated_then_callbacks_have_swapped_them_in(rank_pool):
    columns = classifier_data(40)
    columns["validation"] = np.arange(40) % 4 == 0
    model = regression_model(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5))
    swap = keras.callbacks.SwapEMAWeights()
    recordings = rank_pool.fit(
        job_for(model, epochs=2, batch_size=4, shuffle=False, indicated=True, callbacks=[swap]),
        split(columns, (24, 16)),
    )
    kept = columns["validation"]
    parts = [
        {name: part[name][~part["validation"]] for name in ("features", "label")} for part in split(columns, (24, 16))
    ]
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5), "mse")
    batches = list(global_batches(parts, 4, 2))
    history = copy.fit(
        (tuple(batch[name] for name in ("features", "label")) for batch in batches),
        epochs=2,
        steps_per_epoch=len(batches) // 2,
        validation_data=(columns["features"][kept], columns["label"][kept]),
        callbacks=[keras.callbacks.SwapEMAWeights()],
        verbose=0,
    )
    got = [logs["val_loss"] for logs in recordings[0].epochs]
    np.testing.assert_allclose(got, history.history["val_loss"], rtol=1e-4)


def test_averaged_weights_when_the_optimizer_makes_none_then_swapping_them_in_is_refused(rank_pool):
    job = job_for(regression_model("sgd"), batch_size=4, callbacks=[keras.callbacks.SwapEMAWeights()])
    with pytest.raises(RankError, match="expected an optimizer with use_ema=True for SwapEMAWeights"):
        rank_pool.fit(job, split(classifier_data(16), (8, 8)))


@pytest.mark.parametrize("batches", [True, False], ids=["steps of batches", "steps in runs"])
def test_callbacks_on_the_workers_when_they_look_at_params_and_the_end_then_see_what_one_process_shows(
    rank_pool, tmp_path, batches
):
    class Sees(keras.callbacks.EarlyStopping):
        def on_train_end(self, logs=None):
            (tmp_path / str(os.getpid())).write_text(json.dumps([self.params, logs]))

    class SeesBatches(Sees):
        def on_train_batch_end(self, batch, logs=None):
            """Has each step be taken by itself."""

    columns = classifier_data(40)
    columns["validation"] = np.arange(40) % 4 == 0
    job = job_for(
        regression_model("sgd"),
        epochs=2,
        batch_size=4,
        indicated=True,
        callbacks=[SeesBatches() if batches else Sees()],
    )
    recordings = rank_pool.fit(job, split(columns, (24, 16)))
    told = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert len(told) == 2
    for params, logs in told:
        assert (params["epochs"], params["steps"]) == (2, 5)
        assert logs == pytest.approx(recordings[0].epochs[-1]) and set(logs) == {"loss", "val_loss"}
