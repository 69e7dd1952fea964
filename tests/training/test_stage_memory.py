"""A model that does not fit the memory of one process trains in four, to the same weights."""

import json
import os
import subprocess
import sys

import keras
import limited_rank
import numpy as np
import pytest
from limited_rank import DEPTH, STAGES, WIDTH, model_of

from elephant.modeling.keras_archive import save_archive

STEPS, DEADLINE_S = 3, 280
# So many times its weights a process may take: with Adam, weights and gradients, a whole model needs four times them.
MULTIPLE = 3


def started(archive, out, multiple):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    # Each arena of malloc reserves address space, of which little is memory.
    environment |= {"MALLOC_ARENA_MAX": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, limited_rank.__file__, str(archive), str(out), str(multiple), str(STEPS)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def tell(process, value):
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


def ended(process):
    """Returns the exit code and what went to standard error."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors


@pytest.fixture
def start():
    processes = []

    def start_one(*arguments):
        processes.append(started(*arguments))
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow(
    "trains 100 MB in six processes; tests/training/test_stage_values.py holds that a stage reads its own"
)
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, and reads Linux' figures of a process")
@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="XLA reserves address space as it likes")
@pytest.mark.timeout(900)
def test_stages_when_the_model_does_not_fit_the_limit_of_one_process_then_train_as_one_without_a_limit(start, tmp_path):
    archive = tmp_path / "model.keras"
    archive.write_bytes(save_archive(model_of(WIDTH, DEPTH)))

    # Without a limit, then with it.
    whole = start(archive, tmp_path / "whole.npz", 0)
    tell(whole, None)
    code, errors = ended(whole)
    assert code == 0, errors
    limited = start(archive, tmp_path / "limited.npz", MULTIPLE)
    tell(limited, None)
    code, errors = ended(limited)
    assert code != 0
    assert any(text in errors for text in ("OOM when allocating", "MemoryError", "bad_alloc")), errors

    stages = [start(archive, tmp_path / "staged.npz", MULTIPLE) for _ in range(STAGES)]
    for rank, process in enumerate(stages):
        tell(process, rank)
    addresses = [json.loads(process.stdout.readline()) for process in stages]
    for process in stages:
        tell(process, addresses)
    for process in stages:
        code, errors = ended(process)
        assert code == 0, errors
    expected, found = (np.load(tmp_path / name) for name in ("whole.npz", "staged.npz"))
    assert expected.files == found.files
    for name in expected.files:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
