"""Keras' other backends, where they are installed, in processes of their own, against one process of plain Keras."""

import functools
import importlib.util
import signal

import keras
import numpy as np
import pytest
from asynchronous_fit import AsynchronousFit
from gradients_over_ranks import VALUE, assert_equal_to_one_process, rank_gradients, rows_of
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
from rank_pool import RankError, RankPool
from tiers import in_tiers

pytestmark = pytest.mark.usefixtures("by_value")

SIZES = (23, 0, 14)


@pytest.fixture(scope="module", params=["jax", "torch"])
def backend(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture(scope="module")
def pool(backend):
    pool = RankPool(backend)
    yield pool
    pool.close()


def small_model(make_optimizer):
    """Returns a model with the same weights on every backend; ranks build it themselves, for their own backend."""
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=weight.shape, scale=0.4) for weight in model.get_weights()])
    model.compile(make_optimizer(), "mse", metrics=["mae"])
    return model


def adamw():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5)


def adam():
    return keras.optimizers.Adam(0.01)


def built(make_optimizer):
    return functools.partial(small_model, make_optimizer)


class Overwrites(keras.callbacks.Callback):
    """Spoils every buffer that nobody is said to hold, before it is used again."""

    def on_train_batch_begin(self, batch, logs=None):
        from elephant.backends import gradient_averager

        class Spoiled(gradient_averager.RotatingBuffers):
            def unused(self, *kept, release=None):
                buffer = super().unused(*kept, release=release)
                for view in buffer.views:
                    view[...] = np.nan
                return buffer

        gradient_averager.RotatingBuffers = Spoiled


def test_weights_and_history_when_ranks_are_uneven_then_equal_one_process(pool):
    columns = classifier_data(sum(SIZES))
    columns["weight"] = np.random.default_rng(3).uniform(0, 2, sum(SIZES)).astype("float32")
    parts = split(columns, SIZES)
    job = job_for(built(adamw), epochs=3, batch_size=5, shuffle=False, weighted=True, callbacks=[Overwrites()])
    recordings = pool.fit(job, parts)
    expected, history = fit_one_process(small_model(adamw), list(global_batches(parts, 5, 3)), epochs=3)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= 1e-5
    for name, values in history.items():
        np.testing.assert_allclose([logs[name] for logs in recordings[0].epochs], values, rtol=1e-5)


@pytest.mark.slow("a fit; tests/rank/test_asynchronous.py has it, also in `make test BACKEND=jax`")
def test_weights_when_one_asynchronous_worker_trains_then_equal_one_process(pool):
    columns = classifier_data(18)
    job = job_for(built(adam), mode="asynchronous", epochs=2, batch_size=4, shuffle=False)
    with AsynchronousFit(pool, job, [columns]) as fit:
        fit.train(0)
        weights = fit.weights()
    expected, _ = fit_one_process(small_model(adam), list(global_batches([columns], 4, 2)), epochs=2)
    assert largest_difference(weights, expected) <= 1e-6


@pytest.mark.slow("a process ends; a rank is killed below, and tests/rank/test_lost_ranks.py has one that fails")
def test_ranks_when_one_fails_then_all_say_which(pool):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            from elephant.collective.api import current_collective

            if batch == 1 and current_collective().rank == 1:
                raise ZeroDivisionError("in the second step")

    parts = split(classifier_data(30), (15, 15))
    job = job_for(built(adam), batch_size=3, callbacks=[Fails()])
    with pytest.raises(RankError) as caught:
        pool.fit(job, parts)
    first, second = caught.value.outcomes
    assert second[:2] == ("ZeroDivisionError", "in the second step")
    assert first[0] == "PeerLostError" and "rank 1" in first[1].lower()


def test_predictions_when_batches_differ_in_size_then_are_those_of_the_model(pool, backend):
    def predicted():
        import keras

        from elephant.data.schema import DENSE, DataSchema, Field
        from elephant.data.shard import Shard
        from elephant.rank.input.tensors import Tensors
        from elephant.rank.predictor import Predictor

        rows = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
        model = small_model(adam)
        schema = DataSchema(inputs=(Field("features", ("features",), "float32", DENSE, (6,)),))
        tensors, predictor = Tensors(Shard(None, schema, {"features": (6,)})), Predictor(model)
        cuts = [(0, 8), (8, 11), (11, 20), (20, 20)]
        parts = [predictor.outputs(tensors, schema.batch_fields, [rows[start:stop]], 0)[0] for start, stop in cuts]
        return keras.config.backend(), np.concatenate(parts), model.predict(rows, verbose=0)

    (name, found, expected), *_ = pool.run(predicted, [()])
    assert name == backend
    np.testing.assert_allclose(found, expected, atol=1e-6)


def loop_of_rank(x, y, *, compiled):
    """Trains with a loop of one's own; returns the weights after three steps."""
    import elephant

    model = small_model(adam)
    optimizer = elephant.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), num_rows=lambda: len(x))
    optimizer.build(model.trainable_variables)
    weights = model.trainable_variables

    def loss_of(outputs):
        # Of a rank without rows, some number whose gradient is finite.
        return keras.ops.sum(keras.ops.square(outputs[:, 0] - keras.ops.convert_to_tensor(y))) / max(len(y), 1)

    for _ in range(3):
        if keras.config.backend() == "torch":
            import torch

            model.zero_grad()
            loss_of(model(x)).backward()
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in weights], weights)
            continue
        import jax

        def of_values(values):
            return loss_of(model.stateless_call(values, [], x)[0])

        def step(values, variables):
            return optimizer.stateless_apply(variables, jax.grad(of_values)(values), values)

        step = jax.jit(step) if compiled else step
        found = step([variable.value for variable in weights], [variable.value for variable in optimizer.variables])
        for variable, value in zip((*weights, *optimizer.variables), (*found[0], *found[1]), strict=True):
            variable.assign(value)
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in weights]


@pytest.mark.parametrize("compiled", in_tiers([False, True], fast=[True], slow="the same loop without a graph"))
def test_loop_of_ones_own_when_ranks_have_different_rows_then_equals_one_process(pool, backend, compiled):
    if compiled and backend == "torch":
        pytest.skip("a loop on PyTorch is eager")
    columns = classifier_data(12)
    parts = split(columns, (7, 0, 5))
    found = pool.run(
        functools.partial(loop_of_rank, compiled=compiled), [(part["features"], part["label"]) for part in parts]
    )
    model = small_model(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    expected, _ = fit_one_process(model, [columns] * 3, epochs=1)
    for weights in found:
        assert largest_difference(weights, expected) <= 1e-5


@pytest.mark.slow("another op of this backend; tests/training/test_ops.py has it, also in `make test BACKEND=jax`")
def test_gradients_when_ranks_compute_losses_together_then_equal_one_process(pool):
    assert_equal_to_one_process(pool.run(rank_gradients, [(*rows_of(rank), VALUE) for rank in range(3)]))


def test_fit_when_a_rank_is_killed_then_the_error_names_it(pool, tmp_path):
    job = job_for(built(adam), batch_size=3, callbacks=[Signals(str(tmp_path), signal.SIGKILL)])
    with pytest.raises(RankError) as caught:
        pool.fit(job, split(classifier_data(30), (15, 15)))
    kind, text, _ = caught.value.outcomes[0]
    assert kind == "PeerLostError" and f"lost rank {VICTIM}" in text and "its process died" in text
