"""Two workers against one process on a user's model: what is equal, what is not and why, and what is told of it."""

import json
import math
import re

import keras
import pyarrow as pa
import pytest
from keras import layers, ops
from keras_reference import classifier_data, job_for

from elephant.config import FitConfig
from elephant.driver.verification import Difference, Verification, config_to_verify, verified
from elephant.errors import DataError

ROWS = 50
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("by_value")]


def over_pairs(y_true, y_pred):
    return ops.mean(ops.square((y_pred[:, None] - y_pred[None]) - (y_true[:, None] - y_true[None])))


def model_of(*inner, loss="mse"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh"), *inner, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["mae"])
    return model


def compared(model, rows=ROWS, **options):
    """Returns what two workers and one process make of the rows of `classifier_data`."""
    config = config_to_verify(FitConfig(batch_size=8, seed=3, **options))
    job = job_for(model, **vars(config))
    data = classifier_data(rows)
    features = pa.FixedSizeListArray.from_arrays(pa.array(data["features"].ravel()), 6).cast(pa.list_(pa.float32()))
    batch = pa.RecordBatch.from_arrays([features, pa.array(data["label"])], ["features", "label"])
    return verified(job, batch)


@pytest.mark.usefixtures("warm_ranks")
def test_verify_when_rows_do_not_meet_then_is_equal_and_names_no_cause():
    found = compared(model_of())
    assert found.equal and found.causes == () and found.random_spread is None
    assert (found.rows, found.batch_size, found.epochs) == ((30, 20), 8, 2)
    assert {one.name for one in found.metrics} == {"loss", "mae"}
    # Both have trained, and from the same weights: a comparison of nothing would be equal as well.
    assert found.weights[0].difference < 1e-6 and len(found.weights) == 4
    assert str(found).splitlines()[-1] == "equal within 1e-04: yes"


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("inner", "loss", "cause"),
    [
        pytest.param([layers.BatchNormalization(name="norm")], "mse", r"batch normalization \(norm\)", id="statistics"),
        pytest.param(
            [],
            over_pairs,
            "loss: expected the mean over the rows of a batch",
            id="loss",
            marks=pytest.mark.slow(
                "three processes; the case above compares, tests/rank/test_coupling.py finds losses"
            ),
        ),
    ],
)
def test_verify_when_rows_meet_then_is_not_equal_and_says_where(inner, loss, cause):
    found = compared(model_of(*inner, loss=loss))
    assert not found.equal
    assert max(one.relative for one in found.weights) > 10 * found.tolerance
    assert len(found.causes) == 1 and re.match(cause, found.causes[0]), found.causes
    assert "equal within 1e-04: NO" in str(found)


@pytest.mark.slow("three processes; the tests above compare")
@pytest.mark.usefixtures("warm_ranks")
def test_verify_when_statistics_are_shared_then_is_equal():
    found = compared(model_of(layers.BatchNormalization(name="norm")), sync_batch_norm=True)
    assert found.equal and found.causes == ()


@pytest.mark.slow("three processes; the tests above compare")
@pytest.mark.usefixtures("warm_ranks")
def test_verify_when_the_model_draws_at_random_then_says_how_far_one_process_is_from_itself():
    found = compared(model_of(layers.Dropout(0.4, name="drop")))
    assert not found.equal
    assert found.random_spread > found.tolerance
    assert found.causes == ("random numbers (drop): each worker draws its own.",)


def test_verify_when_there_is_one_row_then_asks_for_two():
    with pytest.raises(DataError, match="verify: expected two rows or more, one for each worker. Received: 1"):
        compared(model_of(), rows=1)


def verification(*, weight=0.0, loss=0.0, causes=()):
    return Verification(
        rows=(6, 4),
        batch_size=2,
        epochs=2,
        weights=(Difference(name="dense/kernel", difference=weight, scale=2.0),),
        metrics=(Difference(name="loss", difference=loss, scale=1.0),),
        causes=causes,
        random_spread=None,
        tolerance=1e-4,
        seconds=3.2,
    )


@pytest.mark.parametrize(
    ("found", "equal", "last"),
    [
        (verification(weight=1.9e-4), True, "equal within 1e-04: yes"),
        (verification(weight=2.1e-4), False, "no cause is known: please report it, with this model"),
        (verification(loss=math.inf, causes=("one",)), False, "  - one"),
    ],
)
def test_verification_when_printed_then_says_whether_numbers_agree_and_why_not(found, equal, last):
    assert found.equal is equal
    assert str(found).splitlines()[-1] == last
    assert json.loads(json.dumps(found.as_json()))["equal"] is equal


def test_config_to_verify_when_made_of_a_fit_s_options_then_keeps_what_a_step_computes():
    given = FitConfig(num_workers=8, epochs=9, batch_size=16, learning_rate=0.3, seed=5, shuffle=True, max_restarts=2)
    config = config_to_verify(given)
    kept = ("batch_size", "learning_rate", "seed", "frequency", "compression", "sync_batch_norm")
    assert {name: getattr(config, name) for name in kept} == {name: getattr(given, name) for name in kept}
    assert (config.num_workers, config.shuffle, config.max_restarts) == (2, False, 0)


@pytest.mark.slow("three processes; the tests above compare")
@pytest.mark.usefixtures("warm_ranks")
def test_verify_when_a_layer_could_draw_and_does_not_then_names_no_cause():
    model = model_of(layers.Reshape((8, 1)), layers.LSTM(3))
    found = compared(model)
    assert found.equal and found.causes == () and found.random_spread is None
