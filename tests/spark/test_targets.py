"""What outputs are compared with, and class weights: decided before Spark is asked for anything."""

import contextlib
from dataclasses import replace

import keras
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from elephant.data.schema import DENSE, SCALAR, TEXT, DataSchema, Field
from elephant.errors import ConfigurationError, DataError, SchemaError
from elephant.modeling.model_info import ModelInfo
from elephant.modeling.model_spec import model_source
from elephant.spark.class_weights import class_weights
from elephant.spark.columns.column_selection import ColumnSelection
from elephant.spark.columns.column_types import nest_of_targets, weight_fields

LABEL = Field("label", ("kind",), "int32", SCALAR)
FEATURES = Field("features", ("x",), "float32", DENSE, (2,))


def facts_of(inputs, outputs):
    """Returns the facts of a model that maps inputs of two values, by name or as a list, to outputs of two."""
    names = list(inputs)
    given = [keras.Input((2,), name=name) for name in names]
    both = keras.layers.Add()(given) if len(given) > 1 else given[0]
    # Keys may be those of inputs, layers' names may not.
    made = [keras.layers.Dense(2, name=f"head_{place}")(both) for place in range(len(outputs))]
    x = dict(zip(names, given, strict=True)) if isinstance(inputs, dict) else given
    y = dict(zip(outputs, made, strict=True)) if isinstance(outputs, dict) else made
    model = keras.Model(x, y)
    model.compile("sgd", "mse")
    return ModelInfo.of(model)


def fields(number):
    return [replace(FEATURES, role=f"features_{place}") for place in range(number)]


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        (["a"], ["y"], (0,)),
        (["a"], ["y", "z"], (0, 0)),
        (["a", "b"], ["y", "z"], (0, 1)),
        ({"a": 0, "b": 0}, {"b": 0, "a": 0}, {"a": 0, "b": 1}),
        ({"a": 0, "b": 0}, {"b": 0}, {"b": 1}),
        ({"a": 0, "b": 0}, {"y": 0, "z": 0}, {"y": 0, "z": 1}),
    ],
    ids=str,
)
def test_targets_when_there_is_no_label_then_are_inputs_of_the_same_name_or_place(inputs, outputs, expected):
    facts = facts_of(inputs, outputs)
    assert nest_of_targets(fields(len(inputs)), facts.x, facts) == expected


def test_targets_when_inputs_cannot_be_without_repeated_or_compared_then_ask_for_labels():
    facts = facts_of(["a", "b"], ["y"])
    with pytest.raises(
        SchemaError, match=r"labelCol: expected a column for each of the outputs head_0, .* inputs a, b"
    ):
        nest_of_targets(fields(2), facts.x, facts)
    words = Field("features", ("line",), "string", TEXT, ())
    with pytest.raises(SchemaError, match=r"its input \(column 'line'\) is text. Received: none. Set labelCol"):
        nest_of_targets([words], 0, facts_of(["a"], ["y"]))


def test_weights_when_an_output_that_only_a_metric_looks_at_has_none_then_say_so():
    given = keras.Input((2,))
    model = keras.Model(given, [keras.layers.Dense(1, name=name)(given) for name in ("price", "age")])
    model.compile("sgd", ["mse", None], weighted_metrics=[None, ["mae"]])
    # Weighing it by the other output's weights would be another number, and no error.
    choice = ColumnSelection(weight={"price": "trust"})
    with pytest.raises(SchemaError, match=r"weightCol: expected .*age"):
        weight_fields(StructType(), ModelInfo.of(model), choice, (0, 1))


def classifier(units):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model_source(model)


