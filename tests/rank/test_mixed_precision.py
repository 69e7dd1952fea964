"""Mixed precision: when the gradients of one rank overflow, all ranks skip the step and lower the scale alike."""

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, global_batches, job_for, largest_difference, split


@pytest.fixture
def mixed_float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def scaled_model(initial_scale=2.0**12):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=initial_scale, dynamic_growth_steps=4)
    model.compile(optimizer, "mse")
    return model


def test_weights_when_one_rank_overflows_then_equal_one_process(rank_pool, mixed_float16):
    columns = classifier_data(40)
    # Only the first rank's second batch overflows float16: all ranks must skip that step.
    columns["label"][5:7] = 6e4
    parts = split(columns, (20, 20))
    model = scaled_model()
    recordings = rank_pool.fit(job_for(model, epochs=2, batch_size=4, shuffle=False, bucket_bytes=64), parts)
    reference = scaled_model()
    batches = list(global_batches(parts, 4, 2))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    reference.fit(tuples, epochs=2, steps_per_epoch=len(batches) // 2, verbose=0)
    skipped = len(batches) - int(reference.optimizer.inner_optimizer.iterations.numpy())
    assert 0 < skipped < len(batches)
    expected = [np.array(value) for value in (*reference.get_weights(), *reference.optimizer.variables)]
    compared = []
    names = [variable.path for variable in (*reference.weights, *reference.optimizer.variables)]
    for name, got, wanted in zip(names, recordings[0].variables, expected, strict=True):
        if name.rsplit("/", 1)[-1] in ("iteration", "step_counter", "dynamic_scale"):
            compared.append(name)
            np.testing.assert_array_equal(got, wanted, err_msg=name)
    assert len(compared) >= 3
    # The passes through the model are in float16, whose rounding depends on the batch: a tenth of a percent.
    weights = len(reference.get_weights())
    assert largest_difference(recordings[0].variables[:weights], expected[:weights]) <= 2e-3


def test_fit_when_mixed_precision_is_asked_for_then_equals_one_process_under_the_policy(rank_pool):
    parts = split(classifier_data(48), (24, 24))

    def model():
        keras.utils.set_random_seed(0)
        made = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return made

    def trained_alone(policy):
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        reference = model()
        keras.config.set_dtype_policy(before)
        batches = list(global_batches(parts, 8, 3))
        tuples = ((batch["features"], batch["label"]) for batch in batches)
        reference.fit(tuples, epochs=3, steps_per_epoch=len(batches) // 3, verbose=0)
        return [np.array(value) for value in reference.get_weights()]

    options = {"epochs": 3, "batch_size": 8, "shuffle": False, "mixed_precision": True}
    recordings = rank_pool.fit(job_for(model(), **options), parts)
    weights = recordings[0].variables[:4]
    assert {value.dtype for value in weights} == {np.dtype("float32")}
    # Processors compute in bfloat16, eight bits, whose rounding depends on the batch.
    assert largest_difference(weights, trained_alone("mixed_bfloat16")) <= 1e-2
    # In float32, ranks and one process differ by less than a millionth.
    assert largest_difference(weights, trained_alone("float32")) > 1e-4
