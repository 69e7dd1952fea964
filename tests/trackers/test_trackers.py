"""Experiment trackers' own callbacks in a real fit, offline: what they have kept, and what they leave behind."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from python_start import python_path

for name in ("comet_ml", "neptune", "neptune_tensorflow_keras", "wandb"):
    pytest.importorskip(name, reason="make test-trackers installs it")

SUPPORT = Path(__file__).parents[1] / "support"
TIMEOUT_S = 400
MARK = "ELEPHANT_TRACKED_FIT"


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.slow("a session of its own, and three trackers")
def test_trackers_when_their_callbacks_are_in_a_fit_then_each_keeps_every_epoch_once_and_nothing_of_it_is_left(
    tmp_path,
):
    keys = {name: secrets.token_hex(20) for name in ("wandb", "comet", "neptune")}
    mark, path = secrets.token_hex(8), python_path(SUPPORT.parents[1], SUPPORT)
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "tracked_fit.py"), str(tmp_path)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": path,
            MARK: mark,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        input=json.dumps(keys),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    told = json.loads(done.stdout.splitlines()[-1])
    # On the driver, all of them: an object that holds a connection or a lock does not travel.
    assert "NeptuneCallback, TensorBoard, LambdaCallback on the driver" in done.stdout + done.stderr
    loss, val_loss = (told["history"][name] for name in ("loss", "val_loss"))
    rates = [float(np.float32(0.01))] * 3
    assert told["wandb"]["epoch/epoch"] == [0, 1, 2] and told["wandb"]["epoch/learning_rate"] == rates
    assert (told["wandb"]["epoch/loss"], told["wandb"]["epoch/val_loss"]) == (loss, val_loss)
    assert (tmp_path / "digits.keras").exists()
    by_epoch = {name: [list(one) for one in enumerate(told["history"][name])] for name in ("loss", "val_loss")}
    assert {name: told["comet"][name] for name in by_epoch} == by_epoch
    # Neptune's takes those of validation from an event that the driver does not hear.
    assert {name: values for name, values in told["neptune"].items() if name.startswith("training/")} == {
        "training/model/learning_rate": rates,
        "training/train/epoch/loss": loss,
    }
    assert told["board"] == by_epoch["loss"]
    # Keys of services are neither sent to workers nor shown.
    assert told["found"] == []
    assert not [name for name, key in keys.items() if key in done.stdout + done.stderr]
    assert left_with(mark) == []


def left_with(mark):
    """Returns the processes that a program has left, by a variable that they inherit."""
    left = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get(MARK) == mark:
                left.append(process.info["cmdline"])
        except (psutil.Error, OSError):
            continue
    return left
