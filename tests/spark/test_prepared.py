"""Rows that several fits share: how often Spark computes them, what the fits give, and what is left afterwards."""

import concurrent.futures

import keras
import numpy as np
import pytest
from counted_source import SCHEMA, CountedSource, end_an_executor_with_rows, keeps_nothing
from keras_reference import fit_one_process, global_batches, regression_model
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit

import elephant
from elephant import KerasEstimator
from elephant.errors import ConfigurationError, DataError, SchemaError

pytestmark = pytest.mark.usefixtures("empty_cache")

RATES = (0.01, 0.03)


def estimator_of(**options):
    model = regression_model(keras.optimizers.SGD(0.01))
    return KerasEstimator(
        model=model, **{"numWorkers": 2, "epochs": 2, "batchSize": 4, "shuffle": False, "verbose": 0, **options}
    )


def expected_weights(source, rate, epochs=2):
    model = regression_model(keras.optimizers.SGD(rate))
    batches = list(global_batches(source.parts, 4, epochs))
    return fit_one_process(model, batches, epochs)[0]


def assert_equal_one_process(fitted, source, rate):
    for value, wanted in zip(fitted.model.get_weights(), expected_weights(source, rate), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)


@pytest.fixture
def source(spark, tmp_path):
    return CountedSource(spark, tmp_path)


def test_fits_when_rows_are_prepared_then_are_read_once_and_each_equals_one_process(spark, source):
    with elephant.prepared(source.frame, estimator_of()) as rows:
        assert source.reads == [1, 1] and not keeps_nothing(spark)
        for rate in RATES:
            assert_equal_one_process(estimator_of().fit(rows, learningRate=rate), source, rate)
        assert source.reads == [1, 1]
    assert keeps_nothing(spark)
    # Afterwards it is a frame as any other.
    assert_equal_one_process(estimator_of().fit(rows), source, 0.01)
    assert source.reads == [2, 2]


def test_fits_of_a_list_when_all_are_done_then_rows_were_read_once_and_nothing_is_kept(spark, source):
    estimator = estimator_of()
    fits = estimator.fit(source.frame, [{estimator.learningRate: rate} for rate in RATES])
    assert source.reads == [1, 1] and keeps_nothing(spark)
    for fitted, rate in zip(fits, RATES, strict=True):
        assert_equal_one_process(fitted, source, rate)


def test_fits_when_threads_take_them_at_once_and_one_fails_then_rows_were_read_once_and_nothing_is_kept(spark, source):
    estimator = estimator_of(numWorkers=1)
    maps = [{estimator.labelCol: name} for name in ("label", "none", "label")]
    fits = estimator.fitMultiple(source.frame, maps)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ended = [pool.submit(next, fits) for _ in maps]
        errors = [end.exception() for end in ended]
    assert [type(error) for error in errors if error] == [SchemaError]
    assert source.reads == [1, 1] and keeps_nothing(spark)
    with pytest.raises(StopIteration):
        next(fits)


def test_fits_when_nobody_takes_the_rest_then_nothing_is_kept(spark, source):
    estimator = estimator_of(numWorkers=1)
    fits = estimator.fitMultiple(source.frame, [{estimator.epochs: 1}, {estimator.epochs: 2}])
    next(fits)
    assert not keeps_nothing(spark)
    del fits
    assert keeps_nothing(spark)


@pytest.mark.slow("five fits; the list of two counts reads")
def test_tuning_when_fits_run_at_once_then_each_split_is_read_once(spark, source):
    from pyspark.ml.evaluation import RegressionEvaluator

    estimator = estimator_of(numWorkers=1)
    grid = ParamGridBuilder().addGrid(estimator.learningRate, [0.001, 0.01, 0.03]).build()
    tuning = TrainValidationSplit(
        estimator=estimator, estimatorParamMaps=grid, evaluator=RegressionEvaluator(), parallelism=2, seed=1
    )
    fitted = tuning.fit(source.frame)
    assert len(fitted.validationMetrics) == 3
    # The rows to train on, those to evaluate on, which Spark keeps itself, and all for the best one.
    assert max(source.reads) <= 3
    assert keeps_nothing(spark)


@pytest.mark.slow("five fits; the list of two counts reads")
def test_fits_when_workers_and_mode_differ_then_rows_are_read_once_more_at_most(spark, source):
    with elephant.prepared(source.frame, estimator_of(numWorkers=1, epochs=1)) as rows:
        assert source.reads == [1, 1]
        estimator_of(numWorkers=2, epochs=1).fit(rows)
        assert source.reads == [2, 2]
        for _ in range(2):
            # Dealt out from what is there.
            estimator_of(numWorkers=2, epochs=1, mode="asynchronous").fit(rows)
        assert source.reads == [2, 2]
        estimator_of(numWorkers=1, epochs=1).fit(rows)
        assert source.reads == [2, 2]
    assert keeps_nothing(spark)


def test_rows_when_workers_go_at_their_own_pace_then_those_read_ahead_are_what_the_fit_asks_for(spark, source):
    # As many partitions as workers: such a fit takes them as they are.
    with elephant.prepared(source.frame, estimator_of(mode="asynchronous", epochs=1)) as rows:
        estimator_of(mode="asynchronous", epochs=1).fit(rows)
    assert source.reads == [1, 1]


def test_rows_when_they_cannot_be_kept_then_the_user_is_warned_and_fits_read_them(spark, tmp_path):
    # Spark tries a task four times.
    source = CountedSource(spark, tmp_path, failures=4)
    with pytest.warns(UserWarning, match=r"(?s)could not be kept on the executors.*no rows today"):
        rows = elephant.prepared(source.frame, estimator_of())
    assert keeps_nothing(spark)
    with rows:
        assert_equal_one_process(estimator_of().fit(rows), source, 0.01)


def test_rows_when_they_are_wrong_then_the_fit_says_so(spark):
    frame = spark.createDataFrame([([0.0] * 6, 1.0), ([0.0] * 6, None)], SCHEMA)
    with elephant.prepared(frame, estimator_of(numWorkers=1)) as rows, pytest.raises(DataError, match="'label'"):
        estimator_of(numWorkers=1).fit(rows)
    assert keeps_nothing(spark)


@pytest.mark.slow("an executor ends")
def test_fit_when_an_executor_was_lost_then_its_part_alone_is_read_again(spark, source):
    with elephant.prepared(source.frame, estimator_of()) as rows:
        assert source.reads == [1, 1]
        end_an_executor_with_rows(spark, source)
        assert_equal_one_process(estimator_of().fit(rows), source, 0.01)
        # Both where one executor had both.
        assert sorted(source.reads) in ([1, 2], [2, 2])


@pytest.mark.parametrize("dataset", ["/no/such/folder", elephant.Files("/no/such/folder")])
def test_prepared_when_given_files_then_says_what_to_pass(spark, dataset):
    with pytest.raises(ConfigurationError, match=r"expected a DataFrame\..*spark\.read\.parquet"):
        elephant.prepared(dataset, estimator_of())


def test_prepared_when_a_column_is_missing_then_nothing_is_kept(spark, source):
    with pytest.raises(SchemaError, match="labelCol"):
        elephant.prepared(source.frame, estimator_of(labelCol="none"))
    assert keeps_nothing(spark) and source.reads == [0, 0]
