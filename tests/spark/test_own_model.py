"""What a user asks of a cluster before the first long fit: whether workers equal one process, and where seconds go."""

import keras
import numpy as np
import pytest

import elephant
from elephant.config import Timeouts
from elephant.errors import ConfigurationError, DataError
from elephant.spark import estimator as estimators
from elephant.spark import params
from elephant.spark.trial_fit import trial_fit

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

ROWS = 30
COLUMNS = (
    "array(float(id), float(id / 2)) AS features",
    "float(id) AS label",
    "id % 2 = 0 AS held_out",
)


@pytest.fixture
def estimator():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return elephant.KerasEstimator(model=model, batchSize=4, numWorkers=3, epochs=7, seed=5)


@pytest.fixture
def asked(monkeypatch):
    """What is compared; the comparison is in tests/driver/test_verification.py, and both on the page exactness.md."""
    given = []

    def verified(job, rows):
        given.append((job, rows))
        return "a verification"

    monkeypatch.setattr(estimators, "verified", verified)
    return given


def test_verify_when_given_a_frame_then_compares_some_rows_with_the_estimator_s_options(spark, estimator, asked):
    frame = spark.range(0, ROWS, 1, 3).selectExpr(*COLUMNS)
    estimator.setParams(validationIndicatorCol="held_out", augmentation=lambda batch, rng: batch)
    assert estimator.verify(frame, rows=12) == "a verification"
    [(job, rows)] = asked
    labels = rows.column("label").to_pylist()
    assert len(set(labels)) == 12 and set(labels) <= set(np.arange(ROWS, dtype=float))
    assert rows.column("features").to_pylist() == [[label, label / 2] for label in labels]
    assert (job.config.num_workers, job.config.batch_size, job.config.seed, job.config.shuffle) == (2, 4, 5, False)
    assert job.schema.validation is None and job.preprocessing.augment is None
    # The estimator is as it was.
    assert estimator.getOrDefault("validationIndicatorCol") == "held_out"


def test_verify_when_given_files_then_executors_read_the_first_rows(spark, estimator, asked, tmp_path):
    spark.range(0, ROWS, 1, 1).selectExpr(*COLUMNS).write.parquet(str(tmp_path / "rows"))
    estimator.verify(str(tmp_path / "rows"), rows=7)
    assert asked[0][1].num_rows == 7
    assert set(asked[0][1].column("label").to_pylist()) <= set(np.arange(ROWS, dtype=float))


def test_verify_when_there_is_nothing_to_compare_then_says_why(spark, estimator, monkeypatch):
    frame = spark.range(0, ROWS).selectExpr(*COLUMNS)
    with pytest.raises(ConfigurationError, match="verify: expected mode='synchronous'.* Received: mode='asynchronous'"):
        estimator.setParams(mode="asynchronous").verify(frame)
    # As if the backend were JAX, which alone divides models.
    monkeypatch.setattr(params, "check_distribution", lambda config: None)
    divided = {"shape": [1, 3], "axis_names": ["batch", "model"], "layouts": {".*kernel": [None, "model"]}}
    with pytest.raises(ConfigurationError, match="verify: expected workers of which each has the whole model"):
        estimator.copy().setParams(mode="synchronous", distribution=divided).verify(frame)
    estimator.setParams(mode="synchronous")
    with pytest.raises(ConfigurationError, match="rows: expected a whole number, 2 or more. Received: 1"):
        estimator.verify(frame, rows=1)
    with pytest.raises(DataError, match="verify: expected two rows or more. Received: none"):
        estimator.verify(frame.where("id < 0"))


@pytest.mark.slow("two fits; other tests fit, and this one looks at what is told of them")
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_trial_fit_when_it_ends_then_its_phases_are_those_of_the_fit(spark, mode):
    found = trial_fit(spark, num_workers=1, mode=mode, timeouts=Timeouts(), training_s=0.5)
    assert list(found.seconds) == ["pre-flight, processes and rows", "first epoch", "training", "result"]
    assert min(found.seconds.values()) >= 0 and 0.4 < found.seconds["training"]
    assert found.rows_per_s > 0 and sum(found.shares.values()) == pytest.approx(1.0)
