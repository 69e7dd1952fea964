"""Models as lists of calls, and as stages, against the whole model."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops

from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.stages import ModelGraph, ModelStage, linear_partition, require_cuttable, without_values


def random_model(seed):
    """Returns a functional model of two inputs and two outputs, with residuals, shared and nested layers."""
    rng = np.random.default_rng(seed)
    inputs = [keras.Input((6,)), keras.Input((6,))]
    shared = layers.Dense(6)
    tensors = list(inputs)

    def pick():
        return tensors[int(rng.integers(max(0, len(tensors) - 4), len(tensors)))]

    def nested():
        inner = keras.Input((6,))
        return keras.Model(inner, layers.Add()([layers.Dense(6, "tanh")(inner), inner]))

    makers = [
        lambda: layers.Dense(6, "relu")(pick()),
        lambda: layers.Add()([pick(), pick()]),
        lambda: layers.BatchNormalization()(pick()),
        lambda: layers.Dense(6)(layers.Concatenate()([pick(), pick()])),
        lambda: ops.multiply(pick(), 0.5) + pick(),
        lambda: shared(pick()),
        lambda: keras.Sequential([layers.Dense(6, "relu"), nested(), layers.Dense(6)])(pick()),
        lambda: nested()(nested()(pick())),
        lambda: layers.Reshape((6,))(layers.Reshape((3, 2))(pick())),
    ]
    for _ in range(10):
        tensors.append(makers[int(rng.integers(len(makers)))]())
    early = layers.Dense(2)(tensors[3])
    return keras.Model(inputs, [layers.Dense(3)(layers.Add()([tensors[-1], tensors[-2], inputs[1]])), early])


def outputs_of(stages, inputs, training=False):
    tensors = inputs
    for stage in stages:
        tensors = stage([ops.convert_to_tensor(one) for one in tensors], training=training)
    return [ops.convert_to_numpy(one) for one in tensors]


def cut_at(graph, cuts):
    bounds = [0, *cuts, len(graph.calls)]
    return [ModelStage(graph, start, stop) for start, stop in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", range(6))
def test_stages_when_a_random_graph_is_cut_at_random_then_equal_the_model_to_the_bit(seed):
    model, rng = random_model(seed), np.random.default_rng(seed)
    graph = ModelGraph(model)
    inputs = [rng.normal(size=(5, 6)).astype("float32") for _ in range(2)]
    expected = [ops.convert_to_numpy(one) for one in model(inputs)]
    for count in (1, 2, 4):
        cuts = sorted(rng.choice(np.arange(1, len(graph.calls)), count, replace=False).tolist())
        found = outputs_of(cut_at(graph, cuts), inputs)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_stages_when_a_tensor_has_a_mask_then_it_crosses_too():
    inputs = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(9, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.LSTM(3)(layers.Dense(4)(embedded))))
    rows = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]], "int32")
    graph = ModelGraph(model)
    [cut] = graph.named_cuts([model.layers[2].name])
    first, second = cut_at(graph, [cut])
    assert any(spec.is_masked for spec in first.leaving)
    np.testing.assert_array_equal(outputs_of([first, second], [rows])[0], ops.convert_to_numpy(model(rows)))
    assert not np.allclose(ops.convert_to_numpy(model(rows)), ops.convert_to_numpy(model(rows[:, ::-1])))


def test_stages_when_a_backbone_is_nested_then_the_cut_is_inside_of_it():
    backbone = keras.Sequential(
        [layers.Input((4,)), layers.Dense(4, name="one"), layers.Dense(4, name="two")], name="backbone"
    )
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, name="head")(backbone(inputs)))
    graph = ModelGraph(model)
    first, second = cut_at(graph, graph.named_cuts(["two"]))
    assert [variable.path for variable in (*first.variables, *second.variables)] == [v.path for v in model.variables]
    assert {variable.path for variable in first.variables} == {v.path for v in backbone.layers[0].variables}
    assert len(cut_at(graph, graph.named_cuts(["two", "head"]))) == 3


def test_stages_when_a_model_is_made_without_values_then_each_has_its_own_alone():
    def build():
        return keras.Sequential([layers.Input((4,)), layers.Dense(3), layers.Dropout(0.5), layers.Dense(2)])

    keras.utils.set_random_seed(3)
    expected = [ops.convert_to_numpy(one) for one in build().weights]
    keras.utils.set_random_seed(3)
    with without_values():
        model = build()
    graph = ModelGraph(model)
    second = ModelStage(graph, 3, len(graph.calls))
    assert model.layers[0].kernel._value is None
    for variable, value in zip(second.trainable_variables, expected[2:], strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable.value), value)
    assert outputs_of([second], [np.ones((2, 3), "float32")])[0].shape == (2, 2)
    assert model.layers[0].kernel._value is None


def test_variables_when_making_a_model_without_values_fails_then_none_waits_for_a_value():
    dense = layers.Dense(3)
    with pytest.raises(LookupError, match="of the user"), without_values():
        dense.build((None, 4))
        raise LookupError("of the user")
    with keras.StatelessScope():
        pass
    assert dense.kernel._value is None


def test_cuts_when_costs_are_uneven_then_the_dearest_stage_is_as_cheap_as_can_be():
    rng = np.random.default_rng(0)
    for _ in range(30):
        costs = rng.integers(1, 9, 9).tolist()
        places = sorted(rng.choice(np.arange(1, 9), 6, replace=False).tolist())
        largest = {
            cuts: max(sum(costs[start:stop]) for start, stop in itertools.pairwise([0, *cuts, 9]))
            for cuts in itertools.combinations(places, 2)
        }
        assert largest[linear_partition(costs, places, 3)] == min(largest.values())


def test_balanced_cuts_when_layers_are_alike_then_each_stage_has_variables_and_as_many():
    model = keras.Sequential([layers.Input((4,)), *[layers.Dense(4) for _ in range(4)], layers.Flatten()])
    graph = ModelGraph(model)
    stages = cut_at(graph, graph.balanced_cuts(4, [1.0] * len(graph.calls)))
    assert [len(stage.trainable_variables) for stage in stages] == [2, 2, 2, 2]
    with pytest.raises(UnsupportedError, match="at least 5 parts.*Received: one with 4"):
        graph.balanced_cuts(5, [1.0] * len(graph.calls))


def shared_model():
    inputs, dense = keras.Input((4,)), layers.Dense(4, name="twice")
    middle = layers.Dense(4, name="middle")(dense(inputs))
    return keras.Model(inputs, layers.Dense(1, name="last")(dense(middle)))


def test_cuts_when_a_layer_would_be_on_both_sides_then_it_is_named():
    graph = ModelGraph(shared_model())
    with pytest.raises(UnsupportedError, match="a cut before 'middle', with calls of 'twice'"):
        graph.named_cuts(["middle"])
    assert graph.named_cuts(["last"])
    assert graph.balanced_cuts(2, [1.0] * len(graph.calls)) == graph.named_cuts(["last"])


def test_cuts_when_the_head_has_the_table_of_the_embedding_then_says_that_they_are_in_one_stage():
    class Scores(layers.Layer):
        def __init__(self, table, **kwargs):
            super().__init__(**kwargs)
            self.table = table

        def call(self, x):
            return ops.matmul(x, ops.transpose(self.table.embeddings))

    inputs, table = keras.Input((4,), dtype="int32"), layers.Embedding(9, 4, name="table")
    hidden = layers.Dense(4, name="hidden")(table(inputs))
    graph = ModelGraph(keras.Model(inputs, Scores(table, name="scores")(hidden)))
    with pytest.raises(UnsupportedError, match="a cut before 'hidden', with calls of 'scores'.*an embedding with the"):
        graph.named_cuts(["hidden"])
    with pytest.raises(UnsupportedError, match="with all between them: 'scores'. Ask for fewer stages, or give each"):
        graph.balanced_cuts(2, [1.0] * len(graph.calls))


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["absent"], "Received: 'absent'. The model has twice, middle, last"),
        (["last", "last"], "in the order in which the model computes them"),
        (["twice"], "after its first one"),
    ],
)
def test_named_cuts_when_names_do_not_fit_then_says_which_there_are(names, match):
    with pytest.raises(ConfigurationError, match=match):
        ModelGraph(shared_model()).named_cuts(names)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class OwnCall(keras.Model):
    def call(self, inputs):
        return inputs


def test_graph_when_a_model_has_none_then_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="Received: 'mine' of class OwnCall"):
        ModelGraph(OwnCall(name="mine"))
    with pytest.raises(UnsupportedError, match="that is built"):
        ModelGraph(keras.Sequential([layers.Dense(1)]))


def test_model_when_it_cannot_be_trained_in_stages_then_is_refused_by_name():
    inputs = keras.Input((4,))
    outputs = layers.Dense(1)(inputs)
    with pytest.raises(ConfigurationError, match="expected a compiled model"):
        require_cuttable(keras.Model(inputs, outputs))
    own = OwnStep(inputs, outputs)
    own.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="Keras' own train_step.*that of OwnStep"):
        require_cuttable(own)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    with pytest.raises(UnsupportedError, match="gradient_accumulation_steps=2"):
        require_cuttable(model)
