"""Encrypted fits and runs on a cluster: when they are, that results do not change, and what is said of it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from keras_reference import classifier_data, regression_model
from spark_frames import partitioned_frame, split_rows

import elephant
from elephant import KerasEstimator
from elephant.driver import replay, run_ranks
from elephant.net.tls import is_encrypted

SCHEMA = "features array<double>, label double"
REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def tokens(monkeypatch):
    """Tokens of the attempts that a test makes."""
    made, new_token = [], run_ranks.new_token

    def noted(**options):
        made.append(new_token(**options))
        return made[-1]

    for module in (run_ranks, replay):
        monkeypatch.setattr(module, "new_token", noted)
    return made


@pytest.fixture
def spark_that_encrypts(spark):
    """The cluster, with a setting that asks Spark to encrypt something."""
    spark.conf.set("spark.ssl.enabled", "true")
    yield spark
    spark.conf.unset("spark.ssl.enabled")


def weights_of(spark, **options):
    frame = partitioned_frame(spark, split_rows(classifier_data(32), (16, 16)), SCHEMA)
    fitted = KerasEstimator(regression_model("sgd"), numWorkers=2, epochs=2, batchSize=4, verbose=0, **options).fit(
        frame
    )
    return fitted.model.get_weights(), fitted.history


def total():
    return float(elephant.collective.allreduce(np.array([elephant.collective.rank() + 1.0]))[0])


@pytest.mark.slow("two fits; tests/driver/test_encryption.py compares their bits, the runs below encrypt on Spark")
@pytest.mark.parametrize("options", [{}, {"aggregation": "server", "parameterServers": 2}], ids=["allreduce", "server"])
def test_fit_when_encrypted_then_its_weights_are_bit_for_bit_those_of_a_plain_one(spark, tokens, options):
    (plain, history), (encrypted, other_history) = (
        weights_of(spark, encryption=encryption, **options) for encryption in (False, True)
    )
    assert [is_encrypted(token) for token in tokens] == [False, True]
    assert history == other_history
    for value, other in zip(plain, encrypted, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize(("encryption", "is_so"), [(None, True), (False, False), (True, True)])
def test_run_when_spark_is_told_to_encrypt_then_so_is_it_unless_told_otherwise(
    spark_that_encrypts, tokens, by_value, capsys, encryption, is_so
):
    results = elephant.run(total, num_workers=2, spark=spark_that_encrypts, verbose=1, encryption=encryption)
    assert results == [3.0, 3.0]
    assert [is_encrypted(token) for token in tokens] == [is_so]
    shown = capsys.readouterr().out
    in_the_clear = "Gradients and weights cross the network in the clear: leave encryption out."
    assert (in_the_clear in shown) is not is_so
    # Of this setting alone, tasks are not encrypted.
    assert ("Who reads Spark's own connections can read elephant's" in shown) is is_so


def test_run_when_rank_0_coordinates_then_its_connections_are_encrypted_too(spark, tokens, by_value):
    spark.conf.set("spark.elephant.coordinator", "executors")
    try:
        assert elephant.run(total, num_workers=2, spark=spark, verbose=0, encryption=True) == [3.0, 3.0]
    finally:
        spark.conf.unset("spark.elephant.coordinator")
    assert [is_encrypted(token) for token in tokens] == [True]


SCRIPT = """
from keras_reference import classifier_data, regression_model
from spark_frames import partitioned_frame, split_rows
from elephant import KerasEstimator
from elephant.cluster.local import local_session
from elephant.driver import run_ranks
from elephant.net.tls import is_encrypted

made, new_token = [], run_ranks.new_token
run_ranks.new_token = lambda **options: made.append(new_token(**options)) or made[-1]
spark = local_session(2, conf={"spark.network.crypto.enabled": "true"})
frame = partitioned_frame(spark, split_rows(classifier_data(32), (16, 16)), "features array<double>, label double")
for mode in ("synchronous", "asynchronous", "gossip"):
    fitted = KerasEstimator(regression_model("sgd"), numWorkers=2, epochs=2, mode=mode, verbose=1).fit(frame)
    assert len(fitted.history["loss"]) == 2
print("encrypted", *map(is_encrypted, made))
spark.stop()
"""


@pytest.mark.slow("a cluster of its own; the settings alone are looked at above, and in tests/cluster")
def test_fits_when_spark_encrypts_its_connections_then_encrypt_theirs_in_all_modes_and_warn_of_nothing():
    support = str(REPOSITORY / "tests" / "support")
    path = os.pathsep.join([str(REPOSITORY), support, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "encrypted True True True"
    assert "encryption: expected" not in done.stdout
