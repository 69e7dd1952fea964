"""The session that `elephant.run` finds or makes, in processes of their own; functions of the main script."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pyspark
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent

SCRIPT = """
import sys
import numpy as np
import elephant

OFFSET = 10

class Total:
    def __init__(self, value):
        self.value = value

def total(scale):
    rank = elephant.collective.rank()
    return Total(float(elephant.collective.allreduce(np.array([scale * rank + OFFSET]))[0]))

if __name__ == "__main__":
    results = elephant.run(total, (2.0,), num_workers=int(sys.argv[1]), verbose=0)
    again = elephant.run(total, (4.0,), num_workers=int(sys.argv[1]), verbose=0)
    print("results", *(result.value for result in [*results, *again] if isinstance(result, Total)))
    from pyspark.sql import SparkSession
    session = SparkSession.getActiveSession()
    print("master", session and session.conf.get("spark.master"))
"""


def run_script(tmp_path, *command, workers):
    """Runs the script to its end; returns its lines by their first word, and what its processes were."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [*command, str(script), str(workers)],
        env={**environment, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=160)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, err[-3000:]
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}


def folders_left(parent):
    return sorted(path.name for path in Path(parent).glob("elephant-*"))


@pytest.mark.slow("a cluster of its own; tests/cluster/test_local.py starts one, too")
def test_run_when_there_is_no_session_then_makes_a_local_cluster_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = run_script(tmp_path, sys.executable, workers=2)
    assert said["results"] == ["22.0", "22.0", "24.0", "24.0"]
    assert said["master"] == ["local-cluster[2,1,1024]"]
    assert folders_left(tmp_path) == []
    mine = [process.cmdline() for process in psutil.process_iter() if str(tmp_path) in " ".join(_command(process))]
    assert mine == []


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_run_when_there_is_one_worker_then_the_same_script_starts_no_session(tmp_path):
    said = run_script(tmp_path, sys.executable, workers=1)
    assert said["results"] == ["10.0", "10.0"]
    assert said["master"] == ["None"]


@pytest.mark.slow("a submission")
@pytest.mark.skipif(not (Path(pyspark.__file__).parent / "bin").is_dir(), reason="this PySpark has no spark-submit")
def test_run_when_started_by_spark_submit_then_takes_the_session_of_the_submission(tmp_path, monkeypatch):
    from elephant.cluster.local import ensure_java

    monkeypatch.setenv("JAVA_HOME", os.environ.get("JAVA_HOME", ""))
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "local"))
    ensure_java(maximum=17 if pyspark.__version__.startswith("3.5") else None)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    conf = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    said = run_script(tmp_path, str(submit), "--master", "local[2]", *conf, workers=2)
    assert said["results"] == ["22.0", "22.0", "24.0", "24.0"]
    assert said["master"] == ["local[2]"]


FAILING = """
import sys
from elephant import collective
print("scale", sys.argv[1], "of", collective.world_size())
collective.barrier()
if collective.rank() == 1:
    sys.exit("no rows")
collective.barrier()
"""


@pytest.mark.slow("a cluster of its own")
def test_program_run_when_a_rank_of_a_script_fails_then_shows_all_output_and_ends_with_1(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "script.py").write_text(FAILING, encoding="utf-8")
    command = [sys.executable, "-m", "elephant", "run", str(tmp_path / "script.py"), "--num-workers", "2", "--", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160)
    assert done.returncode == 1, done.stderr[-3000:]
    # Once, though both ranks print it.
    assert [line.split("] ")[1] for line in done.stdout.splitlines() if "] scale" in line] == ["scale 7 of 2"]
    assert "elephant run: rank 1 on " in done.stderr and "SystemExit: sys.exit('no rows') was called" in done.stderr
    assert f'{tmp_path / "script.py"}", line 7, in <module>\n    sys.exit("no rows")' in done.stderr
    assert folders_left(tmp_path) == []
