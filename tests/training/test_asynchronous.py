"""One worker whose gradients a parameter server's optimizer applies, against one process of plain Keras."""

import keras
import numpy as np
import pytest
from keras_reference import classifier_data, fit_one_process, global_batches, job_for, largest_difference
from worker_pool import AsynchronousFit

TOLERANCE = 1e-6
schedules = keras.optimizers.schedules

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw, clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5),
    "rmsprop, loss scale": lambda: keras.optimizers.RMSprop(0.01, loss_scale_factor=8.0),
    "schedule": lambda: keras.optimizers.Adam(schedules.CosineDecay(0.02, 9, warmup_target=0.05, warmup_steps=3)),
}


def regression_model(optimizer, l2=0.0, loss="mse", metrics=None):
    keras.utils.set_random_seed(0)
    regularizer = keras.regularizers.L2(l2) if l2 else None
    layers = [keras.layers.Input((6,)), keras.layers.Dense(8, "tanh", kernel_regularizer=regularizer)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(optimizer, loss, metrics=metrics)
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_weights_when_one_worker_trains_then_equal_one_process(worker_pool, optimizer):
    columns = classifier_data(23)
    model = regression_model(optimizer(), l2=0.05)
    job = job_for(model, mode="asynchronous", epochs=2, batch_size=5, shuffle=False)
    with AsynchronousFit(worker_pool, job, [columns]) as fit:
        recording = fit.train(0)
        trained = fit.weights()
    expected, history = fit_one_process(model, list(global_batches([columns], 5, 2)), epochs=2)
    assert largest_difference(trained, expected) <= TOLERANCE
    losses = [part.logs["loss"] for part in recording.parts]
    np.testing.assert_allclose(losses, history["loss"], rtol=1e-5)
