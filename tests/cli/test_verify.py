"""``elephant verify``: its arguments, what it prints, and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from python_start import python_path

from elephant.cli import own_model, verify
from elephant.cli.main import main
from elephant.driver.verification import Difference, Verification

ROOT = Path(__file__).resolve().parents[2]

MODEL = """
def build():
    import keras
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
"""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "expected --data or --table. Received: none"),
        (["os.path:join"], "expected --data or --table. Received: none"),
        (["os.path:join", "rows.parquet", "--rows", "1"], "rows: expected an integer of at least 2. Received: '1'"),
        (["os.path:join", "rows.parquet", "--epochs", "3"], "expected the name of a setting. Received: an unknown one"),
        (["os.path:join", "rows.parquet", "more"], "Received: an unknown one"),
        (["os.path:join", "rows.parquet", "--table", "rows"], "expected --data or --table. Received: both"),
    ],
)
def test_verify_when_arguments_are_wrong_then_exits_with_2_and_says_which(words, text, capsys):
    assert main(["verify", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.fixture
def compared(monkeypatch):
    """What is asked of an estimator; each verification answers with the next of a list."""
    asked, answers = [], []

    class Estimator:
        def __init__(self, settings):
            self.settings = settings

        def verify(self, given, rows):
            asked.append((self.settings, given, rows))
            return answers.pop()

    class Session:
        def stop(self):
            pass

    monkeypatch.setattr(own_model, "_started_session", lambda name, settings: Session())
    monkeypatch.setattr(verify, "read_rows", lambda session, settings: settings["data"])
    monkeypatch.setattr(verify, "estimator_of", Estimator)
    return asked, answers


def verification(difference):
    return Verification(
        rows=(6, 4),
        batch_size=2,
        epochs=2,
        weights=(Difference(name="kernel", difference=difference, scale=1.0),),
        metrics=(),
        causes=(),
        random_spread=None,
        tolerance=1e-4,
        seconds=1.0,
    )


@pytest.mark.parametrize(("difference", "code"), [(0.0, 0), (0.5, 1)])
def test_verify_when_compared_then_the_exit_code_says_whether_they_are_equal(compared, difference, code, capsys):
    asked, answers = compared
    answers += [verification(difference), verification(difference)]
    assert main(["verify", "os.path:join", "rows.parquet", "--rows", "50", "--batch-size", "8"]) == code
    assert f"equal within 1e-04: {'no' if code else 'yes'}" in capsys.readouterr().out.lower()
    assert main(["verify", "os.path:join", "rows.parquet", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["equal"] is not bool(code)
    assert [(settings["model"], given, rows) for settings, given, rows in asked] == [
        ("os.path:join", "rows.parquet", 50),
        ("os.path:join", "rows.parquet", 1000),
    ]
    assert asked[0][0]["batchSize"] == 8


@pytest.mark.slow("a Spark application of its own; tests/driver/test_verification.py compares")
@pytest.mark.spark
def test_verify_when_run_as_a_program_then_finds_what_couples_the_rows_of_a_model_beside_the_user(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "own_model.py").write_text(MODEL)
    features = pa.array(list(np.random.default_rng(0).normal(size=(20, 4)).astype("float32")))
    pq.write_table(pa.table({"features": features, "label": pa.array(np.ones(20, np.float32))}), tmp_path / "rows")
    done = subprocess.run(
        [sys.executable, "-m", "elephant", "verify", "own_model:build", "rows", "--batch-size", "4", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == [12, 8] and found["causes"][0].startswith("batch normalization (batch_normalization)")
