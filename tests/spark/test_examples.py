"""Programs in ``examples`` run as they stand, but for their session: that of the tests, which they do not stop."""

import contextlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from elephant.cluster import local

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(spark, monkeypatch, tmp_path, capsys):
    """Runs an example in a folder of its own; returns what it has printed."""
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    monkeypatch.setattr(local, "local_session", lambda workers: spark)
    monkeypatch.chdir(tmp_path)

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
