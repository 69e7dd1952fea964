"""What partitions give the metrics, added up, against ``model.evaluate`` of one process."""

import keras
import numpy as np
import pyarrow as pa
import pytest
from tiers import in_tiers

from elephant.backends import current
from elephant.data.schema import DENSE, SCALAR, TEXT, DataSchema, Field
from elephant.errors import DataError
from elephant.modeling.model_info import ModelInfo
from elephant.modeling.model_spec import model_source
from elephant.spark.evaluate import Evaluation, combined, evaluate_chunks
from elephant.spark.transform import packed_model

FEATURES = Field("features", ("x",), "float32", DENSE, (4,))
WEIGHT = Field("weight", ("w",), "float32", SCALAR)


def lists(matrix):
    return pa.array(np.asarray(matrix).tolist(), pa.list_(pa.float32()))


def evaluated(model, schema, arrays, sizes, batch_size=8):
    """Evaluates rows in partitions of the given sizes."""
    evaluation = Evaluation(model=packed_model(model_source(model)), schema=schema, batch_size=batch_size)
    bounds, parts = np.cumsum([0, *sizes]), []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        columns = [array.slice(start, stop - start) for array in arrays]
        parts += list(evaluate_chunks(evaluation, [columns] if stop > start else []))
    return combined(evaluation, parts)


SIZES = {"one": (60,), "uneven, some empty": (0, 7, 1, 0, 52), "a row each": (1,) * 60}


@pytest.mark.parametrize("sizes", in_tiers(SIZES, fast=["uneven, some empty"], slow="other partitions"))
def test_evaluate_when_partitions_are_any_then_equals_one_process(sizes):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(5, "tanh")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid", kernel_regularizer=keras.regularizers.L2(0.1))(hidden))
    model.compile(
        "adam",
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(), keras.metrics.F1Score(threshold=0.5)],
        weighted_metrics=["mae", keras.metrics.Precision()],
    )
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 4)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("float32")
    w = rng.uniform(0, 2, 60).astype("float32")
    label = Field("label", ("y",), "float32", DENSE, (1,))
    schema = DataSchema(inputs=(FEATURES,), labels=(label,), weights=(WEIGHT,))
    results = evaluated(model, schema, [lists(x), lists(y[:, None]), pa.array(w)], sizes)
    expected = model.evaluate(x, y[:, None], sample_weight=w, batch_size=8, verbose=0, return_dict=True)
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(results[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_evaluate_when_outputs_are_several_then_equals_one_process():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    outputs = {
        "kind": keras.layers.Dense(3, "softmax", name="kind")(inputs),
        "size": keras.layers.Dense(1, name="size")(inputs),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        "sgd",
        {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 0.3, "size": 2.0},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    rng = np.random.default_rng(3)
    x, sizes = rng.normal(size=(30, 4)).astype("float32"), (13, 0, 17)
    labels = {"kind": rng.integers(0, 3, 30).astype("int32"), "size": rng.normal(size=30).astype("float32")}
    facts = ModelInfo.of(model)
    fields = tuple(
        Field(f"label{i}", (o.name,), str(labels[o.name].dtype), SCALAR) for i, o in enumerate(facts.outputs)
    )
    schema = DataSchema(inputs=(FEATURES,), labels=fields, y=facts.y)
    results = evaluated(model, schema, [lists(x), *(pa.array(labels[o.name]) for o in facts.outputs)], sizes)
    # In one batch: Keras averages the losses of outputs over batches, however many rows these have.
    expected = model.evaluate(x, labels, batch_size=30, verbose=0, return_dict=True)
    assert results == pytest.approx(expected, rel=2e-5)


class Largest(keras.metrics.Metric):
    """The largest label, which is no sum."""

    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_true)))

    def result(self):
        return keras.ops.convert_to_tensor(self.most)


