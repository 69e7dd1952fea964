"""The check of GPUs: its logic on the processor, and itself where there is a GPU."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from elephant.driver import local_ranks
from elephant.task.gpu_devices import host_gpus, listed_devices

PROGRAM = str(Path(__file__).parents[1] / "benchmarks" / "gpu_check.py")


def checked(*arguments):
    done = subprocess.run([sys.executable, PROGRAM, "--json", *arguments], capture_output=True, text=True, timeout=170)
    assert done.stdout.strip(), done.stderr[-2000:]
    return done.returncode, rows_in(done.stdout)


def rows_in(printed):
    return {row["name"]: row for row in json.loads(printed.splitlines()[-1])}


@pytest.fixture
def warm_functions(warm_ranks, monkeypatch):
    """Ranks that run a function are forked as well."""
    make, warm = local_ranks.function_spec, local_ranks.TaskSpec.keywords["warm"]
    monkeypatch.setattr(local_ranks, "function_spec", lambda *given: replace(make(*given), warm=warm))


@pytest.mark.slow("nine ranks, forked by a server that imports Keras")
def test_check_when_ranks_compute_on_the_processor_then_all_but_gpus_is_tried(warm_functions, monkeypatch, capsys):
    if importlib.util.find_spec("cloudpickle") is None:
        pytest.skip("the package cloudpickle is not installed")
    # A machine for GPUs has no Spark.
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "pyspark" else found(name, *of))
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setattr(sys, "argv", [PROGRAM, "--json", "--device", "cpu"])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit):
        runpy.run_path(PROGRAM, run_name="__main__")
    rows = rows_in(capsys.readouterr().out)
    # How memory ends is the machine's: beside other processes, a rank may be killed before it can say so.
    missed = [row for row in rows.values() if row["status"] == "MISS" and row["name"] != "out of memory"]
    assert missed == []
    assert rows["uneven rows, 2 ranks against 1"]["status"] == rows["mixed precision"]["status"] == "ok"
    assert rows["visibility"]["status"] == rows["NCCL against the host path"]["status"] == "skipped"


@pytest.mark.gpu
@pytest.mark.skipif(not listed_devices(host_gpus()), reason="nvidia-smi lists no GPU on this machine")
def test_check_when_there_is_a_gpu_then_nothing_misses():
    status, rows = checked()
    assert status == 0, rows


def test_check_when_there_is_no_gpu_then_says_so_and_fails(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    status, rows = checked()
    assert status == 1
    assert (rows["devices"]["status"], rows["devices"]["received"]) == ("MISS", "none")
