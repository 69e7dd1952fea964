"""Rows that several fits share are preprocessed once: how often the function is given each row, and what fits give."""

import os
import time
import types
import uuid

import keras
import numpy as np
import pytest
from counted_source import CountedSource, end_an_executor_with_rows, keeps_nothing
from keras_reference import fit_one_process, global_batches, regression_model
from spark_frames import partitioned_frame

import elephant
from elephant import KerasEstimator
from elephant.data.schema import DENSE, DataSchema, Field
from elephant.errors import ClusterError, WorkerFailure
from elephant.spark import fit, prepared
from elephant.storage.filesystem import NO_ROOM

pytestmark = pytest.mark.usefixtures("empty_cache", "by_value")

RATES = (0.01, 0.03)


class CountedFunctions:
    """Makes preprocessing functions that leave a mark of each call.

    Args:
        folder: For the marks.
    """

    def __init__(self, folder):
        self._folder = str(folder)

    @property
    def rows(self):
        """How many rows the functions were given, in all calls."""
        return sum(int(name.split("-")[0]) for name in os.listdir(self._folder))

    def counted(self, function):
        """Returns a function that marks each call."""
        folder = self._folder

        def call(batch, *rng):
            rows = len(next(iter(batch.values())))
            open(os.path.join(folder, f"{rows}-{uuid.uuid4()}"), "w").close()
            return function(batch, *rng)

        # Whether it takes random numbers is asked of its signature.
        call.__wrapped__ = function
        return call

    def scaled(self, factor=2.0):
        """Returns a function that multiplies the features."""
        return self.counted(lambda batch: {"features": batch["features"] * factor})


def refusing(batch):
    raise ValueError("no rows for me")


def drawing(batch, rng):
    return {"features": batch["features"] * rng.uniform(0.5, 1.5)}


def estimator_of(preprocessing, **options):
    return KerasEstimator(
        model=regression_model(keras.optimizers.SGD(0.01)),
        preprocessing=preprocessing,
        **{"numWorkers": 2, "epochs": 2, "batchSize": 4, "shuffle": False, "verbose": 0, **options},
    )


def assert_same_bits(fitted, other):
    for value, wanted in zip(fitted.model.get_weights(), other.model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert dict(fitted.history) == dict(other.history)


def assert_equal_one_process(fitted, source, rate, factor=2.0):
    parts = [{**part, "features": part["features"] * factor} for part in source.parts]
    model = regression_model(keras.optimizers.SGD(rate))
    expected = fit_one_process(model, list(global_batches(parts, 4, 2)), 2)[0]
    for value, wanted in zip(fitted.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)


@pytest.fixture
def source(spark, tmp_path):
    (tmp_path / "reads").mkdir()
    yield CountedSource(spark, tmp_path / "reads")
    assert keeps_nothing(spark)


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "calls").mkdir()
    return CountedFunctions(tmp_path / "calls")


def test_fits_when_rows_are_prepared_then_each_row_is_preprocessed_once_and_each_equals_one_process(source, functions):
    total = source.frame.count()
    reads = np.array(source.reads)
    with elephant.prepared(source.frame, estimator_of(functions.scaled())) as rows:
        assert functions.rows == total
        for rate in RATES:
            assert_equal_one_process(estimator_of(functions.scaled(), learningRate=rate).fit(rows), source, rate)
        assert functions.rows == total
        # Another function begins with the rows as they were read.
        other = estimator_of(functions.scaled(3.0)).fit(rows)
        assert functions.rows == 2 * total
    assert_equal_one_process(other, source, 0.01, factor=3.0)
    assert (np.array(source.reads) - reads == 1).all()


@pytest.mark.slow("four fits; the block of three counts calls")
def test_fits_of_a_list_when_all_are_done_then_rows_were_preprocessed_once_and_have_the_same_bits(source, functions):
    estimator = estimator_of(functions.scaled(), validationFraction=0.2, shuffle=True)
    fits = estimator.fit(source.frame, [{estimator.seed: seed} for seed in (1, 2)])
    assert functions.rows == sum(len(part["label"]) for part in source.parts)
    for fitted, seed in zip(fits, (1, 2), strict=True):
        assert_same_bits(fitted, estimator.fit(source.frame, {estimator.seed: seed}))


