"""What is read off a model, whichever way its loss was named."""

import keras
import pytest

from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.facts import ARRAY, BINARY, CLASSES, VALUE, ModelFacts


def facts_of(loss, units=3, shape=(4,), dtype=None, optimizer="sgd"):
    model = keras.Sequential([keras.layers.Input(shape, dtype=dtype), keras.layers.Dense(units)])
    model.compile(optimizer, loss)
    return ModelFacts.of(model)


@pytest.mark.parametrize(
    ("loss", "units", "kind"),
    [
        ("sparse_categorical_crossentropy", 3, CLASSES),
        ("categorical_crossentropy", 3, CLASSES),
        ("CategoricalCrossentropy", 3, CLASSES),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), 3, CLASSES),
        (keras.losses.sparse_categorical_crossentropy, 3, CLASSES),
        ([keras.losses.CategoricalFocalCrossentropy()], 3, CLASSES),
        ("binary_crossentropy", 1, BINARY),
        (keras.losses.BinaryFocalCrossentropy(), 1, BINARY),
        ("binary_crossentropy", 3, ARRAY),
        ("mse", 1, VALUE),
        (keras.losses.Huber(), 1, VALUE),
        ("mse", 3, ARRAY),
    ],
)
def test_output_kind_when_the_loss_is_known_then_follows_from_it(loss, units, kind):
    assert facts_of(loss, units).output_kind == kind


def test_facts_when_read_then_have_shapes_types_and_logits():
    facts = facts_of(keras.losses.BinaryCrossentropy(from_logits=True), units=1, shape=(5, 4), dtype="float16")
    assert (facts.input_shape, facts.input_dtype, facts.output_shape) == ((5, 4), "float16", (5, 1))
    assert facts.from_logits and facts.label_shape == (5, 1) and not facts.scheduled_rate


def test_facts_when_the_rate_is_scheduled_then_say_so():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    assert facts_of("mse", optimizer=keras.optimizers.SGD(schedule)).scheduled_rate


@pytest.mark.parametrize("reduction", ["sum", None, "mean_with_sample_weight"])
def test_facts_when_the_reduction_is_not_a_mean_over_rows_then_refuse_it(reduction):
    with pytest.raises(UnsupportedError, match=f"reduction 'sum_over_batch_size'. Received: {reduction!r}"):
        facts_of(keras.losses.MeanSquaredError(reduction=reduction))


def test_facts_when_there_are_two_outputs_then_refuse_them():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    model.compile("sgd", ["mse", "mse"])
    with pytest.raises(UnsupportedError, match="expected one output. Received: .* with 2 outputs"):
        ModelFacts.of(model)
    with pytest.raises(ConfigurationError, match="expected one loss"):
        facts_of(["mse", "mae"])
