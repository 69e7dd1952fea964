"""A model whose weights count: what every row adds to them depends on that row alone, and sums of it are exact."""

import keras
import numpy as np

FEATURES = 4
RATE = 0.25


def counting_data(rows):
    """Returns (rows, 4) features of small whole numbers, and a label that no prediction comes near."""
    features = np.random.default_rng(3).integers(-8, 9, (rows, FEATURES)).astype("float32")
    return {"features": features, "label": np.full(rows, -1e9, "float32")}


def counting_model(optimizer=None):
    """Returns a model of four weights, zero at first, whose gradient is the mean of a batch's features.

    The absolute error's derivative is 1 wherever the prediction is above the label. Whole numbers divided
    by powers of two are exact in float32: in whichever order batches are applied, the weights are the same.
    """
    layers = [keras.layers.Input((FEATURES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    model.compile(optimizer or keras.optimizers.SGD(RATE), "mae")
    return model


def counted(columns, *, batch_size, epochs):
    """Returns the weights after so many epochs in which every row was in one full batch."""
    return -RATE * epochs * columns["features"].astype(np.float64).sum(axis=0) / batch_size


def weights_of(fitted):
    """Returns the four weights."""
    return fitted.model.get_weights()[0][:, 0]
