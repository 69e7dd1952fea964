"""Programs that run as they stand, but for their session: that of the tests, which they do not stop."""

import contextlib
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elephant.cli import doctor
from elephant.cli.main import main
from elephant.cluster import local

pytestmark = pytest.mark.slow("whole programs; the other tests of this folder, and tests/cli, hold what they call")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def here(spark, monkeypatch, tmp_path):
    """A folder of its own for a program, which gets the session of the tests."""
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    monkeypatch.setattr(local, "local_session", lambda workers: spark)
    monkeypatch.setattr(doctor, "start_session", lambda **where: spark)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example; returns what it has printed."""

    def run_example(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *words])
        # The demo's exit code is for more epochs.
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def test_demo_when_run_then_reaches_the_accuracy_that_it_asks_for(run, tmp_path):
    said = run("digits.py", "--epochs", "10")
    assert "test accuracy 0.9" in said and (tmp_path / "digits-curves.png").exists()


def test_ranking_when_run_then_orders_views_nearly_as_well_as_their_chances(run):
    auc, best = map(float, re.search(r"AUC (0\.\d+) .* have (0\.\d+)", run("ranking.py")).groups())
    assert 0.75 < auc < best


MODEL = """
def build():
    import keras
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse")
    return model
"""


@pytest.fixture
def rows(tmp_path):
    """A file of rows; beside it, where the user stands, is the module of a model."""
    (tmp_path / "model_of_user.py").write_text(MODEL)
    features = pa.array(list(np.random.default_rng(0).normal(size=(20, 4)).astype("float32")))
    pq.write_table(pa.table({"features": features, "label": pa.array(np.ones(20, np.float32))}), tmp_path / "rows")
    yield str(tmp_path / "rows")
    sys.modules.pop("model_of_user", None)


def test_bench_when_it_has_a_session_then_measures_a_model_beside_the_user(rows, capsys):
    words = ["--data", rows, "--model", "model_of_user:build", "--workers", "1,2", "--steps", "4"]
    assert main(["bench", *words, "--repeats", "2", "--batch-size", "8", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert [(run["workers"], len(run["rates"])) for run in runs] == [(1, 2), (2, 2)]
    assert all(run["rows_per_s"] > 0 and sum(run["shares"].values()) == pytest.approx(1.0) for run in runs)


def test_verify_when_it_has_a_session_then_finds_what_couples_the_rows_of_a_model(rows, warm_ranks, capsys):
    assert main(["verify", "model_of_user:build", rows, "--batch-size", "4", "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rows"] == [12, 8] and found["causes"][0].startswith("batch normalization (batch_normalization")
