"""Models with a train_step of their own: a GAN with two optimizers, and losses that are sums, against one process."""

import keras
import numpy as np
import pytest
from keras import ops
from keras_reference import global_batches, job_for, largest_difference, split
from own_step import OwnStep
from tiers import in_tiers

TOLERANCE = 1e-5


class Gan(OwnStep):
    """Generator and discriminator, each with its optimizer; the noise is a function of the rows, as in one process."""

    def __init__(self, **options):
        super().__init__(**options)
        self.generator = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(6)])
        self.discriminator = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])

    def call(self, inputs):
        return self.discriminator(self.generator(inputs))

    def compile(self, generator_optimizer, discriminator_optimizer):
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(self, data, update):
        real, _ = data[:2]
        noise = ops.sin(real * 17.0)

        def scores_made():
            return self.discriminator(self.generator(noise, training=True), training=True)

        def of_discriminator():
            real_ones, made = self.discriminator(real, training=True), scores_made()
            loss = self.cross_entropy(ops.ones_like(real_ones), real_ones)
            return loss + self.cross_entropy(ops.zeros_like(made), made)

        def of_generator():
            made = scores_made()
            return self.cross_entropy(ops.ones_like(made), made)

        d_loss = update(of_discriminator, self.discriminator.trainable_variables, self.discriminator_optimizer)
        g_loss = update(of_generator, self.generator.trainable_variables, self.generator_optimizer)
        return {"d_loss": d_loss, "g_loss": g_loss}


def gan():
    keras.utils.set_random_seed(3)
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05, momentum=0.9))
    model(np.zeros((1, 6), "float32"))
    return model


# With one optimizer: test_published_models.py, and the VAE of test_models.py.
def test_weights_and_logs_when_the_step_is_the_models_own_then_equal_one_process(rank_pool, by_value):
    if keras.config.backend() == "jax":
        pytest.skip("Keras' fit on JAX keeps no state of a second optimizer")
    rows = np.random.default_rng(0).normal(size=(37, 6)).astype("float32")
    columns = {"features": rows, "label": np.zeros(37, "float32")}
    parts = split(columns, (23, 14))
    recordings = rank_pool.fit(job_for(gan, epochs=2, batch_size=4, shuffle=False), parts)
    reference, batches = gan(), list(global_batches(parts, 4, 2))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    history = reference.fit(tuples, epochs=2, steps_per_epoch=len(batches) // 2, verbose=0).history
    expected = [np.array(weight) for weight in reference.get_weights()]
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
    for name, values in history.items():
        np.testing.assert_allclose([logs[name] for logs in recordings[0].epochs], values, rtol=1e-4)


class Vector(OwnStep):
    """Of the published language models: the loss of each row, which is not reduced."""

    def __init__(self, reduced=ops.sum, **options):
        super().__init__(**options)
        self.table = keras.layers.Embedding(12, 4)
        self.hidden, self.out = keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)
        self.reduced = reduced
        self.loss_tracker = keras.metrics.Mean("loss")

    def call(self, inputs):
        words = self.table(ops.cast(ops.abs(inputs) * 5, "int32") % 12)
        return self.out(self.hidden(ops.concatenate([inputs, ops.mean(words, axis=1)], axis=1)))

    @property
    def metrics(self):
        return [self.loss_tracker]

    def step(self, data, update):
        rows, labels = data

        def errors():
            return ops.square(self(rows, training=True)[:, 0] - labels)

        # TensorFlow adds up the gradients of a vector; others take a scalar only.
        in_vector = keras.config.backend() == "tensorflow" and self.reduced is ops.sum
        update(errors if in_vector else lambda: self.reduced(errors()), self.trainable_variables, self.optimizer)
        self.loss_tracker.update_state(errors())
        return {"loss": self.loss_tracker.result()}


def of_vector(optimizer):
    keras.utils.set_random_seed(3)
    model = Vector()
    model.compile(optimizer)
    model(np.zeros((1, 6), "float32"))
    return model


# What an optimizer makes of the sums does not depend on whose rows they are.
SUMS = {
    "Adam, one without rows": (lambda: of_vector(keras.optimizers.Adam(0.01)), (25, 0, 13)),
    "SGD, clipped, even": (lambda: of_vector(keras.optimizers.SGD(0.003, global_clipnorm=0.5)), (30, 30)),
}


@pytest.mark.parametrize("case", in_tiers(SUMS, fast=["Adam, one without rows"], slow="another optimizer"))
def test_weights_when_a_step_adds_up_its_loss_over_rows_then_equal_one_process(rank_pool, case, by_value):
    build, sizes = case
    rng, rows = np.random.default_rng(1), sum(sizes)
    columns = {"features": rng.normal(size=(rows, 6)), "label": rng.normal(size=rows)}
    parts = split({name: values.astype("float32") for name, values in columns.items()}, sizes)
    recordings = rank_pool.fit(job_for(build, epochs=2, batch_size=8, shuffle=False), parts)
    reference, batches = build(), list(global_batches(parts, 8, 2))
    tuples = ((batch["features"], batch["label"]) for batch in batches)
    reference.fit(tuples, epochs=2, steps_per_epoch=len(batches) // 2, verbose=0)
    expected = [np.array(weight) for weight in reference.get_weights()]
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