@pytest.mark.slow("seven fits; the block of three counts calls")
def test_search_when_there_are_folds_then_rows_are_preprocessed_once_for_all_of_them_and_the_last_fit(
    source, functions
):
    found = elephant.search(
        estimator_of(functions.scaled(), epochs=1), source.frame, {"batchSize": [4, 8]}, trials=3, folds=2
    )
    assert functions.rows == sum(len(part["label"]) for part in source.parts) and source.reads == [1, 1]
    params = found.best_params
    again = estimator_of(functions.scaled(), epochs=1, **params).fit(source.frame)
    assert_same_bits(found.best, again)


@pytest.mark.slow("five fits of two modes; the block of three counts calls")
def test_fits_when_modes_and_validation_differ_then_each_row_is_preprocessed_once_in_each_partitioning(
    source, functions
):
    frame = source.frame.selectExpr("*", "label > 0.5 AS marked")
    total = sum(len(part["label"]) for part in source.parts)
    estimator = estimator_of(functions.scaled(), mode="asynchronous", epochs=1)
    with elephant.prepared(frame, estimator) as rows:
        for _ in range(2):
            estimator.fit(rows)
        assert functions.rows == total
        # Marked rows are dealt out anew, from what was read.
        for _ in range(2):
            marked = estimator_of(
                functions.scaled(), mode="asynchronous", epochs=1, validationIndicatorCol="marked"
            ).fit(rows)
            assert "val_loss" in marked.history
        assert functions.rows == 2 * total
        fitted = estimator_of(functions.scaled(), validationIndicatorCol="marked").fit(rows)
        assert functions.rows == 3 * total
    assert_same_bits(fitted, estimator_of(functions.scaled(), validationIndicatorCol="marked").fit(frame))


@pytest.mark.slow("an executor ends")
def test_fit_when_an_executor_was_lost_then_its_part_alone_is_preprocessed_again(spark, source, functions):
    sizes = [len(part["label"]) for part in source.parts]
    with elephant.prepared(source.frame, estimator_of(functions.scaled())) as rows:
        end_an_executor_with_rows(spark, source)
        fitted = estimator_of(functions.scaled()).fit(rows)
        again = functions.rows - sum(sizes)
        # Both where one executor had both.
        assert again in (*sizes, sum(sizes))
    assert_equal_one_process(fitted, source, 0.01)


@pytest.mark.slow("Spark tries each task four times")
def test_fit_when_the_function_fails_then_raises_its_error_and_the_rows_as_they_were_read_are_kept(source, functions):
    with elephant.prepared(source.frame, estimator_of(functions.scaled())) as rows:
        failing = estimator_of(functions.counted(refusing))
        with pytest.warns(UserWarning, match=r"(?s)preprocessed rows could not be kept.*no rows for me"):
            with pytest.raises(WorkerFailure, match="no rows for me"):
                failing.fit(rows)
        assert source.reads == [1, 1]


@pytest.mark.slow("two fits")
def test_fit_when_the_function_draws_then_is_called_for_every_batch_and_has_the_same_bits(source, functions):
    with elephant.prepared(source.frame, estimator_of(functions.counted(drawing))) as rows:
        assert functions.rows == 0
        fitted = estimator_of(functions.counted(drawing)).fit(rows)
        assert functions.rows > 2 * sum(len(part["label"]) for part in source.parts)
        assert source.reads == [1, 1]
    assert_same_bits(fitted, estimator_of(functions.counted(drawing)).fit(source.frame))


@pytest.mark.slow("two attempts at a fit")
def test_fit_when_a_disk_is_full_then_what_is_kept_is_released_and_it_preprocesses_the_rows_itself(
    source, functions, monkeypatch
):
    attempts = []

    def train(rows, job, progress):
        attempts.append(rows)
        if len(attempts) == 1:
            raise ClusterError(f"/data: {NO_ROOM} for this worker's rows.")
        return fit.train(rows, job, progress)

    monkeypatch.setattr("elephant.spark.estimator.train", train)
    with elephant.prepared(source.frame, estimator_of(functions.scaled())) as rows:
        fitted = estimator_of(functions.scaled()).fit(rows)
        assert len(attempts) == 2 and rows.on_disk.is_released
    assert functions.rows == 2 * sum(len(part["label"]) for part in source.parts)
    assert_equal_one_process(fitted, source, 0.01)


WORDS = ("tusk", "ear", "trunk", "")


