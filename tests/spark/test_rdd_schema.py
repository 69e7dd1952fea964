"""What a fit makes of the first record of an RDD: where its parts are, of which type, and what it refuses. No Spark."""

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from tables import every_case

from elephant.data.shard import Shard, ShardWriter
from elephant.errors import SchemaError
from elephant.modeling.model_info import ModelInfo
from elephant.rank.input.tensors import Tensors
from elephant.spark.rdd.schema import plan_inputs, plan_training

layers = keras.layers


def compiled(inputs, outputs, loss="mse", **options):
    model = keras.Model(inputs, outputs)
    model.compile("sgd", loss, **options)
    return model


def one_input(shape=(4,), dtype=None, units=1, loss="mse"):
    taken = layers.Input(shape, dtype=dtype)
    return compiled(taken, layers.Dense(units)(layers.Flatten()(taken)), loss)


def two_inputs(nested=tuple, **options):
    a, b = layers.Input((1,), name="a"), layers.Input((2,), name="b")
    joined = layers.Concatenate()([a, b])
    outputs = [layers.Dense(1, name="p")(joined), layers.Dense(3, name="q")(joined)]
    inputs = {"a": a, "b": b} if nested is dict else [a, b]
    losses = {"p": "mse", "q": "sparse_categorical_crossentropy"}
    return compiled(inputs, outputs, **{"loss": losses, **options})


def fed(model, records, folder, plan_of=plan_training):
    """Returns the inputs, the labels and the weights, as far as there are some, when a shard of the records is read."""
    plan = plan_of(records[0], ModelInfo.of(model))
    with ShardWriter(folder / "shard", plan.schema) as writer:
        for batch in plan.batches(records):
            writer.write(batch)
        summary = writer.finish()
    assert summary.row_shapes == plan.row_shapes
    shard = Shard(folder / "shard", plan.schema, summary.row_shapes)
    return [part for part in Tensors(shard).of(shard.take(np.arange(len(records)))) if part is not None]


def as_lists(part):
    return keras.tree.map_structure(lambda array: np.asarray(array).tolist(), part)


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((4,), [1, 2, 3, 4]),
        ((4,), (1.0, 2.0, 3.0, 4.0)),
        ((4,), np.arange(1, 5)),
        ((4,), Vectors.dense([1, 2, 3, 4])),
        ((4,), Vectors.sparse(4, [0, 1, 2, 3], [1, 2, 3, 4])),
        ((4,), [np.float64(1), np.float32(2), 3, 4]),
        ((4,), {"x": [1, 2, 3, 4]}),
        ((4,), (np.arange(1, 5),)),
        ((2, 2), np.arange(1, 5)),
        ((2, 2, 1), np.arange(1, 5).reshape(2, 2)),
        ((2, 2), np.arange(1, 5).reshape(1, 2, 2)),
        ((None, None, 2), np.arange(1, 5).reshape(2, 1, 2)),
        ((None, 2), [1, 2, 3, 4]),
    ],
    ids=str,
)
def test_one_input_when_given_in_any_form_then_has_the_models_shape(tmp_path, shape, given):
    taken = layers.Input(shape, name="x")
    pooling = {2: layers.GlobalMaxPooling1D(), 3: layers.GlobalMaxPooling2D()}.get(len(shape), layers.Identity())
    model = compiled(taken, layers.Dense(1)(pooling(taken)))
    x, y = fed(model, [(given, 0.5)] * 2, tmp_path)
    wanted = tuple(
        size or known for size, known in zip(shape, {3: (2, 1, 2), 2: (2, 2)}.get(len(shape), shape), strict=True)
    )
    array = np.asarray(keras.tree.flatten(x)[0])
    assert array.shape == (2, *wanted) and array.dtype == np.float32
    np.testing.assert_array_equal(array[1].ravel(), [1, 2, 3, 4])
    assert y.tolist() == [0.5, 0.5] and y.dtype == np.float32


@pytest.mark.parametrize("given", [0.5, np.float64(0.5), np.array(0.5), [0.5], np.array([0.5])], ids=repr)
def test_numbers_when_the_input_has_one_value_then_are_rows_of_it(tmp_path, given):
    x, _ = fed(one_input((1,)), [(given, 1)], tmp_path)
    assert np.asarray(x).tolist() == [[0.5]]


