"""Sample weights of each token, pixel or element of a sequence, which Keras takes in the shape of the loss."""

import keras
import numpy as np
import pyarrow as pa
import pytest
from keras import layers, losses
from keras_reference import global_batches, largest_difference, split
from pyspark.sql.types import ArrayType, FloatType, IntegerType, StructField, StructType
from tiers import in_tiers

from elephant.config import FitConfig
from elephant.data.schema import DENSE, RAGGED, SCALAR
from elephant.errors import DataError, SchemaError
from elephant.modeling.model_info import ModelInfo
from elephant.modeling.model_spec import model_source
from elephant.rank.job import TrainingJob
from elephant.spark.columns.column_selection import ColumnSelection
from elephant.spark.columns.column_types import training_schema
from elephant.spark.evaluate import Evaluation, combined, evaluate_chunks
from elephant.spark.transform import packed_model

ROWS, SIZES = 22, (11, 3, 8)
INTEGERS, FLOATS = ArrayType(IntegerType()), ArrayType(FloatType())
TOKENS = {"features": INTEGERS, "label": INTEGERS, "weight": FLOATS}
PIXELS = dict.fromkeys(TOKENS, FLOATS)
SIZED = {**TOKENS, "size": FLOATS}


def tagger(loss, *, mask=False, length=6):
    def build():
        keras.utils.set_random_seed(0)
        tokens = keras.Input((length,), dtype="int32")
        hidden = layers.Embedding(5, 4, mask_zero=mask)(tokens)
        model = keras.Model(tokens, layers.Dense(3, "softmax")(hidden))
        model.compile(keras.optimizers.Adam(0.01), loss, weighted_metrics=["accuracy"])
        return model

    return build


def pixels():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4, 4, 1)), layers.Conv2D(2, 3, padding="same"), layers.Conv2D(1, 1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", weighted_metrics=["mae"])
    return model


def two_outputs():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(5, 4)(tokens)
    pooled = layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(tokens, [layers.Dense(3, name="tags")(hidden), layers.Dense(1, name="size")(pooled)])
    sparse = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), {"tags": sparse, "size": "mse"})
    return model


def of_tokens(rng):
    lengths = rng.integers(0, 7, ROWS)
    tokens = rng.integers(1, 5, (ROWS, 6)) * (np.arange(6) < lengths[:, None])
    # As of masked language models: few tokens count, and none of the second rank's.
    weights = rng.uniform(0, 3, (ROWS, 6)) * (rng.uniform(size=(ROWS, 6)) < 0.3)
    weights[11:14] = 0
    labels = rng.integers(0, 3, (ROWS, 6))
    return {"features": tokens, "label": labels, "weight": weights}


def of_pixels(rng):
    shapes = {"features": (ROWS, 4, 4, 1), "label": (ROWS, 4, 4, 1), "weight": (ROWS, 4, 4)}
    return {name: rng.uniform(0, 2, shape) for name, shape in shapes.items()}


def of_sequences(rng):
    columns = of_tokens(rng)
    lengths = rng.integers(1, 7, ROWS)
    columns["features"] = rng.integers(1, 5, (ROWS, 6))
    return {name: values * (np.arange(6) < lengths[:, None]) for name, values in columns.items()}, lengths


def of_two(rng):
    columns = of_tokens(rng)
    return {
        "features": columns["features"],
        "label": columns["label"],
        "size": rng.normal(size=(ROWS, 1)),
        "weight": columns["weight"],
        "trust": rng.uniform(0, 2, ROWS),
    }


def schema_of(build, types=None, **choice):
    columns = StructType([StructField(name, kind) for name, kind in (types or TOKENS).items()])
    return training_schema(columns, ModelInfo.of(build()), ColumnSelection(**{"weight": "weight", **choice}))


SPARSE = "sparse_categorical_crossentropy"
OF_WEIGHTS = losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
CASES = {
    "tokens": (tagger(SPARSE), of_tokens, TOKENS),
    "mean over the weights of masked tokens": (tagger(OF_WEIGHTS, mask=True), of_tokens, TOKENS),
    "pixels": (pixels, of_pixels, PIXELS),
}


def as_keras_takes(schema, batch):
    dtypes = [field.dtype for field in schema.batch_fields]
    return [batch[field.role].astype(dtype) for field, dtype in zip(schema.batch_fields, dtypes, strict=True)]


