"""Models in the forms that published examples have, which need no more than their code."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_reference import global_batches, largest_difference, split
from own_step import OwnStep
from tiers import in_tiers

from elephant.config import FitConfig
from elephant.data.schema import DENSE, SCALAR, DataSchema, Field
from elephant.errors import ConfigurationError
from elephant.modeling.model_spec import model_source
from elephant.rank.job import TrainingJob

ROWS, SIZES = 18, (11, 7)
PICTURES = Field("features", ("picture",), "float32", DENSE, (4, 4, 3))
CLASSES = Field("label", ("label",), "int32", SCALAR)


class Brighter(OwnStep):
    """A network inside, a compile of its own with the optimizer made there, and pictures alone in its step."""

    def __init__(self, **options):
        super().__init__(**options)
        convolutions = [layers.Conv2D(3, 3, padding="same", activation="tanh") for _ in range(2)]
        self.network = keras.Sequential([keras.Input((4, 4, 3)), *convolutions])

    def compile(self, learning_rate, **options):
        super().compile(**options)
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.exposure = keras.losses.MeanSquaredError()
        self.total = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.total]

    def call(self, pictures):
        return pictures + self.network(pictures)

    def step(self, data, update):
        def loss():
            return self.exposure(ops.full_like(data, 0.6), data + self.network(data, training=True))

        found = update(loss, self.network.trainable_variables, self.optimizer)
        self.total.update_state(found, sample_weight=ops.cast(ops.shape(data)[0], "float32"))
        return {"total_loss": self.total.result()}


class Late(keras.Model):
    """Layers that only its train_step calls, and builds by that."""

    def __init__(self, **options):
        super().__init__(**options)
        # An instance without weights tells where they begin by its seeds alone.
        drawn = [keras.initializers.GlorotUniform(seed) for seed in range(4)]
        self.patches = layers.Conv2D(4, 2, strides=2, kernel_initializer=drawn[0])
        self.stages = [layers.Dense(4, "tanh", kernel_initializer=one) for one in drawn[1:3]]
        self.head = keras.Sequential([layers.GlobalAveragePooling2D(), layers.Dense(3, kernel_initializer=drawn[3])])

    def train_step(self, data):
        import tensorflow as tf

        pictures, labels = data
        with tf.GradientTape() as tape:
            hidden = self.patches(pictures)
            for stage in self.stages:
                hidden = stage(hidden, training=True)
            loss = self.compute_loss(x=pictures, y=labels, y_pred=self.head(hidden))
        groups = [part.trainable_variables for part in (self.head, self.patches, *self.stages)]
        gradients = tape.gradient(loss, groups)
        pairs = [
            pair for ours, theirs in zip(gradients, groups, strict=True) for pair in zip(ours, theirs, strict=True)
        ]
        self.optimizer.apply_gradients(pairs)
        return {"loss": loss}


class OfTuples(Brighter):
    """The same of batches as a generator yields them, which Keras hands on as tuples of one."""

    def step(self, data, update):
        return super().step(*data, update)


def brighter(kind=Brighter):
    keras.utils.set_random_seed(2)
    model = kind()
    model.compile(learning_rate=0.01)
    return model


def late():
    keras.utils.set_random_seed(2)
    model = Late()
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def pictures():
    rng = np.random.default_rng(1)
    columns = {"features": rng.uniform(size=(ROWS, 4, 4, 3)).astype("float32")}
    return columns | {"label": rng.integers(0, 3, ROWS).astype("int32")}


def fitted(rank_pool, model, schema):
    config = FitConfig(epochs=2, batch_size=4, shuffle=False)
    return rank_pool.fit(TrainingJob(model_source(model), (), config, schema), split(pictures(), SIZES))[0]


def test_fit_when_the_models_compile_makes_its_optimizer_and_its_step_takes_pictures_alone_then_equals_one_process(
    rank_pool, by_value
):
    recording = fitted(rank_pool, brighter(), DataSchema(inputs=(PICTURES,)))
    reference = brighter(OfTuples)
    reference.build((None, 4, 4, 3))
    batches = ((batch["features"],) for batch in global_batches(split(pictures(), SIZES), 4, 2))
    history = reference.fit(batches, epochs=2, steps_per_epoch=3, verbose=0).history
    expected = reference.get_weights()
    assert largest_difference(recording.variables[: len(expected)], expected) <= 1e-5
    totals = [epoch["total_loss"] for epoch in recording.epochs]
    np.testing.assert_allclose(totals, history["total_loss"], rtol=1e-4)


@pytest.mark.parametrize("form", in_tiers(["instance", "function"], fast=["function"], slow="the same as an object"))
def test_fit_when_the_models_step_builds_it_then_equals_one_process(rank_pool, by_value, form):
    if keras.config.backend() != "tensorflow":
        pytest.skip("Keras itself builds a model in its step on TensorFlow alone")
    schema = DataSchema(inputs=(PICTURES,), labels=(CLASSES,))
    recording = fitted(rank_pool, late() if form == "instance" else late, schema)
    reference = late()
    batches = ((batch["features"], batch["label"]) for batch in global_batches(split(pictures(), SIZES), 4, 2))
    reference.fit(batches, epochs=2, steps_per_epoch=3, verbose=0)
    expected = reference.get_weights()
    assert largest_difference(recording.variables[: len(expected)], expected) <= 1e-5


def test_model_when_its_compile_leaves_it_without_an_optimizer_then_says_what_to_call():
    class Elsewhere(Brighter):
        def compile(self, learning_rate):
            self.chosen, self.compiled = keras.optimizers.Adam(learning_rate), True

    model = Elsewhere()
    model.compile(0.1)
    with pytest.raises(ConfigurationError, match=r"without an optimizer.* super\(\).compile\(optimizer=...\)"):
        model_source(model)