@pytest.mark.parametrize("nested", [tuple, dict])
@pytest.mark.parametrize(
    "given",
    [
        (1, [2, 3]),
        [1, [2, 3]],
        {"b": (2, 3), "a": [1]},
        np.array([1, 2, 3]),
        [1.0, 2.0, 3.0],
    ],
    ids=repr,
)
def test_several_inputs_when_given_in_any_form_then_each_finds_its_part(tmp_path, nested, given):
    x, y = fed(two_inputs(nested), [(given, (0.5, 2)), (given, [1.5, 0])], tmp_path)
    parts = [x["a"], x["b"]] if nested is dict else list(x)
    assert [part.tolist() for part in parts] == [[[1], [1]], [[2, 3], [2, 3]]]
    assert as_lists(y) == ([0.5, 1.5], [2, 0])
    assert y[1].dtype == np.int64


def test_labels_and_weights_when_given_by_name_then_lie_as_the_outputs_do(tmp_path):
    records = [((0, [0, 0]), {"q": 1, "p": 2.0}, {"p": 0.25, "q": 3})]
    _, y, w = fed(two_inputs(), records, tmp_path)
    assert as_lists(y) == ([2.0], [1]) and as_lists(w) == ([0.25], [3.0])


def tagger(length):
    tokens = layers.Input((length,), dtype="int32")
    hidden = layers.Dense(3)(layers.Embedding(5, 4)(tokens))
    return compiled(tokens, hidden, "sparse_categorical_crossentropy")


@pytest.mark.parametrize("weight", [[0.5, 2.0, 0.0], (0.5, 2, 0), np.array([[0.5], [2], [0]])], ids=str)
def test_weights_when_each_token_has_one_then_lie_as_the_loss_does(tmp_path, weight):
    _, _, w = fed(tagger(3), [([1, 2, 3], [0, 1, 2], weight)] * 2, tmp_path)
    assert w.dtype == np.float32 and w.tolist() == [[0.5, 2.0, 0.0]] * 2


def test_weights_when_sequences_are_of_any_length_then_are_as_long(tmp_path):
    records = [([1, 2, 3], [0, 1, 2], [0.5, 2.0, 1.0]), ([4], [1], [3.0])]
    _, _, w = fed(tagger(None), records, tmp_path)
    assert w.tolist() == [[0.5, 2.0, 1.0], [3.0, 0.0, 0.0]]


@pytest.mark.parametrize("labels", [(None, 2), {"q": 2}, 2], ids=str)
def test_labels_when_one_output_has_no_loss_then_are_those_of_the_other(tmp_path, labels):
    model = two_inputs(loss=[None, "sparse_categorical_crossentropy"])
    _, y = fed(model, [((0, [0, 0]), labels)] * 2, tmp_path)
    assert as_lists(keras.tree.flatten(y)[-1]) == [2, 2]


@pytest.mark.parametrize(
    ("loss", "units", "given", "dtype", "kept"),
    [
        ("sparse_categorical_crossentropy", 3, 2, "int64", 2),
        ("sparse_categorical_crossentropy", 3, np.int32(2), "int32", 2),
        ("sparse_categorical_crossentropy", 3, 2.0, "float32", 2.0),
        ("sparse_categorical_crossentropy", 3, np.array([2]), "int64", [2]),
        ("categorical_crossentropy", 3, np.array([0, 0, 1]), "float32", [0, 0, 1]),
        ("mse", 1, True, "int32", 1),
        ("mse", 1, np.array([0.5]), "float32", [0.5]),
    ],
)
def test_labels_when_of_any_type_then_integers_stay_integers_where_a_loss_takes_them(
    tmp_path, loss, units, given, dtype, kept
):
    _, y = fed(one_input(units=units, loss=loss), [([0] * 4, given)], tmp_path)
    assert y.dtype == dtype and y.tolist() == [kept]


def test_sequences_strings_and_tokens_when_in_records_then_reach_the_model(tmp_path):
    inputs = {
        "tokens": layers.Input((None,), dtype="int32", name="tokens"),
        "words": layers.Input((1,), dtype="string", name="words"),
    }
    hashed = layers.Hashing(4, output_mode="one_hot")(inputs["words"])
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(9, 2)(inputs["tokens"]))
    model = compiled(inputs, layers.Dense(1)(layers.Concatenate()([hashed, pooled])))
    records = [({"tokens": [1, 2, 3], "words": "a"}, 0.0), ({"tokens": np.array([4]), "words": "ü"}, 1.0)]
    x, _ = fed(model, records, tmp_path)
    assert as_lists(x["tokens"]) == [[1, 2, 3], [4, 0, 0]]
    assert [text.decode() for text in np.ravel(x["words"]).tolist()] == ["a", "ü"]


