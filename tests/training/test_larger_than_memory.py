"""Rows that are several times the memory that a process may take for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ALLOWED_MB = 100


@pytest.mark.slow("writes hundreds of megabytes; tests/data/test_shard.py holds that rows are mapped")
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' figures of a process")
@pytest.mark.timeout(600)
def test_process_when_its_rows_are_four_times_the_allowed_memory_then_its_peak_stays_below_that(tmp_path):
    script = Path(__file__).with_name("memory_process.py")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "110000", "1000", "2", "synchronous"],
        capture_output=True,
        env=environment,
        text=True,
        timeout=550,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["num_bytes"] > 4 * ALLOWED_MB * 2**20
    assert told["writing"] < ALLOWED_MB / 2
    assert told["training"] < ALLOWED_MB
    assert told["left"] == []
