"""What a task of ``transform`` or of a UDF does with Arrow columns, against Keras' own ``predict``."""

import functools
import os
import types
from decimal import Decimal

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.resource import ResourceInformation
from tables import every_case

from elephant.data.schema import DENSE, RAGGED, SPARSE, TEXT, DataSchema, Field
from elephant.errors import ConfigurationError, DataError, SchemaError
from elephant.modeling.model_info import ModelInfo
from elephant.modeling.model_spec import Servable, model_source
from elephant.spark.transform import checked_batch_size, packed, packed_model
from elephant.task import model_cache, predict_task
from elephant.task.model_batches import ModelRows, PackedFunction
from elephant.task.predict_task import (
    VALUES,
    Argument,
    Arguments,
    OutputColumn,
    Prediction,
    joined,
    packed_outputs,
    predict_arguments,
    predict_chunks,
    predict_structs,
    raw_columns,
    transformed_columns,
    unpacked_outputs,
)

NEEDS_TENSORFLOW = pytest.mark.skipif(
    keras.config.backend() != "tensorflow",
    reason="layers of text, and functions that count their traces, are TensorFlow's",
)


def compiled(inputs, outputs, loss="mse"):
    model = keras.Model(inputs, outputs)
    model.compile("sgd", loss)
    return model


def prediction_of(model, schema, batch_size=4):
    facts = ModelInfo.of(model)
    return Prediction(model=packed_model(model_source(model)), schema=schema, outputs=facts.y, batch_size=batch_size)


def lists(rows, kind=None):
    return pa.array([np.asarray(row).tolist() for row in rows], pa.list_(kind or pa.float32()))


def test_predict_when_inputs_and_outputs_are_several_then_equals_keras_by_name():
    keras.utils.set_random_seed(0)
    one, two = keras.Input((3,), name="one"), keras.Input((2,), name="two")
    both = keras.layers.Concatenate()([one, two])
    outputs = {"wide": keras.layers.Dense(4)(both), "narrow": keras.layers.Dense(1)(both)}
    model = compiled({"one": one, "two": two}, outputs)
    rng = np.random.default_rng(0)
    x = {"one": rng.normal(size=(11, 3)).astype("float32"), "two": rng.normal(size=(11, 2)).astype("float32")}
    facts = ModelInfo.of(model)
    fields = tuple(Field(f"f{i}", (known.name,), "float32", DENSE, known.shape) for i, known in enumerate(facts.inputs))
    prediction = prediction_of(model, DataSchema(inputs=fields, x=facts.x))
    columns = tuple(lists(x[known.name]) for known in facts.inputs)
    (struct,) = predict_structs(prediction, raw_columns(facts.outputs), [columns])
    expected = model.predict(x, verbose=0)
    for name in outputs:
        made = np.array(struct.field(name).to_pylist()).reshape(11, -1)
        np.testing.assert_allclose(made, expected[name], rtol=1e-5, atol=1e-6)
    assert pa.types.is_float64(struct.field("narrow").type)


def test_rows_when_they_are_more_than_a_batch_then_go_through_the_model_in_batches_and_in_order():
    schema = DataSchema(inputs=(Field("x", ("x",), "float32", DENSE, (1,)),))
    rows, values = (
        ModelRows(schema, 4, None, lambda: types.SimpleNamespace(most_rows=None)),
        np.arange(15, dtype="float32").reshape(15, 1),
    )
    sizes, seen = [], []
    # Two chunks of one partition: a batch never spans both.
    for chunk in (values[:10], values[10:]):
        for batch in rows.batches([lists(chunk)]):
            sizes.append(batch.num_rows)
            seen.append(batch.values[0])
    assert sizes == [4, 4, 2, 4, 1] == [len(part) for part in seen]
    np.testing.assert_array_equal(np.concatenate(seen), values)


def test_rows_when_their_number_is_left_to_the_model_then_it_is_asked_when_there_are_some():
    schema = DataSchema(inputs=(Field("x", ("x",), "float32", DENSE, (1,)),))
    asked = []
    rows = ModelRows(
        schema, None, None, lambda: asked.append(1) or types.SimpleNamespace(most_rows=None, rows_of_batch=3)
    )
    empty, values = pa.array([], pa.list_(pa.float32())), np.arange(8, dtype="float32").reshape(8, 1)
    assert not list(rows.batches([empty])) and not asked
    assert [batch.num_rows for batch in rows.batches([lists(values)])] == [3, 3, 2]