def odd_rows(batch):
    """Makes inputs of all kinds: pixels, sequences of pairs, strings, and class numbers and weights."""
    numbers = batch["number"].astype("int64")
    return {
        "pixels": np.stack([numbers, numbers * 7, numbers * 31], axis=1).astype("uint8"),
        "pairs": [np.full((int(number) % 4, 2), number / 3, "float16") for number in numbers],
        "places": np.eye(5, dtype="float32")[numbers % 5] * (numbers[:, None] / 7),
        "words": np.array([[WORDS[int(number) % 4], str(number)] for number in numbers], object),
        "label": (numbers % 3).astype("int64"),
        "weight": 1 + numbers % 2,
    }


def odd_model():
    keras.utils.set_random_seed(1)
    pixels = keras.Input((3,), name="pixels", dtype="uint8")
    pairs = keras.Input((None, 2), name="pairs", dtype="float16")
    places = keras.Input((5,), name="places", sparse=True)
    words = keras.Input((2,), name="words", dtype="string")
    lookup = keras.layers.StringLookup(vocabulary=["tusk", "ear", "trunk"], output_mode="multi_hot")
    parts = [
        keras.layers.Rescaling(1 / 255)(pixels),
        keras.layers.GlobalAveragePooling1D()(pairs),
        keras.layers.Dense(2)(places),
        lookup(words),
    ]
    hidden = keras.layers.Concatenate()([keras.ops.cast(part, "float32") for part in parts])
    model = keras.Model([pixels, pairs, places, words], keras.layers.Dense(3, activation="softmax")(hidden))
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return model


@pytest.mark.slow("three fits of a model with strings")
def test_fit_when_the_function_makes_columns_of_all_kinds_then_has_the_same_bits(spark, functions):
    parts = [[(float(number), 0, 1.0) for number in range(start, start + 11)] for start in (0, 11)]
    frame = partitioned_frame(spark, parts, "number double, label int, weight double")
    shifting = keras.layers.Normalization(mean=10.0, variance=4.0)

    def with_layer(batch):
        moved = np.asarray(shifting(batch["number"])).reshape(-1) > 0
        return {**odd_rows(batch), "label": batch["number"].astype("int64") % 2 + moved}

    estimator = KerasEstimator(
        model=odd_model(), featuresCol=["number"], weightCol="weight", preprocessing=functions.counted(with_layer),
        numWorkers=2, epochs=2, batchSize=4, bucketByLength=True, verbose=0,
    )  # fmt: skip
    with elephant.prepared(frame, estimator) as rows:
        fits = [estimator.fit(rows) for _ in range(2)]
        # What Keras writes of the layer has the time in it, and is the same function all the same.
        assert functions.rows == 22
    direct = estimator.fit(frame)
    assert functions.rows == 44
    for fitted in fits:
        assert_same_bits(fitted, direct)


def test_functions_when_compared_then_a_layer_is_the_same_whenever_it_is_written_and_another_is_not():
    def adapted(*rows):
        layer = keras.layers.Normalization(name="numbers")
        layer.adapt(np.array(rows, "float32")[:, None])
        return layer

    def function_of(layer):
        return lambda batch: layer(batch["x"])

    one, other = adapted(1, 2), adapted(1, 5)
    contents = [prepared._comparable(function_of(layer)) for layer in (one, other)]
    # Keras writes the second.
    time.sleep(1.1)
    assert [prepared._comparable(function_of(layer)) for layer in (one, other)] == contents
    assert contents[0] != contents[1]


def test_rows_when_a_message_of_them_is_too_large_for_an_old_spark_then_they_are_not_kept():
    def session_of(**conf):
        names = {"rows": "maxRecordsPerBatch", "bytes": "maxBytesPerBatch"}
        settings = {f"spark.sql.execution.arrow.{names[name]}": value for name, value in conf.items()}
        return types.SimpleNamespace(conf=types.SimpleNamespace(get=settings.__getitem__))

    schema = DataSchema(inputs=(Field("features", ("x",), "float32", DENSE, (300, 300, 3)),))
    assert prepared._can_be_sent(schema, session_of(rows="900"))
    assert prepared._can_be_sent(schema, session_of(rows="10000", bytes="67108864b"))
    for rows in ("10000", "0"):
        with pytest.warns(UserWarning, match=r"preprocessed rows could not be kept.*1,080,000 bytes.*PerBatch=994\."):
            assert not prepared._can_be_sent(schema, session_of(rows=rows))
    without = DataSchema(inputs=(Field("features", ("x",), "float32", DENSE, (0,)),))
    assert not prepared._can_be_sent(without, session_of(rows="900"))