def test_models_when_trained_without_labels_then_take_x_alone(tmp_path):
    taken = layers.Input((2,))
    autoencoder = compiled(taken, layers.Dense(2)(taken))
    for record in (np.ones(2), [1, 1], (np.ones(2),), (np.ones(2), None)):
        plan = plan_training(record, ModelInfo.of(autoencoder))
        assert plan.schema.inputs_as_labels
    x, y = fed(autoencoder, [np.array([1, 2])], tmp_path)
    assert as_lists(x) == as_lists(y) == [[1, 2]]

    class Own(keras.Model):
        def train_step(self, data):
            raise NotImplementedError

    own = Own(taken, layers.Dense(3)(taken))
    own.compile("sgd")
    (x,) = fed(own, [np.array([1, 2])], tmp_path / "a") if (tmp_path / "a").mkdir() is None else ()
    assert as_lists(x) == [[1, 2]]
    (tmp_path / "b").mkdir()
    _, y = fed(own, [([1, 2], {"any": 1, "thing": (0.5, [1, 2])})], tmp_path / "b")
    assert as_lists(y) == {"any": [1], "thing": ([0.5], [[1, 2]])}


def test_inputs_when_the_model_tells_none_then_are_what_the_first_record_has(tmp_path):
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    (x,) = fed(model, [{"u": [1, 2], "v": (np.eye(2), 3)}], tmp_path, plan_inputs)
    assert as_lists(x) == {"u": [[1, 2]], "v": ([[[1, 0], [0, 1]]], [[3]])}


@every_case(
    ("model", "record", "text"),
    [
        (
            one_input,
            ([1, 2, 3], 0),
            r"x: expected the model's shape \(4,\), or as many values.* shape \(3,\) in the first",
        ),
        (one_input, (np.eye(2), 0), r"x: expected the model's shape \(4,\).* Received: shape \(2, 2\)"),
        (one_input, (None, 0), r"x: expected numbers, arrays of them or Spark vectors.* Received: NoneType None"),
        (one_input, (["a"] * 4, 0), r"x: expected numbers.* Received: list \['a'"),
        (one_input, ([[1, 2], [3]], 0), r"x: expected numbers.* Received: list"),
        (one_input, ([1, 2, 3, 4], "cat"), r"y: expected numbers.* Received: str 'cat'"),
        (one_input, ([1, 2, 3, 4], [1, 2]), r"y: expected the model's shape \(1,\).* Received: shape \(2,\)"),
        (one_input, ([1, 2, 3, 4], {"z": 1}), r"y: expected a label for each .* a dictionary with the keys \['z'\]"),
        (one_input, ([1, 2, 3, 4], 1, [1, 2]), r"weight: expected one number per record"),
        (lambda: tagger(3), ([1, 2, 3], [0, 1, 2], [1, 2]), r"weight: expected the model's shape \(3,\).* shape \(2,"),
        (one_input, [1, 2, 3, 4], r"fit: expected an RDD of tuples \(x, y\).* a list of 4 as the first record"),
        (two_inputs, ([1, 2], (0, 0)), r"x b: expected the model's shape \(2,\)"),
        (two_inputs, ([1, 2, 3, 4], (0, 0)), r"x: expected a part for each of the model's inputs a, b"),
        (two_inputs, ({"a": 1}, (0, 0)), r"x: .* a dictionary with the keys \['a'\] in the first record"),
        (two_inputs, ((0, [0, 0]), 0), r"y: expected a label for each of the model's outputs p, q.* Received: int"),
        (
            two_inputs,
            ((0, [0, 0]), (0, 0), {"p": 1}),
            r"weight: expected a number, or one for each of the outputs p, q",
        ),
    ],
)
def test_first_record_when_the_model_cannot_take_it_then_says_what_to_do(model, record, text):
    with pytest.raises(SchemaError, match=text):
        plan_training(record, ModelInfo.of(model()))


def test_images_when_channels_lie_elsewhere_then_are_refused_and_not_reshaped():
    taken = layers.Input((4, 4, 3))
    facts = ModelInfo.of(compiled(taken, layers.Dense(1)(layers.Flatten()(taken))))
    with pytest.raises(SchemaError, match=r"expected the model's shape \(4, 4, 3\).* Received: shape \(3, 4, 4\)"):
        plan_inputs(np.zeros((3, 4, 4)), facts)
    assert plan_inputs(np.zeros(48), facts).schema.inputs[0].shape == (4, 4, 3)