def test_rows_when_a_function_of_the_user_prepares_them_then_it_gets_fewer_than_the_model_would():
    schema = DataSchema(inputs=(Field("x", ("x",), "float32", DENSE, (1,)),), x={"x": 0})
    function = PackedFunction.of(
        lambda batch: {"x": np.repeat(batch["x"], 4, axis=1)},
        DataSchema(inputs=(Field("x", ("x",), "float32", DENSE, (4,)),)),
        ["x"],
    )
    for asked, expected in ((8192, [1024, 476]), (512, [512, 512, 476])):
        rows = ModelRows(
            schema, None, function, lambda asked=asked: types.SimpleNamespace(most_rows=None, rows_of_batch=asked)
        )
        sizes = [batch.values[0].shape for batch in rows.batches([lists(np.zeros((1500, 1), "float32"))])]
        assert sizes == [(count, 4) for count in expected]


def test_predict_when_sequences_differ_then_each_row_gets_outputs_of_its_own_length():
    keras.utils.set_random_seed(0)
    sequence = keras.Input((None,), dtype="int32")
    hidden = keras.layers.Embedding(10, 3)(sequence)
    model = compiled(sequence, keras.layers.Dense(2)(hidden))
    rows = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9], [2]]
    schema = DataSchema(inputs=(Field("f", ("words",), "int32", RAGGED, (None,)),))
    prediction = prediction_of(model, schema, batch_size=2)
    (made,) = predict_structs(prediction, [OutputColumn("r", 0, VALUES)], [lists(rows, pa.int64())])
    for row, output in zip(rows, made.to_pylist(), strict=True):
        expected = model.predict(np.array([row], "int32"), verbose=0)[0] if row else np.empty((0, 2))
        np.testing.assert_allclose(np.reshape(output, (-1, 2)), expected, rtol=1e-5, atol=1e-6)


def test_predict_when_an_output_has_a_length_of_its_own_then_no_row_loses_a_part_of_it():
    keras.utils.set_random_seed(0)
    sequence = keras.Input((None, 2))
    horizon = keras.layers.RepeatVector(3)(sequence[:, 0])
    model = compiled(sequence, {"each": keras.layers.Dense(2)(sequence), "next": keras.layers.Dense(2)(horizon)})
    # The longest sequence is as long as the horizon.
    rows = [np.ones((3, 2)), np.full((1, 2), 2.0)]
    schema = DataSchema(inputs=(Field("f", ("steps",), "float32", RAGGED, (None, 2)),))
    (batches,) = predict_chunks(prediction_of(model, schema), [[lists(rows, pa.list_(pa.float32()))]])
    columns = raw_columns(ModelInfo.of(model).outputs)
    made = {column.name: column.array(batches[0][column.output]).to_pylist() for column in columns}
    for place, row in enumerate(rows):
        expected = model.predict(row[np.newaxis].astype("float32"), verbose=0)
        for name, output in expected.items():
            np.testing.assert_allclose(made[name][place], output.ravel(), rtol=1e-5, atol=1e-6)


@every_case(
    "rows, batch_size",
    [([[1, 2, 3], [4], [5, 6]], 1), ([[1, 2], [3, 4], [5, 6]], 2)],
    ids=["lengths differ", "one length"],
)
@every_case("piece_bytes, pieces", [(2**20, 2), (1, 3)])
def test_outputs_when_they_travel_then_are_what_keras_gives_for_each_row(
    rows, batch_size, piece_bytes, pieces, monkeypatch
):
    monkeypatch.setattr(predict_task, "_PIECE_BYTES", piece_bytes)
    keras.utils.set_random_seed(0)
    sequence = keras.Input((None,), dtype="int32")
    hidden = keras.layers.Embedding(10, 3)(sequence)
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    model = compiled(sequence, [keras.layers.Dense(2)(hidden), keras.layers.Dense(1)(pooled)])
    schema = DataSchema(inputs=(Field("f", ("words",), "int32", RAGGED, (None,)),))
    chunks = [[lists(rows[:2], pa.int64())], [lists(rows[2:], pa.int64())], [lists([], pa.int64())]]
    prediction = prediction_of(model, schema, batch_size=batch_size)
    parts = [unpacked_outputs(one, 2) for one in packed_outputs(prediction, chunks)]
    assert len(parts) == pieces
    each, whole = (joined([values for part in parts for values in part[number]]) for number in range(2))
    expected = [model.predict(np.array([row], "int32"), verbose=0) for row in rows]
    np.testing.assert_allclose(whole, np.concatenate([both[1] for both in expected]), rtol=1e-5, atol=1e-6)
    # Rows of their own length are an array each; of one length they are one array.
    assert (each.dtype == object) == (len({len(row) for row in rows}) > 1)
    for made, both in zip(each, expected, strict=True):
        np.testing.assert_allclose(made, both[0][0], rtol=1e-5, atol=1e-6)


