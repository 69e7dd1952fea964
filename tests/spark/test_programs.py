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


def test_example_after_the_move_when_run_then_learns_and_loads_what_it_saved(run):
    said = run("migrating/elephas_after.py")
    tested = float(re.search(r"accuracy (0\.\d+)", said)[1])
    right = float(re.search(r"right in (\d+\.\d)%", said)[1]) / 100
    loaded = float(re.search(r"the saved model: accuracy (0\.\d+)", said)[1])
    assert tested > 0.85
    assert right == pytest.approx(tested, abs=0.001)
    assert loaded == tested


def test_two_towers_when_run_then_find_more_than_the_most_clicked_items_and_write_the_table(run, tmp_path):
    said = run("two_tower.py")
    recall, baseline = map(float, re.search(r"recall@10 (0\.\d+) .* have (0\.\d+)", said).groups())
    assert recall > 2 * baseline
    vectors = pq.read_table(tmp_path / "item-vectors").sort_by("id")
    assert vectors.num_rows == 600 and len(vectors["embedding"][0]) == 16


def test_ranking_when_run_then_orders_views_nearly_as_well_as_their_chances(run):
    auc, best = map(float, re.search(r"AUC (0\.\d+) .* have (0\.\d+)", run("ranking.py")).groups())
    assert 0.75 < auc < best


def test_lora_classifier_when_run_then_learns_and_its_workers_send_less_than_its_frozen_base(run):
    pytest.importorskip("keras_hub", reason="KerasHub is not installed")
    said = run("lora_classifier.py")
    assert float(re.search(r"test accuracy (\d\.\d+)", said)[1]) > 0.95
    trained, whole = (int(number.replace(",", "")) for number in re.search(r"with (\S+) of (\S+) w", said).groups())
    sent = int(re.search(r"in the last epoch: (\S+)", said)[1].replace(",", ""))
    # Of 18 steps, with the sums of metrics; the base alone has 300,000 bytes.
    assert trained < whole / 20 and sent < 18 * (4 * trained + 2000)


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
