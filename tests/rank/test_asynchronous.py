"""One worker whose gradients a parameter server's optimizer applies, against one process of plain Keras."""

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from keras_reference import classifier_data, fit_one_process, global_batches, job_for, largest_difference
from own_step import OwnStep
from tiers import in_tiers

from elephant.config import AsynchronousOptions
from elephant.data.epoch_plan import row_order
from elephant.data.shard import row_hashes
from elephant.errors import UnsupportedError

TOLERANCE = 1e-6
schedules = keras.optimizers.schedules

OPTIMIZERS = {
    "schedule": lambda: keras.optimizers.Adam(schedules.CosineDecay(0.02, 9, warmup_target=0.05, warmup_steps=3)),
    "adamw, clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5),
}


def huber_of_my_own(labels, outputs):
    difference = keras.ops.abs(keras.ops.reshape(labels, (-1, 1)) - outputs)
    return keras.ops.mean(keras.ops.where(difference < 1.0, difference**2, 2 * difference - 1), axis=-1)


def regression_model(optimizer, l2=0.0, loss="mse", metrics=None):
    keras.utils.set_random_seed(0)
    regularizer = keras.regularizers.L2(l2) if l2 else None
    layers = [keras.layers.Input((6,)), keras.layers.Dense(8, "tanh", kernel_regularizer=regularizer)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(optimizer, loss, metrics=metrics)
    return model


def asynchronous(model, **options):
    return job_for(model, **{"mode": "asynchronous", "epochs": 2, "batch_size": 5, "shuffle": False, **options})


# Of other optimizers, their rules are compared with Keras in tests/parameter_server/test_optimizers.py.
@pytest.mark.parametrize("optimizer", in_tiers(OPTIMIZERS, fast=["schedule"], slow="another optimizer"))
def test_weights_when_one_worker_trains_then_equal_one_process(rank_pool, optimizer):
    columns = classifier_data(23)
    model = regression_model(optimizer(), l2=0.05)
    with AsynchronousFit(rank_pool, asynchronous(model), [columns]) as fit:
        recording = fit.train(0)
        trained = fit.weights()
        counted = fit.control.statistics()
    expected, history = fit_one_process(model, list(global_batches([columns], 5, 2)), epochs=2)
    assert largest_difference(trained, expected) <= TOLERANCE
    np.testing.assert_allclose([part.logs["loss"] for part in recording.parts], history["loss"], rtol=1e-5)
    assert [(part.epoch, part.rows, part.steps) for part in recording.parts] == [(0, 23, 5), (1, 23, 5)]
    assert counted["updates"] == 10


def test_weights_when_shuffled_with_weights_and_a_loss_of_the_users_then_equal_one_process(rank_pool, by_value):
    columns = classifier_data(21)
    columns["weight"] = np.random.default_rng(3).uniform(0, 2, 21).astype("float32")
    job = asynchronous(model_of_my_own_loss, shuffle=True, seed=11, weighted=True)
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        fit.train(0)
        trained = fit.weights()
    by_content = np.argsort(
        row_hashes([columns["features"], columns["label"][:, None], columns["weight"][:, None]], 21), kind="stable"
    )

    def order(epoch, rank, rows):
        return by_content[row_order(11, epoch, 0, rows, shuffle=True)]

    reference = model_of_my_own_loss()
    batches = list(global_batches([columns], 5, 2, order))
    tuples = ((batch["features"], batch["label"], batch["weight"]) for batch in batches)
    reference.fit(tuples, epochs=2, steps_per_epoch=5, verbose=0)
    assert largest_difference(trained, reference.get_weights()) <= TOLERANCE


def model_of_my_own_loss():
    return regression_model(keras.optimizers.RMSprop(0.01, loss_scale_factor=8.0), loss=huber_of_my_own)


class PushesTwice(OwnStep):
    """A train_step that applies the gradients of its two layers one after the other, with one optimizer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)

    def call(self, inputs):
        return self.second(self.first(inputs))

    def step(self, data, update):
        rows, labels = data[:2]

        def error():
            return keras.ops.mean(keras.ops.square(self(rows, training=True)[:, 0] - labels))

        for layer in (self.first, self.second):
            loss = update(error, layer.trainable_variables, self.optimizer)
        return {"own_loss": loss}


def model_that_pushes_twice():
    keras.utils.set_random_seed(3)
    model = PushesTwice()
    model.compile(keras.optimizers.SGD(0.05))
    model(np.zeros((1, 6), "float32"))
    model.optimizer.build(model.trainable_variables)
    return model


def test_weights_when_a_train_step_applies_twice_then_equal_one_process(rank_pool, by_value):
    columns = classifier_data(18)
    with AsynchronousFit(rank_pool, asynchronous(model_that_pushes_twice, batch_size=4), [columns]) as fit:
        recording = fit.train(0)
        again = fit.train(0, attempt=1)
        trained, counted = fit.weights(), fit.control.statistics()
    reference, batches = model_that_pushes_twice(), list(global_batches([columns], 4, 2))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    history = reference.fit(tuples, epochs=2, steps_per_epoch=5, verbose=0).history
    assert largest_difference(trained, reference.get_weights()) <= TOLERANCE
    np.testing.assert_allclose([part.logs["own_loss"] for part in recording.parts], history["own_loss"], rtol=1e-5)
    # The second attempt takes the last batch once more, and its pushes do not count.
    assert [part.steps for part in again.parts] == [1]
    assert counted["updates"] == 20


def test_moving_statistics_and_validation_when_an_epoch_ends_then_equal_one_process(rank_pool):
    columns = classifier_data(24)
    columns["validation"] = np.arange(24) % 4 == 0
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((6,)), keras.layers.Dense(5), keras.layers.BatchNormalization(momentum=0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    job = asynchronous(model, batch_size=6, indicated=True)
    with AsynchronousFit(rank_pool, job, [columns]) as fit:
        recording = fit.train(0)
        fetched, trained = fit.control.fetch(), fit.weights()
    kept = {name: values[~columns["validation"]] for name, values in columns.items() if name != "validation"}
    reference = keras.models.clone_model(model)
    reference.set_weights(model.get_weights())
    reference.compile_from_config(model.get_compile_config())
    batches = list(global_batches([kept], 6, 2))
    marked = columns["validation"]
    history = reference.fit(
        ((batch["features"], batch["label"]) for batch in batches),
        epochs=2,
        steps_per_epoch=3,
        verbose=0,
        validation_data=(columns["features"][marked], columns["label"][marked]),
        validation_batch_size=6,
    ).history
    assert largest_difference(trained, [v.numpy() for v in reference.trainable_variables]) <= TOLERANCE
    statistics = np.concatenate([v.numpy().ravel() for v in reference.non_trainable_variables])
    np.testing.assert_allclose(fetched.state, statistics, atol=1e-6)
    for epoch, part in enumerate(recording.parts):
        training, validation = part.arrays
        assert (part.rows, part.val_rows) == (18, 6)
        # Keras' Mean keeps its sum and its count: of the loss, then of the metric.
        assert training[0] / training[1] == pytest.approx(history["loss"][epoch], rel=1e-5)
        assert validation[0] / validation[1] == pytest.approx(history["val_loss"][epoch], rel=1e-5)
        assert validation[2] / validation[3] == pytest.approx(history["val_mae"][epoch], rel=1e-5)


def test_moving_statistics_when_several_workers_train_then_have_advanced_as_in_one_process(rank_pool):
    columns = {"features": np.full((20, 6), 5.0, "float32"), "label": np.full((20, 6), 5.0, "float32")}
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.BatchNormalization(momentum=0.9)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    job = job_for(model, mode="asynchronous", epochs=1, batch_size=4, shuffle=False, label_array=True)
    with AsynchronousFit(rank_pool, job, [columns] * 3) as fit:
        fit.train_all()
        mean = fit.control.fetch().state[:6]
    # After fifteen steps in all; a worker that begins when another has ended adds its own fifteen to those.
    assert (mean >= 5 * (1 - 0.9**15) - 1e-5).all() and (mean <= 5 * (1 - 0.9**45) + 1e-5).all()


def test_weights_when_exchanged_in_the_background_then_equal_steps_on_weights_one_step_old(rank_pool):
    columns = classifier_data(20)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    options = AsynchronousOptions(background_exchange=True)
    with AsynchronousFit(rank_pool, asynchronous(model, batch_size=4, asynchronous=options), [columns]) as fit:
        fit.train(0)
        (trained,) = fit.weights()
    at_server = np.array(model.get_weights()[0], np.float64)
    for _epoch in range(2):
        # An epoch begins with the newest weights: the last exchange has been waited for.
        history = [at_server, at_server]
        for start in range(0, 20, 4):
            rows, labels = columns["features"][start : start + 4], columns["label"][start : start + 4]
            seen = history[-2]
            gradient = 2 * rows.T @ (rows @ seen - labels[:, None]) / len(rows)
            history.append(history[-1] - 0.05 * gradient)
        at_server = history[-1]
    np.testing.assert_allclose(trained, at_server, atol=1e-5)


# Norms are of what all servers have: of everything, and of a variable.
@pytest.mark.parametrize(
    "clip", in_tiers(["global_clipnorm", "clipnorm"], fast=["global_clipnorm"], slow="another norm")
)
def test_weights_when_there_are_several_servers_then_equal_one_process(rank_pool, clip):
    columns = classifier_data(17)
    model = regression_model(keras.optimizers.Adam(0.01, **{clip: 0.1}))
    with AsynchronousFit(rank_pool, asynchronous(model), [columns], parameter_servers=3) as fit:
        fit.train(0)
        trained = fit.weights()
    expected, _ = fit_one_process(model, list(global_batches([columns], 5, 2)), epochs=2)
    assert largest_difference(trained, expected) <= TOLERANCE


def nesterov():
    return keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)


def test_compiled_loops_when_steps_are_exchanged_then_are_left_and_the_weights_equal_one_process(rank_pool):
    columns = classifier_data(20)
    model = regression_model(nesterov())
    model.compile(nesterov(), "mse", jit_compile=True, steps_per_execution=2)
    with AsynchronousFit(rank_pool, asynchronous(model), [columns]) as fit:
        fit.train(0)
        trained, counted = fit.weights(), fit.control.statistics()
    expected, _ = fit_one_process(regression_model(nesterov()), list(global_batches([columns], 5, 2)), epochs=2)
    assert largest_difference(trained, expected) <= TOLERANCE
    assert counted["updates"] == 8


def test_embeddings_when_their_gradients_are_made_dense_then_train_as_dense_ones(rank_pool):
    rng = np.random.default_rng(5)
    columns = {"features": rng.integers(0, 9, (15, 4)).astype("int32"), "label": rng.normal(size=15).astype("float32")}
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((4,), dtype="int32"), keras.layers.Embedding(9, 3), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    # Plain gradient descent does the same to rows without a gradient and to rows with a zero one.
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with AsynchronousFit(rank_pool, asynchronous(model, dtype="int32"), [columns]) as fit:
        fit.train(0)
        trained = fit.weights()
    expected, _ = fit_one_process(model, list(global_batches([columns], 5, 2)), epochs=2)
    assert largest_difference(trained, expected) <= TOLERANCE


def test_mixed_precision_when_the_loss_is_scaled_then_equals_one_process(rank_pool):
    columns = classifier_data(16)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = regression_model(keras.optimizers.SGD(0.05))
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        with AsynchronousFit(rank_pool, asynchronous(model, batch_size=4), [columns]) as fit:
            fit.train(0)
            trained = fit.weights()
        expected, _ = fit_one_process(model, list(global_batches([columns], 4, 2)), epochs=2)
    finally:
        keras.config.set_dtype_policy(before)
    # Sums of float16 products are rounded in another order when the batch is laid out otherwise.
    assert largest_difference(trained, expected) <= 1e-3
    assert largest_difference(trained, model.get_weights()) > 1e-2


def test_worker_when_it_has_no_training_rows_then_reports_empty_epochs(rank_pool):
    columns = classifier_data(6)
    nothing = {name: values[:0] for name, values in columns.items()}
    model = regression_model(keras.optimizers.SGD(0.05))
    with AsynchronousFit(rank_pool, asynchronous(model), [columns, nothing]) as fit:
        first, second = fit.train_all()
    assert [(part.epoch, part.rows, part.val_rows, part.steps) for part in second.parts] == [(0, 0, 0, 0), (1, 0, 0, 0)]
    assert [part.rows for part in first.parts] == [6, 6]


def test_gradients_when_not_finite_then_are_refused_and_counted(rank_pool):
    columns = classifier_data(20)
    columns["label"][7] = np.nan
    model = regression_model(keras.optimizers.SGD(0.05))
    with AsynchronousFit(rank_pool, asynchronous(model, epochs=1), [columns]) as fit:
        fit.train(0)
        trained, counted = fit.weights(), fit.control.statistics()
    assert counted["refused"] == 1
    rows = np.r_[0:5, 10:20]
    kept = {name: values[rows] for name, values in columns.items()}
    expected, _ = fit_one_process(model, list(global_batches([kept], 5, 1)), epochs=1)
    assert largest_difference(trained, expected) <= TOLERANCE


def gan_of_two_optimizers():
    model = regression_model(keras.optimizers.SGD(0.05))
    model.second_optimizer = keras.optimizers.Adam(0.01)
    return model


def test_model_when_it_has_two_optimizers_then_is_refused_by_name_unless_they_are_local(rank_pool, by_value):
    columns = classifier_data(10)
    with pytest.raises(UnsupportedError, match="expected one optimizer.*'sgd.*', 'adam.*'.*frequency"):
        AsynchronousFit(rank_pool, asynchronous(gan_of_two_optimizers), [columns])
    with AsynchronousFit(rank_pool, asynchronous(gan_of_two_optimizers, frequency=2), [columns]) as fit:
        assert len(fit.train(0).parts) == 2