class Counted(keras.metrics.Metric):
    """The number of rows, which is one."""

    def __init__(self):
        super().__init__(name="counted")
        self.rows = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign(self.rows + keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return keras.ops.convert_to_tensor(self.rows)


@pytest.mark.skipif(not current().takes_strings, reason="texts are tensors of TensorFlow alone")
def test_evaluate_when_there_are_texts_beside_numbers_then_equals_one_process():
    texts, numbers = keras.Input((1,), dtype="string", name="text"), keras.Input((4,), name="features")
    words = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(texts)
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([words, numbers]))
    model = keras.Model([texts, numbers], outputs)
    model.compile("sgd", "mse", metrics=["mae"])
    rng = np.random.default_rng(3)
    x, t, y = rng.normal(size=(20, 4)).astype("float32"), rng.choice(["a", "b", "c"], 20), rng.normal(size=20)
    label = Field("label", ("y",), "float32", SCALAR)
    fields = (Field("text", ("t",), "string", TEXT, (1,)), FEATURES)
    schema = DataSchema(inputs=fields, labels=(label,), x=ModelInfo.of(model).x)
    given = [pa.array(t[:, None].tolist()), lists(x), pa.array(y, pa.float32())]
    results = evaluated(model, schema, given, (3, 17))
    tensors = [keras.ops.convert_to_tensor(part) for part in (t[:, None].tolist(), x)]
    expected = model.evaluate(tensors, y, batch_size=8, verbose=0, return_dict=True)
    np.testing.assert_allclose([results[name] for name in expected], list(expected.values()), rtol=2e-5)


def test_evaluate_when_a_metric_does_not_add_up_then_a_warning_names_it_and_others_are_right():
    def build():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse", metrics=[Largest(), Counted()])
        return model

    x = np.arange(48, dtype="float32").reshape(12, 4)
    schema = DataSchema(inputs=(FEATURES,), labels=(Field("label", ("y",), "float32", SCALAR),))
    with pytest.warns(UserWarning, match="Received: largest, whose values are not"):
        results = evaluated(build, schema, [lists(x), pa.array(np.ones(12, "float32"))], (5, 7))
    assert results["counted"] == 12
    assert results["loss"] == pytest.approx(np.mean((x.sum(axis=1) - 1) ** 2))


def test_evaluate_when_there_are_no_rows_then_says_so():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    schema = DataSchema(inputs=(FEATURES,), labels=(Field("label", ("y",), "float32", SCALAR),))
    with pytest.raises(DataError, match="evaluate: expected rows"):
        evaluated(model, schema, [lists(np.empty((0, 4))), pa.array([], pa.float32())], (0, 0))


def test_evaluate_when_rows_are_preprocessed_then_the_function_s_labels_and_inputs_count():
    from elephant.task.model_batches import PackedFunction

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse", metrics=["mae"])
    raw = DataSchema(
        inputs=(Field("features", ("x",), "float32", DENSE),),
        labels=(Field("label", ("y",), "float32", SCALAR),),
        x={"x": 0},
    )
    target = DataSchema(inputs=(FEATURES,), labels=(Field("label", ("y",), "float32", DENSE),))
    function = PackedFunction.of(lambda batch: {"x": batch["x"] * 2, "y": batch["y"] + 1}, target, ["x"])
    x, y = np.arange(20, dtype="float32").reshape(5, 4), np.zeros(5, "float32")
    evaluation = Evaluation(model=packed_model(model_source(model)), schema=raw, batch_size=2, function=function)
    parts = list(evaluate_chunks(evaluation, [[lists(x), pa.array(y)]]))
    expected = {"loss": np.mean((2 * x.sum(axis=1) - 1) ** 2), "mae": np.mean(np.abs(2 * x.sum(axis=1) - 1))}
    assert combined(evaluation, parts) == pytest.approx(expected, rel=1e-5)


def test_evaluate_when_batches_are_many_then_each_counts_once_in_the_sums():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()], weighted_metrics=["mae"])
    rng = np.random.default_rng(3)
    rows = 2 * 71
    x = rng.normal(size=(rows, 4)).astype("float32")
    y, w = (x.sum(axis=1) > 0).astype("float32")[:, None], rng.uniform(0, 2, rows).astype("float32")
    label = Field("label", ("y",), "float32", DENSE, (1,))
    schema = DataSchema(inputs=(FEATURES,), labels=(label,), weights=(WEIGHT,))
    results = evaluated(model, schema, [lists(x), lists(y), pa.array(w)], (rows - 5, 5), batch_size=2)
    expected = model.evaluate(x, y, sample_weight=w, batch_size=2, verbose=0, return_dict=True)
    assert results == pytest.approx(expected, rel=1e-5)
