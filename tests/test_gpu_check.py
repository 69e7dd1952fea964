"""The check of GPUs: its logic on the processor, and itself where there is a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elephant.task.gpu_devices import host_gpus, listed_devices

PROGRAM = str(Path(__file__).parents[1] / "benchmarks" / "gpu_check.py")
# A machine for GPUs has no Spark.
WITHOUT_SPARK = f"""
import runpy, sys
sys.modules["pyspark"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "pyspark" else found(name, *more)
runpy.run_path({PROGRAM!r}, run_name="__main__")
"""


def checked(*arguments, code):
    done = subprocess.run(
        [sys.executable, *code, "--json", *arguments], capture_output=True, text=True, timeout=170, env=dict(os.environ)
    )
    assert done.stdout.strip(), done.stderr[-2000:]
    return done.returncode, {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.slow("runs of two ranks that import Keras")
def test_check_when_ranks_compute_on_the_processor_then_all_but_gpus_is_tried():
    if importlib.util.find_spec("cloudpickle") is None:
        pytest.skip("the package cloudpickle is not installed")
    _, rows = checked("--device", "cpu", code=["-c", WITHOUT_SPARK])
    # How memory ends is the machine's: beside other processes, a rank may be killed before it can say so.
    missed = [row for row in rows.values() if row["status"] == "MISS" and row["name"] != "out of memory"]
    assert missed == []
    assert rows["uneven rows, 2 ranks against 1"]["status"] == rows["mixed precision"]["status"] == "ok"
    assert rows["visibility"]["status"] == rows["NCCL against the host path"]["status"] == "skipped"


@pytest.mark.gpu
@pytest.mark.skipif(not listed_devices(host_gpus()), reason="nvidia-smi lists no GPU on this machine")
def test_check_when_there_is_a_gpu_then_nothing_misses():
    status, rows = checked(code=[PROGRAM])
    assert status == 0, rows


def test_check_when_there_is_no_gpu_then_says_so_and_fails(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    status, rows = checked(code=[PROGRAM])
    assert status == 1
    assert (rows["devices"]["status"], rows["devices"]["received"]) == ("MISS", "none")
