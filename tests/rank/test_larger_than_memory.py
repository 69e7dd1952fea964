"""Rows that are several times the memory that a process may take for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A window of 32 MB and some reads of 8 MB are 64 to 71 MB of arrays; the rest is of the framework. Twice as many rows
# took no more: on JAX 102 MB for 840 MB of rows, and 105 MB for 420 MB.
WRITING_MB, ALLOWED_MB = 50, 120


@pytest.mark.slow("writes hundreds of megabytes; tests/data/test_shard.py holds that rows are mapped")
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' figures of a process")
@pytest.mark.timeout(600)
def test_process_when_its_rows_are_four_times_the_allowed_memory_then_its_peak_stays_below_that(tmp_path):
    script = Path(__file__).with_name("memory_process.py")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    # By itself, glibc begins to keep what is freed after the first large arrays: up to 30 MB more, by the run.
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "130000", "1000", "2", "synchronous"],
        capture_output=True,
        env=environment,
        text=True,
        timeout=550,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["num_bytes"] > 4 * ALLOWED_MB * 2**20
    assert told["writing"] < WRITING_MB
    assert told["training"] < ALLOWED_MB
    assert told["left"] == []
