"""``elephant checkpoints``: what it lists, what it finds damaged, and the model that it saves."""

import json

import keras
import numpy as np
import pytest

from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState
from elephant.cli.main import main
from elephant.modeling.variable_paths import paths_in_order, read_state
from elephant.modeling.variables import build_variables, optimizer_names
from elephant.storage.folder import folder_at


def small_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def state_of(model, epochs):
    build_variables(model, None)
    facts = {
        "variables": paths_in_order(model),
        "optimizer_names": optimizer_names(model),
        "optimizers": [],
        "num_workers": 2,
    }
    history = {"loss": [float(epochs - epoch) for epoch in range(epochs)]}
    return FitState(epochs=epochs, arrays=read_state(model), facts=facts, history=history)


@pytest.fixture
def kept(tmp_path):
    """A folder with checkpoints after two and four epochs of a model that has been trained."""
    model, folder = small_model(), tmp_path / "kept"
    x, y = np.ones((8, 3), np.float32), np.zeros((8, 2), np.float32)
    manager = CheckpointManager(folder_at(str(folder)))
    weights = {}
    for epochs in (2, 4):
        model.fit(x, y, epochs=2, verbose=0)
        manager.save(state_of(model, epochs))
        weights[epochs] = [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]
    small_model().save(tmp_path / "layers.keras")
    return folder, weights


def test_checkpoints_when_all_are_whole_then_lists_them_and_exits_with_0(kept, capsys):
    folder, _ = kept
    assert main(["checkpoints", str(folder)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split()[:3] == ["epochs", "files", "bytes"]
    assert [line.split()[:2] for line in lines] == [["2", "whole"], ["4", "whole"]] and "loss=1" in lines[1]
    assert main(["checkpoints", str(folder), "--json"]) == 0
    newest = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert newest["epochs"] == 4 and newest["whole"] and newest["workers"] == 2 and newest["metrics"] == {"loss": 1.0}


def test_checkpoints_when_one_is_damaged_then_names_it_and_saves_the_one_before(kept, tmp_path, capsys):
    folder, weights = kept
    [newest] = folder.glob("epoch-00000004.*.npz")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert main(["checkpoints", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out and f"{newest.name} is not what was written" in out
    saved = tmp_path / "model.keras"
    layers = str(tmp_path / "layers.keras")
    assert main(["checkpoints", str(folder), "--export", str(saved), "--model", layers]) == 0
    loaded = keras.saving.load_model(saved)
    found = [*loaded.get_weights(), *map(np.asarray, loaded.optimizer.variables)]
    for value, wanted in zip(found, weights[2], strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert main(["checkpoints", str(folder), "--export", str(saved), "--model", layers, "--epochs", "4"]) == 1
    assert "expected a checkpoint that is whole" in capsys.readouterr().err


def test_checkpoints_when_the_model_is_another_then_says_so(kept, tmp_path, capsys):
    folder, _ = kept
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
    other.save(tmp_path / "other.keras")
    given = ["checkpoints", str(folder), "--export", str(tmp_path / "model.keras")]
    assert main([*given, "--model", str(tmp_path / "other.keras")]) == 2
    assert "dense/kernel of shape (3, 2), not (3, 5)" in capsys.readouterr().err
    assert not (tmp_path / "model.keras").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--export", "model.keras"], 2, "--export FILE.keras and --model together"),
        (["--model", "m:build"], 2, "--export FILE.keras and --model together"),
        (["--epochs", "2"], 2, "--epochs: expected --export with it"),
        (["--export", "model.h5", "--model", "m:build"], 2, "a name that ends in .keras"),
        (["--export", "model.keras", "--model", "m:build"], 1, "a folder with none"),
        ([], 1, ""),
    ],
)
def test_checkpoints_when_there_are_none_or_arguments_do_not_fit_then_says_so(arguments, code, text, tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path), *arguments]) == code
    assert text in capsys.readouterr().err
