"""What is read off a model, whichever way its loss was named."""

import json

import keras
import pytest
from tables import every_case

from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.model_info import ARRAY, BINARY, CLASSES, VALUE, ModelInfo


def facts_of(loss, units=3, shape=(4,), dtype=None, optimizer="sgd"):
    model = keras.Sequential([keras.layers.Input(shape, dtype=dtype), keras.layers.Dense(units)])
    model.compile(optimizer, loss)
    return ModelInfo.of(model)


@every_case(
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
    assert facts_of(loss, units).outputs[0].kind == kind


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, **rest):
        return super().compute_loss(x, y - 1, y_pred, **rest)


def sparse_categorical_crossentropy(true, predicted):
    return keras.losses.sparse_categorical_crossentropy(true - 1, predicted)


@every_case(
    ("loss", "units", "known"),
    [
        ("sparse_categorical_crossentropy", 3, (3, None)),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), 3, (3, -1)),
        (keras.losses.CategoricalFocalCrossentropy(), 3, (3, None)),
        ("binary_crossentropy", 1, (2, None)),
        (keras.losses.BinaryCrossentropy(label_smoothing=0.1), 1, (None, None)),
        ("hinge", 1, (None, None)),
        ("mse", 3, (None, None)),
        (sparse_categorical_crossentropy, 3, (None, None)),
    ],
)
def test_classes_when_the_loss_is_not_keras_own_then_are_unknown(loss, units, known):
    output = facts_of(loss, units).outputs[0]
    assert (output.num_classes, output.ignored_class) == known
    model = OwnLoss([keras.layers.Input((4,)), keras.layers.Dense(units)])
    model.compile("sgd", loss)
    assert ModelInfo.of(model).outputs[0].num_classes is None


def test_facts_when_read_then_have_shapes_types_and_logits():
    facts = facts_of(keras.losses.BinaryCrossentropy(from_logits=True), units=1, shape=(5, 4), dtype="float16")
    given, output = facts.inputs[0], facts.outputs[0]
    assert (given.shape, given.dtype, output.shape) == ((5, 4), "float16", (5, 1))
    assert output.from_logits and output.label_shape == (5, 1) and not facts.scheduled_rate


def test_facts_when_the_rate_is_scheduled_then_say_so():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    assert facts_of("mse", optimizer=keras.optimizers.SGD(schedule)).scheduled_rate


def test_facts_when_nothing_is_reduced_then_refuse_it():
    with pytest.raises(UnsupportedError, match=r"one of the reductions mean, .*Received: None"):
        facts_of(keras.losses.MeanSquaredError(reduction=None))


def test_facts_when_there_are_several_inputs_and_outputs_then_name_them_all():
    image, words = keras.Input((2,), name="image"), keras.Input((None,), dtype="int32", name="words")
    both = keras.layers.Concatenate()(
        [image, keras.layers.GlobalMaxPooling1D()(keras.layers.Embedding(9, 3, trainable=False)(words))]
    )
    outputs = {"kind": keras.layers.Dense(4)(both), "age": keras.layers.Dense(1)(both)}
    model = keras.Model([image, words], outputs)
    model.compile("sgd", {"age": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)})
    facts = ModelInfo.of(model)
    assert [(given.name, given.shape, given.dtype) for given in facts.inputs] == [
        ("image", (2,), "float32"),
        ("words", (None,), "int32"),
    ]
    assert [(given.name, given.kind, given.from_logits) for given in facts.outputs] == [
        ("age", VALUE, False),
        ("kind", CLASSES, True),
    ]
    assert (facts.x, facts.y) == ((0, 1), {"age": 0, "kind": 1})
    layers = [(layer.kind, layer.shape, layer.params, layer.trained) for layer in facts.layers]
    assert ("Embedding", "(None, None, 3)", 27, 0) in layers and ("Dense", "(None, 4)", 24, 24) in layers
    assert facts.title.endswith(f"{len(layers)} layers, {27 + 24 + 6} parameters")
    assert ModelInfo.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_facts_when_there_are_fewer_losses_than_outputs_then_refuse_them():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    model.compile("sgd", ["mse"])
    with pytest.raises(ConfigurationError, match="expected one loss for each of 2 outputs"):
        ModelInfo.of(model)


def heads_of(outputs, loss, metrics=None):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, outputs(inputs))
    model.compile("sgd", loss, metrics=metrics)
    return [(output.name, output.needs_label) for output in ModelInfo.of(model).outputs]


def test_outputs_when_some_have_no_loss_then_tell_which_need_labels():
    def by_name(x):
        return {name: keras.layers.Dense(1)(x) for name in ("a", "b", "c")}

    def listed(x):
        return [keras.layers.Dense(1, name=name)(x) for name in ("a", "b", "c")]

    expected = [("a", True), ("b", False), ("c", True)]
    assert heads_of(by_name, {"a": "mse", "b": None, "c": None}, {"c": ["mae"]}) == expected
    assert heads_of(listed, ["mse", None, "mse"]) == expected
    assert heads_of(listed, ["mse", None, None], [[], [], ["mae"]]) == expected


def test_outputs_when_a_subclass_is_not_built_then_follow_from_its_losses():
    class Heads(keras.Model):
        pass

    model = Heads()
    model.compile("sgd", {"age": "mse", "kind": "mae"})
    facts = ModelInfo.of(model)
    assert ([output.name for output in facts.outputs], facts.y) == (["age", "kind"], {"age": 0, "kind": 1})
    assert (facts.inputs, facts.x, facts.knows_outputs) == ((), 0, True)


def test_measures_when_keras_alone_computes_them_then_are_known_before_a_fit():
    named = {"out": ["acc", keras.metrics.AUC(name="area")], "other": "mae"}
    layer, inputs = keras.layers.Dense(1, name="out"), keras.Input((4,))
    model = keras.Model(inputs, {"out": layer(inputs), "other": keras.layers.Dense(2, name="other")(inputs)})
    model.compile("sgd", "mse", metrics=named)
    assert {"loss", "acc", "area", "mae"} <= set(ModelInfo.of(model).measures)
    assert facts_of("mse").measures == ("loss",)
    own = OwnLoss([keras.layers.Input((4,)), keras.layers.Dense(1)])
    own.compile("sgd", "mse", metrics=["mae"])
    assert ModelInfo.of(own).measures is None
    assert ModelInfo.from_json(json.loads(json.dumps(ModelInfo.of(model).to_json()))) == ModelInfo.of(model)