def trained(rank_pool, build, schema, columns, **options):
    """Returns what the ranks have come to, and one process on the same global batches."""
    config = FitConfig(epochs=2, batch_size=4, shuffle=False, **options)
    parts = split({field.role: columns[field.columns[0]] for field in schema}, SIZES)
    recordings = rank_pool.fit(TrainingJob(model_source(build), (), config, schema), parts)
    reference, steps = build(), -(-max(SIZES) // 4)
    batches = (schema.packed(as_keras_takes(schema, batch)) for batch in global_batches(parts, 4, 2))
    history = reference.fit(batches, epochs=2, steps_per_epoch=steps, verbose=0, shuffle=False).history
    return recordings[0], reference, history


def require_equal(recording, reference, history):
    expected = reference.get_weights()
    assert largest_difference(recording.variables[: len(expected)], expected) <= 1e-5
    for name, values in history.items():
        np.testing.assert_allclose([epoch[name] for epoch in recording.epochs], values, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    "name",
    in_tiers({name: name for name in CASES}, fast=["mean over the weights of masked tokens"], slow="without a mask"),
)
def test_fit_when_each_token_or_pixel_has_a_weight_then_equals_one_process(rank_pool, name):
    build, data, types = CASES[name]
    schema, columns = schema_of(build, types), data(np.random.default_rng(3))
    assert schema.weights[0].kind == DENSE
    recording, reference, history = trained(rank_pool, build, schema, columns)
    require_equal(recording, reference, history)


def test_fit_when_sequences_of_any_length_have_weights_then_equals_one_process(rank_pool):
    build = tagger(SPARSE, mask=True, length=None)
    schema, (padded, lengths) = schema_of(build), of_sequences(np.random.default_rng(3))
    assert [field.kind for field in schema.batch_fields] == [RAGGED] * 3
    cut = {
        name: np.array([row[:n] for row, n in zip(rows, lengths, strict=True)], object) for name, rows in padded.items()
    }
    parts, config = split(cut, SIZES), FitConfig(epochs=2, batch_size=4, shuffle=False)
    recordings = rank_pool.fit(TrainingJob(model_source(build), (), config, schema), parts)
    reference = build()
    batches = (schema.packed(as_keras_takes(schema, batch)) for batch in global_batches(split(padded, SIZES), 4, 2))
    history = reference.fit(batches, epochs=2, steps_per_epoch=3, verbose=0, shuffle=False).history
    require_equal(recordings[0], reference, {"loss": history["loss"]})


@pytest.mark.slow("two outputs; the test above has weights by token, and test_synchronous.py by row")
def test_fit_when_one_output_has_weights_by_token_and_another_by_row_then_equals_one_process(rank_pool):
    types = {**SIZED, "trust": FloatType()}
    labels, weights = {"tags": "label", "size": "size"}, {"tags": "weight", "size": "trust"}
    schema = schema_of(two_outputs, types, label=labels, weight=weights)
    assert [field.kind for field in schema.weights] == [DENSE, SCALAR]
    recording, reference, history = trained(rank_pool, two_outputs, schema, of_two(np.random.default_rng(3)))
    require_equal(recording, reference, {"loss": history["loss"]})


@pytest.mark.parametrize("name", in_tiers({name: name for name in CASES}, fast=["tokens"], slow="the same rule"))
def test_evaluate_when_each_token_or_pixel_has_a_weight_then_equals_one_process(name):
    build, data, types = CASES[name]
    schema, columns, model = schema_of(build, types), data(np.random.default_rng(3)), build()
    evaluation = Evaluation(model=packed_model(model_source(model)), schema=schema, batch_size=4)
    arrays = [pa.array(values.tolist()) for values in columns.values()]
    # Where a loss is no mean over rows, Keras' number is one of its batches: the partitions end where these do.
    parts = []
    for start, stop in ((0, 12), (12, 16), (16, ROWS)):
        parts += evaluate_chunks(evaluation, [[array.slice(start, stop - start) for array in arrays]])
    x, y, w = as_keras_takes(schema, columns)
    expected = model.evaluate(x, y, sample_weight=w, batch_size=4, verbose=0, return_dict=True)
    assert combined(evaluation, parts) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow("a fit; the test above evaluates with such weights, test_synchronous.py validates")
def test_fit_when_weighted_rows_are_for_validation_then_equals_evaluate(rank_pool):
    build = tagger(SPARSE)
    marked = np.arange(ROWS) % 3 == 0
    schema = schema_of(build, {**TOKENS, "marked": IntegerType()}, validation="marked")
    columns = of_tokens(np.random.default_rng(3)) | {"marked": marked.astype("int32")}
    parts = split({field.role: columns[field.columns[0]] for field in schema}, SIZES)
    config = FitConfig(epochs=1, batch_size=4, shuffle=False)
    recording = rank_pool.fit(TrainingJob(model_source(build), (), config, schema), parts)[0]
    reference = build()
    reference.set_weights(recording.variables[: len(reference.weights)])
    x, y, w = (array[marked] for array in as_keras_takes(schema, columns))
    expected = reference.evaluate(x, y, sample_weight=w, batch_size=4, verbose=0, return_dict=True)
    for metric, value in expected.items():
        assert recording.epochs[0][f"val_{metric}"] == pytest.approx(value, rel=1e-5)


def test_weights_when_they_do_not_fit_the_loss_then_say_what_does():
    with pytest.raises(
        SchemaError, match="weightCol: expected weights for each of the outputs tags, size, whose losses"
    ):
        schema_of(two_outputs, SIZED, label={"tags": "label", "size": "size"})
    build, data, types = CASES["tokens"]
    schema = schema_of(build, types)
    evaluation = Evaluation(model=packed_model(model_source(build())), schema=schema, batch_size=4)
    columns = data(np.random.default_rng(3))
    for weights, said in (
        (np.ones((ROWS, 5)), "column 'weight': expected 6 values in every row.*Received: 5 values.*for each loss"),
        (-np.eye(ROWS, 6, -2), "column 'weight': expected weights .* at least 0. Received: -1.0 in row 2 of the part"),
    ):
        arrays = [pa.array(values.tolist()) for values in {**columns, "weight": weights}.values()]
        with pytest.raises(DataError, match=said):
            list(evaluate_chunks(evaluation, [arrays]))
