"""Keras' guides on a ``train_step`` of one's own with an estimator in the place of ``fit``, against one process.

In the form of the backend that is set: state that is handed on (JAX), a backward pass (PyTorch), a tape (TensorFlow).
"""

import keras
import numpy as np
import pytest
from keras import layers
from keras_reference import global_batches, largest_difference, split
from spark_frames import partitioned_frame, split_rows

from elephant import KerasEstimator

pytestmark = pytest.mark.usefixtures("by_value")

SIZES = (13, 9)
EPOCHS, BATCH = 2, 4
TOLERANCE = 1e-5


class OwnTraining(keras.Model):
    """That of keras.io/guides/custom_train_step_in_jax, ..._in_torch and ..._in_tensorflow: with its own metrics."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.loss_tracker = keras.metrics.Mean(name="own_loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="own_mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    def train_step(self, *given):
        step = {"jax": self.step_on_jax, "torch": self.step_on_torch, "tensorflow": self.step_on_tensorflow}
        return step[keras.config.backend()](*given)

    def compute_loss_and_updates(self, trainable_variables, non_trainable_variables, x, y, training=False):
        y_pred, non_trainable_variables = self.stateless_call(
            trainable_variables, non_trainable_variables, x, training=training
        )
        return self.loss_fn(y, y_pred), (y_pred, non_trainable_variables)

    def step_on_jax(self, state, data):
        import jax

        trainable_variables, non_trainable_variables, optimizer_variables, metrics_variables = state
        x, y = data[:2]
        of_loss = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (y_pred, non_trainable_variables)), gradients = of_loss(
            trainable_variables, non_trainable_variables, x, y, training=True
        )
        trainable_variables, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, gradients, trainable_variables
        )
        count = len(self.loss_tracker.variables)
        of_tracker = self.loss_tracker.stateless_update_state(metrics_variables[:count], loss)
        of_mae = self.mae_metric.stateless_update_state(metrics_variables[count:], y, y_pred)
        logs = {
            "own_loss": self.loss_tracker.stateless_result(of_tracker),
            "own_mae": self.mae_metric.stateless_result(of_mae),
        }
        return logs, (trainable_variables, non_trainable_variables, optimizer_variables, [*of_tracker, *of_mae])

    def step_on_torch(self, data):
        import torch

        x, y = data[:2]
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.loss_fn(y, y_pred)
        loss.backward()
        weights = list(self.trainable_weights)
        gradients = [variable.value.grad for variable in weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, weights)
        return self.updated_metrics(loss, y, y_pred)

    def step_on_tensorflow(self, data):
        import tensorflow as tf

        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.updated_metrics(loss, y, y_pred)

    def updated_metrics(self, loss, y, y_pred):
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def own_training():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    outputs = layers.Dense(1)(layers.Dense(8, "tanh")(inputs))
    model = OwnTraining(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01))
    return model


def vectors(rng, rows):
    return {
        "features": rng.normal(size=(rows, 6)).astype("float32"),
        "label": rng.normal(size=(rows, 1)).astype("float32"),
    }


VECTORS = "features array<float>, label array<float>"


@pytest.mark.slow("a fit on executors; tests/rank/test_own_steps.py trains such models by ranks")
def test_own_training_when_two_ranks_train_it_then_equals_one_process(spark):
    data = vectors(np.random.default_rng(1), sum(SIZES))
    frame = partitioned_frame(spark, split_rows(data, SIZES), VECTORS)
    # Keras loads no functional model whose class takes *args, as that of the guides does: a function makes it.
    options = {"numWorkers": 2, "epochs": EPOCHS, "batchSize": BATCH, "shuffle": False, "verbose": 0}
    fitted = KerasEstimator(model=own_training, **options).fit(frame)
    reference, batches = own_training(), list(global_batches(split(data, SIZES), BATCH, EPOCHS))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    history = reference.fit(tuples, epochs=EPOCHS, steps_per_epoch=len(batches) // EPOCHS, verbose=0).history
    moved = largest_difference(own_training().get_weights(), reference.get_weights())
    assert moved > 100 * TOLERANCE
    assert largest_difference(fitted.model.get_weights(), reference.get_weights()) <= TOLERANCE
    np.testing.assert_allclose(fitted.history["own_mae"], history["own_mae"], rtol=1e-5)