def test_class_weights_when_some_are_missing_then_are_one():
    schema = DataSchema((FEATURES,), (LABEL,))
    assert class_weights({1: 5.0}, classifier(4), schema, None) == {0: 1.0, 1: 5.0, 2: 1.0, 3: 1.0}
    assert class_weights({0: 0.5}, classifier(1), schema, None) == {0: 0.5, 1: 1.0}
    assert class_weights(None, classifier(4), schema, None) is None
    with pytest.raises(ConfigurationError, match="of the 3 classes .*, numbered from 0. Received: one for class 3."):
        class_weights({1: 1.0, 2: 2.0, 3: 3.0}, classifier(3), schema, None)


class Rows:
    """Partitions of prepared columns."""

    session = None

    def __init__(self, *partitions):
        self.partitions = partitions

    def run(self, task, *, barrier):
        return [{"rank": rank, "result": result} for batches in self.partitions for rank, result in task(batches)]


def labelled(labels, marks=None):
    columns = {"label": pa.array(labels, None if labels else pa.float32())}
    return pa.RecordBatch.from_pydict(columns if marks is None else {**columns, "validation": marks})


def test_class_weights_when_balanced_then_all_classes_count_alike(monkeypatch):
    # There is no session whose jobs could be described.
    monkeypatch.setattr("elephant.spark.class_weights.described", lambda session, text: contextlib.nullcontext())
    asked = []

    def rows_of(schema):
        asked.append(schema)
        return rows

    marked = Field("validation", ("v",), "bool", SCALAR)
    schema = DataSchema((FEATURES,), (LABEL,), validation=marked)
    rows = Rows(
        [labelled([0, 2, 2], [False, False, True]), labelled([0, 0], [False, True])], [], [labelled([2], [True])]
    )
    # Two rows of class 0, one of class 2, none of the others.
    assert class_weights("balanced", classifier(4), schema, rows_of) == {0: 0.75, 1: 1.0, 2: 1.5, 3: 1.0}
    assert asked == [DataSchema((), (LABEL,), validation=marked)]
    one_hot = replace(LABEL, dtype="float32", kind=DENSE, shape=(2,))
    rows = Rows([labelled([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])])
    schema = DataSchema((FEATURES,), (one_hot,))
    assert class_weights("balanced", classifier(2), schema, rows_of) == {0: 2.0, 1: pytest.approx(2 / 3)}
    rows = Rows([labelled([0, None])])
    with pytest.raises(DataError, match=r"column 'kind': expected a value in every row. Received: null in row 1"):
        class_weights("balanced", classifier(2), DataSchema((FEATURES,), (LABEL,)), rows_of)
    with pytest.raises(ConfigurationError, match="expected weights by class, because preprocessing makes the labels"):
        class_weights("balanced", classifier(2), DataSchema((FEATURES,), (LABEL,)), None)
    # A regression's labels are no classes.
    number = DataSchema((FEATURES,), (replace(LABEL, dtype="float32"),))
    rows = Rows([labelled([]), labelled([2.0, 0.5])])
    with pytest.raises(DataError, match=r"classWeight: expected class numbers in column 'kind'\. Received: 0\.5"):
        class_weights("balanced", classifier(1), number, rows_of)
    rows = Rows([labelled([0, 2_000_000])])
    with pytest.raises(ConfigurationError, match=r"below 1,000,000 in column 'kind'\. Received: 2,000,000"):
        class_weights("balanced", classifier(1), DataSchema((FEATURES,), (LABEL,)), rows_of)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": (LABEL,)}, "classWeight: expected a fit without weightCol"),
        ({"labels": ()}, "classWeight: expected a model with one output and a label column. .* 0 label columns"),
        ({"labels": (replace(LABEL, kind=DENSE, shape=(3, 2)),)}, "class numbers or one-hot. Received: column 'kind'"),
    ],
    ids=["weights", "no labels", "arrays"],
)
def test_class_weights_when_keras_would_refuse_or_misread_them_then_say_so(changes, message):
    schema = replace(DataSchema((FEATURES,), (LABEL,)), **changes)
    with pytest.raises(ConfigurationError, match=message):
        class_weights({0: 1.0}, classifier(3), schema, None)