@NEEDS_TENSORFLOW
def test_predict_when_inputs_are_text_and_sparse_then_equals_keras():
    keras.utils.set_random_seed(0)
    word = keras.Input((1,), dtype="string", name="word")
    vector = keras.Input((6,), name="vector", sparse=True)
    looked_up = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(word)
    made = keras.layers.Dense(2)(keras.layers.Concatenate()([looked_up, keras.layers.Dense(3)(vector)]))
    model = compiled([word, vector], made)
    words, indices = ["a", "b", "zzz", "a", "b"], [[0], [1, 5], [], [2], [3]]
    sparse = pa.array(
        [{"type": 0, "size": 6, "indices": row, "values": [1.5] * len(row)} for row in indices],
        pa.struct(
            [
                ("type", pa.int8()),
                ("size", pa.int32()),
                ("indices", pa.list_(pa.int32())),
                ("values", pa.list_(pa.float64())),
            ]
        ),
    )
    fields = (
        Field("f0", ("word",), "string", TEXT, (1,)),
        Field("f1", ("vector",), "float32", SPARSE, (6,), sparse_tensor=True),
    )
    prediction = prediction_of(model, DataSchema(inputs=fields, x=ModelInfo.of(model).x), batch_size=3)
    (column,) = predict_structs(prediction, [OutputColumn("r", 0, VALUES)], [(pa.array(words), sparse)])
    dense = np.zeros((5, 6), "float32")
    for row, places in enumerate(indices):
        dense[row, places] = 1.5
    tensor = keras.ops.convert_to_tensor([[text] for text in words], dtype="string")
    expected = keras.ops.convert_to_numpy(model([tensor, keras.ops.convert_to_tensor(dense)]))
    np.testing.assert_allclose(column.to_pylist(), expected, rtol=1e-5, atol=1e-6)


def identity(width=3):
    inputs = keras.Input((width,))
    return compiled(inputs, keras.layers.Activation("linear")(inputs))


@NEEDS_TENSORFLOW
def test_predict_when_batches_are_of_odd_sizes_then_traces_the_model_once():
    prediction = prediction_of(identity(), DataSchema(inputs=(Field("f", ("x",), "float32", DENSE, (3,)),)))
    sizes = [5, 1, 0, 9, 2]
    chunks = [[lists(np.full((size, 3), size))] for size in sizes]
    made = list(predict_chunks(prediction, chunks))
    assert [sum(len(batch[0]) for batch in batches) for batches in made] == sizes
    (function,) = prediction.model.loaded()._functions.values()
    assert function.experimental_get_tracing_count() == 1


def test_predict_when_rows_do_not_fit_then_the_error_names_column_and_row_before_the_model_is_loaded():
    field = Field("f", ("pixels",), "float32", DENSE, (3,))
    prediction = prediction_of(identity(), DataSchema(inputs=(field,)))
    with pytest.raises(DataError, match="column 'pixels': expected 3 values .* Received: 2 values in row 5 "):
        list(predict_chunks(prediction, [[lists([[1, 2, 3]] * 5 + [[1, 2]])]]))
    null = pa.array([[1.0, 2.0, 3.0], None], pa.list_(pa.float32()))
    # The size of batches is left to the model, which is not needed yet.
    other = prediction_of(identity(), DataSchema(inputs=(field,)), batch_size=None)
    with pytest.raises(DataError, match="column 'pixels': expected a value in every row. Received: null in row 1 "):
        list(predict_chunks(other, [[null]]))
    assert other.model.model_id not in model_cache._models


def test_loaded_models_when_used_then_are_built_once_and_few_are_kept(monkeypatch):
    built = []
    build = Servable.build
    monkeypatch.setattr(Servable, "build", lambda servable: built.append(1) or build(servable))
    models = [packed_model(model_source(identity())) for _ in range(3)]
    for model in (models[0], models[1], models[0], models[2], models[0]):
        model.loaded()
    assert len(built) == 3
    assert list(model_cache._models) == [models[2].model_id, models[0].model_id]


