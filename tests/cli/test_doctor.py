"""``elephant doctor`` as a program of its own, on healthy setups and on broken ones."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from python_start import python_path

from elephant.cli import main as program
from elephant.cluster import local

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 200

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


def doctor(*arguments, folder, **variables):
    """Runs the program with a folder of its own for temporary files; returns its exit code and what it printed."""
    own = {"PYTHONPATH": python_path(ROOT), "TMPDIR": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    done = subprocess.run(
        [sys.executable, "-m", "elephant", "doctor", *arguments],
        env={**kept, **own, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stdout


def left_in(folder):
    """Returns what is left, without what the JVM keeps for the next one."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(("hsperfdata", "liblz4", "libzstd"))]


@pytest.mark.slow("a Spark application of its own; tests/spark/test_preflight.py asks the doctor in a session")
@pytest.mark.spark
def test_doctor_when_all_is_well_then_exits_with_0_and_leaves_nothing(tmp_path):
    code, printed = doctor("--workers", "2", "--json", folder=tmp_path)
    short_text = json.loads(printed)
    assert [found for found in short_text["findings"] if found["status"] == "failure"] == []
    assert (code, short_text["healthy"]) == (0, True)
    by_name = {found["name"]: found for found in short_text["findings"]}
    assert by_name["numWorkers=2"]["received"] == "2"
    assert by_name["trial run"]["received"].endswith("for 2 ranks")
    assert left_in(tmp_path) == []


@contextlib.contextmanager
def small_disk(folder, num_bytes):
    """Mounts a small file system; yields whether that could be done."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    can = sys.platform == "linux" and os.geteuid() == 0
    mounted = can and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.spark
@pytest.mark.slow("a session of its own; test_machine_checks.py and test_session_checks.py hold the remedies")
def test_doctor_when_much_is_wrong_then_exits_with_1_and_has_a_remedy_for_each(tmp_path):
    # What executors find first says that another Keras is installed there.
    other = tmp_path / "other" / "keras-3.0.5.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: keras\nVersion: 3.0.5\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with small_disk(tmp_path / "disk", 32 << 20) as mounted:
        code, printed = doctor(
            *("--workers", "2", "--conf", "spark.master=local-cluster[1,1,1024]"),
            *("--conf", f"spark.executorEnv.PYTHONPATH={other.parent}{os.pathsep}{ROOT}"),
            *("--conf", f"spark.local.dir={tmp_path / 'disk'}"),
            folder=temporary,
        )
    lines = printed.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith("FAIL")]
    assert code == 1
    assert failed == ["numWorkers=2", *(["disk"] if mounted else []), "Keras"]
    assert sum(line.startswith("      remedy:") for line in lines) >= len(failed)
    assert "Lower numWorkers to 1" in printed
    assert "3.0.5 on executor" in printed
    assert f"a fit would fail: {len(failed)} checks failed" in lines[-1]


def test_doctor_when_there_is_no_java_then_exits_with_1_and_says_where_one_comes_from(monkeypatch, capsys):
    monkeypatch.setattr(local, "_candidates", lambda: iter(()))
    assert program.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL  Java" in printed
    assert "pip install 'elephant-spark[local]'" in printed
    # Without a session the rest cannot be looked at, and is not said to have failed.
    assert "?     Spark session" in printed
    assert "a fit would fail: 1 check failed" in printed


def test_doctor_when_no_master_answers_then_exits_with_1_in_time(monkeypatch, capsys):
    def start(**options):
        assert options == {"master": "spark://nobody:7077", "remote": None, "conf": {"a": "b=c"}, "workers": 4}
        raise OSError("All masters are unresponsive! Giving up.")

    monkeypatch.setattr("elephant.cli.doctor.start_session", start)
    arguments = ["doctor", "--master", "spark://nobody:7077", "--conf", "a=b=c", "--workers", "4", "--json"]
    assert program.main(arguments) == 1
    session = json.loads(capsys.readouterr().out)["findings"][-1]
    assert (session["name"], session["status"]) == ("Spark session", "failure")
    assert "All masters are unresponsive! Giving up" in session["received"]
