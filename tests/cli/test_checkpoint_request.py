"""``elephant checkpoint``: a fit that runs hears of the wish, and the program of the checkpoint."""

import threading

import numpy as np
import pytest

from elephant.checkpoint.manager import CheckpointManager, CheckpointWriter
from elephant.checkpoint.state import FitState
from elephant.cli.main import main
from elephant.storage.folder import folder_at


@pytest.fixture
def folder(tmp_path):
    """A folder with a checkpoint of before."""
    kept = tmp_path / "kept"
    CheckpointManager(folder_at(str(kept))).save(FitState(epochs=1, arrays={"model/0": np.zeros(2)}))
    return kept


def test_checkpoint_when_a_fit_runs_then_is_made_and_named(folder, capsys):
    with CheckpointWriter(CheckpointManager(folder_at(str(folder)))) as writer:
        asked = threading.Event()

        def fit():
            # As a coordinator does, between two events.
            while not asked.wait(0.05):
                if writer.is_wanted:
                    writer.keep(FitState(epochs=1, step=7, arrays={"model/0": np.ones(2)}))

        fitting = threading.Thread(target=fit, daemon=True)
        fitting.start()
        try:
            assert main(["checkpoint", str(folder)]) == 0
        finally:
            asked.set()
            fitting.join()
        assert not writer.is_wanted
    said = capsys.readouterr().out
    assert said.startswith("epoch-00000001.step-00000007.") and said.endswith(".json: after epoch 1 and 7 steps\n")
    assert not (folder / "checkpoint.wanted").exists()


def test_checkpoint_when_no_fit_runs_then_says_so_and_leaves_no_wish(folder, capsys):
    assert main(["checkpoint", str(folder), "--timeout", "0.3"]) == 1
    assert "no fit that trains has read the wish" in capsys.readouterr().err
    assert not (folder / "checkpoint.wanted").exists()