@pytest.mark.parametrize(
    ("addresses", "platform", "seen"),
    [(["1"], None, "1"), (["1"], "4,5", "5"), (["1"], "", "-1"), ([], "4,5", "-1"), (None, "4,5", "-1")],
)
def test_task_environment_when_the_platform_has_chosen_devices_then_indexes_its_list(
    monkeypatch, addresses, platform, seen
):
    resources = {} if addresses is None else {"gpu": ResourceInformation("gpu", addresses)}
    task = types.SimpleNamespace(resources=lambda: resources, cpus=lambda: 1)
    monkeypatch.setattr(model_cache, "TaskContext", types.SimpleNamespace(get=lambda: task))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if platform is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", platform)
    with model_cache.task_environment("tensorflow"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == platform


def test_prediction_when_outputs_are_not_what_the_facts_say_then_says_so():
    inputs = keras.Input((3,))
    model = compiled(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    schema = DataSchema(inputs=(Field("f", ("x",), "float32", DENSE, (3,)),))
    prediction = Prediction(model=packed_model(model_source(model)), schema=schema, outputs=0, batch_size=4)
    with pytest.raises(ConfigurationError, match="expected one output. Received: 2"):
        list(predict_chunks(prediction, [[lists(np.ones((2, 3)))]]))


@every_case(
    "given",
    [
        (lists([[1, 2, 3], [4, 5, 6]], pa.float64()),),
        (lists([[1, 2, 3], [4, 5, 6]], pa.int32()),),
        (pa.array([1, 4]), pa.array([2.0, 5.0]), pa.array([3, 6], pa.int8())),
        (
            pa.array(
                [
                    {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]},
                    {"type": 0, "size": 3, "indices": [0, 1, 2], "values": [4.0, 5.0, 6.0]},
                ],
                pa.struct(
                    [
                        ("type", pa.int8()),
                        ("size", pa.int32()),
                        ("indices", pa.list_(pa.int32())),
                        ("values", pa.list_(pa.float64())),
                    ]
                ),
            ),
        ),
        (pa.array([np.array(row, "<f4").tobytes() for row in ([1, 2, 3], [4, 5, 6])]),),
    ],
    ids=["doubles", "integers", "numbers", "vectors", "binary"],
)
def test_arguments_when_of_any_type_then_are_the_model_s_input(given):
    model = identity()
    arguments = Arguments((Argument("x", "float32", (3,)),), 0)
    pack = packed(Servable.of_model(model), model_id="arguments")
    columns = [OutputColumn("r", 0, VALUES)]
    chunk = given if len(given) > 1 else given[0]
    (made,) = predict_arguments(pack, arguments, 0, 8, columns, [chunk])
    assert made.to_pylist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_arguments_when_decimals_in_arrays_or_integers_that_no_float_holds_then_become_floats():
    pack = packed(Servable.of_model(identity(2)), model_id="floats")
    arguments = Arguments((Argument("x", "float32", (2,)),), 0)

    def predicted(*given):
        chunk = given if len(given) > 1 else given[0]
        (made,) = predict_arguments(pack, arguments, 0, 8, [OutputColumn("r", 0, VALUES)], [chunk])
        return made.to_pylist()

    assert predicted(pa.array([[Decimal("1.5"), Decimal("2.25")]])) == [[1.5, 2.25]]
    assert predicted(pa.array([[[Decimal("1.5")], [Decimal("2.25")]]])) == [[1.5, 2.25]]
    assert predicted(pa.array([2**53 + 1]), pa.array([0.5])) == [[float(2**53), 0.5]]


def test_arguments_when_a_row_is_one_number_then_are_the_input_of_a_model_that_takes_one():
    inputs = keras.Input((), dtype="float32")
    pack = packed(Servable.of_model(keras.Model(inputs, keras.ops.expand_dims(inputs, -1) * 2.0)), model_id="scalar")
    arguments = Arguments((Argument("x", "float32", ()),), 0)
    (made,) = predict_arguments(pack, arguments, 0, 8, [OutputColumn("r", 0, VALUES)], [pa.array([1, 2])])
    assert made.to_pylist() == [[2.0], [4.0]]


def test_arguments_when_a_later_batch_has_what_no_integer_holds_then_the_error_has_its_row():
    inputs = keras.Input((2,), dtype="int32")
    pack = packed(Servable.of_model(keras.Model(inputs, keras.ops.cast(inputs, "float32"))), model_id="rows")
    arguments = Arguments((Argument("x", "int32", (2,)),), 0)
    batches = [(pa.array([1, 2]), pa.array([0.5, value])) for value in (1.5, float("nan"))]
    with pytest.raises(DataError, match="Received: nan in row 3 of the partition") as failure:
        list(predict_arguments(pack, arguments, 0, 8, [OutputColumn("r", 0, VALUES)], batches))
    # Spark shows the frames of its Python workers, twice.
    assert [frame.name for frame in failure.traceback][1:] == ["run"]


def test_arguments_when_there_are_too_few_then_says_which_inputs_there_are():
    arguments = Arguments((Argument("left", "float32", (3,)), Argument("right", "float32", (3,))), (0, 1))
    with pytest.raises(SchemaError, match="each of the model's inputs left, right. Received: 1 arguments"):
        arguments.grouped([lists([[1, 2, 3]])])
    alone = Arguments((Argument("left", "float32", (3,)),), "left")
    with pytest.raises(
        SchemaError, match="expected one column for the input 'left'.* Received: 2 of type .*double>, int"
    ):
        alone.schema(alone.grouped([pa.array([[1.0]]), pa.array([1])]))
    with pytest.raises(SchemaError, match="expected an array of numbers.* for the input 'left'. Received: .* string"):
        arguments.schema(arguments.grouped([pa.array(["a"]), pa.array(["b"])]))


def test_output_columns_when_outputs_are_several_then_are_named_after_them():
    inputs = keras.Input((3,))
    outputs = {
        "kind": keras.layers.Dense(4, "softmax", name="kind")(inputs),
        "price": keras.layers.Dense(1, name="price")(inputs),
    }
    model = compiled(inputs, outputs, {"kind": "sparse_categorical_crossentropy", "price": "mse"})
    columns = transformed_columns(
        ModelInfo.of(model).outputs, prediction="prediction", probability="probability", raw_prediction="raw"
    )
    names = ["raw_kind", "probability_kind", "prediction_kind", "prediction_price"]
    assert [column.name for column in columns] == names


def test_predict_when_spark_has_no_arrow_udfs_then_series_and_record_batches_give_the_same():
    pandas = pytest.importorskip("pandas")
    from elephant.task.predict_task import on_series, predict_arguments, predict_batches

    model = identity()
    pack, columns = packed(Servable.of_model(model), model_id="series"), [OutputColumn("r0", 0, VALUES)]
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    arguments = Arguments((Argument("x", "float32", (3,)),), 0)
    predicts = functools.partial(predict_arguments, pack, arguments, 0, 2)
    (series,) = on_series(functools.partial(predicts, columns), [pandas.Series([np.array(row) for row in rows])])
    assert [row.tolist() for row in series] == rows
    parts = tuple(pandas.Series(column) for column in zip(*rows, strict=True))
    (series,) = on_series(functools.partial(predicts, columns), [parts])
    assert [row.tolist() for row in series] == rows
    dense = {"type": [1] * 3, "size": [None] * 3, "indices": [None] * 3, "values": [np.array(row) for row in rows]}
    (series,) = on_series(functools.partial(predicts, columns), [pandas.DataFrame(dense)])
    assert [row.tolist() for row in series] == rows
    both = [*columns, OutputColumn("r1", 0, VALUES)]
    (frame,) = on_series(functools.partial(predicts, both), [pandas.Series(rows)])
    assert list(frame.columns) == ["r0", "r1"] and frame["r1"][2].tolist() == rows[2]
    schema = DataSchema(inputs=(Field("f", ("x",), "float32", DENSE, (3,)),))
    prediction = Prediction(model=pack, schema=schema, outputs=0, batch_size=2)
    batches = [
        pa.RecordBatch.from_arrays([pa.array(numbers), lists([rows[number] for number in numbers])], ["c0", "f"])
        for numbers in ([0, 1, 2], [], [2, 0])
    ]
    made = list(predict_batches(prediction, columns, batches))
    assert [batch.schema.names for batch in made] == [["c0", "r0"]] * 3
    for batch in made:
        assert batch.column(1).to_pylist() == [rows[number] for number in batch.column(0).to_pylist()]


def test_batch_size_when_it_is_no_count_then_is_refused_by_the_name_that_it_was_given_by():
    assert checked_batch_size(7) == 7
    with pytest.raises(ConfigurationError, match="^batch_size: expected an integer of at least 1. Received: 0"):
        checked_batch_size(0, "batch_size")
